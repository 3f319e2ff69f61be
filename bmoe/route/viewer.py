"""`bmoe route html`: a trace as one HTML file that needs nothing else.

Owns what goes into the file: facts and tiles as JSON, cells as packed columns in base64, so that millions of
routings stay a few megabytes and are drawn from typed arrays. viewer.html draws. Must not trust names: they
come from files, reach the page as JSON with every `<` escaped, and are only ever shown as text.
"""

from __future__ import annotations

import base64
import html
import json
from importlib import resources
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from bmoe.io.errors import UsageError
from bmoe.route.analyze import trace_facts
from bmoe.route.cells import make_cells, repeats
from bmoe.route.cost_views import row_read_bytes
from bmoe.route.lookups import first_rows, make_lookups
from bmoe.route.outcomes import DEFAULT_BUDGETS_MIB, default_policies, replay
from bmoe.route.trace import DECODE, MISS

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from bmoe.route.lookups import Lookups
    from bmoe.route.metrics import TokenMetrics
    from bmoe.route.outcomes import Outcome
    from bmoe.route.trace import RouteTrace

_MIB: Final = 1 << 20
_NONE: Final = 0xFFFF
_UNKNOWN: Final = 255
_SHARED_MISS: Final = 3  # missing, and read for another token of the same batch
_MOST_CELL_SLOTS: Final = 24_000_000
# From so many lookups on, a few curves are made instead of all: seconds, not minutes.
_MANY_LOOKUPS: Final = 300_000


def render(
    trace: RouteTrace, *, metrics: TokenMetrics | None = None, outcomes: list[Outcome] | None = None
) -> str:
    """The page.

    Args:
        trace: What it shows.
        metrics: Figures per token, in the order of the trace's decoded tokens.
        outcomes: A replay's, for the curves; see `curves`.

    Raises:
        UsageError: Too many cells for a browser.
    """
    data = json.dumps(_payload(trace, metrics, outcomes or []), allow_nan=False, separators=(",", ":"))
    # In a script element, `<` could end it; in JSON, it may be written as an escape anywhere it can occur.
    data = data.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
    page = resources.files("bmoe.route").joinpath("viewer.html").read_text(encoding="utf-8")
    model = str(trace_facts(trace)["model"] or trace.path).rpartition("/")[2]
    before, _, rest = page.partition("{{title}}")
    between, _, after = rest.partition("{{data}}")
    return f"{before}{html.escape(model)}{between}{data}{after}"


def curves(trace: RouteTrace) -> list[Outcome]:
    """A replay for the curves; nothing for a trace without sizes or without decoded tokens."""
    if not (trace.phase == DECODE).any() or any(int(la) not in trace.expert_bytes_of for la in trace.layers):
        return []
    lookups = make_lookups(trace)
    many = len(lookups.entry) > _MANY_LOOKUPS
    policies = ("belady", "lru", "lfu") if many else default_policies()
    return replay(lookups, policies=policies, budgets_mib=_budgets(lookups, 4 if many else 9))


def _budgets(lookups: Lookups, count: int) -> list[int]:
    """The usual budgets; for a model that they do not suit, even shares of what it uses."""
    total_mib = int(lookups.size_of.sum()) / _MIB
    if total_mib >= DEFAULT_BUDGETS_MIB[-1]:
        return list(DEFAULT_BUDGETS_MIB[:: 1 if count > 4 else 2])
    return sorted({max(1, round(total_mib * (i + 1) / (count + 1))) for i in range(count)})


def _payload(trace: RouteTrace, metrics: TokenMetrics | None, outcomes: list[Outcome]) -> dict[str, Any]:
    cells = make_cells(trace)
    step_of_cell, steps = _steps(trace, cells.row, cells.nth)
    layers, width = len(trace.layers), cells.experts.shape[1]
    slots = len(steps) * layers * width
    if slots > _MOST_CELL_SLOTS:
        raise UsageError(
            f"{trace.path}: {len(steps)} steps by {layers} layers by {width} experts are too many for a page",
            hint="select some with --steps, --layers or --phase",
        )
    column = np.arange(trace.rows) - trace.cell_start[trace.cell]
    place = (step_of_cell[trace.cell] * layers + trace.layer_index) * width + column
    sized = all(int(la) in trace.expert_bytes_of for la in trace.layers)
    facts = trace_facts(trace)
    return {
        "facts": facts,
        "notes": list(trace.notes) + (list(metrics.notes) if metrics else []),
        "tiles": _tiles(trace, metrics, sized),
        "layers": trace.layers.tolist(),
        "width": width,
        "expert_bytes": [trace.expert_bytes_of.get(la) for la in trace.layers.tolist()],
        "steps": {"turn": steps[:, 0].tolist(), "phase": steps[:, 1].tolist(), "step": steps[:, 2].tolist()},
        "experts": _packed(slots, place, np.minimum(trace.expert, _NONE - 1), np.dtype("<u2"), _NONE),
        "weights": _packed(slots, place, _weights(trace), np.dtype("u1"), _UNKNOWN),
        "residency": _packed(slots, place, _residency(trace), np.dtype("u1"), _UNKNOWN),
        "metrics": metrics and {"columns": metrics.columns, "rows": metrics.rows},
        "curves": [
            {"policy": o.policy, "budget_mib": o.budget_mib, "hit_pct": o.hit_pct_decode} for o in outcomes
        ],
    }


def _steps(
    trace: RouteTrace, row: NDArray[np.int64], nth: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """[cells] step of each, and [steps, 4] turn, phase, position, tie-breaker for unknown positions."""
    step = trace.step[row].astype(np.int64)
    keys = np.stack((trace.turn[row], trace.phase[row], step, np.where(step < 0, nth, 0)), axis=1)
    steps, index = np.unique(keys, axis=0, return_inverse=True)
    return index.reshape(-1), steps


def _packed(
    slots: int, place: NDArray[np.int64], values: NDArray[Any], dtype: np.dtype[Any], none: int
) -> str:
    packed = np.full(slots, none, dtype=dtype)
    packed[place] = values
    return base64.b64encode(packed.tobytes()).decode("ascii")


def _weights(trace: RouteTrace) -> NDArray[np.int64]:
    """[rows] 0 to 250 for 0 to 100 %, or _UNKNOWN."""
    if trace.weight is None:
        return np.full(trace.rows, _UNKNOWN)
    scaled = np.clip(np.nan_to_num(trace.weight.astype(np.float64)), 0, 1) * 250
    return np.where(np.isnan(trace.weight), _UNKNOWN, np.rint(scaled)).astype(np.int64)


def _residency(trace: RouteTrace) -> NDArray[np.int64]:
    if trace.residency is None:
        return np.full(trace.rows, _UNKNOWN)
    found = trace.residency.astype(np.int64)
    shared = found == MISS
    shared[first_rows(trace)] = False
    found[shared] = _SHARED_MISS
    return found


def _tiles(trace: RouteTrace, metrics: TokenMetrics | None, sized: bool) -> list[dict[str, str]]:
    """Label, value and what it means, in words."""
    facts = trace_facts(trace)
    tokens = int(str(facts["decode_tokens"]))
    tiles = [
        (
            "decoded tokens",
            f"{tokens}",
            f"{int(trace.step.max()) + 1} positions, {facts['prefill_rows']} prompt rows",
        ),
        ("experts", f"{facts['layers']} × {facts['experts']}", f"layers by experts, top {facts['top_k']}"),
    ]
    decode = trace.phase == DECODE
    read = row_read_bytes(trace)
    if decode.any():
        part = trace.select(phase=DECODE)
        if trace.residency is not None:
            hit = 100 * float((trace.residency[decode] != MISS).mean())
            tiles.append(("decode hits", f"{hit:.1f} %", "as recorded"))
        if read is not None:
            tiles.append(
                ("read per token", f"{int(read[decode].sum()) / _MIB / tokens:.1f} MiB", "as recorded")
            )
        again = repeats(make_cells(part), 1)
        if (again >= 0).any():
            share = 100 * float((again == 1).sum()) / float((again >= 0).sum())
            tiles.append(("same as last step", f"{share:.1f} %", "of the routed experts"))
    if sized:
        size = trace.sizes()
        keys = np.unique(trace.layer_index.astype(np.int64) * trace.experts + trace.expert)
        touched, bank = int(size[keys // trace.experts].sum()), int(size.sum()) * trace.experts
        tiles.append(("a token's experts", f"{trace.cycle_bytes / _MIB:.0f} MiB", "the cycle"))
        tiles.append(("touched", f"{touched / _MIB:.0f} MiB", f"of {bank / _MIB:.0f} MiB of experts"))
    if trace.dense_bytes_of:
        tiles.append(
            ("dense", f"{sum(trace.dense_bytes_of.values()) / _MIB:.0f} MiB", "in layers, not streamed")
        )
    if metrics is not None and "wall_ms" in metrics.columns:
        wall = [row[metrics.columns.index("wall_ms")] for row in metrics.rows]
        known = [w for w in wall if w is not None]
        if sum(known) > 0:
            tiles.append(
                ("speed", f"{1000 * len(known) / sum(known):.2f} tok/s", f"over {len(known)} tokens")
            )
    return [{"label": label, "value": value, "meaning": meaning} for label, value, meaning in tiles]
