"""Bringing log files into the database: which files, in which batches, how far.

Owns batches, what is remembered of each file, and following files that are being written. Must not know how
lines become rows (json_lines, csv_lines, batch do).

Lines of many files, or a part of a large one, make a batch, and some batches a transaction: rows, rejects and
how far their files were read are stored together or not at all. A killed ingestion is continued by the next.
"""

from __future__ import annotations

import dataclasses
import json
import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from bmoe.io.errors import FileError
from bmoe.logs.batch import FileLines, Reject, arrow_table, store_batch
from bmoe.logs.csv_lines import CsvReader, CsvSession
from bmoe.logs.sources import READ_BYTES, FileRecord, LogFile, find_files
from bmoe.logs.store import open_if_free
from bmoe.logs.tables import FILES

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Sequence

    from bmoe.logs.sources import Piece
    from bmoe.logs.store import LogStore

_BATCH_BYTES: Final = READ_BYTES // 2  # so that one piece of a large file is enough: nothing is copied
_BATCH_LINES: Final = 1 << 20
_COMMIT_BYTES: Final = 256 << 20  # a large transaction goes to the database without being logged first
_BATCH_FILES: Final = 2000
_POLL_S: Final = 0.5


@dataclass(frozen=True, kw_only=True)
class IngestReport:
    """What an ingestion did.

    Attributes:
        files: Files with something new in them.
        unchanged: Files without.
        passed_over: Files in folders that are named like logs and are none.
        unreadable: Files that could not be read, or not to their end, with the reasons.
        unfinished: Files whose last line has no end yet; it is read when it has.
        runs: Runs that are new in the database.
        lines: Lines that were read.
        duplicates: Of those, lines that the database had already.
        rejected: Of those, lines that are in `rejects` now.
        data_bytes: Unpacked bytes that were read.
    """

    files: int = 0
    unchanged: int = 0
    passed_over: tuple[str, ...] = ()
    unreadable: tuple[tuple[str, str], ...] = ()
    unfinished: tuple[str, ...] = ()
    runs: int = 0
    lines: int = 0
    duplicates: int = 0
    rejected: int = 0
    data_bytes: int = 0


def ingest(
    store: LogStore, paths: Sequence[str], *, progress: Callable[[int, int], object] = lambda *_: None
) -> IngestReport:
    """Reads what is new in log files: JSON Lines and per-token CSVs, plain, gzip or zstd.

    The same run twice is one run, whether in the same file, a copy or an archive of it.

    Args:
        store: Opened to write.
        paths: Files and folders, see `find_files`.
        progress: Told bytes done and bytes in all, of the files as they are on disk.

    Raises:
        FileError: A path does not exist. What happens later to single files is in the report instead.
    """
    return _Ingestion(store, progress).run(*find_files(paths))


def follow(
    db_path: str,
    paths: Sequence[str],
    *,
    report: Callable[[IngestReport], object],
    stop: threading.Event,
    poll_s: float = _POLL_S,
) -> None:
    """Ingests, and again whenever a file changes, until told to stop.

    The database is open only while something is stored, so that others can read it in between; while others
    do, the next poll tries again. Paths need not exist yet.

    Args:
        db_path: The database.
        paths: As for `ingest`.
        report: Told what each round did that did something.
        stop: Ends it.
        poll_s: Time between two looks at the files.
    """
    seen: dict[str, tuple[int, int, int]] = {}
    while not stop.is_set():
        files, others = find_files(paths, missing_ok=True)
        now = {path: _look(path) for path in files}
        changed = [path for path in files if now[path] != seen.get(path)]
        if changed:
            store = open_if_free(db_path)
            if store is not None:
                with store:
                    report(_Ingestion(store, lambda *_: None).run(changed, [] if seen else others))
                seen |= {path: now[path] for path in changed}
        stop.wait(poll_s)


def _look(path: str) -> tuple[int, int, int]:
    try:
        now = os.stat(path)
    except OSError:
        return (0, 0, 0)
    return (now.st_ino, now.st_size, now.st_mtime_ns)


class _Ingestion:
    """One round over some files."""

    def __init__(self, store: LogStore, progress: Callable[[int, int], object]) -> None:
        self._store = store
        self._progress = progress
        self._buffer = bytearray()
        self._pieces: list[FileLines] = []
        self._rejects: list[Reject] = []
        self._bytes = self._lines = 0  # in the batch
        self._uncommitted_bytes = 0
        self._read: dict[str, _Reading] = {}  # files with something in the batch
        self._found = IngestReport()

    def run(self, files: Sequence[str], others: Sequence[str]) -> IngestReport:
        """Reads files; the others are only named in the report."""
        self._found = IngestReport(passed_over=tuple(others))
        try:
            self._files(files)
            self._flush()
            self._commit()
        except BaseException:
            if self._uncommitted_bytes:
                self._store.fetch("ROLLBACK")
            raise
        return self._found

    def _files(self, files: Sequence[str]) -> None:
        known = _records(self._store)
        sizes = [_look(path)[1] for path in files]
        done, total = 0, sum(sizes)
        self._buffer = bytearray(min(READ_BYTES, 1 + max(sizes, default=0)))
        for path, size in zip(files, sizes, strict=True):
            before = known.get(path)
            try:
                with LogFile(path, before.record if before else None, self._buffer) as file:
                    self._file(file, before, lambda at, done=done: self._progress(done + at, total))  # type: ignore[misc]  # mypy infers no type for a default
            except FileError as error:
                self._add(unreadable=((path, str(error)),))
            done += size
            self._progress(done, total)

    def _file(self, file: LogFile, before: _Reading | None, progress: Callable[[int], object]) -> None:
        if file.unchanged:
            self._add(unchanged=1)
            return
        continued = before is not None and file.record.bytes_done > 0
        reading = before if before is not None and continued else _Reading(path=file.path, record=file.record)
        reading.again = file.again
        self._add(files=1)
        try:
            for piece in file.pieces():
                self._take(piece, reading)
                reading.record = file.record
                self._read[file.path] = reading
                if self._bytes >= _BATCH_BYTES or self._lines >= _BATCH_LINES:
                    self._flush()
                progress(file.raw_bytes)
        finally:
            reading.record = file.record
            self._read[file.path] = reading
        if not file.record.finished and file.record.packing == "plain":
            self._add(unfinished=(file.path,))
        if len(self._read) >= _BATCH_FILES:
            self._flush()

    def _take(self, piece: Piece, reading: _Reading) -> None:
        where: dict[str, Any] = {"path": reading.path, "offset_bytes": piece.offset_bytes, "line": piece.line}
        if piece.fault is None:
            # What is not stored at once has to be kept from the next read.
            data = piece.data if len(piece.data) >= _BATCH_BYTES else bytes(piece.data)
            self._pieces.append(FileLines(data=data, lines=piece.lines, csv=reading.csv, **where))
        else:
            self._rejects.append(
                Reject(
                    file=reading.path,
                    line=piece.line,
                    byte_offset=piece.offset_bytes,
                    reason=piece.fault,
                    text=bytes(piece.data),
                )
            )
        self._bytes += len(piece.data)
        self._lines += piece.lines
        self._add(data_bytes=len(piece.data) + piece.skipped_bytes)

    def _flush(self) -> None:
        """Stores the batch and how far its files were read."""
        if not self._read:
            return
        if not self._uncommitted_bytes:
            self._store.fetch("BEGIN")
        self._uncommitted_bytes += self._bytes + 1
        again = [reading.path for reading in self._read.values() if reading.again]
        if again:
            self._store.fetch("DELETE FROM rejects WHERE file IN (SELECT unnest(?))", [again])
        counts = store_batch(self._store, self._pieces, self._rejects)
        for path, reading in self._read.items():
            reading.again = False
            reading.duplicates += counts.duplicates[path]
            reading.rejected += counts.rejected[path]
        with self._store.lent(read=arrow_table(FILES, [r.row() for r in self._read.values()])):
            self._store.fetch("INSERT OR REPLACE INTO files SELECT * FROM read")
        self._add(
            runs=counts.runs,
            lines=counts.lines + len(self._rejects),
            duplicates=counts.duplicates.total(),
            rejected=counts.rejected.total(),
        )
        self._pieces, self._rejects, self._read = [], [], {}
        self._bytes = self._lines = 0
        if self._uncommitted_bytes >= _COMMIT_BYTES:
            self._commit()

    def _commit(self) -> None:
        if self._uncommitted_bytes:
            self._store.fetch("COMMIT")
            self._uncommitted_bytes = 0

    def _add(self, **more: Any) -> None:
        changes = {name: getattr(self._found, name) + value for name, value in more.items()}
        self._found = dataclasses.replace(self._found, **changes)


@dataclass(kw_only=True)
class _Reading:
    """A file on its way: a row of `files`."""

    path: str
    record: FileRecord
    csv: CsvReader = field(default_factory=CsvReader)
    duplicates: int = 0
    rejected: int = 0
    again: bool = False

    def row(self) -> dict[str, Any]:
        return {
            "file": self.path,
            **dataclasses.asdict(self.record),
            "duplicates": self.duplicates,
            "rejected": self.rejected,
            "state": json.dumps(vars(self.csv.session)),
        }


def _records(store: LogStore) -> dict[str, _Reading]:
    names = [f.name for f in dataclasses.fields(FileRecord)]
    rows = store.fetch(f"SELECT file, duplicates, rejected, state::VARCHAR, {', '.join(names)} FROM files")
    return {
        path: _Reading(
            path=path,
            record=FileRecord(**dict(zip(names, record, strict=True))),
            csv=CsvReader(CsvSession(**json.loads(state))),
            duplicates=duplicates,
            rejected=rejected,
        )
        for path, duplicates, rejected, state, *record in rows
    }
