"""`bmoe session`: its options, checked before anything heavy is imported.

Must not know how it serves: that is session_server.py.
"""

from __future__ import annotations

from typing import Any

import click

from bmoe.cli.options import Number, model_option, session_config, session_options
from bmoe.cli.sampling_options import sampling, sampling_options


@click.command(short_help="Serve a model to a program, over standard input and output.")
@model_option
@click.option(
    "-n",
    "--n-predict",
    type=Number(0, 1 << 24),
    help="Most tokens, for requests that do not say.  [default: as many as fit]",
)
@session_options(resident=True)
@sampling_options
@click.option(
    "--think/--no-think",
    default=True,
    show_default=True,
    help="Let a reasoning model reason, for requests that do not say.",
)
@click.option("--line-protocol", is_flag=True, help="Speak the reference engine's BMOE_ lines instead.")
@click.option("--raw", is_flag=True, help="With --line-protocol: take prompts as they are, not as messages.")
@click.option("--log-json", metavar="PATH", help="Append the session's events as JSON lines.")
@click.option("--quiet", is_flag=True, help="Nothing on standard error but errors.")
@click.pass_context
def session(ctx: click.Context, /, **_: Any) -> int:
    """Serve a model to a program: requests on standard input, answers on standard output.

    One JSON object per line; docs/session-protocol.md describes them. The model is opened once and stays
    warm. The sampling options are for requests that do not say otherwise.
    """
    p = ctx.params
    if p["raw"] and not p["line_protocol"]:
        raise click.UsageError("--raw goes with --line-protocol: elsewhere a request says what it is", ctx)
    if p["log_json"] == "-":
        raise click.UsageError("--log-json -: standard output is where the answers go", ctx)
    config = session_config(ctx)
    chosen = sampling(ctx)

    from bmoe.cli.session_server import serve  # noqa: PLC0415 (imports llama_cpp)
    from bmoe.line_protocol import LineProtocol  # noqa: PLC0415 (same)
    from bmoe.protocol import Defaults, JsonLines  # noqa: PLC0415 (same)

    defaults = Defaults(n_predict=p["n_predict"], think=p["think"], sampling=chosen)
    wire = LineProtocol(defaults, raw=p["raw"]) if p["line_protocol"] else JsonLines(defaults)
    argv = tuple(ctx.obj) if isinstance(ctx.obj, list) else ()
    return serve(config, wire, quiet=p["quiet"], log_target=p["log_json"], argv=argv)
