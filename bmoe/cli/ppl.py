"""`bmoe ppl`: perplexity of a text while streaming, and what each lossy lever does to it.

Owns the options and the table. Must not know how perplexity is measured.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import math
import sys
from typing import TYPE_CHECKING, Any, Final

import click

from bmoe.cli.lever_option import LEVERS, Levers
from bmoe.cli.options import Number, model_option, read_text, session_config, session_options

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bmoe.cli.interrupts import Interrupts
    from bmoe.config import SessionConfig
    from bmoe.perplexity import Perplexity

_MIB: Final = 1 << 20


@click.command(short_help="Perplexity of a text, and what lossy levers do to it.")
@model_option
@click.option("-f", "--file", required=True, metavar="FILE", help="A UTF-8 text; - for standard input.")
@session_options(resident=True)
@click.option(
    "--lever",
    "levers",
    type=Levers(),
    multiple=True,
    help=f"Run the text again with this changed; may be given several times. {', '.join(LEVERS)}.",
)
@click.option("--tokens", type=Number(2, 1 << 24), help="Use this many tokens of the text.  [default: all]")
@click.option(
    "--batched",
    is_flag=True,
    help="Compute in batches, as prompts are: quicker, but what acts on decode does not act.",
)
@click.option("--json", "as_json", is_flag=True, help="The figures as JSON.")
@click.option("--quiet", is_flag=True, help="Nothing on standard error but errors.")
@click.pass_context
def ppl(ctx: click.Context, /, **_: Any) -> int:
    """Perplexity of a text while streaming, one token at a time as in decode.

    With --lever, the same text again with something changed, beside the plain run: how much perplexity
    grows, how often the likeliest token stays the same, and what it saves.
    """
    p = ctx.params
    config = session_config(ctx)
    levers = p["levers"]
    text = read_text(p["file"])
    from bmoe.cli.interrupts import run_async  # noqa: PLC0415 (keeps `--help` fast)

    for _, changes in levers:
        dataclasses.replace(config, **changes)  # what cannot be is said before anything runs
    return run_async(lambda interrupts: _ppl(config, text, levers, p, interrupts))


async def _ppl(
    config: SessionConfig,
    text: str,
    levers: Sequence[tuple[str, dict[str, Any]]],
    options: dict[str, Any],
    interrupts: Interrupts,
) -> int:
    from bmoe import present  # noqa: PLC0415 (keeps `--help` fast)
    from bmoe.cli.progress import ProgressDisplay  # noqa: PLC0415 (same)
    from bmoe.io.errors import BmoeError  # noqa: PLC0415 (same)
    from bmoe.perplexity import measure  # noqa: PLC0415 (imports llama_cpp)

    stream = None if options["quiet"] else sys.stderr
    display = ProgressDisplay("perplexity", lambda done, total: f"{done} of {total} tokens", stream)

    def on_effective(label: str, effective: Any) -> None:
        display.close()
        if stream is not None:
            lines = (f"{label}: {present.mode_line(effective)}", *present.warnings(effective))
            stream.write("".join(f"{line}\n" for line in lines))
            stream.flush()

    def on_warning(text: str) -> None:
        if stream is not None:
            stream.write(f"{present.one_line(f'warning: {text}')}\n")

    loop = asyncio.get_running_loop()

    def on_progress(_: str, done: int, total: int) -> None:
        loop.call_soon_threadsafe(display.update, done, total)

    task = loop.create_task(
        measure(
            config,
            text,
            levers=levers,
            most_tokens=options["tokens"],
            batched=options["batched"],
            on_effective=on_effective,
            on_warning=on_warning,
            on_progress=on_progress,
        )
    )
    interrupts.cancel_with(lambda: loop.call_soon_threadsafe(task.cancel))
    try:
        results = await task
    except (asyncio.CancelledError, BmoeError):
        if interrupts.received is None:
            raise
        return interrupts.exit_code
    finally:
        display.close()
    if options["as_json"]:
        click.echo(json.dumps([_plain(r) for r in results], indent=1))
        return 0
    from bmoe.cli import tables  # noqa: PLC0415 (imports rich)

    tables.show(tables.columns(_HEADER, [_row(r, results[0]) for r in results]))
    return 0


def _plain(result: Perplexity) -> dict[str, Any]:
    """As JSON values; what is not a finite number is null."""
    values = dataclasses.asdict(result)
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}


_HEADER: Final = (
    "run",
    "tokens",
    "ppl",
    "±",
    "change %",
    "same top %",
    "KLD nats",
    "tok/s",
    "MiB/tok",
    "hit %",
    "drop %",
)


def _row(r: Perplexity, plain: Perplexity) -> tuple[str, ...]:
    def number(value: float | None, digits: int, scale: float = 1.0) -> str:
        return "" if value is None or not math.isfinite(value) else f"{value * scale:.{digits}f}"

    change = None if r is plain else r.perplexity / plain.perplexity - 1
    return (
        r.label,
        str(r.tokens),
        number(r.perplexity, 4),
        number(r.error, 4),
        number(change, 2, 100),
        number(r.agreement, 2, 100),
        number(r.divergence, 5),
        number(r.tokens_per_s, 2),
        number(r.read_bytes_per_token, 2, 1 / _MIB),
        number(r.hit_rate, 2, 100),
        number(r.dropped_share, 2, 100),
    )
