"""The asyncio half of the pipeline: requests in, reads out, readiness back.

It owns requests and reads: those that compute threads wait for first, those that nobody has asked for
yet when there is time. It must not know models or tokens. Everything here runs on the loop's thread, and
only when a layer missed: doorbell, take, assign, read, submit.
"""

from __future__ import annotations

import asyncio
import bisect
import ctypes
import time
from collections import deque
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from bmoe.pipeline.native import PIN_SHIFT, STOP_FAULT, STOP_IO, Engine, lib
from bmoe.pipeline.slot_pool import SlotPool

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from bmoe.io.backend import Place
    from bmoe.io.errors import ReadError
    from bmoe.io.read_queue import ReadQueue
    from bmoe.io.slot_memory import SlotMemory
    from bmoe.pipeline.policy import EvictionPolicy, UseHistory
    from bmoe.pipeline.slots import SlotPlan
    from bmoe.pipeline.spare_reads import SpareReads


_LONGEST_RUN = 1024
# How long after an announcement more are to be expected.
_DEMAND_LASTS_NS = 50_000_000


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

        self.pool = SlotPool(
            engine=engine,
            plan=plan,
            memories=memories,
            backend=queue.backend,
            make_policy=make_policy,
            on_room=self._on_room,
        )
        self._pending: deque[int] = deque()
        self._unasked: deque[int] = deque()
        # (layer, slices) expected soon; `_spare` says how many of them to read, None that there are none.
        self._hinted: deque[tuple[int, list[int]]] = deque()
        self._hints = (ctypes.c_int32 * _LONGEST_RUN)()
        self._hinted_experts = 0
        self._spare: SpareReads | None = None
        self._tensors_of_layer: list[list[int]] = [[] for _ in engine.layer_experts]
        for i, t in enumerate(tensors):
            self._tensors_of_layer[t.layer].append(i)
        self._was_absent = (ctypes.c_uint8 * 1)()
        self._closing = False
        self._starved = self._ranking = False
        self._taken = (ctypes.c_int32 * _LONGEST_RUN)()
        self._run_slices, self._run_slots = (
            (ctypes.c_int32 * _LONGEST_RUN)(),
            (ctypes.c_int32 * _LONGEST_RUN)(),
        )
        self._done = (ctypes.c_int32 * _LONGEST_RUN)()
        self._was_resident = bytearray(engine.slices)
        self._error: ReadError | None = None
        # Counts what `reset` has ended, so that a late failure is told from one that matters.
        self._batch_of_slot = [0] * plan.capacity
        self._reads = self._read_bytes = self._slice_bytes = self._rereads = 0
        self._starvations = self._loop_ns = self._batch = 0
        self._submit_latency_ns = self._speculative_reads = self._speculative_bytes = 0
        self._outstanding = self._reads_done = self._io_mark_ns = self._in_flight_ns = self._io_busy_ns = 0
        self._read_records: list[tuple[int, bool, int, int]] | None = None
        self._started_ns = [0] * plan.capacity
        self.submit_latencies_ns: list[int] = []
        """Announcement to first submission, newest last; the caller may clear it."""
        self.bug: Exception | None = None
        """An unexpected failure in a callback: it ends the run."""

    # --- life -------------------------------------------------------------------------------------

    async def prepare(self) -> None:
        """Makes the first chunk of each class usable; whether memory is registered is known afterwards.

        Raises:
            MemoryBudgetError: No memory for the first chunk.
        """
        await self.pool.prepare()

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
        self._hinted.clear()
        await self.pool.aclose()
        await self._queue.aclose()

    @property
    def error(self) -> ReadError | None:
        """The read that failed for good, if one did. Cleared by `reset`."""
        return self._error

    def reset(self) -> None:
        """After a batch that ended early: forgets requests. Reads in flight go on and are kept."""
        self._pending.clear()
        self._hinted.clear()
        self._starved = False
        self._error = self.bug = None
        self._batch += 1
        lib.bm_reset(self._handle)

    def statistics(self) -> StreamerStatistics:
        """A snapshot of the counters."""
        pool, ready = self.pool, self.pool.slots_ready
        since_ns = self._since_mark_ns()
        return StreamerStatistics(
            reads=self._reads,
            read_bytes=self._read_bytes,
            slice_bytes=self._slice_bytes,
            evictions=pool.evictions,
            rereads=self._rereads,
            sweeps=pool.sweeps,
            starved=self._starvations,
            loop_ns=self._loop_ns,
            submit_latencies=len(self.submit_latencies_ns),
            submit_latency_ns=self._submit_latency_ns,
            reads_done=self._reads_done,
            in_flight_ns=self._in_flight_ns + self._outstanding * since_ns,
            io_busy_ns=self._io_busy_ns + since_ns,
            speculative_reads=self._speculative_reads,
            speculative_bytes=self._speculative_bytes,
            slots_used=ready - sum(map(len, pool.free)),
            slots_ready=ready,
            slots_total=pool.plan.total_slots,
        )

    def _since_mark_ns(self) -> int:
        """Time with reads in flight that is not counted yet."""
        return time.monotonic_ns() - self._io_mark_ns if self._outstanding else 0

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
        if self._spare is not None:
            self._take_hints()
            if self._hinted:
                self._pump_unasked()
        self._loop_ns += time.monotonic_ns() - t0

    def _pump(self, announced_ns: int = 0) -> None:
        """Starts reads for as many pending slices as there are slots for, in order of use.

        One matmul's slices at a time: the first one's reads are out before anything is prepared for the
        next.
        """
        pending, tensor_of, started = self._pending, self._tensor, 0
        while pending:
            tensor = tensor_of[pending[0]]
            c = self.pool.plan.class_of_tensor[tensor]
            n = self.pool.make_room(c, self._run_length(), starved=self._starved)
            if n == 0:
                if self.pool.is_growing(c) or not self._pull_forward_demand():
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
        free = self.pool.free[self.pool.plan.class_of_tensor[tensor]]
        n = len(run)
        slots = free[-n:]
        del free[-n:]
        self._run_slices[:n] = run  # type: ignore[assignment]  # typeshed wants c_int32 in the list
        self._run_slots[:n] = slots  # type: ignore[assignment]  # as above
        if lib.bm_assign(self._handle, self._run_slices, self._run_slots, n):
            raise RuntimeError(
                f"slices of {self._engine.tensors[tensor].name} were posted but are not wanted"
            )
        places, targets = self._place, self.pool.targets
        self._queue.read_many(slots, [places[s] for s in run], [targets[s] for s in slots])  # type: ignore[misc]  # free slots have targets
        self._queue.submit()
        self._count_in_flight(n)
        self._reads += n
        self._slice_bytes += n * self._slice_size[tensor]
        self._read_bytes += n * self.pool.plan.classes[self.pool.plan.class_of_tensor[tensor]].slot_bytes
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
        self.pool.grow_ahead()
        if not self._ranking and self.pool.needs_ranking:
            self._ranking = True
            assert self._loop is not None
            self._loop.call_soon(self._guarded, self._rank)

    def _rank(self) -> None:
        t0 = time.monotonic_ns()
        self._ranking = False
        self.pool.rank_low()
        self._loop_ns += time.monotonic_ns() - t0

    def _on_room(self) -> None:
        """The pool may have slots that it had not."""
        if self._pending:
            self._guarded(self._pump)
        elif self._unasked or self._hinted:
            self._guarded(self._pump_unasked)

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
            c = self.pool.plan.class_of_tensor[self._tensor[slice_id]]
            if pinned and (self.pool.free[c] or self.pool.sweep(c, force=True)):
                del self._pending[i]
                self._pending.appendleft(slice_id)
                return True
        return False

    # --- before anyone asks -----------------------------------------------------------------------

    def preload(self, slices: Sequence[int]) -> None:
        """Reads slices when nothing else is to be read, in this order, while there are empty slots.

        Demand goes first: while it is about, at most two such reads are in flight.
        """
        self._unasked.extend(slices)
        self._pump_unasked()

    def follow_hints(self, spare: SpareReads) -> None:
        """From now on what is expected to be routed to is read ahead, as far as `spare` allows."""
        self._spare = spare

    def _take_hints(self) -> None:
        n = lib.bm_take_hints(self._handle, self._hints, len(self._hints))
        for entry in self._hints[:n]:
            layer, slices = self._slices_of(entry)
            self._hinted.append((layer, slices))

    def _slices_of(self, entry: int) -> tuple[int, list[int]]:
        engine = self._engine
        layer = bisect.bisect_right(engine.first_entry, entry) - 1
        expert = entry - engine.first_entry[layer]
        return layer, [engine.first_slice[t] + expert for t in self._tensors_of_layer[layer]]

    def _pump_unasked(self) -> None:
        if self._pending or self._closing:
            return
        started = self._read_hinted() if self._hinted else False
        quiet = time.monotonic_ns() - self._engine.announced_at_ns > _DEMAND_LASTS_NS
        most = self._queue.backend.queue_depth if quiet else 2
        while self._unasked and self._outstanding < most:
            c = self.pool.plan.class_of_tensor[self._tensor[self._unasked[0]]]
            if not self.pool.free[c]:
                if self.pool.is_growing(c) or self.pool.grow_soon(c):
                    break  # goes on when memory has grown
                self._unasked.clear()  # the cache is full: what is in it has been asked for
                break
            started |= self._read_unasked(self._unasked.popleft(), c)
        if started:
            self._queue.submit()
            self._after_reads()

    def _read_hinted(self) -> bool:
        """Reads what is expected for layers still to come, in place of what ranks lowest."""
        assert self._spare is not None
        most = self._spare.reads_allowed(
            now_ns=time.monotonic_ns(),
            issued=self._hinted_experts,
            useful=self._engine.speculated,
        )
        layers, now, started = len(self._engine.layer_experts), lib.bm_current_layer(self._handle), False
        while self._hinted and self._outstanding < most:
            layer, slices = self._hinted[0]
            if not slices or not 0 < (layer - now) % layers <= layers // 2:
                self._hinted.popleft()  # done, or computed meanwhile
                continue
            # Slice by slice: demand waits for what is in flight.
            slice_id = slices.pop(0)
            c = self.pool.plan.class_of_tensor[self._tensor[slice_id]]
            if not self.pool.free[c]:
                self.pool.evict_ranked(c, 1)
            entry = self._entry_of_slice(slice_id)
            new = not self._engine.speculative[entry]
            if self.pool.free[c] and self._read_unasked(slice_id, c):
                self._hinted_experts += bool(new)
                started = True
        return started

    def _read_unasked(self, slice_id: int, c: int) -> bool:
        free = self.pool.free[c]
        slot = free.pop()
        self._run_slices[0], self._run_slots[0] = slice_id, slot
        if not lib.bm_preload(self._handle, self._run_slices, self._run_slots, 1, self._was_absent):
            free.append(slot)
            return False
        target = self.pool.targets[slot]
        assert target is not None
        self._queue.read_many((slot,), (self._place[slice_id],), (target,))
        self._count_in_flight(1)
        slot_bytes = self.pool.plan.classes[c].slot_bytes
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
        if self._unasked or self._hinted:
            self._pump_unasked()
        self._loop_ns += time.monotonic_ns() - t0

    def _record_done(self, slots: list[int]) -> None:
        assert self._read_records is not None
        for slot in slots:
            slice_id = int(self._engine.slot_slice[slot])
            entry = self._entry_of_slice(slice_id)
            slot_bytes = self.pool.plan.classes[self.pool.class_of_slot[slot]].slot_bytes
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
        self.pool.give(slot)
        if again:
            self._pending.append(slice_id)
        if not late:
            lib.bm_stop(self._handle, STOP_IO)
        elif self._pending:
            self._guarded(self._pump)
