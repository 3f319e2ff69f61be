"""Views of the routing itself: hot, reuse, overlap, workset, entropy. Needs no cache and no bytes read.

Owns what each of them counts. Must not know how tables are shown.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from bmoe.route.cells import make_cells, repeats
from bmoe.route.report import Table

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from bmoe.route.report import Value
    from bmoe.route.trace import RouteTrace

LAGS: Final = (1, 2, 4, 8)
_MIB: Final = 1 << 20


def hot(trace: RouteTrace, *, top: int) -> list[Table]:
    """Concentration: the most used experts, and how much of all use the top n take."""
    layers, experts = len(trace.layers), trace.experts
    key = trace.layer_index.astype(np.int64) * experts + trace.expert
    used, uses = np.unique(key, return_counts=True)
    order = np.argsort(-uses, kind="stable")
    used, uses = used[order], uses[order]
    total = int(uses.sum())
    cumulative = np.cumsum(uses)
    steps = np.bincount(trace.layer_index[trace.cell_start], minlength=layers)
    best: list[tuple[Value, ...]] = [
        (
            int(trace.layers[used[i] // experts]),
            int(used[i] % experts),
            int(uses[i]),
            100 * int(uses[i]) / int(steps[used[i] // experts]),
            100 * int(cumulative[i]) / total,
        )
        for i in range(min(top, len(used)))
    ]
    coverage: list[tuple[Value, ...]] = [
        (n, 100 * n / (layers * experts), 100 * int(cumulative[min(n, len(used)) - 1]) / total)
        for n in _round_numbers(layers * experts)
    ]
    of_layer: list[tuple[Value, ...]] = []
    for i, layer in enumerate(trace.layers.tolist()):
        own = uses[used // experts == i]  # descending still
        share = np.cumsum(own) / own.sum()
        of_layer.append(
            (
                layer,
                len(own),
                100 * float(share[0]),
                100 * float(share[min(trace.top_k, len(own)) - 1]),
                int(np.searchsorted(share, 0.5 - 1e-12)) + 1,
                int(np.searchsorted(share, 0.9 - 1e-12)) + 1,
            )
        )
    return [
        Table(
            name="hot",
            title=f"hot: the {len(best)} most used experts (% of its layer's steps; share of all use so far)",
            columns={"layer": "", "expert": "", "uses": "", "steps_pct": ".1f", "cumulative_pct": ".1f"},
            rows=best,
        ),
        Table(
            name="coverage",
            title="coverage: share of all use that the n most used experts take",
            columns={"experts": "", "of_all_pct": ".1f", "uses_pct": ".1f"},
            rows=coverage,
        ),
        Table(
            name="hot_layers",
            title="concentration by layer: experts used, share of the first and the first top-k, experts for "
            "half and nine tenths of the use",
            columns={
                "layer": "",
                "used": "",
                "top1_pct": ".1f",
                "topk_pct": ".1f",
                "half": "",
                "nine_tenths": "",
            },
            rows=of_layer,
        ),
    ]


def _round_numbers(limit: int) -> list[int]:
    found = [m * 10**e for e in range(8) for m in (1, 2, 5) if m * 10**e < limit]
    return [*found, limit]


def reuse(trace: RouteTrace) -> list[Table]:
    """Steps between two uses of the same expert in its layer."""
    cells = make_cells(trace)
    experts = trace.experts
    key = trace.layer_index.astype(np.int64) * experts + trace.expert
    nth = cells.nth[trace.cell]
    order = np.lexsort((nth, key))
    same = key[order][1:] == key[order][:-1]
    distance = np.diff(nth[order])
    same_cell = same & (distance == 0)  # an expert routed to twice in one cell is used once
    same &= ~same_cell
    distance, at = distance[same], key[order][1:][same] // experts
    used, uses = np.unique(key[order][np.append(True, ~same_cell)], return_counts=True)
    once = used[uses == 1] // experts
    rows: list[tuple[Value, ...]] = []
    for i, layer in [(-1, "all"), *enumerate(trace.layers.tolist())]:
        own = distance if i < 0 else distance[at == i]
        single = len(once) if i < 0 else int((once == i).sum())
        of = len(used) if i < 0 else int((used // experts == i).sum())
        rows.append((str(layer), len(own), *_quantiles(own), single, 100 * single / of))
    return [
        Table(
            name="reuse",
            title="reuse: steps until an expert is used again; experts used exactly once",
            columns={
                "layer": "",
                "reuses": "",
                "p50_steps": ".0f",
                "p90_steps": ".0f",
                "max_steps": ".0f",
                "once": "",
                "once_pct": ".1f",
            },
            rows=rows,
        )
    ]


def _quantiles(values: NDArray[np.int64]) -> tuple[float | None, float | None, int | None]:
    if not len(values):
        return None, None, None
    p50, p90 = np.quantile(values, (0.5, 0.9))
    return float(p50), float(p90), int(values.max())


def overlap(trace: RouteTrace) -> list[Table]:
    """Share of the routed experts that the layer also routed to some steps before."""
    cells = make_cells(trace)
    layers = len(trace.layers)
    table = np.full((layers + 1, len(LAGS)), np.nan)
    for j, lag in enumerate(LAGS):
        again = repeats(cells, lag)
        known = (again >= 0).sum(axis=1)
        hits = (again == 1).sum(axis=1)
        of_layer = np.bincount(cells.layer, weights=known, minlength=layers)
        hits_of = np.bincount(cells.layer, weights=hits, minlength=layers)
        with np.errstate(invalid="ignore", divide="ignore"):
            table[1:, j] = 100 * hits_of / of_layer
            table[0, j] = 100 * np.float64(hits.sum()) / known.sum()
    names = ["all", *map(str, trace.layers.tolist())]
    return [
        Table(
            name="overlap",
            title="overlap: experts in common with the step 1, 2, 4, 8 before",
            columns={"layer": "", **{f"lag{lag}_pct": ".1f" for lag in LAGS}},
            rows=[(name, *row) for name, row in zip(names, table.tolist(), strict=True)],
        )
    ]


def workset(trace: RouteTrace) -> list[Table]:
    """How many different experts the first n steps touch."""
    cells = make_cells(trace)
    key = trace.layer_index.astype(np.int64) * trace.experts + trace.expert
    nth = cells.nth[trace.cell]
    order = np.lexsort((nth, key))
    new = np.append(True, np.diff(key[order]) != 0)
    first_seen = nth[order][new]
    layer = (key[order][new] // trace.experts).astype(np.int64)
    size = np.array([trace.expert_bytes_of.get(la, -1) for la in trace.layers.tolist()], dtype=np.float64)
    size[size < 0] = np.nan
    steps = int(cells.nth.max()) + 1
    marks = [m * 10**e for e in range(8) for m in (1, 2, 5) if m * 10**e < steps]
    marks = [*sorted({*marks, *(n for n in (25, 250, 2500) if n < steps)} - {20, 200, 2000}), steps]
    total = len(trace.layers) * trace.experts
    rows: list[tuple[Value, ...]] = []
    for n in marks:
        seen = first_seen < n
        count = int(seen.sum())
        rows.append((n, count, 100 * count / total, float(size[layer[seen]].sum()) / _MIB))
    return [
        Table(
            name="workset",
            title="workset: different experts touched by the first n steps",
            columns={"steps": "", "experts": "", "of_all_pct": ".1f", "mib": ".0f"},
            rows=rows,
        )
    ]


def entropy(trace: RouteTrace) -> list[Table]:
    """How even the router's choice is: within a token's top-k by weight, and over all tokens by use."""
    layers, width = len(trace.layers), max(trace.experts, 1)
    bits, top1 = np.full(layers + 1, np.nan), np.full(layers + 1, np.nan)
    if trace.weight is not None:
        cell_count = len(trace.cell_start)
        weight = trace.weight.astype(np.float64)
        total = np.bincount(trace.cell, weights=weight, minlength=cell_count)  # NaN where any is unknown
        with np.errstate(invalid="ignore", divide="ignore"):
            p = weight / total[trace.cell]
            plogp = np.where(p > 0, -p * np.log2(p), np.where(p == 0, 0.0, np.nan))
        of_cell = np.bincount(trace.cell, weights=plogp, minlength=cell_count)
        largest = np.maximum.reduceat(p, trace.cell_start)
        good = np.isfinite(of_cell) & np.isfinite(largest)
        layer = trace.layer_index[trace.cell_start][good]
        if good.any():
            counts = np.bincount(layer, minlength=layers)
            with np.errstate(invalid="ignore"):
                bits[1:] = np.bincount(layer, weights=of_cell[good], minlength=layers) / counts
                top1[1:] = np.bincount(layer, weights=largest[good], minlength=layers) / counts
            bits[0], top1[0] = of_cell[good].mean(), largest[good].mean()
    rows: list[tuple[Value, ...]] = []
    for i, name in enumerate(["all", *map(str, trace.layers.tolist())]):
        own = trace.expert if i == 0 else trace.expert[trace.layer_index == i - 1]
        share = np.bincount(own, minlength=width) / len(own)
        used = share[share > 0]
        use_bits = float(-(used * np.log2(used)).sum()) if i else None
        rows.append((name, float(bits[i]), 100 * float(top1[i]), use_bits))
    return [
        Table(
            name="entropy",
            title=f"entropy: bits of a token's weights (at most {np.log2(trace.top_k):.2f}), share of its "
            f"first expert, bits of use over all steps (at most {np.log2(width):.2f})",
            columns={"layer": "", "weights_bits": ".2f", "top1_pct": ".1f", "use_bits": ".2f"},
            rows=rows,
        )
    ]
