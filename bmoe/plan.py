"""Whether and how a model will run on this machine, worked out without loading it.

It owns the arithmetic of a run to come: memory, slots, hits to expect, the bound that the drive sets, and
what would change it. It must not know how it is shown. What a run really does is decided by the session,
with the same `cache_budget` and `plan_slots`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, TypedDict

from bmoe.budget import (
    MIB,
    cache_budget,
    compute_bytes,
    default_floor_bytes,
    dense_memory_bytes,
    fixed_bytes,
    kv_cache_bytes,
    process_bytes,
    shortage,
)
from bmoe.config import default_threads
from bmoe.gguf_file import read_gguf
from bmoe.inspect import worst_read_bytes
from bmoe.io.errors import MemoryBudgetError
from bmoe.io.files import DirectFile
from bmoe.io.memory_figures import available_bytes, process_memory
from bmoe.model import ModelLayout, lay_out
from bmoe.pipeline.slots import plan_slots, total_slot_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Literal

    from bmoe.config import DenseMode

    Verdict = Literal["streams", "resident", "does not fit"]

# Decode hits over the share of all experts that the cache holds: recorded routing of two models, replayed
# with the aged policy. Between points on a logarithmic scale; nothing is known beyond.
_QWEN3_30B: Final = ((0.0149, 0.179), (0.0299, 0.277), (0.0597, 0.416), (0.119, 0.610), (0.239, 0.827))
_GPT_OSS_120B: Final = ((0.0043, 0.084), (0.0086, 0.146), (0.0172, 0.237), (0.0344, 0.371), (0.0687, 0.519))


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanRequest:
    """What to plan for.

    Attributes:
        path: The model.
        context_tokens, ubatch_tokens: As for a session.
        ram_bytes: Available memory to suppose; None asks this machine.
        cache_bytes: The expert cache; None sizes it as a session does.
        n_expert_used: As for a session.
        threads, dense_weights: As for a session.
    """

    path: str
    context_tokens: int = 2048
    ubatch_tokens: int = 512
    ram_bytes: int | None = None
    cache_bytes: int | None = None
    n_expert_used: int | None = None
    threads: int = field(default_factory=default_threads)
    dense_weights: DenseMode = "anon"


@dataclass(frozen=True, kw_only=True, slots=True)
class DriveFigure:
    """What bmoe-iobench measured of the model's drive.

    Attributes:
        mib_per_s: Random reads of experts at the depth it recommends.
        created_utc: When.
    """

    mib_per_s: float
    created_utc: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """A run to come. Nothing is None but what is not known or does not apply.

    Attributes:
        verdict: How it runs.
        reason: Why not otherwise, in words.
        architecture, model_bytes: Of the model.
        available_bytes: Memory that can be had, or that was supposed.
        dense_bytes, kv_bytes, compute_bytes, process_bytes, floor_bytes, cache_bytes: Where it goes; the
            floor is what is left to others.
        slots, cache_experts, total_experts: What the cache holds.
        cycle_bytes, worst_read_bytes: One token's experts; to read all of them.
        hit_range: Least and most share of a token's experts to be found in the cache.
        read_range_bytes: Least and most to be read for a token.
        drive: What is known of the drive.
        bound_tokens_per_s: Least and most tokens per second that the drive allows, computing aside.
        advice: What would change it, one sentence each.
    """

    verdict: Verdict
    reason: str | None
    architecture: str
    model_bytes: int
    available_bytes: int | None
    dense_bytes: int
    kv_bytes: int
    compute_bytes: int
    process_bytes: int
    floor_bytes: int | None
    cache_bytes: int | None
    slots: int | None
    cache_experts: int | None
    total_experts: int
    cycle_bytes: int
    worst_read_bytes: int
    hit_range: tuple[float, float] | None
    read_range_bytes: tuple[int, int] | None
    drive: DriveFigure | None
    bound_tokens_per_s: tuple[float, float | None] | None
    advice: tuple[str, ...]


def plan_run(request: PlanRequest) -> Plan:
    """Plans a run.

    Raises:
        FileError, FormatError, UsageError: As `read_gguf`, `lay_out` and `ModelLayout.with_top_k`.
    """
    layout = lay_out(read_gguf(request.path))
    if request.n_expert_used is not None:
        layout = layout.with_top_k(request.n_expert_used)
    return _Planner(layout, request).plan()


class _Batch(TypedDict):
    """What the memory beside the cache depends on, as bmoe.budget's functions take it."""

    context_tokens: int
    ubatch_tokens: int
    threads: int
    own_bytes: int
    dense_weights: str


class _Planner:
    def __init__(self, layout: ModelLayout, request: PlanRequest) -> None:
        self._layout = layout
        self._request = request
        self._available = request.ram_bytes if request.ram_bytes is not None else available_bytes()
        self._block = 0
        for path in layout.facts.paths:
            with DirectFile.open(path) as file:
                self._block = max(self._block, file.block_bytes)
        self._kv = kv_cache_bytes(layout, request.context_tokens)
        self._batch: _Batch = {
            "context_tokens": request.context_tokens,
            "ubatch_tokens": min(request.ubatch_tokens, request.context_tokens),
            "threads": request.threads,
            # Planning is a process too: what it has is there again when the run begins.
            "own_bytes": 0 if request.ram_bytes is not None else process_memory().anon_bytes or 0,
            "dense_weights": request.dense_weights,
        }
        self._compute = compute_bytes(
            layout, self._batch["ubatch_tokens"], request.context_tokens, request.threads
        )
        self._fixed = fixed_bytes(layout, **self._batch)
        self._everything = total_slot_bytes(layout.tensors, self._block)
        self._floor = None if self._available is None else default_floor_bytes(self._available)
        self._drive = _drive(request.path)

    def plan(self) -> Plan:
        if not self._layout.is_moe:
            short = self._shortage(0)
            return self._plan("does not fit" if short else "resident", short or "it has no experts to stream")
        try:
            budget = cache_budget(
                self._layout,
                wanted_bytes=self._request.cache_bytes,
                floor_bytes=None,
                everything_bytes=self._everything,
                available_bytes=self._available,
                **self._batch,
            )
            slots = plan_slots(self._layout.tensors, budget.cache_bytes, self._block)
        except MemoryBudgetError as error:
            return self._plan("does not fit", str(error))
        short = self._shortage(slots.used_bytes)
        if short is not None:
            return self._plan("does not fit", short)
        return self._plan("streams", None, slots.used_bytes, slots.total_slots, slots.expert_slots)

    def _shortage(self, cache_bytes: int) -> str | None:
        return shortage(self._layout, cache_bytes=cache_bytes, available_bytes=self._available, **self._batch)

    def _plan(
        self,
        verdict: Verdict,
        reason: str | None,
        cache_bytes: int | None = None,
        slots: int | None = None,
        cache_experts: int | None = None,
    ) -> Plan:
        layout = self._layout
        total = sum({t.layer: t.experts for t in layout.tensors}.values())
        worst = worst_read_bytes(layout, self._block)
        hits = None if cache_experts is None else hit_range(cache_experts / total)
        reads = None if hits is None else (round(worst * (1 - hits[1])), round(worst * (1 - hits[0])))
        bound = None if reads is None or self._drive is None else _bound(reads, self._drive.mib_per_s)
        return Plan(
            verdict=verdict,
            reason=reason,
            architecture=layout.facts.architecture,
            model_bytes=sum(layout.facts.sizes_bytes),
            available_bytes=self._available,
            dense_bytes=dense_memory_bytes(layout, self._request.dense_weights),
            kv_bytes=self._kv,
            compute_bytes=self._compute,
            process_bytes=process_bytes(layout),
            floor_bytes=self._floor if self._request.cache_bytes is None else None,
            cache_bytes=cache_bytes,
            slots=slots,
            cache_experts=cache_experts,
            total_experts=total,
            cycle_bytes=layout.cycle_bytes,
            worst_read_bytes=worst,
            hit_range=hits,
            read_range_bytes=reads,
            drive=self._drive,
            bound_tokens_per_s=bound,
            advice=tuple(self._advice(cache_bytes, reads)),
        )

    def _advice(self, cache_bytes: int | None, reads: tuple[int, int] | None) -> list[str]:
        layout = self._layout
        found: list[str] = []
        if not layout.is_moe:
            return found
        if self._available is not None and self._fixed + layout.expert_bytes < self._available - (
            self._floor or 0
        ):
            found.append("the whole model fits in memory: --resident is faster")
        if cache_bytes is not None and cache_bytes < self._everything:
            more = self._everything - cache_bytes
            found.append(f"{more // MIB} MiB more memory would hold every expert: nothing is read twice then")
            if cache_bytes < layout.cycle_bytes:
                short = layout.cycle_bytes - cache_bytes
                found.append(f"{-(-short // MIB)} MiB more would hold one token's experts")
        if reads is not None and self._drive is None:
            found.append(f"bmoe-iobench -m {self._request.path} measures the drive: the bound is known then")
        if self._kv > 64 * MIB:
            found.append(f"half the context (-c) frees {self._kv // 2 // MIB} MiB for experts")
        return found


def hit_range(share: float) -> tuple[float, float]:
    """Least and most decode hits to expect with this share of all experts in the cache, each 0 to 1."""
    if share >= 1:
        return 1.0, 1.0
    values = [_on_curve(curve, share) for curve in (_QWEN3_30B, _GPT_OSS_120B)]
    return min(values), max(values)


def _on_curve(curve: Sequence[tuple[float, float]], share: float) -> float:
    if share <= curve[0][0]:
        return curve[0][1] * share / curve[0][0]
    for (low, below), (high, above) in zip(curve, (*curve[1:], (1.0, 1.0)), strict=True):
        if share <= high:
            return below + (above - below) * math.log(share / low) / math.log(high / low)
    return 1.0


def _bound(reads: tuple[int, int], mib_per_s: float) -> tuple[float, float | None]:
    rate = mib_per_s * MIB
    return rate / max(reads[1], 1), rate / reads[0] if reads[0] else None


def _drive(path: str) -> DriveFigure | None:
    from bmoe.tools.iobench.drives import recall  # noqa: PLC0415 (the benchmark's own imports are not small)

    record = recall(path)
    if record is None:
        return None
    return DriveFigure(
        mib_per_s=float(record["mib_per_s"]), created_utc=str(record.get("created_utc", "at an unknown time"))
    )
