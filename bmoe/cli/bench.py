"""`bmoe bench`: ways to run a model, compared so that others can repeat it.

Owns the options, where output goes, and exit codes. Must not know how anything is measured or shown: that is
bmoe.bench, imported only when a benchmark starts.
"""

from __future__ import annotations

import os
import shlex
import signal
import sys
from typing import TYPE_CHECKING, Any, Final

import click

from bmoe.cli.lever_option import LEVERS, Levers
from bmoe.cli.lists import Counts, Rates, Sizes, Words, bytes_of
from bmoe.cli.options import Number, model_option, read_text

if TYPE_CHECKING:
    from types import FrameType

    from bmoe.bench.benchmark import Settings
    from bmoe.bench.sides import Side
    from bmoe.model import ModelLayout

_MOST_TOKENS: Final = 1 << 20
_BLOCK_BYTES: Final = 4096
_OPTIONS_OF_THEIR_OWN: Final = {"policy": "--policies", "cache-mb": "--caches", "n-expert-used": "--top-ks"}


@click.command(short_help="Compare ways to run a model, so that others can repeat it.")
@model_option
@click.option(
    "--sides",
    type=Words(),
    default="overlap,resident,resident-norepack",
    show_default=True,
    help="overlap, serial, resident, resident-norepack, resident-dropped, resident-capped.",
)
@click.option(
    "--caches", type=Sizes(), default="10%,25%,50%", show_default=True, help="Streaming: memory for experts."
)
@click.option(
    "--policies", type=Words(), help="Streaming: cache policies, a side each.  [default: the engine's]"
)
@click.option(
    "--backends",
    type=Words("auto", "uring", "threads"),
    default="auto",
    show_default=True,
    help="Streaming: what reads.",
)
@click.option(
    "-t", "--threads-list", type=Counts(1, 512), help="Compute threads, a side each.  [default: usable CPUs]"
)
@click.option(
    "--top-ks", type=Counts(1, 1 << 16), help="Experts per token, a side each.  [default: the file's]"
)
@click.option(
    "-n", "--tokens", type=Number(2, _MOST_TOKENS), default=64, show_default=True, help="Tokens to decode."
)
@click.option(
    "--prompt-tokens",
    type=Counts(1, _MOST_TOKENS),
    default="32",
    show_default=True,
    help="Prompt lengths: the first for decoding, every other makes prefill rows.",
)
@click.option(
    "--mem-cap", type=Sizes(), help="For resident-capped: memory limits; per cent are of the model."
)
@click.option(
    "--lever",
    "levers",
    type=Levers(),
    multiple=True,
    help="Streaming: beside each side the same with this changed; may be repeated. "
    f"{', '.join(name for name in LEVERS if name not in _OPTIONS_OF_THEIR_OWN)}.",
)
@click.option("--throttle", type=Rates(), help="Streaming: limits of the drive in GiB/s, a side each.")
@click.option(
    "--external",
    multiple=True,
    metavar="NAME=COMMAND",
    help="Another engine; {model}, {prompt}, {n} and {threads} are filled in. May be repeated.",
)
@click.option(
    "--external-pattern",
    multiple=True,
    metavar="REGEX",
    help="Finds its tok/s: the first group, or groups named decode and prefill. One, or one for each.",
)
@click.option("--force-tokens", metavar="FILE", help="The text to feed.  [default: a built-in one]")
@click.option("--replay-routing", metavar="TRACE", help="Streaming: route as this trace did (synthetic).")
@click.option("--rounds", type=Number(1, 1000), default=3, show_default=True, help="Of all sides in turn.")
@click.option(
    "--repeats", type=Number(0, 100), default=2, show_default=True, help="Most repeats of a disturbed run."
)
@click.option(
    "--settle",
    type=Number(0, 3600),
    default=20,
    show_default=True,
    help="Seconds to wait for a quiet machine before a run.",
)
@click.option(
    "--timeout", type=Number(1, 86_400), default=1800, show_default=True, help="Seconds for one run."
)
@click.option(
    "--baseline", metavar="SIDE", help="What others are compared with.  [default: resident-norepack]"
)
@click.option("--validate-simulation", is_flag=True, help="Predict the streaming sides by simulation too.")
@click.option(
    "--json", "json_path", metavar="PATH", help="Keep the record there after each run, and go on from it."
)
@click.option("--markdown", "markdown_path", metavar="PATH", help="Write the tables there too.")
@click.option("--plot", metavar="PATH", help="Draw it: .png or .svg.")
@click.option("--list", "only_list", is_flag=True, help="Say what would be run, and run nothing.")
@click.pass_context
def bench(ctx: click.Context, /, **_: Any) -> int:
    """Compare ways to run a model, in interleaved rounds, each run in a process of its own.

    Tables go to standard output as Markdown, progress to standard error. The exit code is 1 if a side
    failed. docs/benchmarks.md has the method.
    """
    p = ctx.params
    settings, layout = _settings(ctx)
    sides = settings.matrix.sides()
    if p["only_list"]:
        for side in sides:
            click.echo(side.name)
        return 0
    if p["plot"] is not None:
        from bmoe.pictures import check_plot  # noqa: PLC0415 (keeps `--help` fast)

        check_plot(p["plot"])
    for path in (p["json_path"], p["markdown_path"]):
        if path is not None:
            _check_writable(path)
    from bmoe.bench.benchmark import run_benchmark  # noqa: PLC0415 (keeps `--help` fast)
    from bmoe.bench.report import markdown  # noqa: PLC0415 (same)

    signal.signal(signal.SIGTERM, _end)
    record = run_benchmark(settings, layout, on_run=_progress(len(sides), settings.rounds))
    text = markdown(record)
    click.echo(text)
    if p["markdown_path"] is not None:
        with open(p["markdown_path"], "w", encoding="utf-8") as file:
            file.write(f"{text}\n")
    if p["plot"] is not None:
        from bmoe.bench.plots import draw  # noqa: PLC0415 (only when asked for)

        draw(record, p["plot"])
    return 1 if any(row["error"] is not None for row in record["rows"]) else 0


def _settings(ctx: click.Context) -> tuple[Settings, ModelLayout]:
    from bmoe.bench.benchmark import Settings, everything_fits  # noqa: PLC0415 (keeps `--help` fast)
    from bmoe.bench.external import parse_externals  # noqa: PLC0415 (same)
    from bmoe.bench.sides import Matrix  # noqa: PLC0415 (same)
    from bmoe.bench.text import DEFAULT_TEXT  # noqa: PLC0415 (same)
    from bmoe.config import SessionConfig, default_threads  # noqa: PLC0415 (same)
    from bmoe.gguf_file import read_gguf  # noqa: PLC0415 (same)
    from bmoe.model import lay_out  # noqa: PLC0415 (same)
    from bmoe.pipeline.slots import total_slot_bytes  # noqa: PLC0415 (same)
    from bmoe.policies import DEFAULT_POLICY, policy_named  # noqa: PLC0415 (same)

    p = ctx.params
    externals = parse_externals(p["external"], p["external_pattern"])
    policies = p["policies"] or (DEFAULT_POLICY,)
    for policy in policies:
        policy_named(policy)
    text = DEFAULT_TEXT if p["force_tokens"] is None else read_text(p["force_tokens"])
    if not text.strip():
        raise click.UsageError(f"--force-tokens {p['force_tokens']}: the text is empty", ctx)
    layout = lay_out(read_gguf(p["model"]))
    if p["replay_routing"] is not None and layout.is_moe:
        from bmoe.replayed_routing import replay_table  # noqa: PLC0415 (only when asked for)

        replay_table(p["replay_routing"], layers=len(layout.layer_numbers))
    names = p["sides"]
    if not layout.is_moe and ctx.get_parameter_source("sides") is not click.core.ParameterSource.COMMANDLINE:
        names = tuple(name for name in names if name.startswith("resident"))
    everything = total_slot_bytes(layout.tensors, _BLOCK_BYTES)
    for name, option in _OPTIONS_OF_THEIR_OWN.items():
        if any(LEVERS[name][0] in changes for _, changes in p["levers"]):
            raise click.UsageError(f"--lever {name}: use {option}", ctx)
    for _, changes in p["levers"]:
        SessionConfig(model_path=p["model"], mode="stream", replay_routing=p["replay_routing"], **changes)
    matrix = Matrix(
        model=p["model"],
        names=names,
        caches_bytes=tuple(bytes_of(p["caches"], everything)),
        threads=p["threads_list"] or (default_threads(),),
        tokens=p["tokens"],
        prompt_tokens=p["prompt_tokens"],
        policies=policies,
        backends=p["backends"],
        top_ks=p["top_ks"] or (None,),
        cap_bytes=tuple(bytes_of(p["mem_cap"] or (), sum(layout.facts.sizes_bytes))),
        drive_bytes_per_s=p["throttle"] or (),
        levers=p["levers"],
        externals=externals,
        replay_routing=p["replay_routing"] if layout.is_moe else None,
        everything_fits=everything_fits(layout),
        moe=layout.is_moe,
    )
    settings = Settings(
        matrix=matrix,
        text=text,
        text_name=p["force_tokens"] or "built-in",
        rounds=p["rounds"],
        repeats=p["repeats"],
        settle_s=p["settle"],
        timeout_s=p["timeout"],
        baseline=p["baseline"],
        validate=p["validate_simulation"],
        record_path=p["json_path"],
        command=shlex.join(["bmoe", *(ctx.obj if isinstance(ctx.obj, list) else [])]),
    )
    return settings, layout


def _progress(sides: int, rounds: int) -> Any:
    def on_run(round_number: int, side: Side, attempt: int) -> None:
        again = f", repeat {attempt}" if attempt else ""
        sys.stderr.write(f"round {round_number + 1} of {rounds}{again}: {side.name} ({sides} sides)\n")
        sys.stderr.flush()

    return on_run


def _end(number: int, _: FrameType | None) -> None:
    # Unwinds: the process that is measured is ended, and its control groups removed.
    raise SystemExit(128 + number)


def _check_writable(path: str) -> None:
    """Before minutes of measuring, not after."""
    from bmoe.io.errors import FileError  # noqa: PLC0415 (keeps `--help` fast)

    if not os.path.isdir(os.path.dirname(path) or ".") or os.path.isdir(path):
        raise FileError("the result cannot be written there", path=path)
