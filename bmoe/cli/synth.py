"""`bmoe synth`: the command line of bmoe.synth.

Options become a shape, progress goes to stderr, the last line on stdout says what was made. Errors are
left to the CLI's main; bmoe.synth itself is imported only when a command runs.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
import time
from typing import TYPE_CHECKING, Final, TextIO

import click

from bmoe.io.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from bmoe.synth import SynthReport

    OnProgress = Callable[[int, int], None]

_SECONDS_BETWEEN_LINES: Final = 3.0
_MIB: Final = 1 << 20


@click.group(name="synth", short_help="Write a model to run or test on.")
def synth_group() -> None:
    """Write a GGUF model with experts: a dense one made so, or one of random weights."""


_force = click.option("--force", is_flag=True, help="Replace DEST if it exists.")
_seed = click.option("--seed", type=int, default=1, show_default=True, help="Decides every random choice.")


@synth_group.command(short_help="Make a dense model a mixture of experts.")
@click.argument("source", type=click.Path())
@click.argument("dest", type=click.Path())
@click.option("--experts", type=int, default=16, show_default=True, help="Experts per layer.")
@click.option("--top-k", type=int, default=4, show_default=True, help="Experts a token is routed to.")
@_seed
@_force
def upcycle(source: str, dest: str, *, experts: int, top_k: int, seed: int, force: bool) -> None:
    """Make the dense llama model SOURCE a mixture of experts DEST with the same text.

    Every expert is the layer's own feed-forward with its hidden units in another order.
    """
    from bmoe.synth import upcycle as write  # noqa: PLC0415 (numpy and gguf only when needed)

    _check_destination(dest, force)
    with _progress() as on_progress:
        report = write(source, dest, experts=experts, top_k=top_k, seed=seed, on_progress=on_progress)
    click.echo(_summary(report))


@synth_group.command(short_help="Write a model of random weights.")
@click.argument("dest", type=click.Path())
@click.option("--preset", default="tiny", show_default=True, help="The shape to start from: q3s, q3, tiny …")
@click.option("--arch", "architecture", help="Architecture: qwen3moe, llama, gpt-oss …")
@click.option("--layers", type=int, help="Blocks in total.")
@click.option("--embedding", type=int, help="Width of the residual stream.")
@click.option("--heads", type=int, help="Attention heads.")
@click.option("--kv-heads", type=int, help="Key and value heads.")
@click.option("--head-dim", type=int, help="Width of a head.")
@click.option("--experts", type=int, help="Experts per layer.")
@click.option("--top-k", type=int, help="Experts a token is routed to.")
@click.option("--expert-width", type=int, help="Hidden units of an expert.")
@click.option("--dense-width", type=int, help="Hidden units of a dense feed-forward.")
@click.option("--dense-layers", type=int, help="Leading layers without experts.")
@click.option("--nextn-layers", type=int, help="Multi-token-prediction blocks behind the layers.")
@click.option("--context", type=int, help="Context length the model claims.")
@click.option("--quant", default="Q4_K", show_default=True, help="Type of the matrices, or Q4_K_M.")
@click.option("--tokenizer-from", type=click.Path(), help="GGUF whose tokenizer to take; default: bytes.")
@click.option("--alignment", type=int, default=32, show_default=True, help="Of tensor offsets, in bytes.")
@click.option("--phase", type=int, help="Where the first tensor lies within a page of 4096 bytes.")
@click.option("--shards", type=int, default=1, show_default=True, help="Files of a split set.")
@click.option("--bare-first", is_flag=True, help="Only metadata in a split set's first file.")
@_seed
@_force
def random(
    dest: str,
    *,
    preset: str,
    quant: str,
    tokenizer_from: str | None,
    alignment: int,
    phase: int | None,
    shards: int,
    bare_first: bool,
    seed: int,
    force: bool,
    **numbers: int | str | None,
) -> None:
    """Write a model of random weights to DEST.

    Options replace single numbers of the preset. The same options give the same file, byte for byte.
    """
    from bmoe.synth import PRESETS, random_model  # noqa: PLC0415 (numpy and gguf only when needed)

    if preset not in PRESETS:
        raise UsageError(f"preset {preset}: choose from {', '.join(sorted(PRESETS))}")
    given = {name: value for name, value in numbers.items() if value is not None}
    shape = dataclasses.replace(PRESETS[preset], **given)  # type: ignore[arg-type]  # click typed them
    _check_destination(dest, force)
    with _progress() as on_progress:
        report = random_model(
            dest,
            shape=shape,
            quantisation=quant,
            tokenizer_from=tokenizer_from,
            seed=seed,
            alignment_bytes=alignment,
            phase_bytes=phase,
            shards=shards,
            bare_first=bare_first,
            on_progress=on_progress,
        )
    click.echo(_summary(report))


def _check_destination(path: str, force: bool) -> None:
    if os.path.lexists(path) and not force:
        raise UsageError(f"{path}: exists already", hint="--force replaces it")


def _summary(report: SynthReport) -> str:
    low, high = min(report.expert_bytes), max(report.expert_bytes)
    per_expert = f"{low}" if low == high else f"{low} to {high}"
    return (
        f"{report.path}: {report.size_bytes} bytes ({report.size_bytes / _MIB:.1f} MiB), {report.experts} "
        f"experts in each of {report.moe_layers} layers, top {report.top_k}, {per_expert} bytes per expert"
    )


@contextlib.contextmanager
def _progress() -> Iterator[OnProgress]:
    """What to call with (bytes done, bytes in total): a bar on a terminal, else a line now and then."""
    if not sys.stderr.isatty():
        yield line_progress(sys.stderr, time.monotonic)
        return
    from rich.console import Console  # noqa: PLC0415 (not needed without a terminal)
    from rich.progress import (  # noqa: PLC0415 (same)
        BarColumn,
        DownloadColumn,
        Progress,
        TimeRemainingColumn,
    )

    columns = (
        "writing",
        BarColumn(),
        DownloadColumn(binary_units=True),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("writing", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def line_progress(stream: TextIO, clock: Callable[[], float]) -> OnProgress:
    """Progress as plain lines, a few seconds apart.

    Args:
        stream: Where they go.
        clock: The time in seconds.
    """
    last = clock()

    def on_progress(done: int, total: int) -> None:
        nonlocal last
        now = clock()
        if now - last >= _SECONDS_BETWEEN_LINES:
            last = now
            stream.write(f"writing: {done // _MIB} of {total // _MIB} MiB ({100 * done // total} %)\n")
            stream.flush()

    return on_progress
