"""What Ctrl-C, SIGTERM and a closed terminal mean to a chat.

Owns these signals' handlers. Must not know what a chat is.
"""

from __future__ import annotations

import signal
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final, Self

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import FrameType

_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Ended(KeyboardInterrupt):
    """A signal ends the program, in order.

    Args:
        number: The signal's.
    """

    def __init__(self, number: int) -> None:
        super().__init__()
        self.exit_code = 128 + number


class ChatSignals:
    """Handlers inside the `with` block, which must be in the main thread.

    Args:
        interactive: Whether Ctrl-C stops an answer; otherwise it ends the program, as SIGTERM does.

    Attributes:
        presses: How often Ctrl-C was pressed during the last answer.
    """

    def __init__(self, *, interactive: bool) -> None:
        self.presses = 0
        self._interactive = interactive
        self._cancel: Callable[[], None] | None = None

    @contextmanager
    def answering(self, cancel: Callable[[], None]) -> Iterator[None]:
        """While an answer is made: what stops it."""
        self.presses = 0
        self._cancel = cancel
        try:
            yield
        finally:
            self._cancel = None

    def __enter__(self) -> Self:
        # What is ignored stays so: a shell's background job is not meant by Ctrl-C, nor nohup's by SIGHUP.
        handled = [number for number in _SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
        self._previous = {number: signal.signal(number, self._on_signal) for number in handled}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        if number != signal.SIGINT or not self._interactive:
            raise Ended(number)
        self.presses += 1
        if self._cancel is not None:
            self._cancel()
