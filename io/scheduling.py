"""The event loop's place among busy threads.

Owns one system call. Must not know what the thread does.

While compute threads keep every CPU busy, a thread that wakes for a few microseconds waits until the
scheduler takes a CPU from one of them. Since Linux 6.12 a thread may ask for a shorter time slice
(sched_setattr(2), `sched_runtime` of an ordinary thread): it gets no more CPU time than before, but
gets it sooner. That needs no privilege.
"""

from __future__ import annotations

import ctypes
import os
import platform
from typing import Final

_SYSCALLS: Final = {"x86_64": (314, 315), "aarch64": (274, 275)}
_SHORTEST_SLICE_NS: Final = 100_000


class _SchedAttr(ctypes.Structure):
    _fields_ = (
        ("size", ctypes.c_uint32),
        ("policy", ctypes.c_uint32),
        ("flags", ctypes.c_uint64),
        ("nice", ctypes.c_int32),
        ("priority", ctypes.c_uint32),
        ("runtime", ctypes.c_uint64),
        ("deadline", ctypes.c_uint64),
        ("period", ctypes.c_uint64),
    )


def set_slice_ns(slice_ns: int = _SHORTEST_SLICE_NS) -> int | None:
    """Asks for time slices of this length for the calling thread.

    Returns:
        The slice before, to be given back later; None where the kernel or the policy does not know it.
    """
    numbers = _SYSCALLS.get(platform.machine())
    if numbers is None or os.sched_getscheduler(0) != os.SCHED_OTHER:
        return None
    libc = ctypes.CDLL(None, use_errno=True)
    attr = _SchedAttr()
    attr.size = ctypes.sizeof(attr)
    if libc.syscall(numbers[1], 0, ctypes.byref(attr), ctypes.sizeof(attr), 0):
        return None
    before: int = attr.runtime
    attr.runtime = slice_ns
    if before == 0 or libc.syscall(numbers[0], 0, ctypes.byref(attr), 0):
        return None
    return before
