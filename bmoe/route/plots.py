"""`bmoe route analyze --plot DIR`: pictures of a trace as PNG files.

Owns which pictures there are. Must not
count anything that the views have not counted.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from bmoe.pictures import write_pictures
from bmoe.route import routing_views
from bmoe.route.trace import MISS

if TYPE_CHECKING:
    from collections.abc import Callable

    from bmoe.route.report import Table
    from bmoe.route.trace import RouteTrace


def write_plots(trace: RouteTrace, folder: str) -> list[str]:
    """Writes every picture the trace has data for.

    Args:
        trace: Already selected.
        folder: Made if it does not exist.

    Returns:
        The files' paths.

    Raises:
        BmoeError: matplotlib is not installed.
        FileError: The folder cannot be written to.
    """
    pictures: dict[str, Callable[[RouteTrace, Any], bool]] = {
        "misses": _misses,
        "overlap": _overlap,
        "workset": _workset,
        "coverage": _coverage,
        "reuse": _reuse,
    }
    return write_pictures(folder, {name: (4.5, partial(draw, trace)) for name, draw in pictures.items()})


def _misses(trace: RouteTrace, axes: Any) -> bool:
    if trace.residency is None:
        return False
    missed = np.add.reduceat((trace.residency == MISS).astype(np.float64), trace.cell_start)
    share = missed / np.diff(np.append(trace.cell_start, trace.rows))
    layer = trace.layer_index[trace.cell_start]
    order = np.argsort(layer, kind="stable")
    counts = np.bincount(layer)
    grid = np.full((len(counts), counts.max()), np.nan)
    grid[layer[order], np.arange(len(order)) - np.repeat(np.cumsum(counts) - counts, counts)] = share[order]
    image = axes.imshow(grid, aspect="auto", cmap="inferno", vmin=0, vmax=1, interpolation="nearest")
    axes.figure.colorbar(image, label="share missed")
    axes.set(xlabel="step", ylabel="layer (of those that route)", title="misses by step and layer")
    return True


def _overlap(trace: RouteTrace, axes: Any) -> bool:
    [table] = routing_views.overlap(trace)
    rows = table.rows[1:]
    for j, lag in enumerate(routing_views.LAGS, 1):
        axes.plot([int(str(row[0])) for row in rows], _numbers(table, j)[1:], label=f"{lag} before")
    axes.legend()
    axes.set(xlabel="layer", ylabel="%", ylim=(0, 100), title="experts in common with an earlier step")
    return True


def _workset(trace: RouteTrace, axes: Any) -> bool:
    [table] = routing_views.workset(trace)
    axes.plot(_numbers(table, 0), _numbers(table, 1), marker="o")
    axes.set(xlabel="steps", ylabel="experts", xscale="log", title="different experts touched")
    return True


def _coverage(trace: RouteTrace, axes: Any) -> bool:
    table = routing_views.hot(trace, top=1)[1]
    axes.plot(_numbers(table, 1), _numbers(table, 2), marker="o")
    axes.set(xlabel="% of experts, most used first", ylabel="% of use", title="concentration")
    return True


def _reuse(trace: RouteTrace, axes: Any) -> bool:
    [table] = routing_views.reuse(trace)
    layers = [int(str(row[0])) for row in table.rows[1:]]
    for column, label in ((2, "half"), (3, "nine tenths")):
        axes.plot(layers, _numbers(table, column)[1:], label=label)
    axes.legend()
    axes.set(xlabel="layer", ylabel="steps", title="steps until an expert is used again")
    return True


def _numbers(table: Table, column: int) -> list[float]:
    values = [row[column] for row in table.rows]
    return [float(v) if isinstance(v, (int, float)) else float("nan") for v in values]
