"""What memory there is: of this process, the machine, and the control groups around both.

Owns the reading of /proc and of cgroup v1 and v2. Must not know what the memory is wanted for. A figure
that cannot be read is None, never an exception and never a guess.
"""

from __future__ import annotations

import os
import resource
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator

UNLIMITED_BYTES: Final = 1 << 62
"""cgroup v1 writes "no limit" as the largest multiple of the page size below 2^63, whatever that size."""


class GroupFiles(NamedTuple):
    """What a version of cgroups calls its figures.

    Attributes:
        bounds: (limit, what counts against it), as file names; any of them may be missing.
        cache_keys: The page cache, in memory.stat, descendants included. Locked and shared memory is not
            in it.
    """

    bounds: tuple[tuple[str, str], ...]
    cache_keys: tuple[str, str]


FILES_OF_VERSION: Final = {
    1: GroupFiles(
        bounds=(
            ("memory.limit_in_bytes", "memory.usage_in_bytes"),
            ("memory.memsw.limit_in_bytes", "memory.memsw.usage_in_bytes"),
        ),
        cache_keys=("total_active_file", "total_inactive_file"),
    ),
    2: GroupFiles(
        bounds=(("memory.max", "memory.current"), ("memory.high", "memory.current")),
        cache_keys=("active_file", "inactive_file"),
    ),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessMemory:
    """Of this process, in bytes; from /proc/self/status and /proc/self/stat.

    Attributes:
        rss_bytes: Resident in all.
        anon_bytes: Resident and its own: heap, slots, images.
        file_bytes: Resident and of mapped files: libraries, mapped models.
        swap_bytes: Swapped out.
        peak_rss_bytes: The most that `rss_bytes` has been.
        minor_faults: Page faults served without reading.
        major_faults: Page faults that had to read.
    """

    rss_bytes: int | None
    anon_bytes: int | None
    file_bytes: int | None
    swap_bytes: int | None
    peak_rss_bytes: int | None
    minor_faults: int | None
    major_faults: int | None


@dataclass(frozen=True, kw_only=True, slots=True)
class MachineMemory:
    """Of the machine, in bytes; from /proc/meminfo.

    Attributes:
        total_bytes: MemTotal.
        available_bytes: MemAvailable: the kernel's estimate of what can be had without swapping.
        free_bytes: MemFree.
        swap_free_bytes: SwapFree.
    """

    total_bytes: int | None
    available_bytes: int | None
    free_bytes: int | None
    swap_free_bytes: int | None


@dataclass(frozen=True, kw_only=True, slots=True)
class CgroupMemory:
    """Of the control group, this process's own or an ancestor, that leaves the least room.

    Attributes:
        version: 1 or 2.
        path: The group's directory.
        limit_bytes: What it may use; in version 2 the lower of memory.max and memory.high, in version 1
            the one of memory and of memory with swap that leaves less.
        used_bytes: What it uses of that, page cache included.
        reclaimable_bytes: The page cache in that, which makes way for anything else.
    """

    version: int
    path: str
    limit_bytes: int
    used_bytes: int
    reclaimable_bytes: int

    @property
    def room_bytes(self) -> int:
        """What may still be allocated under the limit."""
        return max(0, self.limit_bytes - max(0, self.used_bytes - self.reclaimable_bytes))


def process_memory(root: str = "/") -> ProcessMemory:
    """The figures of this process.

    Args:
        root: Where /proc is found; for tests.
    """
    status = _kib_table(_under(root, "/proc/self/status"))
    # "pid (name) state ...": the name may hold anything, so the count starts behind its last parenthesis.
    stat = (_text(_under(root, "/proc/self/stat")) or "").rpartition(")")[2].split()
    return ProcessMemory(
        rss_bytes=status.get("VmRSS"),
        anon_bytes=status.get("RssAnon"),
        file_bytes=status.get("RssFile"),
        swap_bytes=status.get("VmSwap"),
        peak_rss_bytes=status.get("VmHWM"),
        minor_faults=_number(stat[7]) if len(stat) > 7 else None,
        major_faults=_number(stat[9]) if len(stat) > 9 else None,
    )


def machine_memory(root: str = "/") -> MachineMemory:
    """The figures of the machine.

    Args:
        root: Where /proc is found; for tests.
    """
    table = _kib_table(_under(root, "/proc/meminfo"))
    return MachineMemory(
        total_bytes=table.get("MemTotal"),
        available_bytes=table.get("MemAvailable"),
        free_bytes=table.get("MemFree"),
        swap_free_bytes=table.get("SwapFree"),
    )


def cgroup_memory(root: str = "/") -> CgroupMemory | None:
    """The control group that leaves this process the least room; None when no limit can be seen.

    Args:
        root: Where /proc and /sys are found; for tests.
    """
    groups = []
    for version, directory in group_directories(root):
        group = _read_group(root, version, directory)
        if group is not None:
            groups.append(group)
    return min(groups, key=lambda group: group.room_bytes, default=None)


def available_bytes(root: str = "/") -> int | None:
    """What can be allocated without swapping or being killed: MemAvailable or the cgroup's room.

    Args:
        root: Where /proc and /sys are found; for tests.
    """
    group = cgroup_memory(root)
    known = [machine_memory(root).available_bytes, None if group is None else group.room_bytes]
    return min((figure for figure in known if figure is not None), default=None)


def memlock_limit_bytes() -> int | None:
    """What this process may lock (RLIMIT_MEMLOCK, soft); None: no limit.

    A process with CAP_IPC_LOCK is not bound by it.
    """
    soft = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    return None if soft == resource.RLIM_INFINITY else soft


def _read_group(root: str, version: int, directory: str) -> CgroupMemory | None:
    def number(name: str) -> int | None:
        return _number(_text(_under(root, f"{directory}/{name}")))

    names = FILES_OF_VERSION[version]
    bounds = []
    for limit, used in names.bounds:
        limit_bytes, used_bytes = number(limit), number(used)
        if limit_bytes is not None and used_bytes is not None and limit_bytes < UNLIMITED_BYTES:
            bounds.append((limit_bytes, used_bytes))
    if not bounds:
        return None
    limit_bytes, used_bytes = min(bounds, key=lambda bound: bound[0] - bound[1])
    cache_bytes = 0
    for line in (_text(_under(root, f"{directory}/memory.stat")) or "").splitlines():
        key, _, value = line.partition(" ")
        if key in names.cache_keys:
            cache_bytes += _number(value) or 0
    return CgroupMemory(
        version=version,
        path=directory,
        limit_bytes=limit_bytes,
        used_bytes=used_bytes,
        reclaimable_bytes=min(cache_bytes, used_bytes),
    )


def group_directories(root: str = "/") -> Iterator[tuple[int, str]]:
    """`(version, directory)` of each memory group of this process, innermost first, up to the mount.

    Both versions may be mounted (systemd's hybrid mode): then memory belongs to one of them, and the
    other's directories just hold no memory files.
    """
    mounts = list(_group_mounts(root))
    for line in (_text(_under(root, "/proc/self/cgroup")) or "").splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        version = 2 if number == "0" and not controllers else 1
        if version == 1 and "memory" not in controllers.split(","):
            continue
        for mount_version, mount_root, mount_point in mounts:
            if mount_version != version:
                continue
            # A container often sees its own group as the mount's root, while the path counts from the
            # real root, or leads out of its namespace by "/..": then the mount is all there is to see.
            prefix = mount_root.rstrip("/")
            relative = path[len(prefix) :] if f"{path}/".startswith(f"{prefix}/") else ""
            parts = [part for part in relative.split("/") if part]
            if ".." in parts:
                parts = []
            for depth in range(len(parts), -1, -1):
                yield version, "/".join([mount_point.rstrip("/"), *parts[:depth]])
            break


def _group_mounts(root: str) -> Iterator[tuple[int, str, str]]:
    """`(version, root, mount point)` of each mount where memory groups may be."""
    for line in (_text(_under(root, "/proc/self/mountinfo")) or "").splitlines():
        before, _, after = line.partition(" - ")
        fields, kind = before.split(), after.split()
        if len(fields) < 5 or not kind:
            continue
        if kind[0] == "cgroup2":
            yield 2, _unescaped(fields[3]), _unescaped(fields[4])
        elif kind[0] == "cgroup" and "memory" in kind[-1].split(","):
            yield 1, _unescaped(fields[3]), _unescaped(fields[4])


def _unescaped(field: str) -> str:
    """A path of mountinfo, which writes blanks and backslashes in octal."""
    for code, plain in ((r"\040", " "), (r"\011", "\t"), (r"\012", "\n"), (r"\134", "\\")):
        field = field.replace(code, plain)
    return field


def _kib_table(path: str) -> dict[str, int]:
    """`Name:  123 kB` lines as bytes; other lines are left out."""
    table = {}
    for line in (_text(path) or "").splitlines():
        name, _, value = line.partition(":")
        fields = value.split()
        if len(fields) == 2 and fields[1] == "kB" and fields[0].isdecimal():
            table[name] = int(fields[0]) << 10
    return table


def _number(text: str | None) -> int | None:
    """A count of bytes; None for `max`, nothing, or anything else."""
    stripped = "" if text is None else text.strip()
    return int(stripped) if stripped.isdecimal() else None


def _text(path: str) -> str | None:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            text: str = file.read()
    except OSError:
        return None
    return text


def _under(root: str, path: str) -> str:
    return os.path.join(root, path.lstrip("/"))
