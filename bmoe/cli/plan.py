"""`bmoe plan`: whether and how a model will run here.

Owns the options, the layout and the exit code. Must not know the arithmetic: that is bmoe.plan.
"""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING, Any, Final

import click

from bmoe.cli.lists import Counts, Sizes, Words
from bmoe.cli.options import Number, dense_weights_option

if TYPE_CHECKING:
    from bmoe.plan import Plan

_SCHEMA: Final = 1
_MIB: Final = 1 << 20
_HERE: Final = ("ram", "cache_mb", "ctx_size", "ubatch", "n_expert_used", "dense_weights")
_ELSEWHERE: Final = (
    "drive",
    "cores",
    "cache",
    "policy",
    "scale",
    "core_gib_s",
    "memory_gib_s",
    "calibrate",
)


@click.command(short_help="Work out whether and how a model will run here.")
@click.argument("model", required=False)
@click.option("--ram", type=Number(1, 1 << 24), help="Suppose that many MiB are available.")
@click.option(
    "--cache-mb",
    type=Number(1, 1 << 24, word="auto"),
    default="auto",
    show_default=True,
    help="MiB of memory for experts.",
)
@click.option(
    "-c", "--ctx-size", type=Number(1, 1 << 24), default=2048, show_default=True, help="Context in tokens."
)
@click.option(
    "--ubatch", type=Number(1, 1 << 16), default=512, show_default=True, help="Most tokens computed at once."
)
@click.option("--n-expert-used", type=Number(1, 1 << 16), help="Experts per token, if not the file's number.")
@dense_weights_option
@click.option("--simulate", metavar="TRACE", help="Predict tok/s elsewhere from this recorded routing.")
@click.option(
    "--drive",
    type=Words(),
    default="ufs,pcie4,pcie5",
    show_default=True,
    help="With --simulate: drives, by name or in GiB/s.",
)
@click.option(
    "--cores", type=Counts(1, 1024), default="4,8,16,32", show_default=True, help="With --simulate: machines."
)
@click.option(
    "--cache",
    type=Sizes(),
    default="5%,10%,25%,50%",
    show_default=True,
    help="With --simulate: memory for experts; per cent of all of them.",
)
@click.option(
    "--policy", metavar="NAME", help="With --simulate: the cache's policy.  [default: the engine's]"
)
@click.option(
    "--scale",
    type=click.FloatRange(0.001, 1e6),
    default=1.0,
    show_default=True,
    help="With --simulate: weights so many times as large.",
)
@click.option(
    "--core-gib-s",
    type=click.FloatRange(0.01, 1e4),
    default=10.0,
    show_default=True,
    help="With --simulate: GiB of weights that a core computes with per second.",
)
@click.option(
    "--memory-gib-s",
    type=click.FloatRange(0.01, 1e5),
    default=60.0,
    show_default=True,
    help="With --simulate: the most that all cores get from memory.",
)
@click.option("--calibrate", metavar="JSON", help="With --simulate: add what `bmoe bench --json` measured.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead of tables.")
@click.pass_context
def plan(ctx: click.Context, /, model: str | None, *, as_json: bool, **_: Any) -> int:
    """Work out whether and how MODEL will run here, without loading it.

    Hits are what recorded routing of other models gave for a cache of that share. The drive's figure is
    there once bmoe-iobench was run on it. The exit code is 1 if the model does not fit, else 0.

    With --simulate, a recorded routing is replayed through the cache of each size, for each drive and
    machine; MODEL is optional then and gives its own sizes instead of the trace's.
    """
    numbers = ctx.params
    simulates = numbers["simulate"] is not None
    for name in _HERE if simulates else _ELSEWHERE:
        if ctx.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE:
            option = f"--{name.replace('_', '-')}"
            raise click.UsageError(
                f"{option} has no meaning {'with' if simulates else 'without'} --simulate", ctx
            )
    if simulates:
        return _simulate(ctx)
    if model is None:
        raise click.UsageError("missing argument 'MODEL'", ctx)
    from bmoe.plan import PlanRequest, plan_run  # noqa: PLC0415 (keeps `--help` fast)

    ram, cache = numbers["ram"], numbers["cache_mb"]
    made = plan_run(
        PlanRequest(
            path=model,
            context_tokens=numbers["ctx_size"] or 0,
            ubatch_tokens=numbers["ubatch"] or 0,
            ram_bytes=None if ram is None else ram * _MIB,
            cache_bytes=None if cache is None else cache * _MIB,
            n_expert_used=numbers["n_expert_used"],
            dense_weights=numbers["dense_weights"],
        )
    )
    if as_json:
        click.echo(json.dumps(_record(made), indent=1))
    else:
        from bmoe.cli.tables import columns, pairs, show  # noqa: PLC0415 (imports rich)

        show(pairs(_rows(made)), columns(("memory", "MiB", "what it is"), _memory(made)))
        for sentence in made.advice:
            click.echo(f"- {sentence}")
    return 1 if made.verdict == "does not fit" else 0


def _simulate(ctx: click.Context) -> int:
    from bmoe.cli.plan_simulate import SimulateJob, run_simulation  # noqa: PLC0415 (only when asked for)

    p = ctx.params
    return run_simulation(
        SimulateJob(
            trace=p["simulate"],
            model=p["model"],
            drives=p["drive"],
            cores=p["cores"],
            caches=p["cache"],
            policy=p["policy"],
            scale=p["scale"],
            core_gib_s=p["core_gib_s"],
            memory_gib_s=p["memory_gib_s"],
            calibrate=p["calibrate"],
            as_json=p["as_json"],
        )
    )


def _record(made: Plan) -> dict[str, Any]:
    return {"schema": _SCHEMA, "tool": "bmoe plan", **dataclasses.asdict(made)}


def _rows(p: Plan) -> list[tuple[str, str]]:
    from bmoe.present import mib  # noqa: PLC0415 (keeps `--help` fast)

    reason = f": {p.reason}" if p.reason else ""
    rows = [("verdict", p.verdict + reason), ("model", f"{p.architecture}, {mib(p.model_bytes)}")]
    if p.cache_experts is not None:
        share = 100 * p.cache_experts / p.total_experts
        rows.append(
            ("cache", f"{p.slots} slots, {p.cache_experts} of {p.total_experts} experts ({share:.1f} %)")
        )
    if p.hit_range is not None and p.read_range_bytes is not None:
        low, high = p.hit_range
        least, most = p.read_range_bytes
        rows.append(("hits", f"{100 * low:.0f} to {100 * high:.0f} % expected while decoding"))
        rows.append(("reads", f"{mib(least)} to {mib(most)} per token of {mib(p.worst_read_bytes)} at worst"))
        rows.append(("drive", _drive(p)))
        rows.append(("bound", _bound(p)))
    return rows


def _drive(p: Plan) -> str:
    if p.drive is None:
        return "not measured"
    return f"{p.drive.mib_per_s:.0f} MiB/s of experts, measured {p.drive.created_utc}"


def _bound(p: Plan) -> str:
    if p.bound_tokens_per_s is None:
        return "unknown without the drive's figure"
    low, high = p.bound_tokens_per_s
    most = "no bound" if high is None else f"{high:.1f}"
    return f"{low:.1f} to {most} tok/s by the drive, if computing took no time"


def _memory(p: Plan) -> list[tuple[str, str, str]]:
    rows = [
        ("dense", p.dense_bytes, "weights that every token needs"),
        ("KV", p.kv_bytes, "keys and values of the context, at most"),
        ("compute", p.compute_bytes, "llama.cpp's buffers for the widest batch, estimated"),
        ("process", p.process_bytes, "Python, libraries, rings"),
        ("cache", p.cache_bytes, "experts"),
        ("floor", p.floor_bytes, "left to others"),
        ("available", p.available_bytes, "what there is"),
    ]
    return [(name, str(value // _MIB), what) for name, value, what in rows if value is not None]
