"""What the rows mean: peak, knee, the price of scattering, what the engine may hope for.

Pure functions from rows to records. Must not know how rows are measured or shown.
"""

from __future__ import annotations

import math
import statistics
from typing import TYPE_CHECKING, Final

from bmoe.tools.iobench.result import MIB, Bound, Flag, Group, Knee, Row, Scatter, Verdict

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bmoe.tools.iobench.experts import ExpertLayout
    from bmoe.tools.iobench.result import FileFacts

HIT_RATES: Final = (0.0, 0.5, 0.75, 0.9)
_NEAR_PEAK: Final = 0.97
_SMALL_FILE_BYTES: Final = 1 << 30
_MEMORY_SHARE: Final = 0.8
_WARMER: Final = 1.15
_CACHED: Final = 0.01
_CACHE_GREW: Final = 0.05


def knees(rows: Sequence[Row]) -> list[Knee]:
    """Peak and knee of each curve, in the order of its first row."""
    curves: dict[Group, list[Row]] = {}
    for row in rows:
        curves.setdefault(row.group, []).append(row)
    found = []
    for group, curve in curves.items():
        peak = max(curve, key=lambda row: row.mib_per_s)
        near = [row for row in curve if row.mib_per_s >= _NEAR_PEAK * peak.mib_per_s]
        knee = min(near, key=lambda row: row.lanes)
        found.append(
            Knee(
                group=group,
                peak_mib_per_s=peak.mib_per_s,
                peak_lanes=peak.lanes,
                knee_lanes=knee.lanes,
                knee_mib_per_s=knee.mib_per_s,
            )
        )
    return found


def verdict(
    rows: Sequence[Row],
    found: Sequence[Knee],
    layout: ExpertLayout | None,
    blocks: Sequence[int],
    no_layout_reason: str | None,
) -> Verdict:
    """What the engine should make of the rows.

    Args:
        rows: At least one.
        found: Their `knees`.
        layout: The model's experts, if the file is such a model.
        blocks: Block size of each of its files.
        no_layout_reason: Why there is no layout.
    """
    slice_bytes = None if layout is None else layout.slice_bytes
    knee = min(found, key=lambda k: _unfitness(k.group, slice_bytes))
    cycle_bytes = None if layout is None else layout.cycle_bytes(blocks)
    return Verdict(
        knee=knee,
        queue_depth=knee.knee_lanes,
        scatter=_scatter(rows, found),
        model_slice_bytes=slice_bytes,
        cycle_mib=None if cycle_bytes is None else round(cycle_bytes / MIB, 2),
        bounds=[] if cycle_bytes is None else bounds(knee.knee_mib_per_s, cycle_bytes / MIB),
        no_bounds_reason=no_layout_reason if layout is None else None,
    )


def bounds(mib_per_s: float, cycle_mib: float) -> list[Bound]:
    """The most tokens per second that reading alone allows, at the usual hit rates."""
    return [
        Bound(
            hit_rate=hit_rate,
            read_mib_per_token=round(cycle_mib * (1 - hit_rate), 2),
            tokens_per_s=round(mib_per_s / (cycle_mib * (1 - hit_rate)), 3),
        )
        for hit_rate in HIT_RATES
    ]


def flags(
    rows: Sequence[Row], file: FileFacts, *, memory_mib_per_s: float, dropped: float | None
) -> list[Flag]:
    """What a reader must know before believing the rows.

    Args:
        rows: The rows.
        file: What they read.
        memory_mib_per_s: How fast one thread copies memory.
        dropped: The cached fraction after everything that could be was dropped.
    """
    found = _file_flags(file, buffered=any(not row.direct for row in rows), dropped=dropped)
    direct = [row for row in rows if row.direct]
    fastest = max((row.mib_per_s for row in direct), default=0.0)
    if fastest > _MEMORY_SHARE * memory_mib_per_s:
        found.append(
            Flag(
                code="as-fast-as-memory",
                text=f"{fastest:.0f} MiB/s is about what one thread copies from memory here "
                f"({memory_mib_per_s:.0f} MiB/s): is a cache below the file system answering?",
            )
        )
    ratios = [
        statistics.median(row.samples_mib_per_s[1:]) / row.samples_mib_per_s[0]
        for row in direct
        if len(row.samples_mib_per_s) > 1 and row.samples_mib_per_s[0]
    ]
    if ratios and statistics.median(ratios) > _WARMER:
        found.append(
            Flag(
                code="faster-when-repeated",
                text=f"the same offsets were read {statistics.median(ratios):.2f} times as fast when "
                "repeated: a cache of the host or the controller may be answering",
            )
        )
    reasons = {
        row.unregistered_reason for row in rows if row.unregistered_reason and row.group.backend == "uring"
    }
    found += [Flag(code="unregistered", text=f"unregistered buffers: {reason}") for reason in sorted(reasons)]
    if any(row.group.backend == "threads" and row.lanes > row.most_in_flight for row in rows):
        most = max(row.most_in_flight for row in rows if row.group.backend == "threads")
        found.append(
            Flag(code="threads-limit", text=f"the threads backend never had more than {most} reads in flight")
        )
    return found


def _file_flags(file: FileFacts, *, buffered: bool, dropped: float | None) -> list[Flag]:
    found = []
    if buffered:
        why = f" ({file.fallback_reason})" if file.fallback_reason else ""
        found.append(
            Flag(
                code="buffered",
                text=f"BUFFERED reads{why}: the page cache takes part, this is not the drive alone",
            )
        )
        if dropped is None:
            found.append(
                Flag(
                    code="cache-unknown",
                    text="the kernel does not tell how much of the file is cached: only its owner may ask",
                )
            )
        elif dropped > _CACHED:
            found.append(
                Flag(
                    code="cache-kept",
                    text=f"{100 * dropped:.0f} % of the file stayed in the page cache and was not read "
                    "from the drive: something has it mapped or open",
                )
            )
    before, after = file.cached_before, file.cached_after
    if file.size_bytes < _SMALL_FILE_BYTES and (before is None or before > _CACHED):
        told = "may be" if before is None else f"was {100 * before:.0f} %"
        found.append(
            Flag(
                code="small-cached-file",
                text=f"the file is smaller than 1 GiB and {told} cached: a drive's or a host's cache can "
                "hold all of it, take a larger file",
            )
        )
    if not buffered and after is not None and dropped is not None and after - dropped > _CACHE_GREW:
        found.append(
            Flag(
                code="cache-filled",
                text=f"direct reads filled the page cache to {100 * after:.0f} % of the file: the file "
                "system answers O_DIRECT from memory, or another program reads the file",
            )
        )
    return found


def _unfitness(group: Group, slice_bytes: int | None) -> tuple[object, ...]:
    """Sorts the curve first that is most like what the engine does on an idle machine."""
    distance = -group.piece_bytes if slice_bytes is None else abs(math.log(group.piece_bytes / slice_bytes))
    return group.pattern != "experts", distance, group.compute_load, group.backend != "uring", group.pieces


def _scatter(rows: Sequence[Row], found: Sequence[Knee]) -> list[Scatter]:
    def kind(group: Group) -> tuple[str, int, int]:
        return group.backend, group.read_bytes, group.compute_load

    at_peak = {(knee.group, knee.peak_lanes) for knee in found}
    peaks = [row for row in rows if row.group.pattern == "random" and (row.group, row.lanes) in at_peak]
    whole = {kind(row.group): row for row in peaks if row.group.pieces == 1}
    scattered = []
    for row in peaks:
        one = whole.get(kind(row.group))
        if row.group.pieces == 1 or one is None or not one.mib_per_s:
            continue
        ratio = row.mib_per_s / one.mib_per_s
        apart = max(row.samples_mib_per_s) < min(one.samples_mib_per_s)
        backend, read_bytes, load = kind(row.group)
        scattered.append(
            Scatter(
                backend=backend,
                read_bytes=read_bytes,
                compute_load=load,
                pieces=row.group.pieces,
                ratio=round(ratio, 4),
                costs=False if ratio >= _NEAR_PEAK else apart or None,
            )
        )
    return scattered
