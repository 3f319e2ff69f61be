"""Large anonymous mappings that reads land in: huge pages, never forked, touched off the loop.

Owns one private mapping and its lifetime. Must not know what is kept in it.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import threading
from typing import Final

from bmoe.io.errors import MemoryBudgetError

HUGE_PAGE_BYTES: Final = 2 << 20

# Missing from the mmap module: fault pages in for writing, without changing their content (Linux 5.14).
_MADV_POPULATE_WRITE: Final = 23
# Linux's number, which Python names only from 3.13 on: address space is not memory.
_MAP_NORESERVE: Final = 0x4000

_MAX_TOUCHING_THREADS: Final = 4
_MIN_TOUCH_BYTES: Final = 8 << 20

# A plain CDLL, so that the GIL is free while the kernel zeroes pages: gigabytes take seconds.
_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def view_address(view: memoryview) -> int:
    """The address of a writable view's first byte."""
    return ctypes.addressof(ctypes.c_char.from_buffer(view))


class AnonymousMemory:
    """One private anonymous mapping with huge pages, its base aligned to 2 MiB.

    No memory is used until `touch`. A child process does not get the mapping (`MADV_DONTFORK`): a fork
    would otherwise split the huge pages and copy what the kernel is writing to.

    Args:
        size_bytes: Length.

    Attributes:
        size_bytes: As given.
        address: Of the first byte.
        view: All of it. Slices of it may be handed out freely; see `close`.

    Raises:
        MemoryBudgetError: There is no address space, or the kernel will not commit so much.
    """

    def __init__(self, size_bytes: int) -> None:
        if size_bytes <= 0:
            raise ValueError(f"a mapping of {size_bytes} bytes")
        try:
            self._map = mmap.mmap(
                -1, size_bytes + HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
            )
        except (OSError, OverflowError, ValueError) as error:
            raise MemoryBudgetError(
                f"cannot reserve {size_bytes / 2**20:.0f} MiB of memory: {error}",
                hint="ask for less, or see ulimit -v and vm.overcommit_memory",
            ) from error
        for advice in (mmap.MADV_HUGEPAGE, mmap.MADV_DONTFORK):
            with contextlib.suppress(OSError):  # EINVAL: a kernel built without transparent huge pages
                self._map.madvise(advice)
        whole = memoryview(self._map)
        start = view_address(whole)
        skip_bytes = -start % HUGE_PAGE_BYTES
        self.size_bytes: Final = size_bytes
        self.address: Final = start + skip_bytes
        self._skip_bytes = skip_bytes
        self.view = whole[skip_bytes : skip_bytes + size_bytes]
        # Held while the kernel works on the mapping, so that `close` cannot pull it away.
        self._lock = threading.Lock()
        self._closed = False

    def touch(self, start_bytes: int, end_bytes: int) -> None:
        """Give `[start_bytes, end_bytes)` real memory. For worker threads: the GIL is released.

        Large stretches are shared out over a few threads: a virtual machine takes 1 to 2.3 s per GiB for
        memory it has never had before, half of that with two.

        Pages that have memory already keep their content only if the kernel is 5.14 or newer; older
        ones get zeros written.

        Raises:
            MemoryBudgetError: The kernel has no memory for it.
            ValueError: Closed meanwhile.
        """
        length_bytes = end_bytes - start_bytes
        if not 0 <= start_bytes < end_bytes <= self.size_bytes:
            raise ValueError(f"bytes [{start_bytes}, {end_bytes}) of a mapping of {self.size_bytes}")
        threads = min(_MAX_TOUCHING_THREADS, len(os.sched_getaffinity(0)), length_bytes // _MIN_TOUCH_BYTES)
        # In whole huge pages, so that two threads rarely fault in the same one.
        part_bytes = -(-length_bytes // max(threads, 1) // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
        failures: list[int] = []

        def touch_part(part_start: int) -> None:
            part_end = min(part_start + part_bytes, end_bytes)
            number = _populate(self.address + part_start, part_end - part_start)
            if number:
                failures.append(number)

        with self._lock:
            if self._closed:
                raise ValueError("the mapping is closed")
            first, *rest = range(start_bytes, end_bytes, part_bytes)
            helpers = [threading.Thread(target=touch_part, args=(part,)) for part in rest]
            for helper in helpers:
                helper.start()
            touch_part(first)
            for helper in helpers:
                helper.join()
        if failures:
            raise MemoryBudgetError(
                f"no memory for {length_bytes / 2**20:.0f} MiB more: {os.strerror(failures[0])}",
                hint="ask for a smaller cache",
            )

    def give_back(self, start_bytes: int, end_bytes: int) -> None:
        """Return the memory of `[start_bytes, end_bytes)`, whole pages, to the kernel; it reads as zeros.

        Nothing may be read into it any more, and it must not be registered.
        """
        with self._lock:
            if not self._closed and end_bytes > start_bytes:
                self._map.madvise(mmap.MADV_DONTNEED, self._skip_bytes + start_bytes, end_bytes - start_bytes)

    def close(self) -> None:
        """Give the memory back; idempotent.

        Views that others still hold stay valid and read as zeros: their pages go back to the kernel at
        once, and only the address range stays until the last of them is collected. (An `Iovec` of
        python-liburing 2026.3.30 never lets go of its view, so waiting for that would be waiting for
        ever.) No read into this memory may be in flight.
        """
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._map.madvise(mmap.MADV_DONTNEED)
            self.view = memoryview(b"")
            with contextlib.suppress(BufferError):
                self._map.close()


def _populate(address: int, length_bytes: int) -> int:
    """Fault in memory for writing, GIL released; 0, or the errno."""
    ahead_bytes = address % mmap.PAGESIZE  # madvise wants whole pages at the start, and rounds the end up
    while _libc.madvise(address - ahead_bytes, length_bytes + ahead_bytes, _MADV_POPULATE_WRITE):
        number = ctypes.get_errno()
        if number == errno.EINVAL:
            ctypes.memset(address, 0, length_bytes)
            return 0
        if number != errno.EINTR:
            return number
    return 0
