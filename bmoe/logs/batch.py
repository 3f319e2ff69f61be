"""A batch of lines on its way into the database: read, told apart, compared with what is there, stored.

Owns which lines are the same, and what `runs` says. Must not know files beyond their names, nor when a
transaction ends.

Two lines are the same when the key of their table is (tables.py). The first one stays. A later one that says
the same is a duplicate and counted; one that says something else is a reject.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pyarrow as pa

from bmoe.logs import json_lines
from bmoe.logs.csv_lines import CsvReader, CsvRow, CsvSummary
from bmoe.logs.sources import KEPT_CHARS, MAX_LINE_BYTES, TOO_LONG
from bmoe.logs.tables import EVENTS, REJECTS, RUNS, STEPS, Table

if TYPE_CHECKING:
    import datetime as dt
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray

    from bmoe.logs.store import LogStore

_TYPES: Final = {
    "VARCHAR": pa.string(),
    "JSON": pa.string(),
    "INTEGER": pa.int32(),
    "BIGINT": pa.int64(),
    "DOUBLE": pa.float64(),
    "BOOLEAN": pa.bool_(),
    "TIMESTAMPTZ": pa.timestamp("us", tz="UTC"),
}
_LINE_END: Final = ord("\n")
_OBJECT: Final = ord("{")
_HEAD_BYTES: Final = 100
_KEPT_ROWS: Final = 50_000  # in lists, which take ten times the memory of tables
_BLOCK_BYTES: Final = 1 << 18
_NOT_FOR_DUCKDB: Final = "not JSON, by DuckDB's parser"
_DIFFERS: Final = "another line says something else about the same"


@dataclass(frozen=True, kw_only=True)
class FileLines:
    """Whole lines of one file.

    Attributes:
        path: The file.
        data: The lines; the last one may lack its line feed.
        lines: How many line feeds.
        offset_bytes, line: Of the first of them.
        csv: The file's reader, the same for all of its lines in their order.
    """

    path: str
    data: bytes | memoryview
    lines: int
    offset_bytes: int
    line: int
    csv: CsvReader


@dataclass(frozen=True, kw_only=True)
class Reject:
    """A row of `rejects`."""

    file: str
    line: int
    byte_offset: int
    reason: str
    text: bytes


@dataclass(kw_only=True)
class Counts:
    """What became of a batch.

    Attributes:
        lines: Lines that were not blank, in all.
        runs: New ones.
        duplicates, rejected: Lines of each file.
    """

    lines: int = 0
    runs: int = 0
    duplicates: Counter[str] = field(default_factory=Counter)
    rejected: Counter[str] = field(default_factory=Counter)


def store_batch(store: LogStore, pieces: Sequence[FileLines], rejects: Iterable[Reject] = ()) -> Counts:
    """Stores lines.

    Args:
        store: Within a transaction.
        pieces: Those of one file in their order.
        rejects: What is known to be no lines.
    """
    return _Batch(store, _Lines(pieces), list(rejects)).run()


def arrow_table(table: Table, rows: Sequence[dict[str, Any]], *extra: tuple[str, pa.DataType]) -> pa.Table:
    """Rows for a table, in Arrow; a column that a row does not have is NULL."""
    types = [*extra, *((column.name, _TYPES[column.type.split(" ")[0]]) for column in table.columns)]
    return pa.table({name: pa.array([row.get(name) for row in rows], type_) for name, type_ in types})


class _Lines:
    """The lines of all pieces, numbered through: `i` everywhere below.

    Attributes:
        data: All bytes; every line ends with a line feed.
        starts, ends: [lines] of each in `data`, the line feed left out.
        piece: [lines] which of `pieces` it is of.
        first: [pieces] the first line of each.
    """

    def __init__(self, pieces: Sequence[FileLines]) -> None:
        self.pieces = pieces
        counts = []
        parts: list[bytes | memoryview] = []
        for piece in pieces:
            open_end = piece.data[-1] != _LINE_END
            counts.append(piece.lines + open_end)
            parts += (piece.data, b"\n") if open_end else (piece.data,)
        self.data = memoryview(parts[0] if len(parts) == 1 else b"".join(parts))
        self._bytes = np.frombuffer(self.data, np.uint8)
        self.ends = _line_ends(self._bytes)
        self.starts = np.concatenate((np.zeros(min(1, len(self.ends)), np.int64), self.ends[:-1] + 1))
        self.first = np.concatenate((np.zeros(1, np.int64), np.cumsum(counts, dtype=np.int64)))
        self.piece = np.repeat(np.arange(len(pieces)), counts)

    def __len__(self) -> int:
        return len(self.ends)

    def text(self, i: int) -> bytes:
        """A line without its end."""
        return bytes(self.data[self.starts[i] : self.ends[i]])

    def of(self, i: int) -> FileLines:
        """The piece that a line is of."""
        found: FileLines = self.pieces[self.piece[i]]
        return found

    def reject(self, i: int, reason: str) -> Reject:
        """A line as a row of `rejects`."""
        piece, first = self.of(i), self.first[self.piece[i]]
        return Reject(
            file=piece.path,
            line=piece.line + int(i - first),
            byte_offset=piece.offset_bytes + int(self.starts[i] - self.starts[first]),
            reason=reason,
            text=self.text(i)[: 4 * KEPT_CHARS],
        )

    def plain_objects(self) -> NDArray[np.bool_]:
        """[lines] which begin like JSON objects and are ASCII: all that DuckDB is given unchecked."""
        found: NDArray[np.bool_] = self._bytes[self.starts] == _OBJECT
        if self._bytes.max() >= 128:
            found[np.searchsorted(self.ends, np.flatnonzero(self._bytes >= 128))] = False
        return found

    def table(self, chosen: NDArray[np.bool_]) -> pa.Table:
        """(i, text) of some lines."""
        offsets = np.concatenate((self.starts, [len(self.data)])).astype(np.int32)
        buffers = [None, pa.py_buffer(offsets), pa.py_buffer(self.data)]
        table = pa.table(
            {
                "i": np.arange(len(self), dtype=np.int32),
                "text": pa.Array.from_buffers(pa.utf8(), len(self), buffers),
            }
        )
        return table if chosen.all() else table.filter(pa.array(chosen))


def _line_ends(data: NDArray[np.uint8]) -> NDArray[np.int64]:
    """Where the line feeds are. In blocks that fit into a CPU's cache, which takes half the time."""
    blocks = range(0, len(data), _BLOCK_BYTES)
    ends = [np.flatnonzero(data[at : at + _BLOCK_BYTES] == _LINE_END) + at for at in blocks]
    return np.concatenate(ends) if ends else np.zeros(0, np.int64)


class _Batch:
    """One batch on its way. Temporary tables: staged, layer_lines, checked, touched, known, fresh."""

    def __init__(self, store: LogStore, lines: _Lines, rejects: list[Reject]) -> None:
        self._store = store
        self._lines = lines
        self._rejects = rejects
        self._counts = Counts(lines=0)
        self._events: list[dict[str, Any]] = []
        self._rows: list[dict[str, Any]] = []
        self._starts: dict[str, dict[str, Any]] = {}  # by run, what is known of it from other than its rows
        self._ends: dict[str, int] = {}

    def run(self) -> Counts:
        if len(self._lines):
            self._read()
            self._store_rows()
        self._store_rejects()
        return self._counts

    def _read(self) -> None:
        """Fills `staged`, `layer_lines` and the lists."""
        lines = self._lines
        short = lines.ends - lines.starts <= MAX_LINE_BYTES
        rest = lines.plain_objects() & short
        self._sql(f"CREATE OR REPLACE TEMP TABLE layer_lines ({json_lines.LAYER_LINES})")
        with self._store.lent(lines=lines.table(rest)):
            self._sql(f"CREATE OR REPLACE TEMP TABLE staged AS {json_lines.fast_steps_sql('lines', 2)}")
        rest[self._column("SELECT i FROM staged")] = False
        # Planning a query that finds nothing takes as long as reading a megabyte.
        if self._any_has(b'"schema":1,', rest):
            with self._store.lent(lines=lines.table(rest)):
                self._sql(f"INSERT INTO staged {json_lines.fast_steps_sql('lines', 1)}")
        if self._any_has(b'"event":"layer"', rest):
            with self._store.lent(lines=lines.table(rest)):
                self._sql(f"INSERT INTO layer_lines {json_lines.fast_layers_sql('lines')}")
        done = self._column("SELECT i FROM staged UNION ALL SELECT i FROM layer_lines")
        self._counts.lines += len(done)
        rest = lines.ends > lines.starts
        rest[done] = False
        self._read_one_by_one(rest, short)

    def _store_csv_rows(self) -> None:
        if self._rows:
            with self._store.lent(csv_rows=arrow_table(STEPS, self._rows, ("i", pa.int32()))):
                self._sql("INSERT INTO staged BY NAME SELECT * FROM csv_rows")
            self._rows = []

    def _read_one_by_one(self, rest: NDArray[np.bool_], short: NDArray[np.bool_]) -> None:
        """Reads what is left, and gives DuckDB what it should have taken."""
        good = np.zeros(len(rest), bool)
        for i in np.flatnonzero(rest).tolist():
            if not short[i]:
                self._reject(i, TOO_LONG)
            elif not (text := self._lines.text(i).strip()):
                continue
            else:
                good[i] = self._read_json(i, text) if text.startswith(b"{") else self._read_csv(i, text)
            self._counts.lines += 1
            if len(self._rows) + len(self._rejects) >= _KEPT_ROWS:
                self._store_csv_rows()
                self._store_rejects()
        self._store_csv_rows()
        if not good.any():
            self._sql(
                "CREATE OR REPLACE TEMP TABLE checked (i INTEGER, j STRUCT(run_id VARCHAR, schema INTEGER))"
            )
            return
        with self._store.lent(lines=self._lines.table(good)):
            self._sql(f"CREATE OR REPLACE TEMP TABLE checked AS {json_lines.checked_sql('lines')}")
        self._sql(f"INSERT INTO staged {json_lines.checked_steps_sql('checked')}")
        self._sql(f"INSERT INTO layer_lines {json_lines.checked_layers_sql('checked')}")
        for i in self._column("SELECT i FROM checked WHERE j IS NULL").tolist():
            self._reject(i, _NOT_FOR_DUCKDB)

    def _any_has(self, what: bytes, among: NDArray[np.bool_]) -> bool:
        """Whether any of these lines has it near its beginning."""
        starts, data = self._lines.starts[among].tolist(), self._lines.data
        return any(what in bytes(data[start : start + _HEAD_BYTES]) for start in starts)

    def _read_json(self, i: int, text: bytes) -> bool:
        """Whether a line is one for DuckDB after all."""
        line = json_lines.parse(text)
        if isinstance(line, str):
            self._reject(i, line)
            return False
        if line["event"] in json_lines.ROW_EVENTS:
            return True
        event = {name: line[name] for name in ("run_id", "seq", "event", "mono_ns", "schema")}
        event |= {"i": i, "time": json_lines.time_of(line["time"]), "body": text.decode()}
        # Only what is needed of the object is kept: there may be many.
        if line["event"] == "run_start":
            event["columns"] = _as_text(_run_columns(line, event["time"]))
        elif line["event"] == "run_end":
            event["exit_code"] = line["exit_code"]
        self._events.append(event)
        return False

    def _read_csv(self, i: int, text: bytes) -> bool:
        try:
            reader = self._lines.of(i).csv
            found = reader.line(text.decode())
        except UnicodeDecodeError:
            found = "not UTF-8"
        if isinstance(found, str):
            self._reject(i, found)
        elif isinstance(found, CsvRow):
            self._rows.append({"i": i, **found.values})
            run_id = found.values["run_id"]
            if run_id not in self._starts:
                self._starts[run_id] = _as_text(reader.start())
        elif isinstance(found, CsvSummary):
            event = {"run_id": found.run_id, "seq": found.turn, "event": "summary"}
            self._events.append({"i": i, **event, "body": json.dumps(found.body)})
            self._starts.setdefault(found.run_id, _as_text(reader.start()))
        return False

    def _reject(self, i: int, reason: str) -> None:
        self._rejects.append(self._lines.reject(i, reason))

    def _store_rows(self) -> None:
        with self._store.lent(event_rows=self._event_rows()):
            self._store_runs()
            self._store_steps()
            self._store_layers()
            self._store_events()
        self._sum_up()

    def _event_rows(self) -> pa.Table:
        rows = arrow_table(EVENTS, self._events, ("i", pa.int32()), ("schema", pa.int32()))
        with self._store.lent(event_rows=rows):
            wrong = set(self._column("SELECT i FROM event_rows WHERE NOT json_valid(body)").tolist())
        if wrong:
            for i in sorted(wrong):
                self._reject(i, _NOT_FOR_DUCKDB)
            self._events = [event for event in self._events if event["i"] not in wrong]
            return self._event_rows()
        return rows

    def _store_runs(self) -> None:
        """Makes `known`, the runs of this batch that were there before it, and the others' rows of `runs`."""
        self._sql(
            "CREATE OR REPLACE TEMP TABLE touched AS "
            "SELECT run_id, min(i) AS i, arg_min(schema, i) AS schema FROM (SELECT run_id, i, schema FROM staged "
            "UNION ALL SELECT run_id, i, schema FROM layer_lines UNION ALL SELECT j.run_id, i, j.schema FROM checked WHERE j IS NOT NULL "
            "UNION ALL SELECT run_id, i, schema FROM event_rows) GROUP BY run_id"
        )
        self._sql(
            "CREATE OR REPLACE TEMP TABLE known AS SELECT run_id FROM touched SEMI JOIN runs USING (run_id)"
        )
        fresh = self._sql("SELECT run_id, i, schema FROM touched ANTI JOIN known USING (run_id) ORDER BY i")
        rows = [
            {
                "run_id": run_id,
                "source": "bmoe-json",
                "file": self._lines.of(i).path,
                "schema": schema,
                "complete": False,
                "n_tokens": 0,
                "decode_ns": 0,
                **self._starts.get(run_id, {}),
            }
            for run_id, i, schema in fresh
        ]
        self._counts.runs += len(rows)
        if rows:
            with self._store.lent(new_runs=arrow_table(RUNS, rows)):
                self._sql("INSERT INTO runs SELECT * FROM new_runs")

    def _store_steps(self) -> None:
        key = ", ".join(STEPS.key)
        self._find_fresh(f"SELECT min(rowid) AS r, {key} FROM staged GROUP BY {key}", "steps", key)
        self._sql(
            f"INSERT INTO steps SELECT {', '.join(STEPS.names)} FROM staged "
            "WHERE rowid IN (SELECT r FROM fresh)"
        )
        self._sql(
            "UPDATE runs SET n_tokens = n_tokens + n, decode_ns = decode_ns + ns, "
            "decode_tokens_per_s = (n_tokens + n) * 1e9 / nullif(decode_ns + ns, 0) FROM (SELECT run_id, "
            "count(*)::INTEGER AS n, sum(wall_ns)::BIGINT AS ns FROM staged WHERE phase = 'decode' "
            "AND rowid IN (SELECT r FROM fresh) GROUP BY run_id) a WHERE runs.run_id = a.run_id"
        )
        stale = "FROM staged s WHERE rowid NOT IN (SELECT r FROM fresh)"
        self._count_stale(
            f"SELECT DISTINCT i {stale}",
            f"SELECT DISTINCT s.i FROM (SELECT * {stale}) s JOIN steps t USING ({key}) "
            "WHERE s.mono_ns IS DISTINCT FROM t.mono_ns OR s.wall_ns != t.wall_ns",
        )

    def _store_layers(self) -> None:
        if not self._sql("SELECT 1 FROM layer_lines LIMIT 1"):
            return
        key = "run_id, turn, step"
        self._find_fresh(f"SELECT min(i) AS r, {key} FROM layer_lines GROUP BY {key}", "layers", key)
        fresh = "(SELECT * FROM layer_lines WHERE i IN (SELECT r FROM fresh))"
        self._sql(f"INSERT INTO layers {json_lines.layers_sql(fresh)}")
        self._count_stale("SELECT i FROM layer_lines WHERE i NOT IN (SELECT r FROM fresh)")

    def _store_events(self) -> None:
        if not self._events:
            return
        key = ", ".join(EVENTS.key)
        self._find_fresh(f"SELECT min(i) AS r, {key} FROM event_rows GROUP BY {key}", "events", key)
        self._sql(
            f"INSERT INTO events SELECT {', '.join(EVENTS.names)} FROM event_rows "
            "WHERE i IN (SELECT r FROM fresh)"
        )
        stale = "FROM event_rows WHERE i NOT IN (SELECT r FROM fresh)"
        self._count_stale(
            f"SELECT i {stale}",
            f"SELECT s.i FROM (SELECT * {stale}) s JOIN events t USING ({key}) WHERE s.body != t.body",
        )
        fresh = set(self._column("SELECT r FROM fresh").tolist())
        for event in self._events:
            if event["i"] in fresh and event["event"] == "run_start":
                self._starts[event["run_id"]] = event["columns"]
            elif event["i"] in fresh and event["event"] == "run_end":
                self._ends[event["run_id"]] = event["exit_code"]

    def _sum_up(self) -> None:
        """What `runs` says that only all lines of the run together tell."""
        starts = [
            {"run_id": run_id, **start} for run_id, start in self._starts.items() if "started_at" in start
        ]
        if starts:
            with self._store.lent(new_runs=arrow_table(RUNS, starts)):
                values = ", ".join(f"{name} = n.{name}" for name in _START_COLUMNS)
                self._sql(f"UPDATE runs SET {values} FROM new_runs n WHERE runs.run_id = n.run_id")
        if self._ends:
            ends = [{"run_id": run_id, "exit_code": code} for run_id, code in self._ends.items()]
            with self._store.lent(new_runs=arrow_table(RUNS, ends)):
                self._sql(
                    "UPDATE runs SET exit_code = n.exit_code, complete = true FROM new_runs n "
                    "WHERE runs.run_id = n.run_id"
                )
        if self._events:
            self._sql(
                "UPDATE runs SET summary = CASE source WHEN 'bmoe-json' THEN body->'summary' ELSE body END "
                "FROM (SELECT run_id, arg_max(body, seq) AS body FROM events SEMI JOIN touched USING (run_id) "
                "WHERE event = 'summary' GROUP BY run_id) e WHERE runs.run_id = e.run_id"
            )
        if any("started_at" not in start for start in self._starts.values()):  # CSVs
            self._sql(
                "UPDATE runs SET complete = (last = summed_up) FROM "
                "(SELECT run_id, max(seq) AS summed_up FROM events SEMI JOIN touched USING (run_id) "
                "GROUP BY run_id) JOIN (SELECT run_id, max(turn) AS last FROM steps SEMI JOIN touched USING (run_id) GROUP BY run_id) s USING (run_id) "
                "WHERE runs.run_id = s.run_id AND source != 'bmoe-json'"
            )

    def _store_rejects(self) -> None:
        if not self._rejects:
            return
        rows = [
            {
                "file": reject.file,
                "line": reject.line,
                "byte_offset": reject.byte_offset,
                "reason": reject.reason,
                "text": reject.text.decode("utf-8", "backslashreplace")[:KEPT_CHARS],
            }
            for reject in self._rejects
        ]
        with self._store.lent(new_rejects=arrow_table(REJECTS, rows)):
            key = ", ".join(REJECTS.key)
            self._sql(f"INSERT INTO rejects SELECT * FROM new_rejects ANTI JOIN rejects USING ({key})")
        self._counts.rejected.update(reject.file for reject in self._rejects)
        self._rejects = []

    def _find_fresh(self, query: str, table: str, key: str) -> None:
        """Makes `fresh`: the first row `r` for every key in the batch that the table does not have."""
        self._sql(f"CREATE OR REPLACE TEMP TABLE fresh AS {query}")
        if self._sql("SELECT 1 FROM known LIMIT 1"):
            there = f"SELECT {key} FROM {table} SEMI JOIN known USING (run_id)"
            self._sql(f"DELETE FROM fresh WHERE ({key}) IN ({there})")

    def _count_stale(self, stale: str, different: str | None = None) -> None:
        """Counts the lines that are not fresh, and rejects those that are not the same either."""
        lines = set(self._column(stale).tolist())
        if lines and different is not None:
            wrong = set(self._column(different).tolist())
            for i in sorted(wrong):
                self._reject(i, _DIFFERS)
            lines -= wrong
        self._counts.duplicates.update(self._lines.of(i).path for i in lines)

    def _sql(self, query: str) -> list[tuple[Any, ...]]:
        return self._store.fetch(query)

    def _column(self, query: str) -> NDArray[np.int64]:
        return np.asarray(self._store.sql(query).column(0), np.int64)


# Columns of `runs` that are fields of `effective` by the same name.
_EFFECTIVE: Final = {
    "model_name": str,
    "model_path": str,
    "architecture": str,
    "mode": str,
    "io_backend": str,
    "policy": str,
    "cache_bytes": int,
    "threads": int,
    "context_tokens": int,
    "ubatch_tokens": int,
    "overlap": bool,
}
_OBJECTS: Final = ("config", "requested", "machine", "versions")
_START_COLUMNS: Final = ("started_at", "traced", "prompt_sha256", *_EFFECTIVE, *_OBJECTS)


def _run_columns(line: dict[str, Any], time: dt.datetime | None) -> dict[str, Any]:
    """What a run_start tells `runs`."""
    effective, prompt = line.get("effective"), line.get("prompt")
    config = effective or {}
    digest = prompt.get("sha256") if isinstance(prompt, dict) else None
    return {
        "started_at": time,
        "traced": config["traced"] not in {None, False} if "traced" in config else None,
        "prompt_sha256": digest if isinstance(digest, str) else None,
        "config": effective,
        **{name: line.get(name) for name in _OBJECTS[1:]},
        **{
            name: value
            for name, type_ in _EFFECTIVE.items()
            if type(value := config.get(name)) is type_ and (not isinstance(value, int) or _fits(name, value))
        },
    }


def _fits(column: str, value: Any) -> bool:
    return bool(abs(value) < (1 << 63 if column.endswith("_bytes") else 1 << 31))


def _as_text(columns: dict[str, Any]) -> dict[str, Any]:
    """Objects as JSON."""
    objects = {name: json.dumps(value) for name in _OBJECTS if (value := columns.get(name)) is not None}
    return {**columns, **objects}
