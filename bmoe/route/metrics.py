"""Figures per token from a run: the reference's `--csv` file, or this engine's `--log-json` file.

Owns both formats as far as the viewer needs them. Must not know routing; a file may be cut or hostile.
"""

from __future__ import annotations

import csv
import json
import math
from dataclasses import dataclass
from typing import Any, Final

from bmoe.io.errors import FileError, FormatError
from bmoe.present import one_line

_MIB: Final = 1 << 20
_MOST_TOKENS: Final = 1_000_000
# Nanosecond and byte figures of the log, and what they are called in the table.
_FROM_LOG: Final = {
    "wall_ns": ("wall_ms", 1e6),
    "read_bytes": ("read_mib", float(_MIB)),
    "stall_ns": ("stall_ms", 1e6),
    "cpu_ns": ("cpu_ms", 1e6),
    "hits": ("hits", 1.0),
    "lookups": ("lookups", 1.0),
    "major_faults": ("majflt", 1.0),
}


@dataclass(frozen=True, kw_only=True)
class TokenMetrics:
    """A table of numbers, one row per token.

    Attributes:
        path: The file.
        columns: Names with units.
        rows: One list per token; None is unknown.
        notes: What was odd about the file.
    """

    path: str
    columns: tuple[str, ...]
    rows: list[list[float | None]]
    notes: tuple[str, ...]


def read_metrics(path: str) -> TokenMetrics:
    """Reads either format, told apart by the first character.

    Raises:
        FileError: It cannot be read.
        FormatError: It is neither, or a line is wrong; the message has file and line.
    """
    try:
        with open(path, encoding="utf-8", errors="replace", newline="") as file:
            text = file.read(256 * _MIB)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise FileError(f"cannot be read: {reason}", path=path) from None
    lines = text.split("\n")
    notes = []
    if lines[-1].strip():
        notes.append(f"{path}: line {len(lines)} has no end, so the file was cut there: it is left out")
    lines = lines[:-1]
    found = _from_log(path, lines) if text.lstrip()[:1] == "{" else _from_csv(path, lines)
    if not found[1]:
        raise FormatError("holds no token", path=path)
    return TokenMetrics(path=path, columns=found[0], rows=found[1], notes=tuple(notes))


def _from_csv(path: str, lines: list[str]) -> tuple[tuple[str, ...], list[list[float | None]]]:
    names: list[str] | None = None
    rows: list[list[float | None]] = []
    for number, line in enumerate(lines, 1):
        if not line.strip() or line.startswith("#"):
            continue
        fields = next(csv.reader([line.rstrip("\r")]), [])
        if names is None:
            if "wall_ms" not in fields:
                raise FormatError("is not a metrics file: no column wall_ms", path=f"{path}:{number}")
            names = [one_line(name)[:60] for name in fields]
            continue
        if len(fields) != len(names):
            raise FormatError(
                "a row has the wrong number of fields",
                path=f"{path}:{number}",
                expected=len(names),
                got=len(fields),
            )
        if len(rows) < _MOST_TOKENS:
            rows.append([_number(text, path, number, name) for name, text in zip(names, fields, strict=True)])
    if names is None:
        raise FormatError("is not a metrics file: it has no line of column names", path=path)
    if "read_bytes" in names:
        i = names.index("read_bytes")
        names[i] = "read_mib"
        for row in rows:
            value = row[i]
            row[i] = None if value is None else value / _MIB
    return tuple(names), rows


def _number(text: str, path: str, line: int, field: str) -> float | None:
    if not text:
        return None
    try:
        value = float(text)
    except ValueError:
        # Text columns (a token's piece) are not figures.
        if field in {"piece", "text", "reasoning"}:
            return None
        raise FormatError(
            "is not a number", path=f"{path}:{line}", field=field, got=repr(one_line(text)[:40])
        ) from None
    return value if math.isfinite(value) else None


def _from_log(path: str, lines: list[str]) -> tuple[tuple[str, ...], list[list[float | None]]]:
    columns = ("token", *(name for name, _ in _FROM_LOG.values()))
    rows: list[list[float | None]] = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            record: Any = json.loads(line)
        except (ValueError, RecursionError):
            raise FormatError("is not JSON", path=f"{path}:{number}") from None
        if not isinstance(record, dict):
            raise FormatError("is not a JSON object", path=f"{path}:{number}")
        if record.get("event") != "token" or len(rows) >= _MOST_TOKENS:
            continue
        figures = record.get("metrics", record)
        figures = figures if isinstance(figures, dict) else {}
        rows.append(
            [float(len(rows)), *(_scaled(figures.get(key), by) for key, (_, by) in _FROM_LOG.items())]
        )
    # A column that nothing was measured in would only take room.
    kept = [i for i in range(len(columns)) if any(row[i] is not None for row in rows)]
    return tuple(columns[i] for i in kept), [[row[i] for i in kept] for row in rows]


def _scaled(value: object, by: float) -> float | None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        scaled = value / by
    except OverflowError:
        return None
    return scaled if math.isfinite(scaled) else None
