"""Progress of loading and prefill on stderr: a bar on a terminal, elsewhere a line every few seconds.

Must not know what progresses. What is over quickly is not shown at all.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Final, TextIO

if TYPE_CHECKING:
    from collections.abc import Callable

_BAR_AFTER_S: Final = 0.3
_BAR_EVERY_S: Final = 0.1
_LINE_EVERY_S: Final = 3.0


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
