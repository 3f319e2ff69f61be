"""One run of `bmoe decode`: open, generate, show and log, and end in order whatever happens.

Owns what is shown and logged when, and the exit code. Must not know how tokens are made (session.py), the
words (present.py), the log's format (telemetry.py) or signals (interrupts.py).
"""

from __future__ import annotations

import asyncio
import os
import select
import sys
import time
from contextlib import aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from bmoe import present
from bmoe.cli import BROKEN_PIPE_EXIT
from bmoe.cli.interrupts import run_async
from bmoe.cli.progress import ProgressDisplay
from bmoe.config import MIB, GenerateRequest
from bmoe.io.errors import BmoeError, Cancelled, FileError
from bmoe.session import Session
from bmoe.telemetry import open_run_log, without_prompt

if TYPE_CHECKING:
    from bmoe.cli.interrupts import Interrupts
    from bmoe.config import SessionConfig
    from bmoe.records import CacheResize, EffectiveConfig, LoadProgress, PrefillProgress
    from bmoe.telemetry import RunLog

_WRITABLE_POLL_S: Final = 0.02


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodeJob:
    """What the command line asked for.

    Attributes:
        config: The session.
        prompt: Raw text.
        n_predict: Most tokens.
        forced_text: Text whose tokens are fed instead of the model's choices, or None.
        ignore_eog: Go on past the end of generation.
        argv: The command line, for the log.
        log_target: As `open_run_log` takes it.
        quiet: Nothing on stderr but errors.
    """

    config: SessionConfig
    prompt: str
    n_predict: int
    forced_text: str | None
    ignore_eog: bool
    argv: tuple[str, ...]
    log_target: str | None
    quiet: bool


def run_decode(job: DecodeJob) -> int:
    """Runs it.

    Returns:
        The exit code: 0, or 128 + N after signal N.

    Raises:
        BmoeError: What went wrong; shown by who calls.
        BrokenPipeError: The reader of the text is gone.
    """
    log = open_run_log(job.log_target, model_path=job.config.model_path)
    code = 1
    try:
        code = run_async(lambda interrupts: _DecodeRun(job, log, interrupts).run())
    except BrokenPipeError:
        code = BROKEN_PIPE_EXIT
        raise
    except BaseException as error:
        code = error.exit_code if isinstance(error, BmoeError) else code
        log.error(error)  # noqa: TRY400 (a RunLog is no logging.Logger)
        raise
    finally:
        log.run_end(code)
        log.close()
    return code


class _DecodeRun:
    def __init__(self, job: DecodeJob, log: RunLog, interrupts: Interrupts) -> None:
        self._job = job
        self._log = log
        self._interrupts = interrupts
        self._stderr = None if job.quiet else sys.stderr
        self._text_fd: int | None = None if job.log_target == "-" else sys.stdout.fileno()
        self._at_line_start = True
        self._prefill_logged = False
        self._started = False
        self._warnings: list[str] = []
        interrupts.on_exit = self._leave

    async def run(self) -> int:
        session = await self._open()
        if session is None:
            return self._interrupts.exit_code
        try:
            self._interrupts.cancel_with(session.cancel)
            return await self._generate(session)
        finally:
            await session.aclose()

    async def _open(self) -> Session | None:
        """The session; None after a signal."""
        started_ns = time.monotonic_ns()
        reached: LoadProgress | None = None
        display = ProgressDisplay("loading", _in_mib, self._stderr)

        def on_effective(effective: EffectiveConfig) -> None:
            self._warnings += present.warnings(effective)
            self._show(present.mode_line(effective), *present.warnings(effective))

        def on_progress(progress: LoadProgress) -> None:
            nonlocal reached
            reached = progress
            display.update(progress.done_bytes, progress.total_bytes)

        loop = asyncio.get_running_loop()
        opening = loop.create_task(
            Session.open(
                self._job.config,
                on_effective=on_effective,
                on_progress=on_progress,
                on_warning=self._on_warning,
                on_resize=self._on_resize,
            )
        )
        self._interrupts.cancel_with(lambda: loop.call_soon_threadsafe(opening.cancel))
        try:
            return await opening
        except (asyncio.CancelledError, BmoeError):
            self._log_start(None, None)
            if self._interrupts.received is None:
                raise
            display.close()
            self._show(present.stopped_loading(reached, wall_ns=time.monotonic_ns() - started_ns))
            return None
        finally:
            display.close()

    async def _generate(self, session: Session) -> int:
        job = self._job
        forced = session.model.tokenize(job.forced_text, add_special=False) if job.forced_text else ()
        request = GenerateRequest(
            prompt=job.prompt, n_predict=job.n_predict, forced=tuple(forced), ignore_eog=job.ignore_eog
        )
        self._log_start(session, request)
        self._log.load(session.load_report)
        for warning in self._warnings:
            self._log.warning(warning)
        try:
            await self._stream(session, request)
        except Cancelled:
            self._finish(session)
            return self._interrupts.exit_code
        except BmoeError:
            self._finish(session)
            raise
        self._finish(session)
        return 0

    async def _stream(self, session: Session, request: GenerateRequest) -> None:
        display = ProgressDisplay("prefill", _in_tokens, self._stderr)

        def on_prefill(progress: PrefillProgress) -> None:
            display.update(progress.done_tokens, progress.total_tokens)

        try:
            generated = session.generate(request, on_prefill=on_prefill)
            async with aclosing(generated) as events:
                async for event in events:
                    display.close()
                    self._log_prefill(session)
                    if await self._wait_writable(self._log.fd):
                        self._log.token(event, turn=0)
                    if event.text and await self._wait_writable(self._text_fd):
                        self._write_text(event.text)
        finally:
            display.close()

    async def _wait_writable(self, fd: int | None) -> bool:
        """Waits until a small write does not block. False without a destination.

        A reader that pauses (a pager, a terminal stopped with Ctrl-S) must not stop the event loop: the
        compute threads wait for it to start reads.

        Raises:
            Cancelled: A signal came first.
        """
        if fd is None:
            return False
        while not _is_writable(fd):
            if self._interrupts.received is not None:
                raise Cancelled("cancelled")
            await asyncio.sleep(_WRITABLE_POLL_S)
        return True

    def _write_text(self, text: str) -> None:
        if self._text_fd is None:
            return
        rest = memoryview(text.encode())
        try:
            while rest:
                rest = rest[os.write(self._text_fd, rest) :]
        except BrokenPipeError:
            raise
        except OSError as error:
            raise FileError(f"the text cannot be written: {error.strerror}", path="standard output") from None
        self._at_line_start = text.endswith("\n")

    def _finish(self, session: Session) -> None:
        """Ends the text's line, then says and logs what was done."""
        if self._text_fd is not None and not self._at_line_start and _is_writable(self._text_fd):
            self._write_text("\n")
        self._log_prefill(session)
        if session.summary is not None:
            self._log.summary(session.summary)
            self._show(*present.summary_lines(session.summary, session.load_report))

    def _log_prefill(self, session: Session) -> None:
        if not self._prefill_logged:
            self._prefill_logged = True
            self._log.prefill(session.prefill_metrics)

    def _log_start(self, session: Session | None, request: GenerateRequest | None) -> None:
        self._started = True
        self._log.run_start(
            requested=self._job.config,
            effective=session.effective if session else None,
            request=request,
            prompt=self._job.prompt,
            argv=without_prompt(self._job.argv),
        )

    def _on_warning(self, text: str) -> None:
        line = present.one_line(f"warning: {text}")
        self._show(line)
        if self._started:
            self._log.warning(line)
        else:
            self._warnings.append(line)

    def _on_resize(self, resize: CacheResize) -> None:
        if self._started:
            self._log.cache_resize(resize)

    def _leave(self, exit_code: int) -> None:
        """The log's end when the process cannot wait for this run; on another thread."""
        if not self._started:
            self._log_start(None, None)
        self._log.run_end(exit_code)

    def _show(self, *lines: str) -> None:
        if self._stderr is not None:
            self._stderr.write("".join(f"{line}\n" for line in lines))
            self._stderr.flush()


def _is_writable(fd: int) -> bool:
    poll = select.poll()
    poll.register(fd, select.POLLOUT)
    return bool(poll.poll(0))


def _in_mib(done_bytes: int, total_bytes: int) -> str:
    return f"{done_bytes // MIB} of {total_bytes // MIB} MiB"


def _in_tokens(done: int, total: int) -> str:
    return f"{done} of {total} tokens"
