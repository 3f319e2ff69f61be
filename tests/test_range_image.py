"""`bmoe.io.range_image`: what is loaded lies where it is said to lie, and holds what the files hold."""

from __future__ import annotations

import asyncio
import ctypes
import errno
import itertools
import os
from typing import TYPE_CHECKING, Any

import pytest
import uvloop
from hypothesis import given, settings
from hypothesis import strategies as st

from bmoe.io import DirectFile, NullBackend, RangeImage, ReadQueue, open_backend
from bmoe.io import range_image as module
from bmoe.io.errors import ReadError
from bmoe.io.testing import Fault, FaultyBackend

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterator
    from pathlib import Path

    Run = Callable[[Coroutine[Any, Any, None]], None]

SIZES_BYTES = ((2 << 20) + 333, 700_001)


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("images")
    made = [folder / f"{index}.bin" for index in range(len(SIZES_BYTES))]
    for path, size_bytes in zip(made, SIZES_BYTES, strict=True):
        path.write_bytes(os.urandom(size_bytes))
    return made


@pytest.fixture(scope="module")
def files(paths: list[Path]) -> Iterator[list[DirectFile]]:
    opened = [DirectFile.open(str(path)) for path in paths]
    yield opened
    for file in opened:
        file.close()


@pytest.fixture(scope="module")
def contents(paths: list[Path]) -> list[bytes]:
    return [path.read_bytes() for path in paths]


@pytest.fixture(params=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> Run:
    """Runs a coroutine on each kind of loop."""
    return asyncio.run if request.param == "asyncio" else uvloop.run


def ignore(done_bytes: int, total_bytes: int) -> None:
    del done_bytes, total_bytes


@st.composite
def file_ranges(draw: st.DrawFn) -> tuple[int, int, int]:
    file_index = draw(st.integers(0, len(SIZES_BYTES) - 1))
    start = draw(st.integers(0, SIZES_BYTES[file_index] - 1))
    end = draw(st.integers(start + 1, SIZES_BYTES[file_index]))
    return file_index, start, min(end, start + draw(st.sampled_from([1, 5000, 300_000, 1 << 30])))


@given(ranges=st.lists(file_ranges(), min_size=1, max_size=12))
@settings(max_examples=25, deadline=None)
def test_every_byte_of_every_range_is_where_it_is_said_to_be(
    files: list[DirectFile], contents: list[bytes], ranges: list[tuple[int, int, int]]
) -> None:
    async def scenario() -> None:
        backend = open_backend("auto", 8)
        with RangeImage(files, ranges) as image:
            told: list[tuple[int, int]] = []
            await image.load(backend, lambda *progress: told.append(progress))
            for file_index, start, end in ranges:
                expected = contents[file_index][start:end]
                assert ctypes.string_at(image.address_of(file_index, start), end - start) == expected
                assert image.address_of(file_index, end - 1) == image.address_of(file_index, start) + (
                    end - start - 1
                )
            segments = image.segments()
            for file_index, start, end, address in segments:
                assert ctypes.string_at(address, end - start) == contents[file_index][start:end]
                assert (address - start) % files[file_index].block_bytes == 0
            for left, right in itertools.pairwise(segments):
                assert left[0] < right[0] or right[1] - left[2] >= module.MERGE_GAP_BYTES
            assert image.total_bytes == sum(end - start for _, start, end, _ in segments)
            assert told[-1] == (image.total_bytes, image.total_bytes)
            assert told == sorted(told)
            await backend.aclose()

    uvloop.run(scenario())


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PIECE_BYTES", 128 << 10)
    monkeypatch.setattr(module, "_TOUCH_BYTES", 200_000)


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("choice", ["auto", "threads"])
@pytest.mark.parametrize("capacity", [1, 64])
def test_loads_in_pieces_over_any_queue(
    run: Run, files: list[DirectFile], contents: list[bytes], choice: Any, capacity: int
) -> None:

    async def scenario() -> None:
        queue = ReadQueue(open_backend(choice, 8), 4096, capacity)
        with RangeImage(files, [(0, 777, SIZES_BYTES[0]), (1, 0, 1)]) as image:
            await image.load(queue, ignore)
            assert ctypes.string_at(image.address_of(0, 777), SIZES_BYTES[0] - 777) == contents[0][777:]
            assert queue.in_flight == 0
            assert queue.statistics().backend.reads >= 17
            await image.load(queue, ignore)  # the queue is as good as new
            await queue.aclose()

    run(scenario())


def test_addresses_outside_are_refused(files: list[DirectFile]) -> None:
    with RangeImage(files, [(0, 100, 200), (0, 500_000, 500_001), (1, 10, 20)]) as image:
        assert image.address_of(0, 199) - image.address_of(0, 100) == 99
        for file_index, offset_bytes in (
            (0, 99),
            (0, 200),
            (0, 499_999),
            (0, 500_001),
            (1, 9),
            (1, 20),
            (2, 0),
        ):
            with pytest.raises(ValueError, match="is in no range"):
                image.address_of(file_index, offset_bytes)


@pytest.mark.parametrize(
    "ranges",
    [[], [(0, 5, 5)], [(0, 6, 5)], [(0, -1, 5)], [(0, 0, SIZES_BYTES[0] + 1)], [(2, 0, 1)], [(-1, 0, 1)]],
)
def test_refuses_ranges_that_are_none(files: list[DirectFile], ranges: list[tuple[int, int, int]]) -> None:
    with pytest.raises(ValueError, match=r"range|file"):
        RangeImage(files, ranges)


@pytest.mark.usefixtures("small_pieces")
def test_failed_piece_is_raised_when_nothing_is_in_flight_any_more(run: Run, files: list[DirectFile]) -> None:
    async def scenario() -> None:
        backend = FaultyBackend(open_backend("auto", 4), {3: Fault(errno=errno.EIO), 2: Fault(after_reads=1)})
        with RangeImage(files, [(0, 0, SIZES_BYTES[0])]) as image:
            with pytest.raises(ReadError, match="at byte 393216: the drive reports a read error"):
                await image.load(backend, ignore)
            assert backend.in_flight == 0
            await backend.aclose()

    run(scenario())


def test_cancelled_load_leaves_nothing_in_flight(files: list[DirectFile]) -> None:
    async def scenario() -> None:
        backend = FaultyBackend(open_backend("auto", 4), {0: Fault(hold=True)})
        with RangeImage(files, [(0, 0, SIZES_BYTES[0])]) as image:
            task = asyncio.create_task(image.load(backend, ignore))
            loop = asyncio.get_running_loop()

            def interrupt() -> None:
                if backend.held:
                    task.cancel()
                    loop.call_soon(backend.release)
                else:
                    loop.call_soon(interrupt)

            interrupt()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert backend.in_flight == 0
            await backend.aclose()

    asyncio.run(scenario())


def test_close_is_idempotent_and_works_after_a_load(files: list[DirectFile]) -> None:
    async def scenario() -> None:
        backend = NullBackend(4)
        image = RangeImage(files, [(0, 0, 1000)])
        await image.load(backend, ignore)
        image.close()
        image.close()
        await backend.aclose()

    asyncio.run(scenario())
