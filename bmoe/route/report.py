"""What an analysis found, and its three forms: text for people, JSON and CSV for programs.

Owns tables and their rendering. Must not know any analysis: they fill tables in, with full precision.
"""

from __future__ import annotations

import csv
import io
import json
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from bmoe.present import one_line

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

Value = int | float | str | None | list[Any]

SCHEMA: Final = 1


@dataclass(frozen=True, kw_only=True)
class Table:
    """Rows of equal shape.

    Attributes:
        name: One word.
        title: What it shows, in words.
        columns: Name (with its unit) to how text shows the values: a format specification ("" for plain).
        rows: One tuple per row, in the order of the columns. None is unknown.
        text: What text shows instead of the rows, where a grid tells more.
    """

    name: str
    title: str
    columns: Mapping[str, str]
    rows: Sequence[tuple[Value, ...]]
    text: Sequence[str] | None = None


@dataclass(frozen=True, kw_only=True)
class Report:
    """Tables about one or more traces.

    Attributes:
        tool: The command.
        trace: Facts about what was analysed, for programs.
        heading: The same in one line.
        tables: What was found.
        remarks: What follows from it, one sentence each.
        notes: What was odd about the input, one sentence each.
    """

    tool: str
    trace: Mapping[str, Value]
    heading: str
    tables: Sequence[Table]
    remarks: Sequence[str] = ()
    notes: Sequence[str] = ()


def as_text(report: Report) -> str:
    """For a terminal."""
    lines = [report.heading]
    for table in report.tables:
        lines += ["", table.title]
        lines += table.text if table.text is not None else _grid(table)
    if report.remarks:
        lines.append("")
        lines += report.remarks
    return "\n".join(_safe(line) for line in lines) + "\n"


def as_json(report: Report) -> str:
    """One ASCII object; docs/schema/route.v1.schema.json. Rows are objects by column; unknown is null."""
    record = {
        "schema": SCHEMA,
        "tool": report.tool,
        "trace": dict(report.trace),
        "notes": list(report.notes),
        "remarks": list(report.remarks),
        "tables": [
            {
                "name": table.name,
                "title": table.title,
                "columns": list(table.columns),
                "rows": [dict(zip(table.columns, map(_plain, row), strict=True)) for row in table.rows],
            }
            for table in report.tables
        ],
    }
    return json.dumps(record, indent=1, allow_nan=False) + "\n"


def as_csv(report: Report) -> str:
    """Each table with a line of column names; more than one are told apart by a line `# table=NAME`."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    for i, table in enumerate(report.tables):
        if len(report.tables) > 1:
            out.write(f"{chr(10) if i else ''}# table={table.name}\n")
        writer.writerow(table.columns)
        for row in table.rows:
            writer.writerow(["" if (v := _plain(value)) is None else _cell(v) for value in row])
    return out.getvalue()


def _plain(value: Value) -> Value:
    """NaN is how arrays say unknown."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _cell(value: Value) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, list):
        return " ".join("-" if v is None else _cell(v) for v in value)
    text = str(value)
    # A spreadsheet would run text that begins like a formula; names come from files.
    return f"'{text}" if isinstance(value, str) and text[:1] in {"=", "+", "-", "@", "\t", "\r"} else text


def _grid(table: Table) -> list[str]:
    if not table.rows:
        return ["  nothing"]
    names = [name.replace("_pct", " %").replace("_", " ") for name in table.columns]
    cells = [
        [_shown(value, form) for value, form in zip(row, table.columns.values(), strict=True)]
        for row in table.rows
    ]
    left = [all(isinstance(v, (str, type(None))) for v in column) for column in zip(*table.rows, strict=True)]
    widths = [max(map(len, column)) for column in zip(names, *cells, strict=True)]
    return [
        ("  " + "  ".join(
            f"{cell:<{width}}" if at_left else f"{cell:>{width}}"
            for cell, width, at_left in zip(line, widths, left, strict=True)
        )).rstrip()
        for line in (names, *cells)
    ]  # fmt: skip


def _shown(value: Value, form: str) -> str:
    value = _plain(value)
    if value is None:
        return "-"
    if isinstance(value, list):
        return " ".join(_shown(v, form) for v in value)
    return one_line(value) if isinstance(value, str) else format(value, form)


def _safe(line: str) -> str:
    """Keeps the layout's blanks, and shows what a terminal would obey."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in line)
