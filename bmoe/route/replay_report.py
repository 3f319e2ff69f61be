"""The report of `bmoe route replay`: outcomes as one table for programs and as grids for people.

Owns the layout. Must not count: outcomes.py has.
"""

from __future__ import annotations

from dataclasses import astuple
from typing import TYPE_CHECKING

from bmoe.route.analyze import heading, trace_facts
from bmoe.route.lookups import make_lookups
from bmoe.route.outcomes import replay, validate, verdicts
from bmoe.route.report import Report, Table

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bmoe.route.outcomes import Outcome, Speed
    from bmoe.route.trace import RouteTrace


def replay_report(
    trace: RouteTrace,
    *,
    policies: Sequence[str],
    budgets_mib: Sequence[int],
    speed: Speed | None = None,
    validate_mib: int | None = None,
    validate_policy: str = "lru",
    grids: bool = True,
) -> Report:
    """Replays and reports.

    Args:
        trace: What is replayed.
        policies: As for `bmoe.route.outcomes.replay`.
        budgets_mib: Likewise.
        speed: Likewise.
        validate_mib: Adds a comparison with what the trace recorded, at this budget.
        validate_policy: The policy that the recording run had.
        grids: Adds what only text shows: the same figures, a grid for each.

    Raises:
        UsageError: An unknown policy.
        FormatError: Sizes are unknown, or there is nothing to validate with.
    """
    lookups = make_lookups(trace)
    outcomes = replay(lookups, policies=policies, budgets_mib=budgets_mib, speed=speed)
    columns = {
        "budget_mib": "",
        "policy": "",
        "hit_pct_cum": ".1f",
        "hit_pct_decode": ".1f",
        "read_mib": ".0f",
        "read_mib_per_token": ".1f",
        "ideal_tokens_per_s": ".2f",
        "layered_tokens_per_s": ".2f",
    }
    rows = [tuple(getattr(outcome, name) for name in columns) for outcome in outcomes]
    tables = [
        Table(
            name="replay",
            title="decode hits in % by budget in MiB",
            columns=columns,
            rows=rows,
            text=_by_budget(outcomes, policies, "hit_pct_decode", ".1f"),
        )
    ]
    remarks = verdicts(outcomes, cycle_bytes=lookups.cycle_bytes)
    if validate_mib is not None:
        found = validate(trace, lookups, validate_mib, policy=validate_policy)
        remarks.append(
            f"validation at {found.budget_mib} MiB: recorded {found.recorded_pct:.1f} % of {found.lookups} "
            f"decode lookups as hits, {validate_policy} replayed {found.replayed_pct:.1f} %; "
            f"{found.equal_pct:.2f} % of them agree"
        )
        tables.append(
            Table(
                name="validation",
                title=f"{validate_policy} replay at {validate_mib} MiB against the record",
                columns={
                    "budget_mib": "",
                    "recorded_pct": ".1f",
                    "replayed_pct": ".1f",
                    "equal_pct": ".2f",
                    "lookups": "",
                },
                rows=[astuple(found)],
            )
        )
    if grids:
        tables += _grids(outcomes, policies, with_speed=speed is not None)
    return Report(
        tool="bmoe route replay",
        trace=trace_facts(trace),
        heading=heading(trace),
        tables=tables,
        remarks=remarks,
        notes=trace.notes,
    )


def _grids(outcomes: Sequence[Outcome], names: Sequence[str], *, with_speed: bool) -> list[Table]:
    """What the text has beside hits, one grid per figure; programs find all of it in the first table."""
    figures = [
        ("hit_pct_cum", "hits in %, the prompt included", ".1f"),
        ("read_mib_per_token", "MiB read per token", ".1f"),
    ]
    if with_speed:
        figures += [
            ("ideal_tokens_per_s", "tokens per second if reads overlap perfectly within a token", ".2f"),
            ("layered_tokens_per_s", "tokens per second if reads overlap within a layer", ".2f"),
        ]
    return [
        Table(name=name, title=title, columns={}, rows=[], text=_by_budget(outcomes, names, name, form))
        for name, title, form in figures
    ]


def _by_budget(outcomes: Sequence[Outcome], names: Sequence[str], figure: str, form: str) -> list[str]:
    values: dict[int, dict[str, str]] = {}
    for outcome in outcomes:
        value = getattr(outcome, figure)
        values.setdefault(outcome.budget_mib, {})[outcome.policy] = (
            "-" if value is None else f"{value:{form}}"
        )
    widths = [max(len(name), 7) for name in names]
    lines = ["      MiB  " + "  ".join(f"{name:>{w}}" for name, w in zip(names, widths, strict=True))]
    for budget, row in values.items():
        lines.append(
            f"{budget:>9}  " + "  ".join(f"{row[n]:>{w}}" for n, w in zip(names, widths, strict=True))
        )
    return lines
