"""Reports and comparisons in words: headings, tiles and tables, alike for a terminal and a page.

Owns how figures are written. Must not compute any, nor know where the text goes. Text that comes from logs is
passed on as it is: who shows it makes it harmless.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from bmoe.logs.compare import letter
from bmoe.present import mib

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bmoe.logs.compare import Comparison, Difference
    from bmoe.logs.report import RunReport, Window
    from bmoe.logs.run_data import Run

_MIB: Final = 1 << 20
_UNKNOWN: Final = "–"
_MEMORY_NAMES: Final = {
    "rss": "resident",
    "rss_anon": "anonymous",
    "rss_file": "of files",
    "swap": "in swap",
    "mem_available": "available",
    "cache_budget": "cache budget",
}
_BESIDE_NAMES: Final = {
    "experts": "in expert matmuls",
    "loop": "event loop busy",
    "io": "drive busy",
    "cpu": "CPU, all threads",
}


@dataclass(frozen=True, kw_only=True)
class Tile:
    """One figure, large.

    Attributes:
        label, value, meaning: What it is, how much, and over what.
    """

    label: str
    value: str
    meaning: str


@dataclass(frozen=True, kw_only=True)
class Table:
    """Cells as text, rows of equal length.

    Attributes:
        title: What it shows.
        header: A title per column.
        rows: The cells.
    """

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]


def about_run(run: Run) -> str:
    """Which run it is, in one line."""
    facts = run.facts
    parts = [f"run {run.run_id}", run.started_at, facts["architecture"], facts["mode"]]
    if facts["io_backend"]:
        parts.append(str(facts["io_backend"]))
    if facts["policy"]:
        parts.append(f"policy {facts['policy']}")
    if facts["cache_bytes"]:
        parts.append(f"cache {mib(facts['cache_bytes'])}")
    if facts["threads"]:
        parts.append(_count(facts["threads"], "thread"))
    return ", ".join(str(part) for part in parts if part)


def lettered(runs: Sequence[Run]) -> list[str]:
    """Which run is which letter, a line each."""
    return [f"{letter(i)}: {run.model}, {about_run(run)}" for i, run in enumerate(runs)]


def tiles(found: RunReport) -> list[Tile]:
    """What is looked at first."""
    speed, cache = found.speed, found.cache
    made = [
        Tile(
            label="speed",
            value=_rate(speed.mean),
            meaning=f"{_count(speed.tokens, 'token')} in {speed.wall_ns / 1e9:.1f} s",
        ),
        Tile(
            label="median", value=_rate(speed.median), meaning=f"p5 {_bare(speed.p5)}, p95 {_bare(speed.p95)}"
        ),
    ]
    if cache.hit_rate is not None:
        made.append(Tile(label="hits", value=_percent(cache.hit_rate), meaning="of the experts looked up"))
    elif cache.cumulative_hit_rate is not None:
        made.append(
            Tile(
                label="hits", value=_percent(cache.cumulative_hit_rate), meaning="prompt included, as logged"
            )
        )
    if cache.read_bytes is not None:
        made.append(Tile(label="read", value=f"{cache.read_bytes / _MIB:.1f} MiB", meaning="per token"))
    stall = next((part for part in found.time if part.name == "stall"), None)
    if stall is not None:
        made.append(
            Tile(label="stall", value=_percent(stall.share), meaning=f"{_ms(stall.ns_per_token)} per token")
        )
    resident = next((m for m in found.memory if m.name == "rss"), None)
    if resident is not None:
        made.append(Tile(label="memory", value=mib(resident.most_bytes), meaning="resident at most"))
    if found.prefill is not None:
        made.append(
            Tile(
                label="prompt",
                value=_rate(found.prefill.tokens_per_s),
                meaning=f"{_count(found.prefill.tokens, 'token')} in {found.prefill.wall_ns / 1e9:.1f} s",
            )
        )
    if found.load_ns is not None:
        made.append(Tile(label="load", value=f"{found.load_ns / 1e9:.1f} s", meaning="until ready"))
    return made


def report_tables(found: RunReport) -> list[Table]:
    """All figures of a report."""
    made = [_speed(found), _time(found)]
    if found.beside:
        made.append(
            Table(
                title="beside it",
                header=("what", "per token", "of llama_decode"),
                rows=[
                    (_BESIDE_NAMES[b.name], _ms(b.ns_per_token), _percent(b.of_wall)) for b in found.beside
                ],
            )
        )
    made += [_cache(found), _windows(found.windows)]
    if found.warm_up is not None:
        made.append(_warm_up(found))
    if found.memory:
        made.append(
            Table(
                title="memory",
                header=("what", "first", "last", "least", "most"),
                rows=[
                    (
                        _MEMORY_NAMES[m.name],
                        *(mib(v) for v in (m.first_bytes, m.last_bytes, m.least_bytes, m.most_bytes)),
                    )
                    for m in found.memory
                ],
            )
        )
    return [table for table in made if table.rows]


def run_tables(run: Run) -> list[Table]:
    """What was set, where it ran and what the log holds."""
    events = ", ".join(f"{count} {event}" for event, count in run.events.items())
    facts = [
        ("run", run.run_id),
        ("started", run.started_at or _UNKNOWN),
        ("log", f"{run.facts['file'] or _UNKNOWN} ({run.facts['source']})"),
        ("model", run.model),
        ("complete", {True: "yes", False: "no"}.get(run.facts["complete"], _UNKNOWN)),
        ("exit code", _UNKNOWN if run.facts["exit_code"] is None else str(run.facts["exit_code"])),
        ("prompt", run.facts["prompt_sha256"] or _UNKNOWN),
        ("events", events or _UNKNOWN),
    ]
    made = [Table(title="run", header=("what", "value"), rows=facts)]
    config = run.config or {
        name: run.facts[name]
        for name in (
            "architecture",
            "mode",
            "io_backend",
            "policy",
            "cache_bytes",
            "threads",
            "context_tokens",
        )
        if run.facts[name] is not None
    }
    for title, values in (
        ("configuration", config),
        ("machine", run.machine),
        ("versions", run.versions),
        ("summary in the log", run.summary),
    ):
        rows = [(key, value_text(value)) for key, value in values.items() if value is not None]
        if rows:
            made.append(Table(title=title, header=("what", "value"), rows=rows))
    return made


def comparison_tables(found: Comparison) -> list[Table]:
    """What differs in configuration, then every pair's figures."""
    letters = [str(run["letter"]) for run in found.runs]
    made = [
        Table(
            title="set differently",
            header=("what", *letters),
            rows=[(s.name, *(value_text(v) for v in s.values)) for s in found.settings]
            or [("nothing that the logs tell", *("" for _ in letters))],
        )
    ]
    for name, pair in zip(letters[1:], found.pairs, strict=True):
        how = "the same tokens, paired" if pair.pairing.paired else f"not paired: {pair.pairing.reason}"
        after = f" after the first {found.skipped_tokens}" if found.skipped_tokens else ""
        made.append(
            Table(
                title=f"{name} against A, {_count(pair.pairing.tokens, 'token')}{after} ({how})",
                header=("figure", "A", name, "change", "95 % interval", "verdict"),
                rows=[_difference(d) for d in pair.differences],
            )
        )
    return made


def value_text(value: Any) -> str:
    """A setting as it would be logged, without quotes round text."""
    if value is None:
        return _UNKNOWN
    return value if isinstance(value, str) else json.dumps(value)


def _speed(found: RunReport) -> Table:
    s = found.speed
    rows = [
        ("mean, tokens over time", _rate(s.mean)),
        ("median of tokens", _rate(s.median)),
        ("p5", _rate(s.p5)),
        ("p95", _rate(s.p95)),
    ]
    if s.mean_with_overhead is not None:
        rows.append(("mean with overhead between tokens", _rate(s.mean_with_overhead)))
    if s.timeless_tokens:
        rows.append(("tokens without a time of their own", str(s.timeless_tokens)))
    if found.prefill is not None:
        rows.append(("prompt", _rate(found.prefill.tokens_per_s)))
    title = f"speed, {_count(s.tokens, 'token')}" + (f" in {found.turns} turns" if found.turns > 1 else "")
    return Table(title=title, header=("what", "speed"), rows=rows)


def _time(found: RunReport) -> Table:
    return Table(
        title="where the time went",
        header=("part", "per token", "share"),
        rows=[(part.name, _ms(part.ns_per_token), _percent(part.share)) for part in found.time],
    )


def _cache(found: RunReport) -> Table:
    c = found.cache
    rows = [
        ("hit rate", None if c.hit_rate is None else _percent(c.hit_rate)),
        ("hit rate, prompt included", _percent(c.cumulative_hit_rate) if c.cumulative_hit_rate else None),
        ("read", None if c.read_bytes is None else f"{c.read_bytes / _MIB:.2f} MiB"),
        ("reads", _plain(c.reads)),
        ("evictions", _plain(c.evictions)),
        ("rereads", _plain(c.rereads)),
        ("read latency, mean", None if c.read_latency_ns is None else _ms(c.read_latency_ns)),
        ("read latency, p95", None if c.read_latency_p95_ns is None else _ms(c.read_latency_p95_ns)),
        ("submission latency, mean", None if c.submit_latency_ns is None else _ms(c.submit_latency_ns)),
        ("minor faults", _plain(c.minor_faults)),
        ("major faults", _plain(c.major_faults)),
    ]
    return Table(
        title="cache, reads and faults, per token",
        header=("what", "value"),
        rows=[(name, value) for name, value in rows if value is not None],
    )


def _windows(windows: Sequence[Window]) -> Table:
    return Table(
        title="over time",
        header=("tokens", "tok/s", "hits", "MiB/token", "stall"),
        rows=[_window(w) for w in windows],
    )


def _warm_up(found: RunReport) -> Table:
    warm = found.warm_up
    assert warm is not None
    after = f", warm after {_count(warm.warm_after, 'token')}" if warm.warm_after is not None else ""
    return Table(
        title=f"warm-up: the first tokens against the second half{after}",
        header=("tokens", "tok/s", "hits", "MiB/token", "stall"),
        rows=[_window(warm.first), _window(warm.steady)],
    )


def _window(w: Window) -> tuple[str, ...]:
    read = w.read_bytes_per_token
    return (
        f"{w.first} to {w.end - 1}",
        _bare(w.tokens_per_s),
        _UNKNOWN if w.hit_rate is None else _percent(w.hit_rate),
        _UNKNOWN if read is None else f"{read / _MIB:.1f}",
        _UNKNOWN if w.stall_share is None else _percent(w.stall_share),
    )


def _difference(d: Difference) -> tuple[str, ...]:
    if d.kind == "ratio":
        change = _UNKNOWN if d.estimate is None else f"× {d.estimate:.4g}"
        unit = ""
    else:
        unit = " points" if d.unit == "%" else ""
        change = _UNKNOWN if d.estimate is None else f"{d.estimate:+.3g}{unit}"
    known = d.low is not None and d.high is not None
    verdict = d.verdict.partition(" (95 %")[0] + (" *" if d.shown and not d.corrected else "")
    return (
        f"{d.figure}, {d.unit}",
        _bare(d.base),
        _bare(d.other),
        change,
        f"{d.low:.4g} to {d.high:.4g}{unit}" if known else _UNKNOWN,
        verdict,
    )


def _rate(value: float | None) -> str:
    return _UNKNOWN if value is None else f"{_bare(value)} tok/s"


def _bare(value: float | None) -> str:
    if value is None:
        return _UNKNOWN
    return f"{value:.2f}" if abs(value) < 100 else f"{value:.0f}"


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _ms(value_ns: float) -> str:
    return f"{value_ns / 1e6:.3f} ms" if abs(value_ns) < 1e6 else f"{value_ns / 1e6:.2f} ms"


def _plain(value: float | None) -> str | None:
    return None if value is None else f"{value:.1f}"


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
