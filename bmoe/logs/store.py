"""The log database: opening it, asking it, writing it out.

Owns the connection and which queries are allowed. Must not know how logs become rows.
"""

from __future__ import annotations

import os
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, Self

import duckdb

from bmoe.io.errors import BmoeError, FileError, UsageError
from bmoe.logs import tables

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from types import TracebackType

    import pyarrow as pa

_MEMORY: Final = ":memory:"
_EXPORTED: Final = (tables.RUNS, tables.STEPS, tables.LAYERS, tables.EVENTS, tables.REJECTS)
_CLOSED: Final[dict[str, str | bool | int | float | list[str]]] = {
    "enable_external_access": "false",
    "autoinstall_known_extensions": "false",
    "autoload_known_extensions": "false",
}
# Ingestion needs little memory, whatever there is of it, and is no faster with more threads (measured); fewer
# checkpoints make it faster.
_WRITING: Final = {"memory_limit": "512MiB", "wal_autocheckpoint": "128MiB", "threads": "1"}
_LOCK: Final = "lock"
_ROWS_AT_ONCE: Final = 100_000


class LogStore:
    """An open database. Made by `open_logs`; a context manager.

    Everything that returns rows returns Arrow tables: `.to_pandas()`, `.to_pylist()` and others are theirs.

    Attributes:
        path: The file.
    """

    def __init__(self, connection: duckdb.DuckDBPyConnection, path: str) -> None:
        self.path = path
        self._connection = connection

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Lets other processes have the file. Idempotent."""
        self._connection.close()

    def sql(self, query: str, params: Sequence[Any] | None = None) -> pa.Table:
        """The rows of a query.

        Args:
            query: One statement. It cannot reach other files; nor change anything in a store opened to read.
            params: For its question marks.

        Raises:
            UsageError: DuckDB does not take it.
        """
        try:
            relation = self._connection.sql(query, params=list(params) if params is not None else None)
            if relation is None:
                raise UsageError("the query is empty")
            return relation.to_arrow_table()
        except duckdb.Error as error:
            raise UsageError(_first_paragraph(error)) from None

    def runs(self, *, model: str | None = None, last: int | None = None) -> pa.Table:
        """The runs, newest first; those without a start time come last.

        Args:
            model: Only where this is part of the model's name or path, whatever the case.
            last: So many at most.
        """
        query = "SELECT * FROM runs"
        params: list[Any] = []
        if model is not None:
            query += " WHERE contains(lower(concat_ws(chr(10), model_name, model_path)), lower(?))"
            params.append(model)
        query += " ORDER BY started_at DESC NULLS LAST, run_id"
        if last is not None:
            query += " LIMIT ?"
            params.append(last)
        return self.sql(query, params)

    def steps(self, run_ids: Sequence[str]) -> pa.Table:
        """All steps of these runs, in order: run as given here, turn, prefill before decode, step."""
        return self.sql(
            "SELECT s.* FROM steps s JOIN (SELECT unnest(?) AS run_id, generate_subscripts(?, 1) AS place) r "
            "USING (run_id) ORDER BY place, turn, phase DESC, step",
            [list(run_ids), list(run_ids)],
        )

    def rejects(self) -> pa.Table:
        """What could not be read, where it is and why."""
        return self.sql("SELECT * FROM rejects ORDER BY file, line, byte_offset")

    def export_parquet(self, folder: str) -> list[str]:
        """Writes each table to a Parquet file of its name, replacing what was there.

        Args:
            folder: Made where there is none.

        Returns:
            The files.

        Raises:
            FileError: One cannot be written.
        """
        import pyarrow.parquet as pq  # noqa: PLC0415 (only an export needs it)

        written = []
        for table in _EXPORTED:
            path = os.path.join(folder, f"{table.name}.parquet")
            try:
                os.makedirs(folder, exist_ok=True)
                order = ", ".join(table.key)
                rows = self._connection.sql(f"SELECT * FROM {table.name} ORDER BY {order}")
                batches = rows.to_arrow_reader(_ROWS_AT_ONCE)
                with pq.ParquetWriter(path + ".part", batches.schema, compression="zstd") as writer:
                    for batch in batches:
                        writer.write_batch(batch)
                os.replace(path + ".part", path)
            except OSError as error:
                raise FileError(f"cannot be written: {error.strerror or error}", path=path) from None
            written.append(path)
        return written

    def fetch(self, query: str, params: Sequence[Any] | None = None) -> list[tuple[Any, ...]]:
        """Runs a statement of our own; the rows, if it has any."""
        return self._connection.execute(query, list(params) if params is not None else None).fetchall()

    @contextmanager
    def lent(self, **arrow: pa.Table) -> Iterator[None]:
        """Arrow tables under names of their own, for statements in the block."""
        for name, table in arrow.items():
            self._connection.register(name, table)
        try:
            yield
        finally:
            for name in arrow:
                self._connection.unregister(name)

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """All of the block or nothing."""
        self.fetch("BEGIN")
        try:
            yield
            self.fetch("COMMIT")
        except BaseException:
            self.fetch("ROLLBACK")
            raise


def default_db_path() -> str:
    """`bmoe/logs.duckdb` in the user's data directory."""
    base = os.environ.get("XDG_DATA_HOME", "")
    if not os.path.isabs(base):  # as the XDG specification wants it
        base = os.path.expanduser("~/.local/share")
    return os.path.join(base, "bmoe", "logs.duckdb")


def open_logs(path: str | None = None, *, read_only: bool = True) -> LogStore:
    """Opens a database.

    One process may write, or any number may read. SQL has no access to files in either case.

    Args:
        path: The file; None for `default_db_path`; ":memory:" for one that is gone afterwards.
        read_only: Whether it has to exist and stays as it is; otherwise it is made where there is none.

    Raises:
        FileError: It is not there, in use, or no database of ours.
    """
    path = default_db_path() if path is None else path
    fresh = path == _MEMORY or not os.path.exists(path)
    if fresh and read_only:
        raise FileError("there is no log database", path=path, hint="bmoe logs ingest makes one")
    try:
        if fresh and path != _MEMORY:
            os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
        config: dict[str, Any] = dict(_CLOSED) if read_only else {**_CLOSED, **_WRITING}
        connection = duckdb.connect(path, read_only=read_only, config=config)
        connection.execute("SET TimeZone = 'UTC'").fetchall()
        connection.execute("SET lock_configuration = true").fetchall()
    except (duckdb.Error, OSError) as error:
        raise _cannot_open(path, error) from None
    store = LogStore(connection, path)
    try:
        _check_format(store, path, read_only=read_only)
    except BaseException:
        store.close()
        raise
    return store


def open_if_free(path: str) -> LogStore | None:
    """As `open_logs` to write, but None while another process has the database."""
    try:
        return open_logs(path, read_only=False)
    except FileError as error:
        if error.field == _LOCK:
            return None
        raise


def _check_format(store: LogStore, path: str, *, read_only: bool) -> None:
    names = {row[0] for row in store.fetch("SELECT table_name FROM duckdb_tables()")}
    if names and "format" not in names:
        raise FileError("is a DuckDB database, but not of bmoe's logs", path=path)
    if names:
        [[version]] = store.fetch("SELECT max(version) FROM format")
        if version != tables.VERSION:
            raise FileError(
                f"the database has format {version}, this bmoe reads {tables.VERSION}",
                path=path,
                hint="ingest the logs into a new one",
            )
    elif read_only:
        raise FileError("the database is empty", path=path, hint="bmoe logs ingest fills one")
    else:
        with store.transaction():
            for statement in tables.statements():
                store.fetch(statement)


def _cannot_open(path: str, error: Exception) -> BmoeError:
    text = error.strerror or str(error) if isinstance(error, OSError) else _first_paragraph(error)
    if "lock" in text:
        return FileError(
            "another process has the database open", path=path, field=_LOCK, hint="try again later"
        )
    if "not a valid DuckDB" in text:
        return FileError("this is no DuckDB database", path=path)
    return FileError(f"the database cannot be opened: {text}", path=path)


def _first_paragraph(error: Exception) -> str:
    """DuckDB's message without the repeated query."""
    return str(error).split("\n\n")[0]
