"""Traces made by hand, and a slow replay that was written apart from the product's.

The replay keeps sets and dictionaries, searches the whole future for belady, and shares no code with
bmoe.route: agreement is evidence.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

MIB = 1 << 20
RECORDED = Path(__file__).parent.parent.parent / "shared" / "data" / "route-traces"
HEADER = "turn,phase,step,layer,slot,expert,weight,residency,expert_bytes,dropped"


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One token in one layer: what it was routed to."""

    step: int
    layer: int
    experts: tuple[int, ...]
    phase: int = 1
    turn: int = 0
    weights: tuple[float, ...] | None = None
    residency: tuple[int, ...] | None = None
    dropped: tuple[int, ...] | None = None


def text_of(
    cells: Sequence[Cell],
    sizes: dict[int, int],
    *,
    experts: int = 8,
    top_k: int = 2,
    model: str = "m.gguf",
) -> str:
    """A trace file's content."""
    lines = ["# route_trace v1"]
    lines.append(
        f"# model={model} arch=test n_layer={max(sizes) + 1} n_expert={experts} n_expert_used={top_k}"
    )
    lines += [f"# layer={la} expert_bytes={n} dense_bytes={10 * n}" for la, n in sizes.items()]
    lines.append(HEADER)
    for cell in cells:
        width = len(cell.experts)
        weights = cell.weights or (1 / width,) * width
        residency = cell.residency or (0,) * width
        dropped = cell.dropped or (0,) * width
        for slot in range(width):
            read = sizes[cell.layer] if residency[slot] == 0 else 0
            lines.append(
                f"{cell.turn},{cell.phase},{cell.step},{cell.layer},{slot},{cell.experts[slot]},"
                f"{weights[slot]:.6g},{residency[slot]},{read},{dropped[slot]}"
            )
    return "\n".join(lines) + "\n"


def lookups_of(cells: Sequence[Cell]) -> list[tuple[int, int, list[tuple[int, int]]]]:
    """(phase, layer, routings in order) per batch."""
    found: list[tuple[int, int, list[tuple[int, int]]]] = []
    last: object = None
    for cell in cells:
        place = (cell.turn, cell.phase, cell.layer, cell.step if cell.phase else None)
        if place != last:
            found.append((cell.phase, cell.layer, []))
            last = place
        found[-1][2].extend((cell.layer, expert) for expert in cell.experts)
    return found


def slow_hits(
    cells: Sequence[Cell], sizes: dict[int, int], budget: int, policy: str, *, top_k: int = 2
) -> list[bool]:
    """For each unique lookup in order, whether it hit."""
    batches = lookups_of(cells)
    generator = random.Random(1234)  # noqa: S311 (a replay is repeatable)
    resident: dict[tuple[int, int], None] = {}
    count: dict[tuple[int, int], int] = {}
    recent: list[tuple[int, int]] = []
    hits: list[bool] = []
    layers = {la for _, la, _ in batches}
    for at, (_, layer, routed) in enumerate(batches):
        unique = list(dict.fromkeys(routed))
        for entry in unique:
            hits.append(entry in resident)
            resident[entry] = None
            count[entry] = count.get(entry, 0) + 1
        for entry in routed:
            if entry in recent:
                recent.remove(entry)
            recent.append(entry)

        def next_use(entry: tuple[int, int], at: int = at) -> int:
            return next((i for i in range(at + 1, len(batches)) if entry in batches[i][2]), len(batches))

        while True:
            candidates = [entry for entry in resident if entry not in unique]
            if policy in {"layer", "layerlfu"}:
                share = max(top_k, int(budget / len(layers) / sizes[layer]))
                candidates = [entry for entry in candidates if entry[0] == layer]
                full = sum(entry[0] == layer for entry in resident) > share
            else:
                full = sum(sizes[entry[0]] for entry in resident) > budget
            if not full or not candidates:
                break
            if policy in {"lru", "layer"}:
                victim = min(candidates, key=recent.index)
            elif policy in {"lfu", "layerlfu"}:
                victim = min(candidates, key=lambda entry: (count[entry], recent.index(entry)))
            elif policy == "belady":
                victim = max(candidates, key=lambda entry: (next_use(entry), entry))
            else:
                victim = generator.choice(candidates)
            del resident[victim]
    return hits
