"""Reads through io_uring, by way of python-liburing.

Owns the ring, its eventfd, the buffer table in the kernel, and the lifetime of all that the kernel looks
at. Must not know what a short read means, nor who else could do the reading.

What had to be found out about python-liburing 2026.3.30 (from its source and by experiment) and Linux:

- `cqe[k]` is plain pointer arithmetic from the entry that was peeked: it runs off the end of the
  completion ring when the entries ready wrap around. `CqeIter` masks its index; only that is used here.
- `cqe.res` raises `OSError(-res)` for a negative result; `errno` is right.
- `io_uring_get_sqe` answers None when the ring is full. The room is counted here, so that cannot be.
- The `tags` argument of `io_uring_register_buffers_update_tag` accepts no Python object at all, and every
  registration holds the GIL. The system call is therefore made by ctypes, which lets go of it.
- An `Iovec` keeps no reference to its list and never releases the buffer of a memoryview it was made
  from: about 190 bytes and the whole mapping behind it stay for the life of the process. So one is made
  per target, none per read, and mappings give their pages back without being unmapped.
- Nothing else leaks: 400,000 reads and as many completions leave the resident set where it was.
- CPU per 1 MiB direct read, everything counted, medians at 8 and at 32 in flight: 11 and 7 us into
  registered huge pages, 14 and 9 us into huge pages unregistered, 17 and 13 us into registered small
  pages, 39 and 33 us into small pages unregistered. Python's part is about 1 us.
- Set-up flags: COOP_TASKRUN, SINGLE_ISSUER, registered files and pre-made entries all lie within the
  noise of none, for 1 MiB reads in eights and for 4 KiB reads one by one (55 us each). DEFER_TASKRUN
  saves 3.5 us of latency per wake-up, and costs a second, empty wake-up and a ring bound to one thread;
  it is not used.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
from typing import TYPE_CHECKING, Any, Final

import liburing  # type: ignore[import-untyped]  # it has stubs, wrong ones, and no py.typed
from liburing import (
    Cqe,
    CqeIter,
    Iovec,
    Ring,
    io_uring_cq_advance,
    io_uring_get_sqe,
    io_uring_prep_readv,
    io_uring_prep_readv_fixed,
    io_uring_submit,
)

from bmoe.io.anonymous_memory import view_address
from bmoe.io.backend import Target
from bmoe.io.errors import BackendError
from bmoe.io.eventfd_backend import EventfdBackend

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bmoe.io.backend import Place
    from bmoe.io.files import DirectFile

MAX_QUEUE_DEPTH: Final = 4096

# Slots in the kernel's buffer table: its own maximum (IORING_MAX_REG_BUFFERS), 8 bytes each.
_TABLE_SLOTS: Final = 1 << 14
_SYS_IO_URING_REGISTER: Final = 427  # the same on every architecture that llama.cpp runs on
_IORING_REGISTER_BUFFERS_UPDATE: Final = 16
_RETRY_SUBMIT_S: Final = 0.001

_libc = ctypes.CDLL(None, use_errno=True)


class _KernelIovec(ctypes.Structure):
    _fields_ = (("base", ctypes.c_uint64), ("length", ctypes.c_uint64))


class _RsrcUpdate2(ctypes.Structure):
    """`struct io_uring_rsrc_update2`."""

    _fields_ = (
        ("offset", ctypes.c_uint32),
        ("resv", ctypes.c_uint32),
        ("data", ctypes.c_uint64),
        ("tags", ctypes.c_uint64),
        ("nr", ctypes.c_uint32),
        ("resv2", ctypes.c_uint32),
    )


class _UringTarget(Target):
    """Adds the iovec, which the kernel reads at submission, and the slot in its buffer table (or -1)."""

    __slots__ = ("iovec", "table_slot")

    def __init__(self, buffer_id: int, view: memoryview, table_slot: int) -> None:
        super().__init__(buffer_id, view)
        self.iovec: Any = Iovec([view])
        self.table_slot = table_slot


class UringBackend(EventfdBackend):
    """`ReadBackend` over one io_uring.

    Args:
        queue_depth: The most reads in the kernel at one time.

    Raises:
        BackendError: The kernel has no io_uring for us; says why and what helps.
    """

    name: Final = "uring"

    def __init__(self, queue_depth: int) -> None:
        if not 0 < queue_depth <= MAX_QUEUE_DEPTH:
            raise ValueError(f"queue_depth is {queue_depth}, expected 1 to {MAX_QUEUE_DEPTH}")
        super().__init__(queue_depth)
        try:
            self._ring, self._cannot_register = _working_ring(queue_depth, self._eventfd)
        except BaseException:
            os.close(self._eventfd)
            raise
        self._cqe: Any = Cqe()
        self._fds: list[int] = []
        self._table_slots: list[int] = []  # by buffer id; -1 where unregistered
        self._table_used = 0
        self._table_free: list[int] = []  # below `_table_used`, and empty again
        self.unregistered_reason = self._cannot_register

    def add_file(self, file: DirectFile) -> int:
        """The id of `file` for `read`; the same one when it was added before."""
        file_id = super().add_file(file)
        if file_id == len(self._fds):
            self._fds.append(file.fd)
        return file_id

    def _put_many(self, tags: Sequence[int], places: Sequence[Place], targets: Sequence[Target]) -> None:
        ring, fds = self._ring, self._fds
        for tag, (file_id, offset_bytes, _), target in zip(tags, places, targets, strict=True):
            sqe = io_uring_get_sqe(ring)
            slot = target.table_slot  # type: ignore[attr-defined]  # made by our prepare: an _UringTarget
            if slot < 0:
                io_uring_prep_readv(sqe, fds[file_id], target.iovec, offset_bytes)  # type: ignore[attr-defined]  # as above
            else:
                io_uring_prep_readv_fixed(sqe, fds[file_id], target.iovec, slot, offset_bytes)  # type: ignore[attr-defined]  # as above
            sqe.user_data = tag

    def _hand_over(self) -> None:
        try:
            # Fewer than all are taken only after an entry that the kernel finds invalid.
            while self._queued:
                self._submissions += 1
                self._queued -= io_uring_submit(self._ring)
        except OSError as error:
            if error.errno not in {errno.EAGAIN, errno.EBUSY, errno.EINTR}:
                raise
            # The kernel is short of memory for requests.
            assert self._loop is not None
            self._loop.call_later(_RETRY_SUBMIT_S, self._hand_over_again)

    def _hand_over_again(self) -> None:
        if not self._closed:
            self.submit()

    def _collect(self, tags: list[int], results: list[int]) -> None:
        cqe = self._cqe
        for _ in CqeIter(self._ring, cqe):
            entry = cqe[0]
            tags.append(entry.user_data)
            try:
                results.append(entry.res)
            except OSError as error:
                results.append(-(error.errno or errno.EIO))
        io_uring_cq_advance(self._ring, len(tags))

    def _add_buffer(self, buffer_id: int, view: memoryview, register: bool) -> None:
        del buffer_id
        self._table_slots.append(self._register(view) if register else -1)

    def _remove_buffer(self, buffer_id: int) -> None:
        slot = self._table_slots[buffer_id]
        if slot >= 0:
            self._table_slots[buffer_id] = -1
            if _register_buffer(self._ring, slot, None) == 0:  # else it stays pinned until the ring's end
                self._table_free.append(slot)

    def _make_target(self, buffer_id: int, view: memoryview) -> Target:
        return _UringTarget(buffer_id, view, self._table_slots[buffer_id])

    def _tear_down(self) -> None:
        if self._table_used:
            # Unpins the pages now; the end of the ring does it some time later.
            liburing.io_uring_unregister_buffers(self._ring)
        liburing.io_uring_queue_exit(self._ring)

    def _register(self, view: memoryview) -> int:
        """Put a buffer in the kernel's table: its slot, or -1 and a reason kept."""
        if self._cannot_register is not None:
            return -1
        slot = self._table_free.pop() if self._table_free else self._table_used
        if slot == _TABLE_SLOTS:
            self.unregistered_reason = f"the kernel's table holds {_TABLE_SLOTS} buffers"
            return -1
        number = _register_buffer(self._ring, slot, view)
        if number:
            self.unregistered_reason = _why_unregistered(number, view.nbytes)
            if slot < self._table_used:
                self._table_free.append(slot)
            return -1
        self._table_used = max(self._table_used, slot + 1)
        return slot


def _working_ring(queue_depth: int, eventfd: int) -> tuple[Any, str | None]:
    """A ring that rings `eventfd`, and why it cannot use registered buffers, if it cannot."""
    ring = _new_ring(queue_depth)
    try:
        # Before the eventfd is known to the ring: the trial must not ring it.
        cannot_register = _why_not_readv_fixed(ring)
        liburing.io_uring_register_eventfd(ring, eventfd)
    except OSError as error:
        liburing.io_uring_queue_exit(ring)
        raise BackendError(
            f"io_uring cannot be used: its ring does not work: {error.strerror}",
            hint="--io-backend threads works everywhere",
        ) from error
    return ring, cannot_register


def _new_ring(queue_depth: int) -> Any:
    """A ring with room for `queue_depth` reads, or a BackendError with cause and cure."""
    ring = Ring()
    try:
        try:
            # One invalid entry must not hold back those behind it (Linux 5.18).
            liburing.io_uring_queue_init(queue_depth, ring, liburing.IORING_SETUP_SUBMIT_ALL)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            liburing.io_uring_queue_init(queue_depth, ring, 0)
    except OSError as error:
        cause, cure = _why_no_ring(error)
        raise BackendError(f"io_uring cannot be used: {cause}", hint=cure) from error
    return ring


def _why_no_ring(error: OSError) -> tuple[str, str]:
    if error.errno == errno.ENOSYS:
        return "this kernel has none", "Linux 5.10 or newer has it; --io-backend threads works everywhere"
    if error.errno in {errno.EPERM, errno.EACCES}:
        if _io_uring_disabled() not in {"", "0"}:
            return (
                f"the sysctl kernel.io_uring_disabled is {_io_uring_disabled()}",
                "as root: sysctl kernel.io_uring_disabled=0",
            )
        return (
            "io_uring_setup is not permitted",
            "a container's seccomp profile denies it: with docker, --security-opt seccomp=unconfined",
        )
    if error.errno == errno.ENOMEM:
        return "no (locked) memory for the rings", "raise ulimit -l, or ask for a smaller queue depth"
    if error.errno in {errno.EMFILE, errno.ENFILE}:
        return "no file descriptor is left", "raise ulimit -n"
    return str(error.strerror), "--io-backend threads works everywhere"


def _io_uring_disabled() -> str:
    try:
        with open("/proc/sys/kernel/io_uring_disabled", encoding="ascii") as setting:
            text: str = setting.read()
    except OSError:
        return ""
    return text.strip()


def _why_not_readv_fixed(ring: Any) -> str | None:
    """Try a real READV_FIXED into slot 0 of a new sparse table; None when the bytes arrived.

    The operation is Linux 6.15's; nothing but trying tells whether it works (the table is 5.19's, and
    some containers filter io_uring_register alone).
    """
    try:
        liburing.io_uring_register_buffers_sparse(ring, _TABLE_SLOTS)
    except OSError as error:
        return f"the kernel gives no buffer table: {error.strerror}"
    wanted = b"bmoe" * 1024
    got = bytearray(len(wanted))
    fd = os.memfd_create("bmoe-probe")
    try:
        os.pwrite(fd, wanted, 0)
        number = _register_buffer(ring, 0, memoryview(got))
        if number:
            return _why_unregistered(number, len(got))
        iovec = Iovec([got])
        sqe = io_uring_get_sqe(ring)
        io_uring_prep_readv_fixed(sqe, fd, iovec, 0, 0)
        liburing.io_uring_submit(ring)
        cqe = Cqe()
        while not liburing.io_uring_cq_ready(ring):  # a signal may end the wait
            with contextlib.suppress(InterruptedError):
                liburing.io_uring_wait_cqe(ring, cqe)
        try:
            liburing.io_uring_peek_cqe(ring, cqe)
            cqe[0].res  # noqa: B018 (raises when negative)
        except OSError as error:
            return f"READV_FIXED does not work here: {error.strerror} (it needs Linux 6.15)"
        finally:
            io_uring_cq_advance(ring, 1)
    finally:
        os.close(fd)
    return None if got == wanted else "READV_FIXED delivered wrong bytes"


def _register_buffer(ring: Any, slot: int, view: memoryview | None) -> int:
    """Fill (or refill) a slot of the buffer table, or empty it. 0, or the errno. Releases the GIL."""
    iovec = _KernelIovec(view_address(view), view.nbytes) if view is not None else _KernelIovec()
    update = _RsrcUpdate2(offset=slot, data=ctypes.addressof(iovec), nr=1)
    done = _libc.syscall(
        _SYS_IO_URING_REGISTER,
        ring.ring_fd,
        _IORING_REGISTER_BUFFERS_UPDATE,
        ctypes.byref(update),
        ctypes.sizeof(update),
    )
    return 0 if done == 1 else ctypes.get_errno() or errno.EIO


def _why_unregistered(number: int, size_bytes: int) -> str:
    what = f"registering a buffer of {size_bytes / 2**20:.4g} MiB failed"
    if number in {errno.ENOMEM, errno.EPERM}:
        return f"{what}: {os.strerror(number)}; RLIMIT_MEMLOCK is too small (ulimit -l)"
    return f"{what}: {os.strerror(number)}"
