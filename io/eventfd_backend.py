"""What the backends have in common: tables, the queue behind the queue depth, wake-ups, closing.

Owns the bookkeeping of reads from acceptance to completion. Must not know how a read is made: that is
what a subclass adds.
"""

from __future__ import annotations

import asyncio
import errno
import os
import select
from abc import ABC, abstractmethod
from collections import deque
from time import perf_counter_ns
from typing import TYPE_CHECKING, Final

from bmoe.io.anonymous_memory import view_address
from bmoe.io.backend import BackendStatistics, Target

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bmoe.io.backend import OnComplete, Place
    from bmoe.io.files import DirectFile

# How long a close that has no event loop sleeps between two looks, should a wake-up be missed.
_LOOK_AGAIN_S: Final = 0.01


class EventfdBackend(ABC):
    """A `ReadBackend` whose completions ring an eventfd. The protocol says what each method promises."""

    name: str

    def __init__(self, queue_depth: int) -> None:
        if queue_depth <= 0:
            raise ValueError(f"queue_depth is {queue_depth}, expected at least 1")
        self.queue_depth: Final = queue_depth
        self.unregistered_reason: str | None = None
        self.fallback_reason: str | None = None
        self._eventfd: Final = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._on_complete: OnComplete | None = None
        self._files: list[DirectFile] = []
        self._buffers: list[memoryview] = []
        # A target lives at least until its read was reaped, whatever its owner does.
        self._targets: dict[int, Target] = {}  # by tag: all reads accepted and not completed
        self._waiting: deque[tuple[int, Place, Target]] = deque()  # beyond the queue depth
        self._room = queue_depth  # reads that may still be put
        self._queued = 0  # reads put and not handed over
        self._drained = asyncio.Event()
        self._closing = False
        self._closed = False
        self._reads = self._read_bytes = self._submissions = self._completions = 0
        self._errors = self._wake_ups = self._max_in_flight = self._submit_ns = 0

    @property
    def registered(self) -> bool:
        """True iff every buffer added for registration so far is registered with the kernel."""
        return self.unregistered_reason is None

    @property
    def in_flight(self) -> int:
        """Reads accepted whose completion has not been delivered."""
        return len(self._targets)

    def start(self, loop: asyncio.AbstractEventLoop, on_complete: OnComplete) -> None:
        """Deliver completions on `loop`."""
        if self._closing:
            raise RuntimeError("the backend is closed")
        if self._targets:
            raise RuntimeError(f"{len(self._targets)} reads of another consumer are in flight")
        if loop is not self._loop:
            self._leave_loop()
            loop.add_reader(self._eventfd, self._reap)
            self._loop = loop
        self._on_complete = on_complete

    def add_file(self, file: DirectFile) -> int:
        """The id of `file` for `read`; the same one when it was added before."""
        if file in self._files:
            return self._files.index(file)
        self._files.append(file)
        return len(self._files) - 1

    def file(self, file_id: int) -> DirectFile:
        """The file behind an id."""
        return self._files[file_id]

    def add_buffer(self, view: memoryview, *, register: bool = True) -> int:
        """The id of a stretch of memory for `prepare`."""
        if self._closing:
            raise RuntimeError("the backend is closed")
        buffer_id = len(self._buffers)
        self._buffers.append(view)
        self._add_buffer(buffer_id, view, register)
        return buffer_id

    def remove_buffer(self, buffer_id: int) -> None:
        """Let a stretch of memory go. No read into it may be in flight, and its targets are void."""
        self._buffers[buffer_id] = memoryview(b"")
        self._remove_buffer(buffer_id)

    def prepare(self, buffer_id: int, view: memoryview) -> Target:
        """A target for `view`, which lies inside that buffer."""
        buffer = self._buffers[buffer_id]
        start_bytes = view_address(view) - view_address(buffer)
        if not 0 <= start_bytes <= start_bytes + view.nbytes <= buffer.nbytes:
            raise ValueError(f"the view does not lie in buffer {buffer_id}")
        return self._make_target(buffer_id, view)

    def read(self, file_id: int, offset_bytes: int, target: Target, tag: int) -> None:
        """Queue a read that fills `target.view` from `offset_bytes` on."""
        self.read_many((tag,), ((file_id, offset_bytes, 0),), (target,))

    def read_many(self, tags: Sequence[int], places: Sequence[Place], targets: Sequence[Target]) -> None:
        """Queue several reads, index by index."""
        if self._on_complete is None or self._closing:
            raise RuntimeError("the backend is closed" if self._closing else "the backend is not started")
        accepted = self._targets
        for tag, target in zip(tags, targets, strict=True):
            if tag in accepted:
                raise RuntimeError(f"tag {tag} is in flight already")
            accepted[tag] = target
        count = len(tags)
        self._reads += count
        # First come, first served: nothing overtakes what waits.
        now = 0 if self._waiting else min(count, self._room)
        if now:
            self._room -= now
            self._queued += now
            self._put_many(tags[:now], places[:now], targets[:now])
        if now < count:
            self._waiting.extend(zip(tags[now:], places[now:], targets[now:], strict=True))

    def submit(self) -> None:
        """Hand over all that is queued, as far as the queue depth allows."""
        if self._queued:
            started_ns = perf_counter_ns()
            self._hand_over()
            self._submit_ns += perf_counter_ns() - started_ns
            under_way = self.queue_depth - self._room - self._queued
            self._max_in_flight = max(under_way, self._max_in_flight)

    async def aclose(self) -> None:
        """Stop: reads beyond the queue depth complete with -ECANCELED, the others are waited for."""
        self._closing = True
        if self._closed:
            return
        self._cancel_waiting()
        self.submit()
        here = self._loop is asyncio.get_running_loop()
        while self._targets:
            if here:
                self._drained.clear()
                await self._drained.wait()
            else:  # our loop is gone: nobody else reaps
                select.select([self._eventfd], [], [], _LOOK_AGAIN_S)
                self._reap()
                self.submit()
        if not self._closed:  # else another aclose was faster
            self._closed = True
            self._leave_loop()
            self._tear_down()
            os.close(self._eventfd)
            self._buffers.clear()

    def statistics(self) -> BackendStatistics:
        """Counts so far."""
        return BackendStatistics(
            reads=self._reads,
            read_bytes=self._read_bytes,
            submissions=self._submissions,
            completions=self._completions,
            errors=self._errors,
            wake_ups=self._wake_ups,
            max_in_flight=self._max_in_flight,
            submit_ns=self._submit_ns,
        )

    @abstractmethod
    def _put_many(self, tags: Sequence[int], places: Sequence[Place], targets: Sequence[Target]) -> None:
        """Queue reads for the next `_hand_over`; there is room."""

    @abstractmethod
    def _hand_over(self) -> None:
        """Start what was put: counts `_queued` down, and `_submissions` up."""

    @abstractmethod
    def _collect(self, tags: list[int], results: list[int]) -> None:
        """Append every completion that is there."""

    def _add_buffer(self, buffer_id: int, view: memoryview, register: bool) -> None:  # noqa: B027 (optional)
        """Make a buffer known where it has to be."""

    def _remove_buffer(self, buffer_id: int) -> None:  # noqa: B027 (optional)
        """Undo `_add_buffer`."""

    def _make_target(self, buffer_id: int, view: memoryview) -> Target:
        return Target(buffer_id, view)

    def _tear_down(self) -> None:  # noqa: B027 (optional)
        """End what was started; nothing is in flight."""

    def _reap(self) -> None:
        """The eventfd is readable: take every completion there is, refill, then tell the consumer."""
        try:
            # Cleared before looking, so that what completes from now on rings again.
            os.eventfd_read(self._eventfd)
        except BlockingIOError:
            return
        tags: list[int] = []
        results: list[int] = []
        self._collect(tags, results)
        if not tags:
            return
        targets = self._targets
        for tag in tags:
            del targets[tag]
        for result in results:
            if result < 0:
                self._errors += 1
            else:
                self._read_bytes += result
        self._room += len(tags)
        self._completions += len(tags)
        self._wake_ups += 1
        if self._waiting:
            self._refill()
        if not targets:
            self._drained.set()
        assert self._on_complete is not None
        self._on_complete(tags, results)

    def _refill(self) -> None:
        count = min(len(self._waiting), self._room)
        next_ones = [self._waiting.popleft() for _ in range(count)]
        self._room -= count
        self._queued += count
        self._put_many(
            [tag for tag, _, _ in next_ones],
            [place for _, place, _ in next_ones],
            [target for _, _, target in next_ones],
        )
        self.submit()

    def _cancel_waiting(self) -> None:
        tags = [entry[0] for entry in self._waiting]
        self._waiting.clear()
        for tag in tags:
            del self._targets[tag]
        self._completions += len(tags)
        self._errors += len(tags)
        if tags and self._on_complete is not None:
            self._on_complete(tags, [-errno.ECANCELED] * len(tags))

    def _leave_loop(self) -> None:
        if self._loop is not None and not self._loop.is_closed():
            self._loop.remove_reader(self._eventfd)
