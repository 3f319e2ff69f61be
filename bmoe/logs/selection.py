"""The runs that words on a command line mean: out of the database, or out of log files read on the spot.

Owns which of both a word means. Must not know what is done with the runs.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Self

from bmoe.io.errors import BmoeError, FileError, UsageError
from bmoe.logs.run_data import find_run, load_run

if TYPE_CHECKING:
    from types import TracebackType

    from bmoe.logs import LogStore
    from bmoe.logs.run_data import Run


class Selection:
    """Finds runs; a context manager, which closes what it opened.

    The database is opened when a word needs it, so that files can be reported on without one.

    Args:
        db_path: The database; None for the usual place.
    """

    def __init__(self, db_path: str | None) -> None:
        self._db_path = db_path
        self._store: LogStore | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._store is not None:
            self._store.close()

    def run(self, word: str) -> Run:
        """The run that a word means; a file's name wins over the beginning of an id.

        Raises:
            UsageError: None, more than one, or a file with several.
            BmoeError: There is no database, or the file holds no run.
        """
        if os.path.isfile(word):
            return _run_of_file(word)
        if "/" in word or word.endswith((".jsonl", ".json", ".csv", ".gz", ".zst")):
            raise UsageError(f"{word}: there is no such log file")
        if self._store is None:
            from bmoe.logs import default_db_path, open_logs  # noqa: PLC0415 (imports duckdb)

            path = self._db_path or default_db_path()
            if not os.path.exists(path):
                raise FileError(
                    "there is no database of logs", path=str(path), hint="`bmoe logs ingest FILE` makes one"
                )
            self._store = open_logs(path, read_only=True)
        return load_run(self._store, find_run(self._store, word))


def _run_of_file(path: str) -> Run:
    from bmoe.logs import ingest, open_logs  # noqa: PLC0415 (imports duckdb)

    with open_logs(":memory:", read_only=False) as store:
        ingest(store, [path])
        ids = [row["run_id"] for row in store.sql("SELECT run_id FROM runs ORDER BY run_id").to_pylist()]
        if not ids:
            raise BmoeError(f"{path} holds no run")
        if len(ids) > 1:
            raise UsageError(
                f"{path} holds {len(ids)} runs", hint="ingest it with `bmoe logs ingest`, then name one"
            )
        return load_run(store, ids[0])
