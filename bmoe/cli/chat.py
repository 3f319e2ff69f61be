"""`bmoe chat`: its options, checked before anything heavy is imported.

Must not know how a chat goes: that is chat_run.py.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any

import click

from bmoe.cli.options import Number, model_option, session_config, session_options
from bmoe.cli.sampling_options import sampling, sampling_options

if TYPE_CHECKING:
    from bmoe.cli.chat_run import ChatUi


@click.command(short_help="Talk to a model.")
@model_option
@click.option("--system", metavar="TEXT", help="The system message.")
@click.option("--resume", metavar="FILE", help="Go on with a saved conversation, and keep it saved there.")
@click.option(
    "-n",
    "--n-predict",
    type=Number(1, 1 << 24),
    help="Most tokens of an answer.  [default: as many as fit]",
)
@click.option("--think/--no-think", default=True, show_default=True, help="Let a reasoning model reason.")
@click.option(
    "--context-shift", is_flag=True, help="When the context is full, forget its older half instead of ending."
)
@click.option("--no-markdown", is_flag=True, help="Show answers as they are written.")
@session_options(resident=True)
@sampling_options
@click.option("--log-json", metavar="PATH", help="Append the chat's events as JSON lines.")
@click.option("--quiet", is_flag=True, help="Over a pipe: nothing on standard error but errors.")
@click.pass_context
def chat(ctx: click.Context, /, **_: Any) -> int:
    """Talk to a model; /help lists what one can type besides messages.

    Over a pipe each line of standard input is a message, a backslash at its end goes on with the next line,
    and the answers go to standard output as plain text.
    """
    p = ctx.params
    if p["log_json"] == "-":
        raise click.UsageError("--log-json -: standard output is where the answers go", ctx)
    config = session_config(ctx)
    chosen = sampling(ctx)
    ui = _ui(markdown=not p["no_markdown"], quiet=p["quiet"])

    from bmoe.cli.chat_run import ChatJob, run_chat  # noqa: PLC0415 (imports numpy)

    job = ChatJob(
        config=config,
        sampling=chosen,
        n_predict=p["n_predict"],
        system=p["system"],
        resume=p["resume"],
        think=p["think"],
        context_shift=p["context_shift"],
        argv=tuple(ctx.obj or ()),
        log_target=p["log_json"],
    )
    return run_chat(job, ui)


def _ui(*, markdown: bool, quiet: bool) -> ChatUi:
    if sys.stdin.isatty() and sys.stdout.isatty() and os.environ.get("TERM", "dumb") != "dumb":
        from bmoe.cli.chat_terminal import TerminalUi, history_path  # noqa: PLC0415 (imports rich)

        return TerminalUi(markdown=markdown, history_path=history_path())
    from bmoe.cli.chat_plain import PlainUi  # noqa: PLC0415 (only without a terminal)

    return PlainUi(quiet=quiet)
