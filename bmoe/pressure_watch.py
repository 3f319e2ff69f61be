"""Keeps an expert cache within what memory there is, beside whatever else runs on the loop.

Owns the task: read, ask the governor, resize, tell. Must not know how any of these is done.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal

from bmoe.io.errors import MemoryBudgetError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from bmoe.governor import Governor
    from bmoe.io.pressure import PressureReading

_Kind = Literal["shrunk", "grown", "short", "refused"]

PERIOD_S: Final = 0.25
_COMPLAINTS_NS: Final = 60_000_000_000


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheSizes:
    """The cache as it is.

    Attributes:
        cache_bytes: Its budget.
        held_bytes: What it has taken of it so far.
        least_bytes, most_bytes: What it may be set to.
    """

    cache_bytes: int
    held_bytes: int
    least_bytes: int
    most_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class PressureEvent:
    """Something that the watch did, or could not do.

    Attributes:
        kind: "shrunk" or "grown"; "short" when memory is short and the cache can give no more, or giving
            has not helped; "refused" when it could not be resized. These two at most once a minute.
        from_bytes, cache_bytes: The budget before and now.
        reason: Why, in words.
    """

    kind: _Kind
    from_bytes: int
    cache_bytes: int
    reason: str


class PressureWatch:
    """A task that resizes a cache as memory gets short and plenty. `start` it, and `aclose` it.

    Args:
        read: How memory is; called on the loop, so it must be quick.
        governor: Decides.
        sizes: How the cache is; called on the loop.
        resize: Sets the budget, with the reason; returns the one in effect. May raise MemoryBudgetError.
        on_event: Told on the loop about everything that happened.
        period_s: Between readings.
        now_ns: The clock, for tests.

    Attributes:
        error: What ended the watch, if something unforeseen did.
    """

    def __init__(
        self,
        *,
        read: Callable[[], PressureReading],
        governor: Governor,
        sizes: Callable[[], CacheSizes],
        resize: Callable[[int, str], Awaitable[int]],
        on_event: Callable[[PressureEvent], None],
        period_s: float = PERIOD_S,
        now_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._read = read
        self._governor = governor
        self._sizes = sizes
        self._resize = resize
        self._on_event = on_event
        self._period_s = period_s
        self._now_ns = now_ns
        self._closing = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._complained_ns: int | None = None
        self.error: Exception | None = None

    def start(self) -> bool:
        """Begins to watch; False when nothing here tells of memory, and then nothing is done."""
        first = self._read()
        counters = (first.some_stall_ns, first.anon_refault_bytes, first.file_refault_bytes)
        if first.room_bytes is None and all(counter is None for counter in counters):
            return False
        self._task = asyncio.get_running_loop().create_task(self._run(), name="bmoe-pressure")
        return True

    async def aclose(self) -> None:
        """Ends the watch; idempotent. A resize that has begun is waited for, not torn."""
        self._closing.set()
        if self._task is not None:
            await asyncio.shield(self._task)

    async def _run(self) -> None:
        try:
            while not self._closing.is_set():
                await self.look()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._closing.wait(), self._period_s)
        except Exception as error:  # noqa: BLE001 (a bug here must not end a generation; it is told)
            self.error = error
            self._complained_ns = None
            self._complain("refused", self._sizes().cache_bytes, f"the watch has ended: {error!r}")

    async def look(self) -> None:
        """Reads once and does what is to be done."""
        sizes = self._sizes()
        decision = self._governor.step(
            self._read(),
            self._now_ns(),
            sizes.cache_bytes,
            sizes.least_bytes,
            sizes.most_bytes,
            held_bytes=sizes.held_bytes,
        )
        if decision.action == "keep":
            if decision.reason is not None:
                self._complain("short", sizes.cache_bytes, decision.reason)
            return
        reason = decision.reason or ""
        try:
            after = await self._resize(decision.cache_bytes, reason)
        except MemoryBudgetError as error:
            self._complain("refused", sizes.cache_bytes, f"{reason}; {error}")
            return
        before = sizes.cache_bytes
        if after != before:
            kind: _Kind = "shrunk" if after < before else "grown"
            self._on_event(PressureEvent(kind=kind, from_bytes=before, cache_bytes=after, reason=reason))

    def _complain(self, kind: _Kind, cache_bytes: int, reason: str) -> None:
        now_ns = self._now_ns()
        if self._complained_ns is None or now_ns - self._complained_ns >= _COMPLAINTS_NS:
            self._complained_ns = now_ns
            self._on_event(
                PressureEvent(kind=kind, from_bytes=cache_bytes, cache_bytes=cache_bytes, reason=reason)
            )
