"""Reads that do not read: exists to test what sits above, and to measure it without a drive.

Owns nothing but the bookkeeping it shares with the real backends.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from bmoe.io.eventfd_backend import EventfdBackend

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bmoe.io.backend import Place, Target

# (file_id, offset_bytes, view) -> bytes put into view, or -errno.
Source = Callable[[int, int, memoryview], int]


class NullBackend(EventfdBackend):
    """`ReadBackend` that completes every read at the next turn of the loop, in order.

    Args:
        queue_depth: As for the others.
        source: Fills the targets; without one they stay untouched and every read is a full one.
    """

    name: Final = "null"

    def __init__(self, queue_depth: int, *, source: Source | None = None) -> None:
        super().__init__(queue_depth)
        self._source = source
        self._put_reads: list[tuple[int, int, Target, int]] = []
        self._handed_over: list[tuple[int, int, Target, int]] = []

    def _put_many(self, tags: Sequence[int], places: Sequence[Place], targets: Sequence[Target]) -> None:
        for tag, (file_id, offset_bytes, _), target in zip(tags, places, targets, strict=True):
            self._put_reads.append((file_id, offset_bytes, target, tag))

    def _hand_over(self) -> None:
        self._handed_over += self._put_reads
        self._put_reads.clear()
        self._queued = 0
        self._submissions += 1
        os.eventfd_write(self._eventfd, 1)

    def _collect(self, tags: list[int], results: list[int]) -> None:
        source = self._source
        for file_id, offset_bytes, target, tag in self._handed_over:
            tags.append(tag)
            view = target.view
            results.append(view.nbytes if source is None else source(file_id, offset_bytes, view))
        self._handed_over.clear()
