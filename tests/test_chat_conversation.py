"""Conversation files come back as they were saved, and survive whatever interrupts a save."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bmoe.chat.conversation import (
    SIZE_LIMIT_BYTES,
    Conversation,
    load_conversation,
    save_conversation,
    utc_now,
)
from bmoe.chat.messages import ROLES, Message
from bmoe.io.errors import FileError, FormatError, UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parent.parent
SCHEMA = ROOT / "docs/schema/conversation.v1.schema.json"
VALIDATOR = jsonschema.Draft202012Validator(json.loads(SCHEMA.read_text()))
NOON = "2026-01-31T12:00:00Z"
LATER = "2026-01-31T12:34:56Z"
MESSAGES = (
    Message(role="user", content="What is 2 + 2?\n"),
    Message(role="assistant", content="It's 4 ✓", reasoning="Two\u2028and two."),
    Message(role="user", content="The weather?"),
    Message(
        role="assistant",
        content="",
        tool_calls=(
            {"id": "1", "function": {"name": "weather", "arguments": {"place": "Rîga", "days": [1]}}},
        ),
    ),
    Message(role="tool", content="12 °C", name="weather", tool_call_id="1"),
)

text = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | text,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(text, inner, max_size=3),
    max_leaves=5,
)


@st.composite
def messages(draw: st.DrawFn) -> Message:
    role = draw(st.sampled_from(ROLES))
    own = role == "assistant"
    return Message(
        role=role,
        content=draw(text),
        reasoning=draw(st.none() | text) if own else None,
        tool_calls=tuple(draw(st.lists(st.dictionaries(text, json_values, max_size=3), max_size=2)))
        if own
        else (),
        name=draw(st.none() | text),
        tool_call_id=draw(st.none() | text),
    )


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "talk.json"


def test_a_conversation_comes_back_as_it_was_saved(path: Path) -> None:
    saved = save_conversation(path, MESSAGES, model="m", system="Be brief.", created=NOON, now=LATER)
    assert saved == Conversation(
        model="m", system="Be brief.", messages=MESSAGES, created=NOON, updated=LATER
    )
    assert load_conversation(path) == saved


@given(said=st.lists(messages(), max_size=4), system=st.none() | text, model=text)
def test_any_conversation_comes_back_and_fits_the_schema(
    tmp_path_factory: pytest.TempPathFactory, said: list[Message], system: str | None, model: str
) -> None:
    path = tmp_path_factory.getbasetemp() / "any.json"
    saved = save_conversation(path, said, model=model, system=system, now=NOON)
    assert load_conversation(path) == saved
    VALIDATOR.validate(json.loads(path.read_text()))


def test_the_file_reads_well(path: Path) -> None:
    """Literally: what a person sees in an editor."""
    save_conversation(path, MESSAGES[:2], model="m.gguf", now=NOON)
    assert path.read_text() == (
        "{\n"
        '  "format": "bmoe-conversation",\n'
        '  "schema": 1,\n'
        '  "model": "m.gguf",\n'
        '  "created": "2026-01-31T12:00:00Z",\n'
        '  "updated": "2026-01-31T12:00:00Z",\n'
        '  "system": null,\n'
        '  "messages": [\n'
        "    {\n"
        '      "role": "user",\n'
        '      "content": "What is 2 + 2?\\n"\n'
        "    },\n"
        "    {\n"
        '      "role": "assistant",\n'
        '      "content": "It\'s 4 ✓",\n'
        '      "reasoning": "Two\u2028and two."\n'
        "    }\n"
        "  ]\n"
        "}\n"
    )


def test_the_present_is_spelled_as_files_spell_it(path: Path) -> None:
    saved = save_conversation(path, [], model="m")
    assert saved.created == saved.updated
    assert saved.created <= utc_now()
    assert load_conversation(path) == saved


def test_a_new_file_is_its_owners_and_an_old_one_keeps_its_permissions(path: Path) -> None:
    before = os.umask(0)
    try:
        save_conversation(path, MESSAGES, model="m")
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        path.chmod(0o640)
        save_conversation(path, MESSAGES, model="m")
        assert stat.S_IMODE(path.stat().st_mode) == 0o640
    finally:
        os.umask(before)


def test_a_symlink_stays_one(path: Path, tmp_path: Path) -> None:
    link = tmp_path / "link.json"
    link.symlink_to(path)
    save_conversation(link, MESSAGES, model="m", now=NOON)
    assert link.is_symlink()
    assert load_conversation(path) == load_conversation(link)


# Runs in a process of its own that kills itself at the call named by argv[2] on the way to the new file.
KILLED_SAVE = """
import os, signal, sys
from bmoe.chat.conversation import save_conversation
from bmoe.chat.messages import Message
original = getattr(os, sys.argv[2])
def killed(*args):
    if sys.argv[3] == "after":
        original(*args)
    os.kill(os.getpid(), signal.SIGKILL)
setattr(os, sys.argv[2], killed)
save_conversation(sys.argv[1], [Message(role="user", content="new" * 99999)], model="m")
"""


@pytest.mark.parametrize(
    ("call", "when", "survivor"),
    [
        ("fchmod", "before", "old"),
        ("fsync", "before", "old"),
        ("rename", "before", "old"),
        ("rename", "after", "new"),
    ],
)
def test_a_save_killed_at_any_moment_leaves_a_whole_file(
    path: Path, call: str, when: str, survivor: str
) -> None:
    save_conversation(path, [Message(role="user", content="old")], model="m")
    command = [sys.executable, "-c", KILLED_SAVE, str(path), call, when]
    done = subprocess.run(command, cwd=ROOT, check=False)
    assert done.returncode == -signal.SIGKILL
    assert load_conversation(path).messages[0].content[:3] == survivor


def test_a_save_is_durable_before_it_is_visible_and_the_name_after(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []

    def recorded(name: str, original: object) -> object:
        def call(*args: object) -> object:
            calls.append(name)
            return original(*args)  # type: ignore[operator]  # os functions of several signatures

        return call

    for name in ("fsync", "rename"):
        monkeypatch.setattr(os, name, recorded(name, getattr(os, name)))
    save_conversation(path, MESSAGES, model="m")
    assert calls == ["fsync", "rename", "fsync"]


def test_a_failed_save_leaves_the_old_file_and_nothing_else(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_conversation(path, MESSAGES, model="m", now=NOON)

    def full(_fd: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(FileError, match=r"talk\.json: cannot be written: No space left on device"):
        save_conversation(path, [], model="m")
    assert load_conversation(path).messages == MESSAGES
    assert [entry.name for entry in path.parent.iterdir()] == ["talk.json"]


def test_what_cannot_be_saved_is_refused_before_anything_is_written(path: Path) -> None:
    with pytest.raises(UsageError, match="half a surrogate pair"):
        save_conversation(path, [Message(role="user", content="\ud800")], model="m")
    with pytest.raises(UsageError, match="not JSON serializable"):
        save_conversation(
            path, [Message(role="assistant", content="", tool_calls=({"a": object()},))], model="m"
        )
    with pytest.raises(UsageError, match="the number nan"):
        save_conversation(
            path, [Message(role="assistant", content="", tool_calls=({"a": float("nan")},))], model="m"
        )
    assert not path.exists()


def test_a_folder_is_no_conversation(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="not a regular file"):
        save_conversation(tmp_path, MESSAGES, model="m")
    with pytest.raises(FileError, match=r"cannot be read|not a regular file"):
        load_conversation(tmp_path)
    with pytest.raises(FileError, match=r"none\.json: cannot be read: No such file"):
        load_conversation(tmp_path / "none.json")
    with pytest.raises(FileError, match="cannot be written: No such file"):
        save_conversation(tmp_path / "none" / "talk.json", MESSAGES, model="m")


def test_a_pipe_is_no_conversation(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(FileError, match="not a regular file"):
        load_conversation(pipe)


def good() -> dict[str, object]:
    return {
        "format": "bmoe-conversation",
        "schema": 1,
        "model": "m",
        "created": NOON,
        "updated": NOON,
        "system": None,
        "messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}],
    }


def broken() -> Iterator[tuple[str, dict[str, object], str]]:
    """(what is wrong, the document, what the error says): all of these the schema refuses too."""

    def changed(**fields: object) -> dict[str, object]:
        return {**good(), **fields}

    def without(field: str) -> dict[str, object]:
        return {key: value for key, value in good().items() if key != field}

    def second(message: object) -> dict[str, object]:
        return changed(messages=[{"role": "user", "content": "x"}, message])

    yield "format", changed(format="other"), r"format: not a conversation file; expected 'bmoe-conversation'"
    yield "no format", without("format"), r"format: not a conversation file"
    yield "schema", changed(schema=2), r"schema: wrong value; expected 1, got 2"
    yield "true schema", changed(schema=True), r"schema: wrong value; expected 1, got True"
    yield "no schema", without("schema"), r"schema: missing; expected 1"
    yield "model", changed(model=1), r"model: wrong value; expected text, got 1"
    yield "system", changed(system=["x"]), r"system: wrong value; expected text, got a list"
    yield "time", changed(created="today"), r"created: no time; expected YYYY.*got 'today'"
    yield "no time", without("updated"), r"updated: missing; expected text"
    yield "extra", changed(extra=1), r"extra: unknown field; expected format, schema,"
    yield "no messages", without("messages"), r"messages: missing; expected a list"
    yield "messages", changed(messages={}), r"messages: wrong value; expected a list, got an object"
    yield "message", second("hi"), r"messages\[1\]: wrong type; expected an object, got text"
    yield "no role", second({"content": "y"}), r"messages\[1\]\.role: missing; expected text"
    yield "role", second({"role": "robot", "content": ""}), r"messages\[1\]: a message has role 'robot'"
    yield "no content", second({"role": "user"}), r"messages\[1\]\.content: missing"
    yield "content", second({"role": "user", "content": 3}), r"messages\[1\]\.content: .* text, got 3"
    yield (
        "reasoning",
        second({"role": "user", "content": "", "reasoning": "x"}),
        r"messages\[1\]: a message of role user carries reasoning",
    )
    yield (
        "calls",
        second({"role": "assistant", "content": "", "tool_calls": ["x"]}),
        r"messages\[1\]\.tool_calls: .*expected a list of objects",
    )
    yield (
        "field",
        second({"role": "user", "content": "", "colour": "x"}),
        r"messages\[1\]\.colour: unknown field; expected role, content",
    )


@pytest.mark.parametrize(
    ("document", "line"),
    [pytest.param(document, line, id=name) for name, document, line in broken()],
)
def test_a_file_that_breaks_the_format_says_where(path: Path, document: dict[str, object], line: str) -> None:
    path.write_text(json.dumps(document))
    with pytest.raises(FormatError, match=line) as caught:
        load_conversation(path)
    assert str(caught.value).startswith(str(path))
    with pytest.raises(jsonschema.ValidationError):
        VALIDATOR.validate(document)


@pytest.mark.parametrize(
    ("content", "line"),
    [
        (b"", r"line 1 column 1: not JSON"),
        (b'{\n  "format": nope\n}', r"line 2 column 13: not JSON: Expecting value"),
        (b'{"format": "bmoe-conversation", "format": "x"}', r"'format' appears twice"),
        (b'{"format": NaN}', r"NaN is no number"),
        (b"\xff{}", r"at byte 0: not UTF-8"),
        (b"[]", r"format: not a conversation file"),
        (b"[" * 100_000, r"nest too deeply"),
        (b"[" * 200 + b"]" * 200, r"nest too deeply"),
        (b"[1e999]", r"the number inf"),
        (b'["\\ud800"]', r"half a surrogate pair"),
        (b"1" * 5000, r"not JSON as it should be"),
    ],
)
def test_a_file_that_is_no_json_says_where(path: Path, content: bytes, line: str) -> None:
    path.write_bytes(content)
    with pytest.raises(FormatError, match=line) as caught:
        load_conversation(path)
    assert "\n" not in str(caught.value)


def test_a_file_beyond_the_limit_is_refused_unread(path: Path) -> None:
    with open(path, "wb") as file:
        file.truncate(SIZE_LIMIT_BYTES + 1)
    with pytest.raises(FormatError, match="too large; expected at most 67108864 bytes"):
        load_conversation(path)


def test_a_conversation_beyond_the_limit_is_not_written(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bmoe.chat.conversation.SIZE_LIMIT_BYTES", 100)
    with pytest.raises(UsageError, match="a file holds 100"):
        save_conversation(path, MESSAGES, model="m")
    assert not path.exists()
