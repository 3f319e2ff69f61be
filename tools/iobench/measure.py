"""One sample: the lanes of a row read for a while, and every read is timed.

Owns the timing. Must not know which rows there are, nor what the figures mean.

What lies inside the timing window: from the first wake-up with completions to the first at or after the
deadline. The reads of the first wake-up do not count, so neither does filling the queue; the reads still
in flight at the end do not count either. Opening files, memory, registration, and the tear-down lie
outside. A read's life:

    queued ── submission ──> handed over ── completion ──> seen by the event loop

Submission is the time in the backend's `read_many` and `submit` (for io_uring the system call, in which
the kernel issues the reads); completion ends in the loop's callback, so it includes the wake-up.
"""

from __future__ import annotations

import asyncio
import gc
import mmap
import resource
from dataclasses import dataclass
from time import perf_counter_ns
from typing import TYPE_CHECKING, Final, Literal

from bmoe.io import ReadQueue, SlotMemory, open_backend

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bmoe.io import DirectFile, ReadBackend, Target
    from bmoe.tools.iobench.burners import Burners
    from bmoe.tools.iobench.lanes import Walk

BackendName = Literal["uring", "threads"]

_CHUNK_BYTES: Final = 64 << 20
_LEAST_BYTES: Final = 16 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """What one run of a row's lanes gave.

    Attributes:
        window_ns: Length of the timing window.
        window_bytes: Bytes of the aligned windows that arrived in it.
        submission_ns: Of each of its reads.
        completion_ns: Of each of its reads, in the same order.
        cpu_user_ns: CPU time of this process in it, compute load taken off.
        cpu_system_ns: The same in the kernel.
        direct: All files were read past the page cache.
        registered: The buffers were registered with the kernel.
        unregistered_reason: Why they were not, although wanted.
        most_in_flight: Reads that the backend had at one time.
    """

    window_ns: int
    window_bytes: int
    submission_ns: list[int]
    completion_ns: list[int]
    cpu_user_ns: int
    cpu_system_ns: int
    direct: bool
    registered: bool
    unregistered_reason: str | None
    most_in_flight: int

    @property
    def bytes_per_s(self) -> float:
        """Bandwidth."""
        return self.window_bytes * 1e9 / max(self.window_ns, 1)


async def measure(
    files: Sequence[DirectFile],
    walk: Walk,
    *,
    backend: BackendName,
    lanes: int,
    seconds: float,
    burners: Burners,
    register: bool,
) -> Sample:
    """Read with `lanes` reads in flight for `seconds`.

    Args:
        files: By the index that `walk` gives.
        walk: What each lane reads.
        backend: What reads.
        lanes: Reads in flight.
        seconds: Length of the timing window, at least.
        burners: What runs beside it.
        register: Register the buffers with the kernel.

    Raises:
        ReadError: The file did not deliver.
        BackendError: The backend does not work here.
        MemoryBudgetError: No memory for the lanes' buffers.
    """
    reader = open_backend(backend, lanes)
    queue = ReadQueue(reader, max(file.block_bytes for file in files), lanes)
    size = slot_bytes(walk.max_window_bytes, files)
    # More slots than lanes where they are small: else they would not lie in huge pages, as the engine's do.
    with SlotMemory(size, max(lanes, _LEAST_BYTES // size), _CHUNK_BYTES) as memory:
        try:
            file_ids = [queue.add_file(file) for file in files]
            buffers = await open_buffers(reader, memory, register=register)
            run = _Run(
                files,
                file_ids,
                walk,
                lanes=lanes,
                queue=queue,
                memory=memory,
                buffers=buffers,
                burners=burners,
                length_ns=round(seconds * 1e9),
            )
            await run.run()
        finally:
            await queue.aclose()
    statistics = reader.statistics()
    return Sample(
        window_ns=run.ended_ns - run.started_ns,
        window_bytes=run.window_bytes,
        submission_ns=run.submission_ns,
        completion_ns=run.completion_ns,
        cpu_user_ns=run.cpu_ns[0],
        cpu_system_ns=run.cpu_ns[1],
        direct=all(file.direct for file in files),
        registered=register and reader.registered,
        unregistered_reason=reader.unregistered_reason if register else None,
        most_in_flight=statistics.max_in_flight,
    )


def slot_bytes(longest_bytes: int, files: Sequence[DirectFile]) -> int:
    """The size of slots for windows of up to `longest_bytes`: whole pages and whole blocks."""
    align = max(mmap.PAGESIZE, *(file.block_bytes for file in files))
    return -(-longest_bytes // align) * align


async def open_buffers(reader: ReadBackend, memory: SlotMemory, *, register: bool) -> list[int]:
    """The backend's buffer for each slot, all touched."""
    buffers: list[int] = []
    while (slots := await asyncio.to_thread(memory.populate_next_chunk)) is not None:
        chunk = slots.start // memory.chunk_slots
        buffers += [reader.add_buffer(memory.chunk_view(chunk), register=register)] * len(slots)
    return buffers


class _Run:
    """The lanes at work. A lane is a tag and a slot."""

    def __init__(
        self,
        files: Sequence[DirectFile],
        file_ids: Sequence[int],
        walk: Walk,
        *,
        lanes: int,
        queue: ReadQueue,
        memory: SlotMemory,
        buffers: Sequence[int],
        burners: Burners,
        length_ns: int,
    ) -> None:
        self.started_ns = self.ended_ns = 0
        self.window_bytes = 0
        self.submission_ns: list[int] = []
        self.completion_ns: list[int] = []
        self.cpu_ns = (0, 0)
        self._sizes = [file.size_bytes for file in files]
        self._file_ids = file_ids
        self._walk = walk
        self._queue = queue
        self._memory = memory
        self._buffers = buffers
        self._burners = burners
        self._length_ns = length_ns
        self._targets: list[dict[int, Target]] = [{} for _ in range(lanes)]  # by lane, then length
        self._handed_over_ns = [0] * lanes
        self._submission_ns = [0] * lanes
        self._need_bytes = [0] * lanes
        self._error: Exception | None = None
        self._drained = asyncio.Event()

    async def run(self) -> None:
        """Until the window is over and nothing is in flight."""
        self._queue.start(asyncio.get_running_loop(), self._on_done, self._on_error)
        gc.collect()
        self._read(list(range(len(self._targets))))
        await self._drained.wait()
        if self._error is not None:
            raise self._error

    def _read(self, lanes: list[int]) -> None:
        """The next read of each of these lanes, handed over at once."""
        places, targets, need_bytes = [], [], self._need_bytes
        for lane in lanes:
            file_index, offset, length = self._walk.next(lane)
            need = min(length, self._sizes[file_index] - offset)
            need_bytes[lane] = need
            places.append((self._file_ids[file_index], offset, need))
            targets.append(self._targets[lane].get(length) or self._target(lane, length))
        queued = perf_counter_ns()
        self._queue.read_many(lanes, places, targets)
        self._queue.submit()
        handed_over = perf_counter_ns()
        took = handed_over - queued
        for lane in lanes:
            self._handed_over_ns[lane] = handed_over
            self._submission_ns[lane] = took

    def _target(self, lane: int, length: int) -> Target:
        view = self._memory.slot_view(lane)[:length]
        target = self._queue.backend.prepare(self._buffers[lane], view)
        self._targets[lane][length] = target
        return target

    def _on_done(self, lanes: list[int]) -> None:
        now = perf_counter_ns()
        if self.ended_ns or self._error is not None:
            self._see_whether_drained()
            return
        if not self.started_ns:
            self.started_ns = now
            self._cpu_at_start = self._cpu()
        else:
            for lane in lanes:
                self.window_bytes += self._need_bytes[lane]
                self.submission_ns.append(self._submission_ns[lane])
                self.completion_ns.append(now - self._handed_over_ns[lane])
            if now - self.started_ns >= self._length_ns:
                self.ended_ns = now
                user, system = self._cpu()
                self.cpu_ns = (max(0, user - self._cpu_at_start[0]), system - self._cpu_at_start[1])
                self._see_whether_drained()
                return
        try:
            self._read(lanes)
        except Exception as bug:  # noqa: BLE001 (raised by `run`: an event loop would only log it)
            self._on_error(lanes[0], bug)

    def _on_error(self, lane: int, error: Exception) -> None:  # noqa: ARG002 (the error says where)
        self._error = self._error or error
        self._see_whether_drained()

    def _see_whether_drained(self) -> None:
        if not self._queue.in_flight:
            self._drained.set()

    def _cpu(self) -> tuple[int, int]:
        """(user, system) of the process so far, without the compute load."""
        usage = resource.getrusage(resource.RUSAGE_SELF)
        return round(usage.ru_utime * 1e9) - self._burners.cpu_ns(), round(usage.ru_stime * 1e9)
