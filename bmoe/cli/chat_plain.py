"""A chat over pipes: lines are messages, answers are plain text.

Owns how lines become messages, and where text goes. Must not know what a chat does with them. Nothing but
answers, and what commands show, goes to standard output; no control sequence does.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Final

from bmoe.cli.terminal_text import terminal_text
from bmoe.io.errors import FileError, FormatError

if TYPE_CHECKING:
    from typing import TextIO

    from bmoe.cli.answer_view import AnswerFigures
    from bmoe.records import PrefillProgress, TokenEvent

_MOST_LINE_BYTES: Final = 16 << 20


class PlainUi:
    """Standard input and output.

    Args:
        quiet: Nothing on stderr but errors.
        in_fd: Where lines come from.
        out_fd: Where answers go.
    """

    def __init__(self, *, quiet: bool = False, in_fd: int = 0, out_fd: int = 1) -> None:
        # With a terminal for input only: someone types, and keeps the answers.
        self.interactive = os.isatty(in_fd)
        self.progress_stream: TextIO | None = None if quiet else sys.stderr
        self._in = open(in_fd, "rb", closefd=False)  # noqa: SIM115 (as long as the process)
        self._out_fd = out_fd
        self._line_number = 0

    def read(self) -> str | None:
        """The next message; a line that ends in a backslash goes on with the next."""
        parts: list[str] = []
        while True:
            if self.interactive:
                self._say("... " if parts else "> ")
            line = self._line()
            if line is None:
                return "\n".join(parts) if parts else None
            if line.endswith("\\"):
                parts.append(line[:-1])
                continue
            text = "\n".join((*parts, line))
            if text.strip():
                return text
            parts = []

    def _line(self) -> str | None:
        raw = self._in.readline(_MOST_LINE_BYTES + 1)
        if not raw:
            return None
        self._line_number += 1
        if len(raw) > _MOST_LINE_BYTES:
            raise FormatError(
                f"line {self._line_number} is longer than {_MOST_LINE_BYTES >> 20} MiB", path="standard input"
            )
        try:
            return raw.decode().rstrip("\r\n")
        except UnicodeDecodeError as error:
            raise FormatError(
                f"line {self._line_number} is not UTF-8",
                path="standard input",
                got=f"byte 0x{raw[error.start]:02x}",
            ) from None

    def note(self, *lines: str) -> None:
        """To standard error."""
        if self.progress_stream is not None:
            self._say("".join(f"{line}\n" for line in lines))

    def warn(self, *lines: str) -> None:
        """To standard error."""
        self.note(*lines)

    def show(self, *lines: str) -> None:
        """To standard output."""
        self.write("".join(f"{line}\n" for line in lines))

    def answer(self, figures: AnswerFigures) -> PlainAnswer:  # noqa: ARG002 (for terminals)
        """On standard output."""
        return PlainAnswer(self)

    def write(self, text: str) -> None:
        """To standard output.

        Raises:
            BrokenPipeError: Its reader is gone.
            FileError: It cannot be written otherwise.
        """
        rest = memoryview(text.encode("utf-8", "replace"))
        try:
            while rest:
                rest = rest[os.write(self._out_fd, rest) :]
        except BrokenPipeError:
            raise
        except OSError as error:
            raise FileError(f"the text cannot be written: {error.strerror}", path="standard output") from None

    def _say(self, text: str) -> None:
        sys.stderr.write(text)
        sys.stderr.flush()


class PlainAnswer:
    """One answer, which ends with a line break. Reasoning is left out: it is in the log."""

    def __init__(self, ui: PlainUi) -> None:
        self._ui = ui
        self._at_line_start = True

    def prefill(self, progress: PrefillProgress) -> None:
        """Shows nothing."""

    def token(self, event: TokenEvent) -> None:
        """Writes its text."""
        if text := terminal_text(event.text):
            self._ui.write(text)
            self._at_line_start = text.endswith("\n")

    def idle(self) -> None:
        """Nothing is left to show."""

    def end(self, *notes: str) -> None:
        """Ends the line."""
        if not self._at_line_start:
            self._ui.write("\n")
        self._ui.note(*notes)
