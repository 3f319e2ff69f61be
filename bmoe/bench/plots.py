"""A benchmark as a picture: tokens per second of every side, and over cache where there are several.

Owns the drawing; matplotlib is optional and needed only here. Must not know how anything was measured.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, Final

from bmoe.pictures import plot_figure, save_plot

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_MIB: Final = 1 << 20


def draw(record: Mapping[str, Any], path: str) -> None:
    """Writes the plot. `check_plot` has been called.

    Raises:
        FileError: It cannot be written.
    """
    rows = [r for r in record["rows"] if r["counts"] == "decode" and r["figures"]["decode_tok_per_s"]]
    figure = plot_figure(14, max(3.0, 0.45 * len(rows)) + 1.5)
    bars, curves = figure.subplots(1, 2)
    _draw_bars(bars, rows)
    _draw_curves(curves, record, {row["key"]: row for row in rows})
    synthetic = ", SYNTHETIC routing" if record["inputs"]["replay_routing"] is not None else ""
    name = os.path.basename(record["model"]["path"])
    figure.suptitle(f"bmoe bench: {name}, {record['rounds']} rounds{synthetic}, {record['created_utc']}")
    save_plot(figure, path)


def _draw_bars(axes: Any, rows: Sequence[Mapping[str, Any]]) -> None:
    rates = [row["figures"]["decode_tok_per_s"] for row in rows]
    medians = [rate["median"] for rate in rates]
    errors = [
        [rate["median"] - rate["low"] for rate in rates],
        [rate["high"] - rate["median"] for rate in rates],
    ]
    places = list(range(len(rows)))
    axes.barh(places, medians, xerr=errors, capsize=3, color="tab:blue", alpha=0.8)
    layered = [
        (y, row["bounds"]["layered"]) for y, row in zip(places, rows, strict=True) if row["bounds"]["layered"]
    ]
    if layered:
        axes.plot(
            [b["median"] for _, b in layered], [y for y, _ in layered], "k|", ms=14, label="layered bound"
        )
        axes.legend(fontsize="x-small")
    axes.set_yticks(places, labels=[row["side"] for row in rows], fontsize="x-small")
    axes.invert_yaxis()
    axes.set_xlabel("tok/s, median and range")
    axes.grid(visible=True, axis="x", alpha=0.3)


def _draw_curves(axes: Any, record: Mapping[str, Any], rows: Mapping[str, Mapping[str, Any]]) -> None:
    """Sides that differ only in their cache, as a curve over it."""
    by_kind: dict[str, list[tuple[float, Mapping[str, Any]]]] = {}
    for side in record["sides"]:
        row = rows.get(side["key"])
        if row is None or side["cache_bytes"] is None or side["kind"] != "stream":
            continue
        words = [word for word in side["name"].split(", ") if not word.startswith("cache ")]
        by_kind.setdefault(", ".join(words), []).append((side["cache_bytes"] / _MIB, row))
    shown = {name: sorted(points, key=lambda p: p[0]) for name, points in by_kind.items() if len(points) > 1}
    predicted = {s["key"]: s["predicted_tok_per_s"] for s in record["simulation"] or ()}
    for name, points in shown.items():
        rates = [row["figures"]["decode_tok_per_s"]["median"] for _, row in points]
        line = axes.plot([cache for cache, _ in points], rates, marker="o", label=name)[0]
        bound = [
            (cache, row["bounds"]["layered"]["median"]) for cache, row in points if row["bounds"]["layered"]
        ]
        axes.plot([c for c, _ in bound], [b for _, b in bound], linestyle=":", color=line.get_color())
        at = [(cache, predicted[row["key"]]) for cache, row in points if row["key"] in predicted]
        axes.plot([c for c, _ in at], [p for _, p in at], "x", color=line.get_color())
    axes.set_xlabel("cache in MiB")
    axes.set_ylabel("tok/s; dotted: layered bound; x: simulated")
    axes.set_ylim(bottom=0)
    axes.grid(visible=True, alpha=0.3)
    if shown:
        axes.legend(fontsize="x-small")
    else:
        axes.set_visible(False)
