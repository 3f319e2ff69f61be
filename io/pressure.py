"""How short memory is just now: room, stalls, pages that come back. For reading several times a second.

Owns the open files of /proc and of the control groups, and their parsing. Must not know what follows from a
reading. A figure whose source is missing is None. Counters only grow: who reads twice has a rate.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Self

from bmoe.io.memory_figures import FILES_OF_VERSION, UNLIMITED_BYTES, group_directories

if TYPE_CHECKING:
    from types import TracebackType

_LONGEST_BYTES: Final = 1 << 16


@dataclass(frozen=True, kw_only=True, slots=True)
class PressureReading:
    """One look at memory.

    Attributes:
        available_bytes: MemAvailable of the machine.
        group_room_bytes: What may still be allocated in the control group, this process's own or an
            ancestor, that leaves the least: limit minus what is used and cannot be reclaimed.
        group_limit_bytes: That group's limit.
        some_stall_ns, full_stall_ns: Time during which some task, or every task that had work, waited for
            memory (pressure stall information), since boot.
        stall_is_own: Whether that is of this process's control group; if not, of the machine.
        anon_refault_bytes, file_refault_bytes: Taken away and soon needed again, in all: of this process's
            control group where it tells, else of the machine.
        swap_in_bytes: Read back from swap, in all.
    """

    available_bytes: int | None = None
    group_room_bytes: int | None = None
    group_limit_bytes: int | None = None
    some_stall_ns: int | None = None
    full_stall_ns: int | None = None
    stall_is_own: bool = False
    anon_refault_bytes: int | None = None
    file_refault_bytes: int | None = None
    swap_in_bytes: int | None = None

    @property
    def room_bytes(self) -> int | None:
        """What can be had without taking it from anyone: the lower of machine and group."""
        known = [n for n in (self.available_bytes, self.group_room_bytes) if n is not None]
        return min(known, default=None)


class _File:
    """A file of the kernel, kept open; its text is made anew by every read at offset 0."""

    def __init__(self, root: str, path: str) -> None:
        self._fd = -1
        with contextlib.suppress(OSError):
            self._fd = os.open(os.path.join(root, path.lstrip("/")), os.O_RDONLY | os.O_CLOEXEC)

    def text(self) -> bytes:
        """What it says now; nothing when it is not there (any more) or cannot be read."""
        if self._fd < 0:
            return b""
        try:
            return os.pread(self._fd, _LONGEST_BYTES, 0)
        except OSError:  # PSI that is switched off, a group that was removed
            return b""

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class _Group:
    """The figures of one control group."""

    def __init__(self, root: str, version: int, directory: str) -> None:
        names = FILES_OF_VERSION[version]
        self._bounds = [
            (_File(root, f"{directory}/{limit}"), _File(root, f"{directory}/{used}"))
            for limit, used in names.bounds
        ]
        self._cache_keys = [key.encode() for key in names.cache_keys]
        self.stat = _File(root, f"{directory}/memory.stat")
        self.pressure = _File(root, f"{directory}/memory.pressure")
        self.prefix = b"total_" if version == 1 else b""
        # The hierarchy's root stands for the machine; it has no events of its own.
        self.is_root = not os.path.exists(os.path.join(root, f"{directory}/cgroup.events".lstrip("/")))

    def room(self) -> tuple[int, int] | None:
        """(what may still be allocated, the limit); None without a limit."""
        found: tuple[int, int] | None = None
        for limit_file, used_file in self._bounds:
            limit = _number(limit_file.text())
            if limit is None or limit >= UNLIMITED_BYTES or (used := _number(used_file.text())) is None:
                continue
            if found is None or limit - used < found[0] - found[1]:
                found = limit, used
        if found is None:
            return None
        limit, used = found
        stat = self.stat.text()
        cache = sum(_field(stat, key) or 0 for key in self._cache_keys)
        return max(0, limit - max(0, used - cache)), limit

    def close(self) -> None:
        for file in (*(f for bound in self._bounds for f in bound), self.stat, self.pressure):
            file.close()


class PressureSensor:
    """The sources of `PressureReading`, held open.

    A read costs some tens of microseconds. Limits are read each time: they can be changed from outside.

    Args:
        root: Where /proc and /sys are found; for tests.
    """

    def __init__(self, root: str = "/") -> None:
        self._meminfo = _File(root, "/proc/meminfo")
        self._vmstat = _File(root, "/proc/vmstat")
        self._pressure = _File(root, "/proc/pressure/memory")
        self._groups = [_Group(root, version, path) for version, path in group_directories(root)]
        self._stall_group = next(
            (g for g in self._groups if not g.is_root and _stall_ns(g.pressure.text(), b"some") is not None),
            None,
        )
        self._refault_group = next((g for g in self._groups if _refaults(g)[1] is not None), None)

    def read(self) -> PressureReading:
        """How memory is now."""
        available = _field(self._meminfo.text(), b"MemAvailable:")
        tightest = min((found for group in self._groups if (found := group.room())), default=None)
        room, limit = tightest or (None, None)
        own = self._stall_group
        stalls = (own.pressure if own else self._pressure).text()
        vmstat = self._vmstat.text()
        if self._refault_group is not None:
            anon, file = _refaults(self._refault_group)
        else:
            anon, file = (_pages(vmstat, b"workingset_refault_" + kind) for kind in (b"anon", b"file"))
        return PressureReading(
            available_bytes=None if available is None else available << 10,
            group_room_bytes=room,
            group_limit_bytes=limit,
            some_stall_ns=_stall_ns(stalls, b"some"),
            full_stall_ns=_stall_ns(stalls, b"full"),
            stall_is_own=own is not None,
            anon_refault_bytes=anon,
            file_refault_bytes=file,
            swap_in_bytes=_pages(vmstat, b"pswpin"),
        )

    def close(self) -> None:
        """Closes the files; idempotent. Later reads know nothing."""
        for file in (self._meminfo, self._vmstat, self._pressure):
            file.close()
        for group in self._groups:
            group.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _refaults(group: _Group) -> tuple[int | None, int | None]:
    """Bytes of anonymous and of file pages that came back."""
    stat = group.stat.text()
    anon, file = (_pages(stat, group.prefix + b"workingset_refault_" + kind) for kind in (b"anon", b"file"))
    return anon, file


def _stall_ns(text: bytes, kind: bytes) -> int | None:
    """The total of a line `some avg10=0.00 avg60=0.00 avg300=0.00 total=123`, which is in microseconds."""
    for line in text.splitlines():
        if line.startswith(kind + b" "):
            total = _number(line.rpartition(b"total=")[2])
            return None if total is None else total * 1000
    return None


def _pages(text: bytes, key: bytes) -> int | None:
    pages = _field(text, key)
    return None if pages is None else pages * mmap.PAGESIZE


def _field(text: bytes, key: bytes) -> int | None:
    """The number after `key` and blanks at the start of a line."""
    start = 0 if text.startswith(key) else text.find(b"\n" + key) + 1
    if start == 0 and not text.startswith(key):
        return None
    start += len(key)
    if text[start : start + 1] not in {b" ", b"\t"}:
        return None
    words = text[start : start + 40].split(None, 1)
    return _number(words[0]) if words else None


def _number(text: bytes) -> int | None:
    stripped = text.strip()
    return int(stripped) if stripped.isdigit() else None
