"""`bmoe route`: the command line of bmoe.route.

Owns options, their checks and where output goes: results to stdout, notes about the input to stderr. Must not
count anything; bmoe.route is imported only when a command runs.
"""

from __future__ import annotations

import math
import shutil
from typing import TYPE_CHECKING, Any, Final

import click

from bmoe.cli.options import Number

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from bmoe.route.report import Report
    from bmoe.route.trace import RouteTrace

_MIB: Final = 1 << 20
_MOST_MIB: Final = 1 << 24


@click.group(name="route", short_help="Say what a recorded routing means for a cache.")
def route_group() -> None:
    """Answer from a recorded route trace what decides streaming speed.

    A trace is what `--route-trace` writes, here or by the reference engine.
    """


def _common(function: Callable[..., Any]) -> Callable[..., Any]:
    for option in (
        click.option("--csv", "as_csv", is_flag=True, help="Tables as CSV."),
        click.option("--json", "as_json", is_flag=True, help="One JSON object."),
    ):
        function = option(function)
    return function


def _filters(function: Callable[..., Any]) -> Callable[..., Any]:
    for option in (
        click.option("--steps", metavar="SPAN", help="Positions: 30:60, 5, or several with commas."),
        click.option("--layers", metavar="SPAN", help="Layers, likewise."),
        click.option("--turn", metavar="SPAN", help="Turns, likewise."),
    ):
        function = option(function)
    return function


_phase = click.option(
    "--phase",
    type=click.Choice(["decode", "prefill", "all"]),
    help="Only these rows.  [default: decode, if there is any]",
)
_trace = click.argument("trace_path", metavar="TRACE")
_traces = click.argument("trace_paths", metavar="TRACE...", nargs=-1, required=True)


class _Numbers(click.ParamType):  # type: ignore[type-arg]  # generic only in the newest clicks
    """Whole numbers with commas, or a sweep FIRST:LAST:STEP, LAST included."""

    name = "numbers"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> list[int]:
        """The numbers, ascending, each once."""
        if isinstance(value, list):
            return value
        number = Number(1, _MOST_MIB)
        found: set[int] = set()
        for part in value.split(","):
            bounds = [number.convert(text, param, ctx) or 0 for text in part.split(":")]
            if len(bounds) == 1:
                found.add(bounds[0])
            elif len(bounds) == 3 and bounds[0] <= bounds[1] and (bounds[1] - bounds[0]) // bounds[2] < 1000:
                found |= set(range(bounds[0], bounds[1] + 1, bounds[2]))
            else:
                self.fail(f"{part!r} is not N or FIRST:LAST:STEP with at most 1000 steps", param, ctx)
        return sorted(found)


class _Positive(click.ParamType):  # type: ignore[type-arg]  # generic only in the newest clicks
    """A positive, finite decimal number."""

    name = "number"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """The number."""
        try:
            number = float(value)
        except ValueError:
            number = math.nan
        if not (number > 0 and math.isfinite(number)) or "_" in str(value):
            self.fail(f"{value!r} is not a positive number", param, ctx)
        return number


@route_group.command(short_help="Show what was routed to, how often and how evenly.")
@_trace
@click.option(
    "--view",
    "views",
    multiple=True,
    metavar="NAME",
    help="matrix, hot, reuse, overlap, workset, cache, entropy, bytes, sanity, default, all; repeatable.",
)
@_phase
@_filters
@click.option(
    "--cells",
    "content",
    type=click.Choice(["experts", "weights", "mib", "hit"]),
    default="experts",
    show_default=True,
    help="What the matrix's cells show.",
)
@click.option(
    "--max-steps", type=Number(1, 1_000_000), default=24, show_default=True, help="Lines of the matrix."
)
@click.option("--width", type=Number(20, 100_000), help="Columns of the matrix.  [default: the terminal's]")
@click.option(
    "--top", type=Number(1, 1_000_000), default=20, show_default=True, help="Lines of the hot list."
)
@click.option("--plot", "plot_folder", metavar="DIR", help="Also write pictures (needs matplotlib).")
@_common
def analyze(
    trace_path: str,
    *,
    views: Sequence[str],
    phase: str | None,
    turn: str | None,
    layers: str | None,
    steps: str | None,
    content: str,
    max_steps: int,
    width: int | None,
    top: int,
    plot_folder: str | None,
    as_json: bool,
    as_csv: bool,
) -> None:
    """Show TRACE through views; without --view, the default ones.

    Spans are half-open: 10:20 is 10 to 19.
    """
    from bmoe.route.analyze import ViewOptions, chosen_views  # noqa: PLC0415 (keeps `--help` fast)
    from bmoe.route.analyze import analyze as run  # noqa: PLC0415 (same)

    _one_format(as_json=as_json, as_csv=as_csv)
    chosen = chosen_views(views or ("default",))
    trace = _selected(trace_path, phase=phase, turn=turn, layers=layers, steps=steps)
    options = ViewOptions(
        content=content,
        max_steps=max_steps,
        width=width or shutil.get_terminal_size((100, 24)).columns,
        top=top,
    )
    _show(run(trace, views=chosen, options=options), as_json=as_json, as_csv=as_csv)
    if plot_folder is not None:
        from bmoe.route.plots import write_plots  # noqa: PLC0415 (an extra)

        for path in write_plots(trace, plot_folder):
            _say(f"wrote {path}")


@route_group.command(short_help="Replay a trace through cache policies.")
@_traces
@click.option(
    "--budgets", type=_Numbers(), metavar="MIB,...", help="MiB: a list, or a sweep FIRST:LAST:STEP."
)
@click.option(
    "--policies", metavar="NAME,...", help="Which.  [default: all that the reference has, and ours]"
)
@click.option(
    "--validate",
    "validate_mib",
    type=Number(1, _MOST_MIB),
    metavar="MIB",
    help="Compare a replay with what the trace recorded.",
)
@click.option(
    "--validate-policy",
    default="lru",
    show_default=True,
    metavar="NAME",
    help="With --validate: the policy of the run that recorded it.",
)
@click.option(
    "--bandwidth", type=_Positive(), metavar="MIB/S", help="Of the drive: predicts tokens per second."
)
@click.option(
    "--compute-ms",
    type=_Positive(),
    metavar="MS",
    help="With --bandwidth: a token's compute when all is resident.",
)
@click.option("--turn", metavar="SPAN", help="Only these turns.")
@_common
@click.pass_context
def replay(
    ctx: click.Context,
    trace_paths: Sequence[str],
    *,
    budgets: list[int] | None,
    policies: str | None,
    validate_mib: int | None,
    validate_policy: str,
    bandwidth: float | None,
    compute_ms: float | None,
    turn: str | None,
    as_json: bool,
    as_csv: bool,
) -> None:
    """Replay each TRACE through cache policies at several budgets.

    belady knows the future and is the bound. aged, and any policy of the engine, runs through the engine's
    own class; engine:NAME is the engine's where the reference has one of that name.
    """
    from bmoe.io.errors import UsageError  # noqa: PLC0415 (keeps `--help` fast)
    from bmoe.route.outcomes import DEFAULT_BUDGETS_MIB, Speed, default_policies  # noqa: PLC0415 (same)
    from bmoe.route.replay_report import replay_report  # noqa: PLC0415 (same)

    _one_format(as_json=as_json, as_csv=as_csv)
    if (bandwidth is None) != (compute_ms is None):
        raise click.UsageError("--bandwidth and --compute-ms go together", ctx)
    if len(trace_paths) > 1 and as_json:
        raise UsageError("--json takes one trace", hint="run once per trace")
    speed = (
        bandwidth
        and compute_ms
        and Speed(bandwidth_bytes_per_s=bandwidth * _MIB, compute_ns=compute_ms * 1e6)
    )
    names = tuple(dict.fromkeys(policies.split(","))) if policies is not None else default_policies()
    for i, path in enumerate(trace_paths):
        if i and not as_json:
            click.echo()
        trace = _selected(path, phase="all", turn=turn, layers=None, steps=None)
        report = replay_report(
            trace,
            policies=names,
            budgets_mib=budgets or list(DEFAULT_BUDGETS_MIB),
            speed=speed or None,
            validate_mib=validate_mib,
            validate_policy=validate_policy,
            grids=not (as_json or as_csv),
        )
        _show(report, as_json=as_json, as_csv=as_csv)


@route_group.command(short_help="Replay dropping of cold experts against a smaller top-k.")
@_trace
@click.option(
    "--fraction",
    "fractions",
    type=_Positive(),
    multiple=True,
    help="Of 1/k, below which a weight is dropped; repeatable.  [default: 0.25 0.5 0.75 1]",
)
@click.option("--turn", metavar="SPAN", help="Only these turns.")
@_common
def drop(
    trace_path: str, *, fractions: Sequence[float], turn: str | None, as_json: bool, as_csv: bool
) -> None:
    """Say what dropping routings that missed and weigh little would have saved in TRACE, and lost.

    Residency is the recorded one. A static smaller top-k stands beside it.
    """
    from bmoe.route.drop import FRACTIONS  # noqa: PLC0415 (keeps `--help` fast)
    from bmoe.route.drop import drop as run  # noqa: PLC0415 (same)

    _one_format(as_json=as_json, as_csv=as_csv)
    trace = _selected(trace_path, phase="all", turn=turn, layers=None, steps=None)
    _show(
        _report("bmoe route drop", trace, run(trace, fractions=fractions or FRACTIONS)),
        as_json=as_json,
        as_csv=as_csv,
    )


@route_group.command(short_help="Score predictors of the next experts.")
@_trace
@click.option("--at", "width", type=Number(1, 100_000), help="Experts named per layer.  [default: top-k]")
@click.option("--turn", metavar="SPAN", help="Only these turns.")
@_common
def predict(trace_path: str, *, width: int | None, turn: str | None, as_json: bool, as_csv: bool) -> None:
    """Say which of the experts of TRACE's second half could have been known beforehand, and by what."""
    from bmoe.route.predict import predict as run  # noqa: PLC0415 (keeps `--help` fast)

    _one_format(as_json=as_json, as_csv=as_csv)
    trace = _selected(trace_path, phase="all", turn=turn, layers=None, steps=None)
    _show(_report("bmoe route predict", trace, run(trace, width=width)), as_json=as_json, as_csv=as_csv)


@route_group.command(short_help="Write the experts worth preloading.")
@_traces
@click.option(
    "--budget", "budget_mib", type=Number(1, _MOST_MIB), required=True, metavar="MIB", help="Of the cache."
)
@click.option("-o", "--output", required=True, metavar="FILE", help="Where to; an existing file is replaced.")
def warmset(trace_paths: Sequence[str], *, budget_mib: int, output: str) -> None:
    """Write the experts that fill a cache best before the first token, from one or more TRACEs."""
    from bmoe.present import mib, one_line  # noqa: PLC0415 (keeps `--help` fast)
    from bmoe.route.reading import read_trace  # noqa: PLC0415 (same)
    from bmoe.route.warmset import as_json, warm_set, write_whole  # noqa: PLC0415 (same)

    traces = [read_trace(path) for path in trace_paths]
    for trace in traces:
        for note in trace.notes:
            _say(f"{trace.path}: {note}")
    warm = warm_set(traces, budget_bytes=budget_mib * _MIB)
    write_whole(output, as_json(warm))
    click.echo(
        one_line(
            f"{output}: {len(warm.chosen)} experts, {mib(warm.size_bytes)}, {100 * warm.covered:.1f} % of "
            "the traces' decoded routings"
        )
    )


@route_group.command(short_help="Write a page to look at a trace with.")
@_trace
@click.option(
    "--metrics", "metrics_path", metavar="FILE", help="Figures per token of the same run: CSV, or a JSON log."
)
@_phase
@_filters
@click.option("--no-curves", is_flag=True, help="Without the replay of policies, which takes seconds.")
@click.option("-o", "--output", required=True, metavar="FILE", help="Where to; an existing file is replaced.")
def html(
    trace_path: str,
    *,
    metrics_path: str | None,
    phase: str | None,
    turn: str | None,
    layers: str | None,
    steps: str | None,
    no_curves: bool,
    output: str,
) -> None:
    """Write TRACE as one HTML file that needs no network: heat map, matrix, hot experts, tokens, policies."""
    from bmoe.present import one_line  # noqa: PLC0415 (keeps `--help` fast)
    from bmoe.route.metrics import read_metrics  # noqa: PLC0415 (same)
    from bmoe.route.viewer import curves, render  # noqa: PLC0415 (same)
    from bmoe.route.warmset import write_whole  # noqa: PLC0415 (same)

    metrics = None if metrics_path is None else read_metrics(metrics_path)
    trace = _selected(trace_path, phase=phase or "all", turn=turn, layers=layers, steps=steps)
    page = render(trace, metrics=metrics, outcomes=[] if no_curves else curves(trace))
    write_whole(output, page)
    for note in (*trace.notes, *(metrics.notes if metrics else ())):
        _say(note)
    click.echo(one_line(f"{output}: {len(page) / _MIB:.1f} MiB, {trace.rows} routings"))


def _selected(
    path: str, *, phase: str | None, turn: str | None, layers: str | None, steps: str | None
) -> RouteTrace:
    from bmoe.route.reading import read_trace  # noqa: PLC0415 (keeps `--help` fast)
    from bmoe.route.spans import parse_spans  # noqa: PLC0415 (same)
    from bmoe.route.trace import DECODE, PREFILL  # noqa: PLC0415 (same)

    spans = {
        name: None if text is None else parse_spans(text)
        for name, text in (("turn", turn), ("layers", layers), ("steps", steps))
    }
    trace = read_trace(path)
    if phase is None:
        phase = "decode" if (trace.phase == DECODE).any() else "all"
    return trace.select(phase={"decode": DECODE, "prefill": PREFILL, "all": None}[phase], **spans)


def _report(tool: str, trace: RouteTrace, tables: list[Any]) -> Report:
    from bmoe.route.analyze import heading, trace_facts  # noqa: PLC0415 (keeps `--help` fast)
    from bmoe.route.report import Report  # noqa: PLC0415 (same)

    return Report(
        tool=tool, trace=trace_facts(trace), heading=heading(trace), tables=tables, notes=trace.notes
    )


def _one_format(*, as_json: bool, as_csv: bool) -> None:
    if as_json and as_csv:
        raise click.UsageError("--json and --csv exclude each other", click.get_current_context())


def _show(report: Report, *, as_json: bool, as_csv: bool) -> None:
    from bmoe.route import report as forms  # noqa: PLC0415 (keeps `--help` fast)

    for note in report.notes:
        _say(note)
    render = forms.as_json if as_json else forms.as_csv if as_csv else forms.as_text
    click.echo(render(report), nl=False)
    if as_csv:
        for remark in report.remarks:
            _say(remark)


def _say(note: str) -> None:
    from bmoe.present import one_line  # noqa: PLC0415 (keeps `--help` fast)

    click.echo(f"note: {one_line(note)}", err=True)
