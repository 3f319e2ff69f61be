"""The synchronous facade: a session whose event loop runs on a thread of its own.

Owns that thread, and how values, errors and cancellation cross to it. Must not know what a session does.

Callbacks run on the caller's thread, not on the loop: whatever they do, reads go on. Ctrl-C at any moment
leaves an open session usable: the generation is cancelled and ended before KeyboardInterrupt goes on.
"""

from __future__ import annotations

import asyncio
import threading
from contextlib import aclosing
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, Generic, Protocol, Self, TypeVar

import uvloop

from bmoe.io.errors import Cancelled
from bmoe.records import PrefillProgress, TokenEvent

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Coroutine, Generator, Iterator, Sequence

    from bmoe.chat.messages import Message
    from bmoe.config import GenerateRequest, SessionConfig
    from bmoe.records import (
        CacheResize,
        CacheState,
        EffectiveConfig,
        LoadProgress,
        LoadReport,
        RunSummary,
        StepMetrics,
    )

# ruff: noqa: D102 (the protocols are documented where they are implemented)
__all__ = ["AsyncSession", "Opener", "SyncSession", "open_session"]

_T = TypeVar("_T")
_Item = TypeVar("_Item")


class AsyncSession(Protocol):
    """What is used of `bmoe.session.Session`; see there."""

    effective: EffectiveConfig
    load_report: LoadReport
    summary: RunSummary | None
    prefill_metrics: list[StepMetrics]

    def generate(
        self, request: GenerateRequest, *, on_prefill: Callable[[PrefillProgress], None] | None = None
    ) -> AsyncGenerator[TokenEvent, None]: ...

    def cancel(self) -> None: ...

    @property
    def conversation(self) -> tuple[Message, ...]: ...

    def set_conversation(self, messages: Sequence[Message]) -> None: ...

    @property
    def last_message(self) -> Message | None: ...

    def cache_state(self) -> CacheState | None: ...

    async def set_cache_bytes(self, cache_bytes: int) -> int: ...

    async def aclose(self) -> None: ...


class Opener(Protocol):
    """`Session.open`, or a stand-in."""

    async def __call__(
        self,
        config: SessionConfig,
        *,
        on_effective: Callable[[EffectiveConfig], None] | None = None,
        on_progress: Callable[[LoadProgress], None] | None = None,
        on_warning: Callable[[str], None] | None = None,
        on_resize: Callable[[CacheResize], None] | None = None,
    ) -> AsyncSession: ...


class SyncSession:
    """A session for code without an event loop. Made by `open_session`; `close` it, or use it in a `with`.

    One thread at a time may use it; `cancel` may come from any, and from a signal handler.

    Args:
        session: The session.
        thread: Where its loop runs.
        calls: Of callbacks that the loop has asked for, and goes on to.
    """

    def __init__(
        self, session: AsyncSession, thread: _LoopThread, calls: SimpleQueue[Callable[[], None] | None]
    ) -> None:
        self._session = session
        self._thread = thread
        self._calls = calls
        self._generation: _Generation | None = None
        self._closed = False

    def generate(
        self,
        request: GenerateRequest,
        *,
        on_prefill: Callable[[PrefillProgress], None] | None = None,
        idle: Callable[[], float | None] | None = None,
    ) -> Generator[TokenEvent, None, None]:
        """Computes the prompt and yields tokens as they are made.

        The generation begins with the first `next`. Closing the iterator early, as an exception in the loop
        over it does, cancels the generation and waits for its end.

        Args:
            request: What to generate.
            on_prefill: Called on this thread, before the token that follows.
            idle: Called on this thread before it waits; says in how many seconds to call again, or None.

        Raises:
            BmoeError: As `bmoe.session.Session.generate`.
            RuntimeError: A generation is running, or the session is closed.
        """
        if self._closed:
            raise RuntimeError("the session is closed")
        if self._generation is not None:
            raise RuntimeError("one thing at a time: a generation is running")
        run = self._generation = _Generation(self._session, request)
        try:
            self._thread.start(run)
            for event in run.received(idle):
                self.call_back()
                if isinstance(event, TokenEvent):
                    yield event
                elif on_prefill is not None:
                    on_prefill(event)
        finally:
            try:
                if not run.done.is_set():
                    self.cancel()
                    run.wait()
            finally:
                self._generation = None
        run.result()

    def call_back(self) -> None:
        """Calls `on_warning` and `on_resize` for what has happened; `generate` does so on its way."""
        while not self._calls.empty():
            if (call := self._calls.get()) is not None:
                call()

    def cancel(self) -> None:
        """Ends the generation that is running, if any, also if it has not begun to compute."""
        if (run := self._generation) is not None:
            run.cancelled = True
            # On the loop, where it has either begun, or will see the mark before it does.
            self._thread.call(run.cancel)

    @property
    def effective(self) -> EffectiveConfig:
        """What really runs."""
        return self._session.effective

    @property
    def load_report(self) -> LoadReport:
        """How opening went."""
        return self._session.load_report

    @property
    def summary(self) -> RunSummary | None:
        """Of the last generation, also after a cancel or an error."""
        return self._session.summary

    @property
    def prefill_metrics(self) -> list[StepMetrics]:
        """One record per prompt batch of the last generation."""
        return self._session.prefill_metrics

    @property
    def conversation(self) -> tuple[Message, ...]:
        """What was said so far, answers included."""
        return self._session.conversation

    def set_conversation(self, messages: Sequence[Message]) -> None:
        """Goes on from other messages, or with none from nothing; see `bmoe.session.Session`."""
        self._session.set_conversation(messages)

    @property
    def last_message(self) -> Message | None:
        """What the last generation that went through has said; None before one."""
        return self._session.last_message

    def cache_state(self) -> CacheState | None:
        """The expert cache now; None when resident."""

        async def state() -> CacheState | None:
            return self._session.cache_state()

        return self._thread.run(state())

    def set_cache_bytes(self, cache_bytes: int) -> int:
        """Makes the expert cache larger or smaller; returns the budget in effect.

        Raises:
            UsageError: Nothing is streamed.
            MemoryBudgetError: Below the least that works.
        """
        return self._thread.run(self._session.set_cache_bytes(cache_bytes))

    def close(self) -> None:
        """Frees everything, after cancelling what runs. Idempotent."""
        if not self._closed:
            self._closed = True
            self.cancel()
            try:
                self._thread.run(self._session.aclose())
            finally:
                self._thread.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def open_session(
    config: SessionConfig,
    *,
    on_effective: Callable[[EffectiveConfig], None] | None = None,
    on_progress: Callable[[LoadProgress], None] | None = None,
    on_warning: Callable[[str], None] | None = None,
    on_resize: Callable[[CacheResize], None] | None = None,
    cancel_with: Callable[[Callable[[], None]], object] | None = None,
    opener: Opener | None = None,
) -> SyncSession:
    """Loads a model; returns when it is ready for the first token.

    Args:
        config: What is wanted.
        on_effective: Called once it is settled what will run, before weights are read.
        on_progress: Called as weights are read.
        on_warning: As for `bmoe.session.Session.open`, now and later; see `SyncSession.call_back`.
        on_resize: The same.
        cancel_with: Is given what cancels the opening, from any thread.
        opener: What opens the session; None is `bmoe.session.Session.open`.

    Raises:
        BmoeError: Any leaf of `bmoe.io.errors`; nothing is left open.
    """
    if opener is None:
        from bmoe.session import Session  # noqa: PLC0415 (imports llama_cpp)

        opener = Session.open
    thread = _LoopThread()
    opening = _Opening(
        opener,
        config,
        on_effective=on_effective,
        on_progress=on_progress,
        on_warning=on_warning,
        on_resize=on_resize,
    )
    try:
        thread.start(opening)
        if cancel_with is not None:
            cancel_with(lambda: thread.call(opening.cancel))
        for call in opening.received():
            call()
        return SyncSession(opening.result(), thread, opening.items)
    except BaseException:
        if not opening.done.is_set():
            thread.call(opening.cancel)
            opening.wait()
        if opening.value is not None:
            thread.run(opening.value.aclose())
        thread.close()
        raise


class _Work(Generic[_Item, _T]):
    """Something done on the loop for a thread that waits for it: items on the way, and how it ended.

    Attributes:
        done: Set at the end.
        value: What it came to; None before.
        items: As they come; None is the end.
    """

    def __init__(self) -> None:
        self.done = threading.Event()
        self.value: _T | None = None
        self._error: BaseException | None = None
        self.items: SimpleQueue[_Item | None] = SimpleQueue()
        self._task: asyncio.Task[None] | None = None

    async def _work(self) -> _T:
        raise NotImplementedError

    def begin(self) -> None:
        """On the loop."""
        self._task = asyncio.get_running_loop().create_task(self._run())

    async def _run(self) -> None:
        try:
            self.value = await self._work()
        except asyncio.CancelledError:
            self._error = Cancelled("cancelled")
        except BaseException as error:  # noqa: BLE001 (raised again by the thread that waits)
            self._error = error
        self.done.set()
        self.items.put(None)

    def cancel(self) -> None:
        """On the loop."""
        if self._task is not None:
            self._task.cancel()

    def post(self, item: _Item) -> None:
        """On the loop: hands an item over."""
        self.items.put(item)

    def received(self, idle: Callable[[], float | None] | None = None) -> Iterator[_Item]:
        """On the thread that waits: items as they come, until the end."""
        while True:
            timeout_s = idle() if idle is not None and self.items.empty() else None
            try:
                item = self.items.get(timeout=timeout_s)
            except Empty:
                continue
            if item is None:
                return
            yield item

    def wait(self) -> None:
        """Waits for the end, which is near; an impatient Ctrl-C comes through only then.

        Not by way of the items: an interrupt may lose one.
        """
        interrupted: KeyboardInterrupt | None = None
        while not self.done.is_set():
            try:
                self.done.wait()
            except KeyboardInterrupt as again:
                interrupted = again
        if interrupted is not None:
            raise interrupted

    def result(self) -> _T:
        """After the end: the value, or raises the error."""
        if self._error is not None:
            raise self._error
        value: Any = self.value
        return value  # type: ignore[no-any-return]  # None may be among the values


class _Generation(_Work[TokenEvent | PrefillProgress, None]):
    """One generation.

    Attributes:
        cancelled: Marked by whoever cancels it before it begins.
    """

    def __init__(self, session: AsyncSession, request: GenerateRequest) -> None:
        super().__init__()
        self.cancelled = False
        self._session = session
        self._request = request

    async def _work(self) -> None:
        if self.cancelled:
            raise Cancelled("cancelled")
        async with aclosing(self._session.generate(self._request, on_prefill=self.post)) as events:
            async for event in events:
                self.post(event)

    def cancel(self) -> None:
        """On the loop; nothing once it has ended, lest the next one be hit."""
        if not self.done.is_set():
            self._session.cancel()


class _Opening(_Work["Callable[[], None]", "AsyncSession"]):
    """Opening a session; the items are calls of callbacks, also after the end."""

    def __init__(
        self, opener: Opener, config: SessionConfig, **callbacks: Callable[[Any], None] | None
    ) -> None:
        super().__init__()
        self._opener = opener
        self._config = config
        self._callbacks = {name: self._handed_over(function) for name, function in callbacks.items()}

    async def _work(self) -> AsyncSession:
        return await self._opener(self._config, **self._callbacks)

    def _handed_over(self, function: Callable[[Any], None] | None) -> Callable[[Any], None] | None:
        if function is None:
            return None
        return lambda value: self.post(lambda: function(value))


class _Call(_Work[None, _T]):
    """One coroutine."""

    def __init__(self, coroutine: Coroutine[Any, Any, _T]) -> None:
        super().__init__()
        self._coroutine = coroutine

    async def _work(self) -> _T:
        return await self._coroutine


class _LoopThread:
    """A thread with a running event loop."""

    def __init__(self) -> None:
        self._loop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="bmoe-loop", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
        finally:
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
            self._loop.close()

    def start(self, work: _Work[Any, Any]) -> None:
        """Begins it."""
        self.call(work.begin)

    def call(self, function: Callable[[], object]) -> None:
        """Calls a function on the loop, soon."""
        self._loop.call_soon_threadsafe(function)

    def run(self, coroutine: Coroutine[Any, Any, _T]) -> _T:
        """Runs a coroutine to its end, whatever interrupts the waiting."""
        work = _Call(coroutine)
        self.start(work)
        work.wait()
        return work.result()

    def close(self) -> None:
        """Ends the loop and the thread."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
