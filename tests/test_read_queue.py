"""`bmoe.io.read_queue`: what becomes of short, interrupted and failed reads."""

from __future__ import annotations

import asyncio
import errno
import os
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest
import uvloop

from bmoe.io import DirectFile, NullBackend, ReadQueue, SlotMemory, open_backend
from bmoe.io.testing import Fault, FaultyBackend

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine
    from pathlib import Path

    from bmoe.io.backend import ReadBackend, Target
    from bmoe.io.errors import ReadError

    Run = Callable[[Coroutine[Any, Any, None]], None]

BLOCK = 512
WINDOW_BYTES = 3 * BLOCK
FILE_BYTES = 64 * 4096 + 100


@pytest.fixture(params=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> Run:
    """Runs a coroutine on each kind of loop."""
    return asyncio.run if request.param == "asyncio" else uvloop.run


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "data.bin"
    path.write_bytes(os.urandom(FILE_BYTES))
    return path


class Reader:
    """A started queue over a file, with one target per tag, and what was reported."""

    def __init__(self, backend: ReadBackend, path: Path, tags: int, window_bytes: int = 4096) -> None:
        self.file = DirectFile.open(str(path), direct=backend.name != "null")
        self.queue = ReadQueue(backend, self.file.block_bytes, tags)
        self.memory = SlotMemory(window_bytes, tags)
        self.memory.populate_next_chunk()
        buffer_id = backend.add_buffer(self.memory.chunk_view(0))
        self.targets: list[Target] = [
            backend.prepare(buffer_id, self.memory.slot_view(tag)) for tag in range(tags)
        ]
        self.file_id = self.queue.add_file(self.file)
        self.done: list[int] = []
        self.errors: dict[int, ReadError] = {}
        self._changed = asyncio.Event()
        self.queue.start(asyncio.get_running_loop(), self.on_done, self.on_error)

    def on_done(self, tags: list[int]) -> None:
        self.done += tags
        self._changed.set()

    def on_error(self, tag: int, error: ReadError) -> None:
        self.errors[tag] = error
        self._changed.set()

    def read(self, tag: int, offset_bytes: int = 0, need_bytes: int = 4096) -> None:
        self.queue.read(tag, self.file_id, offset_bytes, need_bytes, self.targets[tag])

    async def wait_idle(self) -> None:
        self.queue.submit()
        while self.queue.in_flight:
            self._changed.clear()
            await self._changed.wait()

    async def close(self) -> None:
        await self.queue.aclose()
        self.file.close()
        self.memory.close()


def test_every_short_read_is_resumed_at_the_last_block_reached(run: Run, data: Path) -> None:
    """Cut at every byte of the window; only whole blocks are kept, and the bytes are right."""
    contents = data.read_bytes()
    offsets: dict[int, list[int]] = {}

    def source(file_id: int, offset_bytes: int, view: memoryview) -> int:
        del file_id
        cut = offset_bytes // WINDOW_BYTES  # tag `cut` reads the window at that offset
        seen = offsets.setdefault(cut, [])
        seen.append(offset_bytes)
        piece = contents[offset_bytes : offset_bytes + view.nbytes]
        if len(seen) == 1:
            piece = piece[:cut]
        view[: len(piece)] = piece
        return len(piece)

    async def scenario() -> None:
        nonlocal contents
        contents = os.urandom(WINDOW_BYTES * (WINDOW_BYTES + 1))
        backend = NullBackend(100, source=source)
        file = DirectFile.open(str(data), direct=False)
        queue = ReadQueue(backend, BLOCK, WINDOW_BYTES)
        memory = SlotMemory(4096, WINDOW_BYTES)
        memory.populate_next_chunk()
        buffer_id = backend.add_buffer(memory.chunk_view(0))
        done: list[int] = []
        errors: list[ReadError] = []
        idle = asyncio.Event()

        def on_done(tags: list[int]) -> None:
            done.extend(tags)
            if not queue.in_flight:
                idle.set()

        queue.start(asyncio.get_running_loop(), on_done, lambda _tag, error: errors.append(error))
        backend.add_file(file)
        for cut in range(1, WINDOW_BYTES):
            target = backend.prepare(buffer_id, memory.slot_view(cut)[:WINDOW_BYTES])
            queue.read(cut, 0, cut * WINDOW_BYTES, WINDOW_BYTES, target)
        queue.submit()
        await idle.wait()
        assert (sorted(done), errors) == (list(range(1, WINDOW_BYTES)), [])
        for cut in range(1, WINDOW_BYTES):
            start = cut * WINDOW_BYTES
            assert offsets[cut] == [start, start + cut // BLOCK * BLOCK]
            assert bytes(memory.slot_view(cut)[:WINDOW_BYTES]) == contents[start : start + WINDOW_BYTES]
        assert queue.statistics().resumed == WINDOW_BYTES - 1
        await queue.aclose()
        file.close()
        memory.close()

    run(scenario())


def test_read_that_crawls_still_arrives(data: Path) -> None:
    """Ten bytes further each time, from a block boundary each time."""
    contents = data.read_bytes()
    reached = 0

    def source(file_id: int, offset_bytes: int, view: memoryview) -> int:
        nonlocal reached
        del file_id
        reached = min(reached + 10, offset_bytes + view.nbytes)
        view[: reached - offset_bytes] = contents[offset_bytes:reached]
        return reached - offset_bytes

    async def scenario() -> None:
        reader = Reader(NullBackend(1, source=source), data, 1, 8192)
        reader.read(0, need_bytes=8192)
        await reader.wait_idle()
        assert reader.done == [0]
        assert bytes(reader.targets[0].view) == contents[:8192]
        await reader.close()

    asyncio.run(scenario())


@pytest.mark.parametrize("first_bytes", [0, 1, 4096, 5000])
def test_no_progress_is_an_error_with_all_its_figures(data: Path, first_bytes: int) -> None:
    def source(file_id: int, offset_bytes: int, view: memoryview) -> int:
        del file_id, view
        return max(0, 16384 + first_bytes - offset_bytes)

    async def scenario() -> None:
        reader = Reader(NullBackend(1, source=source), data, 1, 8192)
        reader.read(0, 16384, 8000)
        await reader.wait_idle()
        assert reader.done == []
        assert str(reader.errors[0]) == (
            f"{data} at byte 16384: the file ends too early; expected 8000 bytes, got {first_bytes} bytes"
        )
        assert (reader.errors[0].path, reader.errors[0].offset_bytes) == (str(data), 16384)
        reader.read(0, 0, 1)  # the tag is free again
        await reader.close()

    asyncio.run(scenario())


def test_window_over_the_end_of_the_file_is_done_at_what_is_needed(run: Run, data: Path) -> None:
    contents = data.read_bytes()

    async def scenario() -> None:
        reader = Reader(open_backend("auto", 2), data, 2, 8192)
        reader.read(0, FILE_BYTES - 100 - 4096, 4096 + 100)
        reader.read(1, FILE_BYTES - 100 - 4096, 4096 + 101)
        await reader.wait_idle()
        assert reader.done == [0]
        assert bytes(reader.targets[0].view[:4196]) == contents[-4196:]
        assert reader.errors[1].got == "4196 bytes"
        await reader.close()

    run(scenario())


@pytest.mark.parametrize("number", [errno.EAGAIN, errno.EINTR])
def test_interruptions_are_repeated(run: Run, data: Path, number: int) -> None:
    """Ten in a row, at once and then with pauses; in several reads at the same time."""

    async def scenario() -> None:
        script = {index: Fault(errno=number) for index in range(40)}
        reader = Reader(FaultyBackend(open_backend("auto", 4), script), data, 4)
        for tag in range(4):
            reader.read(tag)
        await reader.wait_idle()
        assert sorted(reader.done) == [0, 1, 2, 3]
        assert reader.queue.statistics().retried == 40
        await reader.close()

    run(scenario())


def test_storm_without_end_is_given_up(data: Path) -> None:
    async def scenario() -> None:
        storm = FaultyBackend(open_backend("auto", 4), {}, every=Fault(errno=errno.EAGAIN))
        reader = Reader(storm, data, 1)
        reader.read(0)
        await reader.wait_idle()
        assert "Resource temporarily unavailable" in str(reader.errors[0])
        assert reader.queue.statistics().retried == 10
        await reader.close()

    asyncio.run(scenario())


def test_progress_gives_new_patience(data: Path) -> None:
    """Ten interruptions, a short read, ten more."""

    async def scenario() -> None:
        script = {index: Fault(errno=errno.EINTR) for index in range(21)}
        script[10] = Fault(short_bytes=4096)
        reader = Reader(FaultyBackend(open_backend("auto", 4), script), data, 1, 8192)
        reader.read(0, need_bytes=8192)
        await reader.wait_idle()
        assert reader.done == [0]
        await reader.close()

    asyncio.run(scenario())


def test_eio_of_one_leaves_the_others_alone(run: Run, data: Path) -> None:
    async def scenario() -> None:
        faulty = FaultyBackend(open_backend("auto", 4), {2: Fault(errno=errno.EIO)})
        reader = Reader(faulty, data, 8)
        for tag in range(8):
            reader.read(tag, tag * 4096)
        await reader.wait_idle()
        assert sorted(reader.done) == [0, 1, 3, 4, 5, 6, 7]
        assert list(reader.errors) == [2]
        assert str(reader.errors[2]).startswith(
            f"{data} at byte 8192: the drive reports a read error; expected 4096 bytes, "
            "got 0 bytes and errno 5"
        )
        statistics = reader.queue.statistics()
        assert (statistics.done, statistics.failed) == (7, 1)
        await reader.close()

    run(scenario())


@pytest.mark.parametrize("choice", ["auto", "threads"])
def test_truncated_file_is_named_as_such(data: Path, choice: Any) -> None:
    async def scenario() -> None:
        reader = Reader(open_backend(choice, 4), data, 2)
        os.truncate(data, 10_000)
        reader.read(0, 8192)
        reader.read(1, 4096)
        await reader.wait_idle()
        assert reader.done == [1]
        assert "got 1808 bytes" in str(reader.errors[0])
        assert "was truncated after it was opened" in str(reader.errors[0])
        await reader.close()

    asyncio.run(scenario())


def test_close_reports_everything_in_flight_once(run: Run, data: Path) -> None:
    async def scenario() -> None:
        script = {index: Fault(errno=errno.EAGAIN) for index in range(0, 100, 2)}
        reader = Reader(FaultyBackend(open_backend("auto", 2), script), data, 8)
        for tag in range(8):
            reader.read(tag)
        reader.queue.submit()
        await reader.close()
        await reader.queue.aclose()
        assert sorted([*reader.done, *reader.errors]) == list(range(8))
        assert {str(error).partition("; ")[0] for error in reader.errors.values()} == {
            f"{data} at byte 0: the read was cancelled"
        }
        assert reader.queue.in_flight == 0

    run(scenario())


def test_close_ends_the_pauses_between_retries(data: Path) -> None:
    async def scenario() -> None:
        faulty = FaultyBackend(NullBackend(1), {}, every=Fault(errno=errno.EAGAIN))
        reader = Reader(faulty, data, 1)
        reader.read(0)
        reader.queue.submit()
        paused = asyncio.Event()
        loop = asyncio.get_running_loop()

        def look() -> None:
            if reader.queue._pauses:
                paused.set()
            else:
                loop.call_soon(look)

        look()
        await paused.wait()
        await reader.close()
        assert "cancelled" in str(reader.errors[0])

    asyncio.run(scenario())


def test_tags_can_be_used_again_from_the_callback(data: Path) -> None:
    async def scenario() -> None:
        reader = Reader(open_backend("auto", 4), data, 4)
        rounds = Counter[int]()
        idle = asyncio.Event()

        def on_done(tags: list[int]) -> None:
            for tag in tags:
                rounds[tag] += 1
                if rounds[tag] < 20:
                    reader.read(tag, rounds[tag] * 4096)
            reader.queue.submit()
            if not reader.queue.in_flight:
                idle.set()

        reader.queue.start(asyncio.get_running_loop(), on_done, reader.on_error)
        for tag in range(4):
            reader.read(tag)
        reader.queue.submit()
        await idle.wait()
        assert rounds == Counter(dict.fromkeys(range(4), 20))
        await reader.close()

    asyncio.run(scenario())


def test_misuse_is_told(data: Path) -> None:
    async def scenario() -> None:
        reader = Reader(NullBackend(4), data, 2)
        for need_bytes in (0, 4097):
            with pytest.raises(AssertionError, match="bytes into"):
                reader.read(0, need_bytes=need_bytes)
        reader.read(0)
        with pytest.raises(AssertionError, match="in flight already"):
            reader.read(0)
        with pytest.raises(RuntimeError, match="another consumer"):
            reader.queue.start(asyncio.get_running_loop(), reader.on_done, reader.on_error)
        with pytest.raises(ValueError, match="does not fit"):
            ReadQueue(NullBackend(1), 100, 1).add_file(reader.file)
        await reader.wait_idle()
        await reader.close()

    asyncio.run(scenario())
