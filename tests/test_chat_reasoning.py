"""Reasoning and answer are told apart while they stream, however the stream is cut."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bmoe.chat.harmony import HarmonyParser
from bmoe.chat.messages import Message
from bmoe.chat.reasoning import PlainParser, TagParser, parser_for
from bmoe.chat.tags import TAG_PAIRS, declared_pairs
from bmoe.chat.template import ChatTemplate, chat_template
from bmoe.chat.thinking import no_think, no_think_prompt, probe
from tests.chat_templates import PUBLISHED

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from bmoe.chat.reasoning import OutputParser
    from bmoe.chat.tags import TagPair

USER = Message(role="user", content="Hello")
THINK, GEMMA = TAG_PAIRS[0], next(pair for pair in TAG_PAIRS if pair.opens == "<|channel>thought")
OPEN_HEADER = "<|start|>user<|message|>Hello<|end|><|start|>assistant"


class Control(str):
    """A piece that is one control token."""

    __slots__ = ()


def total(parser: OutputParser, pieces: Sequence[str]) -> tuple[str, str]:
    """(answer, reasoning) of an output in these pieces."""
    deltas = [parser.feed(piece, control=isinstance(piece, Control)) for piece in pieces]
    deltas.append(parser.finish())
    return "".join(delta.text for delta in deltas), "".join(delta.reasoning for delta in deltas)


def compiled(name: str) -> ChatTemplate:
    published = PUBLISHED[name]
    noon = datetime(2026, 1, 31, 12, tzinfo=UTC)
    return chat_template(published.source, bos=published.bos, eos=published.eos, clock=lambda: noon)


# Thinking on request


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_probe_finds_what_the_template_offers(name: str) -> None:
    assert probe(compiled(name)) == PUBLISHED[name].control


def test_a_template_that_fails_on_the_probe_counts_as_having_a_switch() -> None:
    assert probe(chat_template("{{ raise_exception('no') }}<think>", bos="", eos="")) == "template"


def test_harmony_without_thinking_opens_the_final_channel() -> None:
    prompt = no_think_prompt(compiled("gpt-oss"), [USER])
    assert prompt.endswith(OPEN_HEADER + "<|channel|>final<|message|>")


def test_an_always_thinking_template_that_shows_its_turns_gets_empty_reasoning() -> None:
    found = no_think(compiled("qwen-3-thinking"), [USER])
    assert found.prompt.endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    assert found.control == "prefill"


def test_a_switch_is_used_as_it_is() -> None:
    template = compiled("qwen-3")
    found = no_think(template, [USER])
    assert (found.prompt, found.control) == (template.render([USER], think=False), "template")


def test_a_model_that_thinks_as_it_likes_is_said_to() -> None:
    template = compiled("lfm-2.5")
    found = no_think(template, [USER])
    assert (found.prompt, found.control) == (template.render([USER]), "none")


def test_what_the_probe_said_before_saves_asking_again() -> None:
    template = compiled("gpt-oss")
    assert no_think(template, [USER], control="prefill") == no_think(template, [USER])


def test_a_budget_of_thought_is_a_switch_too() -> None:
    """Seed-OSS counts its thoughts in tokens; no thinking is a budget of none."""
    source = "{{ messages[0].content }}{{ ' directly' if thinking_budget == 0 }}<seed:think>"
    assert probe(chat_template(source, bos="", eos="")) == "template"


# The choice of a parser


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("smollm2", PlainParser),
        ("llama-3.1", PlainParser),
        ("qwen-3", TagParser),
        ("lfm-2.5", TagParser),
        ("magistral", TagParser),
        ("gemma-4", TagParser),
        ("granite-3", TagParser),
        ("gpt-oss", HarmonyParser),
    ],
)
def test_the_template_decides_the_parser(name: str, expected: type) -> None:
    template = compiled(name)
    parser = parser_for(template, prompt=template.render([USER]), think=True)
    assert type(parser) is expected


def test_without_a_template_all_is_answer() -> None:
    parser = parser_for(None, prompt="<think>", think=True)
    assert total(parser, ["<think>a</think>", Control("<eot>"), "b"]) == ("<think>a</think>b", "")


@pytest.mark.parametrize("known", TAG_PAIRS, ids=lambda pair: pair.opens)
def test_every_pair_of_the_table_is_declared_and_parsed(known: TagPair) -> None:
    assert known in declared_pairs(f"{{# {known.declared_by[0]} #}}")
    output = f"{known.opens}\nhm, <b>\n{known.closes}\n\nYes {known.opens}"
    assert total(TagParser([known]), [output]) == (f"Yes {known.opens}", "hm, <b>\n")
    assert total(TagParser([known]), list(output)) == (f"Yes {known.opens}", "hm, <b>\n")


@pytest.mark.parametrize(
    ("name", "think", "output", "expected"),
    [
        ("qwen-3", True, "<think>\nhm\n</think>\n\nYes", ("Yes", "hm\n")),
        ("qwen-3", False, "Yes", ("Yes", "")),
        ("qwen-3-thinking", True, "hm\n</think>\n\nYes", ("Yes", "hm\n")),
        ("deepseek-r1", True, "hm\n</think>\n\nYes", ("Yes", "hm\n")),
        ("deepseek-r1", True, "hm, no end", ("", "hm, no end")),
        ("deepseek-v3.1", True, "hm</think>Yes", ("Yes", "hm")),
        ("deepseek-v3.1", False, "Yes", ("Yes", "")),
        ("gemma-4", True, "<|channel>thought\nhm\n<channel|>Yes", ("Yes", "hm\n")),
        ("gemma-4", False, "Yes", ("Yes", "")),
        (
            "gpt-oss",
            True,
            "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>Yes",
            ("Yes", "hm"),
        ),
        ("smollm2", True, "<think>hm</think>Yes", ("<think>hm</think>Yes", "")),
    ],
)
def test_an_output_continues_what_its_prompt_opened(
    name: str, think: bool, output: str, expected: tuple[str, str]
) -> None:
    template = compiled(name)
    parser = parser_for(template, prompt=template.render([USER], think=think), think=think)
    assert total(parser, list(output)) == expected


def test_what_the_user_says_about_tags_opens_nothing() -> None:
    template = compiled("qwen-3")
    prompt = template.render([Message(role="user", content="What is <think>")])
    assert total(parser_for(template, prompt=prompt, think=True), ["A tag."]) == ("A tag.", "")


# Tags


@pytest.mark.parametrize(
    ("prompt", "pieces", "expected"),
    [
        ("", ["<think>a</think>b"], ("b", "a")),
        ("", [Control("<think>"), "a", Control("</think>"), "b"], ("b", "a")),
        ("", [" \n<th", "ink>\n a", " </thi", "nk> \n b "], ("b ", "a ")),
        ("", ["<think></think>b"], ("b", "")),
        ("", ["<think>a"], ("", "a")),
        ("", ["<think>a</thi"], ("", "a</thi")),
        ("", ["<thi"], ("<thi", "")),
        ("", ["<thin air"], ("<thin air", "")),
        ("", [" \n "], (" \n ", "")),
        ("", ["  b"], ("  b", "")),
        ("", ["b <think>a</think>"], ("b <think>a</think>", "")),
        ("", ["b </think> c"], ("b </think> c", "")),
        ("", ["<think>a</think>b<think>c</think>"], ("b<think>c</think>", "a")),
        ("", ["<think>a</think>\n<think>c</think>b"], ("b", "ac")),
        ("", ["b", Control("<think>"), "a", Control("</think>"), " c"], ("bc", "a")),
        ("", ["<think>a", Control("<|im_sep|>"), "c</think>b", Control("<|im_end|>")], ("b", "ac")),
        ("", [Control("</think>"), "b"], ("b", "")),
        ("", ["<think>a<think>c</think>b"], ("b", "a<think>c")),
        ("x<think>\n", ["a</think>b"], ("b", "a")),
        ("x<think>\n", ["<think>\na</think>b"], ("b", "a")),
        ("x<think>\n", ["<thin"], ("", "<thin")),
        ("x<think>\n\n</think>\n\n", ["\nb"], ("b", "")),
        ("x<think>\n\n</think>\n\n", ["<think>a</think>b"], ("b", "a")),
    ],
)
def test_reasoning_stands_between_tags(prompt: str, pieces: list[str], expected: tuple[str, str]) -> None:
    assert total(TagParser([THINK], prompt=prompt), pieces) == expected


@pytest.mark.parametrize(
    ("pieces", "expected"),
    [
        ([Control("<|channel>"), "thought", "\na", Control("<channel|>"), "b"], ("b", "a")),
        ([Control("<|channel>"), "tho", "ught\na", Control("<channel|>"), "b"], ("b", "a")),
        (["b ", Control("<|channel>"), "thought\na", Control("<channel|>"), "c"], ("b c", "a")),
        ([Control("<|channel>"), "thorn"], ("thorn", "")),
        ([Control("<|channel>"), Control("<|channel>"), "thoughta"], ("", "a")),
        ([Control("<|channel>")], ("", "")),
    ],
)
def test_a_control_token_may_be_the_first_part_of_a_tag(pieces: list[str], expected: tuple[str, str]) -> None:
    assert total(TagParser([GEMMA]), pieces) == expected


def test_what_cannot_become_a_tag_is_shown_at_once() -> None:
    parser = TagParser([THINK])
    assert parser.feed("<", control=False).text == ""
    assert parser.feed("b", control=False).text == "<b"
    assert parser.feed("><think", control=False).text == "><think"


# Harmony


def header(channel: str) -> list[str]:
    return [Control("<|channel|>"), channel, Control("<|message|>")]


NEXT = [Control("<|end|>"), Control("<|start|>"), "assistant"]


@pytest.mark.parametrize(
    ("pieces", "expected"),
    [
        ([*header("analysis"), "a", *NEXT, *header("final"), "b", Control("<|return|>")], ("b", "a")),
        ([*header("analysis"), "a", *NEXT, *header("analysis"), "c"], ("", "a\n\nc")),
        ([*header("commentary"), "I look.", *NEXT, *header("final"), "b"], ("I look.\n\nb", "")),
        ([*header("commentary to=functions.f "), "{}", Control("<|call|>")], ("", "")),
        ([" to=functions.f", *header("commentary"), "{}", Control("<|call|>")], ("", "")),
        (
            [
                Control("<|channel|>"),
                "commentary to=f ",
                Control("<|constrain|>"),
                "json",
                Control("<|message|>"),
                "{}",
            ],
            ("", ""),
        ),
        ([*header("analysis to=python code"), "1+1"], ("", "")),
        ([Control("<|message|>"), "b"], ("b", "")),
        (["b without a header"], ("b without a header", "")),
        ([*header("final"), "b", Control("<|end|>"), "c"], ("b\n\nc", "")),
        ([*header("analysis"), "a", Control("<|end|>"), *header("final"), "b"], ("b", "a")),
        ([*header("analysis"), "a", *header("final"), "b"], ("b", "a")),
        ([*header("analysis"), "a", *NEXT], ("", "a")),
        ([*header("analysis"), "a", Control("<|end|>"), Control("<|start|>"), "assi"], ("", "a")),
        ([Control("<|channel|>"), "anal"], ("", "")),
        ([" to=functions"], ("", "")),
        ([*header("final"), "say <|channel|>analysis", " <|end|>"], ("say <|channel|>analysis <|end|>", "")),
        ([*header("final"), "a", Control("<|reserved_1|>"), "b"], ("ab", "")),
        (
            ["<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>final<|message|>b<|"],
            ("b<|", "a"),
        ),
    ],
)
def test_harmony_channels_become_reasoning_and_answer(pieces: list[str], expected: tuple[str, str]) -> None:
    assert total(HarmonyParser(OPEN_HEADER), pieces) == expected


def test_a_long_text_without_a_header_streams() -> None:
    parser = HarmonyParser(OPEN_HEADER)
    shown = [parser.feed("word ", control=False).text for _ in range(100)]
    assert "".join(shown) + parser.finish().text == "word " * 100
    assert shown[-1] == "word "


def test_harmony_goes_on_in_the_channel_that_the_prompt_opened() -> None:
    opened = OPEN_HEADER + "<|channel|>final<|message|>It is"
    assert total(HarmonyParser(opened), [" so", Control("<|return|>")]) == (" so", "")
    opened = OPEN_HEADER + "<|channel|>analysis<|message|>"
    assert total(HarmonyParser(opened), ["a", *NEXT, *header("final"), "b"]) == ("b", "a")
    opened = OPEN_HEADER + "<|channel|>anal"
    assert total(HarmonyParser(opened), ["ysis", Control("<|message|>"), "a"]) == ("", "a")


# Properties

PARSERS: dict[str, Callable[[], OutputParser]] = {
    "tags": lambda: TagParser([THINK]),
    "tags, opened": lambda: TagParser([THINK], prompt="x<think>\n"),
    "tags, closed": lambda: TagParser([THINK], prompt="x<think></think>"),
    "all tags": lambda: TagParser(TAG_PAIRS),
    "gemma": lambda: TagParser([GEMMA]),
    "harmony": lambda: HarmonyParser(OPEN_HEADER),
    "harmony, final": lambda: HarmonyParser(OPEN_HEADER + "<|channel|>final<|message|>"),
    "plain": PlainParser,
}
FRAGMENTS = [
    *(
        "<think>",
        "</think>",
        "<thi",
        "</",
        "<",
        " ",
        "\n",
        "word",
        "é✓",
        "thought",
        "<|channel>",
        "<channel|>",
    ),
    *("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "assistant", "analysis", "final", " to=f", "<|"),
    "long " * 60,
]
outputs = st.lists(st.sampled_from(FRAGMENTS), max_size=12).map("".join)


@pytest.mark.parametrize("name", PARSERS)
@given(text=outputs, data=st.data())
def test_any_cut_of_an_output_gives_the_same(name: str, text: str, data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert total(PARSERS[name](), pieces) == total(PARSERS[name](), [text])


@pytest.mark.parametrize("name", PARSERS)
@given(
    pieces=st.lists(
        st.one_of(st.sampled_from(FRAGMENTS), st.sampled_from(FRAGMENTS).map(Control)), max_size=10
    ),
    ended=st.integers(0, 10),
)
def test_what_was_shown_stays_when_more_comes(name: str, pieces: list[str], ended: int) -> None:
    """What an output had shown before its end is how any longer output begins, on both sides."""
    parser = PARSERS[name]()
    before = [parser.feed(piece, control=isinstance(piece, Control)) for piece in pieces[:ended]]
    text, reasoning = total(PARSERS[name](), pieces)
    assert text.startswith("".join(delta.text for delta in before))
    assert reasoning.startswith("".join(delta.reasoning for delta in before))


@pytest.mark.parametrize("name", PARSERS)
@given(text=outputs)
def test_nothing_but_tags_headers_and_space_is_lost(name: str, text: str) -> None:
    """The words of an output are in what is shown, in their order, on one side or the other."""
    if name.startswith("harmony"):
        return  # headers and calls are meant to be left out; its cases are above
    answer, reasoning = total(PARSERS[name](), [text])
    assert answer.count("word") + reasoning.count("word") == text.count("word")
    assert answer.count("é✓") + reasoning.count("é✓") == text.count("é✓")


@pytest.mark.parametrize("name", PARSERS)
def test_an_endless_output_costs_each_character_once(name: str) -> None:
    """A million characters that could begin a tag, one at a time: minutes if each looked back."""
    parser = PARSERS[name]()
    shown = 0
    for piece in ["<", " ", "</", "\n"] * 25_000 + [" " * 500_000, "x" * 500_000]:
        delta = parser.feed(piece, control=False)
        shown += len(delta.text) + len(delta.reasoning)
    delta = parser.finish()
    assert shown + len(delta.text) + len(delta.reasoning) >= 1_000_000
