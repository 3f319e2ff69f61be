"""Other engines beside ours: their command lines and what they print.

Owns templates and patterns. Must not know how a process is run.
"""

from __future__ import annotations

import re
import shlex
from typing import TYPE_CHECKING

from bmoe.bench.sides import External
from bmoe.io.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

PLACES = ("model", "prompt", "n", "threads")


def parse_externals(commands: Sequence[str], patterns: Sequence[str]) -> tuple[External, ...]:
    """`NAME=COMMAND` options with their patterns, one for all or one for each.

    Raises:
        UsageError: No name, no command, a place that does not exist, or a pattern that is none.
    """
    if commands and len(patterns) not in {1, len(commands)}:
        raise UsageError(
            f"--external was given {len(commands)} times and --external-pattern {len(patterns)} times: "
            "expected one pattern for all, or one for each"
        )
    if patterns and not commands:
        raise UsageError("--external-pattern goes with --external")
    found = []
    for i, text in enumerate(commands):
        name, equals, command = text.partition("=")
        if not equals or not name.strip() or not command.strip():
            raise UsageError(f"--external {text!r}: expected NAME=COMMAND")
        pattern = patterns[i if len(patterns) > 1 else 0]
        check_pattern(pattern)
        external = External(name=name.strip(), command=command, pattern=pattern)
        words_of(external.command, dict.fromkeys(PLACES, ""))
        found.append(external)
    return tuple(found)


def check_pattern(pattern: str) -> None:
    """Refuses what cannot pick a number.

    Raises:
        UsageError: It is no regular expression, or has no group.
    """
    try:
        groups = re.compile(pattern).groups
    except re.error as error:
        raise UsageError(f"--external-pattern {pattern!r} is no regular expression: {error}") from None
    if not groups:
        raise UsageError(f"--external-pattern {pattern!r} has no group in parentheses for the number")


def words_of(command: str, values: dict[str, str]) -> list[str]:
    """The command's words with its places filled.

    Raises:
        UsageError: It cannot be split into words, or names a place that there is not.
    """
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise UsageError(f"--external {command!r}: {error}") from None
    strange = [p for word in words for p in re.findall(r"\{([A-Za-z_]+)\}", word) if p not in values]
    if strange:
        raise UsageError(
            f"--external: {{{strange[0]}}} is not one of {', '.join(f'{{{p}}}' for p in PLACES)}"
        )
    return [re.sub(r"\{([A-Za-z_]+)\}", lambda m: values[m[1]], word) for word in words]


def find_rates(pattern: str, output: str) -> dict[str, float]:
    """Tokens per second that an output tells: the last match counts.

    Returns:
        `decode_tok_per_s`, and `prefill_tok_per_s` if the pattern has a group of that name; empty if nothing
        was found.
    """
    matches = list(re.finditer(pattern, output, re.MULTILINE))
    if not matches:
        return {}
    named = matches[-1].groupdict()
    texts = {name: named[name] for name in ("decode", "prefill") if named.get(name)}
    if not named:
        texts = {"decode": matches[-1][1]}
    found = {}
    for name, text in texts.items():
        try:
            found[f"{name}_tok_per_s"] = float(text)
        except (TypeError, ValueError):
            continue
    return found
