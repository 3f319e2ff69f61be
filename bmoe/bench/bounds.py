"""How fast a side could be: the layered bound and the ideal one, per token.

Owns the arithmetic of docs/benchmarks.md. Must not know how anything was measured.

    layered   D + sum over layers of max(read, E / layers)
    ideal     max(all bytes / bandwidth, D + E)

E is the time in expert matmuls and D the rest, both of a run with every expert cached. A layer's read time is
taken twice: its bytes over the drive's full bandwidth, and what a burst of that many reads takes on the idle
drive ("at depth"). Drive and compute are those of the same round: the drive's speed drifts more than anything
else. A limit by control group averages: a layer's burst passes at full speed, all bytes together do not. Both
are then the greater of the two.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True, kw_only=True, slots=True)
class Bounds:
    """Tokens per second that one run could have reached."""

    layered: float
    at_depth: float
    ideal: float


def bounds(row: Mapping[str, Any], cached: Mapping[str, Any], drive: Mapping[str, Any]) -> Bounds | None:
    """Of one run.

    Args:
        row: Its figures.
        cached: Of the run with everything cached, same round and threads.
        drive: Of the drive, same round, with `limited` where a control group limits it.

    Returns:
        None where something that it takes was not measured.
    """
    if "layer_reads" not in row or "experts_s_per_token" not in cached or "burst_s" not in drive:
        return None
    whole_s, experts_s = 1 / cached["decode_tok_per_s"], cached["experts_s_per_token"]
    layers, tokens = cached["layers"], row["tokens"]
    slice_s = fastest_slice_s = drive["read_bytes"] / (drive["drive_gib_per_s"] * (1 << 30))
    if drive.get("limited"):
        drive = {**drive, "burst_s": passing_bursts(drive)}
        fastest_slice_s = min(seconds / int(n) for n, seconds in drive["burst_s"].items())
    each_s = experts_s / layers
    asked = {int(n): count for n, count in row["layer_reads"].items()}
    rest_s = whole_s - experts_s + (tokens * layers - sum(asked.values())) * each_s / tokens
    layered_s = rest_s + sum(c * max(n * fastest_slice_s, each_s) for n, c in asked.items()) / tokens
    at_depth_s = (
        rest_s
        + sum(c * max(burst_s(drive, n), n * fastest_slice_s, each_s) for n, c in asked.items()) / tokens
    )
    all_s = sum(n * c for n, c in asked.items()) * slice_s / tokens
    return Bounds(
        layered=1 / max(layered_s, all_s), at_depth=1 / max(at_depth_s, all_s), ideal=1 / max(whole_s, all_s)
    )


def passing_bursts(drive: Mapping[str, Any]) -> dict[str, float]:
    """Of a limited drive, the bursts that its limit lets pass; all if none is faster than the limit."""
    limit = 1.2 * drive["drive_gib_per_s"] * (1 << 30)
    found = {n: s for n, s in drive["burst_s"].items() if int(n) * drive["read_bytes"] > limit * s}
    return found or dict(drive["burst_s"])


def burst_s(drive: Mapping[str, Any], reads: int) -> float:
    """What a burst of that many reads takes: interpolated between measured sizes, in proportion beyond."""
    points = sorted((int(n), float(value)) for n, value in drive["burst_s"].items())
    for (n0, t0), (n1, t1) in itertools.pairwise(points):
        if reads <= n1:
            return t0 + (t1 - t0) * (reads - n0) / (n1 - n0)
    return points[-1][1] * reads / points[-1][0]
