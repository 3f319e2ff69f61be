"""The synchronous facade: what crosses between the threads, and what an interruption leaves."""

from __future__ import annotations

import asyncio
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest

from bmoe.chat.messages import Message
from bmoe.config import GenerateRequest, SessionConfig
from bmoe.io.errors import Cancelled, FileError, UsageError
from bmoe.sync import SyncSession, open_session
from tests.fakes import LOAD, MIB
from tests.session_fake import CHAT, WAIT, ScriptedSession

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from bmoe.records import EffectiveConfig, LoadProgress

CONFIG = SessionConfig(model_path="m.gguf")


def asking(text: str) -> GenerateRequest:
    return GenerateRequest(messages=(Message(role="user", content=text),), continue_conversation=True)


@contextmanager
def opened(fake: ScriptedSession, **callbacks: Any) -> Iterator[SyncSession]:
    threads = threading.active_count()
    with open_session(CONFIG, opener=fake.open, **callbacks) as session:
        yield session
    assert fake.closed == 1
    assert threading.active_count() == threads


def text_of(session: SyncSession, request: GenerateRequest) -> str:
    return "".join(event.text for event in session.generate(request))


def test_tokens_and_what_belongs_to_them_arrive_in_order() -> None:
    fake = ScriptedSession(["a", "b"])
    with opened(fake) as session:
        seen: list[object] = []
        for event in session.generate(asking("Hi"), on_prefill=lambda p: seen.append(p.total_tokens)):
            seen.append(event.text)  # noqa: PERF401 (one list with the callback's)
        assert seen == [12, "a", "b"]
        assert session.summary is not None
        assert session.summary.end == "eog"
        assert [m.role for m in session.conversation] == ["user", "assistant"]
        assert session.last_message == Message(role="assistant", content="ab")
        assert (session.effective, session.load_report) == (CHAT, LOAD)
        assert len(session.prefill_metrics) == 1


def test_whoever_waits_is_told_and_called_again_when_asked() -> None:
    fake = ScriptedSession(["a", WAIT])
    with opened(fake) as session:
        calls: list[float | None] = [0.0, 0.001]

        def idle() -> float | None:
            if calls:
                return calls.pop()
            session.cancel()
            return None

        with pytest.raises(Cancelled):
            list(session.generate(asking("Hi"), idle=idle))
        assert calls == []


def test_callbacks_run_on_the_callers_thread() -> None:
    threads: list[int] = []

    def note(_: object) -> None:
        threads.append(threading.get_ident())

    fake = ScriptedSession([lambda s: s.on_warning("later"), "a"])
    with opened(fake, on_effective=note, on_progress=note, on_warning=note) as session:
        assert text_of(session, asking("Hi")) == "a"
        session.call_back()
    assert threads == [threading.get_ident()] * 3


def test_an_error_is_raised_where_it_was_asked_for_and_the_session_goes_on() -> None:
    fake = ScriptedSession([UsageError("too long")], ["fine"])
    with opened(fake) as session:
        with pytest.raises(UsageError, match="too long"):
            text_of(session, asking("Hi"))
        assert text_of(session, asking("Hi")) == "fine"


@pytest.mark.parametrize("tokens", range(3))
def test_leaving_the_loop_cancels_and_waits(tokens: int) -> None:
    fake = ScriptedSession(*([["a", "b", WAIT]] if tokens else []), ["next"])
    with opened(fake) as session:
        events = session.generate(asking("Hi"))
        for _ in range(tokens):
            next(events)
        events.close()
        assert session.conversation == ()
        # without a first `next` nothing had begun
        assert (
            session.summary is None if not tokens else session.summary and session.summary.end == "cancelled"
        )
        assert text_of(session, asking("Hi")) == "next"


def test_cancel_from_another_thread_ends_a_generation_that_waits() -> None:
    fake = ScriptedSession(["a", WAIT])
    with opened(fake) as session:
        events = session.generate(asking("Hi"))
        assert next(events).text == "a"
        thread = threading.Thread(target=session.cancel)
        thread.start()
        with pytest.raises(Cancelled):
            next(events)
        thread.join()


def test_a_cancel_that_comes_before_the_first_step_is_not_lost() -> None:
    fake = ScriptedSession(["next"])
    with opened(fake) as session:
        start = session._thread.start

        def start_and_cancel(work: Any) -> None:
            session.cancel()  # neither has the loop heard of the generation ...
            start(work)
            session.cancel()  # ... nor has it begun

        session._thread.start = start_and_cancel  # type: ignore[method-assign]  # to be in time
        with pytest.raises(Cancelled):
            text_of(session, asking("Hi"))
        session._thread.start = start  # type: ignore[method-assign]  # as above
        assert fake.requests == []
        assert text_of(session, asking("Hi"))


def test_a_late_cancel_does_not_hit_the_next_generation() -> None:
    fake = ScriptedSession(["a"])
    with opened(fake) as session:
        events = session.generate(asking("Hi"))
        next(events)
        run = session._generation
        assert run is not None
        assert list(events) == []
        session._thread.call(run.cancel)
        session.cancel()
        assert text_of(session, asking("Hi")) == "a"


def test_an_interrupt_while_waiting_leaves_a_usable_session(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = ScriptedSession(["a", WAIT], ["next"])
    with opened(fake) as session:
        events = session.generate(asking("Hi"))
        next(events)
        assert session._generation is not None

        class Interrupted:
            def empty(self) -> bool:
                return True

            def get(self, timeout: float | None) -> None:  # noqa: ARG002 (a queue's)
                raise KeyboardInterrupt

            def put(self, item: object) -> None:
                pass

        waits: list[int] = []
        done = session._generation.done
        wait = done.wait

        def impatient() -> bool:
            waits.append(1)
            if len(waits) == 1:
                raise KeyboardInterrupt
            return wait()

        monkeypatch.setattr(session._generation, "items", Interrupted())
        monkeypatch.setattr(done, "wait", impatient)
        with pytest.raises(KeyboardInterrupt):
            next(events)
        assert done.is_set()
        assert text_of(session, asking("Hi")) == "next"


def test_only_one_generation_at_a_time_and_none_after_close() -> None:
    fake = ScriptedSession(["a", WAIT])
    with opened(fake) as session:
        events = session.generate(asking("Hi"))
        next(events)
        with pytest.raises(RuntimeError, match="one thing at a time"):
            next(session.generate(asking("Hi")))
        session.close()
        session.close()
        with pytest.raises(Cancelled):
            next(events)
        with pytest.raises(RuntimeError, match="closed"):
            next(session.generate(asking("Hi")))


def test_the_cache_is_asked_and_set_on_the_loop() -> None:
    with opened(ScriptedSession()) as session:
        assert session.set_cache_bytes(9 * MIB) == 9 * MIB
        state = session.cache_state()
        assert state is not None
        assert state.cache_bytes == 9 * MIB


def test_an_opening_that_fails_leaves_nothing() -> None:
    threads = threading.active_count()
    fake = ScriptedSession(opening=FileError("is not there", path="m.gguf"))
    with pytest.raises(FileError, match="is not there"):
        open_session(CONFIG, opener=fake.open)
    assert threading.active_count() == threads


def test_an_opening_can_be_cancelled_from_another_thread() -> None:
    cancels: list[Callable[[], None]] = []

    async def for_ever() -> None:
        cancels.pop()()
        await asyncio.Event().wait()

    with pytest.raises(Cancelled):
        open_session(CONFIG, opener=ScriptedSession(opening=for_ever).open, cancel_with=cancels.append)


@pytest.mark.parametrize("last", [True, False])
def test_a_callback_that_raises_closes_what_was_opened(*, last: bool) -> None:
    fake = ScriptedSession()

    def interrupt(_: EffectiveConfig | LoadProgress) -> None:
        raise KeyboardInterrupt

    callbacks = {"on_progress": interrupt} if last else {"on_effective": interrupt}
    with pytest.raises(KeyboardInterrupt):
        open_session(CONFIG, opener=fake.open, **callbacks)  # type: ignore[arg-type]  # one of them
    assert fake.closed <= 1
