"""The slots: which are free, how more become usable, who makes room.

It owns the free lists, the order of eviction as the policy chose it, and how slot memory grows and
shrinks. It must not know requests. Everything here runs on the loop's thread. Choosing victims comes after
a submission, in batches, so that the next miss only has to try candidates that are already ranked.
"""

from __future__ import annotations

import asyncio
import ctypes
from typing import TYPE_CHECKING

import numpy as np

from bmoe.io.errors import MemoryBudgetError
from bmoe.pipeline.native import READING, STATE_MASK, Engine, lib
from bmoe.pipeline.policy import UseHistory

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from bmoe.io.backend import ReadBackend, Target
    from bmoe.io.slot_memory import SlotMemory
    from bmoe.pipeline.policy import EvictionPolicy
    from bmoe.pipeline.slots import SlotPlan

_SHRINK_POLL_S = 0.001
# Few are ranked at a time: what is read after the ranking is often worth less than what is in it.
_LOW_WATER, _RANKED = 16, 24


class _Ranking:
    """Entries to give up, the first to go first, as native code takes them."""

    __slots__ = ("entries", "next", "size", "used")

    def __init__(self, chosen: NDArray[np.int32], used: NDArray[np.uint32]) -> None:
        self.size = len(chosen)
        self.next = 0
        self.entries = (ctypes.c_int32 * max(1, self.size)).from_buffer_copy(_bytes_or_one(chosen))
        self.used = (ctypes.c_uint32 * max(1, self.size)).from_buffer_copy(_bytes_or_one(used))

    @property
    def left(self) -> int:
        return self.size - self.next


def _bytes_or_one(values: NDArray[np.int32] | NDArray[np.uint32]) -> bytes:
    return values.tobytes() or bytes(4)


class SlotPool:
    """Slots of all classes, as the streamer takes and gives them.

    Args:
        engine: The native tables.
        plan: Slot classes; the engine was made with `plan.capacity` slots.
        memories: Slot memory per class. Not closed here.
        backend: Reads into it.
        make_policy: Builds the policy over the engine's history.
        on_room: Called when memory has grown, or something else may have made room.

    Attributes:
        plan: The present one.
        free: By class, slots to read into. Take from the end.
        targets: By slot, what to read into; None where there is no memory.
        class_of_slot: By slot.
        evictions: Slices taken out of their slots.
        sweeps: Times that ranked victims had run out and any idle slice was taken.
        growth_error: Why slot memory stopped growing short of the plan; the run goes on with what there is.
    """

    def __init__(
        self,
        *,
        engine: Engine,
        plan: SlotPlan,
        memories: Sequence[SlotMemory],
        backend: ReadBackend,
        make_policy: Callable[[UseHistory], EvictionPolicy],
        on_room: Callable[[], None],
    ) -> None:
        self._engine = engine
        self._handle = engine.handle
        self.plan = plan
        self._memories = memories
        self._backend = backend
        self._on_room = on_room
        self.class_of_slot = [c for c, k in enumerate(plan.classes) for _ in range(k.capacity)]
        self.targets: list[Target | None] = [None] * plan.capacity
        for k, memory in zip(plan.classes, memories, strict=True):
            slots = np.arange(k.capacity, dtype=np.uint64) * np.uint64(k.slot_bytes)
            engine.slot_address[k.first_slot : k.first_slot + k.capacity] = slots + memory.base_address
        # By class, what the backend knows of its memory: slots of the class and the buffer they are in.
        self._buffers: list[list[tuple[range, int]]] = [[] for _ in plan.classes]
        self.free: list[list[int]] = [[] for _ in plan.classes]
        self._set_aside: list[int] = []
        self._growing: list[asyncio.Task[None] | None] = [None] * len(plan.classes)

        layer_of = np.repeat(np.arange(len(engine.layer_experts), dtype=np.int32), engine.layer_experts)
        self._policy = make_policy(
            UseHistory(
                last_use=engine.last_use,
                frequency=engine.frequency,
                layer_of=layer_of,
                layers=len(engine.layer_experts),
            )
        )
        # Entries that can free a slot of each class.
        self._of_class: list[NDArray[np.bool_]] = []
        for c in range(len(plan.classes)):
            layers = {t.layer for i, t in enumerate(engine.tensors) if plan.class_of_tensor[i] == c}
            self._of_class.append(np.isin(layer_of, list(layers)))
        nobody = np.empty(0, dtype=np.int32)
        self._rankings = [_Ranking(nobody, engine.last_use[nobody]) for _ in plan.classes]
        self._consumed, self._freed = ctypes.c_int32(), (ctypes.c_int32 * max(4, plan.capacity))()
        self.evictions = self.sweeps = 0
        self.growth_error: MemoryBudgetError | None = None

    async def prepare(self) -> None:
        """Makes the first chunk of each class usable; whether memory is registered is known afterwards.

        Raises:
            MemoryBudgetError: No memory for the first chunk.
        """
        for c in range(len(self.plan.classes)):
            await self._grow(c)

    async def aclose(self) -> None:
        """Waits until no memory is growing."""
        for task in self._growing:
            if task is not None:
                await task

    @property
    def slots_ready(self) -> int:
        """Slots whose memory exists."""
        return sum(m.populated_slots for m in self._memories)

    def is_growing(self, c: int) -> bool:
        """Whether there will be slots of class `c` in a moment."""
        return self._growing[c] is not None

    # --- room -------------------------------------------------------------------------------------

    def make_room(self, c: int, want: int, *, starved: bool) -> int:
        """How many of `want` slots of class `c` are free, room made as needed and possible.

        Ranked victims go first, then anything idle. While memory grows, nothing is given up: there will be
        slots in a moment.

        Args:
            c: The class.
            want: Slots.
            starved: Whether a request is already waiting: ranking anew has not helped then.
        """
        free = self.free[c]
        if len(free) >= want:
            return want
        if self._growing[c] is not None or self.grow_soon(c):
            return len(free)
        if not starved:
            self.evict_ranked(c, want - len(free))
            if len(free) < want:
                self._rank(c)
                self.evict_ranked(c, want - len(free))
        if not free:
            self.sweep(c, force=False)
        return min(want, len(free))

    def evict_ranked(self, c: int, want: int) -> None:
        """Gives up ranked victims until `want` more slots of class `c` are free or the ranking ends."""
        ranking, k = self._rankings[c], self.plan.classes[c]
        if ranking.left == 0:
            return
        n = lib.bm_evict_ranked(
            self._handle,
            ctypes.byref(ranking.entries, 4 * ranking.next),
            ctypes.byref(ranking.used, 4 * ranking.next),
            ranking.left,
            k.first_slot,
            k.first_slot + k.capacity,
            want,
            self._freed,
            self._consumed,
        )
        ranking.next += self._consumed.value
        self._release(n)

    def sweep(self, c: int, *, force: bool) -> bool:
        """Gives up anything idle of class `c`; with `force` also what later matmuls have asked for."""
        k = self.plan.classes[c]
        n = lib.bm_sweep(self._handle, k.first_slot, k.first_slot + k.capacity, 8, int(force), self._freed)
        self.sweeps += 1
        self._release(n)
        return bool(n > 0)

    def _release(self, n: int) -> None:
        self.evictions += n
        for slot in self._freed[:n]:
            self.give(slot)

    def give(self, slot: int) -> None:
        """A slot is empty: for the next read, unless its memory is about to be given back."""
        c = self.class_of_slot[slot]
        k = self.plan.classes[c]
        if slot < k.first_slot + k.slots:
            self.free[c].append(slot)

    def _rank(self, c: int) -> None:
        """Asks the policy for the next victims of class `c`."""
        engine = self._engine
        candidates = np.flatnonzero((engine.present > 0) & self._of_class[c]).astype(np.int32)
        count = min(len(candidates), max(_RANKED, len(candidates) // 128))
        chosen = self._policy.victims(candidates, count, lib.bm_current_layer(self._handle))
        self._rankings[c] = _Ranking(chosen, engine.last_use[chosen])

    def rank_low(self) -> None:
        """Ranks anew where few victims are left and memory no longer grows."""
        for c in range(len(self.plan.classes)):
            full = self._memories[c].populated_slots >= self.plan.classes[c].slots
            if full and self._rankings[c].left < _LOW_WATER:
                self._rank(c)

    @property
    def needs_ranking(self) -> bool:
        """Whether few victims are left."""
        return any(r.left < _LOW_WATER for r in self._rankings)

    def grow_ahead(self) -> None:
        """One chunk ahead: the next is ready before this one is used up."""
        for c, memory in enumerate(self._memories):
            if self._growing[c] is None and len(self.free[c]) < memory.chunk_slots // 2:
                self.grow_soon(c)

    def grow_soon(self, c: int) -> bool:
        """Starts making the next chunk of class `c` usable. False when all of it is."""
        memory = self._memories[c]
        if memory.populated_slots >= self.plan.classes[c].slots or self.growth_error is not None:
            return False
        self._growing[c] = asyncio.get_running_loop().create_task(self._grow_and_pump(c))
        return True

    async def _grow(self, c: int) -> None:
        memory = self._memories[c]
        # Touching memory takes milliseconds per chunk: native code, another thread, no GIL.
        slots = await asyncio.to_thread(memory.populate_next_chunk, self.plan.classes[c].slots)
        if slots is None:
            return
        self._add_buffer(c, slots)
        base = self.plan.classes[c].first_slot
        for slot in reversed(slots):
            self.give(base + slot)

    def _add_buffer(self, c: int, slots: range) -> None:
        """Makes slots of class `c` known to the backend."""
        memory, base = self._memories[c], self.plan.classes[c].first_slot
        buffer_id = self._backend.add_buffer(memory.slots_view(slots))
        self._buffers[c].append((slots, buffer_id))
        for slot in slots:
            self.targets[base + slot] = self._backend.prepare(buffer_id, memory.slot_view(slot))

    async def _grow_and_pump(self, c: int) -> None:
        try:
            await self._grow(c)
        except MemoryBudgetError as error:
            self.growth_error = error
        finally:
            self._growing[c] = None
        self._on_room()

    # --- another budget ---------------------------------------------------------------------------

    async def resize(self, plan: SlotPlan) -> None:
        """Goes over to a plan with more or fewer slots of the same classes, also while reads are made.

        More slots get their memory as they are needed. Fewer: the slots beyond are emptied as soon as nobody
        uses them, and their memory is given back to the kernel before this returns. A second resize must
        wait for the first.
        """
        self.plan = plan
        self.growth_error = None
        for c, k in enumerate(plan.classes):
            limit = k.first_slot + k.slots
            self.free[c] = [slot for slot in self.free[c] if slot < limit]
        for c in range(len(plan.classes)):
            await self._shrink(c)
        self._on_room()

    async def _shrink(self, c: int) -> None:
        k, memory = self.plan.classes[c], self._memories[c]
        if (growing := self._growing[c]) is not None:
            await asyncio.wait((growing,))
        first, last = k.first_slot + k.slots, k.first_slot + k.capacity
        while memory.populated_slots > k.slots:
            n = lib.bm_sweep(self._handle, first, last, len(self._freed), 0, self._freed)
            self._release(n)
            held = self._engine.slot_slice[first : k.first_slot + memory.populated_slots] >= 0
            if not held.any():
                break
            self._on_room()  # what is held may be waited for by nobody but a request without a slot
            await asyncio.sleep(_SHRINK_POLL_S)
        else:
            return
        kept: list[tuple[range, int]] = []
        halved: range | None = None
        for slots, buffer_id in self._buffers[c]:
            if slots.stop <= k.slots:
                kept.append((slots, buffer_id))
                continue
            if slots.start < k.slots:
                halved = range(slots.start, k.slots)
                await self._until_no_read(k.first_slot, halved)
            self._backend.remove_buffer(buffer_id)
        self._buffers[c] = kept
        memory.give_back(k.slots)
        if halved is not None:
            self._add_buffer(c, halved)
            self.free[c].extend(self._set_aside)
            self._set_aside = []

    async def _until_no_read(self, base: int, slots: range) -> None:
        """Waits until nothing is read into these slots, and lets nothing new be; see `_set_aside`."""
        c = self.class_of_slot[base]
        low, high = base + slots.start, base + slots.stop
        self._set_aside = [s for s in self.free[c] if low <= s < high]
        self.free[c] = [s for s in self.free[c] if not low <= s < high]
        while any(
            (s := int(self._engine.slot_slice[slot])) >= 0
            and lib.bm_slice_word(self._handle, s) & STATE_MASK == READING
            for slot in range(low, high)
        ):
            await asyncio.sleep(_SHRINK_POLL_S)
            self._set_aside += [s for s in self.free[c] if low <= s < high]
            self.free[c] = [s for s in self.free[c] if not low <= s < high]
