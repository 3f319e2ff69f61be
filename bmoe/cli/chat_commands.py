"""The commands of `bmoe chat`: their names, what they take, and what was meant by a line.

Owns the table. Must not know what commands do.
"""

from __future__ import annotations

import difflib
from typing import Final, NamedTuple

from bmoe.io.errors import UsageError


class Command(NamedTuple):
    """One command.

    Attributes:
        argument: What follows it, for help; empty for nothing. In brackets it may be left out.
        help: One line.
    """

    argument: str
    help: str


COMMANDS: Final = {
    "help": Command("", "Show this."),
    "new": Command("", "Start a new conversation; the system message stays."),
    "system": Command("[TEXT]", "Set the system message; - removes it, nothing shows it."),
    "think": Command("[on|off]", "Let the model reason before it answers, or not."),
    "stats": Command("", "Show figures of the last answer and of the cache."),
    "save": Command("FILE", "Save the conversation."),
    "load": Command("FILE", "Go on with a saved conversation."),
    "quit": Command("", "Leave. So does Ctrl-D."),
}
_OTHER_NAMES: Final = {"exit": "quit", "q": "quit", "?": "help", "h": "help", "clear": "new", "reset": "new"}


def parse_command(line: str) -> tuple[str, str] | None:
    """The command and its argument on a line; None when it is a message.

    A message that begins with a slash is written with two, and has several lines or one.

    Raises:
        UsageError: There is no such command, or its argument is missing or too much; says what is near.
    """
    if not line.startswith("/") or line.startswith("//") or "\n" in line.strip():
        return None
    word, _, argument = line.strip()[1:].partition(" ")
    name = _OTHER_NAMES.get(word, word)
    argument = argument.strip()
    if name not in COMMANDS:
        near = difflib.get_close_matches(name, COMMANDS, cutoff=0.5)
        hint = f"did you mean {' or '.join(f'/{n}' for n in near)}?" if near else "/help lists them"
        raise UsageError(f"there is no command /{word}; {hint}", hint="a message may begin with //")
    takes = COMMANDS[name].argument
    if argument and not takes:
        raise UsageError(f"/{name} takes nothing after it")
    if not argument and takes and not takes.startswith("["):
        raise UsageError(f"/{name} needs a {takes.lower()}: /{name} {takes}")
    if name == "think" and argument not in {"", "on", "off"}:
        raise UsageError("/think takes on or off")
    return name, argument


def message_of(line: str) -> str:
    """The message that a line is which is no command."""
    return line[1:] if line.startswith("//") else line


def help_lines() -> list[str]:
    """The commands and keys, aligned."""
    rows = [(f"/{name} {c.argument}".strip(), c.help) for name, c in COMMANDS.items()]
    rows += [
        ("Ctrl-C", "Stop the answer; the model then forgets that turn."),
        ("Alt-Enter", "A new line; so does Enter after a backslash."),
    ]
    width = max(len(what) for what, _ in rows)
    return [f"{what:<{width}}  {text}" for what, text in rows]
