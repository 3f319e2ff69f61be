"""`bmoe decode`: its options, checked before anything heavy is imported.

Must not know how a run goes: that is decode_run.py.
"""

from __future__ import annotations

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


@click.command(short_help="Generate text from a prompt.")
@model_option
@prompt_options(required=True)
@click.option(
    "-n", "--n-predict", type=Number(0, 1 << 24), default=128, show_default=True, help="Most tokens to make."
)
@session_options(resident=True)
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
@click.option("--quiet", is_flag=True, help="Nothing on standard error but errors.")
@click.pass_context
def decode(ctx: click.Context, /, **_: Any) -> int:
    """Generate text from a prompt: -p TEXT, -f FILE, or - for standard input.

    A model with experts is streamed, one without runs as plain llama.cpp. The text goes to standard output
    as it is made, with a line break at its end.
    """
    p = ctx.params
    config = session_config(ctx)
    prompt = read_prompt(ctx)
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
        argv=tuple(ctx.obj or ()),
        log_target=p["log_json"],
        quiet=p["quiet"],
    )
    return run_decode(job)
