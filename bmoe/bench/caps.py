"""Limits around a process: memory, and bytes per second from the drive, by control groups or systemd-run.

Owns the groups: they are made before a run and removed after it, also when the run is interrupted, and those
that an earlier benchmark left behind when it was killed are swept. Must not know what runs inside.

Groups are made as near to the top of the hierarchy as this process may: below its own, limits of others would
apply too, and in version 2 a group with processes cannot have limited children.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from bmoe.io.errors import UsageError
from bmoe.io.memory_figures import group_directories
from bmoe.io.mounts import mount_of

if TYPE_CHECKING:
    from collections.abc import Iterator

_PREFIX: Final = "bmoe-bench-"
_LEAVE_TRIES: Final = 50
_LEAVE_PAUSE_S: Final = 0.02


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """What a process may use.

    Attributes:
        memory_bytes: Memory with page cache, without swap; None for no limit.
        drive_bytes_per_s: Reads from the drive under `path`; None for no limit.
        path: A file on that drive.
    """

    memory_bytes: int | None = None
    drive_bytes_per_s: int | None = None
    path: str = "/"

    @property
    def any(self) -> bool:
        """Whether there is a limit at all."""
        return self.memory_bytes is not None or self.drive_bytes_per_s is not None


@dataclass(frozen=True, kw_only=True, slots=True)
class Confinement:
    """How to start a process under limits.

    Attributes:
        how: In a word or two, for the record.
        joins: Files to write the process's number into.
        prefix: Words before the command.
    """

    how: str
    joins: tuple[str, ...] = ()
    prefix: tuple[str, ...] = ()


@contextlib.contextmanager
def confined(limits: Limits, *, root: str = "/") -> Iterator[Confinement]:
    """Makes what the limits need, and removes it.

    Args:
        limits: What is allowed.
        root: Where /proc and /sys are found; for tests.

    Raises:
        UsageError: Neither control groups nor systemd-run can be used; says why.
    """
    if not limits.any:
        yield Confinement(how="no limit")
        return
    reasons: list[str] = []
    with contextlib.ExitStack() as stack:
        confinement = _by_groups(limits, root, stack, reasons) or _by_systemd(limits, root, reasons)
        if confinement is None:
            option = "--mem-cap" if limits.memory_bytes is not None else "--throttle"
            raise UsageError(
                f"{option}: no way to limit a process here: {'; '.join(reasons)}",
                hint="run as root, or in a systemd session",
            )
        yield confinement


def _by_groups(
    limits: Limits, root: str, stack: contextlib.ExitStack, reasons: list[str]
) -> Confinement | None:
    wanted: list[tuple[str, list[tuple[int, str]], dict[int, dict[str, str]]]] = []
    if limits.memory_bytes is not None:
        size = str(limits.memory_bytes)
        # Without the swap limits, what does not fit is swapped out instead of read again.
        v1 = {"memory.limit_in_bytes": size, "memory.memsw.limit_in_bytes?": size}
        v2 = {"memory.max": size, "memory.swap.max?": "0"}
        wanted.append(("memory", list(group_directories(root))[::-1], {1: v1, 2: v2}))
    if limits.drive_bytes_per_s is not None:
        device = _whole_drive(limits.path, root)
        if device is None:
            reasons.append("no block device is behind the model's file")
            return None
        rate = limits.drive_bytes_per_s
        files = {
            1: {"blkio.throttle.read_bps_device": f"{device} {rate}"},
            2: {"io.max": f"{device} rbps={rate}"},
        }
        wanted.append(("io", _io_directories(root), files))
    joins, versions = [], set()
    with contextlib.ExitStack() as made:
        for what, directories, files_of in wanted:
            found = _make_group(what, directories, files_of, root, reasons, made)
            if found is None:
                return None
            version, group = found
            versions.add(version)
            joins.append(f"{group}/cgroup.procs")
        stack.push(made.pop_all())
    return Confinement(how=f"cgroup v{' and v'.join(map(str, sorted(versions)))}", joins=tuple(joins))


def _make_group(  # noqa: PLR0917 (one call)
    what: str,
    directories: list[tuple[int, str]],
    files_of: dict[int, dict[str, str]],
    root: str,
    reasons: list[str],
    made: contextlib.ExitStack,
) -> tuple[int, str] | None:
    if not directories:
        reasons.append(f"no {what} control group is mounted")
    for version, directory in directories:
        parent = os.path.join(root, directory.lstrip("/"))
        _sweep(parent)
        group = f"{parent}/{_PREFIX}{os.getpid()}-{what}"
        try:
            os.mkdir(group)
        except OSError as error:
            reasons.append(f"{directory}: {error.strerror}")
            continue
        try:
            for name, value in files_of[version].items():
                file = f"{group}/{name.rstrip('?')}"
                # The kernel makes a group's files with the group: what is not there is not offered here.
                if not os.path.exists(file) and name.endswith("?"):
                    continue
                with open(file, "r+", encoding="ascii") as opened:
                    opened.write(value)
        except OSError as error:
            _remove(group)
            reasons.append(f"{directory}: {name.rstrip('?')}: {error.strerror}")
            continue
        made.callback(_remove, group)
        return version, group
    return None


def _remove(group: str) -> None:
    """Removes a group whose last process has ended, or is about to."""
    for _ in range(_LEAVE_TRIES):
        try:
            os.rmdir(group)
        except FileNotFoundError:
            return
        except OSError:
            time.sleep(_LEAVE_PAUSE_S)  # EBUSY until the kernel has torn the process down
        else:
            return


def _sweep(parent: str) -> None:
    """Removes groups of benchmarks that are no more."""
    with contextlib.suppress(OSError):
        for name in os.listdir(parent):
            match = re.fullmatch(rf"{_PREFIX}(\d+)-\w+", name)
            if match and not os.path.exists(f"/proc/{match[1]}"):
                with contextlib.suppress(OSError):
                    os.rmdir(f"{parent}/{name}")


def _io_directories(root: str) -> list[tuple[int, str]]:
    """Where groups with a limit of the drive can be made, the most likely first."""
    found = []
    with (
        contextlib.suppress(OSError),
        open(os.path.join(root, "proc/self/mountinfo"), encoding="utf-8") as file,
    ):
        for line in file:
            before, _, after = line.partition(" - ")
            fields, kind = before.split(), after.split()
            if kind and kind[0] == "cgroup" and "blkio" in kind[-1].split(","):
                found.append((1, fields[4]))
            elif kind and kind[0] == "cgroup2":
                found.append((2, fields[4]))
    return sorted(found)


def _whole_drive(path: str, root: str) -> str | None:
    """`major:minor` of the drive under a file: of the disk, where the file system is on a partition."""
    mount = mount_of(path, root)
    if mount is None or mount.device.startswith("0:"):
        return None
    block = os.path.realpath(os.path.join(root, f"sys/dev/block/{mount.device}"))
    if not os.path.exists(f"{block}/partition"):
        return mount.device
    try:
        with open(f"{os.path.dirname(block)}/dev", encoding="ascii") as file:
            return file.read().strip()
    except OSError:
        return None


def _by_systemd(limits: Limits, root: str, reasons: list[str]) -> Confinement | None:
    if shutil.which("systemd-run") is None or not os.path.isdir(os.path.join(root, "run/systemd/system")):
        reasons.append("systemd does not run here")
        return None
    if limits.drive_bytes_per_s is not None:
        reasons.append("systemd-run is used for memory only")
        return None
    user = () if os.geteuid() == 0 else ("--user",)
    words = ("systemd-run", "--scope", "--quiet", "--collect", *user)
    properties = (f"MemoryMax={limits.memory_bytes}", "MemorySwapMax=0")
    return Confinement(how="systemd-run", prefix=(*words, *(w for p in properties for w in ("-p", p)), "--"))
