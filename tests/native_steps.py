"""The native protocol call by call, its doorbell, and policies that choose the worst.

For test_protocol.py and test_streamer.py.
"""

from __future__ import annotations

import ctypes
import os
import random
import select
from typing import TYPE_CHECKING, Any

import numpy as np

from bmoe.pipeline.native import PIN_SHIFT, Engine, StreamedTensor, lib

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from numpy.typing import NDArray

    from bmoe.pipeline.policy import UseHistory

RANKS = 3


def tensors_of(layers: int, experts: int, sizes: Sequence[int]) -> list[StreamedTensor]:
    """Three matmuls a layer; slices lie back to back in one file, at no block's boundary."""
    found = []
    offset = 32
    for layer in range(layers):
        for rank in range(RANKS):
            found.append(
                StreamedTensor(
                    name=f"blk.{layer}.ffn_{('gate', 'up', 'down')[rank]}_exps.weight",
                    layer=layer,
                    rank=rank,
                    ggml_type=0,
                    experts=experts,
                    ne0=1,
                    ne1=1,
                    slice_bytes=sizes[rank],
                    file=0,
                    file_offset=offset,
                )
            )
            offset += experts * sizes[rank]
    return found


class Doorbell:
    """An eventfd that can be asked whether it rings."""

    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    @property
    def rings(self) -> bool:
        return bool(select.select([self.fd], [], [], 0)[0])

    def quieten(self) -> None:
        if self.rings:
            os.eventfd_read(self.fd)

    def close(self) -> None:
        os.close(self.fd)


def int32s(values: Iterable[int]) -> Any:
    items = list(values)
    return (ctypes.c_int32 * max(len(items), 1))(*items)


class Native:
    """The native protocol, call by call."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.handle = engine.handle

    def announce(self, tensor: int, experts: Sequence[int]) -> None:
        lib.bm_test_announce(self.handle, tensor, int32s(experts), len(experts))

    def is_ready(self, slice_id: int) -> bool:
        return bool(lib.bm_test_ready(self.handle, slice_id))

    def unpin(self, slice_id: int) -> None:
        lib.bm_test_unpin(self.handle, slice_id)

    def data(self, slice_id: int) -> int:
        address: int = lib.bm_test_data(self.handle, slice_id)
        return address

    def word(self, slice_id: int) -> tuple[int, int]:
        """(state, pins)."""
        word: int = lib.bm_slice_word(self.handle, slice_id)
        return word & 3, word >> PIN_SHIFT

    def take(self, room: int) -> list[int]:
        out = (ctypes.c_int32 * room)()
        return list(out[: lib.bm_take(self.handle, out, room)])

    def assign(self, slices: Sequence[int], slots: Sequence[int]) -> int:
        result: int = lib.bm_assign(self.handle, int32s(slices), int32s(slots), len(slices))
        return result

    def ready(self, slots: Sequence[int]) -> int:
        result: int = lib.bm_ready(self.handle, int32s(slots), len(slots))
        return result

    def abandon(self, slot: int, *, again: bool) -> bool:
        return bool(lib.bm_abandon(self.handle, slot, int(again)))

    def evict(self, slice_id: int, *, force: bool) -> int:
        slot: int = lib.bm_evict(self.handle, slice_id, int(force))
        return slot

    def evict_entry(self, layer: int, expert: int, not_after: int) -> list[int]:
        out, gone_through = (ctypes.c_int32 * 4)(), ctypes.c_int32()
        entry, used = int32s([self.engine.first_entry[layer] + expert]), ctypes.c_uint32(not_after)
        n = lib.bm_evict_ranked(
            self.handle,
            entry,
            ctypes.byref(used),
            1,
            0,
            self.engine.slots,
            1,
            out,
            ctypes.byref(gone_through),
        )
        assert gone_through.value == 1
        return list(out[:n])

    def sweep(self, slots: range, most: int, *, force: bool) -> list[int]:
        out = (ctypes.c_int32 * most)()
        n = lib.bm_sweep(self.handle, slots.start, slots.stop, most, int(force), out)
        return list(out[:n])

    def starve(self, on: bool) -> None:
        lib.bm_set_starved(self.handle, int(on))

    def stop(self, why: int) -> None:
        lib.bm_stop(self.handle, why)

    def reset(self) -> None:
        lib.bm_reset(self.handle)

    def begin_batch(self) -> None:
        lib.bm_begin_batch(self.handle, 0, 1, 1)


class _Ranking:
    """A policy by its ranking function."""

    name = "hostile"

    def __init__(self, history: UseHistory, rank: Callable[..., list[int]]) -> None:
        self._history = history
        self._rank = rank
        self._random = random.Random(5)  # noqa: S311 (schedules, not secrets)

    def victims(self, candidates: NDArray[np.int32], count: int, layer: int) -> NDArray[np.int32]:
        ranked = self._rank(self._history, candidates.tolist(), layer, self._random)
        return np.array(ranked[:count], dtype=np.int32)


def _most_needed(history: UseHistory, candidates: list[int], layer: int, _: random.Random) -> list[int]:
    """The running layer's own experts first, then those of the layer to come."""
    return sorted(
        candidates,
        key=lambda e: ((int(history.layer_of[e]) - layer) % history.layers, -int(history.last_use[e])),
    )


def _anything(_: UseHistory, candidates: list[int], __: int, rng: random.Random) -> list[int]:
    return rng.sample(candidates, len(candidates))


def _nothing(*_: object) -> list[int]:
    return []


def _one_over_and_over(_: UseHistory, candidates: list[int], __: int, ___: random.Random) -> list[int]:
    return candidates[:1] * 8


HOSTILE: dict[str, Callable[..., list[int]]] = {
    "most needed": _most_needed,
    "anything": _anything,
    "nothing": _nothing,
    "one over and over": _one_over_and_over,
}


def make_policy(name: str) -> Callable[[UseHistory], Any]:
    return lambda history: _Ranking(history, HOSTILE[name])
