"""Confidence intervals for what one run did against another, from their series per token.

Owns the resampling. Tokens are not independent (a cache warms, a text changes its subject), so blocks of
consecutive ones are drawn: the circular block bootstrap (Politis and Romano 1992), with a block length from
the series' own correlation (Politis and White 2004, as corrected by Patton, Politis and White 2009). Both
runs are drawn at the same steps: what they share there, a warming cache or the same tokens, cancels. Few
blocks give intervals that are too short, which the expanded percentiles of Hesterberg (2015)
make good. Must not know what the series mean.

What no such interval holds: how a run differs from the same run on another day.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist
from typing import TYPE_CHECKING, Final

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Series = NDArray[np.float64]

LEVEL: Final = 0.95
LEAST_STEPS: Final = 16
_DRAWS: Final = 5000
_SEED: Final = 20240601
_FEWEST_BLOCKS: Final = 6
_MOST_BLOCKS: Final = 8192  # longer series are drawn in longer blocks, which is always sound
_AT_ONCE: Final = 1 << 20
_NORMAL: Final = NormalDist()


@dataclass(frozen=True, kw_only=True)
class Side:
    """One run's figure: sum(top) over sum(bottom), as hits over lookups.

    Attributes:
        top, bottom: [steps] each.
    """

    top: Series
    bottom: Series

    @property
    def value(self) -> float:
        """The figure; NaN over nothing."""
        below = float(self.bottom.sum())
        return float(self.top.sum()) / below if below else math.nan

    def influence(self) -> Series:
        """[steps] what each adds to the figure's error, to first order."""
        error: Series = (self.top - self.value * self.bottom) / self.bottom.mean()
        return error


@dataclass(frozen=True, kw_only=True)
class Interval:
    """An estimate and where it may lie.

    Attributes:
        estimate: Ratio (other over base) or difference (other minus base).
        low, high: At the level asked for; None for too few steps.
        block_steps: Length of the blocks drawn.
    """

    estimate: float
    low: float | None
    high: float | None
    block_steps: int | None

    def excludes(self, value: float) -> bool:
        """Whether the interval exists and does not hold the value."""
        return self.low is not None and self.high is not None and not self.low <= value <= self.high


def intervals(
    base: Side,
    other: Side,
    *,
    ratio: bool,
    levels: tuple[float, ...] = (LEVEL,),
) -> list[Interval]:
    """The change from base to other, with an interval for each level, out of the same draws.

    Args:
        base: The one run.
        other: The other, of equal length, step beside step.
        ratio: Other over base, both positive; else other minus base.
        levels: Two-sided, each below 1.

    Returns:
        In the order of the levels. Always the same for the same input.
    """
    a, b = base.value, other.value
    steps = len(base.top)
    possible = a > 0 and b > 0 if ratio else math.isfinite(a) and math.isfinite(b)
    estimate = (b / a if ratio else b - a) if possible else math.nan
    if not possible or steps < LEAST_STEPS:
        return [Interval(estimate=estimate, low=None, high=None, block_steps=None)] * len(levels)
    scale_a, scale_b = (a, b) if ratio else (1.0, 1.0)
    length = block_length(other.influence() / scale_b - base.influence() / scale_a)
    drawn_a, drawn_b = _draw((base, other), length)
    with np.errstate(divide="ignore", invalid="ignore"):
        drawn = drawn_b / drawn_a if ratio else drawn_b - drawn_a
    drawn = np.sort(drawn[np.isfinite(drawn)])
    found = []
    for level in levels:
        tail = _expanded_tail((1 - level) / 2, math.ceil(steps / length))
        low, high = np.quantile(drawn, [tail, 1 - tail]) if len(drawn) else (math.nan, math.nan)
        found.append(Interval(estimate=estimate, low=float(low), high=float(high), block_steps=length))
    return found


def _draw(sides: tuple[Side, Side], length: int) -> list[Series]:
    """[draws] figures for each side, all drawn at the same steps."""
    rng = np.random.default_rng(_SEED)
    steps = len(sides[0].top)
    blocks = math.ceil(steps / length)
    last = steps - (blocks - 1) * length
    # Sums over blocks by differences of running sums, round the end.
    running = [
        np.concatenate(([0.0], np.cumsum(np.concatenate((series, series[:length])))))
        for side in sides
        for series in (side.top, side.bottom)
    ]
    drawn: list[list[Series]] = [[] for _ in running]
    left = _DRAWS
    while left:
        count = min(left, max(1, _AT_ONCE // blocks))
        starts = rng.integers(0, steps, size=(count, blocks))
        ends = starts + length
        ends[:, -1] = starts[:, -1] + last
        for into, sums in zip(drawn, running, strict=True):
            into.append((sums[ends] - sums[starts]).sum(axis=1))
        left -= count
    totals = [np.concatenate(parts) for parts in drawn]
    with np.errstate(divide="ignore", invalid="ignore"):
        return [totals[i] / totals[i + 1] for i in range(0, len(totals), 2)]


def block_length(series: Series) -> int:
    """How many consecutive steps to draw together.

    Twice what minimises the error of the mean's variance, and at least 1.5 steps^(1/3): simulated pairs of
    equal runs with correlated tokens were called different least often so, for intervals hardly longer.
    """
    steps = len(series)
    least: int = max(math.ceil(1.5 * math.cbrt(steps)), math.ceil(steps / _MOST_BLOCKS))
    return max(1, min(max(2 * _optimal_length(series), least), steps // _FEWEST_BLOCKS))


def _optimal_length(series: Series) -> int:
    """Politis and White's, for circular blocks."""
    steps = len(series)
    most = math.ceil(min(3 * math.sqrt(steps), steps / 3))
    centred = series - series.mean()
    variance = float(centred @ centred) / steps
    # Rounding makes a constant series vary a little, and that with a period.
    if variance <= (1e-12 * float(np.abs(series).max(initial=0.0))) ** 2:
        return 1
    in_a_row = max(5, math.ceil(math.sqrt(math.log10(steps))))
    lags = min(math.ceil(math.sqrt(steps)) + in_a_row, steps - 1)
    correlation = np.array([float(centred[k:] @ centred[: steps - k]) / steps for k in range(lags + 1)])
    small = np.abs(correlation[1:]) < 2 * math.sqrt(math.log10(steps) / steps) * variance
    run, last_large = 0, lags
    for at, is_small in enumerate(small.tolist(), 1):
        run = run + 1 if is_small else 0
        if run == in_a_row:
            last_large = at - in_a_row
            break
    reach = min(2 * max(last_large, 1), lags)
    lag = np.arange(1, reach + 1)
    window = np.clip(2 * (1 - lag / reach), 0, 1) if reach > 1 else np.ones(1)
    spectrum = variance + 2 * float(window @ correlation[1 : reach + 1])
    slope = 2 * float((window * lag) @ correlation[1 : reach + 1])
    if spectrum <= 0:
        return most
    length = (1.5 * (slope / spectrum) ** 2 * steps) ** (1 / 3)
    return int(min(max(math.ceil(length), 1), most))


def _expanded_tail(tail: float, blocks: int) -> float:
    """The share of draws to leave out at each end, less than `tail` for few blocks."""
    return _NORMAL.cdf(-_student_quantile(1 - tail, blocks - 1) * math.sqrt(blocks / (blocks - 1)))


def _student_quantile(probability: float, freedom: int) -> float:
    """Of Student's t, by bisection of its closed distribution function."""
    low, high = 0.0, 1.0
    while _student_cdf(high, freedom) < probability:
        high *= 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _student_cdf(middle, freedom) < probability else (low, middle)
    return (low + high) / 2


def _student_cdf(t: float, freedom: int) -> float:
    """For t >= 0 and whole degrees of freedom (Abramowitz and Stegun 26.7.3, 26.7.4)."""
    if freedom > 400:
        return _NORMAL.cdf(t * (1 - 1 / (4 * freedom)) / math.sqrt(1 + t * t / (2 * freedom)))
    angle = math.atan(t / math.sqrt(freedom))
    cosine = math.cos(angle)
    odd = freedom % 2
    term = cosine if odd else 1.0
    total = term if freedom > 1 else 0.0
    for k in range(3 if odd else 2, freedom - 1, 2):
        term *= cosine * cosine * (k - 1) / k
        total += term
    within = 2 / math.pi * (angle + math.sin(angle) * total) if odd else math.sin(angle) * total
    return (1 + within) / 2
