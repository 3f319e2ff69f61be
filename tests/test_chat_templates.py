"""Templates as published render as they do elsewhere; hostile ones end in one clear line."""

from __future__ import annotations

import json
import threading
import tracemalloc
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import pytest
from llama_cpp.llama_chat_format import Jinja2ChatFormatter

from bmoe.chat.messages import ROLES, Message
from bmoe.chat.template import ChatTemplate, chat_template, starts_with_bos
from bmoe.io.errors import BmoeError, FormatError, UsageError
from tests.chat_templates import HOSTILE, PUBLISHED

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.chat_templates import Published

NOON = datetime(2026, 1, 31, 12, 0, tzinfo=UTC)

SYSTEM = Message(role="system", content="Be  brief. ✓")
USER = Message(role="user", content=" What is <b>2 + 2</b>? ")
ANSWER = Message(role="assistant", content="It's 4.\n")
THOUGHTFUL = Message(role="assistant", content="It's 4.", reasoning="Two and two.")
AGAIN = Message(role="user", content="Sure?")
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "The weather at a place",
            "parameters": {
                "type": "object",
                "properties": {
                    "place": {"type": "string"},
                    "unit": {"type": "string", "enum": ["°C", "°F"]},
                    "days": {"type": "array", "items": {"type": "integer"}},
                },
                "required": ["place"],
            },
        },
    }
]
CALL = Message(
    role="assistant",
    content="",
    tool_calls=(
        {
            "id": "abcdefghi",
            "type": "function",
            "function": {"name": "weather", "arguments": {"place": "Rîga"}},
        },
    ),
)
RESULT = Message(role="tool", content="12 °C", tool_call_id="abcdefghi")


def compiled(name: str) -> ChatTemplate:
    published = PUBLISHED[name]
    return chat_template(published.source, bos=published.bos, eos=published.eos, clock=lambda: NOON)


def conversations(published: Published) -> list[list[Message]]:
    """Conversations that a template of these abilities takes."""
    found = [[USER], [USER, ANSWER, AGAIN], [USER, THOUGHTFUL, AGAIN]]
    if published.system:
        found += [[SYSTEM, *messages] for messages in found]
    return found


def elsewhere(
    published: Published, messages: Sequence[Message], *, think: bool, tools: object, generation: bool
) -> str:
    """What llama-cpp-python makes of it."""
    # Its types allow neither the switches of templates nor another clock.
    formatter: Any = Jinja2ChatFormatter(
        published.source, published.eos, published.bos, add_generation_prompt=generation
    )
    formatter.strftime_now = NOON.strftime
    switches = {"enable_thinking": think, "thinking": think}
    spelled = [message.as_template() for message in messages]
    prompt: str = formatter(messages=spelled, tools=tools, **switches).prompt
    return prompt


def test_there_are_twenty_published_templates() -> None:
    assert len(PUBLISHED) >= 20


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_template_renders_as_llama_cpp_python_renders_it(name: str) -> None:
    published = PUBLISHED[name]
    template = compiled(name)
    for messages in conversations(published):
        for think in (True, False):
            for generation in (True, False):
                ours = template.render(messages, think=think, add_generation_prompt=generation)
                assert ours == elsewhere(published, messages, think=think, tools=None, generation=generation)
                assert all(message.content.strip() in ours for message in messages)


@pytest.mark.parametrize("name", [name for name, published in PUBLISHED.items() if published.tools])
def test_a_template_with_tools_renders_them_as_llama_cpp_python_does(name: str) -> None:
    published = PUBLISHED[name]
    for messages in ([USER], [SYSTEM, USER], [USER, CALL, RESULT], [USER, CALL, RESULT, ANSWER, AGAIN]):
        if CALL in messages and name in {"lfm-2", "glm-4.5", "granite-3"}:
            continue  # these shapes have no calls
        ours = compiled(name).render(messages, tools=TOOLS)
        assert ours == elsewhere(published, messages, think=True, tools=TOOLS, generation=True)
        assert "weather" in ours
        assert "\\u" not in ours, "characters are written as they are"


def test_chatml_renders_to_these_characters() -> None:
    assert compiled("chatml").render([SYSTEM, USER]) == (
        "<|im_start|>system\nBe  brief. ✓<|im_end|>\n"
        "<|im_start|>user\n What is <b>2 + 2</b>? <|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_harmony_renders_to_these_characters() -> None:
    assert (
        compiled("gpt-oss")
        .render([USER], tools=TOOLS)
        .endswith(
            "<|start|>developer<|message|># Tools\n\n## functions\n\nnamespace functions {\n\n"
            "// The weather at a place\n"
            'type weather = (_: {\nplace: string, unit?: "°C" | "°F", days?: number[]}) => any;\n\n'
            "} // namespace functions<|end|>"
            "<|start|>user<|message|> What is <b>2 + 2</b>? <|end|><|start|>assistant"
        )
    )


def test_the_date_comes_from_the_given_clock() -> None:
    assert "Today Date: 31 Jan 2026" in compiled("llama-3.1").render([USER])
    assert "Current date: 2026-01-31" in compiled("gpt-oss").render([USER])


def test_without_a_clock_it_is_the_date_of_today() -> None:
    template = chat_template("{{ strftime_now('%Y') }}", bos="", eos="")
    assert int(template.render([USER])) >= 2025


@pytest.mark.parametrize("name", [name for name in PUBLISHED if name not in {"lfm-2.5", "magistral"}])
def test_an_answer_is_continued_where_it_stopped(name: str) -> None:
    """The prompt ends with exactly the given text and holds no end of turn after it."""
    started = "It's "
    prompt = compiled(name).render([USER], continue_final=started)
    assert prompt.endswith(started)
    whole = compiled(name).render(
        [USER, Message(role="assistant", content="It's  4")], add_generation_prompt=False
    )
    assert whole.startswith(prompt)


def test_a_template_that_hides_the_last_answer_cannot_continue_it() -> None:
    template = chat_template("{{ messages[0].content }}", bos="", eos="")
    with pytest.raises(UsageError, match="does not show the answer"):
        template.render([USER], continue_final="It's ")


def test_what_a_template_refuses_is_a_usage_error_with_its_words() -> None:
    with pytest.raises(UsageError, match="refuses this conversation: System role not supported"):
        compiled("gemma-2").render([SYSTEM, USER])
    with pytest.raises(UsageError, match="must alternate"):
        compiled("mistral-v1").render([USER, USER])


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_prompt_that_spells_bos_is_known(name: str) -> None:
    published = PUBLISHED[name]
    rendered = compiled(name).render([USER])
    spells = bool(published.bos) and rendered[: len(published.bos)] == published.bos
    assert starts_with_bos(rendered, published.bos) == spells


def test_no_bos_is_never_there() -> None:
    assert not starts_with_bos("text", "")
    assert not starts_with_bos("", "<s>")


def test_a_long_conversation_is_within_the_budget() -> None:
    """A thousand turns of a thousand characters, in the template that looks back the most."""
    turn = "word " * 200
    messages = [Message(role=("user", "assistant")[i % 2], content=turn) for i in range(1001)]
    for name in ("qwen-3", "gpt-oss", "llama-3", "gemma-4"):
        assert len(compiled(name).render(messages)) > 1_000_000


def test_json_has_the_options_that_templates_use() -> None:
    source = (
        "{{ tools|tojson }} {{ tools|tojson(indent=2) }} {{ tools|tojson(separators=(',', ':')) }}"
        "{{ tools|tojson(ensure_ascii=true, sort_keys=true) }}{{ '<a href=\"x\">&'|tojson }}"
    )
    ours = chat_template(source, bos="", eos="").render([USER], tools=TOOLS)
    assert ours == " ".join(
        [json.dumps(TOOLS, ensure_ascii=False), json.dumps(TOOLS, ensure_ascii=False, indent=2), ""]
    ) + json.dumps(TOOLS, ensure_ascii=False, separators=(",", ":")) + json.dumps(
        TOOLS, sort_keys=True
    ) + json.dumps('<a href="x">&')


@pytest.mark.parametrize(
    ("source", "line"),
    [
        ("{% if %}", 1),
        ("a\nb\n{{ x", 3),
        ("\n{% for %}", 2),
        ("{{ 'x'|nope }}", 1),
        ("\n\n{{ 1 is nope }}", 3),
        ("{% endif %}", 1),
        ("{% do 1 %}", 1),
    ],
)
def test_a_syntax_error_names_its_line(source: str, line: int) -> None:
    with pytest.raises(FormatError, match=f"chat template, line {line}: ") as caught:
        chat_template(source, bos="", eos="")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_template_ends_in_one_clear_line(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """None takes the time or the memory that it asks for: those are refused by count, not by clock."""
    # A tenth of the budget takes a tenth of the time to spend; the next test spends all of it.
    monkeypatch.setattr("bmoe.chat.meter._BUDGET_UNITS", 100_000)
    with pytest.raises(BmoeError) as caught:
        chat_template(HOSTILE[name], bos="", eos="").render([USER])
    line = str(caught.value)
    assert "chat template" in line
    assert line.isprintable()
    assert len(line) < 700


def test_the_whole_budget_is_spent_in_bearable_time_and_memory() -> None:
    """Counted, not timed: what a loop in a loop may do, and what a template may hold."""
    template = chat_template(HOSTILE["a loop in a loop"], bos="", eos="")
    tracemalloc.start()
    try:
        with pytest.raises(FormatError, match="line 1: refused, since it does too much work"):
            template.render([USER])
        with pytest.raises(FormatError, match="builds a text that is too long"):
            chat_template(HOSTILE["doubled text"], bos="", eos="").render([USER])
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak_bytes < 64 << 20


def test_what_a_template_reaches_for_in_python_is_undefined() -> None:
    for source in ("{{ messages.__class__ }}", "{{ self.__dict__ }}", "{{ namespace.__init__ }}"):
        assert chat_template(source, bos="", eos="").render([USER]) == ""


def test_a_template_renders_on_several_threads_at_once() -> None:
    """Each render has a meter of its own."""
    template = compiled("qwen-3")
    expected = template.render([USER])
    hostile = chat_template(HOSTILE["a loop in a loop"], bos="", eos="")
    seen: list[str] = []

    def render() -> None:
        seen.extend(template.render([USER]) for _ in range(20))

    threads = [threading.Thread(target=render) for _ in range(3)]
    for thread in threads:
        thread.start()
    with pytest.raises(FormatError, match="too much work"):
        hostile.render([USER])
    for thread in threads:
        thread.join()
    assert seen == [expected] * 60


def test_a_loop_knows_its_length_and_neighbours() -> None:
    """The meter around a loop's items leaves what `loop` tells as it was."""
    source = (
        "{% for m in messages if m.role != 'system' %}{{ loop.index }}/{{ loop.length }}"
        "{{ (loop.previtem or m).role }}{{ (loop.nextitem or m).role }}{{ '.' if loop.last }}"
        "{{ loop.changed(m.role) }};"
        "{% else %}none{% endfor %}"
    )
    template = chat_template(source, bos="", eos="")
    assert template.render([SYSTEM, USER, ANSWER]) == "1/2userassistantTrue;2/2userassistant.True;"
    assert template.render([SYSTEM]) == "none"


def _nested(depth: int) -> dict[str, object]:
    return {"a": _nested(depth - 1) if depth else 1}


@pytest.mark.parametrize(
    "wrong",
    [
        {"role": "robot", "content": ""},
        {"role": "user", "content": None},
        {"role": "user", "content": [{"type": "text"}]},
        {"role": "user", "content": "x", "reasoning": "y"},
        {"role": "user", "content": "x", "tool_calls": ({},)},
        {"role": "assistant", "content": "x", "reasoning": 1},
        {"role": "assistant", "content": "x", "tool_calls": ("call",)},
        {"role": "tool", "content": "x", "name": 1},
        {"role": "assistant", "content": "x", "tool_calls": (_nested(99),)},
    ],
)
def test_a_message_that_no_template_could_render_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(UsageError, match=r"a message|tool call"):
        Message(**wrong)  # type: ignore[arg-type]  # that is the test


def test_a_message_spells_reasoning_under_both_names() -> None:
    assert THOUGHTFUL.as_template() == {
        "role": "assistant",
        "content": "It's 4.",
        "reasoning_content": "Two and two.",
        "thinking": "Two and two.",
    }
    assert USER.as_template() == {"role": "user", "content": USER.content}
    assert RESULT.as_template()["tool_call_id"] == "abcdefghi"
    assert len(ROLES) == 5
