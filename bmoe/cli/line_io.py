"""Lines in and out of descriptors, on threads of their own, for programs that talk to an event loop.

Owns reading, writing and their limits. Must not know what lines mean. Whatever is at the other end, a pipe, a
file or a terminal that was stopped, the loop never waits for it: compute threads wait for the loop.
"""

from __future__ import annotations

import asyncio
import functools
import os
import select
import threading
from queue import SimpleQueue
from typing import TYPE_CHECKING, Final, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable

_CHUNK_BYTES: Final = 1 << 16
# Lines on their way to the loop; what comes after waits in the pipe.
_MOST_LINES_AHEAD: Final = 64
# What a reader that pauses may leave unread before no more lines are taken from it.
_MOST_BACKLOG_BYTES: Final = 32 << 20


class LineSink(Protocol):
    """Who gets the lines, on the loop."""

    def on_line(self, line: bytes) -> None:
        """A line without its break; the last one need not have had one."""

    def on_long_line(self) -> None:
        """A line was longer than allowed, and was skipped."""

    def on_end(self) -> None:
        """No more lines."""


class LineReader:
    """Reads lines until the end; `start` it on the loop.

    Args:
        fd: Where from.
        sink: Who gets them.
        most_bytes: Length of the longest line that is taken.
        backlog_bytes: How much waits to be written; too much of it stops the reading.
    """

    def __init__(self, fd: int, sink: LineSink, *, most_bytes: int, backlog_bytes: Callable[[], int]) -> None:
        self._fd = fd
        self._sink = sink
        self._most_bytes = most_bytes
        self._backlog_bytes = backlog_bytes
        self._credit = threading.Semaphore(_MOST_LINES_AHEAD)
        self._loop: asyncio.AbstractEventLoop

    def start(self) -> None:
        """Begins; the thread ends with the process."""
        self._loop = asyncio.get_running_loop()
        threading.Thread(target=self._read, name="bmoe-lines-in", daemon=True).start()

    def _read(self) -> None:
        parts: list[bytes] = []
        length = 0
        while chunk := self._chunk():
            *ended, rest = chunk.split(b"\n")
            for end in ended:
                parts.append(end)
                self._deliver(parts, length + len(end))
                parts, length = [], 0
            length += len(rest)
            parts = [*parts, rest] if length <= self._most_bytes else []
        if length:
            self._deliver(parts, length)
        self._post(self._sink.on_end)

    def _chunk(self) -> bytes:
        try:
            return os.read(self._fd, _CHUNK_BYTES)
        except OSError:  # a terminal that is gone
            return b""

    def _deliver(self, parts: list[bytes], length: int) -> None:
        self._credit.acquire()
        if length > self._most_bytes:
            self._post(lambda: self._take(self._sink.on_long_line))
        else:
            line = b"".join(parts)
            self._post(lambda: self._take(lambda: self._sink.on_line(line)))

    def _take(self, deliver: Callable[[], None]) -> None:
        """On the loop."""
        try:
            deliver()
        finally:
            self._return_credit()

    def _return_credit(self) -> None:
        if self._backlog_bytes() > _MOST_BACKLOG_BYTES:
            self._loop.call_later(0.05, self._return_credit)
        else:
            self._credit.release()

    def _post(self, call: Callable[[], None]) -> None:
        try:
            self._loop.call_soon_threadsafe(call)
        except RuntimeError:  # the loop was closed meanwhile: nobody is left to care
            return


class LineWriter:
    """Writes whole lines in order. Made on the loop.

    Args:
        fd: Where to.
        on_broken: Called once on the loop when nothing more can be written.

    Attributes:
        backlog_bytes: What waits to be written.
        broken: The error that ended the writing, or None.
    """

    def __init__(self, fd: int, on_broken: Callable[[], None]) -> None:
        self.backlog_bytes = 0
        self.broken: OSError | None = None
        self._fd = fd
        self._on_broken = on_broken
        self._loop = asyncio.get_running_loop()
        self._lines: SimpleQueue[bytes | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._write, name="bmoe-lines-out", daemon=True)
        self._thread.start()

    def write(self, lines: str) -> None:
        """Takes lines, breaks included; nothing once it is broken."""
        if lines and self.broken is None:
            raw = lines.encode()
            self.backlog_bytes += len(raw)
            self._lines.put(raw)

    def check(self) -> None:
        """Notices a reader that is gone although nothing is being written."""
        poll = select.poll()
        poll.register(self._fd, 0)
        if self.broken is None and any(e & (select.POLLERR | select.POLLNVAL) for _, e in poll.poll(0)):
            self._break(BrokenPipeError(32, "the reader is gone"))

    async def drain(self) -> None:
        """Waits until all is written, or cannot be, and ends."""
        self._lines.put(None)
        await self._loop.run_in_executor(None, self._thread.join)

    def _write(self) -> None:
        while (lines := self._lines.get()) is not None:
            rest = memoryview(lines)
            try:
                while rest:
                    rest = rest[os.write(self._fd, rest) :]
            except OSError as error:
                self._post(functools.partial(self._break, error))
                return
            self._post(functools.partial(self._written, len(lines)))

    def _written(self, size_bytes: int) -> None:
        self.backlog_bytes -= size_bytes

    def _break(self, error: OSError) -> None:
        if self.broken is None:
            self.broken = error
            self.backlog_bytes = 0
            self._on_broken()

    def _post(self, call: Callable[[], None]) -> None:
        try:
            self._loop.call_soon_threadsafe(call)
        except RuntimeError:  # the loop was closed meanwhile: nobody is left to care
            return
