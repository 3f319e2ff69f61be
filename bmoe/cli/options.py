"""The options that decode and verify share, and the SessionConfig and prompt they make.

Owns names, defaults and which options exclude each other. Must not know what is done with them.
"""

from __future__ import annotations

import os
import re
import sys
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click

if TYPE_CHECKING:
    from collections.abc import Callable

    from bmoe.config import SessionConfig

    F = TypeVar("F", bound=Callable[..., Any])

_MIB: Final = 1 << 20
_DEFAULT_UBATCH: Final = 512
# Far beyond any context, yet not beyond memory: -f /dev/zero must end in a clear line.
_MOST_PROMPT_BYTES: Final = 256 * _MIB
_STREAMING_ONLY: Final = {
    "overlap": "--overlap/--no-overlap",
    "cache_mb": "--cache-mb",
    "cache_floor_mb": "--cache-floor-mb",
    "policy": "--policy",
    "io_backend": "--io-backend",
    "queue_depth": "--queue-depth",
    "no_odirect": "--no-odirect",
    "cache_ceil_mb": "--cache-ceil-mb",
    "give_back": "--give-back",
    "warm": "--warm",
    "dense_weights": "--dense-weights",
    "drop_cold_experts": "--drop-cold-experts",
    "drop_no_renorm": "--drop-no-renorm",
    "drop_in_prefill": "--drop-in-prefill",
    "deterministic_cache": "--deterministic-cache",
    "expert_substitute": "--expert-substitute",
    "replay_routing": "--replay-routing",
    "prefetch": "--prefetch",
    "predict_prefetch": "--predict-prefetch",
    "predict_log": "--predict-log",
    "route_ahead": "--route-ahead",
}
# What says how to drop, and the option without which it says nothing.
_OF_DROPPING: Final = ("drop_no_renorm", "drop_in_prefill", "deterministic_cache")


class Number(click.ParamType):  # type: ignore[type-arg]  # generic only in the newest clicks
    """A whole number in plain decimal digits, within limits.

    Args:
        low: The least.
        high: The most.
        word: Something else that is accepted, as None.
    """

    name = "integer"

    def __init__(self, low: int, high: int, *, word: str | None = None) -> None:
        self._low = low
        self._high = high
        self._word = word

    def get_metavar(self, param: click.Parameter, ctx: click.Context | None = None) -> str:  # noqa: ARG002 (click's)
        """As help shows it."""
        return f"{self._word}|N" if self._word else "N"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int | None:
        """The number; None for the word."""
        if isinstance(value, int) or (self._word is not None and value == self._word):
            return value if isinstance(value, int) else None
        if not re.fullmatch("[0-9]{1,18}", value) or not self._low <= int(value) <= self._high:
            words = f"{self._word} or " if self._word else ""
            self.fail(f"{value!r} is not {words}a whole number from {self._low} to {self._high}", param, ctx)
        return int(value)


class Real(click.ParamType):  # type: ignore[type-arg]  # generic only in the newest clicks
    """A finite number in plain decimal notation, within limits.

    Args:
        low: The least.
        high: The most.
        above: Whether `low` itself is too little.
    """

    name = "number"

    def __init__(self, low: float, high: float, *, above: bool = False) -> None:
        self._low = low
        self._high = high
        self._above = above

    def get_metavar(self, param: click.Parameter, ctx: click.Context | None = None) -> str:  # noqa: ARG002 (click's)
        """As help shows it."""
        return "X"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """The number."""
        if isinstance(value, int | float):  # a default
            return float(value)
        # float() would also take nan, inf, 1_0 and the digits of every script.
        number = float(value) if re.fullmatch(r"-?([0-9]{1,18}\.?[0-9]{0,18}|\.[0-9]{1,18})", value) else None
        if number is None or not self._low <= number <= self._high or (self._above and number == self._low):
            low = f"above {self._low:g}" if self._above else f"from {self._low:g}"
            self.fail(f"{value!r} is not a number {low} to {self._high:g}", param, ctx)
        return number


model_option = click.option(
    "-m", "--model", required=True, metavar="MODEL", help="A GGUF file, or the first shard."
)


def prompt_options(*, required: bool) -> Callable[[F], F]:
    """Adds -p, -f and -; `read_prompt` reads what they say."""
    default = "" if required else "  [default: a built-in text]"
    return _all(
        click.argument("stdin", required=False, metavar="[-]"),
        click.option("-p", "--prompt", metavar="TEXT", help=f"The prompt.{default}"),
        click.option("-f", "--file", metavar="FILE", help="A UTF-8 file with the prompt, taken as it is."),
    )


dense_weights_option: Final = click.option(
    "--dense-weights",
    type=click.Choice(["anon", "mmap", "warm", "locked", "repack"]),
    default="anon",
    show_default=True,
    help="Where the weights that are no experts are kept (docs/memory.md).",
)


def session_options(*, resident: bool) -> Callable[[F], F]:
    """Adds the options that make a SessionConfig; `session_config` makes it.

    Args:
        resident: Whether --resident is offered.
    """
    plain = (
        click.option("--resident", is_flag=True, help="Plain llama.cpp with the file mapped, no streaming."),
        click.option(
            "--no-repack", is_flag=True, help="With --resident: without llama.cpp's repacked weights."
        ),
    )
    return _all(
        click.option("-t", "--threads", type=Number(1, 512), help="Compute threads.  [default: usable CPUs]"),
        click.option(
            "-c",
            "--ctx-size",
            type=Number(1, 1 << 24),
            default=2048,
            show_default=True,
            help="Context in tokens.",
        ),
        click.option(
            "--ubatch",
            type=Number(1, 1 << 16),
            help=f"Most tokens computed at once.  [default: {_DEFAULT_UBATCH}, or the context if smaller]",
        ),
        *(plain if resident else ()),
        click.option(
            "--overlap/--no-overlap",
            default=True,
            show_default=True,
            help="Compute experts as they arrive, or wait for all of a layer's reads first.",
        ),
        click.option(
            "--cache-mb",
            type=Number(1, 1 << 24, word="auto"),
            default="auto",
            show_default=True,
            help="MiB of memory for experts; auto takes what is available and leaves a floor.",
        ),
        click.option(
            "--cache-floor-mb", type=Number(0, 1 << 24), help="With auto: MiB of memory to leave free."
        ),
        click.option("--cache-ceil-mb", type=Number(1, 1 << 24), help="With auto: the most MiB to take."),
        click.option(
            "--give-back",
            is_flag=True,
            help="Make the cache smaller when others need memory, and larger again.",
        ),
        click.option(
            "--warm",
            metavar="FILE|auto",
            help="Preload experts: a warm set, or with auto what the last run found useful.",
        ),
        dense_weights_option,
        click.option(
            "--policy",
            default="recurring",
            show_default=True,
            metavar="NAME",
            help="aged or lru or recurring: what to give up when the cache is full.",
        ),
        click.option(
            "--io-backend",
            type=click.Choice(["auto", "uring", "threads"]),
            default="auto",
            show_default=True,
            help="How to read; auto prefers io_uring.",
        ),
        click.option(
            "--queue-depth",
            type=Number(1, 4096),
            help="Most reads at one time.  [default: about 5 MiB of them]",
        ),
        click.option("--no-odirect", is_flag=True, help="Read through the page cache."),
        click.option(
            "--n-expert-used",
            type=Number(1, 1 << 16),
            help="Experts per token instead of the file's number. Changes the output.",
        ),
        *_levers(),
    )


def _levers() -> tuple[Callable[[F], F], ...]:
    """Skipping and guessing: all off unless asked for."""
    return (
        click.option(
            "--prefetch",
            type=Number(0, 8),
            default=0,
            metavar="K",
            help="Read ahead, K layers, what the previous token used.",
        ),
        click.option(
            "--predict-prefetch",
            is_flag=True,
            help="Read ahead what the next layer's router says of this layer's input.",
        ),
        click.option("--predict-log", is_flag=True, help="Tell how well routing can be guessed."),
        click.option(
            "--drop-cold-experts",
            type=Real(0, 1),
            default=0.0,
            metavar="F",
            help="Lossy: leave out experts not in memory that weigh below F of an equal share.",
        ),
        click.option("--drop-no-renorm", is_flag=True, help="Do not give their weight to the others."),
        click.option("--drop-in-prefill", is_flag=True, help="Drop in the prompt too."),
        click.option(
            "--deterministic-cache",
            is_flag=True,
            help="Drop by an imagined cache, so that the same request gives the same text.",
        ),
        click.option(
            "--expert-substitute",
            type=Real(0, 100),
            default=0.0,
            metavar="L",
            help="Lossy: prefer experts in memory by L of the range of router scores.",
        ),
        click.option(
            "--route-ahead",
            type=Number(0, 8),
            default=0,
            metavar="N",
            help="Lossy: take a layer's routing from the input of N layers before.",
        ),
        click.option(
            "--replay-routing",
            metavar="TRACE",
            help="Benchmarks: experts of a recorded trace replace the router's choice.",
        ),
    )


def session_config(ctx: click.Context, **traces: Any) -> SessionConfig:
    """The configuration that the options of `session_options` and `model_option` ask for.

    Args:
        ctx: The command's.
        traces: More of the configuration, by its names.

    Raises:
        click.UsageError: Options that exclude each other.
        bmoe.io.errors.UsageError: No such policy.
    """
    from bmoe.config import SessionConfig, default_threads  # noqa: PLC0415 (imports numpy)

    p = ctx.params
    resident = p.get("resident", False)
    idle = [name for key, name in _STREAMING_ONLY.items() if _is_given(ctx, key)]
    if p["dense_weights"] == "repack":  # llama.cpp can do that too: the run to compare with
        idle = [name for name in idle if name != "--dense-weights"]
    if resident and idle:
        raise click.UsageError(f"{', '.join(idle)}: no effect with --resident", ctx)
    if p.get("no_repack") and not resident:
        raise click.UsageError("--no-repack goes with --resident: streaming never repacks", ctx)
    if p["cache_mb"] is not None and p["cache_floor_mb"] is not None:
        raise click.UsageError("--cache-floor-mb goes with --cache-mb auto", ctx)
    if p["cache_mb"] is not None and p["cache_ceil_mb"] is not None:
        raise click.UsageError("--cache-ceil-mb goes with --cache-mb auto", ctx)
    if not p["drop_cold_experts"] and any(p[name] for name in _OF_DROPPING):
        names = [_STREAMING_ONLY[name] for name in _OF_DROPPING if p[name]]
        raise click.UsageError(f"{', '.join(names)}: no effect without --drop-cold-experts", ctx)
    if p["ubatch"] is not None and p["ubatch"] > p["ctx_size"]:
        raise click.UsageError(f"--ubatch {p['ubatch']} is above --ctx-size {p['ctx_size']}", ctx)
    return SessionConfig(
        model_path=p["model"],
        threads=p["threads"] or default_threads(),
        context_tokens=p["ctx_size"],
        ubatch_tokens=p["ubatch"] or min(_DEFAULT_UBATCH, p["ctx_size"]),
        mode="resident" if resident else "auto",
        overlap=p["overlap"],
        cache_bytes=None if p["cache_mb"] is None else p["cache_mb"] * _MIB,
        cache_floor_bytes=None if p["cache_floor_mb"] is None else p["cache_floor_mb"] * _MIB,
        policy=p["policy"],
        io_backend=p["io_backend"],
        queue_depth=p["queue_depth"],
        direct=not p["no_odirect"],
        repack=not p.get("no_repack", False),
        n_expert_used=p["n_expert_used"],
        cache_ceil_bytes=None if p["cache_ceil_mb"] is None else p["cache_ceil_mb"] * _MIB,
        give_back=p["give_back"],
        dense_weights=p["dense_weights"],
        warm=p["warm"],
        drop_cold_experts=p["drop_cold_experts"],
        drop_renormalise=not p["drop_no_renorm"],
        drop_in_prefill=p["drop_in_prefill"],
        deterministic_cache=p["deterministic_cache"],
        expert_substitute=p["expert_substitute"],
        replay_routing=p["replay_routing"],
        prefetch_layers=p["prefetch"],
        predict_prefetch=p["predict_prefetch"],
        predict_log=p["predict_log"],
        route_ahead=p["route_ahead"],
        **traces,
    )


def read_prompt(ctx: click.Context, *, default: str | None = None) -> str:
    """The prompt, from wherever the options say.

    Args:
        ctx: The command's.
        default: Without any source; None makes that an error.

    Raises:
        click.UsageError: Not exactly one source, or an empty prompt.
        FileError: A file cannot be read or is not UTF-8.
    """
    stdin, text, file = (ctx.params[name] for name in ("stdin", "prompt", "file"))
    if stdin not in {None, "-"}:
        raise click.UsageError(
            f"unexpected argument {stdin!r}: a prompt is given with -p TEXT, -f FILE or -", ctx
        )
    given = [source for source in (stdin, text, file) if source is not None]
    if not given and default is not None:
        return default
    if len(given) != 1:
        what = "more than one prompt" if given else "no prompt"
        raise click.UsageError(f"{what}: give one of -p TEXT, -f FILE, or - for standard input", ctx)
    prompt = _checked_text(text, ctx) if text is not None else read_text(file or "-")
    if not prompt:
        raise click.UsageError("the prompt is empty", ctx)
    return prompt


def read_text(path: str) -> str:
    """A UTF-8 file's content, unchanged; "-" is standard input.

    Raises:
        FileError: It cannot be read, is no UTF-8, or is larger than any prompt.
    """
    from bmoe.io.errors import FileError, FormatError  # noqa: PLC0415 (keeps `--help` fast)

    name = "standard input" if path == "-" else path
    try:
        if path == "-":
            if sys.stdin.isatty():
                click.echo("the prompt is read from the terminal; Ctrl-D ends it", err=True)
            raw = sys.stdin.buffer.read(_MOST_PROMPT_BYTES + 1)
        else:
            with open(path, "rb") as file:
                raw = file.read(_MOST_PROMPT_BYTES + 1)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise FileError(f"cannot be read: {reason}", path=name) from None
    if len(raw) > _MOST_PROMPT_BYTES:
        raise FormatError(f"is larger than {_MOST_PROMPT_BYTES // _MIB} MiB", path=name)
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        raise FormatError(
            "is not UTF-8", path=name, offset_bytes=error.start, got=f"byte 0x{raw[error.start]:02x}"
        ) from None


def _checked_text(text: str, ctx: click.Context) -> str:
    try:
        os.fsencode(text).decode()
    except UnicodeDecodeError:
        raise click.UsageError("the prompt given with -p is not UTF-8", ctx) from None
    return text


def _is_given(ctx: click.Context, name: str) -> bool:
    return ctx.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE


def _all(*decorators: Callable[[F], F]) -> Callable[[F], F]:
    def decorate(function: F) -> F:
        for decorator in reversed(decorators):
            function = decorator(function)
        return function

    return decorate
