"""What in a run casts doubt on its figures, or explains them.

Owns each sign's definition, which is stated beside its code and in docs/logs-reports.md. Must not know how it
is shown. A sign needs measurements; what was not measured is never reported as fine, it is just not reported.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from bmoe.logs.bootstrap import Side, intervals
from bmoe.present import mib

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from bmoe.logs.run_data import Run, Steps

    Series = NDArray[np.float64]

_LEAST_FAULTS: Final = 16
_CLOCK_TOKENS: Final = 96
_CLOCK_RISE: Final = 1.05
_SLOW: Final = 5
_MOST_SPANS: Final = 20
_MIB: Final = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Anomaly:
    """One sign.

    Attributes:
        kind: One word, for programs.
        text: What was seen, in a sentence.
        spans: Where, as half-open ranges of tokens counted over all turns; at most 20; empty for the run.
    """

    kind: str
    text: str
    spans: tuple[tuple[int, int], ...] = ()


def find_anomalies(run: Run) -> list[Anomaly]:
    """All signs in a run, what concerns the whole of it first."""
    return [
        *_about_the_run(run),
        *_about_the_cache(run),
        *_faults(run.decode),
        *_swap(run),
        *_slow_tokens(run.decode),
        *_falling_clock(run.decode),
    ]


def _about_the_run(run: Run) -> Iterator[Anomaly]:
    exit_code = run.facts["exit_code"]
    if run.facts["complete"] is False:
        yield Anomaly(kind="incomplete", text="the log ends before the run did: figures are of what it holds")
    if exit_code:
        yield Anomaly(kind="failed", text=f"the run ended with exit code {exit_code}")
    if run.facts["traced"]:
        how = run.config.get("traced")
        words = f": {how}" if isinstance(how, str) else ""
        yield Anomaly(kind="traced", text=f"tracing slowed the run: its speed is not the engine's{words}")
    lossy = run.config.get("lossy")
    if isinstance(lossy, str):
        yield Anomaly(kind="lossy", text=f"the output may differ from the model's own: {lossy}")
    for reason, what in (
        ("io_fallback_reason", "reads do not go through io_uring"),
        ("direct_fallback_reason", "reads go through the page cache"),
    ):
        if isinstance(why := run.config.get(reason), str):
            yield Anomaly(kind="fallback", text=f"{what}: {why}")
    missing = _missing_steps(run.decode)
    if missing:
        yield Anomaly(kind="missing_steps", text=f"{missing} decoded tokens are not in the log")


def _missing_steps(decode: Steps) -> int:
    """Steps of a turn are numbered without gaps."""
    return sum(
        round(steps.max()) + 1 - len(steps)
        for turn in np.unique(decode["turn"])
        if len(steps := decode["step"][decode["turn"] == turn])
    )


def _about_the_cache(run: Run) -> Iterator[Anomaly]:
    """Below what one token routes over, an LRU cache evicts every expert before it is used again."""
    budget = run.decode["cache_budget_bytes"]
    budget = budget[np.isfinite(budget) & (budget > 0)]
    least = float(budget.min()) if len(budget) else run.facts["cache_bytes"]
    cycle = run.config.get("cycle_bytes")
    if cycle is None and isinstance(demand := run.summary.get("token_demand_MiB"), int | float):
        cycle = demand * _MIB  # the reference's summary line
    if isinstance(cycle, int | float) and least and 0 < least < cycle:
        yield Anomaly(
            kind="cache_below_cycle",
            text=f"the cache, {mib(round(least))}, was smaller than one token's experts, "
            f"{mib(round(cycle))}: most are read again for every token",
        )
    if len(budget) and budget.min() < 0.99 * budget[0]:
        yield Anomaly(
            kind="cache_shrunk",
            text=f"the cache shrank from {mib(round(budget[0]))} to {mib(round(budget.min()))}",
        )


def _faults(decode: Steps) -> Iterator[Anomaly]:
    """A burst: faults beyond 16 and beyond the median by ten times its robust deviation."""
    faults = decode["major_faults"]
    if not decode.whole("major_faults"):
        return
    median = float(np.median(faults))
    if median >= _LEAST_FAULTS:
        yield Anomaly(
            kind="steady_faults",
            text=f"half of the tokens waited for {median:.0f} or more pages: memory is short, and compute "
            "holds that time",
        )
    deviation = 1.4826 * float(np.median(np.abs(faults - median)))
    high = faults > max(_LEAST_FAULTS, median + 10 * deviation)
    if high.any():
        spans = _spans(high)
        share = faults[high].sum() / faults.sum()
        first, end = max(spans, key=lambda span: float(faults[span[0] : span[1]].sum()))
        where = f"token {first}" if end == first + 1 else f"tokens {first} to {end - 1}"
        largest = (
            f", the largest at {where} with {faults[first:end].sum():.0f}"
            if len(spans) > 1
            else f" at {where}"
        )
        yield Anomaly(
            kind="fault_bursts",
            text=f"{_count(len(spans), 'burst')} of page faults over {_count(int(high.sum()), 'token')}, "
            f"{faults[high].sum():.0f} faults, {100 * share:.0f} % of all{largest}",
            spans=tuple(spans[:_MOST_SPANS]),
        )


def _swap(run: Run) -> Iterator[Anomaly]:
    swap = np.concatenate((run.prefill["swap_bytes"], run.decode["swap_bytes"]))
    swap = swap[np.isfinite(swap)]
    if not len(swap) or swap.max() <= 0:
        return
    back = -np.minimum(np.diff(swap), 0).sum()
    returned = f"; {mib(round(back))} came back or was given up" if back else ""
    yield Anomaly(
        kind="swap",
        text=f"up to {mib(round(swap.max()))} of the process was in swap, {mib(round(swap[0]))} at the first "
        f"sample and {mib(round(swap[-1]))} at the last{returned}",
    )


def _slow_tokens(decode: Steps) -> Iterator[Anomaly]:
    """Tokens of more than five times the median, after the cache had a quarter of the run to warm."""
    wall = decode["wall_ns"]
    late = np.arange(decode.count) >= decode.count // 4
    known = wall[np.isfinite(wall) & late]
    if not len(known):
        return
    slow = late & (np.nan_to_num(wall) > _SLOW * np.median(known))
    if slow.any():
        spans = _spans(slow)
        yield Anomaly(
            kind="slow_tokens",
            text=f"{_count(int(slow.sum()), 'token')} took more than {_SLOW} times the median, together "
            f"{100 * wall[slow].sum() / np.nansum(wall):.0f} % of the time",
            spans=tuple(spans[:_MOST_SPANS]),
        )


def _falling_clock(decode: Steps) -> Iterator[Anomaly]:
    """Compute per token rises although reads and faults do not explain it.

    The first quarter warms up and is left out, as are tokens of five times the median. What a byte read and
    a fault cost of compute is estimated by least squares with the position beside them, so that a trend is
    not taken for their doing, and subtracted. The last third must then exceed the first by more than 5 % with
    confidence. CPU time tells a slower clock, under which it rises alike, from threads that did not run.
    """
    first = decode.count // 4
    keep = np.arange(decode.count) >= first
    compute = decode["compute_ns"]
    if not decode.whole("compute_ns") or not compute[keep].any():
        return
    keep &= compute <= _SLOW * np.median(compute[keep])
    if keep.sum() < _CLOCK_TOKENS:
        return
    rise = _rise(decode, keep, "compute_ns")
    if rise is None or rise[1] <= _CLOCK_RISE:
        return
    estimate, low, high = rise
    cpu = _rise(decode, keep, "cpu_ns") if decode.whole("cpu_ns") and decode["cpu_ns"].any() else None
    if cpu is None:
        cause = "a falling clock, another load or a growing context"
    elif cpu[1] > 1 and cpu[0] - 1 > (estimate - 1) / 2:
        cause = "CPU time rose with it, as under a falling clock or with a growing context"
    else:
        cause = "CPU time did not, as when other programs take the CPU"
    yield Anomaly(
        kind="falling_clock",
        text=f"compute per token rose by {_percent(estimate)} ({_percent(low)} to {_percent(high)}) from the "
        f"first to the last third after warm-up, at equal reads and faults: {cause}",
    )


def _rise(decode: Steps, keep: NDArray[np.bool_], name: str) -> tuple[float, float, float] | None:
    """Last third over first of what reads and faults do not explain, with the bounds."""
    values = decode[name][keep]
    position = np.arange(len(values)) / len(values)
    causes = [
        column - column.mean()
        for cause in ("read_bytes", "major_faults")
        if decode.whole(cause) and (column := decode[cause][keep]).std() > 0
    ]
    design = np.stack((np.ones(len(values)), position, *causes), axis=1)
    scale = np.abs(design).max(axis=0)
    cost = np.linalg.lstsq(design / scale, values, rcond=None)[0] / scale
    for column, per_unit in zip(causes, cost[2:], strict=True):
        values = values - max(per_unit, 0.0) * column  # neither makes compute cheaper
    third = len(values) // 3
    ones = np.ones(third)
    [found] = intervals(
        Side(top=values[:third], bottom=ones), Side(top=values[-third:], bottom=ones), ratio=True
    )
    if found.low is None or found.high is None or not math.isfinite(found.estimate):
        return None
    return found.estimate, found.low, found.high


def _spans(marked: NDArray[np.bool_]) -> list[tuple[int, int]]:
    """Runs of marked tokens; up to two others in between do not end one."""
    spans: list[tuple[int, int]] = []
    for i in np.nonzero(marked)[0].tolist():
        if spans and i - spans[-1][1] <= 2:
            spans[-1] = (spans[-1][0], i + 1)
        else:
            spans.append((i, i + 1))
    return spans


def _percent(ratio: float) -> str:
    return f"{100 * (ratio - 1):.0f} %"


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
