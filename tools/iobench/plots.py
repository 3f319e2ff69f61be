"""A result as a picture: bandwidth and latency over lanes and over read size.

Owns the drawing; matplotlib is optional and needed only here. Must not know how anything was measured.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from bmoe.pictures import plot_figure, save_plot
from bmoe.tools.iobench.tables import group_name

if TYPE_CHECKING:
    from bmoe.tools.iobench.result import Group, Result, Row


def draw(result: Result, path: str) -> None:
    """Writes the plot. `check_plot` has been called.

    Raises:
        FileError: It cannot be written.
    """
    figure = plot_figure(12, 9)
    axes = figure.subplots(2, 2, sharex="col", squeeze=True)
    curves: dict[Group, list[Row]] = {}
    for row in result.rows:
        curves.setdefault(row.group, []).append(row)
    for group, rows in curves.items():
        ordered = sorted(rows, key=lambda row: row.lanes)
        _curve(axes, 0, [row.lanes for row in ordered], ordered, group_name(group))
    # Over read size: one curve per backend, load and number of pieces, at each curve's own knee.
    knees = {knee.group: knee.knee_lanes for knee in result.knees}
    by_size: dict[str, list[Row]] = {}
    for group, rows in curves.items():
        at_knee = next(row for row in rows if row.lanes == knees[group])
        load = f", compute load {group.compute_load}" if group.compute_load else ""
        pieces = f", {group.pieces} pieces" if group.pattern == "random" else ", experts"
        by_size.setdefault(f"{group.backend}{pieces}{load}", []).append(at_knee)
    for name, rows in by_size.items():
        ordered = sorted(rows, key=lambda row: row.group.piece_bytes)
        _curve(axes, 1, [row.group.piece_bytes / 1024 for row in ordered], ordered, name)
    _label(axes, result)
    save_plot(figure, path)


def _curve(axes: Any, column: int, x: list[float] | list[int], rows: list[Row], name: str) -> None:
    rates = [row.mib_per_s for row in rows]
    spread = [
        [row.mib_per_s - min(row.samples_mib_per_s) for row in rows],
        [max(row.samples_mib_per_s) - row.mib_per_s for row in rows],
    ]
    axes[0][column].errorbar(x, rates, yerr=spread, marker="o", capsize=3, label=name)
    p50 = [(row.submission_us.p50 + row.completion_us.p50) / 1e3 for row in rows]
    p99 = [(row.submission_us.p99 + row.completion_us.p99) / 1e3 for row in rows]
    line = axes[1][column].plot(x, p50, marker="o", label=name)[0]
    axes[1][column].plot(x, p99, linestyle=":", color=line.get_color())


def _label(axes: Any, result: Result) -> None:
    for column, (x, title) in enumerate(
        (("lanes (reads in flight)", "over lanes"), ("KiB per read, each at its knee", "over read size"))
    ):
        axes[0][column].set_title(f"Bandwidth {title}")
        axes[0][column].set_ylabel("MiB/s")
        axes[0][column].set_ylim(bottom=0)
        axes[1][column].set_title("Latency: median, dotted p99")
        axes[1][column].set_ylabel("ms")
        axes[1][column].set_yscale("log")
        axes[1][column].set_xlabel(x)
        axes[1][column].set_xscale("log", base=2)
        for row in range(2):
            axes[row][column].grid(visible=True, alpha=0.3)
        ticks = sorted({round(x) for curve in axes[1][column].lines for x in curve.get_xdata()})
        axes[1][column].set_xticks(ticks, labels=[f"{tick}" for tick in ticks])
        axes[1][column].minorticks_off()
        axes[0][column].legend(fontsize="x-small", loc="upper center", bbox_to_anchor=(0.5, -0.04), ncols=2)
    f = result.file
    how = "O_DIRECT" if f.direct else "BUFFERED"
    where = f"{f.source or os.path.basename(f.path)}, {f.file_system or 'unknown file system'}"
    axes[0][0].figure.suptitle(
        f"bmoe-iobench: {where}, {how}, Linux {result.host.kernel}, {result.created_utc}"
    )
