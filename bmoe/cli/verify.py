"""`bmoe verify`: whether streaming gives exactly what plain llama.cpp gives.

Owns the options and the verdict's wording. Must not know how the two runs are made: that is bmoe.verify.
"""

from __future__ import annotations

import asyncio
import sys
from typing import TYPE_CHECKING, Any, Final

import click

from bmoe.cli.options import (
    Number,
    model_option,
    prompt_options,
    read_prompt,
    session_config,
    session_options,
)

if TYPE_CHECKING:
    from bmoe.cli.interrupts import Interrupts
    from bmoe.config import GenerateRequest, SessionConfig
    from bmoe.verify import VerifyReport

# Long enough for a batch in which experts get many rows, of which only some fit a small cache.
_DEFAULT_PROMPT: Final = (
    "A mixture of experts keeps many small networks and asks only a few of them about each word. "
    "Which ones are asked changes from word to word, so most of the weights lie idle most of the time, "
    "and a machine that cannot hold them all can fetch the few it needs just before it needs them. "
    "1, 2, 3, 5, 8, 13, 21 and 34; Ångström, naïve, 日本語. def f(x): return x * 2"
)


@click.command(short_help="Check that streaming gives exactly what llama.cpp gives.")
@model_option
@prompt_options(required=False)
@click.option(
    "-n", "--n-predict", type=Number(0, 1 << 24), default=32, show_default=True, help="Tokens to compare."
)
@session_options(resident=False)
@click.option("--quiet", is_flag=True, help="Nothing on standard error but errors.")
@click.pass_context
def verify(ctx: click.Context, /, **_: Any) -> int:
    """Decode one prompt twice, resident without repacking and streaming, and compare every logit.

    Prints the verdict with the SHA-256 of all logits. The exit code is 0 if both are identical, else 1.
    """
    config = session_config(ctx)
    prompt = read_prompt(ctx, default=_DEFAULT_PROMPT)
    from bmoe.cli.interrupts import run_async  # noqa: PLC0415 (keeps `--help` fast)
    from bmoe.config import GenerateRequest  # noqa: PLC0415 (imports numpy)

    request = GenerateRequest(prompt=prompt, n_predict=ctx.params["n_predict"])
    quiet = ctx.params["quiet"]
    return run_async(lambda interrupts: _verify(config, request, interrupts, quiet=quiet))


async def _verify(
    config: SessionConfig, request: GenerateRequest, interrupts: Interrupts, *, quiet: bool
) -> int:
    from bmoe import verify as engine  # noqa: PLC0415 (imports llama_cpp)
    from bmoe.io.errors import BmoeError  # noqa: PLC0415 (keeps `--help` fast)
    from bmoe.present import mode_line  # noqa: PLC0415 (same)

    def say(line: str) -> None:
        if not quiet:
            sys.stderr.write(f"{line}\n")
            sys.stderr.flush()

    loop = asyncio.get_running_loop()
    task = loop.create_task(engine.verify(config, request, on_stage=lambda stage: say(f"verify: {stage}")))
    interrupts.cancel_with(lambda: loop.call_soon_threadsafe(task.cancel))
    try:
        report = await task
    except (asyncio.CancelledError, BmoeError):
        if interrupts.received is None:
            raise
        return interrupts.exit_code
    say(mode_line(report.effective))
    click.echo(verdict(report))
    return 0 if report.identical else 1


def verdict(report: VerifyReport) -> str:
    """The outcome in one line."""
    if report.identical:
        return f"identical  sha256 {report.digest}  ({report.prompt_tokens} prompt + {report.tokens} tokens)"
    return (
        f"different from position {report.first_difference}: "
        f"resident {report.resident_digest} streaming {report.digest}"
    )
