"""Busy threads beside the reads, as compute threads are.

Owns the threads and their CPU time. Must not know what is measured beside them.

Each hashes 4 MiB over and over with SHA-256: OpenSSL's native loop with the GIL released, some
milliseconds at a time. So they take CPUs and part of the cache from the event loop, and, like
llama.cpp's threads, hardly ever its interpreter lock.
"""

from __future__ import annotations

import hashlib
import threading
import time
from typing import TYPE_CHECKING, Final, Self

if TYPE_CHECKING:
    from types import TracebackType

_BUFFER_BYTES: Final = 4 << 20


class Burners:
    """A context manager: `count` threads are busy inside the block.

    Args:
        count: How many; 0 for none.
    """

    def __init__(self, count: int) -> None:
        self._stop = False
        self._clocks: list[int] = []
        self._threads = [threading.Thread(target=self._burn, daemon=True) for _ in range(count)]

    def cpu_ns(self) -> int:
        """CPU time they have taken so far; all of it is user time but for rounding."""
        return sum(time.clock_gettime_ns(clock) for clock in self._clocks)

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
            assert thread.ident is not None
            self._clocks.append(time.pthread_getcpuclockid(thread.ident))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._clocks.clear()
        self._stop = True
        for thread in self._threads:
            thread.join()

    def _burn(self) -> None:
        buffer = bytes(_BUFFER_BYTES)
        while not self._stop:
            hashlib.sha256(buffer)
