"""A result in words and tables, for a terminal or a pipe.

Owns the layout. Must not know how anything was measured. Lines are never folded: a table that is wider
than the terminal is better wrapped by it than cut by us.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, TextIO

from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bmoe.tools.iobench.result import Group, Knee, Latencies, Replay, Result, Row, Verdict

_GIB: Final = 1 << 30
_WIDTH: Final = 240


def show(result: Result, stream: TextIO) -> None:
    """Writes everything that a user wants to know."""
    console = Console(file=stream, width=_WIDTH, highlight=False, markup=False, emoji=False, soft_wrap=True)

    def say(line: str = "") -> None:
        # As `one_line`, but blanks stay: paths and names may be hostile.
        console.print("".join(c if c.isprintable() else ascii(c)[1:-1] for c in line), soft_wrap=True)

    for line in _head(result):
        say(line)
    say()
    if result.rows:
        console.print(_rows_table(result.rows))
        say()
        for knee in result.knees:
            say(_knee_line(knee, named=len(result.knees) > 1))
        say(peak_line(result.knees))
    if result.verdict is not None:
        for line in _verdict_lines(result.verdict):
            say(line)
    if result.replay is not None:
        for line in _replay_head(result.replay):
            say(line)
        say()
        console.print(_replay_table(result.replay))
        say()
    for flag in result.flags:
        say(f"NOTE ({flag.code}): {flag.text}")


def peak_line(knees: Sequence[Knee]) -> str:
    """The highest point of all curves."""
    best = max(knees, key=lambda knee: knee.peak_mib_per_s)
    return f"peak {best.peak_mib_per_s:.1f} MiB/s at {best.peak_lanes} lanes"


def group_name(group: Group) -> str:
    """A curve in a few words."""
    if group.pattern == "experts":
        what = f"experts of {_kib(group.read_bytes)} in {group.pieces} slices"
    else:
        what = f"{_kib(group.read_bytes)} x scatter {group.pieces}"
    load = f", compute load {group.compute_load}" if group.compute_load else ""
    return f"{group.backend}, {what}{load}"


def _kib(size_bytes: int) -> str:
    return f"{size_bytes / 1024:.0f} KiB"


def _head(result: Result) -> list[str]:
    f, h = result.file, result.host
    where = f", {f.file_system} on {f.source}" if f.file_system is not None else ""
    how = f"O_DIRECT, blocks of {f.block_bytes} bytes" if f.direct else "BUFFERED"
    cached = "unknown" if f.cached_before is None else f"{100 * f.cached_before:.0f} %"
    lines = [
        f"model  {f.path} ({f.size_bytes / _GIB:.2f} GiB{where}; {how}; {cached} was in the page cache)",
        f"host   Linux {h.kernel}, {h.machine}, {h.cpus} CPUs; memory {h.memory_mib_per_s:.0f} MiB/s",
    ]
    if result.rows:
        groups = [row.group for row in result.rows]
        sizes = sorted({g.read_bytes // 1024 for g in groups if g.pattern == "random"})
        scatter = sorted({g.pieces for g in groups if g.pattern == "random"})
        loads = sorted({g.compute_load for g in groups})
        read = (
            f"read size {_list(sizes)} KiB x scatter {_list(scatter)}"
            if sizes
            else "read size of the experts"
        )
        lines.append(
            f"{read}, {result.seconds:g} s per row in {result.repeat} interleaved "
            f"sample{'s' if result.repeat > 1 else ''}, compute load {_list(loads)}"
        )
    return lines


def _list(numbers: Sequence[int]) -> str:
    return ",".join(map(str, numbers))


def _table() -> Table:
    return Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))


def _rows_table(rows: Sequence[Row]) -> Table:
    table = _table()
    groups = {row.group for row in rows}
    shaped = len({(g.pattern, g.read_bytes, g.pieces) for g in groups}) > 1
    loaded = len({g.compute_load for g in groups}) > 1
    for name, justify in (
        *((("read", "left"),) if shaped else ()),
        *((("load", "right"),) if loaded else ()),
        ("lanes", "right"),
        ("MiB/s", "right"),
        ("min..max", "right"),
        ("lat_ms", "right"),
        ("submit µs\np50/p90/p99/max", "right"),
        ("complete µs\np50/p90/p99/max", "right"),
        ("CPU µs/MiB\nuser+system", "right"),
        ("reads", "right"),
        ("read_MiB", "right"),
        ("mode", "left"),
    ):
        table.add_column(name, justify="left" if justify == "left" else "right", no_wrap=True)
    for row in rows:
        g = row.group
        what = f"{_kib(g.read_bytes)}" + (f"/{g.pieces}" if g.pieces > 1 else "")
        cells = [
            *([f"experts {what}" if g.pattern == "experts" else what] if shaped else []),
            *([str(g.compute_load)] if loaded else []),
            str(row.lanes),
            f"{row.mib_per_s:.1f}",
            f"{min(row.samples_mib_per_s):.0f}..{max(row.samples_mib_per_s):.0f}",
            f"{row.latency_ms:.2f}",
            _latencies(row.submission_us),
            _latencies(row.completion_us),
            f"{row.cpu_user_us_per_mib:.0f}+{row.cpu_system_us_per_mib:.0f}",
            str(row.reads),
            f"{row.read_mib:.0f}",
            row.mode,
        ]
        table.add_row(*cells)
    return table


def _latencies(latencies: Latencies) -> str:
    return "/".join(f"{value:.0f}" for value in (latencies.p50, latencies.p90, latencies.p99, latencies.max))


def _knee_line(knee: Knee, *, named: bool) -> str:
    prefix = f"{group_name(knee.group)}: " if named else ""
    return (
        f"{prefix}knee at {knee.knee_lanes} lanes, {knee.knee_mib_per_s:.1f} MiB/s "
        f"(peak {knee.peak_mib_per_s:.1f} at {knee.peak_lanes})"
    )


def _verdict_lines(v: Verdict) -> list[str]:
    lines = ["", f"for the engine, by the curve of {group_name(v.knee.group)}:"]
    lines.append(f"  queue depth  {v.queue_depth} (the fewest within 3 % of the peak)")
    for scatter in v.scatter:
        percent = 100 * (1 - scatter.ratio)
        says = {
            True: f"costs {percent:.0f} %",
            False: f"costs nothing ({-percent:+.1f} %)",
            None: f"is unclear: {-percent:+.0f} %, but the samples overlap; more --seconds or --repeat tell",
        }[scatter.costs]
        load = f", compute load {scatter.compute_load}" if scatter.compute_load else ""
        lines.append(
            f"  scatter      {_kib(scatter.read_bytes)} in {scatter.pieces} pieces {says} "
            f"({scatter.backend}{load})"
        )
    if v.cycle_mib is None:
        lines.append(f"  tok/s bound  none: {v.no_bounds_reason}")
        return lines
    bounds = ", ".join(f"{b.tokens_per_s:.3g} at {100 * b.hit_rate:.0f} % hits" for b in v.bounds)
    lines.append(f"  tok/s bound  {bounds} (a token reads {v.cycle_mib:.1f} MiB with nothing cached)")
    size = v.model_slice_bytes or 0
    if v.knee.group.pattern != "experts" and not 0.5 <= v.knee.group.piece_bytes / max(size, 1) <= 2:
        lines.append(
            f"               measured with reads of {_kib(v.knee.group.piece_bytes)}, the model's are of "
            f"{_kib(size)}: --engine-pattern reads those"
        )
    return lines


def _replay_head(replay: Replay) -> list[str]:
    laid = "read where they lie" if replay.layout == "model" else "laid over a file that is another model"
    cache = f"{replay.cache_mib} MiB, policy {replay.policy}, at most {replay.cache_experts} experts"
    return [
        f"trace  {replay.trace} ({replay.trace_model}, {replay.cycle_mib:.0f} MiB of experts per token)",
        f"cache  {cache}; {laid}",
    ]


def _replay_table(replay: Replay) -> Table:
    table = _table()
    for name in (
        "depth",
        "GiB/s",
        "min..max",
        "ms/token",
        "tok/s bound",
        "token ms\np50/p90/p99/max",
        "hits %",
        "MiB/token",
        "prefill MiB",
        "prefill GiB/s",
    ):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("mode", no_wrap=True)
    for row in replay.rows:
        token = row.token_us
        how = "direct" if row.direct else "BUFFERED"
        rates = row.samples_gib_per_s
        table.add_row(
            str(row.queue_depth),
            _or_dash(row.gib_per_s, ".2f"),
            f"{min(rates):.2f}..{max(rates):.2f}" if rates else "-",
            f"{row.mean_token_ms:.2f}",
            _or_dash(row.tokens_per_s, ".2f"),
            "/".join(f"{us / 1e3:.1f}" for us in (token.p50, token.p90, token.p99, token.max)),
            f"{100 * row.hit_rate:.1f}",
            f"{row.read_mib / row.tokens:.1f}",
            f"{row.prefill_read_mib:.0f}",
            _or_dash(row.prefill_gib_per_s, ".2f"),
            f"{row.backend} {how}{' registered' if row.registered else ''}",
        )
    return table


def _or_dash(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
