"""Byte ranges of files, read once into memory of their own and found by file and offset afterwards.

Owns where each range lies and how it is loaded. Must not know what the ranges hold.
"""

from __future__ import annotations

import asyncio
import bisect
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Final, Self

from bmoe.io.anonymous_memory import AnonymousMemory
from bmoe.io.read_queue import ReadQueue

if TYPE_CHECKING:
    from types import TracebackType

    from bmoe.io.backend import ReadBackend
    from bmoe.io.errors import ReadError
    from bmoe.io.files import DirectFile

# (bytes that have arrived, bytes in all), counting what is really read.
OnProgress = Callable[[int, int], None]

# Reading a gap this small costs a drive less than a second read.
MERGE_GAP_BYTES: Final = 64 << 10
PIECE_BYTES: Final = 8 << 20
# Touched ahead of the reads in stretches of this size: reads start after a few ms, not after seconds.
_TOUCH_BYTES: Final = 32 << 20
_MAX_PIECES_IN_FLIGHT: Final = 8


class _Window:
    """One merged range: file bytes `[start, end)`, and the blocks around it in file and image."""

    __slots__ = ("end", "file_index", "image_offset", "start", "window_end", "window_start")

    def __init__(self, file_index: int, start: int, end: int) -> None:
        self.file_index = file_index
        self.start = start
        self.end = end
        self.window_start = self.window_end = self.image_offset = 0


class RangeImage:
    """An image of ranges of files in one anonymous mapping with huge pages.

    Ranges nearer than 64 KiB are merged. The window of whole blocks around each lands at a block
    boundary of the image, so direct reads need no copy.

    Args:
        files: The files; a range names one by its index here.
        ranges: `(file_index, start, end)`, half-open, in any order, touching and overlapping at will.

    Attributes:
        total_bytes: What `load` reads: the ranges and the gaps between merged ones, not the blocks'
            rims.

    Raises:
        ValueError: No range at all, or one that is empty or no part of its file.
        MemoryBudgetError: No address space for it.
    """

    def __init__(self, files: Sequence[DirectFile], ranges: Iterable[tuple[int, int, int]]) -> None:
        self._files = tuple(files)
        self._windows = _merged(self._files, ranges)
        if not self._windows:
            raise ValueError("an image of no ranges")
        size_bytes = 0
        for window in self._windows:
            block_bytes = self._files[window.file_index].block_bytes
            window.window_start = window.start - window.start % block_bytes
            window.window_end = window.end + -window.end % block_bytes
            size_bytes += -size_bytes % block_bytes
            window.image_offset = size_bytes
            size_bytes += window.window_end - window.window_start
        self.total_bytes: Final = sum(window.end - window.start for window in self._windows)
        self._keys = [(window.file_index, window.start) for window in self._windows]
        self._memory = AnonymousMemory(size_bytes)

    def address_of(self, file_index: int, offset_bytes: int) -> int:
        """Where the byte at `offset_bytes` of a file lies in memory.

        Raises:
            ValueError: It is in no range.
        """
        index = bisect.bisect_right(self._keys, (file_index, offset_bytes)) - 1
        window = self._windows[max(index, 0)]
        if window.file_index != file_index or not window.start <= offset_bytes < window.end:
            raise ValueError(f"byte {offset_bytes} of file {file_index} is in no range of the image")
        return self._memory.address + window.image_offset + offset_bytes - window.window_start

    def segments(self) -> list[tuple[int, int, int, int]]:
        """The merged ranges: `(file_index, start, end, address)`, by file and offset."""
        return [(w.file_index, w.start, w.end, self.address_of(w.file_index, w.start)) for w in self._windows]

    async def load(self, source: ReadBackend | ReadQueue, on_progress: OnProgress) -> None:
        """Read everything, at the drive's speed.

        Takes over an idle queue or backend for the time being; it is to be started anew for its next
        use. Memory is touched in a thread, ahead of the reads. The buffer is not registered: it is read
        into once, and locked memory is better spent on slots.

        Args:
            source: Where the reads go; idle, and left idle, also after an error.
            on_progress: Called as pieces arrive.

        Raises:
            ReadError: A file did not deliver; raised once nothing is in flight any more.
            MemoryBudgetError: No memory, likewise.
        """
        queue = source
        if not isinstance(queue, ReadQueue):
            queue = ReadQueue(queue, max(f.block_bytes for f in self._files), _MAX_PIECES_IN_FLIGHT)
        await _Load(self._files, self._windows, self._memory, queue, on_progress).run()

    def close(self) -> None:
        """Give the memory back; idempotent. Addresses handed out are invalid from now on."""
        self._memory.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _Load:
    """One run of `RangeImage.load`: pieces in image order, a bounded number in flight."""

    def __init__(
        self,
        files: Sequence[DirectFile],
        windows: Sequence[_Window],
        memory: AnonymousMemory,
        queue: ReadQueue,
        on_progress: OnProgress,
    ) -> None:
        self._memory = memory
        self._queue = queue
        self._on_progress = on_progress
        self._total_bytes = sum(window.end - window.start for window in windows)
        self._done_bytes = 0
        self._touched_bytes = 0
        self._error: ReadError | None = None
        self._woken = asyncio.Event()
        file_ids = [queue.add_file(file) for file in files]
        self._pieces = [
            (file_ids[window.file_index], *piece) for window in windows for piece in _pieces(window)
        ]
        slots = min(queue.capacity, _MAX_PIECES_IN_FLIGHT)
        self._free_tags = list(range(slots))
        self._useful_bytes = [0] * slots

    async def run(self) -> None:
        queue = self._queue
        queue.start(asyncio.get_running_loop(), self._on_done, self._on_error)
        buffer_id: int | None = None
        try:
            for file_id, offset_bytes, image_offset, length_bytes, need_bytes, useful_bytes in self._pieces:
                await self._touch(image_offset + length_bytes)
                while not self._free_tags and self._error is None:
                    await self._wait()
                if self._error is not None:
                    break
                if buffer_id is None:
                    buffer_id = queue.backend.add_buffer(self._memory.view, register=False)
                view = self._memory.view[image_offset : image_offset + length_bytes]
                tag = self._free_tags.pop()
                self._useful_bytes[tag] = useful_bytes
                queue.read(tag, file_id, offset_bytes, need_bytes, queue.backend.prepare(buffer_id, view))
                queue.submit()
        finally:
            # Also when this task is cancelled: the kernel writes until the last piece was reaped.
            while queue.in_flight:
                await self._wait()
        if self._error is not None:
            raise self._error

    async def _wait(self) -> None:
        self._woken.clear()
        await self._woken.wait()

    async def _touch(self, end_bytes: int) -> None:
        while self._touched_bytes < end_bytes:
            start = self._touched_bytes
            end = min(start + _TOUCH_BYTES, self._memory.view.nbytes)
            await asyncio.to_thread(self._memory.touch, start, end)
            self._touched_bytes = end

    def _on_done(self, tags: list[int]) -> None:
        for tag in tags:
            self._done_bytes += self._useful_bytes[tag]
        self._free_tags += tags
        self._woken.set()
        self._on_progress(self._done_bytes, self._total_bytes)

    def _on_error(self, tag: int, error: ReadError) -> None:
        self._free_tags.append(tag)
        self._error = self._error or error
        self._woken.set()


def _merged(files: Sequence[DirectFile], ranges: Iterable[tuple[int, int, int]]) -> list[_Window]:
    windows: list[_Window] = []
    for file_index, start, end in sorted(ranges):
        if not 0 <= file_index < len(files):
            raise ValueError(f"file {file_index} of {len(files)}")
        if not 0 <= start < end <= files[file_index].size_bytes:
            raise ValueError(f"bytes [{start}, {end}) are no range of {files[file_index]!r}")
        last = windows[-1] if windows else None
        if last is not None and last.file_index == file_index and start - last.end < MERGE_GAP_BYTES:
            last.end = max(last.end, end)
        else:
            windows.append(_Window(file_index, start, end))
    return windows


def _pieces(window: _Window) -> Iterable[tuple[int, int, int, int, int]]:
    """`(offset_bytes, image_offset, length_bytes, need_bytes, useful_bytes)` of each read of a window."""
    for start in range(window.window_start, window.window_end, PIECE_BYTES):
        end = min(start + PIECE_BYTES, window.window_end)
        need_bytes = min(end, window.end) - start
        useful_bytes = min(end, window.end) - max(start, window.start)
        yield start, window.image_offset + start - window.window_start, end - start, need_bytes, useful_bytes
