"""The JSON Lines protocol of `bmoe session`, version 1: what lines mean, and what is answered.

Owns the format, whose normative description is docs/schema/session.v1.schema.json. Must not know files,
sessions that are open, or when anything is sent. Every line is from a stranger.
"""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, NoReturn, Protocol, TypeVar

from bmoe.chat.messages import Message
from bmoe.config import GenerateRequest, Sampling
from bmoe.io.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from bmoe.records import (
        CacheState,
        EffectiveConfig,
        LoadProgress,
        LoadReport,
        PrefillProgress,
        RunSummary,
        TokenEvent,
    )

    Id = str | int

_T = TypeVar("_T")

PROTOCOL_VERSION: Final = 1
MOST_LINE_BYTES: Final = 16 << 20
MOST_STOPS: Final = 64
_MOST_ID: Final = (1 << 53) - 1
_MOST_ID_CHARS: Final = 128
_DEPTH_LIMIT: Final = 64
_MIB: Final = 1 << 20
_KINDS: Final = {
    "UsageError": "usage",
    "FileError": "file",
    "FormatError": "format",
    "ReadError": "read",
    "BackendError": "backend",
    "SeamError": "seam",
    "MemoryBudgetError": "memory",
    "StallError": "stall",
    "DecodeError": "decode",
    "Cancelled": "cancelled",
}


class ProtocolError(Exception):
    """A line that cannot be served; nothing was changed by it.

    Args:
        kind: "json", "request" or "usage", as in error objects.
        message: One sentence.
        request_id: Of the request, where it could be told.
    """

    def __init__(self, kind: str, message: str, request_id: Id | None = None) -> None:
        super().__init__(message)
        self.kind = kind
        self.message = message
        self.request_id = request_id


@dataclass(frozen=True, kw_only=True, slots=True)
class Generate:
    """`generate`: queued behind those before it."""

    id: Id
    request: GenerateRequest
    metrics: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Cancel:
    """`cancel`: one request, or all; at once."""

    id: Id | None


@dataclass(frozen=True, kw_only=True, slots=True)
class SetBudget:
    """`set_budget`: at once, also while generating."""

    id: Id
    cache_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Stats:
    """`stats`: at once."""

    id: Id


@dataclass(frozen=True, kw_only=True, slots=True)
class Close:
    """`close`: when what was asked for before is done."""


Command = Generate | Cancel | SetBudget | Stats | Close


@dataclass(frozen=True, kw_only=True, slots=True)
class Defaults:
    """What a request leaves open, from the command line."""

    n_predict: int | None = None
    think: bool = True
    sampling: Sampling = field(default_factory=Sampling)


def parse_line(line: bytes, defaults: Defaults) -> Command:
    """What a line asks for.

    Args:
        line: Without its line break.
        defaults: For what a `generate` leaves out.

    Raises:
        ProtocolError: It is not a request of this protocol.
    """
    fields = parse_object(line)
    request_id = _id_or_none(fields)
    try:
        return _command(fields, defaults)
    except _Refusal as refusal:
        raise ProtocolError("request", str(refusal), request_id) from None
    except UsageError as error:
        raise ProtocolError("usage", str(error), request_id) from None


def parse_object(line: bytes) -> dict[str, object]:
    """The JSON object on a line: UTF-8, finite numbers, whole characters, no key twice, nesting bounded.

    Raises:
        ProtocolError: It is none.
    """
    try:
        value = json.loads(
            line.decode(), parse_constant=_no_constant, object_pairs_hook=_unique, parse_float=_finite
        )
    except UnicodeDecodeError as error:
        raise ProtocolError("json", f"the line is not UTF-8 at byte {error.start}") from None
    except RecursionError:
        raise ProtocolError("json", "the line nests its values too deeply") from None
    except ValueError as error:
        raise ProtocolError("json", f"the line is not JSON: {_short(str(error))}") from None
    if not isinstance(value, dict):
        raise ProtocolError("json", f"the line is {_type_name(value)}, expected an object")
    _check_values(value)
    return value


def error_kind(error: BaseException) -> str:
    """The `kind` that an error has in error objects."""
    return _KINDS.get(type(error).__name__, "internal")


# --- requests ---------------------------------------------------------------------------------------------


class _Refusal(ValueError):  # noqa: N818 (what it is, not what went wrong)
    pass


_SAMPLING_FIELDS: Final = frozenset(f.name for f in dataclasses.fields(Sampling))
_MESSAGE_FIELDS: Final = frozenset(f.name for f in dataclasses.fields(Message))
_COMMAND_FIELDS: Final[Mapping[str, frozenset[str]]] = {
    "generate": frozenset(
        "id prompt messages continue n_predict think sampling stop context_shift metrics".split()  # noqa: SIM905 (one line)
    ),
    "cancel": frozenset({"id"}),
    "set_budget": frozenset({"id", "cache_mb"}),
    "stats": frozenset({"id"}),
    "close": frozenset(),
}


def _command(fields: Mapping[str, object], defaults: Defaults) -> Command:
    if "cmd" not in fields:
        raise _Refusal("there is no cmd")
    cmd = fields["cmd"]
    if not isinstance(cmd, str) or cmd not in _COMMAND_FIELDS:
        raise _Refusal(f"cmd is {_shown(cmd)}, expected one of {', '.join(_COMMAND_FIELDS)}")
    _only(fields, _COMMAND_FIELDS[cmd] | {"cmd"}, cmd)
    if cmd == "close":
        return Close()
    if cmd == "cancel":
        return Cancel(id=_id(fields) if "id" in fields else None)
    request_id = _id(fields)
    if cmd == "stats":
        return Stats(id=request_id)
    if cmd == "set_budget":
        return SetBudget(id=request_id, cache_bytes=_MIB * _whole(_needed(fields, "cache_mb"), "cache_mb", 1))
    return Generate(
        id=request_id,
        request=_generate(fields, defaults),
        metrics=_optional(fields, "metrics", _boolean, default=False),
    )


def _generate(fields: Mapping[str, object], defaults: Defaults) -> GenerateRequest:
    if ("prompt" in fields) == ("messages" in fields):
        raise _Refusal("generate takes either a prompt or messages")
    return GenerateRequest(
        prompt=_optional(fields, "prompt", _text, default=None),
        messages=_optional(fields, "messages", _messages, default=()),
        continue_conversation=_optional(fields, "continue", _boolean, default=False),
        n_predict=_optional(fields, "n_predict", _whole_or_null, default=defaults.n_predict),
        think=_optional(fields, "think", _boolean, default=defaults.think),
        sampling=_optional(
            fields, "sampling", lambda value, _: _sampling(value, defaults), default=defaults.sampling
        ),
        stop=_optional(fields, "stop", _stops, default=()),
        context_shift=_optional(fields, "context_shift", _boolean, default=False),
    )


def _messages(value: object, name: str) -> tuple[Message, ...]:
    if not isinstance(value, list) or not value:
        raise _Refusal(f"{name} is {_shown(value)}, expected a list of at least one message")
    return tuple(_message(item, f"{name}[{index}]") for index, item in enumerate(value))


def _message(value: object, name: str) -> Message:
    fields = _object(value, name)
    _only(fields, _MESSAGE_FIELDS, name)
    calls = fields.get("tool_calls", [])
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise _Refusal(f"{name}.tool_calls is {_shown(calls)}, expected a list of objects")
    for needed in ("role", "content"):
        _text(_needed(fields, needed, name), f"{name}.{needed}")
    given: dict[str, Any] = {**fields, "tool_calls": tuple(calls)}
    return Message(**given)


def _sampling(value: object, defaults: Defaults) -> Sampling:
    fields = _object(value, "sampling")
    _only(fields, _SAMPLING_FIELDS, "sampling")
    changes: dict[str, Any] = {}
    for name, item in fields.items():
        where = f"sampling.{name}"
        if name in {"top_k", "repeat_last_n"}:
            changes[name] = _whole(item, where, -1)
        elif name == "seed":
            changes[name] = None if item is None else _whole(item, where, 0)
        elif name == "grammar":
            changes[name] = None if item is None else _text(item, where)
        elif name == "json_schema":
            changes[name] = _schema(item, where)
        else:
            changes[name] = _number(item, where)
    # One that the request names replaces the other of the command line.
    for one, other in (("grammar", "json_schema"), ("json_schema", "grammar")):
        if changes.get(one) is not None:
            changes.setdefault(other, None)
    return dataclasses.replace(defaults.sampling, **changes)


def _schema(value: object, name: str) -> str | None:
    if value is None or isinstance(value, str):
        return value
    if not isinstance(value, dict):
        raise _Refusal(f"{name} is {_shown(value)}, expected an object, its text, or null")
    return json.dumps(value)


def _stops(value: object, name: str) -> tuple[str, ...]:
    if not isinstance(value, list) or len(value) > MOST_STOPS:
        raise _Refusal(f"{name} is {_shown(value)}, expected a list of at most {MOST_STOPS} texts")
    stops = tuple(_text(item, f"{name}[{index}]") for index, item in enumerate(value))
    if not all(stops):
        raise _Refusal(f"{name} holds an empty text")
    return stops


def _id(fields: Mapping[str, object]) -> Id:
    value = _needed(fields, "id")
    if (checked := _id_or_none(fields)) is None:
        raise _Refusal(
            f"id is {_shown(value)}, expected a whole number up to 2^53 - 1 or a text of at most "
            f"{_MOST_ID_CHARS} characters"
        )
    return checked


def _id_or_none(fields: Mapping[str, object]) -> Id | None:
    value = fields.get("id")
    if isinstance(value, str):
        return value if 0 < len(value) <= _MOST_ID_CHARS else None
    return value if type(value) is int and abs(value) <= _MOST_ID else None


def _optional(
    fields: Mapping[str, object], name: str, check: Callable[[object, str], _T], *, default: _T
) -> _T:
    return check(fields[name], name) if name in fields else default


def _needed(fields: Mapping[str, object], name: str, where: str = "the request") -> object:
    if name not in fields:
        raise _Refusal(f"{where} has no {name}")
    return fields[name]


def _only(fields: Mapping[str, object], known: frozenset[str], where: str) -> None:
    if unknown := sorted(fields.keys() - known):
        raise _Refusal(f"{where} has no field {_shown(unknown[0])}; there are {', '.join(sorted(known))}")


def _object(value: object, name: str) -> dict[str, object]:
    if not isinstance(value, dict):
        raise _Refusal(f"{name} is {_shown(value)}, expected an object")
    return value


def _text(value: object, name: str) -> str:
    if not isinstance(value, str):
        raise _Refusal(f"{name} is {_shown(value)}, expected a text")
    return value


def _boolean(value: object, name: str) -> bool:
    if not isinstance(value, bool):
        raise _Refusal(f"{name} is {_shown(value)}, expected true or false")
    return value


def _number(value: object, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _Refusal(f"{name} is {_shown(value)}, expected a number")
    if abs(value) > 1e9:
        raise _Refusal(f"{name} is {_shown(value)}, expected a number of ordinary size")
    return float(value)


def _whole(value: object, name: str, low: int) -> int:
    if type(value) is not int or not low <= value <= (1 << 32):
        raise _Refusal(f"{name} is {_shown(value)}, expected a whole number from {low} to {1 << 32}")
    return value


def _whole_or_null(value: object, name: str) -> int | None:
    return None if value is None else _whole(value, name, 0)


def _shown(value: object) -> str:
    return _type_name(value) if isinstance(value, list | dict) else _short(json.dumps(value))


def _short(text: str) -> str:
    return text if len(text) <= 80 else f"{text[:79]}…"


def _type_name(value: object) -> str:
    for kind, name in ((dict, "an object"), (list, "a list"), (str, "a text"), (bool, "a truth value")):
        if isinstance(value, kind):
            return name
    return "null" if value is None else "a number"


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number")


def _finite(text: str) -> float:
    if not math.isfinite(value := float(text)):
        raise ValueError(f"{_short(text)} is too large a number")
    return value


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found: dict[str, object] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"the key {_short(json.dumps(key))} appears twice in one object")
        found[key] = value
    return found


def _check_values(document: dict[str, object]) -> None:
    stack: list[tuple[object, int]] = [(document, 1)]
    while stack:
        value, depth = stack.pop()
        if depth > _DEPTH_LIMIT:
            raise ProtocolError("json", "the line nests its values too deeply")
        if isinstance(value, str):
            try:
                value.encode()
            except UnicodeEncodeError:
                raise ProtocolError("json", "the line holds half a surrogate pair") from None
        elif isinstance(value, dict):
            stack.extend((inner, depth + 1) for pair in value.items() for inner in pair)
        elif isinstance(value, list):
            stack.extend((inner, depth + 1) for inner in value)


# --- answers ----------------------------------------------------------------------------------------------


class Wire(Protocol):
    """How commands arrive and answers leave; every answer is whole lines, or nothing."""

    # ruff: noqa: D102 (documented where they are implemented)
    def parse(self, line: bytes) -> Command | None: ...

    def loading(self, progress: LoadProgress) -> str: ...

    def ready(self, effective: EffectiveConfig, load: LoadReport) -> str: ...

    def begin(self, command: Generate) -> str: ...

    def prefill(self, command: Generate, progress: PrefillProgress) -> str: ...

    def token(self, command: Generate, event: TokenEvent, cache: CacheState | None) -> str: ...

    def done(
        self,
        command: Generate,
        summary: RunSummary | None,
        *,
        cancelled: bool,
        text: str,
        reasoning: str,
        cache: CacheState | None,
    ) -> str: ...

    def budget(self, command: SetBudget, cache_bytes: int) -> str: ...

    def stats(
        self,
        command: Stats,
        *,
        cache: CacheState | None,
        summary: RunSummary | None,
        queued: int,
        generating: Id | None,
        messages: int,
    ) -> str: ...

    def error(self, request_id: Id | None, *, kind: str, message: str, fatal: bool) -> str: ...

    def closed(self, reason: str) -> str: ...


class JsonLines:
    """Answers of version 1, each a line with its break: ASCII, so that no reader splits it elsewhere.

    Args:
        defaults: For what a `generate` leaves out.
    """

    def __init__(self, defaults: Defaults) -> None:
        self._defaults = defaults

    def parse(self, line: bytes) -> Command | None:
        """What a line asks for; None for a blank one. Raises ProtocolError."""
        return parse_line(line, self._defaults) if line.strip() else None

    def loading(self, progress: LoadProgress) -> str:
        """Weights are being read."""
        return _event("loading", **dataclasses.asdict(progress))

    def ready(self, effective: EffectiveConfig, load: LoadReport) -> str:
        """The model is open."""
        # Paths that are no UTF-8 hold lone surrogates, which strict readers refuse.
        shown = {
            name: value.encode("utf-8", "replace").decode() if isinstance(value, str) else value
            for name, value in dataclasses.asdict(effective).items()
        }
        return _event("ready", protocol=PROTOCOL_VERSION, load=dataclasses.asdict(load), effective=shown)

    def begin(self, command: Generate) -> str:
        """A generation leaves the queue."""
        return _event("begin", id=command.id)

    def prefill(self, command: Generate, progress: PrefillProgress) -> str:
        """A part of the prompt is computed."""
        return _event("prefill", id=command.id, **dataclasses.asdict(progress))

    def token(self, command: Generate, event: TokenEvent, cache: CacheState | None) -> str:  # noqa: ARG002 (for others)
        """A token was made; nothing where it completed no character."""
        if command.metrics:
            return _event(
                "delta",
                id=command.id,
                index=event.index,
                text=event.text,
                reasoning=event.reasoning,
                token=event.token,
                metrics=dataclasses.asdict(event.metrics),
            )
        if not event.text and not event.reasoning:
            return ""
        return _event("delta", id=command.id, index=event.index, text=event.text, reasoning=event.reasoning)

    def done(
        self,
        command: Generate,
        summary: RunSummary | None,
        *,
        cancelled: bool,
        text: str,
        reasoning: str,
        cache: CacheState | None,  # noqa: ARG002 (for others)
    ) -> str:
        """A generation ended; without a summary it never began."""
        figures = None
        if summary is not None:
            figures = {
                **dataclasses.asdict(summary),
                "decode_tokens_per_s": summary.decode_tokens_per_s,
                "prefill_tokens_per_s": summary.prefill_tokens_per_s,
            }
        end = "cancelled" if cancelled or summary is None else summary.end
        return _event("done", id=command.id, end=end, text=text, reasoning=reasoning, summary=figures)

    def budget(self, command: SetBudget, cache_bytes: int) -> str:
        """The expert cache has another budget."""
        return _event("budget", id=command.id, cache_bytes=cache_bytes)

    def stats(
        self,
        command: Stats,
        *,
        cache: CacheState | None,
        summary: RunSummary | None,
        queued: int,
        generating: Id | None,
        messages: int,
    ) -> str:
        """How the session is doing."""
        return _event(
            "stats",
            id=command.id,
            generating=generating,
            queued=queued,
            messages=messages,
            cache=None if cache is None else dataclasses.asdict(cache),
            last=None if summary is None else dataclasses.asdict(summary),
        )

    def error(self, request_id: Id | None, *, kind: str, message: str, fatal: bool) -> str:
        """Something could not be done; after a fatal one nothing follows."""
        return _event("error", id=request_id, fatal=fatal, kind=kind, message=message)

    def closed(self, reason: str) -> str:
        """The last line of a session that ends in order."""
        return _event("closed", reason=reason)


def _event(event: str, **fields: object) -> str:
    return json.dumps({"event": event, **fields}, allow_nan=False, separators=(",", ":")) + "\n"
