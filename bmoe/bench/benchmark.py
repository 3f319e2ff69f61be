"""One benchmark from its settings to its record.

Owns what is checked before the first run, what is written after each, and how an interrupted benchmark goes
on. Must not know the command line, nor how anything is shown.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime as dt
import hashlib
import json
import os
import platform
import statistics
import tempfile
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from bmoe import __version__
from bmoe.bench.caps import Limits, confined
from bmoe.bench.execute import Executor
from bmoe.bench.process import check_confinement
from bmoe.bench.report import default_baseline, make_ratios, make_rows
from bmoe.bench.runner import Plan, Runner, kept_by_round, reference_by_round
from bmoe.bench.sides import all_cached, drive_of
from bmoe.bench.state import MachineState
from bmoe.io import available_bytes, machine_memory
from bmoe.io.errors import FileError, FormatError, UsageError
from bmoe.io.whole_file import replace_file
from bmoe.simulate import calibrated, load_workload, simulate, with_fitted_latency

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from bmoe.bench.runner import Run
    from bmoe.bench.sides import Matrix, Side
    from bmoe.bench.state import StateReader
    from bmoe.model import ModelLayout
    from bmoe.simulate import Workload

SCHEMA: Final = 2
# Weights, cache and what else a process needs, of the memory that there is.
_ROOM: Final = 0.85
_RUN_FIELDS: Final = frozenset(("side", "key", "round", "kept", "flags", "entry", "figures", "error"))


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """What to measure.

    Attributes:
        matrix: The sides.
        text: What prompts and fed tokens are cut from.
        text_name: Where it is from.
        rounds, repeats, settle_s: See `bmoe.bench.runner.Plan`.
        timeout_s: For one run.
        baseline: Name of the side that others are compared with; None chooses.
        validate: Also predict every streaming side by simulation.
        record_path: Where the record is kept after each run; what it holds is not measured again.
        command: As typed.
    """

    matrix: Matrix
    text: str
    text_name: str
    rounds: int
    repeats: int
    settle_s: float
    timeout_s: float
    baseline: str | None = None
    validate: bool = False
    record_path: str | None = None
    command: str = ""


def everything_fits(layout: ModelLayout) -> bool:
    """Whether every expert can be cached on this machine, beside the rest of the model."""
    there = available_bytes()
    return there is None or layout.dense_bytes + layout.expert_bytes < _ROOM * there


def run_benchmark(
    settings: Settings,
    layout: ModelLayout,
    *,
    state: StateReader | None = None,
    on_run: Callable[[int, Side, int], None] = lambda *_: None,
) -> dict[str, Any]:
    """Measures.

    Args:
        settings: What.
        layout: The model's.
        state: The machine; tests put another in its place.
        on_run: See `Runner`.

    Returns:
        The record, as docs/schema/bench.v2.schema.json describes it.

    Raises:
        UsageError: A side cannot be run here, or the kept record is of something else.
        FileError, FormatError: The kept record cannot be read or written.
    """
    sides = settings.matrix.sides()
    baseline = settings.baseline or default_baseline(sides)
    if baseline not in {side.name for side in sides if not side.reference}:
        names = ", ".join(repr(side.name) for side in sides if not side.reference)
        raise UsageError(f"--baseline {baseline!r} is not one of {names}")
    paths = tuple(layout.facts.paths)
    _check_limits(sides, paths[0])
    executor = Executor(paths=paths, text=settings.text, timeout_s=settings.timeout_s)
    record = _heading(settings, layout, sides, baseline)
    if settings.record_path is not None:
        record["runs"], record["simulation"] = _resumed(settings.record_path, record)

    def save(runs: list[Run]) -> None:
        record["runs"] = runs
        record["rows"] = make_rows(sides, runs)
        record["ratios"] = make_ratios(sides, runs, baseline)
        if settings.record_path is not None:
            write_record(record, settings.record_path)

    plan = Plan(
        sides=tuple(sides),
        rounds=settings.rounds,
        repeats=settings.repeats,
        settle_s=settings.settle_s,
        paths=paths,
        model_bytes=sum(layout.facts.sizes_bytes),
    )
    runner = Runner(
        plan, executor, state or MachineState(), runs=record["runs"], on_run=on_run, on_saved=save
    )
    before = len(record["runs"])
    if len(runner.run()) > before:
        record["simulation"] = None  # of what was measured until then
    if settings.validate and record["simulation"] is None:
        record["simulation"] = _validation(settings, sides, record["runs"], executor)
        save(record["runs"])
    return record


def _check_limits(sides: Sequence[Side], path: str) -> None:
    """Before minutes of measuring, not after."""
    limits = {(side.cap_bytes, side.drive_bytes_per_s) for side in sides}
    for memory, rate in sorted(limits - {(None, None)}, key=str):
        with confined(Limits(memory_bytes=memory, drive_bytes_per_s=rate, path=path)) as confinement:
            check_confinement(confinement)


def _heading(settings: Settings, layout: ModelLayout, sides: Sequence[Side], baseline: str) -> dict[str, Any]:
    facts = layout.facts
    memory = machine_memory()
    return {
        "schema": SCHEMA,
        "tool": "bmoe bench",
        "version": __version__,
        "created_utc": dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
        "command": settings.command,
        "host": {
            "kernel": platform.release(),
            "machine": platform.machine(),
            "cpu": _cpu_name(),
            "cpus": len(os.sched_getaffinity(0)),
            "memory_bytes": memory.total_bytes,
        },
        "model": {
            "path": facts.paths[0],
            "bytes": sum(facts.sizes_bytes),
            "architecture": facts.architecture,
            "moe_layers": len(layout.layer_numbers),
            "experts": layout.experts,
            "top_k": layout.top_k,
            "expert_bytes": layout.expert_bytes,
            "dense_bytes": layout.dense_bytes,
            "cycle_bytes": layout.cycle_bytes,
        },
        "inputs": {
            "text": settings.text_name,
            "text_sha256": hashlib.sha256(settings.text.encode()).hexdigest(),
            "replay_routing": settings.matrix.replay_routing,
        },
        "rounds": settings.rounds,
        "repeats": settings.repeats,
        "baseline": baseline,
        "sides": [side.as_json() for side in sides],
        "runs": [],
        "rows": [],
        "ratios": [],
        "simulation": None,
    }


def _resumed(path: str, record: dict[str, Any]) -> tuple[list[Run], list[dict[str, Any]] | None]:
    """The runs and predictions of an earlier benchmark of the same thing; none if there was none."""
    try:
        with open(path, encoding="utf-8") as file:
            old = json.load(file)
    except FileNotFoundError:
        return [], None
    except OSError as error:
        raise FileError("cannot be read", path=path, got=error.strerror) from None
    except ValueError as error:
        raise FormatError(f"is no JSON: {error}", path=path) from None
    if not isinstance(old, dict) or old.get("tool") != "bmoe bench" or old.get("schema") != SCHEMA:
        raise FormatError("is not a record of bmoe bench", path=path, hint="another --json, or remove it")
    hint = "another --json, or remove it"
    try:
        for what, name in (("model", "bytes"), ("model", "path"), ("inputs", "text_sha256")):
            if old[what][name] != record[what][name]:
                raise UsageError(f"{path} was measured with another {what} ({name})", hint=hint)
        runs, simulation = old["runs"], old["simulation"]
        whole = all(run.keys() >= _RUN_FIELDS for run in runs)
    except (KeyError, TypeError, AttributeError):
        whole = False
    if not whole:
        raise FormatError("is not a whole record of bmoe bench", path=path, hint=hint)
    return runs, simulation


def write_record(record: dict[str, Any], path: str) -> None:
    """Writes a record whole or not at all.

    Raises:
        FileError: It cannot be written.
    """
    payload = json.dumps(record, indent=1, allow_nan=False) + "\n"
    try:
        replace_file(path, payload.encode("ascii"))
    except OSError as error:
        raise FileError("the record cannot be written", path=path, got=error.strerror) from error


def _validation(
    settings: Settings, sides: Sequence[Side], runs: Sequence[Run], executor: Executor
) -> list[dict[str, Any]]:
    """Every streaming side predicted from its routing, recorded in a run of its own for each top-k.

    With several sides, the first one that reads gives the machine's latency per layer; the others test it.
    """
    found: list[dict[str, Any]] = []
    work_of: dict[int | None, Workload] = {}
    fitted: dict[int, tuple[str, float]] = {}  # by threads
    wanted = [side for side in sides if _can_be_predicted(side) and kept_by_round(runs, side.key)]
    for side in wanted:
        kept = kept_by_round(runs, side.key)
        mine = {number: run for number, run in kept.items() if not run["flags"]} or kept
        drives = reference_by_round(runs, drive_of(side).key, mine)
        cached = reference_by_round(runs, all_cached(side).key, mine)
        if not drives or not cached or side.cache_bytes is None:
            continue
        # Memory that still has to be made costs time of its own, once: no steady state to predict.
        if not all(run["figures"].get("cache_full", True) for run in mine.values()):
            continue
        if side.n_expert_used not in work_of:
            work_of[side.n_expert_used] = _recorded(side, settings.matrix.model, executor)
        work = work_of[side.n_expert_used]
        rates = {number: run["figures"]["decode_tok_per_s"] for number, run in mine.items()}
        predicted = []
        for number in sorted(mine):
            drive, machine = calibrated(
                work,
                drives[number],
                cached[number],
                threads=side.threads,
                submit_us=mine[number]["figures"]["submit_us_p50"],
            )
            how: dict[str, Any] = {"policy": side.policy}
            group = side.threads
            if group not in fitted and len(wanted) > 1 and mine[number]["figures"]["mib_per_token"]:
                # In each round, and the median: one disturbed reference must not decide.
                fits = []
                for n, rate in rates.items():
                    at = calibrated(work, drives[n], cached[n], threads=side.threads, submit_us=None)
                    made = with_fitted_latency(work, *at, cache_bytes=side.cache_bytes, tok_per_s=rate, **how)
                    fits.append(made.layer_latency_s)
                fitted[group] = (side.name, statistics.median(fits))
            if group in fitted:
                machine = dataclasses.replace(machine, layer_latency_s=fitted[group][1])
            predicted += simulate(
                work, drives=[drive], machines=[machine], caches_bytes=[side.cache_bytes], **how
            )
        middle_one = sorted(predicted, key=lambda p: p.tok_per_s)[len(predicted) // 2]
        found.append(
            {
                "side": side.name,
                "key": side.key,
                "predicted_tok_per_s": statistics.median(p.tok_per_s for p in predicted),
                "measured_tok_per_s": statistics.median(rates.values()),
                "predicted_hit_rate": middle_one.hit_rate,
                "measured_hit_rate": statistics.median(r["figures"]["hit_rate"] for r in mine.values()),
                "calibrated_on": fitted[group][0] if group in fitted else None,
                "layer_latency_us": 1e6 * machine.layer_latency_s,
                "parts": dataclasses.asdict(middle_one),
            }
        )
    return found


def _can_be_predicted(side: Side) -> bool:
    steady = side.overlap and side.warm_up and not side.reference
    return side.kind == "stream" and side.counts == "decode" and side.lever is None and steady


def _recorded(side: Side, model: str, executor: Executor) -> Workload:
    """The routing of a side: every expert cached, which changes nothing of it."""
    with tempfile.TemporaryDirectory(prefix="bmoe-bench-") as folder:
        path = os.path.join(folder, "route.csv")
        execution = executor.execute(all_cached(side), route_trace=path)
        if execution.error is not None:
            raise UsageError(f"the routing of {side.name!r} could not be recorded: {execution.error}")
        return load_workload(path, model, last_tokens=side.tokens)


def _cpu_name() -> str | None:
    with contextlib.suppress(OSError), open("/proc/cpuinfo", encoding="ascii", errors="replace") as file:
        for line in file:
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return None
