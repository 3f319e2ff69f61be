"""Conversations in files: JSON that people can read, and that no crash destroys.

Owns the format (docs/schema/conversation.v1.schema.json), its validation and the safe write. Knows no session
and no template.
"""

from __future__ import annotations

import json
import math
import os
import re
import stat
from contextlib import suppress
from dataclasses import dataclass, fields
from datetime import UTC, datetime
from itertools import chain
from typing import TYPE_CHECKING, NoReturn, cast

from bmoe.chat.messages import Message
from bmoe.io.errors import FileError, FormatError, UsageError
from bmoe.io.whole_file import replace_file

if TYPE_CHECKING:
    from collections.abc import Sequence

SCHEMA = 1
FORMAT = "bmoe-conversation"
SIZE_LIMIT_BYTES = 64 << 20
# Far more than a message needs; json itself would end in a RecursionError of its own.
_DEPTH_LIMIT = 64
_TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ")


@dataclass(frozen=True, kw_only=True, slots=True)
class Conversation:
    """What a conversation file holds.

    Args:
        model: Name of the model that answered; informative, a conversation may go on with another.
        system: The system text, or None; it is not among `messages`.
        messages: What was said, oldest first, without the system text.
        created: UTC, RFC 3339 with whole seconds, such as `2026-01-31T12:00:00Z`.
        updated: The same, when it was last saved.
    """

    model: str
    system: str | None
    messages: tuple[Message, ...]
    created: str
    updated: str


def utc_now() -> str:
    """The present as conversation files spell it."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def save_conversation(
    path: str | os.PathLike[str],
    messages: Sequence[Message],
    *,
    model: str,
    system: str | None = None,
    created: str | None = None,
    now: str | None = None,
) -> Conversation:
    """Write a conversation; the file is the old one or the new one at every moment, also after a crash.

    A new file is readable by its owner only; an existing one keeps its permissions, and a symlink stays one.

    Args:
        path: The file, new or to be replaced.
        messages: What was said, oldest first, without the system text.
        model: Name of the model.
        system: The system text.
        created: When the conversation began, as `Conversation.created`; None takes `now`.
        now: The present, as `utc_now` gives it.

    Returns:
        What was written.

    Raises:
        UsageError: The path is a folder or something else that is no file, or a text cannot be encoded.
        FileError: It could not be written; the old file is untouched.
    """
    now = utc_now() if now is None else now
    conversation = Conversation(
        model=model, system=system, messages=tuple(messages), created=created or now, updated=now
    )
    target = os.path.realpath(path)
    document = _as_json(conversation)
    if (problem := _problem_of(document)) is not None:
        raise UsageError(f"the conversation cannot be saved: it holds {problem}")
    try:
        payload = (json.dumps(document, ensure_ascii=False, indent=2) + "\n").encode()
    except (TypeError, ValueError) as error:
        raise UsageError(f"the conversation cannot be saved: {error}") from None
    if len(payload) > SIZE_LIMIT_BYTES:
        raise UsageError(f"the conversation takes {len(payload)} bytes, a file holds {SIZE_LIMIT_BYTES}")
    try:
        _replace(target, payload)
    except OSError as error:
        raise FileError(f"cannot be written: {error.strerror or error}", path=os.fspath(path)) from None
    return conversation


def load_conversation(path: str | os.PathLike[str]) -> Conversation:
    """Read a conversation, every field checked.

    Raises:
        FileError: It cannot be read.
        FormatError: It is no conversation of this version; says where.
    """
    name = os.fspath(path)
    document = _parse(name, _read(name))
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise FormatError("not a conversation file", path=name, field="format", expected=repr(FORMAT))
    checked = _Checked(name, "", cast("dict[str, object]", document))
    if type(document.get("schema")) is not int or document["schema"] != SCHEMA:
        checked.refuse("schema", SCHEMA, document.get("schema"))
    checked.only("format", "schema", "model", "system", "created", "updated", "messages")
    messages = document.get("messages")
    if not isinstance(messages, list):
        checked.refuse("messages", "a list", messages)
    return Conversation(
        model=checked.text("model"),
        system=checked.text_or_none("system"),
        messages=tuple(_message(name, index, message) for index, message in enumerate(messages)),
        created=checked.time("created"),
        updated=checked.time("updated"),
    )


def _as_json(conversation: Conversation) -> dict[str, object]:
    return {
        "format": FORMAT,
        "schema": SCHEMA,
        "model": conversation.model,
        "created": conversation.created,
        "updated": conversation.updated,
        "system": conversation.system,
        "messages": [_message_as_json(message) for message in conversation.messages],
    }


def _message_as_json(message: Message) -> dict[str, object]:
    """Absent fields are absent keys; `tool_calls` in plain types."""
    spelled = message.as_template()
    spelled.pop("thinking", None)
    if "reasoning_content" in spelled:
        spelled["reasoning"] = spelled.pop("reasoning_content")
    return spelled


def _message(path: str, index: int, value: object) -> Message:
    """One element of `messages`."""
    place = f"messages[{index}]"
    if not isinstance(value, dict):
        raise FormatError("wrong type", path=path, field=place, expected="an object", got=_kind(value))
    checked = _Checked(path, f"{place}.", value)
    checked.only(*(field.name for field in fields(Message)))
    calls = value.get("tool_calls", [])
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        checked.refuse("tool_calls", "a list of objects", calls)
    try:
        return Message(
            role=checked.text("role"),
            content=checked.text("content"),
            reasoning=checked.text_or_none("reasoning"),
            tool_calls=tuple(calls),
            name=checked.text_or_none("name"),
            tool_call_id=checked.text_or_none("tool_call_id"),
        )
    except UsageError as error:
        raise FormatError(error.message, path=path, field=place) from None


@dataclass(frozen=True, slots=True)
class _Checked:
    """An object of the document; what is wrong with it names the file and the field."""

    path: str
    prefix: str
    value: dict[str, object]

    def refuse(self, field: str, expected: object, got: object) -> NoReturn:
        shown = _kind(got) if isinstance(got, str | list | dict) or got is None else repr(got)
        raise FormatError(
            "missing" if field not in self.value else "wrong value",
            path=self.path,
            field=self.prefix + field,
            expected=expected,
            got=shown if field in self.value else None,
        )

    def only(self, *known: str) -> None:
        for key in self.value:
            if key not in known:
                raise FormatError(
                    "unknown field", path=self.path, field=self.prefix + key[:80], expected=", ".join(known)
                )

    def text(self, field: str) -> str:
        value = self.value.get(field)
        if not isinstance(value, str):
            self.refuse(field, "text", value)
        return value

    def text_or_none(self, field: str) -> str | None:
        return None if self.value.get(field) is None else self.text(field)

    def time(self, field: str) -> str:
        value = self.text(field)
        if not _TIME.fullmatch(value):
            raise FormatError(
                "no time",
                path=self.path,
                field=self.prefix + field,
                expected="YYYY-MM-DDThh:mm:ssZ",
                got=repr(value[:40]),
            )
        return value


def _kind(value: object) -> str:
    """A value's type in JSON's words."""
    names = {str: "text", bool: "a truth value", list: "a list", dict: "an object", type(None): "null"}
    return names.get(type(value), "a number")


def _read(path: str) -> bytes:
    """The content of a regular file of bearable size."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        with open(fd, "rb") as file:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise FileError("not a regular file", path=path)
            content = file.read(SIZE_LIMIT_BYTES + 1)
    except OSError as error:
        raise FileError(f"cannot be read: {error.strerror or error}", path=path) from None
    if len(content) > SIZE_LIMIT_BYTES:
        raise FormatError("too large", path=path, expected=f"at most {SIZE_LIMIT_BYTES} bytes")
    return content


def _parse(path: str, content: bytes) -> object:
    """JSON, strictly: no doubled keys, no NaN, no lone surrogates, no bottomless nesting."""
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        raise FormatError("not UTF-8", path=path, offset_bytes=error.start) from None
    try:
        document: object = json.loads(text, object_pairs_hook=_unique, parse_constant=_no_constant)
    except json.JSONDecodeError as error:
        raise FormatError(
            f"not JSON: {error.msg}", path=path, field=f"line {error.lineno} column {error.colno}"
        ) from None
    except RecursionError:
        raise FormatError("not a conversation: it holds values that nest too deeply", path=path) from None
    except ValueError as error:
        raise FormatError(f"not JSON as it should be: {error}", path=path) from None
    if (problem := _problem_of(document)) is not None:
        raise FormatError(f"not a conversation: it holds {problem}", path=path)
    return document


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found: dict[str, object] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"the key {key[:80]!r} appears twice in one object")
        found[key] = value
    return found


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number of JSON")


def _problem_of(document: object) -> str | None:
    """What in it could not be saved and loaded again, or rendered."""
    stack: list[tuple[object, int]] = [(document, 0)]
    while stack:
        value, depth = stack.pop()
        if depth > _DEPTH_LIMIT:
            return "values that nest too deeply"
        if isinstance(value, str):
            try:
                value.encode()
            except UnicodeEncodeError:
                return "half a surrogate pair"
        elif isinstance(value, float) and not math.isfinite(value):
            return f"the number {value}"
        elif isinstance(value, dict):
            stack.extend((inner, depth + 1) for inner in chain(value, value.values()))
        elif isinstance(value, list):
            stack.extend((inner, depth + 1) for inner in value)
    return None


def _replace(target: str, payload: bytes) -> None:
    """Replace a regular file, keeping its permissions."""
    mode = 0o600
    with suppress(FileNotFoundError):
        status = os.stat(target)
        if not stat.S_ISREG(status.st_mode):
            raise UsageError(f"{target} is not a regular file")
        mode = stat.S_IMODE(status.st_mode)
    replace_file(target, payload, mode=mode)
