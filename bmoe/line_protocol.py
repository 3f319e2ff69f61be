"""The reference's line protocol: a tag `BMOE_…` and a JSON object per line, for front ends written for it.

Owns the format and which of our measurements stands for which of its fields (docs/session-protocol.md). Must
not know files, sessions that are open, or when anything is sent.
"""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Final, TypeVar

from bmoe.chat.messages import Message
from bmoe.config import GenerateRequest
from bmoe.protocol import Cancel, Close, Defaults, Generate, ProtocolError, parse_object

if TYPE_CHECKING:
    from collections.abc import Mapping

    from bmoe.protocol import Command, Id
    from bmoe.records import (
        CacheState,
        EffectiveConfig,
        LoadProgress,
        LoadReport,
        PrefillProgress,
        RunSummary,
        StepMetrics,
        TokenEvent,
    )

_T = TypeVar("_T", int, str, bool)

_MIB: Final = 1 << 20
_UNMEASURED: Final = -1.0
_ESCAPES: Final = {'"': '\\"', "\\": "\\\\", "\n": "\\n", "\r": "\\r", "\t": "\\t"}


class LineProtocol:
    """The lines of one session.

    Args:
        defaults: For what a `generate` leaves out.
        raw: Take prompts as they are, also when the model has a chat template.
    """

    def __init__(self, defaults: Defaults, *, raw: bool = False) -> None:
        self._defaults = defaults
        self._raw = raw
        self._chat = False
        self._context_tokens = 0
        self._cycle_bytes = 0
        self._load_ns = 0
        self._steps: list[StepMetrics] = []
        self._dense_resident = _UNMEASURED

    def parse(self, line: bytes) -> Command | None:
        """What a line asks for; None where the reference ignores it: no JSON, no `cmd`, an unknown one.

        Raises:
            ProtocolError: A field of the wrong type.
        """
        try:
            fields = parse_object(line)
        except ProtocolError:
            return None
        match fields.get("cmd"):
            case "cancel":
                return Cancel(id=None)
            case "close":
                return Close()
            case "generate":
                return self._generate(fields)
        return None

    def _generate(self, fields: Mapping[str, object]) -> Generate:
        request_id = _field(fields, "id", 0, 0)
        prompt = _field(fields, "prompt", "", request_id)
        if not prompt:
            raise ProtocolError("usage", "empty prompt: there is nothing to continue", request_id)
        n_predict = self._defaults.n_predict
        if "n_predict" in fields:
            n_predict = _field(fields, "n_predict", 0, request_id)
        if n_predict is not None and not 0 <= n_predict < 1 << 31:
            raise ProtocolError("usage", f"n_predict is {n_predict}, expected 0 or more", request_id)
        chat = self._chat and not self._raw
        request = GenerateRequest(
            prompt=None if chat else prompt,
            messages=(Message(role="user", content=prompt),) if chat else (),
            continue_conversation=not _field(fields, "clear_kv", True, request_id),
            n_predict=n_predict,
            think=_field(fields, "think", self._defaults.think, request_id),
            sampling=self._defaults.sampling,
        )
        return Generate(id=request_id, request=request, metrics=False)

    def loading(self, progress: LoadProgress) -> str:  # noqa: ARG002 (the reference says nothing)
        """Weights are being read."""
        return ""

    def ready(self, effective: EffectiveConfig, load: LoadReport) -> str:
        """The model is open."""
        self._chat = effective.chat_template
        self._context_tokens = effective.context_tokens
        self._cycle_bytes = effective.cycle_bytes if effective.mode == "streaming" else 0
        self._load_ns = load.wall_ns
        return _line(
            "READY",
            load_s=_fixed(load.wall_ns / 1e9, 3),
            arch=_text(effective.architecture),
            n_ctx=effective.context_tokens,
            think_ctl=_text(effective.think_control or "none"),
            n_expert_used=effective.top_k,
        )

    def begin(self, command: Generate) -> str:
        """A generation leaves the queue."""
        self._steps = []
        self._dense_resident = _UNMEASURED
        return _line("BEGIN", id=command.id)

    def prefill(self, command: Generate, progress: PrefillProgress) -> str:  # noqa: ARG002 (as `loading`)
        """A part of the prompt is computed."""
        return ""

    def token(self, command: Generate, event: TokenEvent, cache: CacheState | None) -> str:
        """A token was made."""
        m = event.metrics
        self._steps.append(m)
        if m.memory is not None and m.memory.dense_resident is not None:
            self._dense_resident = m.memory.dense_resident
        io_ms = (m.io_busy_ns or 0) / 1e6
        load = ""
        if m.read_bytes or io_ms > 0:
            load = _line("LOAD", mb=_fixed((m.read_bytes or 0) / _MIB, 2), ms=_fixed(io_ms, 1))
        n_predict = command.request.n_predict
        return load + _line(
            "PROGRESS",
            step=event.index + 1,
            steps=self._context_tokens if n_predict is None else n_predict,
            wall_ms=_fixed(m.wall_ns / 1e6, 1),
            io_ms=_fixed(io_ms, 1),
            compute_ms=_fixed(m.compute_ns / 1e6, 1),
            mgmt_ms=_fixed((m.hook_ns or 0) / 1e6, 1),
            stall_ms=_fixed((m.stall_ns or 0) / 1e6, 1),
            read_mb=_fixed((m.read_bytes or 0) / _MIB, 2),
            cache_hit_pct=_fixed(_hit_percent(cache), 1),
            majflt=m.major_faults,
            cpu_ms=_fixed(m.cpu_ns / 1e6, 1),
            dense_resident_frac=_fixed(self._dense_resident, 3),
            delta_reasoning=_text(event.reasoning),
            delta_text=_text(event.text),
        )

    def done(
        self,
        command: Generate,
        summary: RunSummary | None,
        *,
        cancelled: bool,
        text: str,
        reasoning: str,
        cache: CacheState | None,
    ) -> str:
        """A generation ended; without a summary it never began."""
        steps = self._steps if summary is not None else []
        each = max(1, len(steps))
        resident_bytes = cache.cache_bytes * cache.slots_used / max(1, cache.slots_total) if cache else 0

        def seconds_each(figures: list[int | None]) -> str:
            return _fixed(sum(f or 0 for f in figures) / 1e9 / each, 4)

        return _line(
            "DONE",
            id=command.id,
            cancelled="true" if cancelled else "false",
            tokens=len(steps),
            tok_s=_fixed((summary.decode_tokens_per_s if summary else None) or 0, 3),
            prefill_s=_fixed(summary.prefill_ns / 1e9 if summary else 0, 3),
            prefill_tps=_fixed((summary.prefill_tokens_per_s if summary else None) or 0, 2),
            load_s=_fixed(self._load_ns / 1e9, 3),
            cache_hit_pct=_fixed(_hit_percent(cache), 1),
            n_prompt=summary.prompt_tokens if summary else 0,
            n_past=summary.context_tokens_used if summary else 0,
            compute_s_tok=seconds_each([m.compute_ns for m in steps]),
            io_s_tok=seconds_each([m.io_busy_ns for m in steps]),
            cache_resident_mib=_fixed(resident_bytes / _MIB, 0),
            cache_budget_mib=_fixed(cache.cache_bytes / _MIB if cache else 0, 0),
            read_mib=_fixed(sum(m.read_bytes or 0 for m in steps) / _MIB, 1),
            stall_s_tok=seconds_each([m.stall_ns for m in steps]),
            mgmt_s_tok=seconds_each([m.hook_ns for m in steps]),
            majflt_tok=_fixed(sum(m.major_faults for m in steps) / each, 2),
            cpu_s_tok=seconds_each([m.cpu_ns for m in steps]),
            token_demand_mib=_fixed(self._cycle_bytes / _MIB, 1),
            mtp_drafted=0,
            mtp_accepted=0,
            mtp_decodes=0,
            mtp_draft_s_tok=_fixed(0, 4),
            drafted_steps=0,
            loop_overhead_s_tok=seconds_each([m.overhead_ns for m in steps]),
            reasoning=_text(reasoning),
            text=_text(text),
        )

    def budget(self, *_: object) -> str:
        """Not in this protocol."""
        return ""

    def stats(self, *_: object, **__: object) -> str:
        """Not in this protocol."""
        return ""

    def error(self, request_id: Id | None, *, kind: str, message: str, fatal: bool) -> str:  # noqa: ARG002 (no kinds)
        """Something could not be done."""
        return _line("ERROR", id=request_id or 0, fatal="true" if fatal else "false", msg=_text(message))

    def closed(self, reason: str) -> str:  # noqa: ARG002 (as `loading`)
        """A session ends in order."""
        return ""


def _field(fields: Mapping[str, object], name: str, default: _T, request_id: Id) -> _T:
    value = fields.get(name, default)
    if type(value) is not type(default):
        kind = {int: "a whole number", str: "a text", bool: "true or false"}[type(default)]
        raise ProtocolError("request", f"{name} is {json.dumps(value)[:80]}, expected {kind}", request_id)
    return value


def _hit_percent(cache: CacheState | None) -> float:
    return 100 * cache.hits / cache.lookups if cache and cache.lookups else _UNMEASURED


def _fixed(value: float, decimals: int) -> str:
    return f"{value if math.isfinite(value) else _UNMEASURED:.{decimals}f}"


def _text(text: str) -> str:
    """A JSON text as the reference writes it: UTF-8, and only what must be is escaped."""
    escaped = "".join(_ESCAPES.get(c) or (f"\\u{ord(c):04x}" if c < " " else c) for c in text)
    return f'"{escaped.encode("utf-8", "replace").decode()}"'


def _line(tag: str, **fields: object) -> str:
    return f"BMOE_{tag} {{{','.join(f'{_text(name)}:{value}' for name, value in fields.items())}}}\n"
