"""`bmoe-iobench`: random reads as the engine makes them, and what they say about a drive.

Owns options, where output goes, and exit codes. Must not know how anything is measured: that is
bmoe.tools.iobench, imported only when a run starts.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import sys
from typing import TYPE_CHECKING, Any, Final

import click

from bmoe import __version__
from bmoe.cli.options import Number

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bmoe.cli.interrupts import Interrupts
    from bmoe.tools.iobench import Result, Settings

_LANES: Final = "1,2,4,8,12,16,24,32"
_MOST_LANES: Final = 4096
_MOST_KIB: Final = 1 << 20
_MOST_BURNERS: Final = 1024
_REPLAY_ONLY: Final = {"cache_mb": "--cache-mb", "policy": "--policy", "tokens": "--tokens"}
_ROWS_ONLY: Final = {
    "slice_kb": "--slice-kb",
    "scatter": "--scatter",
    "seconds": "--seconds",
    "compute_load": "--compute-load",
    "engine_pattern": "--engine-pattern",
    "plot": "--plot",
}


class _Numbers(click.ParamType):  # type: ignore[type-arg]  # generic only in the newest clicks
    """Whole numbers between commas; those below `low` are skipped, as the reference does.

    Args:
        low: The least that is kept.
        high: The most that is accepted.
    """

    name = "numbers"

    def __init__(self, low: int, high: int) -> None:
        self._low = low
        self._high = high
        self._number = Number(0, high)

    def get_metavar(self, param: click.Parameter, ctx: click.Context | None = None) -> str:  # noqa: ARG002 (click's)
        """As help shows it."""
        return "N[,N...]"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[int, ...]:
        """The numbers, each once."""
        if isinstance(value, tuple):
            return value
        numbers = [self._number.convert(part.strip(), param, ctx) for part in value.split(",")]
        kept = tuple(dict.fromkeys(n for n in numbers if n is not None and n >= self._low))
        if not kept:
            self.fail(f"{value!r} holds no number from {self._low} to {self._high}", param, ctx)
        return kept


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "-m", "--model", required=True, metavar="FILE", help="What to read: a model, or any large file."
)
@click.option(
    "--lanes", type=_Numbers(1, _MOST_LANES), default=_LANES, show_default=True, help="Reads in flight."
)
@click.option(
    "--slice-kb", type=_Numbers(1, _MOST_KIB), default="4096", show_default=True, help="KiB per logical read."
)
@click.option(
    "--scatter",
    type=_Numbers(0, 1024),
    default="1",
    show_default=True,
    help="Split each logical read into N equal pieces at independent offsets; 1,3 compares.",
)
@click.option(
    "--seconds",
    type=click.FloatRange(0.05, 3600),
    default=5.0,
    show_default=True,
    help="Per row, shared out over the repeats.",
)
@click.option(
    "--repeat", type=Number(1, 1000), help="Samples per row, rows interleaved.  [default: 3; for --replay 1]"
)
@click.option("--buffered", is_flag=True, help="Read through the page cache, after emptying it.")
@click.option(
    "--compute-load",
    type=_Numbers(0, _MOST_BURNERS),
    default="0",
    show_default=True,
    help="Busy threads beside the reads; 0,2 compares.",
)
@click.option(
    "--backend",
    type=click.Choice(["uring", "threads", "both"]),
    help="What reads.  [default: io_uring where it works, else threads]",
)
@click.option("--registered/--no-registered", default=True, help="Registered buffers, where they work.")
@click.option(
    "--engine-pattern", is_flag=True, help="Read the model's experts where they lie, slice by slice."
)
@click.option("--replay", metavar="TRACE", help="Read the misses of a recorded route trace instead.")
@click.option(
    "--cache-mb", type=Number(0, 1 << 24), default=1000, show_default=True, help="For --replay: the cache."
)
@click.option("--policy", default="aged", show_default=True, help="For --replay: the cache's policy.")
@click.option("--tokens", type=Number(1, 1 << 24), help="For --replay: at most so many decoded tokens.")
@click.option("--json", "json_path", metavar="PATH|-", help="Write the result as JSON; - is standard output.")
@click.option("--plot", metavar="PATH", help="Draw it: .png or .svg.")
@click.option("--no-keep", is_flag=True, help="Do not keep the result for `bmoe plan` and `bmoe doctor`.")
@click.version_option(__version__, prog_name="bmoe-iobench", message="%(prog)s %(version)s")
@click.pass_context
def iobench(ctx: click.Context, /, **_: Any) -> int:
    """Measure what a drive gives to random reads, made by the very code that streams experts.

    Reads bypass the page cache. The table goes to standard output, progress to standard error.
    """
    settings = _settings(ctx)
    from bmoe.cli.interrupts import run_async  # noqa: PLC0415 (keeps `--help` fast)

    plot, json_path = ctx.params["plot"], ctx.params["json_path"]
    if plot is not None:
        from bmoe.pictures import check_plot  # noqa: PLC0415 (same)

        check_plot(plot)
    if json_path not in {None, "-"}:
        _check_writable(json_path)
    found: list[Result] = []
    code = run_async(lambda interrupts: _measure(settings, interrupts, found))
    if found:
        _report(found[0], json_path=json_path, plot=plot, keep=not ctx.params["no_keep"])
    return code


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark.

    Args:
        argv: The command line without the program's name; None takes the process's.

    Returns:
        The exit code: 0 done, 1 failed, 2 asked wrongly, 128 + N ended by signal N.
    """
    from bmoe.cli import run_command  # noqa: PLC0415 (it and this module would import each other)

    return run_command(iobench, "bmoe-iobench", argv)


async def _measure(settings: Settings, interrupts: Interrupts, found: list[Result]) -> int:
    from bmoe.cli.progress import ProgressDisplay  # noqa: PLC0415 (keeps `--help` fast)
    from bmoe.tools.iobench import run  # noqa: PLC0415 (same)

    def describe(done: int, total: int) -> str:
        if settings.replay is not None:
            return f"layer {done} of {total}"
        return f"{done / 1e3:.0f} of {total / 1e3:.0f} s"

    progress = ProgressDisplay("measuring", describe, sys.stderr)
    task = asyncio.ensure_future(run(settings, progress.update))
    loop = asyncio.get_running_loop()
    interrupts.cancel_with(lambda: loop.call_soon_threadsafe(task.cancel))
    try:
        found.append(await task)
    except asyncio.CancelledError:
        if interrupts.received is None:
            raise
        return interrupts.exit_code
    finally:
        progress.close()
    return 0


def _settings(ctx: click.Context) -> Settings:
    from bmoe.io.errors import UsageError  # noqa: PLC0415 (keeps `--help` fast)
    from bmoe.tools.iobench import ReplaySettings, Settings  # noqa: PLC0415 (same)

    p = ctx.params

    def given(name: str) -> bool:
        return ctx.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE

    replaying = p["replay"] is not None
    for name, option in (_ROWS_ONLY if replaying else _REPLAY_ONLY).items():
        if given(name):
            raise UsageError(f"{option} has no meaning {'with' if replaying else 'without'} --replay")
    backends = {"both": ("uring", "threads"), None: ()}.get(p["backend"], (p["backend"],))
    if not math.isfinite(p["seconds"]):  # click's range lets nan pass
        raise UsageError(f"--seconds {p['seconds']}: expected 0.05 to 3600")
    if 0 in p["scatter"]:
        raise UsageError("--scatter 0: a read has at least one piece")
    return Settings(
        path=p["model"],
        # One depth is enough for a replay, unless several are asked for.
        lanes=(32,) if replaying and not given("lanes") else p["lanes"],
        # With the experts' own sizes, others are measured only when asked for.
        read_kib=() if p["engine_pattern"] and not given("slice_kb") else p["slice_kb"],
        scatter=p["scatter"],
        seconds=p["seconds"],
        repeat=p["repeat"] or (1 if replaying else 3),
        buffered=p["buffered"],
        compute_load=p["compute_load"],
        backends=backends,
        register=p["registered"],
        engine_pattern=p["engine_pattern"],
        replay=ReplaySettings(
            trace=p["replay"], cache_mib=p["cache_mb"], policy=p["policy"], max_tokens=p["tokens"]
        )
        if replaying
        else None,
        command=_command(ctx),
    )


def _command(ctx: click.Context) -> str:
    import shlex  # noqa: PLC0415 (keeps `--help` fast)

    words = ctx.obj if isinstance(ctx.obj, list) else []
    return shlex.join(["bmoe-iobench", *words])


def _check_writable(path: str) -> None:
    """Before minutes of measuring, not after."""
    from bmoe.io.errors import FileError  # noqa: PLC0415 (keeps `--help` fast)

    folder = os.path.dirname(path) or "."
    if not os.path.isdir(folder) or os.path.isdir(path):
        raise FileError("the result cannot be written there", path=path)


def _report(result: Result, *, json_path: str | None, plot: str | None, keep: bool) -> None:
    from bmoe.tools.iobench import remember  # noqa: PLC0415 (keeps `--help` fast)
    from bmoe.tools.iobench.tables import show  # noqa: PLC0415 (same)

    # Standard output belongs to whoever asked for it: then the table is for the eye only.
    show(result, sys.stderr if json_path == "-" else sys.stdout)
    if json_path is not None:
        text = json.dumps(result.as_json(), indent=1, allow_nan=False)
        if json_path == "-":
            click.echo(text)
        else:
            with open(json_path, "w", encoding="ascii") as file:
                file.write(f"{text}\n")
    if plot is not None:
        from bmoe.tools.iobench.plots import draw  # noqa: PLC0415 (same)

        draw(result, plot)
    if keep and result.replay is None:
        reason = remember(result)
        if reason is not None:
            sys.stderr.write(f"bmoe-iobench: not kept: {reason}\n")


if __name__ == "__main__":
    sys.exit(main())
