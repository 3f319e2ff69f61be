"""Runs a coroutine so that Ctrl-C and SIGTERM end it within a second, whatever it is doing.

Owns the two signals, and the thread that ends a process which does not end itself. Must not know what is
run. A signal handler only writes to a pipe: everything else would run in the middle of whatever the main
thread was doing, and may need a lock that it holds. The thread at the other end of the pipe asks for
cancellation, and when the process is still there after the grace time (llama.cpp's loader cannot be
interrupted) it leaves at once. Nothing is lost: every line of text and log is written as it is made.
"""

from __future__ import annotations

import asyncio
import faulthandler
import os
import select
import signal
import threading
from typing import TYPE_CHECKING, Final, Self

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine
    from types import FrameType

_LAST_WORDS: Final = b"bmoe: error: native code crashed, over a broken model or by a bug; see bmoe inspect\n"
_GRACE_S: Final = 0.7
_SHOW_CURSOR: Final = b"\r\x1b[?25h"


class Interrupts:
    """SIGINT and SIGTERM inside the `with` block, which must be in the main thread.

    Attributes:
        received: The first signal's number, or None.
        on_exit: Called with the exit code before leaving without the main thread; from another thread.
    """

    def __init__(self) -> None:
        self.received: int | None = None
        self.on_exit: Callable[[int], None] = lambda _: None
        self._cancel: Callable[[], object] = lambda: None

    @property
    def exit_code(self) -> int:
        """What a shell expects of a program that ended by the signal."""
        return 128 + (self.received or signal.SIGINT)

    def cancel_with(self, cancel: Callable[[], object]) -> None:
        """Says how to cancel from here on: thread-safe, idempotent, called at once if it is time."""
        self._cancel = cancel
        if self.received is not None:
            cancel()

    def __enter__(self) -> Self:
        self._read_fd, self._write_fd = os.pipe2(os.O_CLOEXEC)
        self._watcher = threading.Thread(target=self._watch, name="bmoe-interrupts", daemon=True)
        self._watcher.start()
        # What is ignored stays so: a shell's background job is not meant by Ctrl-C.
        handled = [s for s in (signal.SIGINT, signal.SIGTERM) if signal.getsignal(s) is not signal.SIG_IGN]
        self._previous = {number: signal.signal(number, self._on_signal) for number in handled}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        os.close(self._write_fd)
        self._watcher.join()
        os.close(self._read_fd)

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        if self.received is None:
            self.received = number
        os.write(self._write_fd, b"!")

    def _watch(self) -> None:
        if not os.read(self._read_fd, 1):
            return
        self._cancel()
        in_time, _, _ = select.select([self._read_fd], [], [], _GRACE_S)
        if in_time and not os.read(self._read_fd, 1):
            return
        if os.isatty(2):
            os.write(2, _SHOW_CURSOR)  # a progress bar hides it
        if not in_time:
            os.write(2, b"bmoe: left without waiting for work that cannot be interrupted\n")
        self.on_exit(self.exit_code)
        os._exit(self.exit_code)


def run_async(main: Callable[[Interrupts], Coroutine[object, object, int]]) -> int:
    """Runs `main` on uvloop and returns its exit code.

    Args:
        main: Gets the interrupts to say how it is cancelled.
    """
    import uvloop  # noqa: PLC0415 (only what decodes needs it)

    say_last_words()
    with Interrupts() as interrupts, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(main(interrupts))


def say_last_words() -> None:
    """A crash of native code from here on ends with a line, not in silence."""
    from bmoe.pipeline.native import lib  # noqa: PLC0415 (only what decodes needs it)

    if not faulthandler.is_enabled():  # who wants traces of faults keeps them
        lib.bm_last_words(_LAST_WORDS)
