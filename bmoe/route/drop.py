"""`bmoe route drop`: what leaving out cold experts would have saved, and what it would have cost.

Owns the rule (of the reference): of a token's routings, one that is not the heaviest, was not resident, and
weighs less than a fraction of the even share 1/k is dropped. Against it, a static smaller top-k. Must not
know the engine: residency is the recorded one, which dropping itself would have changed.

An expert's bytes are saved only if every routing that wanted it in its batch is gone, which matters for
prompts: there many tokens share an expert.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from bmoe.io.errors import FormatError
from bmoe.route.lookups import make_lookups, row_keys
from bmoe.route.report import Table
from bmoe.route.trace import MISS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from bmoe.route.report import Value
    from bmoe.route.trace import RouteTrace

FRACTIONS: Final = (0.25, 0.5, 0.75, 1.0)


def drop(trace: RouteTrace, *, fractions: Sequence[float] = FRACTIONS) -> list[Table]:
    """One table per phase that the trace has.

    Raises:
        FormatError: The trace lacks weights, residency or sizes.
    """
    for name, column in (("weight", trace.weight), ("residency", trace.residency)):
        if column is None:
            raise FormatError(f"has no {name} column, which dropping goes by", path=trace.path)
    tables = []
    for phase, name in enumerate(("prefill", "decode")):
        if (trace.phase == phase).any():
            tables.append(_phase(trace.select(phase=phase), name, fractions))
    return tables


def _phase(trace: RouteTrace, name: str, fractions: Sequence[float]) -> Table:
    assert trace.weight is not None
    assert trace.residency is not None
    known = ~np.isnan(np.add.reduceat(trace.weight.astype(np.float64), trace.cell_start))[trace.cell]
    weight = np.where(known, trace.weight, 0).astype(np.float64)
    best = np.zeros(trace.rows, dtype=np.bool_)
    best[_first_largest(weight, trace)] = True
    cold = known & ~best & (trace.residency == MISS)
    k = trace.top_k

    lookups = make_lookups(trace)
    lookup_of = _lookup_of_row(trace, lookups.first_row)
    missed = (trace.residency[lookups.first_row] == MISS) & (lookups.size_of[lookups.entry] > 0)
    size = np.where(missed, lookups.size_of[lookups.entry], 0)

    def figures(gone: NDArray[np.bool_]) -> tuple[float | None, float | None, list[float]]:
        wanted = np.bincount(lookup_of[~gone], minlength=len(size)) > 0
        saved = int(size[~wanted].sum())
        left = np.bincount(trace.cell[~gone & known], minlength=len(trace.cell_start))
        left = left[known[trace.cell_start]]
        shares = np.bincount(left, minlength=k + 1)[1 : k + 1] / max(len(left), 1)
        return (
            100 * saved / int(size.sum()) if size.any() else None,
            100 * float(weight[gone].sum()) / float(weight.sum()) if weight.any() else None,
            [100 * float(s) for s in shares],
        )

    rows: list[tuple[Value, ...]] = [
        (f"cold below {fraction:g}/k", 100 * fraction / k, *figures(cold & (weight < fraction / k)))
        for fraction in fractions
    ]
    rows += [
        (f"static top-{fewer}", None, *figures(known & (trace.slot >= fewer)))
        for fewer in range(k - 1, 0, -1)
    ]
    if trace.dropped is not None and trace.dropped.any():
        rows.append(("as recorded", None, *figures(trace.dropped & known)))
    return Table(
        name=f"drop_{name}",
        title=f"drop, {name}: missed bytes saved, weight lost, cells with 1 to {k} experts left",
        columns={
            "rule": "",
            "below_pct": ".2f",
            "saved_pct": ".1f",
            "weight_lost_pct": ".2f",
            "left_pct": ".0f",
        },
        rows=rows,
    )


def _first_largest(weight: NDArray[np.float64], trace: RouteTrace) -> NDArray[np.int64]:
    """[cells] the row of each cell's largest weight, the first of equals."""
    largest = np.maximum.reduceat(weight, trace.cell_start)[trace.cell]
    rows = np.flatnonzero(weight == largest)
    return rows[np.unique(trace.cell[rows], return_index=True)[1]]


def _lookup_of_row(trace: RouteTrace, first_row: NDArray[np.int64]) -> NDArray[np.int64]:
    """[rows] the lookup that serves each."""
    key = row_keys(trace)
    order = np.argsort(key[first_row])
    return order[np.searchsorted(key[first_row][order], key)]
