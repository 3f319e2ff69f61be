"""Lines of per-token CSVs, the reference's v1 and v2, as rows.

Owns what a line means after the lines before it: preamble, header, row or summary. Must not know files or
what is in the database already. Columns are found by name; units become ours.

A file holds one session or several, each with one or several generations. A session has no name of its own,
so a digest of its preamble, its header and its first row is one: the same in a copy, and the same when the
file has grown.
"""

from __future__ import annotations

import hashlib
import math
import re
from dataclasses import dataclass, field
from typing import Any, Final

_MIB: Final = 1 << 20
_MS: Final = 1_000_000
_MOST: Final = (1 << 62) - 1
_MOST_PREAMBLE_LINES: Final = 64
_NUMBER: Final = re.compile(r"-?[0-9]{1,18}(?:\.[0-9]{1,18})?", re.ASCII)
_ROW: Final = re.compile(rf"\s*{_NUMBER.pattern}\s*(?:,\s*{_NUMBER.pattern}\s*)*", re.ASCII)
_PAIR: Final = re.compile(r"([^\s=]+)=(\S*)")
# Column of the file: column of the table, factor. Below 0 is unmeasured.
_FIGURES: Final = {
    "wall_ms": ("wall_ns", _MS),
    "compute_ms": ("compute_ns", _MS),
    "stall_ms": ("stall_ns", _MS),
    "mgmt_ms": ("hook_ns", _MS),
    "io_ms": ("io_ns", _MS),
    "loop_overhead_ms": ("overhead_ns", _MS),
    "cpu_ms": ("cpu_ns", _MS),
    "read_bytes": ("read_bytes", 1),
    "majflt": ("major_faults", 1),
    "cache_hit_pct": ("cache_hit_ratio_cumulative", 0.01),
    "dense_resident_frac": ("dense_resident", 1.0),
    "cache_budget_mib": ("cache_budget_bytes", _MIB),
    "rss_mib": ("rss_bytes", _MIB),
    "rss_anon_mib": ("rss_anon_bytes", _MIB),
    "rss_file_mib": ("rss_file_bytes", _MIB),
    "swap_mib": ("swap_bytes", _MIB),
    "mem_available_mib": ("mem_available_bytes", _MIB),
    "mem_free_mib": ("mem_free_bytes", _MIB),
    "swap_free_mib": ("swap_free_bytes", _MIB),
}
_RATIOS: Final = ("cache_hit_ratio_cumulative", "dense_resident")
_NEEDED: Final = ("step", "wall_ms")


@dataclass(kw_only=True)
class CsvSession:
    """What the next line belongs to; `vars` of it is JSON, and makes it anew.

    Attributes:
        preamble: The `#` lines before the header.
        header: Its columns; None before it.
        run_id: None before the first row.
        version: The preamble's.
        turn: Of the last row.
        last_step: Likewise, from 1 as the file has it.
        summed_up: The generation has its summary.
    """

    preamble: list[str] = field(default_factory=list)
    header: list[str] | None = None
    run_id: str | None = None
    version: int = 1
    turn: int = 0
    last_step: int = 0
    summed_up: bool = False


@dataclass(frozen=True, kw_only=True)
class CsvRow:
    """A row of `steps`."""

    values: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class CsvSummary:
    """A `# summary` line."""

    run_id: str
    turn: int
    body: dict[str, Any]


class CsvReader:
    """Reads the lines of one file in order.

    Args:
        session: Where the file was left.

    Attributes:
        session: Where it is now.
    """

    def __init__(self, session: CsvSession | None = None) -> None:
        self.session = CsvSession() if session is None else session
        self._learn()

    def line(self, text: str) -> CsvRow | CsvSummary | str | None:
        """What a line says: a row, a summary, None for what tells about other lines only, or what is wrong."""
        text = text.strip()
        if text.startswith("#"):
            return self._comment(text)
        if text.startswith("step,"):
            return self._header(text)
        if self.session.header is None:
            return "neither a JSON object nor a line of a per-token CSV"
        return self._row(text)

    def start(self) -> dict[str, Any]:
        """What the preamble says about the session, as columns of `runs`; of a session with a run id."""
        pairs: dict[str, Any] = {}
        for line in self.session.preamble:
            pairs.update(_pairs(line))
        cache_mib, stream = _whole(pairs.get("cache_mb")), _whole(pairs.get("moe_stream"))
        version = self.session.version
        return {
            "run_id": self.session.run_id,
            "source": "csv-v1" if version == 1 else "bmoe-csv",
            "schema": version,
            "model_path": _text(pairs.get("model")),
            "architecture": _text(pairs.get("arch")),
            "mode": None if stream is None else "streaming" if stream else "resident",
            "cache_bytes": cache_mib * _MIB if cache_mib and stream else None,
            "threads": _whole(pairs.get("threads")),
            "context_tokens": _whole(pairs.get("n_ctx")),
            "ubatch_tokens": _whole(pairs.get("n_ubatch")),
            "overlap": _flag(pairs.get("overlap")) if stream else None,
            "traced": _flag(pairs.get("compute_trace_layers")),
            "config": pairs,
        }

    def _comment(self, text: str) -> CsvSummary | str | None:
        session = self.session
        words = text[1:].split()
        if words[:1] == ["summary"]:
            if session.run_id is None:
                return "a summary without rows before it"
            body = _pairs(text)
            if session.summed_up:
                if body.get("tokens") != 0:
                    return "a second summary of the same generation"
                session.turn += 1
            session.summed_up = True
            return CsvSummary(run_id=session.run_id, turn=session.turn, body=body)
        if words[:1] == ["bmoe_metrics"]:
            version = words[1] if len(words) > 1 else ""
            if version not in {"v1", "v2"}:
                self.session = CsvSession()
                return f"bmoe_metrics {version[:20]} is unknown; known are v1 and v2"
            self.session = CsvSession(preamble=[text], version=int(version[1:]))
            return None
        if not _PAIR.search(text):
            return "neither a JSON object nor a line of a per-token CSV"
        if session.header is not None:  # a session without a version line begins
            session = self.session = CsvSession()
        if len(session.preamble) == _MOST_PREAMBLE_LINES:
            return f"a preamble of more than {_MOST_PREAMBLE_LINES} lines"
        session.preamble.append(text)
        return None

    def _header(self, text: str) -> str | None:
        columns = [name.strip() for name in text.split(",")]
        if self.session.header is not None:
            self.session = CsvSession()
        if missing := [name for name in _NEEDED if name not in columns]:
            return f"a header without {' and '.join(missing)}: this is no per-token CSV"
        if len(set(columns)) != len(columns):
            return "a header with the same column twice"
        self.session.header = columns
        self._learn()
        return None

    def _learn(self) -> None:
        """What rows have to be read by."""
        pairs = {name: value for line in self.session.preamble for name, value in _PAIR.findall(line)}
        self._resident = pairs.get("moe_stream") == "0"
        self._serial = pairs.get("overlap") == "0"
        header = self.session.header or []
        self._places = [
            (header.index(name), column, factor)
            for name, (column, factor) in _FIGURES.items()
            if name in header
        ]
        self._step_place = header.index("step") if header else 0
        self._turn_place = header.index("turn") if "turn" in header else None

    def _row(self, text: str) -> CsvRow | str:
        session = self.session
        assert session.header is not None
        cells = text.split(",")
        if len(cells) != len(session.header):
            return f"the header has {len(session.header)} columns, the line {len(cells)}"
        if not _ROW.fullmatch(text):
            bad = next(cell for cell in cells if not _NUMBER.fullmatch(cell.strip()))
            return f"{bad[:40]!r} is no number"
        step = _index(cells[self._step_place])
        turn = 0 if self._turn_place is None else _index(cells[self._turn_place])
        if step is None or step < 1 or turn is None:
            return "step or turn is no number of its kind"
        if self._turn_place is None:  # a generation begins where the last one ended or steps begin anew
            turn = session.turn + (session.summed_up or step <= session.last_step)
        figures = self._figures(cells)
        if figures is None:
            return "a number is too large"
        if session.run_id is None:
            first = "\n".join((*session.preamble, ",".join(session.header), text))
            session.run_id = hashlib.sha256(first.encode()).hexdigest()[:32]
        session.summed_up = session.summed_up and turn == session.turn
        session.turn, session.last_step = turn, step
        place = {"run_id": session.run_id, "turn": turn, "phase": "decode", "step": step - 1, "tokens": 1}
        return CsvRow(values={**place, **figures})

    def _figures(self, cells: list[str]) -> dict[str, Any] | None:
        """The row's columns; None if one does not fit."""
        found: dict[str, Any] = {}
        for place, column, factor in self._places:
            value = float(cells[place]) * factor
            if value > _MOST:
                return None
            if value >= 0:
                found[column] = value if column in _RATIOS else round(value)
        # What a token that took time cannot have had none of was not measured.
        if found.get("wall_ns") and found.get("cpu_ns") == 0:  # getrusage, which counts faults too
            found["cpu_ns"] = None
            found["major_faults"] = found.get("major_faults") or None
        if found.get("rss_bytes") == 0:
            found |= dict.fromkeys(("rss_bytes", "rss_anon_bytes", "rss_file_bytes", "swap_bytes"))
        if self._resident:
            found |= dict.fromkeys(("stall_ns", "hook_ns", "io_ns", "read_bytes", "cache_budget_bytes"))
        elif self._serial and not found.get("stall_ns"):
            found["stall_ns"] = found.get("io_ns")  # serial: all of compute waits, the file calls that io
        return found


def _pairs(text: str) -> dict[str, Any]:
    return {name: _value(value) for name, value in _PAIR.findall(text)}


def _value(text: str) -> Any:
    try:
        number = float(text) if _NUMBER.fullmatch(text) else math.nan
    except ValueError:
        return text
    return text if math.isnan(number) else int(text) if "." not in text else number


def _index(text: str) -> int | None:
    """A number of a 32-bit column."""
    text = text.strip()
    return int(text) if text.isdecimal() and len(text) < 10 else None


def _whole(value: Any) -> int | None:
    return value if isinstance(value, int) and 0 <= value < 1 << 31 else None


def _text(value: Any) -> str | None:
    return None if value is None else str(value)


def _flag(value: Any) -> bool | None:
    return None if value is None else value not in {0, "0", "off", "none"}
