"""What came out: rows and ratios from runs, as one record and as Markdown.

Owns which figures a row has and how they are shown. Must not know how anything was measured. Not measured is
None, never zero.
"""

from __future__ import annotations

import dataclasses
import statistics
from typing import TYPE_CHECKING, Any, Final

from bmoe.bench.bounds import Bounds, bounds
from bmoe.bench.ratios import paired_ratio, spread
from bmoe.bench.runner import kept_by_round, reference_by_round
from bmoe.bench.sides import Side, all_cached, drive_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from bmoe.bench.runner import Run

FIGURES: Final = (
    "decode_tok_per_s",
    "prefill_tok_per_s",
    "ttft_s",
    "load_s",
    "mib_per_token",
    "gib_per_s",
    "cpu_s_per_token",
    "hit_rate",
    "stall_ms_per_token",
    "compute_ms_per_token",
    "submit_us_p50",
    "major_faults_per_token",
    "prefill_mib",
    "peak_anon_mib",
    "peak_file_mib",
    "drive_gib_per_s",
    "drive_cpu_us_per_mib",
    "burst_cpu_us_per_mib",
)
BOUNDS: Final = ("layered", "at_depth", "ideal")


def make_rows(sides: Sequence[Side], runs: Sequence[Run]) -> list[dict[str, Any]]:
    """One row per side."""
    return [_row(side, runs) for side in sides]


def _row(side: Side, runs: Sequence[Run]) -> dict[str, Any]:
    mine = kept_by_round(runs, side.key)
    kept = [run for run in runs if run["key"] == side.key and run["kept"]]
    counts: dict[str, int] = {}
    for run in kept:
        for flag in run["flags"]:
            counts[flag] = counts.get(flag, 0) + 1
    figures: dict[str, Any] = {}
    for name in FIGURES:
        values = [run["figures"][name] for run in mine.values() if run["figures"].get(name) is not None]
        figures[name] = _as_json(spread(values))
    compute_from, found = _bounds_by_round(side, mine, runs)
    return {
        "side": side.name,
        "key": side.key,
        "kind": side.kind,
        "counts": side.counts,
        "reference": side.reference,
        "figures": figures,
        "bounds": {name: _as_json(spread([getattr(b, name) for b in found.values()])) for name in BOUNDS},
        # Round by round, since the drive drifts: not the median over the median.
        "share_of_bound": {
            name: _as_json(
                spread([mine[r]["figures"]["decode_tok_per_s"] / getattr(b, name) for r, b in found.items()])
            )
            for name in BOUNDS
        },
        "compute_from": compute_from if found else None,
        "flags": counts,
        "repeated": sum(1 for run in runs if run["key"] == side.key and not run["kept"]),
        "error": next((run["error"] for run in kept if run["error"] is not None), None),
    }


def _bounds_by_round(
    side: Side, mine: Mapping[int, Run], runs: Sequence[Run]
) -> tuple[str | None, dict[int, Bounds]]:
    # A lever changes what is computed, or reads what no layer has asked for.
    if side.kind != "stream" or side.counts != "decode" or side.lever is not None:
        return None, {}
    drive = reference_by_round(runs, drive_of(side).key, mine)
    cached = reference_by_round(runs, all_cached(side).key, mine)
    found: dict[int, Bounds] = {}
    for number, run in mine.items():
        if number not in drive:
            continue
        compute = cached.get(number) or _own_compute(run["figures"])
        bound = bounds(run["figures"], compute, drive[number])
        if bound is not None:
            found[number] = bound
    return ("everything cached" if cached else "own run"), found


def _own_compute(figures: Mapping[str, Any]) -> dict[str, Any]:
    """A run without its waiting, where not all experts can be cached: too slow by what the loop takes."""
    stall_s = figures["stall_ms_per_token"] / 1e3
    return {
        "decode_tok_per_s": 1 / max(1 / figures["decode_tok_per_s"] - stall_s, 1e-9),
        "experts_s_per_token": max(figures["experts_s_per_token"] - stall_s, 0.0),
        "layers": figures["layers"],
    }


def make_ratios(sides: Sequence[Side], runs: Sequence[Run], baseline: str) -> list[dict[str, Any]]:
    """Each row against the baseline; prefill rows against the baseline's row of that length."""
    named = {side.name: side for side in sides}
    found = []
    for side in sides:
        name = baseline if side.counts == "decode" else f"prefill {side.prompt_tokens}, {baseline}"
        if side.kind == "drive" or side.name == name or name not in named:
            continue
        figure = "decode_tok_per_s" if side.counts == "decode" else "prefill_tok_per_s"
        ratio = paired_ratio(_by_round(runs, side, figure), _by_round(runs, named[name], figure))
        if ratio is not None:
            found.append({"side": side.name, "baseline": name, "figure": figure, **dataclasses.asdict(ratio)})
    return found


def _by_round(runs: Sequence[Run], side: Side, figure: str) -> dict[int, float]:
    mine = kept_by_round(runs, side.key)
    return {n: run["figures"][figure] for n, run in mine.items() if run["figures"].get(figure) is not None}


def default_baseline(sides: Sequence[Side]) -> str:
    """The resident model without repacking, which computes as streaming does; else the first row."""
    rows = [side for side in sides if not side.reference and side.counts == "decode"]
    for name in ("resident-norepack", "resident"):
        for side in rows:
            if side.name.split(",")[0] == name:
                return side.name
    return rows[0].name


# --- Markdown ----------------------------------------------------------------------------------------------

_COLUMNS: Final = (
    ("TTFT s", "ttft_s", 1.0, ".2f"),
    ("load s", "load_s", 1.0, ".2f"),
    ("MiB/token", "mib_per_token", 1.0, ".1f"),
    ("GiB/s", "gib_per_s", 1.0, ".2f"),
    ("hits", "hit_rate", 100.0, ".1f"),
    ("CPU ms/token", "cpu_s_per_token", 1e3, ".1f"),
    ("anon MiB", "peak_anon_mib", 1.0, ".0f"),
    ("file MiB", "peak_file_mib", 1.0, ".0f"),
)
_PREFILL_COLUMNS: Final = (
    ("TTFT s", "ttft_s", 1.0, ".2f"),
    ("load s", "load_s", 1.0, ".2f"),
    ("MiB read", "prefill_mib", 1.0, ".0f"),
    ("anon MiB", "peak_anon_mib", 1.0, ".0f"),
    ("file MiB", "peak_file_mib", 1.0, ".0f"),
)


def markdown(record: Mapping[str, Any]) -> str:
    """The record as tables and notes."""
    lines = []
    ratios = {ratio["side"]: ratio for ratio in record["ratios"]}
    rows = [row for row in record["rows"] if row["kind"] != "drive"]
    if record["inputs"]["replay_routing"] is not None:
        lines += ["SYNTHETIC: streaming sides route as a recorded trace of another model did.", ""]
    decode = [row for row in rows if row["counts"] == "decode"]
    if decode:
        heads = ["side", "tok/s (min to max)", f"x {record['baseline']}", "prefill tok/s"]
        heads += [c[0] for c in _COLUMNS]
        heads += ["layered", "of it", "at depth", "of it", "ideal", "of it"]
        lines += _table(heads, [_decode_cells(row, ratios) for row in decode])
    prefill = [row for row in rows if row["counts"] == "prefill"]
    if prefill:
        heads = ["side", "prefill tok/s (min to max)", "x baseline", *(c[0] for c in _PREFILL_COLUMNS)]
        lines += ["", *_table(heads, [_prefill_cells(row, ratios) for row in prefill])]
    notes = [*_drive_notes(record), *_lossy_notes(record), *_flag_notes(rows), *_simulation_notes(record)]
    return "\n".join([*lines, "", *notes]) if notes else "\n".join(lines)


def _decode_cells(row: Mapping[str, Any], ratios: Mapping[str, Any]) -> list[str]:
    cells = [row["side"], _rate(row, "decode_tok_per_s"), _ratio(ratios.get(row["side"]))]
    cells.append(_cell(row, "prefill_tok_per_s", 1.0, ".1f"))
    cells += [_cell(row, *column[1:]) for column in _COLUMNS]
    for name in BOUNDS:
        bound, share = row["bounds"][name], row["share_of_bound"][name]
        cells.append("" if bound is None else f"{bound['median']:.1f}")
        cells.append("" if share is None else f"{100 * share['median']:.0f} %")
    return cells


def _prefill_cells(row: Mapping[str, Any], ratios: Mapping[str, Any]) -> list[str]:
    cells = [row["side"], _rate(row, "prefill_tok_per_s"), _ratio(ratios.get(row["side"]))]
    return cells + [_cell(row, *column[1:]) for column in _PREFILL_COLUMNS]


def _rate(row: Mapping[str, Any], name: str) -> str:
    figure = row["figures"][name]
    if figure is None:
        return "failed" if row["error"] is not None else ""
    mark = " !" if row["flags"] else ""
    digits = 1 if figure["median"] >= 1 else 2
    return f"{figure['median']:.{digits}f} ({figure['low']:.{digits}f} to {figure['high']:.{digits}f}){mark}"


def _ratio(ratio: Mapping[str, Any] | None) -> str:
    return "" if ratio is None else f"{ratio['ratio']:.3g} ({ratio['low']:.3g} to {ratio['high']:.3g})"


def _cell(row: Mapping[str, Any], name: str, scale: float, form: str) -> str:
    figure = row["figures"][name]
    return "" if figure is None else format(figure["median"] * scale, form)


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    return lines + ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]


def _drive_notes(record: Mapping[str, Any]) -> list[str]:
    notes = []
    for row in record["rows"]:
        rate = row["figures"]["drive_gib_per_s"]
        if row["kind"] != "drive" or rate is None:
            continue
        runs = [run["figures"] for run in record["runs"] if run["key"] == row["key"] and run["figures"]]
        read_kib, depth = runs[0]["read_bytes"] / 1024, runs[0]["depth"]
        bursts = {n: statistics.median(run["burst_s"][n] for run in runs) for n in runs[0]["burst_s"]}
        cpu = row["figures"]["drive_cpu_us_per_mib"]["median"]
        burst_cpu = row["figures"]["burst_cpu_us_per_mib"]["median"]
        notes.append(
            f"- {row['side']}: {rate['median']:.2f} GiB/s ({rate['low']:.2f} to {rate['high']:.2f}) in reads "
            f"of {read_kib:.0f} KiB, {depth} in flight; {cpu:.1f} us of CPU per MiB, {burst_cpu:.1f} in "
            "bursts of 12. "
            f"Bursts, reads: ms: {', '.join(f'{n}: {1e3 * s:.2f}' for n, s in bursts.items())}."
        )
    return notes


def _lossy_notes(record: Mapping[str, Any]) -> list[str]:
    said: dict[str, dict[str, None]] = {}
    streaming = {row["side"] for row in record["rows"] if row["kind"] == "stream"}
    for run in record["runs"]:
        if lossy := ((run["figures"] or {}).get("effective") or {}).get("lossy"):
            said.setdefault(lossy, {})[run["side"]] = None
    return [
        f"- LOSSY: {lossy}: {'; '.join(sides) if sides.keys() != streaming else 'all streaming sides'}."
        for lossy, sides in said.items()
    ]


def _flag_notes(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    alike: dict[str, list[str]] = {}
    notes = []
    for row in rows:
        words = [f"{name} in {n} round{'s' if n != 1 else ''}" for name, n in row["flags"].items()]
        if words:
            alike.setdefault(", ".join(words), []).append(row["side"])
        if row["error"] is not None:
            notes.append(f"- {row['side']} failed: {row['error']}")
        if row["compute_from"] == "own run":
            notes.append(f"- {row['side']}: the bounds take its own compute time, since not all experts fit.")
    return [f"- ! {words}: {'; '.join(names)}." for words, names in alike.items()] + notes


def _simulation_notes(record: Mapping[str, Any]) -> list[str]:
    notes = []
    for s in record["simulation"] or ():
        predicted, measured = s["predicted_tok_per_s"], s["measured_tok_per_s"]
        off = 100 * (predicted / measured - 1)
        note = f"- {s['side']}: simulated {predicted:.1f} tok/s, measured {measured:.1f} ({off:+.1f} %)"
        notes.append(f"{note}; gave the latency." if s["calibrated_on"] == s["side"] else f"{note}.")
    return notes


def _as_json(value: object) -> dict[str, Any] | None:
    return None if value is None else dataclasses.asdict(value)  # type: ignore[call-overload]  # a dataclass or None
