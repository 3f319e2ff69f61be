"""Which pictures a report and a comparison have, as data that both the page and the PNG files draw.

Owns what is drawn and how it is thinned out. Must not know colours, plotting libraries or files. No text in
here comes from a log: names and titles are ours, and runs are called A, B, ….
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final, Literal

import numpy as np

from bmoe.logs.compare import letter
from bmoe.logs.report import rates

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from bmoe.logs.compare import Comparison
    from bmoe.logs.run_data import Run, Steps

    Series = NDArray[np.float64]

_MIB: Final = 1 << 20
_MOST_DOTS: Final = 4000
_MOST_BINS: Final = 240
_SMOOTH_TOKENS: Final = 16


@dataclass(frozen=True, kw_only=True)
class Curve:
    """One line, row of dots or layer of a stack.

    Attributes:
        name: In the legend.
        x, y: Equally many; None is a gap.
        colour: Which of the eight; the same thing has the same colour in all plots.
        dots: Dots instead of a line.
        low, high: For intervals, the bounds of each point.
    """

    name: str
    x: list[float]
    y: list[float | None]
    colour: int
    dots: bool = False
    low: list[float] | None = None
    high: list[float] | None = None


@dataclass(frozen=True, kw_only=True)
class Plot:
    """One picture.

    Attributes:
        name: One word, of files.
        title, about: What it shows; how to read it.
        kind: "lines"; "stack", whose curves add up; "heat"; "intervals", whose y is the place of a label.
        x_title, y_title: With units.
        curves: Empty for a heat map.
        grid: [rows][columns] of a heat map, row by row from below; None is unknown.
        rows, columns: What its axes say.
        labels: Of intervals, from below.
        tokens: How many the x axis spans.
    """

    name: str
    title: str
    about: str
    kind: Literal["lines", "stack", "heat", "intervals"]
    x_title: str
    y_title: str
    curves: Sequence[Curve] = ()
    grid: Sequence[Sequence[float | None]] = ()
    rows: Sequence[int] = ()
    columns: Sequence[float] = ()
    labels: Sequence[str] = ()
    tokens: int = 0


def report_plots(run: Run) -> list[Plot]:
    """All pictures that a run has data for."""
    decode = run.decode
    makers = (_speed, _time, _hits, _reads, _memory, _latency, _faults)
    plots = [*(plot for make in makers if (plot := make(decode))), *_layers(run)]
    return [replace(plot, tokens=decode.count) for plot in plots]


def comparison_plots(runs: Sequence[Run], found: Comparison) -> list[Plot]:
    """Intervals of every pair, and the courses of speed, hits and reads, run beside run."""
    plots = [plot for i, _ in enumerate(found.pairs) if (plot := _intervals(found, i))]
    for name, title, y_title, values in (
        ("speeds", "Speed", "tok/s", _rolling_rate),
        ("hits", "Hit rate", "%", _rolling_hits),
        ("reads", "Reads", "MiB/token", _rolling_reads),
    ):
        curves = [
            _curve(letter(i), *course, i)
            for i, run in enumerate(runs)
            if (course := values(run.decode)) is not None
        ]
        if len(curves) > 1:
            plots.append(
                Plot(
                    name=name,
                    title=title,
                    about=f"over {_SMOOTH_TOKENS} tokens each",
                    kind="lines",
                    x_title="token",
                    y_title=y_title,
                    curves=curves,
                    tokens=max(run.decode.count for run in runs),
                )
            )
    return plots


def _speed(decode: Steps) -> Plot | None:
    dots = _binned(rates(decode), _MOST_DOTS)
    course = _rolling_rate(decode)
    return Plot(
        name="speed",
        title="Speed",
        about=f"each token, and {_SMOOTH_TOKENS} tokens in a row",
        kind="lines",
        x_title="token",
        y_title="tok/s",
        curves=[
            _curve("each token", *dots, 3, dots=True),
            *([_curve(f"over {_SMOOTH_TOKENS} tokens", *course, 1)] if course else []),
        ],
    )


def _time(decode: Steps) -> Plot | None:
    names = {"compute": 1, "stall": 2, "hook": 4, "overhead": 3}
    curves = [
        _curve(name, *_binned(np.nan_to_num(decode[f"{name}_ns"]) / 1e6, _MOST_BINS), colour)
        for name, colour in names.items()
        if decode.measured(f"{name}_ns") and np.nansum(decode[f"{name}_ns"]) > 0
    ]
    if not curves:
        return None
    return Plot(
        name="time",
        title="Where the time went",
        about="compute, stall and hook make up llama_decode; overhead lies between. Compute is what remains "
        "of the time, so it holds page faults too",
        kind="stack",
        x_title="token",
        y_title="ms/token",
        curves=curves,
    )


def _hits(decode: Steps) -> Plot | None:
    if (course := _rolling_hits(decode)) is not None:
        curve, about = (
            _curve("hit rate", *course, 5),
            f"experts found in the cache, over {_SMOOTH_TOKENS} tokens",
        )
    elif decode.measured("cache_hit_ratio_cumulative"):
        ratio = _binned(100 * decode["cache_hit_ratio_cumulative"], _MOST_DOTS)
        curve, about = _curve("cumulative", *ratio, 5), "cumulative, prompt included, as the log states it"
    else:
        return None
    return Plot(
        name="hits", title="Hit rate", about=about, kind="lines", x_title="token", y_title="%", curves=[curve]
    )


def _reads(decode: Steps) -> Plot | None:
    course = _rolling_reads(decode)
    if course is None or not decode["read_bytes"].any():
        return None
    dots = _binned(decode["read_bytes"] / _MIB, _MOST_DOTS)
    return Plot(
        name="reads",
        title="Reads",
        about=f"each token, and {_SMOOTH_TOKENS} tokens in a row",
        kind="lines",
        x_title="token",
        y_title="MiB/token",
        curves=[
            _curve("each token", *dots, 3, dots=True),
            _curve(f"over {_SMOOTH_TOKENS} tokens", *course, 1),
        ],
    )


def _memory(decode: Steps) -> Plot | None:
    names = {
        "resident": ("rss_bytes", 0),
        "anonymous": ("rss_anon_bytes", 1),
        "of files": ("rss_file_bytes", 5),
        "in swap": ("swap_bytes", 2),
        "available": ("mem_available_bytes", 3),
        "cache budget": ("cache_budget_bytes", 4),
    }
    curves = []
    for name, (column, colour) in names.items():
        values = decode[column]
        sampled = np.nonzero(np.isfinite(values))[0]
        if len(sampled) and values[sampled].any():
            sampled = sampled[:: math.ceil(len(sampled) / _MOST_DOTS)]
            curves.append(_curve(name, sampled.astype(float), values[sampled] / _MIB, colour))
    if not curves:
        return None
    return Plot(
        name="memory",
        title="Memory",
        about="of the process, and what the machine had available; sampled now and then",
        kind="lines",
        x_title="token",
        y_title="MiB",
        curves=curves,
    )


def _latency(decode: Steps) -> Plot | None:
    names = {"read": ("read_latency_ns", 1), "submission": ("submit_latency_ns", 4)}
    curves = [
        _curve(name, *_binned(decode[column] / 1e6, _MOST_BINS), colour)
        for name, (column, colour) in names.items()
        if decode.measured(column)
    ]
    if not curves:
        return None
    return Plot(
        name="latency",
        title="Latency of reads",
        about="a token's mean: from handed over to done; from routing known to handed over",
        kind="lines",
        x_title="token",
        y_title="ms",
        curves=curves,
    )


def _faults(decode: Steps) -> Plot | None:
    faults = decode["major_faults"]
    if not decode.measured("major_faults") or np.nansum(faults) == 0:
        return None
    return Plot(
        name="faults",
        title="Page faults",
        about="that waited for the drive; their time is in compute",
        kind="lines",
        x_title="token",
        y_title="1/token",
        curves=[_curve("major faults", *_binned(faults, _MOST_DOTS), 2)],
    )


def _layers(run: Run) -> list[Plot]:
    if run.layers is None:
        return []
    figures = run.layers.figures
    tokens = run.decode.count
    bins = np.minimum(np.arange(tokens) * min(_MOST_BINS, tokens) // tokens, _MOST_BINS - 1)
    starts = np.nonzero(np.diff(bins, prepend=-1))[0]

    def summed(name: str) -> Series:
        return np.add.reduceat(np.nan_to_num(figures[name]), starts, axis=1)

    lookups, stall = summed("lookups"), summed("stall_ns")
    with np.errstate(divide="ignore", invalid="ignore"):
        missed = 100 * (lookups - summed("hits")) / lookups
    widths = np.diff(np.append(starts, tokens))
    plots = []
    for name, title, about, values in (
        ("layer_misses", "Misses by layer", "% of the experts looked up", missed),
        ("layer_stall", "Stall by layer", "ms per token", stall / widths / 1e6),
    ):
        if np.isfinite(values).any() and np.nansum(values) > 0:
            plots.append(
                Plot(
                    name=name,
                    title=title,
                    about=about,
                    kind="heat",
                    x_title="token",
                    y_title="layer",
                    grid=[[_number(v) for v in row] for row in values],
                    rows=run.layers.layers.tolist(),
                    columns=starts.astype(float).tolist(),
                )
            )
    return plots


def _intervals(found: Comparison, index: int) -> Plot | None:
    """Changes in percent of the first run, for what is compared as a ratio."""
    made = [
        (d.figure, d.estimate, d.low, d.high)
        for d in found.pairs[index].differences
        if d.kind == "ratio" and d.estimate is not None and d.low is not None and d.high is not None
    ]
    if not made:
        return None
    made.reverse()  # the first on top
    name = letter(index + 1)
    change = [[100 * (value - 1) for value in column] for column in list(zip(*made, strict=True))[1:]]
    return Plot(
        name=f"intervals_{name.lower()}",
        title=f"{name} against A",
        about=f"change from A to {name} with 95 % intervals; one across 0 shows no difference",
        kind="intervals",
        x_title="%",
        y_title="",
        curves=[
            Curve(
                name=name,
                x=change[0],
                y=list(range(len(made))),
                colour=1,
                low=change[1],
                high=change[2],
            )
        ],
        labels=[row[0] for row in made],
    )


def _rolling_rate(decode: Steps) -> tuple[Series, Series] | None:
    found = _rolling(decode, None, "wall_ns")
    return None if found is None else (found[0], found[1] * 1e9)


def _rolling_hits(decode: Steps) -> tuple[Series, Series] | None:
    found = _rolling(decode, "hits", "lookups")
    return None if found is None else (found[0], found[1] * 100)


def _rolling_reads(decode: Steps) -> tuple[Series, Series] | None:
    found = _rolling(decode, "read_bytes", None)
    return None if found is None else (found[0], found[1] / _MIB)


def _rolling(decode: Steps, top: str | None, bottom: str | None) -> tuple[Series, Series] | None:
    """Sum over sum of 16 tokens in a row, at their middle; None counts tokens."""
    width = min(_SMOOTH_TOKENS, decode.count)
    sums = []
    for name in (top, bottom):
        values = np.ones(decode.count) if name is None else decode[name]
        if not np.isfinite(values).any():
            return None
        running = np.concatenate(([0.0], np.cumsum(np.nan_to_num(values))))
        unknown = np.concatenate(([0], np.cumsum(~np.isfinite(values))))
        part = running[width:] - running[:-width]
        part[unknown[width:] > unknown[:-width]] = np.nan
        sums.append(part)
    with np.errstate(divide="ignore", invalid="ignore"):
        values = np.where(sums[1] > 0, sums[0] / sums[1], np.nan)
    if not np.isfinite(values).any():
        return None
    every = math.ceil(len(values) / _MOST_DOTS)
    middles = np.arange(len(values), dtype=np.float64) + (width - 1) / 2
    return middles[::every], values[::every]


def _binned(values: Series, most: int) -> tuple[Series, Series]:
    """Means of equally many tokens in a row, at their middle; unknown ones do not count."""
    width = math.ceil(len(values) / most)
    starts = np.arange(0, len(values), width)
    known = np.add.reduceat(np.isfinite(values).astype(float), starts)
    with np.errstate(divide="ignore", invalid="ignore"):
        means = np.add.reduceat(np.nan_to_num(values), starts) / known
    ends = np.minimum(starts + width, len(values))
    return (starts + ends - 1) / 2, means


def _curve(name: str, x: Series, y: Series, colour: int, *, dots: bool = False) -> Curve:
    return Curve(name=name, x=x.tolist(), y=[_number(v) for v in y], colour=colour % 8, dots=dots)


def _number(value: float) -> float | None:
    """Six digits: more cannot be seen, and make the page larger."""
    return float(f"{value:.6g}") if math.isfinite(value) else None
