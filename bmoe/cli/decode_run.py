"""One run of `bmoe decode`: open, generate, show and log, and end in order whatever happens.

Owns what is shown and recorded when, and the exit code. Must not know how tokens are made (session.py), the
words (present.py), where figures go (run_outputs.py) or signals (interrupts.py).
"""

from __future__ import annotations

import asyncio
import os
import select
import sys
import time
from collections import deque
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final

from bmoe import present
from bmoe.chat.messages import Message
from bmoe.cli import BROKEN_PIPE_EXIT
from bmoe.cli.interrupts import run_async
from bmoe.cli.progress import ProgressDisplay, StatusLine
from bmoe.cli.run_outputs import RunOutputs
from bmoe.config import MIB, GenerateRequest, Sampling
from bmoe.io.errors import BmoeError, Cancelled, FileError
from bmoe.pipeline.native import GUESSES
from bmoe.session import Session
from bmoe.telemetry import without_prompt

if TYPE_CHECKING:
    from bmoe.cli.interrupts import Interrupts
    from bmoe.config import SessionConfig
    from bmoe.records import CacheResize, EffectiveConfig, LoadProgress, PrefillProgress, StepMetrics

_WRITABLE_POLL_S: Final = 0.02
# Tokens that the status line looks back at.
_LIVE_TOKENS: Final = 32


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodeJob:
    """What the command line asked for.

    Attributes:
        config: The session.
        prompt: Raw text, or with `chat` a user's message.
        n_predict: Most tokens; None is as many as the context holds.
        forced_text: Text whose tokens are fed instead of the model's choices, or None.
        ignore_eog: Go on past the end of generation.
        argv: The command line, for the log.
        log_target: As `open_run_log` takes it.
        quiet: Nothing on stderr but errors.
        sampling: How tokens are chosen.
        chat: Use the model's template.
        system: System message, or None.
        think: Let a reasoning model reason.
        show_reasoning: Reasoning goes to stderr.
        stop: Texts that end the answer.
        context_shift: A full context forgets.
        csv_path: Figures per token, or None.
        metrics_port: Where live figures are served; None serves none.
        progress: Show a status line wherever that can be done; by default only on a terminal of its own.
    """

    config: SessionConfig
    prompt: str
    n_predict: int | None
    forced_text: str | None
    ignore_eog: bool
    argv: tuple[str, ...]
    log_target: str | None
    quiet: bool
    sampling: Sampling
    chat: bool = False
    system: str | None = None
    think: bool = True
    show_reasoning: bool = True
    stop: tuple[str, ...] = ()
    context_shift: bool = False
    csv_path: str | None = None
    metrics_port: int | None = None
    progress: bool = False


def run_decode(job: DecodeJob) -> int:
    """Runs it.

    Returns:
        The exit code: 0, or 128 + N after signal N.

    Raises:
        BmoeError: What went wrong; shown by who calls.
        BrokenPipeError: The reader of the text is gone.
    """
    out = RunOutputs(
        log_target=job.log_target,
        csv_path=job.csv_path,
        metrics_port=job.metrics_port,
        model_path=job.config.model_path,
    )
    code = 1
    try:
        code = run_async(lambda interrupts: _DecodeRun(job, out, interrupts).run())
    except BrokenPipeError:
        code = BROKEN_PIPE_EXIT
        raise
    except BaseException as error:
        code = error.exit_code if isinstance(error, BmoeError) else code
        out.log.error(error)  # noqa: TRY400 (a RunLog is no logging.Logger)
        raise
    finally:
        out.log.run_end(code)
        out.close()
    return code


class _DecodeRun:
    def __init__(self, job: DecodeJob, out: RunOutputs, interrupts: Interrupts) -> None:
        self._job = job
        self._out = out
        self._interrupts = interrupts
        self._stderr = None if job.quiet else sys.stderr
        self._text_fd: int | None = None if job.log_target == "-" else sys.stdout.fileno()
        self._at_line_start = True
        self._prefill_logged = False
        self._started = False
        self._warnings: list[str] = []
        self._reasoning_shown = ""
        self._recent: deque[StepMetrics] = deque(maxlen=_LIVE_TOKENS)
        self._status = self._status_line()
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
            if self._out.metrics_url is not None:
                self._show(f"metrics: {self._out.metrics_url}")

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
            prompt=None if job.chat else job.prompt,
            messages=self._messages() if job.chat else (),
            n_predict=job.n_predict,
            think=job.think,
            sampling=job.sampling,
            stop=job.stop,
            context_shift=job.context_shift,
            forced=tuple(forced),
            ignore_eog=job.ignore_eog,
        )
        if job.chat:
            self._show(present.chat_line(session.effective, think=job.think))
        self._log_start(session, request)
        self._out.load(job.config, session.effective, session.load_report, request)
        for warning in self._warnings:
            self._out.warning(warning)
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
                    self._status.open()
                    self._log_prefill(session)
                    await self._wait_writable(self._out.log.fd)
                    self._out.token(event)
                    self._show_reasoning(event.reasoning)
                    if event.text and await self._wait_writable(self._text_fd):
                        self._write_text(event.text)
                    self._recent.append(event.metrics)
                    self._status.update(partial(present.live_line, event.index + 1, self._recent))
        finally:
            display.close()
            self._status.close()

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
            self._show_reasoning("", end=True)
            self._out.summary(session.summary)
            self._show(*present.summary_lines(session.summary, session.load_report))
            if session.config.predict_log and session.streaming is not None:
                engine = session.streaming.engine
                self._show(*present.prediction_lines(engine.predictions().tolist(), GUESSES))

    def _messages(self) -> tuple[Message, ...]:
        user = Message(role="user", content=self._job.prompt)
        if self._job.system is None:
            return (user,)
        return (Message(role="system", content=self._job.system), user)

    def _status_line(self) -> StatusLine:
        out = self._stderr
        shows_reasoning = self._job.chat and self._job.show_reasoning
        is_terminal = out is not None and out.isatty()
        below_text = is_terminal and (
            shows_reasoning or (self._text_fd is not None and os.isatty(self._text_fd))
        )
        shown = self._job.progress or (is_terminal and not below_text)
        return StatusLine(out if shown else None, below_text=below_text)

    def _show_reasoning(self, text: str, *, end: bool = False) -> None:
        """Reasoning goes to standard error, dimmed on a terminal; the answer alone is the output."""
        out = self._stderr
        if out is None or not self._job.show_reasoning or not (text or (end and self._reasoning_shown)):
            return
        self._status.hide()
        shown = "".join(c if c.isprintable() or c == "\n" else ascii(c)[1:-1] for c in text)
        self._reasoning_shown = (self._reasoning_shown + shown)[-1:]
        if end:
            shown = "" if self._reasoning_shown == "\n" else "\n"
        out.write(f"\x1b[2m{shown}\x1b[0m" if out.isatty() else shown)
        out.flush()

    def _log_prefill(self, session: Session) -> None:
        if not self._prefill_logged:
            self._prefill_logged = True
            self._out.prefill(session.prefill_metrics)

    def _log_start(self, session: Session | None, request: GenerateRequest | None) -> None:
        self._started = True
        self._out.log.run_start(
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
            self._out.warning(line)
        else:
            self._warnings.append(line)

    def _on_resize(self, resize: CacheResize) -> None:
        self._show(present.resize_line(resize))
        self._out.cache_resize(resize)

    def _leave(self, exit_code: int) -> None:
        """The log's end when the process cannot wait for this run; on another thread."""
        if not self._started:
            self._log_start(None, None)
        self._out.log.run_end(exit_code)
        self._status.close()

    def _show(self, *lines: str) -> None:
        if self._stderr is not None:
            self._status.hide()
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
