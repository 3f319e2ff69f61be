"""A chat on a terminal: line editing with history and completion, answers rendered as they come.

Owns the terminal's modes and keys. Must not know what a chat does with lines.
"""

from __future__ import annotations

import os
import sys
import termios
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Final

from prompt_toolkit import PromptSession
from prompt_toolkit.completion import Completer, Completion, PathCompleter
from prompt_toolkit.document import Document
from prompt_toolkit.filters import Condition
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.key_binding import KeyBindings
from prompt_toolkit.styles import Style

from bmoe.cli.answer_view import AnswerView
from bmoe.cli.chat_commands import COMMANDS
from bmoe.cli.chat_signals import Ended
from bmoe.cli.live_area import LiveArea
from bmoe.cli.markdown_rows import RowMaker
from bmoe.cli.terminal_text import terminal_text

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from typing import TextIO

    from prompt_toolkit.completion import CompleteEvent
    from prompt_toolkit.key_binding import KeyPressEvent

    from bmoe.cli.answer_view import AnswerFigures
    from bmoe.records import PrefillProgress, TokenEvent

_LEAVE: Final = "/quit or Ctrl-D leaves"
_STYLE: Final = Style.from_dict({"bottom-toolbar": "noreverse fg:ansibrightblack", "prompt": "bold"})


class TerminalUi:
    """Standard input and output, both being a terminal.

    Args:
        markdown: Whether answers are rendered.
        history_path: File of what was typed; None keeps nothing.
    """

    interactive = True

    def __init__(self, *, markdown: bool = True, history_path: str | None = None) -> None:
        self.progress_stream: TextIO | None = sys.stderr
        self._markdown = markdown
        self._maker = RowMaker()
        self._status = ""
        self._hint = ""
        self._prompt: PromptSession[str] = PromptSession(
            history=_history(history_path),
            multiline=True,
            key_bindings=self._keys(),
            completer=_Completer(),
            complete_while_typing=Condition(self._is_command),
            bottom_toolbar=lambda: self._hint or self._status,
            prompt_continuation="  ",
            style=_STYLE,
            enable_suspend=True,
            reserve_space_for_menu=4,
        )

    def _is_command(self) -> bool:
        return self._prompt.default_buffer.text.startswith("/")

    def _keys(self) -> KeyBindings:
        keys = KeyBindings()

        @keys.add("enter")
        def _enter(event: KeyPressEvent) -> None:
            buffer = event.current_buffer
            if buffer.document.text_before_cursor.endswith("\\"):
                buffer.delete_before_cursor()
                buffer.insert_text("\n")
            elif buffer.text.strip():
                buffer.validate_and_handle()

        @keys.add("escape", "enter")
        def _new_line(event: KeyPressEvent) -> None:
            event.current_buffer.insert_text("\n")

        @keys.add("c-c")
        def _interrupt(event: KeyPressEvent) -> None:
            if not event.current_buffer.text:
                self._hint = _LEAVE
            event.current_buffer.reset()

        return keys

    def read(self) -> str | None:
        """What is typed; None after Ctrl-D on an empty line, or when the terminal is gone."""
        while True:
            try:
                text = self._prompt.prompt([("class:prompt", "> ")])
            except Ended:
                raise
            except KeyboardInterrupt:  # not as a key: someone sent the signal
                self._hint = _LEAVE
                continue
            except EOFError:
                return None
            self._hint = ""
            # Keys that are no UTF-8 arrive as halves of surrogate pairs.
            return text.encode("utf-8", "replace").decode()

    def note(self, *lines: str) -> None:
        """Dimmed."""
        self._print(lines, "dim")

    def warn(self, *lines: str) -> None:
        """In yellow."""
        self._print(lines, "yellow")

    def show(self, *lines: str) -> None:
        """As it is."""
        self._print(lines, "")

    def _print(self, lines: Iterable[str], style: str) -> None:
        width = LiveArea(1).width
        rows = [row for line in lines for row in self._maker.plain(terminal_text(line), width, style=style)]
        sys.stdout.write("".join(f"{row}\n" for row in rows))
        sys.stdout.flush()

    def answer(self, figures: AnswerFigures) -> _Answer:
        """Below what was typed."""
        return _Answer(self, AnswerView(LiveArea(1), self._maker, markdown=self._markdown, figures=figures))

    def answered(self, status: str) -> None:
        """The last answer's figures, for the line below what is typed."""
        self._status = status


class _Answer:
    """An answer during which nothing that is typed shows; it is there for the next prompt."""

    def __init__(self, ui: TerminalUi, view: AnswerView) -> None:
        self._ui = ui
        self._view = view
        self._quiet = _no_echo(0)
        self._quiet.__enter__()
        view.draw()

    def prefill(self, progress: PrefillProgress) -> None:
        self._view.prefill(progress)

    def token(self, event: TokenEvent) -> None:
        self._view.token(event)

    def idle(self) -> float | None:
        return self._view.idle()

    def end(self, *notes: str) -> None:
        try:
            with suppress(OSError):  # the terminal is gone: that must not hide why the answer ended
                self._ui.answered(self._view.end(*notes))
        finally:
            self._quiet.__exit__(None, None, None)


@contextmanager
def _no_echo(fd: int) -> Iterator[None]:
    """Keys are kept unseen, but Ctrl-C still is a signal."""
    try:
        before = termios.tcgetattr(fd)
    except termios.error:
        yield
        return
    now = list(before)
    now[0] &= ~termios.ICRNL
    now[3] &= ~(termios.ECHO | termios.ICANON)
    termios.tcsetattr(fd, termios.TCSADRAIN, now)
    try:
        yield
    finally:
        with suppress(termios.error):
            termios.tcsetattr(fd, termios.TCSADRAIN, before)


class _Completer(Completer):
    """Commands, and what they take."""

    def __init__(self) -> None:
        self._paths = PathCompleter(expanduser=True)

    def get_completions(self, document: Document, complete_event: CompleteEvent) -> Iterable[Completion]:
        text = document.text_before_cursor
        if not text.startswith("/") or "\n" in text:
            return
        name, space, argument = text[1:].partition(" ")
        if not space:
            for command, entry in COMMANDS.items():
                if command.startswith(name):
                    yield Completion(f"/{command}", -len(text), display_meta=entry.help)
        elif name == "think":
            yield from (Completion(w, -len(argument)) for w in ("on", "off") if w.startswith(argument))
        elif name in {"save", "load"}:
            yield from self._paths.get_completions(Document(argument), complete_event)


class _FileHistory(FileHistory):
    """A file that may fail: what was typed is then forgotten at the end, and nothing else happens."""

    def load_history_strings(self) -> Iterable[str]:
        try:
            return list(super().load_history_strings())
        except OSError:
            return []

    def store_string(self, string: str) -> None:
        with suppress(OSError):
            super().store_string(string.encode("utf-8", "replace").decode())


def _history(path: str | None) -> History:
    """What was typed before, for its owner's eyes only."""
    if path is None:
        return InMemoryHistory()
    try:
        os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            os.fchmod(fd, 0o600)
        finally:
            os.close(fd)
    except OSError:
        return InMemoryHistory()
    return _FileHistory(path)


def history_path() -> str:
    """Where the user's state is kept, by the XDG rules."""
    state = os.environ.get("XDG_STATE_HOME", "")
    if not os.path.isabs(state):
        state = os.path.expanduser("~/.local/state")
    return os.path.join(state, "bmoe", "chat-history")
