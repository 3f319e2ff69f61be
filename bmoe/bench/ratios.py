"""Medians, spread, and ratios of two sides with how sure one may be of them.

Owns the arithmetic. Must not know what the figures are.

A machine drifts by more than two sides differ, but round by round it is the same for both: so a ratio is
made of pairs, one per round, and summed up by the geometric mean (a half and a double make one). The interval
is the bootstrap's: rounds are drawn with replacement, all draws where they can be counted (up to five
rounds), else ten thousand from a fixed seed, and the middle 95 % of their means is told. With three rounds
that is little more than the range of what was seen: an honest answer to so little data.
"""

from __future__ import annotations

import itertools
import math
import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_CONFIDENCE: Final = 0.95
_ALL_DRAWS_UP_TO: Final = 5
_DRAWS: Final = 10_000
_SEED: Final = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Spread:
    """Several measurements of one figure."""

    median: float
    low: float
    high: float
    rounds: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Ratio:
    """One side over another.

    Attributes:
        ratio: Geometric mean over the rounds.
        low, high: The middle 95 % of the bootstrap; equal to the ratio with a single round.
        rounds: Pairs.
    """

    ratio: float
    low: float
    high: float
    rounds: int


def spread(values: Sequence[float]) -> Spread | None:
    """Median and range; None of nothing."""
    if not values:
        return None
    return Spread(median=statistics.median(values), low=min(values), high=max(values), rounds=len(values))


def paired_ratio(over: Mapping[int, float], under: Mapping[int, float]) -> Ratio | None:
    """The ratio of two sides.

    Args:
        over: A figure by round.
        under: The same of the other side. Rounds that one of them lacks, or where it is not above zero, do
            not count.

    Returns:
        None without a common round.
    """
    logs = [math.log(over[r] / under[r]) for r in sorted(over) if r in under and over[r] > 0 and under[r] > 0]
    if not logs:
        return None
    draws = _means(np.asarray(logs))
    tail = 100 * (1 - _CONFIDENCE) / 2
    low, high = np.percentile(draws, [tail, 100 - tail])
    mean = sum(logs) / len(logs)
    return Ratio(ratio=math.exp(mean), low=math.exp(low), high=math.exp(high), rounds=len(logs))


def _means(
    values: np.ndarray[tuple[int], np.dtype[np.float64]],
) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    count = len(values)
    if count <= _ALL_DRAWS_UP_TO:
        chosen = np.array(list(itertools.product(range(count), repeat=count)))
    else:
        chosen = np.random.default_rng(_SEED).integers(count, size=(_DRAWS, count))
    means: np.ndarray[tuple[int], np.dtype[np.float64]] = values[chosen].mean(axis=1)
    return means
