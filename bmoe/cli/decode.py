"""`bmoe decode`: its options, checked before anything heavy is imported.

Must not know how a run goes: that is decode_run.py.
"""

from __future__ import annotations

import os
from typing import Any

import click

from bmoe.cli.options import (
    Number,
    model_option,
    prompt_options,
    read_prompt,
    read_text,
    session_config,
    session_options,
)
from bmoe.cli.sampling_options import sampling, sampling_options

_TRACES = ("route_trace", "io_trace", "compute_trace", "compute_trace_layers")


@click.command(short_help="Generate text from a prompt.")
@model_option
@prompt_options(required=True)
@click.option(
    "-n",
    "--n-predict",
    type=Number(0, 1 << 24, word="max"),
    default=128,
    show_default=True,
    help="Most tokens to make; max is as many as the context holds.",
)
@session_options(resident=True)
@sampling_options
@click.option("--chat", is_flag=True, help="Put the prompt into the model's own chat template.")
@click.option("--system", metavar="TEXT", help="With --chat: the system message.")
@click.option(
    "--think/--no-think",
    default=True,
    show_default=True,
    help="With --chat: let a reasoning model reason. Reasoning goes to standard error.",
)
@click.option("--hide-reasoning", is_flag=True, help="With --chat: do not show reasoning.")
@click.option("--stop", multiple=True, metavar="TEXT", help="End the answer before this text; repeatable.")
@click.option(
    "--context-shift",
    is_flag=True,
    help="When the context is full, forget its older half instead of refusing.",
)
@click.option("--ignore-eog", is_flag=True, help="Go on past the end of generation.")
@click.option(
    "--force-tokens",
    metavar="FILE",
    help="Feed this text's tokens instead of the model's choices (benchmarks).",
)
@click.option(
    "--log-json",
    metavar="PATH",
    help="Append the run's events as JSON lines; with - to standard output, where they replace the text.",
)
@click.option("--log-layers", is_flag=True, help="With --log-json: a line by layer for every token.")
@click.option("--csv", metavar="PATH", help="Write figures per token, in the reference engine's format.")
@click.option("--route-trace", metavar="PATH", help="Record which experts every token is routed to.")
@click.option("--io-trace", metavar="PATH", help="Record every read.")
@click.option("--compute-trace", metavar="PATH", help="Record the time of every graph node. Slow.")
@click.option("--compute-trace-layers", metavar="PATH", help="Record the time of every layer.")
@click.option(
    "--metrics-port",
    type=Number(0, 65535),
    help="Serve live figures for Prometheus on this port of 127.0.0.1; 0 picks a free one.",
)
@click.option(
    "--progress",
    is_flag=True,
    help="Show a status line while decoding even if the text is on the same terminal or there is none.",
)
@click.option("--quiet", is_flag=True, help="Nothing on standard error but errors.")
@click.pass_context
def decode(ctx: click.Context, /, **_: Any) -> int:
    """Generate text from a prompt: -p TEXT, -f FILE, or - for standard input.

    With --chat the prompt is a user's message, in the model's own template.

    A model with experts is streamed, one without runs as plain llama.cpp. The text goes to standard output
    as it is made, with a line break at its end.
    """
    p = ctx.params
    if not p["chat"] and (idle := [o for o in ("system", "hide_reasoning") if p[o]]):
        raise click.UsageError(f"--{idle[0].replace('_', '-')} goes with --chat", ctx)
    if not p["chat"] and not p["think"]:
        raise click.UsageError("--no-think goes with --chat", ctx)
    if not all(p["stop"]):
        raise click.UsageError("--stop: the text is empty", ctx)
    if p["progress"] and p["quiet"]:
        raise click.UsageError("--progress and --quiet exclude each other", ctx)
    if p["log_layers"] and p["log_json"] is None:
        raise click.UsageError("--log-layers goes with --log-json", ctx)
    if p["csv"] == "-":
        raise click.UsageError("--csv needs a file: figures do not go to standard output", ctx)
    traces = {name: p[name] for name in _TRACES}
    _check_outputs(ctx)
    if p["resident"] and any(traces.values()):
        raise click.UsageError("traces are of streaming: they do not go with --resident", ctx)
    config = session_config(ctx, layer_metrics=p["log_layers"], **traces)
    prompt = read_prompt(ctx)
    chosen = sampling(ctx)
    forced = None if p["force_tokens"] is None else read_text(p["force_tokens"])
    if forced == "":
        raise click.UsageError(f"--force-tokens {p['force_tokens']}: the text is empty", ctx)

    from bmoe.cli.decode_run import DecodeJob, run_decode  # noqa: PLC0415 (imports llama_cpp)

    job = DecodeJob(
        config=config,
        prompt=prompt,
        n_predict=p["n_predict"],
        forced_text=forced,
        ignore_eog=p["ignore_eog"],
        sampling=chosen,
        chat=p["chat"],
        system=p["system"],
        think=p["think"],
        show_reasoning=not p["hide_reasoning"],
        stop=p["stop"],
        context_shift=p["context_shift"],
        csv_path=p["csv"],
        metrics_port=p["metrics_port"],
        progress=p["progress"],
        argv=tuple(ctx.obj or ()),
        log_target=p["log_json"],
        quiet=p["quiet"],
    )
    return run_decode(job)


def _check_outputs(ctx: click.Context) -> None:
    """No two outputs may be one file: each would overwrite the other."""
    seen: dict[str, str] = {}
    for name in ("log_json", "csv", *_TRACES):
        path = ctx.params[name]
        if path is None or (name == "log_json" and path == "-"):
            continue
        option = f"--{name.replace('_', '-')}"
        other = seen.setdefault(os.path.realpath(path), option)
        if other != option and not path.startswith("/dev/"):
            raise click.UsageError(f"{other} and {option} are the same file", ctx)
