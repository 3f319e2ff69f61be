"""The reference's policies over a trace: belady, lru, lfu, random, layer, layerlfu.

Owns how each of them evicts, with the reference's accounting: a batch's misses are loaded, then entries
outside the batch go until what is resident fits, so a cache may exceed its budget by one batch. A replay
marks which lookups hit; everything else is counted from that. Must not know the engine's own policies, which
run as they are (engine_policy.py).

Plain loops over integers: one lookup costs a fraction of a microsecond, less than the array calls for so
small a batch would.
"""

from __future__ import annotations

import heapq
import random
from bisect import bisect_left
from collections import OrderedDict
from itertools import pairwise
from typing import TYPE_CHECKING, Final, Protocol

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from bmoe.route.lookups import Lookups

_SEED: Final = 1234


class Replay(Protocol):
    """A policy prepared for one trace."""

    def hits(self, budget_bytes: int) -> NDArray[np.bool_]:
        """[lookups] which of them find their entry resident in a cache of that size, empty at first."""
        ...


class Belady:
    """Gives up what is needed farthest in the future: no policy can do better on average."""

    def __init__(self, lookups: Lookups) -> None:
        self._lookups = lookups
        # Farthest first; the entry in the low bits.
        self._shift = lookups.entries.bit_length()
        self._key = -((lookups.next_batch.astype(np.int64) << self._shift) + lookups.entry)

    def hits(self, budget_bytes: int) -> NDArray[np.bool_]:
        """See `Replay.hits`."""
        look, size = self._lookups, self._lookups.size_of.tolist()
        hit = np.ones(len(look.entry), dtype=np.bool_)
        shift, mask = self._shift, (1 << self._shift) - 1
        resident, used = bytearray(look.entries), 0
        heap: list[int] = []
        push, pop = heapq.heappush, heapq.heappop
        for batch, begin, starts in look.chunks():
            end = begin + starts[-1]
            entries, keys = look.entry[begin:end].tolist(), self._key[begin:end].tolist()
            missed: list[int] = []
            for now, (low, high) in enumerate(pairwise(starts), batch):
                for i in range(low, high):
                    entry = entries[i]
                    if not resident[entry]:
                        resident[entry] = 1
                        used += size[entry]
                        missed.append(i)
                # A key not above now is that of a use that has come: its entry has a later one, or is in
                # this batch, whose own are pushed below. None of them is ever the farthest.
                while used > budget_bytes and heap and -heap[0] >> shift > now:
                    entry = -pop(heap) & mask
                    resident[entry] = 0
                    used -= size[entry]
                for i in range(low, high):
                    push(heap, keys[i])
            hit[begin:end][missed] = False
            if len(heap) > 8 * look.entries + 64:
                limit = now << shift
                heap = [key for key in heap if -key > limit]
                heapq.heapify(heap)
        return hit


class Recency:
    """lru; with `per_layer`, layer: each layer an equal share of the budget, at least top-k entries."""

    def __init__(self, lookups: Lookups, *, per_layer: bool = False) -> None:
        self._lookups = lookups
        self._per_layer = per_layer

    def hits(self, budget_bytes: int) -> NDArray[np.bool_]:
        """See `Replay.hits`."""
        look, size = self._lookups, self._lookups.size_of.tolist()
        hit = np.ones(len(look.entry), dtype=np.bool_)
        limits = _limits(look, budget_bytes, per_layer=self._per_layer)
        used = [0] * len(limits)
        orders: list[OrderedDict[int, None]] = [OrderedDict() for _ in limits]
        layers = look.batch_layer.tolist() if self._per_layer else None
        for batch, begin, starts in look.chunks():
            end = begin + starts[-1]
            entries = look.entry[begin:end].tolist()
            promoted = look.entry[look.by_last_row[begin:end]].tolist()
            missed: list[int] = []
            for now, (low, high) in enumerate(pairwise(starts), batch):
                part = layers[now] if layers else 0
                order = orders[part]
                for i in range(low, high):
                    entry = entries[i]
                    if entry not in order:
                        order[entry] = None
                        used[part] += size[entry]
                        missed.append(i)
                promote = order.move_to_end
                for i in range(low, high):
                    promote(promoted[i])
                limit = limits[part]
                while used[part] > limit and len(order) > high - low:
                    used[part] -= size[order.popitem(last=False)[0]]
            hit[begin:end][missed] = False
        return hit


class Frequency:
    """lfu: fewest batches that used it since the start, then least recent; with `per_layer`, layerlfu."""

    def __init__(self, lookups: Lookups, *, per_layer: bool = False) -> None:
        self._lookups = lookups
        self._per_layer = per_layer
        by_entry = np.argsort(lookups.entry, kind="stable")
        uses = np.bincount(lookups.entry, minlength=lookups.entries)
        count = np.empty(len(by_entry), dtype=np.int64)
        count[by_entry] = np.arange(len(by_entry)) - np.repeat(np.cumsum(uses) - uses, uses)
        self._row_bits = int(lookups.last_row.max()).bit_length()
        self._key = count << self._row_bits | lookups.last_row
        # Last rows of different layers differ, those of one batch too: a row names its entry.
        self._entry_of_row = np.zeros(int(lookups.last_row.max()) + 1, dtype=np.int32)
        self._entry_of_row[lookups.last_row] = lookups.entry

    def hits(self, budget_bytes: int) -> NDArray[np.bool_]:
        """See `Replay.hits`."""
        look, size = self._lookups, self._lookups.size_of.tolist()
        hit = np.ones(len(look.entry), dtype=np.bool_)
        limits = _limits(look, budget_bytes, per_layer=self._per_layer)
        used = [0] * len(limits)
        # One key per resident entry. Keys only grow: one that is too low is found out when it comes up.
        heaps: list[list[int]] = [[] for _ in limits]
        layers = look.batch_layer.tolist() if self._per_layer else None
        entry_of_row, mask = self._entry_of_row, (1 << self._row_bits) - 1
        resident = bytearray(look.entries)
        current = [0] * look.entries
        used_in = [-1] * look.entries
        push, pop, replace = heapq.heappush, heapq.heappop, heapq.heapreplace
        for batch, begin, starts in look.chunks():
            end = begin + starts[-1]
            entries, keys = look.entry[begin:end].tolist(), self._key[begin:end].tolist()
            missed: list[int] = []
            for now, (low, high) in enumerate(pairwise(starts), batch):
                part = layers[now] if layers else 0
                heap, new = heaps[part], []
                for i in range(low, high):
                    entry = entries[i]
                    current[entry] = keys[i]
                    used_in[entry] = now
                    if not resident[entry]:
                        resident[entry] = 1
                        used[part] += size[entry]
                        new.append(keys[i])
                        missed.append(i)
                limit = limits[part]
                while used[part] > limit and heap:
                    entry = entry_of_row.item(heap[0] & mask)
                    if used_in[entry] == now:
                        new.append(current[entry])
                        pop(heap)
                    elif heap[0] != current[entry]:
                        replace(heap, current[entry])
                    else:
                        pop(heap)
                        resident[entry] = 0
                        used[part] -= size[entry]
                for key in new:
                    push(heap, key)
            hit[begin:end][missed] = False
        return hit


class Random:
    """Gives up any, from one seed: the list of candidates is in the order they were loaded."""

    def __init__(self, lookups: Lookups) -> None:
        self._lookups = lookups

    def hits(self, budget_bytes: int) -> NDArray[np.bool_]:
        """See `Replay.hits`."""
        look, size = self._lookups, self._lookups.size_of.tolist()
        hit = np.ones(len(look.entry), dtype=np.bool_)
        bits = random.Random(_SEED).getrandbits  # noqa: S311 (a replay is to be repeatable, not secret)
        shift, mask = look.entries.bit_length(), (1 << look.entries.bit_length()) - 1
        order: list[int] = []  # serial number of the load and entry, ascending
        loaded = [-1] * look.entries  # its element in `order`, -1 when not resident
        serial = used = 0
        for _, begin, starts in look.chunks():
            end = begin + starts[-1]
            entries = look.entry[begin:end].tolist()
            missed: list[int] = []
            for low, high in pairwise(starts):
                old, new = [], []
                for i in range(low, high):
                    entry = entries[i]
                    if loaded[entry] < 0:
                        serial += 1
                        loaded[entry] = serial << shift | entry
                        used += size[entry]
                        new.append(loaded[entry])
                        missed.append(i)
                    else:
                        old.append(loaded[entry])
                if used > budget_bytes:
                    protected = sorted([bisect_left(order, element) for element in old])
                    while used > budget_bytes and (count := len(order) - len(protected)) > 0:
                        width = count.bit_length()
                        chosen = bits(width)
                        while chosen >= count:
                            chosen = bits(width)
                        for k, position in enumerate(protected):
                            if position <= chosen:
                                chosen += 1
                            else:
                                protected[k] -= 1
                        entry = order.pop(chosen) & mask
                        loaded[entry] = -1
                        used -= size[entry]
                order += new
            hit[begin:end][missed] = False
        return hit


def _limits(look: Lookups, budget_bytes: int, *, per_layer: bool) -> list[int]:
    """Bytes that each part of the cache may hold."""
    if not per_layer:
        return [budget_bytes]
    size = np.zeros(look.layers, dtype=np.int64)
    size[look.layer_of] = look.size_of
    entries = np.maximum(look.top_k, (budget_bytes / look.layers / size).astype(np.int64))
    limits: list[int] = (entries * size).tolist()
    return limits


REFERENCE_POLICIES: Final[dict[str, Callable[[Lookups], Replay]]] = {
    "belady": Belady,
    "lru": Recency,
    "lfu": Frequency,
    "random": Random,
    "layer": lambda lookups: Recency(lookups, per_layer=True),
    "layerlfu": lambda lookups: Frequency(lookups, per_layer=True),
}
