"""The command line: `bmoe COMMAND`.

Owns which commands there are and what errors look like: one line on stderr and an exit code. Must not
import a command before it is asked for, nor anything heavy at all: help has to be instant.
"""

from __future__ import annotations

import difflib
import importlib
import os
import sys
import traceback
from typing import TYPE_CHECKING, Final, NamedTuple

import click

from bmoe import __version__

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["BROKEN_PIPE_EXIT", "main", "run_command"]

BROKEN_PIPE_EXIT: Final = 128 + 13  # as if SIGPIPE had ended it, which is what shells know


class _Entry(NamedTuple):
    module: str
    attribute: str
    short_help: str


_COMMANDS: Final = {
    "bench": _Entry("bmoe.cli.bench", "bench", "Compare ways to run a model, so that others can repeat it."),
    "chat": _Entry("bmoe.cli.chat", "chat", "Talk to a model."),
    "decode": _Entry("bmoe.cli.decode", "decode", "Generate text from a prompt."),
    "doctor": _Entry("bmoe.cli.doctor", "doctor", "Check this machine, and say what to do about it."),
    "inspect": _Entry("bmoe.cli.inspect", "inspect", "Show what a model file is."),
    "logs": _Entry("bmoe.cli.logs", "logs_group", "Bring runs' logs together, and ask them."),
    "plan": _Entry("bmoe.cli.plan", "plan", "Work out whether and how a model will run here."),
    "ppl": _Entry("bmoe.cli.ppl", "ppl", "Perplexity of a text, and what lossy levers do to it."),
    "route": _Entry("bmoe.cli.route", "route_group", "Say what a recorded routing means for a cache."),
    "session": _Entry(
        "bmoe.cli.session", "session", "Serve a model to a program, over standard input and output."
    ),
    "synth": _Entry("bmoe.cli.synth", "synth_group", "Write a model to run or test on."),
    "verify": _Entry("bmoe.cli.verify", "verify", "Check that streaming gives exactly what llama.cpp gives."),
}


class _LazyGroup(click.Group):
    """Commands by name, imported when one is run."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 (click's)
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002 (click's)
        if cmd_name not in _COMMANDS:
            return None
        entry = _COMMANDS[cmd_name]
        command: click.Command = getattr(importlib.import_module(entry.module), entry.attribute)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args[0] not in _COMMANDS and not args[0].startswith("-"):
            near = difflib.get_close_matches(args[0], _COMMANDS)
            hint = f"did you mean {' or '.join(near)}?" if near else f"there are {', '.join(_COMMANDS)}"
            ctx.fail(f"no such command {args[0]!r}; {hint}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002 (click's)
        with formatter.section("Commands"):
            formatter.write_dl([(name, entry.short_help) for name, entry in _COMMANDS.items()])


@click.group(cls=_LazyGroup, no_args_is_help=True, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="bmoe", message="%(prog)s %(version)s")
def _bmoe() -> None:
    """Run Mixture-of-Experts models bigger than RAM: experts stream from the SSD while llama.cpp computes.

    Text goes to standard output, everything else to standard error.
    """


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command.

    Args:
        argv: The command line without the program's name; None takes the process's.

    Returns:
        The exit code: 0 done, 1 failed, 2 asked wrongly, 128 + N ended by signal N.
    """
    return run_command(_bmoe, "bmoe", argv)


def run_command(command: click.Command, program: str, argv: Sequence[str] | None) -> int:
    """Runs a command or a group of them with bmoe's error lines and exit codes; see `main`.

    Args:
        command: What is run. Its context's `obj` is the command line, as a list.
        program: Its name, for help and errors.
        argv: As for `main`.
    """
    # numpy's BLAS would start a thread per CPU that spins while llama.cpp loads; nothing here uses it.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        code = _run(command, program, words)
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader has what it wants. What is still buffered must not raise again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE_EXIT
    return code


def _run(command: click.Command, program: str, words: list[str]) -> int:
    try:
        # Not click's own main(): that one ends the process on a broken pipe, before a run can end its log.
        with command.make_context(program, list(words), obj=words) as ctx:
            result = command.invoke(ctx)
    except click.exceptions.Exit as done:
        return done.exit_code
    except click.ClickException as error:
        return _click_error(error, program)
    except (KeyboardInterrupt, click.Abort):
        return 130
    except BrokenPipeError:
        raise
    except Exception as error:  # noqa: BLE001 (the last resort: nothing leaves here but an exit code)
        return _error(error, program)
    return result if isinstance(result, int) else 0


def _error(error: Exception, program: str) -> int:
    from bmoe.io.errors import BmoeError  # noqa: PLC0415 (imports the I/O layer, which help does without)

    if isinstance(error, BmoeError):
        _say(str(error), program)
        return error.exit_code
    if isinstance(error, MemoryError):
        _say("out of memory", program)
    elif isinstance(error, OSError) and error.strerror:
        _say(": ".join(str(part) for part in (error.filename, error.strerror) if part), program)
    else:
        traceback.print_exception(error)
        _say("this is a bug in bmoe: please report it with the lines above", program)
    return 1


def _click_error(error: click.ClickException, program: str) -> int:
    if type(error).__name__ == "NoArgsIsHelpError":  # of newer clicks; its message is the help text
        click.echo(error.format_message(), err=True)
        return error.exit_code
    ctx = getattr(error, "ctx", None)
    message = error.format_message().strip().rstrip(".")
    see = f" (see {ctx.command_path} --help)" if ctx else ""
    _say(message[:1].lower() + message[1:] + see, program)
    return error.exit_code


def _say(message: str, program: str) -> None:
    from bmoe.present import one_line  # noqa: PLC0415 (only a run that fails needs it)

    sys.stderr.write(f"{program}: error: {one_line(message)}\n")
