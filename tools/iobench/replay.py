"""What a cache of a given size and policy would have had to read during a recorded run.

Owns the table of residents and where the experts of a trace lie in the file at hand. Must not know how
the misses are read: that is `replay_run`.

The policy is one of `bmoe.policies`, over the same history as the engine keeps: the clock advances with
each pass, a lookup stamps the expert and adds a weight that grows with the clock. What a routing needs
is never given up for it. Unlike the engine, which evicts single slices and ranks ahead in batches, the
table gives up whole experts and asks the policy anew each time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from bmoe.io.errors import UsageError
from bmoe.pipeline.policy import UseHistory
from bmoe.tools.iobench.lanes import Window, window

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from bmoe.io.files import DirectFile
    from bmoe.pipeline.policy import EvictionPolicy
    from bmoe.tools.iobench.experts import ExpertLayout, Slice
    from bmoe.tools.iobench.trace import RouteTrace

_HALF_LIFE_PASSES: Final = 16.0
_WEIGHT_LIMIT: Final = 1e200
_PROJECTIONS: Final = 3
_TENSOR_ALIGN_BYTES: Final = 32


@dataclass(frozen=True, slots=True)
class Misses:
    """What one layer has to wait for.

    Attributes:
        token: Index of the decoded token; None in prefill.
        entries: Experts to be read.
    """

    token: int | None
    entries: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplayPlan:
    """The reads of a run, and how the cache did.

    Attributes:
        steps: Of each layer that misses, in order.
        tokens: Decoded.
        lookups: Of experts, while decoding.
        hits: Of them.
        most_resident: The most experts in the cache at one time.
    """

    steps: tuple[Misses, ...]
    tokens: int
    lookups: int
    hits: int
    most_resident: int

    @property
    def hit_rate(self) -> float:
        """While decoding."""
        return self.hits / self.lookups


class CacheTable:
    """Which experts are resident under a budget.

    Args:
        experts: Per layer.
        costs_bytes: What keeping each entry takes, layer by layer, experts in order.
        budget_bytes: For all of them.
        make_policy: From `bmoe.policies`.
    """

    def __init__(
        self,
        experts: Sequence[int],
        costs_bytes: Sequence[int],
        budget_bytes: int,
        make_policy: Callable[[UseHistory], EvictionPolicy],
    ) -> None:
        entries = len(costs_bytes)
        self._costs = list(costs_bytes)
        self._budget_bytes = budget_bytes
        self._first = [sum(experts[:i]) for i in range(len(experts))]
        self._history = UseHistory(
            last_use=np.zeros(entries, dtype=np.uint32),
            frequency=np.zeros(entries, dtype=np.float64),
            layer_of=np.repeat(np.arange(len(experts), dtype=np.int32), experts),
            layers=len(experts),
        )
        self._policy = make_policy(self._history)
        self._resident: dict[int, None] = {}
        self._used_bytes = 0
        self._clock = 0
        self._weight = 1.0
        self.most_resident = 0

    def begin_pass(self) -> None:
        """The model is about to be run once: everything ages."""
        self._clock += 1
        self._weight *= 2.0 ** (1.0 / _HALF_LIFE_PASSES)
        if self._weight > _WEIGHT_LIMIT:
            self._history.frequency[:] /= self._weight
            self._weight = 1.0

    def use(self, layer: int, experts: Sequence[int]) -> list[int]:
        """A layer needs these experts: the entries that have to be read for it.

        Args:
            layer: Index among the layers with experts.
            experts: Each once.
        """
        wanted = [self._first[layer] + expert for expert in experts]
        self._history.last_use[wanted] = self._clock
        self._history.frequency[wanted] += self._weight
        misses = [entry for entry in wanted if entry not in self._resident]
        if misses:
            self._make_room(misses, set(wanted), layer)
            for entry in misses:
                self._resident[entry] = None
                self._used_bytes += self._costs[entry]
            # A cache smaller than the layer's own experts keeps those that were used last.
            for entry in wanted:
                if self._used_bytes <= self._budget_bytes:
                    break
                self._give_up(entry)
            self.most_resident = max(self.most_resident, len(self._resident))
        return misses

    def _make_room(self, misses: Sequence[int], wanted: set[int], layer: int) -> None:
        over = self._used_bytes + sum(self._costs[entry] for entry in misses) - self._budget_bytes
        others = [entry for entry in self._resident if entry not in wanted]
        if over <= 0 or not others:
            return
        cheapest = min(self._costs[entry] for entry in others)
        count = min(len(others), -(-over // cheapest))
        for entry in self._policy.victims(np.array(sorted(others), dtype=np.int32), count, layer).tolist():
            if over <= 0:
                break
            self._give_up(entry)
            over -= self._costs[entry]

    def _give_up(self, entry: int) -> None:
        del self._resident[entry]
        self._used_bytes -= self._costs[entry]


def plan_replay(
    trace: RouteTrace,
    costs_bytes: Sequence[int],
    budget_bytes: int,
    make_policy: Callable[[UseHistory], EvictionPolicy],
) -> ReplayPlan:
    """Runs a trace through a cache.

    Args:
        trace: The run.
        costs_bytes: Of each of its experts: layers that have any in ascending order, experts in order.
        budget_bytes: Of the cache; 0 keeps nothing.
        make_policy: From `bmoe.policies`.
    """
    index_of = {layer: index for index, layer in enumerate(sorted(trace.expert_bytes))}
    table = CacheTable([trace.experts] * len(index_of), costs_bytes, budget_bytes, make_policy)
    steps: list[Misses] = []
    token = -1
    lookups = missed = 0
    for routing in trace.routings:
        if routing.new_pass:
            table.begin_pass()
            token += routing.decode
        misses = table.use(index_of[routing.layer], routing.experts)
        if routing.decode:
            lookups += len(routing.experts)
            missed += len(misses)
        if misses:
            steps.append(Misses(token if routing.decode else None, tuple(misses)))
    return ReplayPlan(
        steps=tuple(steps),
        tokens=trace.tokens,
        lookups=lookups,
        hits=lookups - missed,
        most_resident=table.most_resident,
    )


def place_experts(
    trace: RouteTrace, layout: ExpertLayout | None, files: Sequence[DirectFile]
) -> tuple[str, list[tuple[Window, ...]]]:
    """Where the experts of a trace are read: the windows of each entry, projection by projection.

    Args:
        trace: Says how many there are, and how large.
        layout: Experts in the files; used if it is of the same shape.
        files: What will be read.

    Returns:
        `model` and the model's own places, or `laid over` and places in the first file for an expert of
        three equal slices, in the order in which GGUF files have them.

    Raises:
        UsageError: The file is smaller than an expert.
    """
    blocks = [file.block_bytes for file in files]
    if layout is not None and _same_shape(trace, layout):
        return "model", [tuple(window(s, blocks) for s in entry) for entry in layout.entries]
    file = files[0]
    entries: list[tuple[Window, ...]] = []
    start = 0
    for layer in sorted(trace.expert_bytes):
        size = -(-trace.expert_bytes[layer] // _PROJECTIONS)
        span = file.size_bytes - size - file.block_bytes
        if span <= 0:
            raise UsageError(f"{file.path} is smaller than an expert of the trace", hint="take a larger file")

        def place(
            expert: int, projection: int, *, size: int = size, span: int = span, start: int = start
        ) -> Slice:
            raw = (start + (projection * trace.experts + expert) * size) % span
            return 0, raw - raw % _TENSOR_ALIGN_BYTES, size

        entries += [
            tuple(window(place(expert, p), blocks) for p in range(_PROJECTIONS))
            for expert in range(trace.experts)
        ]
        start += _PROJECTIONS * trace.experts * size
    return "laid over", entries


def _same_shape(trace: RouteTrace, layout: ExpertLayout) -> bool:
    if layout.layers != tuple(sorted(trace.expert_bytes)) or set(layout.experts) != {trace.experts}:
        return False
    sizes = [sum(length for _, _, length in e) for e in layout.entries[:: trace.experts]]
    return sizes == [trace.expert_bytes[layer] for layer in layout.layers]
