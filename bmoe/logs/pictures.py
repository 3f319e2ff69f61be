"""The plots of a report as PNG files, for documents.

Owns how they are drawn with matplotlib, an extra (`pip install bmoe[plot]`) imported only here. Must not know
what they show: bmoe.logs.figures says.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from bmoe.io.errors import BmoeError, FileError

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
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: PLC0415 (an extra, and slow)
        from matplotlib.figure import Figure  # noqa: PLC0415 (same)
    except ImportError:
        raise BmoeError("pictures need matplotlib", hint="pip install 'bmoe[plot]'") from None
    written = []
    try:
        os.makedirs(folder, exist_ok=True)
        for plot in plots:
            figure = Figure(figsize=(9, 2.6 if plot.kind == "intervals" else 4.2), layout="constrained")
            FigureCanvasAgg(figure)
            _draw(plot, figure.add_subplot())
            path = os.path.join(folder, f"{plot.name}.png")
            figure.savefig(path, dpi=110)
            written.append(path)
    except OSError as error:
        raise FileError(f"cannot be written: {error.strerror}", path=folder) from None
    return written


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
