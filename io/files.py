"""Files opened for direct reads: what kind of file it is, what alignment it asks for, whether it works.

Owns the descriptor, the probe at open and the check that the file is still the one that was opened.
Must not know what the bytes mean, nor who reads them.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import stat
import struct
from typing import TYPE_CHECKING, Final, Self

from bmoe.io.errors import FileError, ReadError

if TYPE_CHECKING:
    from types import TracebackType

BUFFERED_BLOCK_BYTES: Final = 4096
_PROBE_BLOCKS_BYTES: Final = (512, 1024, 2048, 4096, 8192, 16384, 32768, 65536)

# O_NONBLOCK: a FIFO that takes the path's place after the check must not hang us.
_OPEN_FLAGS: Final = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK

# statx(2): the mask bit and where its two u32 answers lie in the 256-byte struct.
_AT_EMPTY_PATH: Final = 0x1000
_STATX_DIOALIGN: Final = 0x2000
_STATX_BYTES: Final = 256
_STX_DIO_ALIGN_AT: Final = 152  # stx_dio_mem_align, stx_dio_offset_align

_KINDS: Final = (
    (stat.S_ISDIR, "a directory"),
    (stat.S_ISFIFO, "a FIFO"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a character device"),
    (stat.S_ISBLK, "a block device"),
)


class DirectFile:
    """A regular file open for reading, with `O_DIRECT` where that was seen to work.

    Made by `open`. A context manager.

    Attributes:
        path: As given to `open`.
        fd: The descriptor that reads must use.
        size_bytes: At open.
        direct: Whether `fd` bypasses the page cache.
        fallback_reason: Why it does not although that was asked for; else None.
        block_bytes: What offsets and lengths of reads must be multiples of. Never less than
            `memory_align_bytes`, so a block boundary inside an aligned buffer is a fit destination.
        memory_align_bytes: What destination addresses must be multiples of.
    """

    def __init__(
        self,
        *,
        path: str,
        fd: int,
        status: os.stat_result,
        direct: bool,
        fallback_reason: str | None,
        block_bytes: int,
        memory_align_bytes: int,
    ) -> None:
        self.path: Final = path
        self.fd: Final = fd
        self.size_bytes: Final = status.st_size
        self.direct: Final = direct
        self.fallback_reason: Final = fallback_reason
        self.block_bytes: Final = block_bytes
        self.memory_align_bytes: Final = memory_align_bytes
        self._status = status
        self._closed = False

    @classmethod
    def open(cls, path: str, *, direct: bool = True) -> Self:
        """Open `path` and find out by reading how it can be read.

        Args:
            path: A regular file, or a symbolic link to one.
            direct: False to read through the page cache.

        Raises:
            FileError: It is missing, empty, not a regular file, or not readable.
        """
        fd, status = _open_regular(path)
        found: tuple[int, int, int] | str | None = None
        try:
            if direct:
                found = _open_direct(path, fd, status)
            if not isinstance(found, tuple):
                # Readahead beyond what was asked for would only compete with the next reads.
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
        except BaseException:
            os.close(fd)
            raise
        if isinstance(found, tuple):
            os.close(fd)
            fd, block_bytes, memory_align_bytes = found
            reason = None
        else:
            block_bytes = memory_align_bytes = BUFFERED_BLOCK_BYTES
            reason = found
        return cls(
            path=path,
            fd=fd,
            status=status,
            direct=isinstance(found, tuple),
            fallback_reason=reason,
            block_bytes=block_bytes,
            memory_align_bytes=memory_align_bytes,
        )

    def check_unchanged(self) -> None:
        """Raise unless the path still leads to the file that was opened, unmodified.

        Raises:
            ReadError: It was truncated, modified, replaced or removed.
        """
        now = os.fstat(self.fd)
        if now.st_size != self.size_bytes:
            verb = "was truncated" if now.st_size < self.size_bytes else "grew"
            raise ReadError(
                f"{verb} after it was opened",
                path=self.path,
                expected=f"{self.size_bytes} bytes",
                got=now.st_size,
            )
        try:
            there = os.stat(self.path)
        except OSError as error:
            raise ReadError(
                "is gone from its path since it was opened", path=self.path, got=error.strerror
            ) from error
        if not os.path.samestat(there, self._status):
            raise ReadError(
                "was replaced after it was opened",
                path=self.path,
                expected=f"inode {self._status.st_ino}",
                got=there.st_ino,
            )
        if now.st_mtime_ns != self._status.st_mtime_ns:
            raise ReadError("was modified after it was opened", path=self.path)

    def close(self) -> None:
        """Close the descriptor; idempotent. No read of it may be in flight."""
        if not self._closed:
            self._closed = True
            os.close(self.fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        way = "direct" if self.direct else "buffered"
        return f"<DirectFile {self.path!r} {self.size_bytes} bytes, {way}, block {self.block_bytes}>"


def _open_regular(path: str) -> tuple[int, os.stat_result]:
    """A buffered descriptor of `path` and its status, or a FileError that says what is wrong with it."""
    try:
        # Asked before opening: opening a device can have effects.
        _require_content(path, os.stat(path))
        fd = os.open(path, _OPEN_FLAGS)
    except FileNotFoundError as error:
        raise FileError("no such file", path=path, hint="check the path") from error
    except PermissionError as error:
        raise FileError("is not readable", path=path, got=error.strerror, hint="check its mode") from error
    except OSError as error:
        raise FileError("cannot be opened", path=path, got=error.strerror) from error
    except ValueError as error:
        raise FileError("is not a path", path=repr(path), got=error) from error
    try:
        status = os.fstat(fd)
        _require_content(path, status)
        os.set_blocking(fd, True)  # with O_NONBLOCK, io_uring would answer EAGAIN rather than wait
    except BaseException:
        os.close(fd)
        raise
    return fd, status


def _require_content(path: str, status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        kind = next((name for test, name in _KINDS if test(status.st_mode)), "something else")
        raise FileError("cannot be read at offsets", path=path, expected="a regular file", got=kind)
    if status.st_size == 0:
        raise FileError("is empty", path=path, hint="was a download interrupted?")


def _open_direct(path: str, buffered_fd: int, status: os.stat_result) -> tuple[int, int, int] | str:
    """A descriptor with O_DIRECT, its block size and its memory alignment; or why there is none."""
    try:
        fd = os.open(path, _OPEN_FLAGS | os.O_DIRECT)
    except OSError as error:
        return f"the file system refuses O_DIRECT: {error.strerror}"
    try:
        os.set_blocking(fd, True)
        if os.path.samestat(os.fstat(fd), status):
            found = _probe(fd, buffered_fd, status.st_size)
        else:
            found = "the file was replaced while it was being opened"
    except BaseException:
        os.close(fd)
        raise
    if isinstance(found, str):
        os.close(fd)
        return found
    return fd, *found


def _probe(direct_fd: int, buffered_fd: int, size_bytes: int) -> tuple[int, int] | str:
    """The block size and memory alignment that were seen to work, or why direct reads do not.

    A file system may take O_DIRECT at open and refuse the read, and an overlay or network one may answer
    with stale bytes. So one block is read both ways and compared, at an offset and an address that are
    aligned to that block size and to no larger one.
    """
    told = _statx_dio_align(direct_fd)
    if told is not None and 0 in told:
        return "the kernel says that this file takes no direct reads"
    candidates = _untold_blocks(direct_fd) if told is None else (max(told),)
    largest_bytes = candidates[-1]
    if size_bytes < candidates[0]:
        return f"the file is smaller than a block of {candidates[0]} bytes"
    reason = ""
    with mmap.mmap(-1, 4 * max(largest_bytes, mmap.PAGESIZE)) as memory, memoryview(memory) as view:
        base = -ctypes.addressof(ctypes.c_char.from_buffer(memory)) % (2 * largest_bytes)
        for block_bytes in candidates:
            blocks = size_bytes // block_bytes
            if told is None and blocks < 2:
                break  # only offset 0 is left, which fits every alignment and so proves none
            offset_bytes = ((blocks // 2) | 1 if blocks > 1 else 0) * block_bytes
            step_bytes = block_bytes if told is None else told[0]
            with view[base + step_bytes : base + step_bytes + block_bytes] as block:
                try:
                    got_bytes = os.preadv(direct_fd, [block], offset_bytes)
                except OSError as error:
                    reason = f"a direct read of {block_bytes} bytes fails: {error.strerror}"
                    if error.errno == errno.EINVAL:
                        continue
                    return reason
                if block[:got_bytes] != os.pread(buffered_fd, block_bytes, offset_bytes):
                    return "a direct and a buffered read of the same block differ"
            return block_bytes, block_bytes if told is None else told[0]
    return reason or f"the file is too small ({size_bytes} bytes) to find out its alignment"


def _untold_blocks(fd: int) -> tuple[int, ...]:
    """The block sizes to try where the kernel does not tell: none smaller than the file system's own.

    btrfs (seen on Linux 6.18) refuses no direct read: what is not aligned to its sectors it answers
    through the page cache, and success says nothing then.
    """
    own_bytes = os.fstatvfs(fd).f_frsize
    least_bytes = own_bytes if own_bytes in _PROBE_BLOCKS_BYTES else BUFFERED_BLOCK_BYTES
    return tuple(block_bytes for block_bytes in _PROBE_BLOCKS_BYTES if block_bytes >= least_bytes)


def _statx_dio_align(fd: int) -> tuple[int, int] | None:
    """(memory, offset) alignment for direct reads as the kernel tells it since 6.1; 0 means none at all."""
    buffer = ctypes.create_string_buffer(_STATX_BYTES)
    try:
        statx = ctypes.CDLL(None).statx
    except AttributeError:
        return None
    if statx(fd, b"", _AT_EMPTY_PATH, _STATX_DIOALIGN, buffer) != 0:
        return None
    (mask,) = struct.unpack_from("=I", buffer, 0)
    if not mask & _STATX_DIOALIGN:
        return None
    memory_bytes, offset_bytes = struct.unpack_from("=II", buffer, _STX_DIO_ALIGN_AT)
    return memory_bytes, offset_bytes
