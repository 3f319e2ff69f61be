"""How much of a file is in the page cache, getting it out of there, and how fast memory is.

Owns what it takes to tell a drive from memory. Must not know what is measured.

The kernel tells only who may write a file (or owns it) what of it is cached: to everybody else
cachestat(2) answers EPERM, and mincore(2) that all of it is. Nothing is believed then, and the figure is
None.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import time
from typing import Final

_SYS_CACHESTAT: Final = 451  # Linux 6.5; the same on every architecture
_PROBE_BYTES: Final = 32 << 20
_PROBES: Final = 4

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)


class _Range(ctypes.Structure):
    _fields_ = (("offset", ctypes.c_uint64), ("length", ctypes.c_uint64))


class _CacheStat(ctypes.Structure):
    _fields_ = (
        ("cached", ctypes.c_uint64),
        ("dirty", ctypes.c_uint64),
        ("writeback", ctypes.c_uint64),
        ("evicted", ctypes.c_uint64),
        ("recently_evicted", ctypes.c_uint64),
    )


def cached_fraction(fd: int, size_bytes: int) -> float | None:
    """The part of a file's pages that are in the page cache; None when the kernel does not tell us.

    Args:
        fd: The file, open for reading.
        size_bytes: Its size.
    """
    pages = -(-size_bytes // mmap.PAGESIZE)
    cached = _cachestat(fd)
    if cached is None:
        cached = _mincore(fd, size_bytes, pages)
    return None if cached is None else min(1.0, cached / pages)


def drop(fd: int) -> None:
    """Take what can be taken of a file out of the page cache: all but what somebody has mapped and uses."""
    with contextlib.suppress(OSError):  # dirty pages stay, so they are written first
        os.fsync(fd)
    with contextlib.suppress(OSError):
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)


def memory_bytes_per_s() -> float:
    """How fast one thread copies memory: the speed of a page cache. The best of a few tries."""
    # bytearrays filled with something: untouched memory is one shared page of zeros, which is never read.
    source, target = bytearray(b"bmoe" * (_PROBE_BYTES // 4)), bytearray(b"read" * (_PROBE_BYTES // 4))
    best_ns = 0
    for _ in range(_PROBES):
        started_ns = time.perf_counter_ns()
        memoryview(target)[:] = source
        took_ns = time.perf_counter_ns() - started_ns
        best_ns = min(best_ns or took_ns, took_ns)
    return _PROBE_BYTES * 1e9 / max(best_ns, 1)


def _cachestat(fd: int) -> int | None:
    answer = _CacheStat()
    if _libc.syscall(_SYS_CACHESTAT, fd, ctypes.byref(_Range(0, 0)), ctypes.byref(answer), 0):
        return None
    return int(answer.cached)


def _mincore(fd: int, size_bytes: int, pages: int) -> int | None:
    if os.fstat(fd).st_uid != os.geteuid() and not os.access(f"/proc/self/fd/{fd}", os.W_OK):
        return None
    address = _libc.mmap(None, size_bytes, mmap.PROT_READ, mmap.MAP_SHARED, fd, 0)
    if address == ctypes.c_void_p(-1).value:
        return None
    try:
        answer = (ctypes.c_uint8 * pages)()
        if _libc.mincore(address, size_bytes, ctypes.byref(answer)):
            return None
    finally:
        _libc.munmap(address, size_bytes)
    return sum(byte & 1 for byte in bytes(answer))
