"""Views of what the routing cost, and of the trace itself: cache, bytes, sanity.

Owns what each of them counts. Must not know how tables are shown.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from bmoe.route.lookups import first_rows
from bmoe.route.report import Table
from bmoe.route.trace import HIT, MISS, PREFETCHED, PREFILL

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from bmoe.route.report import Value
    from bmoe.route.trace import RouteTrace

_MIB: Final = 1 << 20


def cache(trace: RouteTrace) -> list[Table]:
    """What the recorded run found resident. An expert counts once per batch, as it is looked up."""
    if trace.residency is None:
        return []
    rows = first_rows(trace)
    layer, found, slot = trace.layer_index[rows], trace.residency[rows], trace.slot[rows]
    kinds = (MISS, HIT, PREFETCHED)
    shares: list[tuple[Value, ...]] = []
    for i, name in [(-1, "all"), *enumerate(trace.layers.tolist())]:
        own = found if i < 0 else found[layer == i]
        shares.append((str(name), len(own), *(100 * float((own == kind).mean()) for kind in kinds)))
    ranks: list[tuple[Value, ...]] = [
        (
            rank,
            int((slot == rank).sum()),
            *(100 * float((found[slot == rank] == kind).mean()) for kind in kinds),
        )
        for rank in np.unique(slot).tolist()
    ]
    columns = {"lookups": "", "miss_pct": ".1f", "hit_pct": ".1f", "prefetched_pct": ".1f"}
    return [
        Table(
            name="cache",
            title="cache: lookups as recorded",
            columns={"layer": "", **columns},
            rows=shares,
        ),
        Table(
            name="cache_ranks",
            title="cache by rank of the expert in its token's choice",
            columns={"rank": "", **columns},
            rows=ranks,
        ),
    ]


def row_read_bytes(trace: RouteTrace) -> NDArray[np.int64] | None:
    """[rows] bytes each row caused to be read: as recorded, else a missed expert's size; None if unknown."""
    if trace.read_bytes is not None:
        return trace.read_bytes
    if trace.residency is None or any(int(la) not in trace.expert_bytes_of for la in trace.layers):
        return None
    rows = first_rows(trace)
    rows = rows[trace.residency[rows] == MISS]
    read = np.zeros(trace.rows, dtype=np.int64)
    read[rows] = trace.sizes()[trace.layer_index[rows]]
    return read


def read_bytes(trace: RouteTrace) -> list[Table]:
    """Bytes read per layer and step, and the sizes of things."""
    read = row_read_bytes(trace)
    cell_layer = trace.layer_index[trace.cell_start]
    rows: list[tuple[Value, ...]] = []
    for i, layer in enumerate(trace.layers.tolist()):
        figures: tuple[float | None, ...] = (None, None, None)
        if read is not None:
            per_step = np.add.reduceat(read, trace.cell_start)[cell_layer == i] / _MIB
            figures = (float(per_step.mean()), float(np.median(per_step)), float(per_step.max()))
        size, dense = trace.expert_bytes_of.get(layer), trace.dense_bytes_of.get(layer)
        rows.append(
            (
                str(layer),
                *figures,
                None if size is None else size / _MIB,
                None if dense is None else dense / _MIB,
            )
        )
    columns = ("mean_mib", "p50_mib", "max_mib", "expert_mib", "dense_mib")
    sums: list[Value] = ["sum"]
    for j, name in enumerate(columns, 1):
        values = [row[j] for row in rows]
        known = name in {"mean_mib", "dense_mib"} and all(isinstance(v, float) for v in values)
        sums.append(float(sum(v for v in values if isinstance(v, float))) if known else None)
    return [
        Table(
            name="bytes",
            title="bytes: read per step by layer, size of one expert, bytes that are not streamed",
            columns={"layer": "", **dict.fromkeys(columns, ".2f")},
            rows=[tuple(sums), *rows],
        )
    ]


def sanity(trace: RouteTrace) -> list[Table]:
    """Whether the trace is what a trace should be."""
    widths, cells = np.unique(np.diff(np.append(trace.cell_start, trace.rows)), return_counts=True)
    pair = trace.cell * (int(trace.expert.max()) + 1) + trace.expert
    facts: list[tuple[Value, ...]] = [
        ("rows", str(trace.rows)),
        ("cells (token and layer)", str(len(trace.cell_start))),
        ("experts per cell", ", ".join(f"{w} in {n}" for w, n in zip(widths, cells, strict=True))),
        ("top-k", str(trace.top_k)),
        ("layers that route", str(len(trace.layers))),
        ("turns", str(len(np.unique(trace.turn)))),
        ("steps", _range(trace.step[trace.step >= 0])),
        ("rows of unknown step", str(int((trace.step < 0).sum()))),
        ("experts twice in a cell", str(trace.rows - len(np.unique(pair)))),
        ("rows dropped", "unknown" if trace.dropped is None else str(int(trace.dropped.sum()))),
    ]
    if trace.weight is not None:
        unknown = int(np.isnan(trace.weight).sum())
        sums = np.add.reduceat(trace.weight.astype(np.float64), trace.cell_start)
        sums = sums[np.isfinite(sums)]
        facts.append(("weights unknown", str(unknown)))
        if len(sums):
            text = f"{sums.min():.4g} to {sums.max():.4g}, mean {sums.mean():.4g}"
            facts.append(("sum of a cell's weights", text))
    uneven: list[tuple[Value, ...]] = []
    for phase, name in enumerate(("prefill", "decode")):
        of_phase = trace.layer_index[trace.cell_start][trace.phase[trace.cell_start] == phase]
        if not len(of_phase):
            continue
        counts = np.bincount(of_phase, minlength=len(trace.layers))
        usual = int(np.bincount(counts).argmax())
        uneven += [
            (name, int(la), int(n), usual) for la, n in zip(trace.layers, counts, strict=True) if n != usual
        ]
        if phase == PREFILL and int((counts != usual).sum()):
            facts.append(
                ("prefill", "the last layer sees only tokens whose output is wanted, so fewer steps")
            )
    return [
        Table(name="sanity", title="sanity", columns={"what": "", "value": ""}, rows=facts),
        Table(
            name="uneven",
            title="layers with another number of steps than most",
            columns={"phase": "", "layer": "", "steps": "", "usual": ""},
            rows=uneven,
        ),
    ]


def _range(steps: NDArray[np.int32]) -> str:
    return f"{steps.min()} to {steps.max()}" if len(steps) else "none"
