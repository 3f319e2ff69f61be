"""Which bytes are read: the deterministic walk of each lane over a file, and the shapes of a read.

Owns offsets. Must not know how a read is made, timed or counted.

A lane is one chain of reads, one in flight at a time. Lane L draws from a 64-bit linear congruential
generator that starts at L + 1, so it visits the same offsets in every run, whatever the other lanes do.
"""

from __future__ import annotations

import mmap
from typing import TYPE_CHECKING, Final, Protocol

from bmoe.io.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bmoe.io.files import DirectFile
    from bmoe.tools.iobench.experts import ExpertLayout

_MULTIPLIER: Final = 6364136223846793005
_INCREMENT: Final = 1442695040888963407
_MASK: Final = (1 << 64) - 1
_KIB: Final = 1 << 10

# (file index, offset, length): a window of whole blocks. The last one of a file may reach past its end.
Window = tuple[int, int, int]


class LaneRandom:
    """The generator of one lane.

    Args:
        lane: Its number, from 0.
    """

    __slots__ = ("_state",)

    def __init__(self, lane: int) -> None:
        self._state = lane + 1

    def draw(self) -> int:
        """The next 48 bits."""
        self._state = (self._state * _MULTIPLIER + _INCREMENT) & _MASK
        return self._state >> 16


class Walk(Protocol):
    """Where the lanes of one row go.

    Attributes:
        max_window_bytes: No window is longer.
        logical_bytes: Of one logical read: what it asks for, without rounding. A mean, if they differ.
        pieces: Reads that one logical read is made of.
    """

    max_window_bytes: int
    logical_bytes: int
    pieces: int

    def next(self, lane: int) -> Window:
        """What that lane reads next."""


class RandomWalk:
    """Logical reads of one size at random places, each in equal pieces at independent offsets.

    Args:
        file: What is read.
        read_bytes: Of a logical read.
        pieces: How many reads it is split into. A piece is rounded up to whole pages.
        lanes: How many.

    Raises:
        UsageError: The file is too small for windows of that size.
    """

    def __init__(self, file: DirectFile, read_bytes: int, pieces: int, lanes: int) -> None:
        align = max(mmap.PAGESIZE, file.block_bytes)
        self.max_window_bytes: int = -(-read_bytes // (pieces * align)) * align
        self.logical_bytes: int = read_bytes
        self.pieces: int = pieces
        self._align_bytes = align
        self._span_bytes = file.size_bytes - 2 * self.max_window_bytes
        if self._span_bytes <= 0:
            raise UsageError(
                f"{file.path} has {file.size_bytes} bytes, too few for reads of "
                f"{self.max_window_bytes // _KIB} KiB at random places",
                hint="a larger file, or a smaller --slice-kb",
            )
        self._random = [LaneRandom(lane) for lane in range(lanes)]

    def next(self, lane: int) -> Window:
        """See `Walk.next`."""
        offset = self._random[lane].draw() % self._span_bytes
        return 0, offset - offset % self._align_bytes, self.max_window_bytes


class ExpertWalk:
    """Experts at random, each with all its slices, projection by projection, where they lie.

    Args:
        files: The model's files, in order.
        layout: Its experts.
        lanes: How many.
    """

    def __init__(self, files: Sequence[DirectFile], layout: ExpertLayout, lanes: int) -> None:
        blocks = [file.block_bytes for file in files]
        self._windows = [[window(slice_, blocks) for slice_ in e] for e in layout.entries]
        self.max_window_bytes: int = max(w[2] for entry in self._windows for w in entry)
        self.logical_bytes: int = layout.expert_bytes // len(layout.entries)
        self.pieces: int = max(len(entry) for entry in self._windows)
        self._random = [LaneRandom(lane) for lane in range(lanes)]
        self._left: list[list[Window]] = [[] for _ in range(lanes)]

    def next(self, lane: int) -> Window:
        """See `Walk.next`."""
        left = self._left[lane]
        if not left:
            left.extend(reversed(self._windows[self._random[lane].draw() % len(self._windows)]))
        return left.pop()


def window(slice_: tuple[int, int, int], blocks: Sequence[int]) -> Window:
    """The whole blocks around a slice `(file index, offset, length)`.

    Args:
        slice_: Any bytes of a file.
        blocks: Block size of each file.
    """
    file_index, offset_bytes, length_bytes = slice_
    block = blocks[file_index]
    start = offset_bytes - offset_bytes % block
    return file_index, start, -(-(offset_bytes + length_bytes) // block) * block - start
