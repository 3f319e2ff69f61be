"""Cache policies, by name. Each only ranks residents for eviction; see `bmoe.pipeline.policy`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from bmoe.io.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from bmoe.pipeline.policy import EvictionPolicy, UseHistory


_CYCLE_DISCOUNT = 0.2
_HALF_LIFE_BATCHES = 16.0
_RECURRING_DISCOUNT = 0.3
# Worth of a count by turns since the last use: three times it at once, half of the surplus 1.5 turns later.
_RECENT = 1.0 + 2.0 * 2.0 ** (-np.arange(64) / 1.5)


def _lowest(keys: NDArray[np.float64], candidates: NDArray[np.int32], count: int) -> NDArray[np.int32]:
    """The `count` candidates with the lowest keys, lowest first; equal keys by entry id."""
    if count <= 0:
        return candidates[:0]
    if count < len(keys):
        limit = np.partition(keys, count - 1)[count - 1]
        below = np.flatnonzero(keys < limit)
        equal = np.flatnonzero(keys == limit)[: count - len(below)]
        part = np.concatenate((below, equal))
        keys, candidates = keys[part], candidates[part]
    return candidates[np.lexsort((candidates, keys))]


class AgedFrequency:
    """Gives up the experts with the lowest use count, uses losing half their worth every 16 batches.

    An expert whose layer has just run is worth up to a fifth less than one whose layer comes next: it
    would hold its slot for a whole cycle before it can be used. Among equal counts, which are common (most
    experts are rare), the layer that has just run goes first. That is what makes this better than any
    recency order on a cyclic scan. Both figures by replay of recorded traces (docs/LOG.md, 2026-11-30).
    """

    name = "aged"
    half_life_batches = _HALF_LIFE_BATCHES

    def __init__(self, history: UseHistory) -> None:
        self._history = history

    def victims(self, candidates: NDArray[np.int32], count: int, layer: int) -> NDArray[np.int32]:
        """See `EvictionPolicy.victims`."""
        h = self._history
        until_next = (h.layer_of[candidates] - layer - 1) % h.layers
        keys = h.frequency[candidates] * (1.0 - _CYCLE_DISCOUNT / h.layers * until_next)
        return _lowest(keys, candidates, count)


class RecurringFrequency:
    """`aged`, with an expert that its layer has just used worth up to three times its count.

    Routing repeats: an expert used in its layer's last turn is used in the next one two to three times as
    often as its count alone says, which fades within a few turns. Turns are counted in the expert's own
    layer: one still to come in this batch is a turn younger than the clock says. Tuned with a half-life of
    24 batches on the recorded traces (docs/LOG.md).
    """

    name = "recurring"
    half_life_batches = 24.0

    def __init__(self, history: UseHistory) -> None:
        self._history = history

    def victims(self, candidates: NDArray[np.int32], count: int, layer: int) -> NDArray[np.int32]:
        """See `EvictionPolicy.victims`."""
        h = self._history
        layers = h.layer_of[candidates]
        turns = int(h.last_use.max()) - h.last_use[candidates].astype(np.int64) - (layers > layer)
        until_next = (layers - layer - 1) % h.layers
        keys = h.frequency[candidates] * _RECENT[np.clip(turns, 0, len(_RECENT) - 1)]
        return _lowest(keys * (1.0 - _RECURRING_DISCOUNT / h.layers * until_next), candidates, count)


class LeastRecentlyUsed:
    """Gives up the experts used longest ago; within one batch, the earliest layer's first."""

    name = "lru"
    half_life_batches = _HALF_LIFE_BATCHES

    def __init__(self, history: UseHistory) -> None:
        self._history = history

    def victims(self, candidates: NDArray[np.int32], count: int, layer: int) -> NDArray[np.int32]:  # noqa: ARG002 (recency does not look ahead)
        """See `EvictionPolicy.victims`."""
        h = self._history
        keys = h.last_use[candidates].astype(np.float64) * h.layers + h.layer_of[candidates]
        return _lowest(keys, candidates, count)


DEFAULT_POLICY = RecurringFrequency.name
POLICIES: dict[str, Callable[[UseHistory], EvictionPolicy]] = {
    AgedFrequency.name: AgedFrequency,
    LeastRecentlyUsed.name: LeastRecentlyUsed,
    RecurringFrequency.name: RecurringFrequency,
}


def policy_named(name: str) -> Callable[[UseHistory], EvictionPolicy]:
    """The maker of a policy.

    Raises:
        UsageError: No such policy; the message lists them.
    """
    if name not in POLICIES:
        raise UsageError(f"cache policy {name!r} is not one of {', '.join(sorted(POLICIES))}")
    return POLICIES[name]


def half_life_batches(name: str) -> float:
    """The ageing of use counts that a policy was tuned with; see `policy_named` for errors."""
    return float(getattr(policy_named(name), "half_life_batches", _HALF_LIFE_BATCHES))
