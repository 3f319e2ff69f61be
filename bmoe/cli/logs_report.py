"""`bmoe logs show`, `report` and `compare`: what one run did, and several against one another.

Owns options, which run a word means on a command line, and the layout on a terminal. Must not compute
anything; bmoe.logs is imported only when a command runs.
"""

from __future__ import annotations

import dataclasses
import json
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

import click

from bmoe.cli.options import Number

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from bmoe.logs.run_data import Run
    from bmoe.logs.words import Table

_LINES: Final = 12  # of a table over time
_db = click.option("--db", "db_path", metavar="PATH", help="The database of `bmoe logs ingest`.")
_json = click.option("--json", "as_json", is_flag=True, help="One JSON object instead of tables.")
_run = click.argument("word", metavar="RUN")


@click.command(short_help="Show what a run was: configuration, machine, summary.")
@_run
@_db
@_json
def show(word: str, *, db_path: str | None, as_json: bool) -> None:
    """Show what RUN was.

    RUN is a run id, the beginning of one, last, last~N for the N-th before the last, or a log file, which
    is read without the database.
    """
    from bmoe.logs import words  # noqa: PLC0415 (keeps `--help` fast)

    with _runs([word], db_path) as [run]:
        if as_json:
            click.echo(json.dumps(_shown(run), indent=1, allow_nan=False))
            return
        _tables([words.about_run(run)], words.run_tables(run))


@click.command(short_help="Report where a run's time went, and what was odd.")
@_run
@_db
@_json
@click.option("--html", "html_path", metavar="PATH", help="Also write a page with plots: one file.")
@click.option("--png", "png_folder", metavar="DIR", help="Also write the plots as PNG (needs matplotlib).")
def report(
    word: str, *, db_path: str | None, as_json: bool, html_path: str | None, png_folder: str | None
) -> None:
    """Report on RUN: speed, where the time went, cache, memory, warm-up, anomalies.

    RUN is as for `bmoe logs show`.
    """
    from bmoe.logs import words  # noqa: PLC0415 (keeps `--help` fast)
    from bmoe.logs.figures import report_plots  # noqa: PLC0415 (same)
    from bmoe.logs.report import as_record, windows  # noqa: PLC0415 (same)
    from bmoe.logs.report import report as make  # noqa: PLC0415 (same)

    with _runs([word], db_path) as [run]:
        found = make(run)
        if html_path is not None:
            from bmoe.logs.html_report import report_page  # noqa: PLC0415 (only for a page)

            _write(html_path, report_page(run, found), run)
        if png_folder is not None:
            _draw(report_plots(run), png_folder)
        if as_json:
            click.echo(json.dumps(as_record(found), indent=1, allow_nan=False))
            return
        fewer = windows(run.decode, -(-run.decode.count // _LINES))
        lines = [words.about_run(run), *(f"note: {anomaly.text}" for anomaly in found.anomalies)]
        _tables(lines, words.report_tables(dataclasses.replace(found, windows=fewer)))


@click.command(short_help="Compare runs with the first one: settings, then differences.")
@click.argument("runs_asked", metavar="A B [C]...", nargs=-1, required=True)
@_db
@_json
@click.option("--html", "html_path", metavar="PATH", help="Also write a page with plots: one file.")
@click.option("--png", "png_folder", metavar="DIR", help="Also write the plots as PNG (needs matplotlib).")
@click.option(
    "--skip",
    "skip_tokens",
    type=Number(0, 1_000_000_000),
    default=0,
    show_default=True,
    help="Leave out each run's first tokens, while its cache warms.",
)
def compare(
    runs_asked: Sequence[str],
    *,
    db_path: str | None,
    as_json: bool,
    html_path: str | None,
    png_folder: str | None,
    skip_tokens: int,
) -> None:
    """Compare B, C, ... with A: what was set differently, then what came out differently.

    Each is as for `bmoe logs show`. Intervals are bootstrapped over tokens, paired where prompt and tokens
    agree. A difference is called one when its 95 % interval leaves "equal" out.
    """
    from bmoe.logs import words  # noqa: PLC0415 (keeps `--help` fast)
    from bmoe.logs.compare import as_record  # noqa: PLC0415 (same)
    from bmoe.logs.compare import compare as make  # noqa: PLC0415 (same)
    from bmoe.logs.figures import comparison_plots  # noqa: PLC0415 (same)

    with _runs(runs_asked, db_path) as runs:
        found = make(runs, skip_tokens=skip_tokens)
        if html_path is not None:
            from bmoe.logs.html_report import comparison_page  # noqa: PLC0415 (only for a page)

            _write(html_path, comparison_page(runs, found), *runs)
        if png_folder is not None:
            _draw(comparison_plots(runs, found), png_folder)
        if as_json:
            click.echo(json.dumps(as_record(found), indent=1, allow_nan=False))
            return
        heads = [pair.headline for pair in found.pairs]
        _tables(
            [*words.lettered(runs), "", *heads, *(f"note: {note}" for note in found.notes)],
            words.comparison_tables(found),
        )


@contextmanager
def _runs(asked: Sequence[str], db_path: str | None) -> Iterator[list[Run]]:
    """The runs that words mean, out of the database or of files."""
    from bmoe.logs.selection import Selection  # noqa: PLC0415 (imports duckdb)

    with Selection(db_path) as selection:
        yield [selection.run(word) for word in asked]


def _shown(run: Run) -> dict[str, Any]:
    return {
        "schema": 1,
        "tool": "bmoe logs show",
        "run": {**run.facts, "started_at": run.started_at},
        "config": run.config,
        "machine": run.machine,
        "versions": run.versions,
        "summary": run.summary,
        "events": run.events,
    }


def _tables(lines: Sequence[str], tables: Sequence[Table]) -> None:
    from bmoe.cli.tables import columns, pairs, show  # noqa: PLC0415 (imports rich)
    from bmoe.present import one_line  # noqa: PLC0415 (keeps `--help` fast)

    for line in lines:
        click.echo(one_line(line))
    for table in tables:
        click.echo(f"\n{one_line(table.title)}")
        two = tuple(table.header) == ("what", "value")
        show(pairs((row[0], row[1]) for row in table.rows) if two else columns(table.header, table.rows))


def _write(path: str, page: str, *runs: Run) -> None:
    from bmoe.io.errors import UsageError  # noqa: PLC0415 (keeps `--help` fast)
    from bmoe.io.whole_file import is_same_file  # noqa: PLC0415 (same)
    from bmoe.logs.html_report import write_page  # noqa: PLC0415 (same)

    for run in runs:
        source = run.facts["file"]
        if source and is_same_file(source, path):
            raise UsageError(f"{path} is the run's log: the report would replace it")
    write_page(path, page)
    click.echo(f"wrote {path}", err=True)


def _draw(plots: Any, folder: str) -> None:
    from bmoe.logs.pictures import write_pictures  # noqa: PLC0415 (imports matplotlib)

    for path in write_pictures(plots, folder):
        click.echo(f"wrote {path}", err=True)
