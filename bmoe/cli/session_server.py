"""`bmoe session`: a session that programs drive by lines on standard input and output.

Owns the queue, which request is served when, and what cancels it. Must not know what lines look like
(protocol.py, line_protocol.py) or how they travel (line_io.py).
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections import deque
from contextlib import aclosing
from typing import TYPE_CHECKING, Final

from bmoe import present
from bmoe.cli.interrupts import run_async
from bmoe.cli.line_io import LineReader, LineWriter
from bmoe.cli.run_outputs import logged
from bmoe.io.errors import BmoeError, Cancelled, FileError
from bmoe.protocol import (
    MOST_LINE_BYTES,
    Cancel,
    Close,
    Generate,
    ProtocolError,
    SetBudget,
    Stats,
    error_kind,
)
from bmoe.session import Session
from bmoe.telemetry import open_run_log, without_prompt

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from bmoe.cli.interrupts import Interrupts
    from bmoe.config import SessionConfig
    from bmoe.protocol import Command, Id, Wire
    from bmoe.records import CacheResize, EffectiveConfig, LoadProgress
    from bmoe.sync import AsyncSession, Opener
    from bmoe.telemetry import RunLog

_MOST_QUEUED: Final = 256
_LOADING_EVERY_S: Final = 0.1
_CHECK_EVERY_S: Final = 1.0


def serve(
    config: SessionConfig,
    wire: Wire,
    *,
    quiet: bool = False,
    log_target: str | None = None,
    argv: Sequence[str] = (),
    opener: Opener | None = None,
    in_fd: int = 0,
    out_fd: int = 1,
) -> int:
    """Opens a session and serves it until `close`, the end of the input, or a signal.

    Args:
        config: The session.
        wire: The protocol.
        quiet: Nothing on stderr but errors.
        log_target: As `open_run_log` takes it.
        argv: The command line, for the log.
        opener: What opens the session; None is `Session.open`.
        in_fd: Where lines come from.
        out_fd: Where answers go.

    Returns:
        The exit code: 0, or 128 + N after signal N.

    Raises:
        BmoeError: The session did not open.
        BrokenPipeError: The reader of the answers is gone.
    """
    log = open_run_log(log_target, model_path=config.model_path)

    def body() -> int:
        return run_async(
            lambda interrupts: _Server(config, wire, interrupts, log, argv=argv, quiet=quiet).run(
                opener or Session.open, in_fd, out_fd
            )
        )

    return logged(log, body)


class _Server:
    def __init__(
        self,
        config: SessionConfig,
        wire: Wire,
        interrupts: Interrupts,
        log: RunLog,
        *,
        argv: Sequence[str],
        quiet: bool,
    ) -> None:
        self._config = config
        self._wire = wire
        self._interrupts = interrupts
        self._log = log
        self._argv = argv
        self._turn = 0
        self._stderr = None if quiet else sys.stderr
        self._session: AsyncSession | None = None
        self._early: list[Callable[[], None]] = []  # what arrived before the session was open
        self._queue: deque[Generate] = deque()
        self._in_flight: set[Id] = set()
        self._running: Generate | None = None
        self._closing: str | None = None
        self._wake = asyncio.Event()
        self._budgets = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()
        self._cancel_opening: Callable[[], object] = lambda: None

    async def run(self, opener: Opener, in_fd: int, out_fd: int) -> int:
        """Until everything is over."""
        loop = asyncio.get_running_loop()
        self._writer = LineWriter(out_fd, self._on_broken)
        reader = LineReader(
            in_fd, self, most_bytes=MOST_LINE_BYTES, backlog_bytes=lambda: self._writer.backlog_bytes
        )
        reader.start()
        checking = loop.create_task(self._check_reader())
        self._interrupts.cancel_with(lambda: loop.call_soon_threadsafe(self._stop))
        try:
            if (session := await self._open(opener)) is not None:
                try:
                    await self._serve(session)
                finally:
                    await session.aclose()
        finally:
            checking.cancel()
            await self._writer.drain()
        if isinstance(self._writer.broken, BrokenPipeError):
            raise BrokenPipeError
        if self._writer.broken is not None:
            raise FileError(f"cannot be written: {self._writer.broken.strerror}", path="standard output")
        return 0 if self._interrupts.received is None else self._interrupts.exit_code

    async def _open(self, opener: Opener) -> AsyncSession | None:
        """The session; None after a signal or a broken pipe."""
        next_s = 0.0

        def on_effective(effective: EffectiveConfig) -> None:
            self._say(present.mode_line(effective))
            for line in present.warnings(effective):
                self._warn(line)

        def on_progress(progress: LoadProgress) -> None:
            nonlocal next_s
            if (now := time.monotonic()) >= next_s:
                next_s = now + _LOADING_EVERY_S
                self._writer.write(self._wire.loading(progress))

        opening = asyncio.ensure_future(
            opener(
                self._config,
                on_effective=on_effective,
                on_progress=on_progress,
                on_warning=lambda text: self._warn(present.one_line(f"warning: {text}")),
                on_resize=self._on_resize,
            )
        )
        self._cancel_opening = opening.cancel
        if self._closing in {"signal", "broken"}:
            opening.cancel()
        try:
            session = await opening
        except (asyncio.CancelledError, Cancelled):
            self._log_start(None)
            if self._closing in {"signal", "broken"}:
                return None
            raise
        except Exception as error:
            self._log_start(None)
            self._fail(None, error)
            raise
        finally:
            self._cancel_opening = lambda: None
        self._log_start(session.effective)
        self._log.load(session.load_report)
        return session

    def _log_start(self, effective: EffectiveConfig | None) -> None:
        self._log.run_start(
            requested=self._config,
            effective=effective,
            request=None,
            prompt="",
            argv=without_prompt(self._argv),
        )

    def _warn(self, line: str) -> None:
        self._say(line)
        self._log.warning(line)

    def _on_resize(self, resize: CacheResize) -> None:
        self._log.cache_resize(resize)
        if resize.reason != "asked":  # else the answer to the request says it
            self._say(present.resize_line(resize))

    async def _serve(self, session: AsyncSession) -> None:
        self._writer.write(self._wire.ready(session.effective, session.load_report))
        self._session = session
        for arrived in self._early:
            arrived()
        while self._queue or self._closing is None:
            if self._queue:
                await self._generate(session, self._queue.popleft())
            else:
                await self._wake.wait()
                self._wake.clear()
        await asyncio.gather(*self._tasks)
        self._writer.write(self._wire.closed(self._closing))

    async def _generate(self, session: AsyncSession, command: Generate) -> None:
        self._running = command
        turn, self._turn, logged_prompt = self._turn, self._turn + 1, False
        text: list[str] = []
        reasoning: list[str] = []
        cancelled = False
        send, wire = self._writer.write, self._wire
        send(wire.begin(command))
        try:
            generated = session.generate(
                command.request, on_prefill=lambda progress: send(wire.prefill(command, progress))
            )
            async with aclosing(generated) as events:
                async for event in events:
                    text.append(event.text)
                    reasoning.append(event.reasoning)
                    send(wire.token(command, event, session.cache_state()))
                    if not logged_prompt:
                        self._log.prefill(session.prefill_metrics, turn=turn)
                        logged_prompt = True
                    self._log.token(event, turn=turn)
        except Cancelled:
            cancelled = True
        except BmoeError as error:
            self._log.error(error)
            send(wire.error(command.id, kind=error_kind(error), message=str(error), fatal=False))
            return
        except Exception as error:
            self._fail(command.id, error)
            raise
        finally:
            self._running = None
            self._in_flight.discard(command.id)
            if not logged_prompt:
                self._log.prefill(session.prefill_metrics, turn=turn)
            if session.summary is not None:
                self._log.summary(session.summary)
        send(
            wire.done(
                command,
                session.summary,
                cancelled=cancelled,
                text="".join(text),
                reasoning="".join(reasoning),
                cache=session.cache_state(),
            )
        )

    # --- lines, on the loop ---------------------------------------------------------------------------

    def on_line(self, line: bytes) -> None:
        """See `LineSink`."""
        if self._session is None:
            self._early.append(lambda: self.on_line(line))
            return
        try:
            command = self._wire.parse(line)
            if command is not None:
                self._take(self._session, command)
        except ProtocolError as error:
            self._refuse(error)

    def on_long_line(self) -> None:
        """See `LineSink`."""
        if self._session is None:
            self._early.append(self.on_long_line)
        else:
            self._refuse(ProtocolError("json", f"the line is longer than {MOST_LINE_BYTES} bytes"))

    def on_end(self) -> None:
        """See `LineSink`."""
        if self._session is None:
            self._early.append(self.on_end)
        else:
            self._close("end")

    def _take(self, session: AsyncSession, command: Command) -> None:
        if isinstance(command, Close):
            self._close("close")
        elif isinstance(command, Cancel):
            self._cancel(session, command.id)
        elif command.id in self._in_flight:
            raise ProtocolError("request", f"id {command.id!r} is in flight", command.id)
        elif isinstance(command, Stats):
            self._writer.write(
                self._wire.stats(
                    command,
                    cache=session.cache_state(),
                    summary=session.summary,
                    queued=len(self._queue),
                    generating=self._running.id if self._running else None,
                    messages=len(session.conversation),
                )
            )
        elif isinstance(command, SetBudget):
            task = asyncio.get_running_loop().create_task(self._set_budget(session, command))
            self._in_flight.add(command.id)
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        elif self._closing is not None:
            raise ProtocolError("usage", "the session is closing", command.id)
        elif len(self._queue) == _MOST_QUEUED:
            raise ProtocolError("usage", f"{_MOST_QUEUED} requests are queued", command.id)
        else:
            self._in_flight.add(command.id)
            self._queue.append(command)
            self._wake.set()

    def _refuse(self, error: ProtocolError) -> None:
        self._writer.write(
            self._wire.error(error.request_id, kind=error.kind, message=error.message, fatal=False)
        )

    def _cancel(self, session: AsyncSession, request_id: Id | None) -> None:
        """One request, or all; one that is not in flight is over, which is what was asked for."""
        kept: deque[Generate] = deque()
        for command in self._queue:
            if request_id is not None and command.id != request_id:
                kept.append(command)
                continue
            self._in_flight.discard(command.id)
            self._writer.write(
                self._wire.done(
                    command, None, cancelled=True, text="", reasoning="", cache=session.cache_state()
                )
            )
        self._queue = kept
        if self._running is not None and request_id in {None, self._running.id}:
            session.cancel()

    async def _set_budget(self, session: AsyncSession, command: SetBudget) -> None:
        try:
            async with self._budgets:
                cache_bytes = await session.set_cache_bytes(command.cache_bytes)
        except BmoeError as error:
            answer = self._wire.error(command.id, kind=error_kind(error), message=str(error), fatal=False)
        else:
            answer = self._wire.budget(command, cache_bytes)
        finally:
            self._in_flight.discard(command.id)
        self._writer.write(answer)

    # --- ends -----------------------------------------------------------------------------------------

    def _close(self, reason: str) -> None:
        """After what was asked for before."""
        if self._closing is None:
            self._closing = reason
        self._wake.set()

    def _stop(self, reason: str = "signal") -> None:
        """At once."""
        self._closing = reason
        self._cancel_opening()
        if self._session is not None:
            self._cancel(self._session, None)
        self._wake.set()

    def _on_broken(self) -> None:
        self._stop("broken")

    async def _check_reader(self) -> None:
        """A client that is gone is not computed for, however long the next answer takes."""
        while True:
            await asyncio.sleep(_CHECK_EVERY_S)
            self._writer.check()

    def _fail(self, request_id: Id | None, error: Exception) -> None:
        message = str(error) if isinstance(error, BmoeError) else f"{type(error).__name__}: {error}"
        self._writer.write(self._wire.error(request_id, kind=error_kind(error), message=message, fatal=True))

    def _say(self, *lines: str) -> None:
        if self._stderr is not None:
            self._stderr.write("".join(f"{line}\n" for line in lines))
            self._stderr.flush()
