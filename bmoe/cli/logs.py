"""`bmoe logs`: logs of any number of runs in one database.

Owns the options of what fills and asks the database, and where output goes: results to stdout, progress and
notes to stderr. Must not know how lines are read; bmoe.logs is imported only when a command runs.
"""

from __future__ import annotations

import csv
import datetime as dt
import decimal
import importlib
import json
import sys
from typing import TYPE_CHECKING, Any, Final

import click

from bmoe.cli.options import Number

if TYPE_CHECKING:
    from collections.abc import Sequence

    import pyarrow as pa

    from bmoe.logs import IngestReport

_MIB: Final = 1 << 20
_NAMED: Final = 5  # files named in a note
# In a module of their own, which imports nothing until one of them runs.
_ELSEWHERE: Final = dict.fromkeys(("show", "report", "compare"), "bmoe.cli.logs_report")


class _Group(click.Group):
    """Its own commands, and those of `_ELSEWHERE`."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted((*super().list_commands(ctx), *_ELSEWHERE))

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name in _ELSEWHERE:
            command: click.Command = getattr(importlib.import_module(_ELSEWHERE[cmd_name]), cmd_name)
            return command
        return super().get_command(ctx, cmd_name)


_db = click.option(
    "--db",
    "db_path",
    metavar="PATH",
    help="The database.  [default: bmoe/logs.duckdb in $XDG_DATA_HOME or ~/.local/share]",
)
_json = click.option("--json", "as_json", is_flag=True, help="JSON: a list of objects.")


@click.group(name="logs", cls=_Group, short_help="Bring runs' logs together, and ask them.")
def logs_group() -> None:
    """Bring the logs of any number of runs into one database, and ask it.

    Logs are what `--log-json` writes, and per-token CSVs: `--csv`, or the reference engine's.
    """


@logs_group.command(short_help="Read logs into the database.")
@click.argument("paths", metavar="FILE|DIR...", nargs=-1, required=True)
@_db
@click.option("--follow", "following", is_flag=True, help="Go on until Ctrl-C, as files are written.")
def ingest(paths: Sequence[str], *, db_path: str | None, following: bool) -> None:
    """Read what is new in log files into the database; plain, gzip or zstd.

    A run is stored once, however often it is read. What cannot be read is kept and located: see
    `bmoe logs rejects`. Ends with 1 if a file could not be read.
    """
    from bmoe.logs import default_db_path, follow, open_logs  # noqa: PLC0415 (imports duckdb)
    from bmoe.logs import ingest as read  # noqa: PLC0415 (same)

    db_path = db_path or default_db_path()
    if following:
        import threading  # noqa: PLC0415 (only to follow)

        click.echo(f"following into {db_path}; Ctrl-C ends it", err=True)
        follow(db_path, paths, report=_say_round, stop=threading.Event())
        return
    from bmoe.cli.progress import ProgressDisplay  # noqa: PLC0415 (keeps `--help` fast)

    bar = ProgressDisplay("reading logs", _megabytes, sys.stderr)
    with open_logs(db_path, read_only=False) as store:
        try:
            found = read(store, paths, progress=bar.update)
        finally:
            bar.close()
        runs, rows = store.fetch("SELECT (SELECT count(*) FROM runs), (SELECT count(*) FROM steps)")[0]
    _say_notes(found)
    click.echo(f"{_round(found)}\n{db_path}: {_count(runs, 'run')}, {_count(rows, 'step')}")
    if found.unreadable:
        click.get_current_context().exit(1)


@logs_group.command(short_help="List the runs.")
@_db
@click.option("--model", metavar="SUBSTR", help="Only where this is part of the model's name or path.")
@click.option("--last", type=Number(1, 1 << 31), help="Only so many, the newest.")
@_json
def runs(*, db_path: str | None, model: str | None, last: int | None, as_json: bool) -> None:
    """List the runs, newest first."""
    from bmoe.logs import open_logs  # noqa: PLC0415 (imports duckdb)

    with open_logs(db_path) as store:
        found = store.runs(model=model, last=last).to_pylist()
    if as_json:
        for run in found:
            run.update(
                {
                    name: _object(run[name])
                    for name in ("config", "requested", "machine", "versions", "summary")
                }
            )
        click.echo(json.dumps(found, indent=1, default=_plain))
        return
    from bmoe.cli.tables import columns, show  # noqa: PLC0415 (imports rich)
    from bmoe.present import mib  # noqa: PLC0415 (keeps `--help` fast)

    header = ("run", "started (UTC)", "model", "mode", "cache", "threads", "tokens", "tok/s", "end")
    rows = [
        (
            run["run_id"][:12],
            "" if run["started_at"] is None else f"{run['started_at']:%Y-%m-%d %H:%M:%S}",
            run["model_name"] or (run["model_path"] or "").rpartition("/")[2],
            run["mode"] or "",
            "" if run["cache_bytes"] is None else mib(run["cache_bytes"]),
            "" if run["threads"] is None else str(run["threads"]),
            str(run["n_tokens"]),
            "" if run["decode_tokens_per_s"] is None else f"{run['decode_tokens_per_s']:.2f}",
            _end(run),
        )
        for run in found
    ]
    show(columns(header, rows))


@logs_group.command(short_help="Ask the database.")
@click.argument("query")
@_db
@click.option(
    "--format",
    "form",
    type=click.Choice(["table", "csv", "json"]),
    default="table",
    show_default=True,
    help="How to show the rows.",
)
def sql(query: str, *, db_path: str | None, form: str) -> None:
    """Show the rows of QUERY, in DuckDB's SQL.

    Nothing can be changed and no other file read. The tables are runs, steps, layers, events, rejects and
    files; docs/logs.md says what is in them.
    """
    from bmoe.logs import open_logs  # noqa: PLC0415 (imports duckdb)

    with open_logs(db_path) as store:
        table = store.sql(query)
    _show(table, form)


@logs_group.command(short_help="Write the tables as Parquet.")
@click.option("--parquet", "folder", metavar="DIR", required=True, help="Where to: a file for each table.")
@_db
def export(*, folder: str, db_path: str | None) -> None:
    """Write every table to a Parquet file of its name."""
    from bmoe.logs import open_logs  # noqa: PLC0415 (imports duckdb)

    with open_logs(db_path) as store:
        for path in store.export_parquet(folder):
            click.echo(path)


@logs_group.command(short_help="Show what could not be read.")
@_db
@_json
def rejects(*, db_path: str | None, as_json: bool) -> None:
    """Show the lines that could not be read: where they are, why, and how they begin."""
    from bmoe.logs import open_logs  # noqa: PLC0415 (imports duckdb)

    with open_logs(db_path) as store:
        found = store.rejects().to_pylist()
    if as_json:
        click.echo(json.dumps(found, indent=1))
        return
    from bmoe.present import one_line  # noqa: PLC0415 (keeps `--help` fast)

    for reject in found:
        click.echo(one_line(f"{reject['file']}:{reject['line']}: {reject['reason']}: {reject['text'][:80]}"))


def _show(table: pa.Table, form: str) -> None:
    # By position: two columns of a query may have the same name.
    rows = list(zip(*(column.to_pylist() for column in table.columns), strict=True))
    if form == "json":
        objects = [dict(zip(table.column_names, row, strict=True)) for row in rows]
        click.echo(json.dumps(objects, indent=1, default=_plain))
    elif form == "csv":
        writer = csv.writer(sys.stdout, lineterminator="\n")
        writer.writerow(table.column_names)
        writer.writerows([_cell(value) for value in row] for row in rows)
    else:
        from bmoe.cli.tables import columns, show  # noqa: PLC0415 (imports rich)

        show(columns(table.column_names, [[_cell(value) for value in row] for row in rows]))


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, list | dict):
        return json.dumps(value, default=_plain)
    return str(value) if isinstance(value, str | int | float) else str(_plain(value))


def _plain(value: Any) -> Any:
    """What JSON has no word for."""
    if isinstance(value, decimal.Decimal):  # DuckDB's sums of whole numbers
        return int(value) if value == value.to_integral_value() else float(value)
    if isinstance(value, dt.datetime):
        return value.isoformat(sep=" ")
    return str(value)


def _object(text: str | None) -> Any:
    return None if text is None else json.loads(text)


def _end(run: dict[str, Any]) -> str:
    if run["exit_code"]:
        return f"exit {run['exit_code']}"
    return "" if run["complete"] else "incomplete"


def _say_round(found: IngestReport) -> None:
    _say_notes(found)
    if found.lines:
        click.echo(_round(found))


def _say_notes(found: IngestReport) -> None:
    from bmoe.present import one_line  # noqa: PLC0415 (keeps `--help` fast)

    notes = [f"error: {reason}" for _, reason in found.unreadable]
    for files, what in (
        (found.passed_over, "not read, no log by the first line; name it to read it"),
        (found.unfinished, "the last line has no end yet and is left for later"),
    ):
        notes += [f"note: {path}: {what}" for path in files[:_NAMED]]
        if len(files) > _NAMED:
            notes.append(f"note: and {len(files) - _NAMED} more such files")
    if found.rejected:
        notes.append(f"note: {_count(found.rejected, 'line')} could not be read; see bmoe logs rejects")
    for note in notes:
        click.echo(one_line(note), err=True)


def _round(found: IngestReport) -> str:
    parts = [
        f"{_count(found.lines, 'line')} of {_count(found.files, 'file')}",
        _count(found.runs, "new run"),
        f"{_count(found.duplicates, 'line')} known",
        f"{found.rejected} rejected",
    ]
    if found.unchanged:
        parts.append(f"{_count(found.unchanged, 'file')} unchanged")
    return ", ".join(parts)


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _megabytes(done: int, total: int) -> str:
    return f"{done / 1e6:.0f} of {total / 1e6:.0f} MB"
