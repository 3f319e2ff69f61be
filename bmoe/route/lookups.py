"""What a cache sees of a trace: batches of lookups, in order.

Owns the accounting, which is the reference's: a prompt's rows of one layer are one batch, a decoded token's
rows of one layer are one, and within a batch each expert is looked up once. Must not know any policy.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from bmoe.route.trace import DECODE

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from bmoe.route.trace import RouteTrace

NEVER: Final = 2**31 - 1
"""`next_batch` of a lookup that is its entry's last."""

# Lists of Python integers are made for so many lookups at a time: memory stays bounded on long traces.
_CHUNK: Final = 1 << 16
_EXPERT_BITS: Final = 20


@dataclass(frozen=True, kw_only=True)
class Lookups:
    """Unique lookups per batch. An *entry* is a (layer, expert) that occurs, numbered in that order.

    Attributes:
        entry: [lookups] int32, within a batch in the order first routed to.
        first_row: [lookups] int64, the trace's row that caused it.
        by_last_row: [lookups] int64, lookups of each batch ordered by the last row that routed to them: a
            recency list ends up in this order.
        last_row: [lookups] int64.
        next_batch: [lookups] int32, batch of the same entry's next lookup, or NEVER.
        batch_start: [batches + 1] int64, where each batch's lookups begin.
        decode: [batches] bool.
        clock: [batches] int32, number of the forward pass, from 1: what the engine's batch clock would say.
        batch_layer: [batches] int32, index among the layers that route.
        layer_of: [entries] int32, same.
        size_of: [entries] int64, bytes.
        layers: How many layers route.
        top_k: Experts per token and layer.
        tokens: Decoded tokens.
    """

    entry: NDArray[np.int32]
    first_row: NDArray[np.int64]
    by_last_row: NDArray[np.int64]
    last_row: NDArray[np.int64]
    next_batch: NDArray[np.int32]
    batch_start: NDArray[np.int64]
    decode: NDArray[np.bool_]
    clock: NDArray[np.int32]
    batch_layer: NDArray[np.int32]
    layer_of: NDArray[np.int32]
    size_of: NDArray[np.int64]
    layers: int
    top_k: int
    tokens: int

    @property
    def entries(self) -> int:
        """How many different experts occur."""
        return len(self.size_of)

    @property
    def batch_of(self) -> NDArray[np.int32]:
        """[lookups] batch of each."""
        return np.repeat(np.arange(len(self.decode), dtype=np.int32), np.diff(self.batch_start))

    @property
    def in_decode(self) -> NDArray[np.bool_]:
        """[lookups] whether a decoded token made it."""
        return np.repeat(self.decode, np.diff(self.batch_start))

    @property
    def cycle_bytes(self) -> int:
        """What one token touches: top-k experts of every layer."""
        of_layer = np.zeros(self.layers, dtype=np.int64)
        of_layer[self.layer_of] = self.size_of
        return int(of_layer.sum()) * self.top_k

    def chunks(self) -> Iterator[tuple[int, int, list[int]]]:
        """Runs of whole batches: (first batch, first lookup, starts relative to it with the end)."""
        batches, first = len(self.decode), 0
        while first < batches:
            begin = int(self.batch_start[first])
            last = int(np.searchsorted(self.batch_start, begin + _CHUNK, side="right")) - 1
            last = min(max(last, first + 1), batches)
            yield first, begin, (self.batch_start[first : last + 1] - begin).tolist()
            first = last


def make_lookups(trace: RouteTrace) -> Lookups:
    """Groups a trace's rows into batches.

    Raises:
        FormatError: The trace does not tell the size of every layer's experts.
    """
    sizes = trace.sizes()
    groups = _group(trace)
    head, first_row, last_row = groups.head, groups.first_row, groups.last_row
    turn, phase, layer = trace.turn, trace.phase, trace.layer_index
    batch, entry = groups.batch_of_row[first_row], groups.entry_of_row[first_row].astype(np.int32)
    layer_of = (groups.keys >> _EXPERT_BITS).astype(np.int32)

    by_entry = np.argsort(entry, kind="stable")
    following = np.full(len(entry), NEVER, dtype=np.int32)
    same = entry[by_entry[1:]] == entry[by_entry[:-1]]
    following[by_entry[:-1][same]] = batch[by_entry[1:][same]]

    # A forward pass ends where the layers start over; with one layer, at every batch.
    passes = np.ones(len(head), dtype=np.bool_)
    a, b = head[:-1], head[1:]
    passes[1:] = (turn[a] != turn[b]) | (phase[a] != phase[b]) | (layer[b] < layer[a]) | (len(sizes) == 1)
    decode = phase[head] == DECODE
    tokens = decode_tokens(trace)
    return Lookups(
        entry=entry,
        first_row=first_row,
        by_last_row=np.argsort(last_row),
        last_row=last_row,
        next_batch=following,
        batch_start=np.append(np.flatnonzero(np.diff(batch, prepend=-1)), len(batch)).astype(np.int64),
        decode=decode,
        clock=np.cumsum(passes).astype(np.int32),
        batch_layer=layer[head],
        layer_of=layer_of,
        size_of=sizes[layer_of],
        layers=len(sizes),
        top_k=trace.top_k,
        tokens=tokens,
    )


def first_rows(trace: RouteTrace) -> NDArray[np.int64]:
    """[lookups] the rows that a cache would have looked up, ascending: each expert once per batch."""
    return _group(trace).first_row


def row_keys(trace: RouteTrace) -> NDArray[np.int64]:
    """[rows] a number that rows of one batch and one expert share, and no others."""
    groups = _group(trace)
    return groups.batch_of_row * len(groups.keys) + groups.entry_of_row


class _Groups(NamedTuple):
    batch_of_row: NDArray[np.int64]
    head: NDArray[np.int64]  # [batches] first row
    keys: NDArray[np.int64]  # [entries] layer index and expert
    entry_of_row: NDArray[np.int64]
    first_row: NDArray[np.int64]  # [lookups] ascending
    last_row: NDArray[np.int64]  # [lookups]


def _group(trace: RouteTrace) -> _Groups:
    turn, phase, step, layer = trace.turn, trace.phase, trace.step, trace.layer_index
    new = np.ones(trace.rows, dtype=np.bool_)
    new[1:] = (turn[1:] != turn[:-1]) | (phase[1:] != phase[:-1]) | (layer[1:] != layer[:-1])
    new[1:] |= (phase[1:] == DECODE) & (step[1:] != step[:-1])
    batch_of_row = np.cumsum(new) - 1
    keys, entry_of_row = np.unique(layer.astype(np.int64) << _EXPERT_BITS | trace.expert, return_inverse=True)
    # Rows of one (batch, entry) side by side, in row order: the first one is the lookup.
    pair = batch_of_row * len(keys) + entry_of_row
    order = np.argsort(pair, kind="stable")
    starts = np.flatnonzero(np.diff(pair[order], prepend=-1))
    first_row = order[starts]
    last_row = order[np.append(starts[1:], trace.rows) - 1]
    in_order = np.argsort(first_row)
    return _Groups(
        batch_of_row, np.flatnonzero(new), keys, entry_of_row, first_row[in_order], last_row[in_order]
    )


def decode_tokens(trace: RouteTrace) -> int:
    """Decoded tokens that the trace has rows of: the most that any layer saw."""
    new = np.diff(trace.cell, prepend=-1) > 0
    layers = trace.layer_index[new & (trace.phase == DECODE)]
    return int(np.bincount(layers).max()) if len(layers) else 0
