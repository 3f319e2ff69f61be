"""`bmoe route analyze`: which views there are, and the report they make.

Owns the list of views and what is said of the trace above them. Must not know what a view counts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from bmoe.io.errors import UsageError
from bmoe.present import one_line
from bmoe.route import cost_views, routing_views
from bmoe.route.lookups import decode_tokens
from bmoe.route.matrix_view import CONTENTS, matrix
from bmoe.route.report import Report
from bmoe.route.trace import PREFILL

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from bmoe.route.report import Table, Value
    from bmoe.route.trace import RouteTrace

_MIB: Final = 1 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class ViewOptions:
    """What some views want to know.

    Attributes:
        content: Of the matrix's cells, see `bmoe.route.matrix_view.CONTENTS`.
        max_steps, width: Most lines and characters of the matrix as text.
        top: Lines of the hot list.
    """

    content: str = CONTENTS[0]
    max_steps: int = 24
    width: int = 100
    top: int = 20


VIEWS: Final[dict[str, Callable[[RouteTrace, ViewOptions], list[Table]]]] = {
    "matrix": lambda trace, o: matrix(trace, content=o.content, max_steps=o.max_steps, width=o.width),
    "hot": lambda trace, o: routing_views.hot(trace, top=o.top),
    "reuse": lambda trace, _: routing_views.reuse(trace),
    "overlap": lambda trace, _: routing_views.overlap(trace),
    "workset": lambda trace, _: routing_views.workset(trace),
    "cache": lambda trace, _: cost_views.cache(trace),
    "entropy": lambda trace, _: routing_views.entropy(trace),
    "bytes": lambda trace, _: cost_views.read_bytes(trace),
    "sanity": lambda trace, _: cost_views.sanity(trace),
}
DEFAULT_VIEWS: Final = ("hot", "reuse", "overlap", "workset", "cache")


def chosen_views(names: Sequence[str]) -> tuple[str, ...]:
    """The views that names stand for, in the order of VIEWS; "default" and "all" are sets.

    Raises:
        UsageError: No such view; the message lists them.
    """
    wanted: set[str] = set()
    for name in names:
        if name == "all":
            wanted |= VIEWS.keys()
        elif name == "default":
            wanted |= set(DEFAULT_VIEWS)
        elif name in VIEWS:
            wanted.add(name)
        else:
            raise UsageError(f"view {name!r} is not one of default, all, {', '.join(VIEWS)}")
    return tuple(name for name in VIEWS if name in wanted)


def analyze(trace: RouteTrace, *, views: Sequence[str], options: ViewOptions | None = None) -> Report:
    """Looks at a trace.

    Args:
        trace: Already selected.
        views: As `chosen_views` gives them.
        options: For views.
    """
    tables, notes = [], list(trace.notes)
    for name in views:
        found = VIEWS[name](trace, options or ViewOptions())
        if not found:
            notes.append(f"the trace has no column for the view {name}")
        tables += found
    if trace.dropped is not None and trace.dropped.any():
        notes.append(
            f"{int(trace.dropped.sum())} routings were dropped in the recorded run: what was read is less"
        )
    return Report(
        tool="bmoe route analyze",
        trace=trace_facts(trace),
        heading=heading(trace),
        tables=tables,
        notes=notes,
    )


def trace_facts(trace: RouteTrace) -> dict[str, Value]:
    """What was analysed, for programs."""
    sized = all(int(la) in trace.expert_bytes_of for la in trace.layers)
    return {
        "path": trace.path,
        "model": trace.facts.get("model"),
        "architecture": trace.facts.get("arch"),
        "selection": trace.selection,
        "rows": trace.rows,
        "layers": len(trace.layers),
        "experts": trace.experts,
        "top_k": trace.top_k,
        "prefill_rows": int((trace.phase == PREFILL).sum()),
        "decode_tokens": decode_tokens(trace),
        "cycle_bytes": trace.cycle_bytes if sized else None,
    }


def heading(trace: RouteTrace) -> str:
    """What was analysed, in a line."""
    facts = trace_facts(trace)
    model = str(facts["model"] or "a model unknown").rpartition("/")[2]
    cycle = f", a token's experts {trace.cycle_bytes / _MIB:.0f} MiB" if facts["cycle_bytes"] else ""
    return one_line(
        f"{trace.path}: {model}, {facts['layers']} layers of {facts['experts']} experts, "
        f"top {facts['top_k']}; {trace.rows} rows ({trace.selection}), "
        f"{facts['decode_tokens']} decoded tokens{cycle}"
    )
