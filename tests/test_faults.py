"""Reads that fail, come short or never come, and generations cut off: one clear error, then right again."""

from __future__ import annotations

import asyncio
import errno
import os
import re
import subprocess
import sys
import threading
from typing import TYPE_CHECKING, Any

import pytest

from bmoe.config import GenerateRequest
from bmoe.io.errors import BmoeError, Cancelled, ReadError, StallError
from bmoe.io.testing import Fault, FaultyBackend
from bmoe.session import Session
from bmoe.verify import trace
from tests.models import tiny_moe
from tests.runs import cache_of_part, cache_of_slots, config, expected, generated, run

if TYPE_CHECKING:
    from collections.abc import Awaitable, Mapping

    from bmoe.config import SessionConfig
    from bmoe.io.backend import ReadBackend
    from bmoe.records import TokenEvent

PROMPT = "A short run."
N_PREDICT = 3
LONG = 60

SLICE = re.compile(r"blk\.\d+\.ffn_(gate|up|down)_exps\.weight\[\d+\]")


def small_model() -> str:
    return tiny_moe("Q4_K", layers=2, experts=8, top_k=2)


def right_tokens(n_predict: int = N_PREDICT) -> list[int]:
    return list(expected(small_model(), PROMPT, n_predict).tokens)


class Wrapped:
    """Puts a `FaultyBackend` into a session and keeps hold of it."""

    backend: FaultyBackend

    def __init__(self, script: Mapping[int, Fault] | None = None, every: Fault | None = None) -> None:
        self._script = {} if script is None else script
        self._every = every

    def __call__(self, inner: ReadBackend) -> ReadBackend:
        self.backend = FaultyBackend(inner, self._script, every=self._every)
        return self.backend

    async def open(self, wanted: SessionConfig) -> Session:
        return await Session.open(wanted, wrap_backend=self)

    @property
    def reads(self) -> int:
        return self.backend.statistics().reads

    async def held(self, unless: asyncio.Task[object] | None = None) -> None:
        """Until a completion is held back."""
        while not self.backend.held:
            assert unless is None or not unless.done()
            await asyncio.sleep(0)


def count_reads(wanted: SessionConfig) -> tuple[int, int, int]:
    """Reads of a clean run: after loading, after the prompt, after the last token."""

    async def scenario() -> tuple[int, int, int]:
        wrapped = Wrapped()
        async with await wrapped.open(wanted) as session:
            loaded = wrapped.reads
            assert await generated(session, PROMPT, 0) == []
            prefilled = wrapped.reads
        wrapped = Wrapped()
        async with await wrapped.open(wanted) as session:
            assert await generated(session, PROMPT, N_PREDICT) == right_tokens()
            return loaded, prefilled, wrapped.reads

    return run(scenario())


async def failure_of(generation: Awaitable[object]) -> ReadError | None:
    try:
        await generation
    except ReadError as error:
        return error
    return None


def assert_names_the_read(error: ReadError, path: str) -> None:
    assert error.path == path
    assert error.offset_bytes is not None
    assert error.expected is not None
    assert error.got is not None
    text = str(error)
    assert f"{path} at byte {error.offset_bytes}" in text
    assert f"expected {error.expected}, got {error.got}" in text
    assert "\n" not in text


BROKEN = {"EIO": Fault(errno=errno.EIO), "the file ends": Fault(short_bytes=0)}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_read_while_loading_is_one_error(kind: str) -> None:
    wanted = config(small_model())
    loaded, _, _ = count_reads(wanted)
    assert loaded > 0

    async def scenario(position: int) -> None:
        with pytest.raises(ReadError) as caught:
            await Wrapped({position: BROKEN[kind]}).open(wanted)
        assert_names_the_read(caught.value, wanted.model_path)

    for position in range(loaded):
        run(scenario(position))


@pytest.mark.slow
@pytest.mark.parametrize("kind", BROKEN)
@pytest.mark.parametrize("cache", ["everything", "a little"])
def test_a_broken_read_at_any_position_ends_the_run_and_not_the_session(cache: str, kind: str) -> None:
    path = small_model()
    size = cache_of_part(path, 1.0) if cache == "everything" else cache_of_slots(path, 5)
    wanted = config(path, cache_bytes=size)
    loaded, prefilled, total = count_reads(wanted)
    assert loaded < prefilled < total
    errors = 0

    async def scenario(position: int) -> None:
        nonlocal errors
        wrapped = Wrapped({position: BROKEN[kind]})
        async with await wrapped.open(wanted) as session:
            tokens: list[int] = []
            error = await failure_of(generated(session, PROMPT, N_PREDICT, into=tokens))
            if error is None:
                assert wrapped.reads <= position  # timing decides which slices are evicted and read again
            else:
                errors += 1
                assert_names_the_read(error, path)
                assert SLICE.search(str(error))
                assert tokens == right_tokens()[: len(tokens)]
                if position < prefilled:
                    assert tokens == []
                assert session.summary is not None
                assert session.summary.end == "error"
            assert await generated(session, PROMPT, N_PREDICT) == right_tokens()

    # The small cache, where timing has a say, gets every third for the second kind.
    positions = range(loaded, total, 3 if (cache, kind) == ("a little", "the file ends") else 1)
    for position in positions:
        run(scenario(position))
    assert errors >= len(positions) * 0.9


def test_a_short_read_at_any_position_is_resumed() -> None:
    path = small_model()
    wanted = config(path, cache_bytes=cache_of_slots(path, 8))
    loaded, _, total = count_reads(wanted)
    want = expected(path, PROMPT, N_PREDICT)

    async def scenario(position: int) -> None:
        wrapped = Wrapped({position: Fault(short_bytes=9000)})  # no multiple of a block
        async with await wrapped.open(wanted) as session:
            assert await trace(session, GenerateRequest(prompt=PROMPT, n_predict=N_PREDICT)) == want

    for position in (*range(loaded), *range(loaded, total, 2)):
        run(scenario(position))


@pytest.mark.parametrize("backend", ["uring", "threads"])
def test_reads_that_are_all_short_change_nothing(backend: str) -> None:
    path = small_model()
    want = expected(path, PROMPT, N_PREDICT)

    async def scenario() -> None:
        wrapped = Wrapped(every=Fault(short_bytes=8192 + 100))
        async with await wrapped.open(config(path, io_backend=backend)) as session:
            assert session.streaming is not None
            assert await trace(session, GenerateRequest(prompt=PROMPT, n_predict=N_PREDICT)) == want
            assert wrapped.reads >= 4 * session.streaming.streamer.statistics().reads

    run(scenario())


@pytest.mark.parametrize("threads", [1, 2])
def test_when_all_reads_fail_the_first_failure_is_told(threads: int) -> None:
    path = small_model()
    wanted = config(path, threads=threads)
    loaded, _, _ = count_reads(wanted)

    async def scenario() -> None:
        script = dict.fromkeys(range(loaded, loaded + 1000), Fault(errno=errno.EIO))
        wrapped = Wrapped(script)
        async with await wrapped.open(wanted) as session:
            with pytest.raises(ReadError, match="the drive reports a read error"):
                await generated(session, PROMPT, N_PREDICT)
            # Reads of the failed run, each with its own error.
            while wrapped.backend.in_flight:  # noqa: ASYNC110 (no event tells)
                await asyncio.sleep(0)
            script.clear()
            assert await generated(session, PROMPT, N_PREDICT) == right_tokens()

    run(scenario())


def test_interrupted_reads_are_repeated() -> None:
    path = small_model()
    want = expected(path, PROMPT, N_PREDICT)

    async def scenario() -> None:
        script = {i: Fault(errno=(errno.EINTR, errno.EAGAIN)[i % 2]) for i in range(0, 1000, 3)}
        async with await Wrapped(script).open(config(path)) as session:
            assert await trace(session, GenerateRequest(prompt=PROMPT, n_predict=N_PREDICT)) == want

    run(scenario())


TRUNCATE = """
import asyncio, os, shutil, sys
from bmoe.io.errors import ReadError
from bmoe.session import Session
from tests.runs import config, generated

async def main(model, copy, when):
    shutil.copyfile(model, copy)
    async with await Session.open(config(copy)) as session:
        if when == "prefill":
            os.truncate(copy, os.stat(copy).st_size // 8)
        def on_token(event):
            if when == "decode" and event.index == 1:
                os.truncate(copy, os.stat(copy).st_size // 8)
        tokens = []
        try:
            await generated(session, "A short run.", 40, on_token=on_token, into=tokens)
        except ReadError as error:
            print(len(tokens), error)
        else:
            print("no error")

asyncio.run(main(*sys.argv[1:]))
"""


@pytest.mark.parametrize("when", ["prefill", "decode"])
def test_a_file_truncated_after_opening_is_a_read_error(when: str, tmp_path: os.PathLike[str]) -> None:
    """In a process of its own: a page touched through the mapping would end it with SIGBUS."""
    copy = os.path.join(tmp_path, "copy.gguf")
    done = subprocess.run(
        [sys.executable, "-c", TRUNCATE, tiny_moe("Q4_K"), copy, when],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    tokens, text = done.stdout.split(maxsplit=1)
    assert (int(tokens) >= 2) == (when == "decode")
    assert f"{copy} at byte" in text
    assert "the file ends too early" in text
    assert "was truncated after it was opened" in text
    assert SLICE.search(text)


def test_cancel_before_the_first_token() -> None:
    async def scenario() -> None:
        async with await Session.open(config(small_model())) as session:
            tokens: list[int] = []
            task = asyncio.ensure_future(generated(session, PROMPT, LONG, into=tokens))
            await asyncio.sleep(0)
            session.cancel()
            with pytest.raises(Cancelled):
                await task
            assert tokens == []
            assert session.summary is not None
            assert session.summary.end == "cancelled"
            assert await generated(session, PROMPT, N_PREDICT) == right_tokens()

    run(scenario())


def test_cancel_without_a_generation_does_nothing() -> None:
    async def scenario() -> None:
        async with await Session.open(config(small_model())) as session:
            for _ in range(2):
                session.cancel()
                assert await generated(session, PROMPT, N_PREDICT) == right_tokens()
                session.cancel()

    run(scenario())


def test_a_failure_of_the_callers_own_on_the_decode_thread_leaves_the_session_usable() -> None:
    async def scenario() -> None:
        async with await Session.open(config(small_model())) as session:
            with pytest.raises(ZeroDivisionError):
                await session.on_decode_thread(lambda: 1 // 0)
            assert await generated(session, PROMPT, N_PREDICT) == right_tokens()

    run(scenario())


def test_a_cancel_that_comes_too_late_is_not_the_next_generations(monkeypatch: pytest.MonkeyPatch) -> None:
    """From another thread, in the moment between a generation's end and the knowledge of it."""

    async def scenario() -> None:
        async with await Session.open(config(small_model())) as session:
            settle = session._settle

            def settle_and_cancel(*arguments: Any) -> BaseException | None:
                error = settle(*arguments)
                session.cancel()
                return error

            monkeypatch.setattr(session, "_settle", settle_and_cancel)
            for _ in range(2):
                assert await generated(session, PROMPT, N_PREDICT) == right_tokens()

    run(scenario())


@pytest.mark.parametrize("how", ["cancel", "task", "close"])
def test_cancel_ends_work_below_the_session_too(how: str) -> None:
    """Such as `verify`'s, which computes on the decode thread itself."""
    wanted = config(small_model())
    loaded, _, _ = count_reads(wanted)

    async def scenario() -> None:
        wrapped = Wrapped({loaded: Fault(hold=True)})
        async with await wrapped.open(wanted) as session:
            request = GenerateRequest(prompt=PROMPT, n_predict=LONG)
            task = asyncio.ensure_future(trace(session, request))
            await wrapped.held(unless=task)
            if how == "close":
                closing = asyncio.ensure_future(session.aclose())
                with pytest.raises(Cancelled):
                    await task
                await closing
                return
            if how == "task":
                task.cancel()
            else:
                session.cancel()
            with pytest.raises(Cancelled if how == "cancel" else asyncio.CancelledError):
                await task
            wrapped.backend.release()
            assert await trace(session, request) == expected(small_model(), PROMPT, LONG)

    run(scenario())


def test_cancel_in_the_middle_of_the_prompt() -> None:
    async def scenario() -> None:
        async with await Session.open(config(small_model(), ubatch_tokens=4)) as session:
            with pytest.raises(Cancelled):
                await generated(session, PROMPT * 5, 4, on_prefill=lambda _: session.cancel())
            assert session.summary is not None
            assert session.summary.prompt_tokens < len(PROMPT * 5)
            want = list(expected(small_model(), PROMPT, N_PREDICT, ubatch_tokens=4).tokens)
            assert await generated(session, PROMPT, N_PREDICT) == want

    run(scenario())


class Canceller(threading.Thread):
    """Cancels from a thread of its own, once the token of that index was seen."""

    def __init__(self, session: Session, at: int) -> None:
        super().__init__()
        self._session = session
        self._at = at
        self._go = threading.Event()
        self.start()

    def see(self, event: TokenEvent) -> None:
        if event.index == self._at:
            self._go.set()

    def run(self) -> None:
        self._go.wait()
        self._session.cancel()


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("overlap", [True, False])
def test_cancel_from_another_thread_while_decoding(threads: int, overlap: bool) -> None:
    path = small_model()
    long = list(expected(path, PROMPT, LONG, threads=threads).tokens)

    async def scenario() -> None:
        wanted = config(path, threads=threads, overlap=overlap)
        async with await Session.open(wanted) as session:
            for at in range(1, 25, 4):
                canceller = Canceller(session, at)
                tokens: list[int] = []
                try:
                    await generated(session, PROMPT, LONG, into=tokens, on_token=canceller.see)
                except Cancelled:
                    pass
                else:
                    assert len(tokens) == LONG
                canceller.join()
                assert len(tokens) > at
                assert tokens == long[: len(tokens)]
                assert await generated(session, PROMPT, 8) == long[:8]

    run(scenario())


def test_closing_the_generator_ends_the_generation() -> None:
    async def scenario() -> None:
        async with await Session.open(config(small_model())) as session:
            for taken in range(1, 4):
                stream = session.generate(GenerateRequest(prompt=PROMPT, n_predict=LONG, ignore_eog=True))
                got = [(await anext(stream)).token for _ in range(taken)]
                await stream.aclose()
                assert got == right_tokens()[:taken]
                assert await generated(session, PROMPT, N_PREDICT) == right_tokens()

    run(scenario())


@pytest.mark.parametrize("times", [1, 2])
def test_cancelling_the_task_ends_the_generation(times: int) -> None:
    """The second time while the first still waits for the batch to end."""

    async def scenario() -> None:
        async with await Session.open(config(small_model())) as session:
            tokens: list[int] = []
            task = asyncio.ensure_future(generated(session, PROMPT, LONG, into=tokens))
            while not tokens:  # noqa: ASYNC110 (as above)
                await asyncio.sleep(0)
            for _ in range(times):
                task.cancel()
                await asyncio.sleep(0)
            with pytest.raises(asyncio.CancelledError):
                await task
            assert await generated(session, PROMPT, N_PREDICT) == right_tokens()

    run(scenario())


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize(
    "fault", [Fault(hold=True), Fault(hold=True, errno=errno.EIO)], ids=["late", "late and failed"]
)
@pytest.mark.parametrize("part", ["prefill", "decode"])
def test_a_read_that_comes_after_the_cancel_harms_nothing(part: str, fault: Fault, overlap: bool) -> None:
    """The kernel waits in the middle of a layer; the read that it waits for completes when nobody does."""
    path = small_model()
    wanted = config(path, cache_bytes=cache_of_slots(path, 6), overlap=overlap)
    loaded, prefilled, _ = count_reads(wanted)

    async def scenario(position: int) -> None:
        wrapped = Wrapped({position: fault})
        async with await wrapped.open(wanted) as session:
            task = asyncio.ensure_future(generated(session, PROMPT, N_PREDICT))
            await wrapped.held(unless=task)
            session.cancel()
            with pytest.raises(Cancelled):
                await task
            assert wrapped.backend.held
            wrapped.backend.release()
            assert await generated(session, PROMPT, N_PREDICT) == right_tokens()

    for offset in range(3):
        run(scenario((loaded if part == "prefill" else prefilled) + offset))


def test_a_generation_after_a_cancel_waits_for_the_read_of_the_one_before() -> None:
    path = small_model()
    wanted = config(path, cache_bytes=cache_of_slots(path, 6))
    loaded, _, _ = count_reads(wanted)

    async def scenario(position: int) -> None:
        wrapped = Wrapped({position: Fault(hold=True)})
        async with await wrapped.open(wanted) as session:
            task = asyncio.ensure_future(generated(session, PROMPT, N_PREDICT))
            await wrapped.held()
            session.cancel()
            with pytest.raises(Cancelled):
                await task
            task = asyncio.ensure_future(generated(session, PROMPT, N_PREDICT))
            for _ in range(200):
                await asyncio.sleep(0)
            assert not task.done()
            wrapped.backend.release()
            assert await task == right_tokens()

    for offset in range(3):
        run(scenario(loaded + offset))


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_a_read_that_never_completes_is_a_stall_that_names_the_slice(threads: int, overlap: bool) -> None:
    path = small_model()
    wanted = config(path, threads=threads, overlap=overlap, watchdog_s=0.2)
    loaded, _, _ = count_reads(config(path))

    async def scenario() -> None:
        wrapped = Wrapped({loaded + 1: Fault(hold=True)})
        async with await wrapped.open(wanted) as session:
            for _ in range(2):  # the same read holds the next generation up too
                with pytest.raises(StallError) as caught:
                    await generated(session, PROMPT, N_PREDICT)
                assert SLICE.search(str(caught.value)), str(caught.value)
            wrapped.backend.release()
            assert await generated(session, PROMPT, N_PREDICT) == right_tokens()

    run(scenario())


def test_closing_after_a_stall_does_not_hang() -> None:
    path = small_model()
    wanted = config(path, watchdog_s=0.2)
    loaded, _, _ = count_reads(config(path))

    async def scenario() -> None:
        wrapped = Wrapped({loaded: Fault(hold=True)})
        async with await wrapped.open(wanted) as session:
            with pytest.raises(StallError):
                await generated(session, PROMPT, N_PREDICT)
        assert not wrapped.backend.held

    run(scenario())


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("how", ["error", "cancel"])
def test_an_open_that_fails_leaves_nothing_open(how: str) -> None:
    path = small_model()
    run(count_and_close(path))  # what a first session opens for good is open now
    before = open_files()
    threads = threading.active_count()

    async def scenario() -> None:
        wrapped = Wrapped({0: Fault(errno=errno.EIO) if how == "error" else Fault(hold=True)})
        opening = asyncio.ensure_future(wrapped.open(config(path)))
        if how == "error":
            with pytest.raises(BmoeError):
                await opening
        else:
            while not hasattr(wrapped, "backend"):  # noqa: ASYNC110 (as above)
                await asyncio.sleep(0)
            await wrapped.held()
            opening.cancel()
            await asyncio.sleep(0)
            wrapped.backend.release()
            with pytest.raises(asyncio.CancelledError):
                await opening

    run(scenario())
    assert open_files() == before
    assert threading.active_count() <= threads


async def count_and_close(path: str) -> None:
    async with await Session.open(config(path)):
        pass


CLOSE = """
import asyncio, sys
from bmoe.config import GenerateRequest
from bmoe.session import Session
from tests.runs import config

async def main(model, how):
    request = GenerateRequest(prompt="A short run.", n_predict=200, ignore_eog=True)
    for _ in range(3):
        if how == "break":
            async with await Session.open(config(model)) as session:
                async for event in session.generate(request):
                    break
            await asyncio.sleep(0)
        else:
            session = await Session.open(config(model))
            stream = session.generate(request)
            await anext(stream)
            await session.aclose()
            await session.aclose()
            session.cancel()
            await stream.aclose()
    print("fine")

asyncio.run(main(*sys.argv[1:]))
"""


@pytest.mark.parametrize("how", ["break", "aclose"])
def test_closing_a_session_under_a_generation_frees_nothing_twice(how: str) -> None:
    """In a process of its own: the failure is a crash."""
    done = subprocess.run(
        [sys.executable, "-c", CLOSE, small_model(), how],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "fine\n", "")


def test_a_policy_that_fails_ends_the_run_instead_of_hanging_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bug of ours in a loop callback: nobody would ever serve the kernel that waits."""
    from bmoe import policies  # noqa: PLC0415 (the registry itself is patched)

    class Failing(policies.LeastRecentlyUsed):
        def victims(self, *_: object) -> object:  # type: ignore[override]  # never returns
            raise ZeroDivisionError("the policy's own bug")

    monkeypatch.setitem(policies.POLICIES, "failing", Failing)

    async def scenario() -> None:
        problems: list[Mapping[str, object]] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: problems.append(context))
        path = small_model()
        wanted = config(path, policy="failing", cache_bytes=cache_of_slots(path, 14))
        async with await Session.open(wanted) as session:
            with pytest.raises(Exception, match="the policy's own bug"):
                await generated(session, PROMPT, LONG)
        assert problems

    run(scenario())
