"""The matrix view: steps down, layers across, and what was routed to in each cell.

Owns the window that fits a terminal and the marks in it; programs get every cell that was selected. Must not
know the terminal.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Final

import numpy as np

from bmoe.route.cells import make_cells, repeats
from bmoe.route.cost_views import row_read_bytes
from bmoe.route.report import Table

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from bmoe.route.report import Value
    from bmoe.route.trace import RouteTrace

CONTENTS: Final = ("experts", "weights", "mib", "hit")
_MIB: Final = 1 << 20
_MARKS: Final = "xo+"  # miss, hit, prefetched


def matrix(trace: RouteTrace, *, content: str, max_steps: int, width: int) -> list[Table]:
    """A table with one row per cell; as text, a grid of the first steps and layers.

    Args:
        trace: What is shown.
        content: One of CONTENTS; only text differs.
        max_steps: Most lines of the grid.
        width: Most characters of a line.
    """
    cells = make_cells(trace)
    again = repeats(cells, 1)
    read = row_read_bytes(trace)
    read_of = None if read is None else np.add.reduceat(read, trace.cell_start)
    ends = np.append(trace.cell_start, trace.rows)
    rows: list[tuple[Value, ...]] = []
    for c, (low, high) in enumerate(pairwise(ends.tolist())):
        n = high - low
        rows.append(
            (
                int(trace.turn[low]),
                int(trace.phase[low]),
                int(trace.step[low]),
                int(trace.layer[low]),
                trace.expert[low:high].tolist(),
                [None if again[c, j] < 0 else int(again[c, j]) for j in range(n)],
                None if trace.weight is None else [_known(w) for w in trace.weight[low:high].tolist()],
                None if trace.residency is None else trace.residency[low:high].tolist(),
                None if read_of is None else int(read_of[c]),
            )
        )
    return [
        Table(
            name="matrix",
            title=f"matrix: {_LEGENDS[content]}",
            columns=dict.fromkeys(
                (
                    "turn",
                    "phase",
                    "step",
                    "layer",
                    "experts",
                    "repeated",
                    "weights",
                    "residency",
                    "read_bytes",
                ),
                "",
            ),
            rows=rows,
            text=_lines(trace, cells.layer, _texts(trace, again, read_of, content), max_steps, width),
        )
    ]


_LEGENDS: Final = {
    "experts": "experts by step and layer; * was also routed to in the step before",
    "weights": "weights in percent by step and layer; * was also routed to in the step before",
    "mib": "MiB read by step and layer",
    "hit": "by step and layer, in order of rank: o hit, x miss, + prefetched, ? unknown",
}


def _known(weight: float) -> float | None:
    return weight if weight == weight else None  # noqa: PLR0124 (NaN is the one that differs)


def _lines(
    trace: RouteTrace, cell_layer: NDArray[np.int32], texts: Callable[[int], str], max_steps: int, width: int
) -> list[str]:
    ends = np.append(trace.cell_start, trace.rows)
    grid: dict[tuple[int, int, int], dict[int, str]] = {}
    for c, layer in enumerate(cell_layer.tolist()):
        low = int(ends[c])
        key = (int(trace.turn[low]), int(trace.phase[low]), int(trace.step[low]))
        if key not in grid and len(grid) == max_steps:
            continue
        row = grid.setdefault(key, {})
        if layer not in row:  # steps of unknown position share a line: the first is shown
            row[layer] = texts(c)
    columns = [max(len(row.get(i, "")) for row in grid.values()) for i in range(len(trace.layers))]
    columns = [max(n, len(f"L{la}")) for n, la in zip(columns, trace.layers, strict=True)]
    heads = ["P " * (key[1] == 0) + (f"{key[0]}/" if key[0] else "") + str(key[2]) for key in grid]
    left = max(map(len, [*heads, "step"])) + 2
    shown, used = 0, left
    while shown < len(columns) and (used + columns[shown] + 2 <= width or not shown):
        used += columns[shown] + 2
        shown += 1
    lines = [
        f"{'step':>{left}}  " + "  ".join(f"{f'L{trace.layers[i]}':<{columns[i]}}" for i in range(shown))
    ]
    for head, row in zip(heads, grid.values(), strict=True):
        lines.append(f"{head:>{left}}  " + "  ".join(f"{row.get(i, ''):<{columns[i]}}" for i in range(shown)))
    steps = len(np.unique(np.stack((trace.turn, trace.phase, trace.step)), axis=1).T)
    if (hidden := len(columns) - shown) or steps > len(grid):
        lines.append(
            f"  ({steps - len(grid)} more steps and {hidden} more layers: --max-steps, --steps, --layers)"
        )
    return [line.rstrip() for line in lines]


def _texts(
    trace: RouteTrace, again: NDArray[np.int8], read_of: NDArray[np.int64] | None, content: str
) -> Callable[[int], str]:
    """What a cell shows, by its number."""
    ends = np.append(trace.cell_start, trace.rows).tolist()

    def found(cell: int) -> str:
        if trace.residency is None:
            return "?" * int(ends[cell + 1] - ends[cell])
        marks: list[int] = trace.residency[ends[cell] : ends[cell + 1]].tolist()
        return "".join([_MARKS[mark] for mark in marks])

    def read(cell: int) -> str:
        return "?" if read_of is None else f"{read_of[cell] / _MIB:.1f}"

    def names(cell: int) -> str:
        parts = []
        for j, row in enumerate(range(ends[cell], ends[cell + 1])):
            if content == "experts":
                text = str(trace.expert[row])
            else:
                weight = np.nan if trace.weight is None else float(trace.weight[row])
                text = "?" if np.isnan(weight) else f"{100 * weight:.0f}"
            parts.append(text + ("*" if again[cell, j] == 1 else ""))
        return " ".join(parts)

    return {"hit": found, "mib": read}.get(content, names)
