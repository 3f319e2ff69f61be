"""Reads by a pool of threads in preadv: for kernels and containers without io_uring.

Owns its threads. Must not know what a short read means, nor why io_uring was not used.
"""

from __future__ import annotations

import errno
import os
import threading
from collections import deque
from queue import SimpleQueue
from typing import TYPE_CHECKING, Final

from bmoe.io.eventfd_backend import EventfdBackend

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bmoe.io.backend import Place, Target

# More do not make a drive faster at the sizes read here, and each costs a wake-up and the GIL.
MAX_THREADS: Final = 16

_Job = tuple[int, int, memoryview, int]  # fd, offset_bytes, view, tag


class ThreadsBackend(EventfdBackend):
    """`ReadBackend` over plain threads.

    Args:
        queue_depth: The most reads handed to the pool at one time; it has as many threads, up to 16.
    """

    name: Final = "threads"

    def __init__(self, queue_depth: int) -> None:
        super().__init__(queue_depth)
        self.unregistered_reason = "the threads backend has no registered buffers"
        self._put_jobs: list[_Job] = []
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._finished: deque[tuple[int, int]] = deque()  # (tag, result), from the threads
        self._threads = [
            threading.Thread(target=self._work, name=f"bmoe-read-{index}", daemon=True)
            for index in range(min(queue_depth, MAX_THREADS))
        ]
        for thread in self._threads:
            thread.start()

    def _put_many(self, tags: Sequence[int], places: Sequence[Place], targets: Sequence[Target]) -> None:
        for tag, (file_id, offset_bytes, _), target in zip(tags, places, targets, strict=True):
            self._put_jobs.append((self._files[file_id].fd, offset_bytes, target.view, tag))

    def _hand_over(self) -> None:
        for job in self._put_jobs:
            self._jobs.put(job)
        self._put_jobs.clear()
        self._queued = 0
        self._submissions += 1

    def _collect(self, tags: list[int], results: list[int]) -> None:
        while self._finished:
            tag, result = self._finished.popleft()
            tags.append(tag)
            results.append(result)

    def _tear_down(self) -> None:
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            thread.join()  # at once: all are idle

    def _work(self) -> None:
        """A thread's life. The GIL is free while the kernel reads."""
        while (job := self._jobs.get()) is not None:
            fd, offset_bytes, view, tag = job
            try:
                result = os.preadv(fd, [view], offset_bytes)
            except OSError as error:
                result = -(error.errno or errno.EIO)
            del job, view  # a thread that waits must not keep memory alive
            self._finished.append((tag, result))
            os.eventfd_write(self._eventfd, 1)
