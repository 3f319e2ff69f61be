"""The asyncio half of the pipeline: requests in, reads out, readiness back.

It owns the slots' free lists, the order of eviction as the policy chose it, and the growth of slot
memory. It must not know models or tokens. Everything here runs on the loop's thread, and only when a
layer missed: doorbell, take, assign, read, submit. Choosing victims comes after the submission, in
batches, so that the next miss only has to try candidates that are already ranked.
"""

from __future__ import annotations

import asyncio
import ctypes
import time
from collections import deque
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from bmoe.io.errors import MemoryBudgetError
from bmoe.pipeline.native import PIN_SHIFT, READING, STATE_MASK, STOP_FAULT, STOP_IO, Engine, lib
from bmoe.pipeline.policy import UseHistory

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from bmoe.io.backend import Place, Target
    from bmoe.io.errors import ReadError
    from bmoe.io.read_queue import ReadQueue
    from bmoe.io.slot_memory import SlotMemory
    from bmoe.pipeline.policy import EvictionPolicy
    from bmoe.pipeline.slots import SlotPlan


_LONGEST_RUN = 1024
# How long after an announcement more are to be expected.
_DEMAND_LASTS_NS = 50_000_000
_SHRINK_POLL_S = 0.001


@dataclass(frozen=True, slots=True)
class StreamerStatistics:
    """Counters since the streamer started.

    Attributes:
        reads: Slice reads started.
        read_bytes: Bytes of the windows read.
        slice_bytes: Bytes of the slices in them.
        evictions: Slices taken out of their slots.
        rereads: Reads of slices that had been resident before.
        sweeps: Times that ranked victims had run out and any idle slice was taken.
        starved: Times that a request had to wait for a slot.
        loop_ns: Time on the loop's thread in this class.
        submit_latencies: Announcement to first submission, one per request batch.
        submit_latency_ns: Their sum.
        reads_done: Reads that are complete, failed ones included.
        in_flight_ns: Time of all reads from handed over to done, summed up.
        io_busy_ns: Time with at least one read in flight.
        speculative_reads, speculative_bytes: Of the reads, those nobody had asked for yet.
        slots_used: Slots that hold or are receiving a slice.
        slots_ready: Slots whose memory exists by now.
        slots_total: Slots under the budget.
    """

    reads: int
    read_bytes: int
    slice_bytes: int
    evictions: int
    rereads: int
    sweeps: int
    starved: int
    loop_ns: int
    submit_latencies: int
    submit_latency_ns: int
    reads_done: int
    in_flight_ns: int
    io_busy_ns: int
    speculative_reads: int
    speculative_bytes: int
    slots_used: int
    slots_ready: int
    slots_total: int


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


class Streamer:
    """Serves a native engine's requests from files into slots.

    Args:
        engine: The native tables.
        plan: Slot classes; the engine was made with `plan.total_slots` slots.
        memories: Slot memory per class. Not closed here.
        queue: Reads. Started here; its tags are slot numbers. Not closed here.
        files: The queue's file ids by file number of the tensors.
        block_bytes: Read alignment of each file.
        make_policy: Builds the policy over the engine's history.
        event_fd: The engine's doorbell. Not closed here.
    """

    def __init__(
        self,
        *,
        engine: Engine,
        plan: SlotPlan,
        memories: Sequence[SlotMemory],
        queue: ReadQueue,
        files: Sequence[int],
        block_bytes: Sequence[int],
        make_policy: Callable[[UseHistory], EvictionPolicy],
        event_fd: int,
    ) -> None:
        self._engine = engine
        self._handle = engine.handle
        self._plan = plan
        self._memories = memories
        self._queue = queue
        self._event_fd = event_fd
        self._loop: asyncio.AbstractEventLoop | None = None

        tensors = engine.tensors
        # By slice, as plain lists: the fastest thing to index from Python.
        self._place: list[Place] = []
        self._tensor: list[int] = []
        for i, t in enumerate(tensors):
            block = block_bytes[t.file]
            for e in range(t.experts):
                offset = t.file_offset + e * t.slice_bytes
                phase = offset % block
                self._place.append((files[t.file], offset - phase, phase + t.slice_bytes))
                engine.phase[len(self._tensor)] = phase
                self._tensor.append(i)
        self._slice_size = [t.slice_bytes for t in tensors]

        self._class_of_slot = [c for c, k in enumerate(plan.classes) for _ in range(k.capacity)]
        self._targets: list[Target | None] = [None] * plan.capacity
        for k, memory in zip(plan.classes, memories, strict=True):
            slots = np.arange(k.capacity, dtype=np.uint64) * np.uint64(k.slot_bytes)
            engine.slot_address[k.first_slot : k.first_slot + k.capacity] = slots + memory.base_address
        # By class, what the backend knows of its memory: slots of the class and the buffer they are in.
        self._buffers: list[list[tuple[range, int]]] = [[] for _ in plan.classes]
        self._free: list[list[int]] = [[] for _ in plan.classes]
        self._growing: list[asyncio.Task[None] | None] = [None] * len(plan.classes)

        layer_of = np.repeat(np.arange(len(engine.layer_experts), dtype=np.int32), engine.layer_experts)
        self._history = UseHistory(
            last_use=engine.last_use,
            frequency=engine.frequency,
            layer_of=layer_of,
            layers=len(engine.layer_experts),
        )
        self._policy = make_policy(self._history)
        # Entries that can free a slot of each class.
        self._of_class: list[NDArray[np.bool_]] = []
        for c in range(len(plan.classes)):
            layers = {t.layer for i, t in enumerate(tensors) if plan.class_of_tensor[i] == c}
            self._of_class.append(np.isin(layer_of, list(layers)))
        nobody = np.empty(0, dtype=np.int32)
        self._rankings = [_Ranking(nobody, engine.last_use[nobody]) for _ in plan.classes]
        self._low_water = 16

        self._pending: deque[int] = deque()
        self._unasked: deque[int] = deque()
        self._set_aside: list[int] = []
        self._was_absent = (ctypes.c_uint8 * 1)()
        self._closing = False
        self._starved = self._ranking = False
        self._taken = (ctypes.c_int32 * _LONGEST_RUN)()
        self._run_slices, self._run_slots = (
            (ctypes.c_int32 * _LONGEST_RUN)(),
            (ctypes.c_int32 * _LONGEST_RUN)(),
        )
        self._consumed, self._freed = ctypes.c_int32(), (ctypes.c_int32 * max(4, plan.capacity))()
        self._done = (ctypes.c_int32 * _LONGEST_RUN)()
        self._was_resident = bytearray(engine.slices)
        self._error: ReadError | None = None
        # Counts what `reset` has ended, so that a late failure is told from one that matters.
        self._batch_of_slot = [0] * plan.capacity
        self._reads = self._read_bytes = self._slice_bytes = self._evictions = self._rereads = 0
        self._sweeps = self._starvations = self._loop_ns = self._batch = 0
        self._submit_latency_ns = self._speculative_reads = self._speculative_bytes = 0
        self._outstanding = self._reads_done = self._io_mark_ns = self._in_flight_ns = self._io_busy_ns = 0
        self._read_records: list[tuple[int, bool, int, int]] | None = None
        self._started_ns = [0] * plan.capacity
        self.submit_latencies_ns: list[int] = []
        """Announcement to first submission, newest last; the caller may clear it."""
        self.request_bytes: list[int] = []
        """Slice bytes asked for by each announcement that asked, newest last; the caller may clear it."""
        self.bug: Exception | None = None
        """An unexpected failure in a callback: it ends the run."""
        self.growth_error: MemoryBudgetError | None = None
        """Why slot memory stopped growing short of the plan; the run goes on with what there is."""

    # --- life -------------------------------------------------------------------------------------

    async def prepare(self) -> None:
        """Makes the first chunk of each class usable; whether memory is registered is known afterwards.

        Raises:
            MemoryBudgetError: No memory for the first chunk.
        """
        for c in range(len(self._plan.classes)):
            await self._grow(c)

    def start(self) -> None:
        """Listens to the doorbell; takes the queue over."""
        self._loop = asyncio.get_running_loop()
        self._queue.start(self._loop, partial(self._guarded, self._on_done), self._on_error)
        self._loop.add_reader(self._event_fd, self._guarded, self._on_doorbell)

    async def aclose(self) -> None:
        """Stops listening and waits until no read is in flight. Slot memory may be freed afterwards."""
        if self._loop is not None:
            self._loop.remove_reader(self._event_fd)
        self._closing = True
        self._pending.clear()  # memory that has grown would start reads, and grow again
        self._unasked.clear()
        for task in self._growing:
            if task is not None:
                await task
        await self._queue.aclose()

    @property
    def error(self) -> ReadError | None:
        """The read that failed for good, if one did. Cleared by `reset`."""
        return self._error

    def reset(self) -> None:
        """After a batch that ended early: forgets requests. Reads in flight go on and are kept."""
        self._pending.clear()
        self._starved = False
        self._error = self.bug = None
        self._batch += 1
        lib.bm_reset(self._handle)

    def statistics(self) -> StreamerStatistics:
        """A snapshot of the counters."""
        ready = sum(m.populated_slots for m in self._memories)
        since_ns = time.monotonic_ns() - self._io_mark_ns if self._outstanding else 0
        return StreamerStatistics(
            reads=self._reads,
            read_bytes=self._read_bytes,
            slice_bytes=self._slice_bytes,
            evictions=self._evictions,
            rereads=self._rereads,
            sweeps=self._sweeps,
            starved=self._starvations,
            loop_ns=self._loop_ns,
            submit_latencies=len(self.submit_latencies_ns),
            submit_latency_ns=self._submit_latency_ns,
            reads_done=self._reads_done,
            in_flight_ns=self._in_flight_ns + self._outstanding * since_ns,
            io_busy_ns=self._io_busy_ns + since_ns,
            speculative_reads=self._speculative_reads,
            speculative_bytes=self._speculative_bytes,
            slots_used=ready - sum(map(len, self._free)),
            slots_ready=ready,
            slots_total=self._plan.total_slots,
        )

    def record_reads(self) -> None:
        """From now on `take_read_records` has every read."""
        self._read_records = []

    def take_read_records(self) -> list[tuple[int, bool, int, int]]:
        """(slice id, read unasked, bytes of its window, nanoseconds from handed over to done) since last."""
        records, self._read_records = self._read_records or [], []
        return records

    # --- requests ---------------------------------------------------------------------------------

    def _guarded(self, callback: Callable[..., None], *arguments: Any) -> None:
        """Runs a callback; should it fail, compute threads must not wait for what will never come."""
        try:
            callback(*arguments)
        except Exception as bug:
            self.bug = self.bug or bug
            lib.bm_stop(self._handle, STOP_FAULT)
            raise

    def _on_doorbell(self) -> None:
        t0 = time.monotonic_ns()
        room = len(self._taken)
        n = lib.bm_take(self._handle, self._taken, room)
        taken = self._taken[:n]
        while n == room:
            n = lib.bm_take(self._handle, self._taken, room)
            taken += self._taken[:n]
        self._pending.extend(taken)
        if self._pending:
            self._pump(announced_ns=self._engine.announced_at_ns if taken else 0)
        if taken:
            size, tensor = self._slice_size, self._tensor
            self.request_bytes.append(sum([size[tensor[s]] for s in taken]))
        self._loop_ns += time.monotonic_ns() - t0

    def _pump(self, announced_ns: int = 0) -> None:
        """Starts reads for as many pending slices as there are slots for, in order of use.

        One matmul's slices at a time: the first one's reads are out before anything is prepared for the
        next.
        """
        pending, tensor_of, started = self._pending, self._tensor, 0
        while pending:
            tensor = tensor_of[pending[0]]
            c = self._plan.class_of_tensor[tensor]
            n = self._free_slots(c, self._run_length())
            if n == 0:
                if self._growing[c] is not None or not self._pull_forward_demand():
                    break
                continue
            self._start_reads([pending.popleft() for _ in range(n)], tensor)
            if announced_ns and not started:
                latency_ns = time.monotonic_ns() - announced_ns
                self._submit_latency_ns += latency_ns
                self.submit_latencies_ns.append(latency_ns)
            started += n
        if started:
            self._after_reads()
        if pending and not self._starved:
            self._starve()
        elif not pending and self._starved:
            self._starved = False
            lib.bm_set_starved(self._handle, 0)

    def _run_length(self) -> int:
        """How many of the oldest requests are for one and the same matmul."""
        tensor_of, n = self._tensor, 0
        first = tensor_of[self._pending[0]]
        for slice_id in self._pending:
            if tensor_of[slice_id] != first or n == _LONGEST_RUN:
                break
            n += 1
        return n

    def _start_reads(self, run: list[int], tensor: int) -> None:
        """Reads these slices of one tensor into free slots, of which there are enough."""
        free = self._free[self._plan.class_of_tensor[tensor]]
        n = len(run)
        slots = free[-n:]
        del free[-n:]
        self._run_slices[:n] = run  # type: ignore[assignment]  # typeshed wants c_int32 in the list
        self._run_slots[:n] = slots  # type: ignore[assignment]  # as above
        if lib.bm_assign(self._handle, self._run_slices, self._run_slots, n):
            raise RuntimeError(
                f"slices of {self._engine.tensors[tensor].name} were posted but are not wanted"
            )
        places, targets = self._place, self._targets
        self._queue.read_many(slots, [places[s] for s in run], [targets[s] for s in slots])  # type: ignore[misc]  # free slots have targets
        self._queue.submit()
        self._count_in_flight(n)
        self._reads += n
        self._slice_bytes += n * self._slice_size[tensor]
        self._read_bytes += n * self._plan.classes[self._plan.class_of_tensor[tensor]].slot_bytes
        for slot in slots:
            self._batch_of_slot[slot] = self._batch
        if self._read_records is not None:
            for slot in slots:
                self._started_ns[slot] = self._io_mark_ns
        resident = self._was_resident
        for s in run:
            self._rereads += resident[s]
            resident[s] = 1

    def _count_in_flight(self, change: int) -> None:
        """Integrates reads in flight over time: their sum of latencies, without a time stamp per read."""
        now_ns = time.monotonic_ns()
        if self._outstanding:
            self._io_busy_ns += now_ns - self._io_mark_ns
            self._in_flight_ns += self._outstanding * (now_ns - self._io_mark_ns)
        self._io_mark_ns = now_ns
        self._outstanding += change
        if change < 0:
            self._reads_done -= change

    def _after_reads(self) -> None:
        """With reads out: see to memory and to the next victims."""
        for c, memory in enumerate(self._memories):
            # One chunk ahead: the next is ready before this one is used up.
            if self._growing[c] is None and len(self._free[c]) < memory.chunk_slots // 2:
                self._grow_soon(c)
        if not self._ranking and any(r.left < self._low_water for r in self._rankings):
            self._ranking = True
            assert self._loop is not None
            self._loop.call_soon(self._guarded, self._rank_all)

    def _starve(self) -> None:
        """No slot for the oldest request. From now on every release rings; look once more, then wait."""
        self._starved = True
        self._starvations += 1
        lib.bm_set_starved(self._handle, 1)
        self._pump()

    def _pull_forward_demand(self) -> bool:
        """Moves a request that a matmul is waiting for before those made early. False when none can."""
        for i, slice_id in enumerate(self._pending):
            pinned = lib.bm_slice_word(self._handle, slice_id) >> PIN_SHIFT
            c = self._plan.class_of_tensor[self._tensor[slice_id]]
            if pinned and (self._free[c] or self._sweep(c, force=True)):
                del self._pending[i]
                self._pending.appendleft(slice_id)
                return True
        return False

    # --- slots ------------------------------------------------------------------------------------

    def _free_slots(self, c: int, want: int) -> int:
        """How many of `want` slots of class `c` are free, room made as needed and possible.

        Ranked victims go first, then anything idle. While memory grows, nothing is given up: there will be
        slots in a moment.
        """
        free = self._free[c]
        if len(free) >= want:
            return want
        if self._growing[c] is not None or self._grow_soon(c):
            return len(free)
        if not self._starved:
            self._evict_ranked(c, want - len(free))
            if len(free) < want:
                self._rank(c)
                self._evict_ranked(c, want - len(free))
        if not free:
            self._sweep(c, force=False)
        return min(want, len(free))

    def _evict_ranked(self, c: int, want: int) -> None:
        ranking, k = self._rankings[c], self._plan.classes[c]
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

    def _sweep(self, c: int, *, force: bool) -> bool:
        k = self._plan.classes[c]
        n = lib.bm_sweep(self._handle, k.first_slot, k.first_slot + k.capacity, 8, int(force), self._freed)
        self._sweeps += 1
        self._release(n)
        return bool(n > 0)

    def _release(self, n: int) -> None:
        self._evictions += n
        for slot in self._freed[:n]:
            self._free_slot(slot)

    def _free_slot(self, slot: int) -> None:
        """A slot is empty: for the next read, unless its memory is about to be given back."""
        c = self._class_of_slot[slot]
        k = self._plan.classes[c]
        if slot < k.first_slot + k.slots:
            self._free[c].append(slot)

    def _rank(self, c: int) -> None:
        """Asks the policy for the next victims of class `c`."""
        engine = self._engine
        candidates = np.flatnonzero((engine.present > 0) & self._of_class[c]).astype(np.int32)
        count = min(len(candidates), max(4 * self._low_water, len(candidates) // 16))
        chosen = self._policy.victims(candidates, count, lib.bm_current_layer(self._handle))
        self._rankings[c] = _Ranking(chosen, engine.last_use[chosen])

    def _rank_all(self) -> None:
        t0 = time.monotonic_ns()
        self._ranking = False
        for c in range(len(self._plan.classes)):
            full = self._memories[c].populated_slots >= self._plan.classes[c].slots
            if full and self._rankings[c].left < self._low_water:
                self._rank(c)
        self._loop_ns += time.monotonic_ns() - t0

    def _grow_soon(self, c: int) -> bool:
        """Starts making the next chunk of class `c` usable. False when all of it is."""
        memory = self._memories[c]
        if memory.populated_slots >= self._plan.classes[c].slots or self.growth_error is not None:
            return False
        assert self._loop is not None
        self._growing[c] = self._loop.create_task(self._grow_and_pump(c))
        return True

    async def _grow(self, c: int) -> None:
        memory = self._memories[c]
        # Touching memory takes milliseconds per chunk: native code, another thread, no GIL.
        slots = await asyncio.to_thread(memory.populate_next_chunk, self._plan.classes[c].slots)
        if slots is None:
            return
        self._add_buffer(c, slots)
        base = self._plan.classes[c].first_slot
        for slot in reversed(slots):
            self._free_slot(base + slot)

    def _add_buffer(self, c: int, slots: range) -> None:
        """Makes slots of class `c` known to the backend."""
        memory, base = self._memories[c], self._plan.classes[c].first_slot
        buffer_id = self._queue.backend.add_buffer(memory.slots_view(slots))
        self._buffers[c].append((slots, buffer_id))
        for slot in slots:
            self._targets[base + slot] = self._queue.backend.prepare(buffer_id, memory.slot_view(slot))

    async def _grow_and_pump(self, c: int) -> None:
        try:
            await self._grow(c)
        except MemoryBudgetError as error:
            self.growth_error = error
        finally:
            self._growing[c] = None
        if self._pending:
            self._guarded(self._pump)
        elif self._unasked:
            self._guarded(self._pump_unasked)

    # --- another budget ---------------------------------------------------------------------------

    async def resize(self, plan: SlotPlan) -> None:
        """Goes over to a plan with more or fewer slots of the same classes, also while reads are made.

        More slots get their memory as they are needed. Fewer: the slots beyond are emptied as soon as nobody
        uses them, and their memory is given back to the kernel before this returns. A second resize must
        wait for the first.
        """
        self._plan = plan
        self.growth_error = None
        for c, k in enumerate(plan.classes):
            limit = k.first_slot + k.slots
            self._free[c] = [slot for slot in self._free[c] if slot < limit]
        for c in range(len(plan.classes)):
            await self._shrink(c)
        if self._pending:
            self._guarded(self._pump)

    async def _shrink(self, c: int) -> None:
        k, memory = self._plan.classes[c], self._memories[c]
        if (growing := self._growing[c]) is not None:
            await asyncio.wait((growing,))
        first, last = k.first_slot + k.slots, k.first_slot + k.capacity
        while memory.populated_slots > k.slots:
            n = lib.bm_sweep(self._handle, first, last, len(self._freed), 0, self._freed)
            self._release(n)
            held = self._engine.slot_slice[first : k.first_slot + memory.populated_slots] >= 0
            if not held.any():
                break
            if self._pending:  # what is held may be waited for by nobody but a request without a slot
                self._guarded(self._pump)
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
            self._queue.backend.remove_buffer(buffer_id)
        self._buffers[c] = kept
        memory.give_back(k.slots)
        if halved is not None:
            self._add_buffer(c, halved)
            self._free[c].extend(self._set_aside)
            self._set_aside = []

    async def _until_no_read(self, base: int, slots: range) -> None:
        """Waits until nothing is read into these slots, and lets nothing new be; see `_set_aside`."""
        c = self._class_of_slot[base]
        low, high = base + slots.start, base + slots.stop
        self._set_aside = [s for s in self._free[c] if low <= s < high]
        self._free[c] = [s for s in self._free[c] if not low <= s < high]
        while any(
            (s := int(self._engine.slot_slice[slot])) >= 0
            and lib.bm_slice_word(self._handle, s) & STATE_MASK == READING
            for slot in range(low, high)
        ):
            await asyncio.sleep(_SHRINK_POLL_S)
            self._set_aside += [s for s in self._free[c] if low <= s < high]
            self._free[c] = [s for s in self._free[c] if not low <= s < high]

    # --- before anyone asks -----------------------------------------------------------------------

    def preload(self, slices: Sequence[int]) -> None:
        """Reads slices when nothing else is to be read, in this order, while there are empty slots.

        Demand goes first: while it is about, at most two such reads are in flight.
        """
        self._unasked.extend(slices)
        self._pump_unasked()

    @property
    def preloading(self) -> int:
        """Slices that are still to be preloaded."""
        return len(self._unasked)

    def _pump_unasked(self) -> None:
        if not self._unasked or self._pending or self._closing:
            return
        quiet = time.monotonic_ns() - self._engine.announced_at_ns > _DEMAND_LASTS_NS
        most = self._queue.backend.queue_depth if quiet else 2
        started = False
        while self._unasked and self._outstanding < most:
            c = self._plan.class_of_tensor[self._tensor[self._unasked[0]]]
            if not self._free[c]:
                if self._growing[c] is not None or self._grow_soon(c):
                    break  # goes on when memory has grown
                self._unasked.clear()  # the cache is full: what is in it has been asked for
                break
            started |= self._read_unasked(self._unasked.popleft(), c)
        if started:
            self._queue.submit()
            self._after_reads()

    def _read_unasked(self, slice_id: int, c: int) -> bool:
        slot = self._free[c].pop()
        self._run_slices[0], self._run_slots[0] = slice_id, slot
        if not lib.bm_preload(self._handle, self._run_slices, self._run_slots, 1, self._was_absent):
            self._free[c].append(slot)
            return False
        target = self._targets[slot]
        assert target is not None
        self._queue.read_many((slot,), (self._place[slice_id],), (target,))
        self._count_in_flight(1)
        slot_bytes = self._plan.classes[c].slot_bytes
        self._reads += 1
        self._speculative_reads += 1
        self._slice_bytes += self._slice_size[self._tensor[slice_id]]
        self._read_bytes += slot_bytes
        self._speculative_bytes += slot_bytes
        # Nobody's batch: should it fail, whoever has come to wait for it reads it anew.
        self._batch_of_slot[slot] = -1
        if self._read_records is not None:
            self._started_ns[slot] = self._io_mark_ns
        self._rereads += self._was_resident[slice_id]
        self._was_resident[slice_id] = 1
        return True

    # --- completions ------------------------------------------------------------------------------

    def _on_done(self, slots: list[int]) -> None:
        t0 = time.monotonic_ns()
        self._count_in_flight(-len(slots))
        if self._read_records is not None:
            self._record_done(slots)
        for start in range(0, len(slots), len(self._done)):
            part = slots[start : start + len(self._done)]
            self._done[: len(part)] = part  # type: ignore[assignment]  # typeshed wants c_int32 in the list
            if lib.bm_ready(self._handle, self._done, len(part)):
                raise RuntimeError("a read completed for a slot that was not being read")
        if self._pending:
            self._pump()
        if self._unasked:
            self._pump_unasked()
        self._loop_ns += time.monotonic_ns() - t0

    def _record_done(self, slots: list[int]) -> None:
        assert self._read_records is not None
        for slot in slots:
            slice_id = int(self._engine.slot_slice[slot])
            entry = self._entry_of_slice(slice_id)
            slot_bytes = self._plan.classes[self._class_of_slot[slot]].slot_bytes
            unasked = bool(self._engine.speculative[entry])
            self._read_records.append(
                (slice_id, unasked, slot_bytes, self._io_mark_ns - self._started_ns[slot])
            )

    def _entry_of_slice(self, slice_id: int) -> int:
        i = self._tensor[slice_id]
        return (
            self._engine.first_entry[self._engine.tensors[i].layer] + slice_id - self._engine.first_slice[i]
        )

    def _on_error(self, slot: int, error: ReadError) -> None:
        self._count_in_flight(-1)
        slice_id = int(self._engine.slot_slice[slot])
        # A read for an earlier batch, which a cancel or a failure has ended: that batch's error it is not.
        # Should the present one have come to count on it, it is read anew.
        late = self._batch_of_slot[slot] != self._batch
        if not late and self._error is None:
            error.slice_name = self._engine.slice_name(slice_id)
            self._error = error
        again = lib.bm_abandon(self._handle, slot, int(late))
        self._free_slot(slot)
        if again:
            self._pending.append(slice_id)
        if not late:
            lib.bm_stop(self._handle, STOP_IO)
        elif self._pending:
            self._guarded(self._pump)
