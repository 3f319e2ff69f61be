"""Small files that are replaced whole, and paths that may be one and the same file.

Owns how a file is replaced so that a crash leaves the old one or the new one. Must not know what is in it.
"""

from __future__ import annotations

import contextlib
import os
import tempfile


def replace_file(path: str, payload: bytes, *, mode: int = 0o600) -> None:
    """Write beside the target, make it durable, then take its place: rename is atomic within a folder.

    Args:
        path: The file; its folder exists.
        payload: All of it.
        mode: Its permissions.

    Raises:
        OSError: It cannot be written; the old file is as it was, and nothing else is left.
    """
    folder, name = os.path.split(os.path.abspath(path))
    fd, temporary = tempfile.mkstemp(prefix=f".{name[:64]}.", suffix=".part", dir=folder)
    try:
        with open(fd, "wb") as file:
            os.fchmod(file.fileno(), mode)
            file.write(payload)
            file.flush()
            os.fsync(file.fileno())
        os.rename(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
    # The new name itself is data of the folder.
    folder_fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(folder_fd)
    finally:
        os.close(folder_fd)


def is_same_file(a: str, b: str) -> bool:
    """Whether two paths lead to one file. One that does not exist is no other's."""
    try:
        return os.path.samefile(a, b)
    except (OSError, ValueError):
        return False
