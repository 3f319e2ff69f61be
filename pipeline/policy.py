"""The seam between the streamer and a cache policy: what a policy sees, and what it decides.

A policy only ranks. It must not know slots, reads or threads, and what it chooses may be refused: the
native table has the last word on what is in use.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class UseHistory:
    """What is known of the past, shared with native code and always current.

    Attributes:
        last_use: [entries] uint32, batch clock at the last lookup, 0 for never.
        frequency: [entries] float64, uses weighted by age. The unit grows with the clock, so values
            compare among entries but not over time.
        layer_of: [entries] int32, layer with experts that the entry belongs to.
        layers: How many there are.
    """

    last_use: NDArray[np.uint32]
    frequency: NDArray[np.float64]
    layer_of: NDArray[np.int32]
    layers: int


class EvictionPolicy(Protocol):
    """Chooses which resident experts to give up."""

    name: str
    half_life_batches: float
    """The ageing of use counts that it was made for."""

    def victims(self, candidates: NDArray[np.int32], count: int, layer: int) -> NDArray[np.int32]:
        """Ranks what to give up.

        Args:
            candidates: Entry ids that may be chosen.
            count: How many are wanted; fewer may be returned only when there are fewer candidates.
            layer: The layer in flight: the next to be used is `layer + 1`, cyclically.

        Returns:
            Entry ids, the first to go first.
        """
        ...
