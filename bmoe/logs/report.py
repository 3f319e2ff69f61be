"""What one run did, in numbers: speed, where the time went, the cache, memory, warm-up.

Owns the definitions of these figures. Must not know how they are shown. A figure that was not measured, or
not for every token it would be summed over, is None. Times are per decoded token unless said otherwise; the
prompt is for itself. Speed is tokens over the sum of llama_decode, as in the run's own summary.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from bmoe.io.errors import BmoeError
from bmoe.logs.anomalies import Anomaly, find_anomalies

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from bmoe.logs.run_data import Run, Steps

SCHEMA: Final = 1
_MIB: Final = 1 << 20
_WINDOWS: Final = 32
_WARM_WINDOW: Final = 16
_FIRST_TOKENS: Final = 32
_MEMORY: Final = (
    "rss_bytes", "rss_anon_bytes", "rss_file_bytes", "swap_bytes", "mem_available_bytes",
    "cache_budget_bytes",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Speed:
    """Tokens per second.

    Attributes:
        tokens: Decoded.
        wall_ns: Sum of llama_decode.
        mean: tokens over wall.
        mean_with_overhead: tokens over wall and the time between; None when that is unmeasured.
        median, p5, p95: Of the tokens' own rates, interpolated; None without a token that took time.
        timeless_tokens: Tokens without a wall time of their own (confirmed by another's batch), which the
            distribution leaves out.
    """

    tokens: int
    wall_ns: int
    mean: float | None
    mean_with_overhead: float | None
    median: float | None
    p5: float | None
    p95: float | None
    timeless_tokens: int


@dataclass(frozen=True, kw_only=True)
class TimePart:
    """A part of the time.

    Attributes:
        name: stall, hook, compute (these make up llama_decode), overhead (between), unaccounted (what the
            parts leave of llama_decode; only where the log's do not add up).
        ns_per_token: Mean.
        share: Of llama_decode and overhead together, 0 to 1.
    """

    name: str
    ns_per_token: float
    share: float


@dataclass(frozen=True, kw_only=True)
class Beside:
    """What runs at the same time, so is no part of the sum.

    Attributes:
        name: experts (inside expert matmuls), loop (event loop busy), io (drive busy), cpu (all threads).
        ns_per_token: Mean.
        of_wall: Over llama_decode's; cpu may exceed 1.
    """

    name: str
    ns_per_token: float
    of_wall: float


@dataclass(frozen=True, kw_only=True)
class Window:
    """Some consecutive tokens.

    Attributes:
        first, end: Half-open.
        tokens_per_s: Over the window; None without time.
        hit_rate: 0 to 1; None unmeasured or nothing looked up.
        read_bytes_per_token: None unmeasured.
        stall_share: Of llama_decode; None unmeasured.
    """

    first: int
    end: int
    tokens_per_s: float | None
    hit_rate: float | None
    read_bytes_per_token: float | None
    stall_share: float | None


@dataclass(frozen=True, kw_only=True)
class WarmUp:
    """The start against the rest.

    Attributes:
        first: The first tokens, a quarter of the run but no more than 32.
        steady: The second half.
        warm_after: Tokens before the first 16 in a row whose mean time is within 10 % of the steady one.
    """

    first: Window
    steady: Window
    warm_after: int | None


@dataclass(frozen=True, kw_only=True)
class MemoryCourse:
    """One figure of memory over the run, prompt included. Bytes.

    Attributes:
        name: Without unit.
        samples: How often it was measured.
        first_bytes, last_bytes, least_bytes, most_bytes: Of the samples.
    """

    name: str
    samples: int
    first_bytes: int
    last_bytes: int
    least_bytes: int
    most_bytes: int


@dataclass(frozen=True, kw_only=True)
class Cache:
    """What was looked up and read. Means per token; None unmeasured.

    Attributes:
        hit_rate: Hits over lookups, 0 to 1.
        cumulative_hit_rate: The last one that the log states, prompt included, where it counts no lookups.
        read_bytes, reads, evictions, rereads: Per token.
        read_latency_ns, submit_latency_ns: Mean of the tokens' means.
        read_latency_p95_ns: Of the tokens' means.
        minor_faults, major_faults: Per token, of the process.
    """

    hit_rate: float | None
    cumulative_hit_rate: float | None
    read_bytes: float | None
    reads: float | None
    evictions: float | None
    rereads: float | None
    read_latency_ns: float | None
    submit_latency_ns: float | None
    read_latency_p95_ns: float | None
    minor_faults: float | None
    major_faults: float | None


@dataclass(frozen=True, kw_only=True)
class Prefill:
    """The prompt.

    Attributes:
        tokens, batches: Computed.
        wall_ns: Sum of llama_decode.
        tokens_per_s: None without time.
        read_bytes: None unmeasured.
    """

    tokens: int
    batches: int
    wall_ns: int
    tokens_per_s: float | None
    read_bytes: int | None


@dataclass(frozen=True, kw_only=True)
class RunReport:
    """All figures of one run.

    Attributes:
        run: The database's row, and when it started.
        turns: Generations.
        load_ns: Opening the model; None unknown.
        prefill: None unknown.
        windows: At most 32, of equal length but for the last.
        warm_up: None for fewer than 64 tokens.
    """

    run: dict[str, Any]
    turns: int
    load_ns: int | None
    prefill: Prefill | None
    speed: Speed
    time: list[TimePart]
    beside: list[Beside]
    cache: Cache
    windows: list[Window]
    warm_up: WarmUp | None
    memory: list[MemoryCourse]
    anomalies: list[Anomaly]


def report(run: Run) -> RunReport:
    """The figures of a run.

    Raises:
        BmoeError: It decoded nothing.
    """
    decode = run.decode
    if not decode.count:
        state = "" if run.facts["complete"] else "; its log is incomplete"
        raise BmoeError(f"run {run.run_id} has no decoded tokens: nothing to report{state}")
    if not decode.measured("wall_ns"):
        raise BmoeError(f"run {run.run_id} has no times of its tokens: nothing to report")
    return RunReport(
        run={**run.facts, "started_at": run.started_at},
        turns=len(np.unique(decode["turn"])),
        load_ns=run.load_ns,
        prefill=_prefill(run.prefill),
        speed=_speed(decode),
        time=_time(decode),
        beside=_beside(decode),
        cache=_cache(decode),
        windows=windows(decode, math.ceil(decode.count / _WINDOWS)),
        warm_up=_warm_up(decode),
        memory=_memory(run),
        anomalies=find_anomalies(run),
    )


def as_record(found: RunReport) -> dict[str, Any]:
    """For JSON: docs/logs-reports.md describes it."""
    return {"schema": SCHEMA, "tool": "bmoe logs report", **dataclasses.asdict(found)}


def windows(decode: Steps, tokens: int) -> list[Window]:
    """The run in windows of so many tokens, the last one perhaps shorter."""
    return [
        window(decode, first, min(first + tokens, decode.count)) for first in range(0, decode.count, tokens)
    ]


def window(decode: Steps, first: int, end: int) -> Window:
    """Figures over some of the tokens."""

    def total(name: str) -> float | None:
        part = decode[name][first:end]
        return float(part.sum()) if len(part) and np.isfinite(part).all() else None

    wall, lookups, hits, read, stall = map(total, ("wall_ns", "lookups", "hits", "read_bytes", "stall_ns"))
    return Window(
        first=first,
        end=end,
        tokens_per_s=(end - first) / wall * 1e9 if wall else None,
        hit_rate=hits / lookups if lookups and hits is not None else None,
        read_bytes_per_token=None if read is None else read / (end - first),
        stall_share=stall / wall if wall and stall is not None else None,
    )


def rates(decode: Steps) -> NDArray[np.float64]:
    """[tokens] tokens per second of each; NaN for one without a time of its own."""
    wall = decode["wall_ns"]
    return 1e9 / np.where(wall > 0, wall, np.nan)


def _speed(decode: Steps) -> Speed:
    wall = decode["wall_ns"]
    known = np.isfinite(wall)
    total_ns = float(wall[known].sum())
    overhead = decode["overhead_ns"]
    # The first token of a turn may have none: nothing came before.
    between = float(np.nansum(overhead)) if decode.measured("overhead_ns") else None
    own = rates(decode)
    own = own[np.isfinite(own)]
    p5, median, p95 = np.quantile(own, [0.05, 0.5, 0.95]).tolist() if len(own) else (None,) * 3
    tokens = int(known.sum())
    return Speed(
        tokens=tokens,
        wall_ns=round(total_ns),
        mean=tokens / total_ns * 1e9 if total_ns else None,
        mean_with_overhead=None if between is None or not total_ns else tokens / (total_ns + between) * 1e9,
        median=median,
        p5=p5,
        p95=p95,
        timeless_tokens=tokens - len(own),
    )


def _time(decode: Steps) -> list[TimePart]:
    """The parts that every token has; nothing when llama_decode itself is not known for all."""
    wall = decode.total("wall_ns")
    if not wall:
        return []
    parts = {name: decode.total(f"{name}_ns") for name in ("stall", "hook", "compute")}
    found = {name: value for name, value in parts.items() if value is not None}
    if found:
        rest = wall - sum(found.values())
        if abs(rest) > 1e-3 * wall:  # logs in milliseconds round
            found["unaccounted"] = rest
    if decode.measured("overhead_ns"):
        found["overhead"] = float(np.nansum(decode["overhead_ns"]))
    everything = wall + found.get("overhead", 0.0)
    return [
        TimePart(name=name, ns_per_token=value / decode.count, share=value / everything)
        for name, value in found.items()
    ]


def _beside(decode: Steps) -> list[Beside]:
    wall = decode.total("wall_ns")
    names = {"experts": "experts_ns", "loop": "loop_ns", "io": "io_busy_ns", "cpu": "cpu_ns"}
    return [
        Beside(name=name, ns_per_token=value / decode.count, of_wall=value / wall)
        for name, column in names.items()
        if wall and (value := decode.total(column)) is not None
    ]


def _cache(decode: Steps) -> Cache:
    lookups, hits = decode.total("lookups"), decode.total("hits")
    latency = decode["read_latency_ns"]
    latency = latency[np.isfinite(latency)]
    ratio = decode["cache_hit_ratio_cumulative"]
    ratio = ratio[np.isfinite(ratio)]
    return Cache(
        hit_rate=hits / lookups if lookups and hits is not None else None,
        cumulative_hit_rate=float(ratio[-1]) if len(ratio) and lookups is None else None,
        read_bytes=_per_token(decode, "read_bytes"),
        reads=_per_token(decode, "reads"),
        evictions=_per_token(decode, "evictions"),
        rereads=_per_token(decode, "rereads"),
        read_latency_ns=decode.mean("read_latency_ns"),
        submit_latency_ns=decode.mean("submit_latency_ns"),
        read_latency_p95_ns=float(np.quantile(latency, 0.95)) if len(latency) else None,
        minor_faults=_per_token(decode, "minor_faults"),
        major_faults=_per_token(decode, "major_faults"),
    )


def _per_token(decode: Steps, name: str) -> float | None:
    total = decode.total(name)
    return None if total is None else total / decode.count


def _prefill(prefill: Steps) -> Prefill | None:
    tokens, wall, read = prefill.total("tokens"), prefill.total("wall_ns"), prefill.total("read_bytes")
    if tokens is None or wall is None:
        return None
    return Prefill(
        tokens=round(tokens),
        batches=prefill.count,
        wall_ns=round(wall),
        tokens_per_s=tokens / wall * 1e9 if wall else None,
        read_bytes=None if read is None else round(read),
    )


def _warm_up(decode: Steps) -> WarmUp | None:
    if decode.count < 2 * _FIRST_TOKENS or not decode.whole("wall_ns"):
        return None
    steady = window(decode, decode.count // 2, decode.count)
    wall = decode["wall_ns"]
    running = np.convolve(wall, np.ones(_WARM_WINDOW) / _WARM_WINDOW, mode="valid")
    warm = np.nonzero(running <= 1.1 * wall[decode.count // 2 :].mean())[0]
    return WarmUp(
        first=window(decode, 0, min(_FIRST_TOKENS, decode.count // 4)),
        steady=steady,
        warm_after=int(warm[0]) if len(warm) else None,
    )


def _memory(run: Run) -> list[MemoryCourse]:
    found = []
    for name in _MEMORY:
        course = np.concatenate((run.prefill[name], run.decode[name]))
        course = course[np.isfinite(course)]
        if len(course) and course.max() > 0:  # the reference writes 0 where it could not measure
            first, last, least, most = (round(v) for v in (course[0], course[-1], course.min(), course.max()))
            found.append(
                MemoryCourse(
                    name=name.removesuffix("_bytes"),
                    samples=len(course),
                    first_bytes=first,
                    last_bytes=last,
                    least_bytes=least,
                    most_bytes=most,
                )
            )
    return found
