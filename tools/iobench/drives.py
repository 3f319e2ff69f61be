"""What was measured of each drive, kept in the user's cache directory for whoever plans with it.

Owns `drives.json` there: one record for each device and mount point, the latest. Must not know how it
was measured. The file is nobody's source of truth: broken or foreign content counts as none, and a
writer replaces it whole.
"""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any, Final

from bmoe.io.mounts import mount_of
from bmoe.io.whole_file import replace_file

if TYPE_CHECKING:
    from bmoe.tools.iobench.result import Result

_SCHEMA: Final = 1
_MAX_FILE_BYTES: Final = 16 << 20


def drives_path() -> str:
    """Where the records are: `bmoe/drives.json` in `$XDG_CACHE_HOME`, or in `~/.cache`."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(base):  # the specification says to ignore a relative one
        base = os.path.join(os.path.expanduser("~"), ".cache")
    return os.path.join(base, "bmoe", "drives.json")


def drive_key(path: str) -> str | None:
    """What tells the drive under `path` from others; None when its mount cannot be found."""
    mount = mount_of(path)
    return None if mount is None else f"{mount.source} on {mount.mount_point}"


def recall(path: str) -> dict[str, Any] | None:
    """The record of the drive under `path`; None if there is none.

    Args:
        path: A file or directory on it.

    Returns:
        As `remember` wrote it: `created_utc`, `path`, `file_system`, `kernel`, `queue_depth`,
        `mib_per_s` at that depth, `flags` (codes), and `curves`, a list of groups each with its `rows`
        (`lanes`, `mib_per_s`).
    """
    key = drive_key(path)
    record = None if key is None else _records().get(key)
    if not isinstance(record, dict) or not isinstance(record.get("mib_per_s"), int | float):
        return None
    return record


def remember(result: Result) -> str | None:
    """Keep what a result says about its drive, replacing what was kept before.

    Only rows past the page cache say something about a drive; without any, nothing is kept.

    Returns:
        Why nothing was kept; None if it was.
    """
    key = drive_key(result.file.path)
    rows = [row for row in result.rows if row.direct]
    if key is None:
        return "the mount of the file cannot be found"
    if result.verdict is None or not rows:
        return "nothing was measured past the page cache"
    curves: list[dict[str, Any]] = []
    for knee in result.knees:
        points = [row for row in rows if row.group == knee.group]
        if points:
            curves.append(
                {
                    "backend": knee.group.backend,
                    "pattern": knee.group.pattern,
                    "piece_bytes": knee.group.piece_bytes,
                    "pieces": knee.group.pieces,
                    "compute_load": knee.group.compute_load,
                    "rows": [{"lanes": row.lanes, "mib_per_s": row.mib_per_s} for row in points],
                }
            )
    record = {
        "created_utc": result.created_utc,
        "path": os.path.abspath(result.file.path),
        "file_system": result.file.file_system,
        "kernel": result.host.kernel,
        "queue_depth": result.verdict.queue_depth,
        "mib_per_s": result.verdict.knee.knee_mib_per_s,
        "flags": [flag.code for flag in result.flags],
        "curves": curves,
    }
    try:
        _write({**_records(), key: record})
    except OSError as error:
        return f"{drives_path()} cannot be written: {error.strerror}"
    return None


def _records() -> dict[str, Any]:
    try:
        with open(drives_path(), "rb") as file:
            content = json.loads(file.read(_MAX_FILE_BYTES))
    except (OSError, ValueError, RecursionError):
        return {}
    if not isinstance(content, dict) or content.get("schema") != _SCHEMA:
        return {}
    drives = content.get("drives")
    return drives if isinstance(drives, dict) else {}


def _write(drives: dict[str, Any]) -> None:
    path = drives_path()
    os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
    payload = json.dumps({"schema": _SCHEMA, "drives": drives}, indent=1)
    replace_file(path, payload.encode("ascii"))
