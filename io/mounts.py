"""Where a path lies: mount point, file system, device, and what kind of drive the kernel says that is.

Owns the reading of /proc/self/mountinfo and of a block device's queue settings. Must not know what is
read from there, nor how fast.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Final

_ESCAPES: Final = ((r"\040", " "), (r"\011", "\t"), (r"\012", "\n"), (r"\134", "\\"))


@dataclass(frozen=True, kw_only=True, slots=True)
class Mount:
    """A mounted file system.

    Attributes:
        mount_point: Where.
        file_system: Its type, as `ext4`.
        source: The device, or what the file system gives instead (`tmpfs`, `server:/export`).
        device: `major:minor`; 0 as the major means that no block device is behind it.
        read_only: Mounted so.
    """

    mount_point: str
    file_system: str
    source: str
    device: str
    read_only: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Drive:
    """A block device, as /sys/dev/block tells it. None where it does not.

    Attributes:
        rotational: A disk that turns, as far as the kernel knows.
        logical_block_bytes: The least that can be read at a time.
        model: What the maker calls it.
    """

    rotational: bool | None
    logical_block_bytes: int | None
    model: str | None


def mount_of(path: str, root: str = "/") -> Mount | None:
    """The mount on which `path` lies, symbolic links followed; None when that cannot be read.

    Found by the longest mount point that leads to the path, not by device number: btrfs shows files
    under other numbers than its mounts.

    Args:
        path: A file or directory; it need not exist.
        root: Where /proc is found; for tests.
    """
    real = os.path.realpath(path)
    found: Mount | None = None
    for line in _lines(os.path.join(root, "proc/self/mountinfo")):
        before, _, after = line.partition(" - ")
        fields, kind = before.split(), after.split()
        if len(fields) < 6 or len(kind) < 2:
            continue
        point = _unescaped(fields[4])
        leads = real == point or real.startswith(point.rstrip("/") + "/")
        # Of two at one point the later one hides the earlier.
        if leads and (found is None or len(point) >= len(found.mount_point)):
            found = Mount(
                mount_point=point,
                file_system=kind[0],
                source=_unescaped(kind[1]),
                device=fields[2],
                read_only="ro" in fields[5].split(","),
            )
    return found


def drive_of(mount: Mount, root: str = "/") -> Drive | None:
    """The block device behind a mount; None where there is none.

    Args:
        mount: From `mount_of`.
        root: Where /sys is found; for tests.
    """
    directory = os.path.realpath(os.path.join(root, f"sys/dev/block/{mount.device}"))
    if mount.device.startswith("0:") or not os.path.isdir(directory):
        return None
    if not os.path.isdir(os.path.join(directory, "queue")):
        directory = os.path.dirname(directory)  # a partition has the queue of its disk
    rotational = _first(os.path.join(directory, "queue/rotational"))
    block = _first(os.path.join(directory, "queue/logical_block_size"))
    return Drive(
        rotational=None if rotational not in {"0", "1"} else rotational == "1",
        logical_block_bytes=int(block) if block is not None and block.isdecimal() else None,
        model=_first(os.path.join(directory, "device/model")),
    )


def _unescaped(field: str) -> str:
    """A path of mountinfo, which writes blanks and backslashes in octal."""
    for code, plain in _ESCAPES:
        field = field.replace(code, plain)
    return field


def _first(path: str) -> str | None:
    lines = _lines(path)
    return lines[0].strip() or None if lines else None


def _lines(path: str) -> list[str]:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            text: str = file.read()
    except OSError:
        return []
    return text.splitlines()
