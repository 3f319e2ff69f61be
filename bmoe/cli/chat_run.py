"""A chat: turns, commands, and what is kept of them.

Owns the conversation's course, whoever sits at the other end. Must not know terminals and pipes
(chat_terminal.py, chat_plain.py) nor how tokens are made (sync.py).
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from bmoe import present
from bmoe.chat.conversation import load_conversation, save_conversation, utc_now
from bmoe.chat.messages import Message
from bmoe.cli.answer_view import AnswerFigures
from bmoe.cli.chat_commands import help_lines, message_of, parse_command
from bmoe.cli.chat_signals import ChatSignals, Ended
from bmoe.cli.interrupts import Interrupts, say_last_words
from bmoe.cli.progress import ProgressDisplay
from bmoe.cli.run_outputs import logged
from bmoe.config import MIB, GenerateRequest, Sampling
from bmoe.io.errors import BmoeError, Cancelled, FormatError, UsageError
from bmoe.sync import open_session
from bmoe.telemetry import open_run_log, without_prompt

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import TextIO

    from bmoe.chat.conversation import Conversation
    from bmoe.config import SessionConfig
    from bmoe.records import EffectiveConfig, LoadProgress, PrefillProgress, RunSummary, TokenEvent
    from bmoe.sync import Opener, SyncSession
    from bmoe.telemetry import RunLog


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatJob:
    """What the command line asked for.

    Attributes:
        config: The session.
        sampling: How tokens are chosen.
        n_predict: Most tokens of an answer; None is as many as fit.
        system: System message, or None.
        resume: A conversation file to go on with, and to keep up to date.
        think: Let a reasoning model reason.
        context_shift: A full context forgets.
        argv: The command line, for the log.
        log_target: As `open_run_log` takes it.
    """

    config: SessionConfig
    sampling: Sampling
    n_predict: int | None = None
    system: str | None = None
    resume: str | None = None
    think: bool = True
    context_shift: bool = False
    argv: tuple[str, ...] = ()
    log_target: str | None = None


class Answer(Protocol):
    """Where one answer is shown."""

    def prefill(self, progress: PrefillProgress) -> None:
        """A part of the prompt is computed."""

    def token(self, event: TokenEvent) -> None:
        """A token was made."""

    def idle(self) -> float | None:
        """Nothing has happened meanwhile; in how many seconds to say so again, or None."""

    def end(self, *notes: str) -> object:
        """Nothing follows but notes on it."""


class ChatUi(Protocol):
    """Who sits at the other end."""

    @property
    def interactive(self) -> bool:
        """Whether it is a person, who may stop answers and try again after errors."""

    @property
    def progress_stream(self) -> TextIO | None:
        """For the progress of loading, or None."""

    def read(self) -> str | None:
        """The next message or command; None at the end."""

    def note(self, *lines: str) -> None:
        """Lines beside the conversation."""

    def warn(self, *lines: str) -> None:
        """What must be read."""

    def show(self, *lines: str) -> None:
        """What a command was asked for."""

    def answer(self, figures: AnswerFigures) -> Answer:
        """A place for an answer."""


def run_chat(job: ChatJob, ui: ChatUi, *, opener: Opener | None = None) -> int:
    """Runs it to its end.

    Args:
        job: What is wanted.
        ui: Who talks.
        opener: What opens the session; None is `Session.open`.

    Returns:
        The exit code: 0, or 128 + N after signal N.

    Raises:
        BmoeError: What went wrong, where nobody can try again.
        BrokenPipeError: The reader of the answers is gone.
    """
    resumed = None if job.resume is None else load_conversation(job.resume)
    log = open_run_log(job.log_target, model_path=job.config.model_path)
    return logged(log, lambda: _run(job, ui, log, resumed, opener))


def _run(job: ChatJob, ui: ChatUi, log: RunLog, resumed: Conversation | None, opener: Opener | None) -> int:
    say_last_words()
    with Interrupts() as interrupts:
        session = _open(job, ui, log, interrupts, opener)
    if session is None:
        return interrupts.exit_code
    with session, ChatSignals(interactive=ui.interactive) as signals:
        try:
            _Chat(job, ui, log, session, signals).run(resumed)
        except Ended as ended:
            return ended.exit_code
    return 0


def _open(
    job: ChatJob, ui: ChatUi, log: RunLog, interrupts: Interrupts, opener: Opener | None
) -> SyncSession | None:
    """The session; None after a signal."""
    started_ns = time.monotonic_ns()
    reached: LoadProgress | None = None
    display = ProgressDisplay(
        "loading", lambda done, total: f"{done // MIB} of {total // MIB} MiB", ui.progress_stream
    )
    warnings: list[str] = []

    def start_log(effective: EffectiveConfig | None) -> None:
        log.run_start(
            requested=job.config,
            effective=effective,
            request=None,
            prompt="",
            argv=without_prompt(job.argv),
        )

    def on_effective(effective: EffectiveConfig) -> None:
        warnings.extend(present.warnings(effective))

    def on_progress(progress: LoadProgress) -> None:
        nonlocal reached
        reached = progress
        display.update(progress.done_bytes, progress.total_bytes)

    def on_warning(text: str) -> None:
        line = present.one_line(f"warning: {text}")
        ui.warn(line)
        log.warning(line)

    try:
        session = open_session(
            job.config,
            on_effective=on_effective,
            on_progress=on_progress,
            on_warning=on_warning,
            on_resize=log.cache_resize,
            cancel_with=interrupts.cancel_with,
            opener=opener,
        )
    except BmoeError:
        start_log(None)
        if interrupts.received is None:
            raise
        display.close()
        ui.note(present.stopped_loading(reached, wall_ns=time.monotonic_ns() - started_ns))
        return None
    finally:
        display.close()
    start_log(session.effective)
    log.load(session.load_report)
    ui.warn(*warnings)
    for warning in warnings:
        log.warning(warning)
    return session


class _Chat:
    def __init__(
        self, job: ChatJob, ui: ChatUi, log: RunLog, session: SyncSession, signals: ChatSignals
    ) -> None:
        self._job = job
        self._ui = ui
        self._log = log
        self._session = session
        self._signals = signals
        self._system = job.system or None
        self._think = job.think
        self._created: str | None = None
        self._kept_in: str | None = None
        self._turn = 0
        self._left = False
        self._commands: dict[str, Callable[[str], None]] = {
            "help": lambda _: self._ui.show(*help_lines()),
            "new": lambda _: self._new(),
            "system": self._set_system,
            "think": self._set_think,
            "stats": lambda _: self._stats(),
            "save": self._save,
            "load": lambda path: self._load(load_conversation(_path(path))),
            "quit": lambda _: self._leave(),
        }

    def run(self, resumed: Conversation | None) -> None:
        """Until it is left."""
        e = self._session.effective
        self._ui.note(_banner(e))
        if not e.chat_template:
            why = f": {present.one_line(e.chat_template_problem)}" if e.chat_template_problem else ""
            self._ui.warn(f"warning: the model has no chat template{why}; messages are raw prompts")
        if not self._think:
            self._check_think()
        if resumed is not None:
            self._load(resumed, keep_system=self._system is not None)
            self._kept_in = self._job.resume
        while not self._left and (line := self._ui.read()) is not None:
            self._session.call_back()
            try:
                self._take(line)
            except BmoeError as error:
                if not self._ui.interactive:
                    raise
                self._ui.warn(f"error: {present.one_line(str(error))}")

    def _take(self, line: str) -> None:
        if (command := parse_command(line)) is not None:
            name, argument = command
            self._commands[name](argument)
        elif text := message_of(line):
            self._answer(text)

    def _answer(self, text: str) -> None:
        session, job = self._session, self._job
        before = session.conversation
        user = Message(role="user", content=text)
        system = [Message(role="system", content=self._system)] if self._system and not before else []
        request = GenerateRequest(
            messages=(*system, user),
            # A template renders the whole conversation: what is already computed of it, if only the system
            # message, is reused. Raw text would go on from what the context happens to hold.
            continue_conversation=session.effective.chat_template or bool(before),
            n_predict=job.n_predict,
            think=self._think,
            sampling=job.sampling,
            context_shift=job.context_shift,
        )
        cache, last = session.cache_state(), session.summary
        figures = AnswerFigures(
            slots_total=cache.slots_total if cache else None,
            context_used=last.context_tokens_used if last and before else 0,
            context_tokens=session.effective.context_tokens,
        )
        answer = self._ui.answer(figures)
        notes: list[str] = []
        try:
            with self._signals.answering(session.cancel):
                self._generate(request, answer)
            notes = _notes(session.summary, job)
        except Cancelled:
            notes = ["stopped; the model forgets this turn"]
            if self._signals.presses > 1:
                notes.append("/quit or Ctrl-D leaves the chat")
        finally:
            answer.end(*notes)
            if session.summary is not None:
                self._log.summary(session.summary)
        if self._kept_in is not None and session.conversation != before:
            self._write(self._kept_in)

    def _generate(self, request: GenerateRequest, answer: Answer) -> None:
        turn, self._turn = self._turn, self._turn + 1
        logged = False
        events = self._session.generate(request, on_prefill=answer.prefill, idle=answer.idle)
        try:
            for event in events:
                if not logged:
                    self._log.prefill(self._session.prefill_metrics, turn=turn)
                    logged = True
                self._log.token(event, turn=turn)
                answer.token(event)
        finally:
            events.close()
            if not logged:
                self._log.prefill(self._session.prefill_metrics, turn=turn)

    # --- commands -------------------------------------------------------------------------------------

    def _leave(self) -> None:
        self._left = True

    def _new(self) -> None:
        self._session.set_conversation(())
        self._created = None
        if self._kept_in is not None:
            self._ui.note(f"a new conversation; it is no longer kept in {self._kept_in}")
            self._kept_in = None
        else:
            self._ui.note("a new conversation")

    def _set_system(self, text: str) -> None:
        if not text:
            self._ui.show(self._system or "there is no system message")
            return
        self._system = None if text == "-" else text
        said = [m for m in self._session.conversation if m.role != "system"]
        if said:
            system = [Message(role="system", content=self._system)] if self._system else []
            self._session.set_conversation((*system, *said))
        self._ui.note("no system message" if self._system is None else "the system message is set")

    def _set_think(self, word: str) -> None:
        if word:
            think, self._think = self._think, word == "on"
            try:
                self._check_think()
            except BmoeError:
                self._think = think
                raise
        self._ui.show(f"reasoning is {'on' if self._think else 'off'}")

    def _check_think(self) -> None:
        if not self._think and self._session.effective.think_control == "none":
            raise UsageError("this model's template has no way to turn reasoning off")

    def _stats(self) -> None:
        session = self._session
        lines = [present.mode_line(session.effective)]
        if (cache := session.cache_state()) is not None:
            share = 100 * cache.slots_used // max(1, cache.slots_total)
            lines.append(f"{'now:':<9}cache {present.mib(cache.cache_bytes)}, {share} % full")
        if session.summary is not None:
            lines += present.summary_lines(session.summary, session.load_report)
            used, size = session.summary.context_tokens_used, session.effective.context_tokens
            lines.append(f"{'context:':<9}{used} of {size} tokens")
        self._ui.show(*lines)

    def _save(self, argument: str) -> None:
        path = _path(argument)
        if os.path.exists(path):
            try:
                load_conversation(path)
            except FormatError:
                raise UsageError(f"{path} is there and is no conversation: choose another name") from None
        self._write(path)
        self._ui.note(f"saved in {path}")

    def _write(self, path: str) -> None:
        e = self._session.effective
        said = self._session.conversation
        system = said[0].content if said and said[0].role == "system" else self._system
        if said and said[0].role == "system":
            said = said[1:]
        saved = save_conversation(
            path,
            said,
            model=e.model_name or os.path.basename(e.model_path),
            system=system,
            created=self._created or utc_now(),
        )
        self._created = saved.created

    def _load(self, loaded: Conversation, *, keep_system: bool = False) -> None:
        if not self._session.effective.chat_template:
            raise UsageError("without a chat template a saved conversation cannot go on")
        if not keep_system:
            self._system = loaded.system
        system = [Message(role="system", content=self._system)] if self._system else []
        self._session.set_conversation((*system, *loaded.messages) if loaded.messages else ())
        self._created, self._kept_in = loaded.created, None
        count = len(loaded.messages)
        self._ui.note(f"going on after {count} message{'' if count == 1 else 's'} of {loaded.updated}")


def _path(argument: str) -> str:
    return os.path.expanduser(argument)


def _banner(e: EffectiveConfig) -> str:
    parts = [e.model_name or os.path.basename(e.model_path), e.mode]
    if e.cache_bytes is not None:
        parts.append(f"cache {present.mib(e.cache_bytes)} for {e.cache_experts} of {e.total_experts} experts")
    return present.one_line(" · ".join([*parts, f"context {e.context_tokens}", "/help"]))


def _notes(summary: RunSummary | None, job: ChatJob) -> list[str]:
    """What is worth a line below an answer."""
    if summary is None:
        return []
    notes = []
    if summary.end == "length":
        notes.append(f"cut off after {job.n_predict} tokens; -n allows more")
    if summary.end == "context":
        notes.append("cut off: the context is full; /new, a larger -c, or --context-shift")
    if summary.shifts:
        notes.append("the context was full: the older half of the conversation was forgotten")
    if summary.turn and summary.full_prefill_reason:
        notes.append(f"all of the conversation was read again: {summary.full_prefill_reason}")
    return notes
