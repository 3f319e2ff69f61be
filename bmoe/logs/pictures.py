"""The plots of a report as PNG files, for documents.

Owns how they are drawn. Must not know
what they show: bmoe.logs.figures says.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from bmoe import pictures

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bmoe.logs.figures import Plot

_COLOURS: Final = ("#1b1f24", "#1f5fbf", "#b2301c", "#8b95a1", "#b07a00", "#2f7d4f", "#7a3fb0", "#0f7c86")


def write_pictures(plots: Sequence[Plot], folder: str) -> list[str]:
    """Writes each plot as NAME.png.

    Args:
        plots: What to draw.
        folder: Made if it does not exist.

    Returns:
        The files' paths.

    Raises:
        BmoeError: matplotlib is not installed.
        FileError: The folder cannot be written to.
    """
    return pictures.write_pictures(
        folder,
        {plot.name: (2.6 if plot.kind == "intervals" else 4.2, partial(_drawn, plot)) for plot in plots},
    )


def _drawn(plot: Plot, axes: Any) -> bool:
    _draw(plot, axes)
    return True


def _draw(plot: Plot, axes: Any) -> None:
    axes.set(title=plot.title, xlabel=plot.x_title, ylabel=plot.y_title)
    axes.spines[["top", "right"]].set_visible(False)
    if plot.kind == "heat":
        values = np.array([[np.nan if v is None else v for v in row] for row in plot.grid])
        mesh = axes.pcolormesh(plot.columns, range(len(plot.rows)), values, cmap="inferno", shading="nearest")
        every = -(-len(plot.rows) // 12)
        axes.set_yticks(range(0, len(plot.rows), every), plot.rows[::every])
        axes.figure.colorbar(mesh, label=plot.about)
        return
    axes.grid(color="#d9dee4", linewidth=0.6)
    axes.set_axisbelow(True)
    if plot.kind == "intervals":
        [curve] = plot.curves
        x, low, high = (np.array(values) for values in (curve.x, curve.low, curve.high))
        axes.errorbar(x, curve.y, xerr=(x - low, high - x), fmt="o", capsize=3, color=_COLOURS[1])
        axes.axvline(0, color=_COLOURS[0], linewidth=1)
        axes.set_yticks(range(len(plot.labels)), plot.labels)
        return
    curves = [(c, np.array([np.nan if v is None else v for v in c.y])) for c in plot.curves]
    if plot.kind == "stack":
        colours = [_COLOURS[c.colour] for c, _ in curves]
        parts = [np.nan_to_num(y) for _, y in curves]
        axes.stackplot(curves[0][0].x, parts, labels=[c.name for c, _ in curves], colors=colours)
    else:
        for curve, y in curves:
            style = {"marker": ".", "linestyle": "", "markersize": 3} if curve.dots else {"linewidth": 1.6}
            axes.plot(curve.x, y, color=_COLOURS[curve.colour], label=curve.name, **style)
        axes.set_ylim(bottom=0)
    if len(curves) > 1:
        axes.legend(frameon=False, ncols=3, fontsize="small")
