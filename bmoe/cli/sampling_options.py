"""The options that say how tokens are chosen, and the Sampling they make.

Owns names, defaults and which exclude each other. Must not know how tokens are chosen.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click

from bmoe.cli.options import Number, Real, read_text

if TYPE_CHECKING:
    from collections.abc import Callable

    from bmoe.config import Sampling

    F = TypeVar("F", bound=Callable[..., Any])

_MOST_SEED: Final = (1 << 32) - 2
# What a temperature of 0 leaves without effect. A seed is harmless there: the same seed, the same text.
_RANDOM_ONLY: Final = {"top_k": "--top-k", "top_p": "--top-p", "min_p": "--min-p"}


class _LookBack(Number):
    """A number of tokens, or -1."""

    def __init__(self) -> None:
        super().__init__(0, 1 << 24)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int | None:
        """The number."""
        return -1 if value == "-1" else super().convert(value, param, ctx)


_OPTIONS: Final = (
    click.option(
        "--temp",
        type=Real(0, 100),
        default=0.0,
        show_default=True,
        help="Temperature; 0 takes the likeliest token.",
    ),
    click.option(
        "--top-k",
        type=Number(0, 1 << 24),
        default=40,
        show_default=True,
        help="Choose among this many likeliest tokens; 0 is all.",
    ),
    click.option(
        "--top-p",
        type=Real(0, 1, above=True),
        default=0.95,
        show_default=True,
        help="Choose among the likeliest that make up this probability.",
    ),
    click.option(
        "--min-p",
        type=Real(0, 1),
        default=0.0,
        show_default=True,
        help="Choose among those at least this likely relative to the likeliest.",
    ),
    click.option(
        "--repeat-penalty",
        type=Real(0.01, 100),
        default=1.0,
        show_default=True,
        help="Divides the logits of tokens that were used; 1 is off.",
    ),
    click.option(
        "--repeat-last-n",
        type=_LookBack(),
        default=64,
        show_default=True,
        help="Tokens that penalties look back at; -1 is the whole context.",
    ),
    click.option(
        "--frequency-penalty",
        type=Real(-100, 100),
        default=0.0,
        show_default=True,
        help="Subtracted from a token's logit for each use.",
    ),
    click.option(
        "--presence-penalty",
        type=Real(-100, 100),
        default=0.0,
        show_default=True,
        help="Subtracted from the logit of every token that was used.",
    ),
    click.option(
        "--seed", type=Number(0, _MOST_SEED), help="Same seed, same text.  [default: another each time]"
    ),
    click.option("--grammar", metavar="FILE", help="A GBNF grammar that the answer must follow."),
    click.option("--json-schema", metavar="FILE|JSON", help="A JSON Schema that the answer must follow."),
)


def sampling_options(function: F) -> F:
    """Adds the options that make a Sampling; `sampling` makes it."""
    for decorate in reversed(_OPTIONS):
        function = decorate(function)
    return function


def sampling(ctx: click.Context) -> Sampling:
    """What the options of `sampling_options` ask for.

    Raises:
        click.UsageError: Options that exclude each other or have no effect, or a schema that is no JSON.
        FileError: A file cannot be read or is not UTF-8.
    """
    from bmoe.config import Sampling  # noqa: PLC0415 (imports numpy)

    p = ctx.params
    if not p["temp"] and (
        idle := [
            name
            for key, name in _RANDOM_ONLY.items()
            if ctx.get_parameter_source(key) is click.core.ParameterSource.COMMANDLINE
        ]
    ):
        raise click.UsageError(f"{', '.join(idle)}: no effect without --temp above 0", ctx)
    if p["grammar"] is not None and p["json_schema"] is not None:
        raise click.UsageError("--grammar and --json-schema exclude each other", ctx)
    return Sampling(
        temperature=p["temp"],
        top_k=p["top_k"],
        top_p=p["top_p"],
        min_p=p["min_p"],
        repeat_penalty=p["repeat_penalty"],
        repeat_last_n=p["repeat_last_n"],
        frequency_penalty=p["frequency_penalty"],
        presence_penalty=p["presence_penalty"],
        seed=p["seed"],
        grammar=None if p["grammar"] is None else _grammar(p["grammar"], ctx),
        json_schema=None if p["json_schema"] is None else _json_schema(p["json_schema"], ctx),
    )


def _read(path: str) -> str:
    return read_text("./-" if path == "-" else path)  # standard input is where prompts come from


def _grammar(path: str, ctx: click.Context) -> str:
    text = _read(path)
    if not text.strip():
        raise click.UsageError(f"--grammar {path}: the file is empty", ctx)
    return text


def _json_schema(given: str, ctx: click.Context) -> str:
    """The schema's text: what begins with a brace is the schema itself, anything else names a file."""
    inline = given.lstrip().startswith("{")
    text = given if inline else _read(given)
    name = "--json-schema" if inline else f"--json-schema {given}"
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError) as error:
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise click.UsageError(f"{name} is not JSON: {reason}", ctx) from None
    if not isinstance(schema, dict):
        raise click.UsageError(f"{name} is not a JSON object", ctx)
    return text
