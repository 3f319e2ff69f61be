"""`bmoe plan --simulate`: tokens per second for drives and machines that are not here.

Owns the layout and what options mean. Must not know the arithmetic: that is bmoe.simulate.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import click

from bmoe.cli.lists import bytes_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bmoe.simulate import Drive, Machine, Simulated, Workload

_SCHEMA: Final = 1
_MIB: Final = 1 << 20
_GIB: Final = 1 << 30


@dataclass(frozen=True, kw_only=True, slots=True)
class SimulateJob:
    """What the command line asked for.

    Attributes:
        trace: The routing.
        model: Whose sizes to take; None takes the trace's.
        drives: Names.
        cores: Machines.
        caches: As `bmoe.cli.lists.Sizes` gives them; per cent are of all experts.
        policy: Of the cache; None takes the engine's.
        scale: Size of the weights, relative to what they are.
        core_gib_s, memory_gib_s: Weights per second by one core, and by all at most.
        calibrate: A record of `bmoe bench`, whose drive and machine are added.
        as_json: One object instead of a table.
    """

    trace: str
    model: str | None
    drives: tuple[str, ...]
    cores: tuple[int, ...]
    caches: tuple[tuple[int | None, float | None], ...]
    policy: str | None
    scale: float
    core_gib_s: float
    memory_gib_s: float
    calibrate: str | None
    as_json: bool


def run_simulation(job: SimulateJob) -> int:
    """Predicts and shows.

    Raises:
        BmoeError: Something cannot be read, or names nothing.
    """
    from bmoe.policies import DEFAULT_POLICY  # noqa: PLC0415 (imports numpy)
    from bmoe.simulate import (  # noqa: PLC0415 (imports numpy)
        Machine,
        drive_named,
        load_workload,
        simulate,
    )

    policy = job.policy or DEFAULT_POLICY
    drives = [drive_named(name) for name in job.drives]
    work = load_workload(job.trace, job.model, scale=job.scale)
    rates = {"core_bytes_per_s": job.core_gib_s * _GIB, "memory_bytes_per_s": job.memory_gib_s * _GIB}
    machines = [Machine.of_cores(cores, **rates) for cores in job.cores]
    caches = list(bytes_of(job.caches, work.expert_bytes))
    found = simulate(work, drives=drives, machines=machines, caches_bytes=caches, policy=policy)
    if job.calibrate is not None:
        drive, machine = _calibrated(job.calibrate, work)
        found += simulate(
            work, drives=[*drives, drive], machines=[machine], caches_bytes=caches, policy=policy
        )
    if job.as_json:
        click.echo(json.dumps(_record(job, work, found), indent=1))
    else:
        from bmoe.cli.tables import columns, show  # noqa: PLC0415 (imports rich)

        click.echo(
            f"{job.trace}: {work.tokens} tokens, {work.cycle_bytes / _MIB:.0f} MiB of experts and "
            f"{work.dense_bytes / _MIB:.0f} MiB of other weights each, of {work.expert_bytes / _MIB:.0f} "
            f"MiB; policy {policy}, from an empty cache"
        )
        show(columns(_HEADS, [_row(one) for one in found]))
    return 0


_HEADS: Final = (
    "drive",
    "machine",
    "cache MiB",
    "tok/s",
    "ms/token",
    "dense",
    "experts",
    "waiting",
    "latency",
    "hits %",
    "MiB/token",
)


def _row(one: Simulated) -> list[str]:
    return [
        one.drive,
        one.machine,
        f"{one.cache_bytes / _MIB:.0f}",
        f"{one.tok_per_s:.2f}",
        f"{one.token_ms:.1f}",
        f"{one.dense_ms:.1f}",
        f"{one.experts_ms:.1f}",
        f"{one.waiting_ms:.1f}",
        f"{one.latency_ms:.1f}",
        f"{100 * one.hit_rate:.1f}",
        f"{one.mib_per_token:.1f}",
    ]


def _record(job: SimulateJob, work: Workload, found: Sequence[Simulated]) -> dict[str, Any]:
    return {
        "schema": _SCHEMA,
        "tool": "bmoe plan --simulate",
        "trace": job.trace,
        "model": job.model,
        "scale": job.scale,
        "tokens": work.tokens,
        "expert_bytes": work.expert_bytes,
        "cycle_bytes": work.cycle_bytes,
        "dense_bytes": work.dense_bytes,
        "predictions": [dataclasses.asdict(one) for one in found],
    }


def _calibrated(path: str, work: Workload) -> tuple[Drive, Machine]:
    """Drive and machine of a benchmark: the medians of its drive and of its side with everything cached.

    Raises:
        FormatError: It is no record of bmoe bench, or without those sides.
    """
    from bmoe.io.errors import FileError, FormatError  # noqa: PLC0415 (keeps `--help` fast)
    from bmoe.simulate import calibrated  # noqa: PLC0415 (imports numpy)

    try:
        with open(path, encoding="utf-8") as file:
            record = json.load(file)
    except OSError as error:
        raise FileError("cannot be read", path=path, got=error.strerror) from None
    except ValueError as error:
        raise FormatError(f"is no JSON: {error}", path=path) from None
    try:
        kept = [run for run in record["runs"] if run["kept"] and run["figures"]]
        drive = [run["figures"] for run in kept if run["side"] == "drive"]
        cached = [run["figures"] for run in kept if run["side"].startswith("everything cached")]
        middle = sorted(drive, key=lambda f: f["drive_gib_per_s"])[len(drive) // 2]
        compute = sorted(cached, key=lambda f: f["decode_tok_per_s"])[len(cached) // 2]
        latencies = [one["layer_latency_us"] for one in record["simulation"] or ()]
        submits = latencies[:1] or sorted(
            f["submit_us_p50"] for f in (r["figures"] for r in kept) if f.get("submit_us_p50")
        )
        return calibrated(
            work,
            middle,
            compute,
            threads=compute["effective"]["threads"],
            submit_us=submits[len(submits) // 2] if submits else None,
        )
    except (KeyError, IndexError, TypeError):
        raise FormatError(
            "is no record of bmoe bench with a drive and everything cached", path=path
        ) from None
