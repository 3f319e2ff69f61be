"""A trace as cells: what one token was routed to in one layer.

Owns the arrangement by layer and step that the views share. Must not know what they ask.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from bmoe.route.trace import RouteTrace


@dataclass(frozen=True, kw_only=True)
class Cells:
    """One cell per (turn, phase, step, layer), in order of appearance.

    Attributes:
        experts: [cells, width] int32, by slot, -1 where there is none.
        layer: [cells] int32, index among the layers that route.
        stream: [cells] int64, equal within a (turn, phase): steps follow one another only there.
        row: [cells] int64, first row.
        nth: [cells] int64, how many cells of its layer came before.
    """

    experts: NDArray[np.int32]
    layer: NDArray[np.int32]
    stream: NDArray[np.int64]
    row: NDArray[np.int64]
    nth: NDArray[np.int64]

    def by_layer(self) -> Iterator[tuple[int, NDArray[np.int64]]]:
        """(layer index, its cells in order)."""
        order = np.argsort(self.layer, kind="stable")
        bounds = np.flatnonzero(np.diff(self.layer[order], prepend=-1, append=-1))
        for low, high in pairwise(bounds):
            yield int(self.layer[order[low]]), order[low:high]


def make_cells(trace: RouteTrace) -> Cells:
    """Arranges a trace. A slot that comes twice in a cell keeps its last row."""
    row, cell = trace.cell_start, trace.cell
    width = int(np.diff(np.append(row, trace.rows)).max())
    experts = np.full((len(row), width), -1, dtype=np.int32)
    experts[cell, np.arange(trace.rows) - row[cell]] = trace.expert
    layer = trace.layer_index[row]
    order = np.argsort(layer, kind="stable")
    counts = np.bincount(layer)
    nth = np.empty(len(row), dtype=np.int64)
    nth[order] = np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts, counts)
    return Cells(
        experts=experts,
        layer=layer,
        stream=trace.turn[row].astype(np.int64) << 1 | trace.phase[row],
        row=row,
        nth=nth,
    )


def repeats(cells: Cells, lag: int) -> NDArray[np.int8]:
    """[cells, width] 1 where the expert was also routed to `lag` steps before, -1 where nothing tells."""
    found = np.full(cells.experts.shape, -1, dtype=np.int8)
    for _, of_layer in cells.by_layer():
        before, now = of_layer[:-lag], of_layer[lag:]
        linked = cells.stream[before] == cells.stream[now]
        before, now = before[linked], now[linked]
        a, b = cells.experts[before], cells.experts[now]
        common = np.zeros(b.shape, dtype=np.bool_)
        for slot in range(a.shape[1]):
            common |= b == a[:, slot : slot + 1]
        found[now] = np.where(b >= 0, common, -1)
    return found
