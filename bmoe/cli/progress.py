"""Progress on stderr: a bar for loading and prefill, a status line while decoding.

On a terminal they are redrawn in place, elsewhere they are a line every few seconds. Must not know what
progresses. What is over quickly is not shown at all.
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Any, Final, TextIO

if TYPE_CHECKING:
    from collections.abc import Callable

_BAR_AFTER_S: Final = 0.3
_BAR_EVERY_S: Final = 0.1
_LINE_EVERY_S: Final = 3.0
_STATUS_EVERY_S: Final = 0.25


class ProgressDisplay:
    """One activity's progress. `close` it before anything else is written to the terminal.

    The bar is drawn only when told of progress: a refreshing thread would take the interpreter lock from
    the event loop.

    Args:
        label: What goes on.
        describe: (done, total) in words.
        stream: Where to show it; None shows nothing.
        clock: The time in seconds.
    """

    def __init__(
        self,
        label: str,
        describe: Callable[[int, int], str],
        stream: TextIO | None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._label = label
        self._describe = describe
        self._stream = stream
        self._clock = clock
        self._bar: Any = None
        self._is_terminal = stream is not None and stream.isatty()
        self._next = clock() + (_BAR_AFTER_S if self._is_terminal else _LINE_EVERY_S)

    def update(self, done: int, total: int) -> None:
        """Shows (done, total) if it is time to."""
        if self._stream is None or (now := self._clock()) < self._next:
            return
        if self._is_terminal and self._bar is None:
            self._open_bar()
        if self._bar is not None:
            self._next = now + _BAR_EVERY_S
            words = self._describe(done, total)
            self._bar.update(self._task, completed=done, total=total, words=words, refresh=True)
        else:
            self._next = now + _LINE_EVERY_S
            percent = f" ({100 * done // total} %)" if total else ""
            self._stream.write(f"{self._label}: {self._describe(done, total)}{percent}\n")
            self._stream.flush()

    def close(self) -> None:
        """Takes the bar away. Idempotent."""
        self._stream = None
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def _open_bar(self) -> None:
        from rich.console import Console  # noqa: PLC0415 (not needed without a terminal)
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn  # noqa: PLC0415 (same)

        console = Console(file=self._stream)
        if console.is_dumb_terminal:
            self._is_terminal = False
            return
        self._bar = Progress(
            TextColumn(self._label),
            BarColumn(),
            TextColumn("{task.fields[words]}"),
            TimeRemainingColumn(),
            console=console,
            auto_refresh=False,
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._task = self._bar.add_task("", total=None, words="")
        self._bar.start()


class StatusLine:
    """One line that is redrawn while text appears elsewhere, or on the same terminal above it.

    Where the text has the same terminal, the last row is taken out of what scrolls. `open` it while the
    cursor is at the start of a line, and `close` it in any case: the terminal keeps that setting.

    Args:
        stream: Where to show it; None shows nothing.
        below_text: Text appears on the stream's own terminal.
        clock: The time in seconds.
    """

    def __init__(
        self, stream: TextIO | None, *, below_text: bool, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._stream = stream
        self._clock = clock
        self._is_terminal = stream is not None and stream.isatty() and os.environ.get("TERM") != "dumb"
        if below_text and not self._is_terminal:
            self._stream = None  # lines would break the text
        self._in_last_row = below_text
        self._rows = 0
        self._drawn = False
        self._next = clock() + (_BAR_AFTER_S if self._is_terminal else _LINE_EVERY_S)

    def open(self) -> None:
        """Makes room. Idempotent."""
        if self._stream is not None and self._in_last_row and not self._rows:
            self._stream.write("\n\x1b[1A")  # scrolls if the cursor is in the last row
            self._reserve()

    def _reserve(self) -> None:
        """Takes the last row out of what scrolls, at first and after the window has changed."""
        assert self._stream is not None
        rows = os.get_terminal_size(self._stream.fileno()).lines
        if rows != self._rows and rows > 2:
            self._rows = rows
            self._stream.write(f"\x1b7\x1b[1;{rows - 1}r\x1b8")
            self._stream.flush()

    def update(self, words: Callable[[], str]) -> None:
        """Shows what `words` gives, if it is time to."""
        if self._stream is None or (now := self._clock()) < self._next:
            return
        if not self._is_terminal:
            self._next = now + _LINE_EVERY_S
            self._stream.write(f"{words()}\n")
        else:
            self._next = now + _STATUS_EVERY_S
            text = words()[: os.get_terminal_size(self._stream.fileno()).columns - 1]
            if self._in_last_row:
                self._reserve()
                self._stream.write(f"\x1b7\x1b[{self._rows};1H\x1b[2K{text}\x1b8")
            else:
                self._stream.write(f"\r\x1b[2K{text}")
            self._drawn = True
        self._stream.flush()

    def hide(self) -> None:
        """Takes the line away, for something else to be written there; the next update shows it again."""
        if self._stream is not None and self._drawn and not self._in_last_row:
            self._stream.write("\r\x1b[2K")
            self._stream.flush()
            self._drawn = False

    def close(self) -> None:
        """Takes it away for good, and gives the row back. Idempotent."""
        self.hide()
        if self._stream is not None and self._rows:
            self._stream.write(f"\x1b7\x1b[r\x1b[{self._rows};1H\x1b[2K\x1b8")
            self._stream.flush()
        self._stream = None
