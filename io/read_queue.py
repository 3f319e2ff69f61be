"""Reads that either deliver what was asked for or end in one clear error.

Owns what a result means: short reads are resumed, interrupted ones repeated, and whatever stays short
becomes a `ReadError`. Must not know which backend reads, nor what the bytes are for.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from bmoe.io.errors import ReadError

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Sequence

    from bmoe.io.backend import BackendStatistics, Place, ReadBackend, Target
    from bmoe.io.files import DirectFile

OnDone = Callable[[list[int]], None]
OnError = Callable[[int, ReadError], None]

_TRANSIENT: Final = frozenset({errno.EAGAIN, errno.EINTR})
# The first retries are made at once; then with pauses that double from 1 ms: 127 ms in all.
_RETRIES_AT_ONCE: Final = 3
_MAX_RETRIES: Final = 10
_FIRST_PAUSE_S: Final = 0.001


@dataclass(frozen=True, kw_only=True, slots=True)
class ReadQueueStatistics:
    """Counts since the queue was made.

    Attributes:
        done: Reads that reached their end.
        failed: Reads that ended in an error.
        retried: Repetitions after EINTR or EAGAIN.
        resumed: Continuations after a short read.
        backend: Of the backend below.
    """

    done: int
    failed: int
    retried: int
    resumed: int
    backend: BackendStatistics


class _Request:
    """One read in flight, as asked for, and how far it has come."""

    __slots__ = ("file_id", "need_bytes", "offset_bytes", "reached_bytes", "retries", "start_bytes", "target")

    def __init__(self, file_id: int, offset_bytes: int, need_bytes: int, target: Target) -> None:
        self.file_id = file_id
        self.offset_bytes = offset_bytes
        self.need_bytes = need_bytes
        self.target = target
        self.start_bytes = 0  # where the present attempt began: a block boundary
        self.reached_bytes = 0  # bytes known to have arrived
        self.retries = 0  # since the last progress


class ReadQueue:
    """Reads by tag over a backend.

    Args:
        backend: Not started yet, or idle. `aclose` closes it.
        block_bytes: The largest block size of the files read; short reads resume at its multiples.
        capacity: Tags are smaller than this.
    """

    def __init__(self, backend: ReadBackend, block_bytes: int, capacity: int) -> None:
        self.backend: Final = backend
        self.block_bytes: Final = block_bytes
        self.capacity: Final = capacity
        self._read_many = backend.read_many
        # By tag. What a completion must reach to be all there is to it; 0: no such read.
        self._need_bytes = [0] * capacity
        self._places: list[Place | None] = [None] * capacity
        self._targets: list[Target | None] = [None] * capacity
        self._requests: dict[int, _Request] = {}  # by tag: reads that did not come through at once
        self._in_flight = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._on_done: OnDone | None = None
        self._on_error: OnError | None = None
        self._pauses: dict[int, asyncio.TimerHandle] = {}  # by tag: retries that wait
        self._closing = False
        self._done = self._failed = self._retried = self._resumed = 0

    @property
    def in_flight(self) -> int:
        """Reads whose end has not been reported."""
        return self._in_flight

    def start(self, loop: asyncio.AbstractEventLoop, on_done: OnDone, on_error: OnError) -> None:
        """Report on `loop`: one `on_done` per wake-up with all tags done, then one `on_error` per failure.

        A tag is free again when its callback is called. May be called again with nothing in flight, to
        hand the queue to another consumer.
        """
        if self._in_flight:
            raise RuntimeError(f"{self._in_flight} reads of another consumer are in flight")
        self.backend.start(loop, self._on_complete)
        self._loop = loop
        self._on_done = on_done
        self._on_error = on_error

    def add_file(self, file: DirectFile) -> int:
        """The id of `file` for `read`."""
        if self.block_bytes % file.block_bytes:
            raise ValueError(f"{file!r} does not fit a queue with blocks of {self.block_bytes} bytes")
        return self.backend.add_file(file)

    def read(self, tag: int, file_id: int, offset_bytes: int, need_bytes: int, target: Target) -> None:
        """Queue a read of `target.view` from `offset_bytes` on, done once `need_bytes` have arrived.

        Args:
            tag: Small and not in flight.
            file_id: From `add_file`.
            offset_bytes: A multiple of the file's block size.
            need_bytes: 1 to the length of the target. The target may reach past the end of the file
                by less than a block: it then never fills.
            target: From `backend.prepare`.
        """
        self.read_many((tag,), ((file_id, offset_bytes, need_bytes),), (target,))

    def read_many(self, tags: Sequence[int], places: Sequence[Place], targets: Sequence[Target]) -> None:
        """Queue several reads, index by index: `read` in one call, and nothing allocated per read."""
        need_bytes, known_places, known_targets = self._need_bytes, self._places, self._targets
        for tag, place, target in zip(tags, places, targets, strict=True):
            need = place[2]
            assert not need_bytes[tag], f"tag {tag} is in flight already"
            assert 0 < need <= target.view.nbytes, f"{need} bytes into {target.view.nbytes}"
            need_bytes[tag] = need
            known_places[tag] = place
            known_targets[tag] = target
        try:
            self._read_many(tags, places, targets)
        except BaseException:
            for tag in tags:
                need_bytes[tag] = 0
            raise
        self._in_flight += len(tags)

    def submit(self) -> None:
        """Hand over all that is queued."""
        self.backend.submit()

    async def aclose(self) -> None:
        """Wait for what is in flight and close the backend; idempotent.

        Every read in flight is still reported, as done if it came through, else as an error. On return
        nothing writes to any target any more.
        """
        self._closing = True
        pauses, self._pauses = self._pauses, {}
        for tag, pause in pauses.items():
            pause.cancel()
            self._fail(tag, errno.ECANCELED)
        await self.backend.aclose()

    def statistics(self) -> ReadQueueStatistics:
        """Counts so far."""
        return ReadQueueStatistics(
            done=self._done,
            failed=self._failed,
            retried=self._retried,
            resumed=self._resumed,
            backend=self.backend.statistics(),
        )

    def _on_complete(self, tags: list[int], results: list[int]) -> None:
        need_bytes = self._need_bytes
        done: list[int] = []
        odd: list[tuple[int, int]] = []
        for tag, result in zip(tags, results, strict=True):
            if result >= need_bytes[tag]:
                need_bytes[tag] = 0
                done.append(tag)
            else:
                odd.append((tag, result))
        try:
            if self._requests:
                for tag in done:
                    self._requests.pop(tag, None)
            if done:
                self._in_flight -= len(done)
                self._done += len(done)
                self._on_done(done)  # type: ignore[misc]  # set by start, or nothing could complete
        finally:  # a consumer that fails must not strand the others
            if odd:
                self._go_on(odd)

    def _go_on(self, odd: list[tuple[int, int]]) -> None:
        """Reads that have not reached their end: repeat, resume, or give up."""
        failed: list[tuple[int, int]] = []
        for tag, result in odd:
            request = self._request(tag)
            reached_bytes = request.start_bytes + result
            if result < 0 and (-result not in _TRANSIENT or request.retries == _MAX_RETRIES):
                failed.append((tag, -result))
            elif result >= 0 and reached_bytes <= request.reached_bytes:
                failed.append((tag, 0))  # no further than before: the file ends here
            elif self._closing:
                failed.append((tag, errno.ECANCELED))
            elif result < 0:
                self._repeat(tag, request)
            else:
                request.reached_bytes = reached_bytes
                request.start_bytes = reached_bytes - reached_bytes % self.block_bytes
                request.retries = 0
                self._need_bytes[tag] = request.need_bytes - request.start_bytes
                self._resumed += 1
                self._read_rest(tag, request)
        self.backend.submit()
        for tag, number in failed:
            self._fail(tag, number)

    def _repeat(self, tag: int, request: _Request) -> None:
        request.retries += 1
        self._retried += 1
        if request.retries <= _RETRIES_AT_ONCE:
            self._read_rest(tag, request)
            return

        def repeat() -> None:
            del self._pauses[tag]
            self._read_rest(tag, request)
            self.backend.submit()

        pause_s = _FIRST_PAUSE_S * 2 ** (request.retries - _RETRIES_AT_ONCE - 1)
        assert self._loop is not None
        self._pauses[tag] = self._loop.call_later(pause_s, repeat)

    def _read_rest(self, tag: int, request: _Request) -> None:
        target = request.target
        if request.start_bytes:
            target = self.backend.prepare(target.buffer_id, target.view[request.start_bytes :])
        self.backend.read(request.file_id, request.offset_bytes + request.start_bytes, target, tag)

    def _fail(self, tag: int, number: int) -> None:
        """Report the end of a read; `number` is its errno, or 0 when the bytes ran out."""
        request = self._request(tag)
        self._need_bytes[tag] = 0
        self._requests.pop(tag, None)
        self._in_flight -= 1
        self._failed += 1
        file = self.backend.file(request.file_id)
        error = _read_error(file, request, number)
        self._on_error(tag, error)  # type: ignore[misc]  # set by start

    def _request(self, tag: int) -> _Request:
        request = self._requests.get(tag)
        if request is None:
            place, target = self._places[tag], self._targets[tag]
            assert self._need_bytes[tag], f"a completion for tag {tag}, which is not in flight"
            assert place is not None and target is not None  # noqa: PT018 (set with the need)
            request = self._requests[tag] = _Request(*place, target)
        return request


def _read_error(file: DirectFile, request: _Request, number: int) -> ReadError:
    hint = None
    if number == errno.ECANCELED:
        message = "the read was cancelled"
    elif number == errno.EIO:
        message, hint = "the drive reports a read error", "see dmesg; the file may need to be copied anew"
    elif number:
        message = f"the read failed: {os.strerror(number)}"
    else:
        message = "the file ends too early"
        try:
            file.check_unchanged()
        except ReadError as changed:
            hint = changed.message
    return ReadError(
        message,
        path=file.path,
        offset_bytes=request.offset_bytes,
        expected=f"{request.need_bytes} bytes",
        got=f"{request.reached_bytes} bytes" + (f" and errno {number}" if number else ""),
        hint=hint,
    )
