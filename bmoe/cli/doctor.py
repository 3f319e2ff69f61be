"""`bmoe doctor`: one screen about this machine, fit for a bug report.

Owns the layout and the exit code. Must not know what is checked: that is bmoe.doctor.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Final

import click

if TYPE_CHECKING:
    from bmoe.doctor import Check

_SCHEMA: Final = 1
_COLOURS: Final = {"ok": "green", "warn": "yellow", "fail": "red"}
_RANKS: Final = ("ok", "warn", "fail")


@click.command(short_help="Check this machine, and say what to do about it.")
@click.argument("path", default=".")
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead of lines.")
def doctor(path: str, *, as_json: bool) -> int:
    """Check what bmoe needs and what makes it fast, on this machine and for reads from PATH.

    PATH is a model or a folder, by default the current one. Each line is ok, warn or fail, with the cure.
    The exit code is 1 if anything fails, else 0.
    """
    from bmoe.doctor import examine  # noqa: PLC0415 (keeps `--help` fast)

    checks = examine(path)
    worst = max((check.status for check in checks), key=_RANKS.index)
    if as_json:
        click.echo(json.dumps(_record(checks, worst), indent=1))
    else:
        for line in _lines(checks):
            click.echo(line)
    return 1 if worst == "fail" else 0


def _record(checks: list[Check], worst: str) -> dict[str, object]:
    import dataclasses  # noqa: PLC0415 (keeps `--help` fast)

    return {
        "schema": _SCHEMA,
        "tool": "bmoe doctor",
        "status": worst,
        "checks": [dataclasses.asdict(check) for check in checks],
    }


def _lines(checks: list[Check]) -> list[str]:
    from bmoe.present import one_line  # noqa: PLC0415 (same)

    width = max(len(check.name) for check in checks)
    lines = []
    for check in checks:
        status = click.style(f"{check.status:<4}", fg=_COLOURS[check.status])
        lines.append(f"{status}  {check.name:<{width}}  {one_line(check.text)}")
        if check.cure is not None:
            lines.append(f"{'':<{width + 6}}  -> {one_line(check.cure)}")
    return lines
