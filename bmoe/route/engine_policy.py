"""The engine's own policies over a trace, through the very classes that the engine runs.

Owns the history that feeds them, kept as native code keeps it (pipeline/native/residency.c, bm_begin_batch
and bm_announce): a clock that ticks per forward pass, and use counts whose unit grows with it. Must not rank:
that is the policy's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from bmoe.pipeline.policy import UseHistory

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from bmoe.pipeline.policy import EvictionPolicy
    from bmoe.route.lookups import Lookups

_RESCALE_ABOVE: Final = 1e200


class EnginePolicy:
    """A policy of bmoe.policies, asked after every batch that leaves too much resident.

    Args:
        lookups: What is looked up.
        make_policy: As `bmoe.policies.policy_named` gives it.
    """

    def __init__(self, lookups: Lookups, make_policy: Callable[[UseHistory], EvictionPolicy]) -> None:
        self._lookups = lookups
        self._make_policy = make_policy

    def hits(self, budget_bytes: int) -> NDArray[np.bool_]:
        """See `bmoe.route.caches.Replay.hits`."""
        look = self._lookups
        hit = np.empty(len(look.entry), dtype=np.bool_)
        resident = np.zeros(look.entries, dtype=np.bool_)
        history = UseHistory(
            last_use=np.zeros(look.entries, dtype=np.uint32),
            frequency=np.zeros(look.entries, dtype=np.float64),
            layer_of=look.layer_of,
            layers=look.layers,
        )
        policy = self._make_policy(history)
        growth = 2.0 ** (1.0 / policy.half_life_batches)
        smallest, used, clock, weight = int(look.size_of.min()), 0, 0, 1.0
        starts, ticks, layers = look.batch_start.tolist(), look.clock.tolist(), look.batch_layer.tolist()
        size = look.size_of
        for b, layer in enumerate(layers):
            batch = look.entry[starts[b] : starts[b + 1]]
            while clock < ticks[b]:
                clock += 1
                weight *= growth
                if weight > _RESCALE_ABOVE:
                    history.frequency[:] /= weight
                    weight = 1.0
            history.last_use[batch] = clock
            history.frequency[batch] += weight
            found = resident[batch]
            hit[starts[b] : starts[b + 1]] = found
            if found.all():
                continue
            used += int(size[batch[~found]].sum())
            if used > budget_bytes:
                resident[batch] = False  # not among the candidates
                candidates = np.flatnonzero(resident).astype(np.int32)
                wanted = min(len(candidates), -(-(used - budget_bytes) // smallest))
                for entry in policy.victims(candidates, wanted, layer).tolist():
                    if used <= budget_bytes:
                        break
                    resident[entry] = False
                    used -= int(size[entry])
            resident[batch] = True
        return hit
