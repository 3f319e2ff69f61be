"""Tables on standard output, for people.

Owns how they look. Must not know what is in them; what files and users say is shown harmless.
"""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, Final

import click
from rich.console import Console
from rich.table import Table

from bmoe.present import mib, one_line

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

_LEAST_WIDTH: Final = 100  # without a terminal, and on a narrow one: lines wrap rather than be cut


def pairs(rows: Iterable[tuple[str, str]]) -> Table:
    """A label and a value per line."""
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(no_wrap=True, style="bold")
    table.add_column(overflow="fold")
    for label, value in rows:
        table.add_row(label, one_line(value))
    return table


def columns(header: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    """A line per row; columns of numbers are flushed right."""
    lines = [[one_line(cell) for cell in row] for row in rows]
    table = Table(box=None, pad_edge=False)
    for index, title in enumerate(header):
        numbers = all(not line[index] or line[index][0].isdigit() for line in lines)
        table.add_column(title, justify="right" if numbers and index else "left", overflow="fold")
    for line in lines:
        table.add_row(*line)
    return table


def show(*tables: Table) -> None:
    """Writes tables to standard output, an empty line between them."""
    width = max(shutil.get_terminal_size((_LEAST_WIDTH, 24)).columns, _LEAST_WIDTH)
    console = Console(width=width, highlight=False, markup=False, emoji=False)
    for index, table in enumerate(tables):
        with console.capture() as text:
            console.print(table)
        lines = [line.rstrip() for line in text.get().splitlines()]
        click.echo("\n".join(["", *lines] if index else lines))


def size(size_bytes: int) -> str:
    """Bytes exactly, and in MiB."""
    return f"{mib(size_bytes)} ({size_bytes:,} bytes)"
