"""Public fakes for the tests of whatever reads: a backend that fails on cue.

Owns the faults. Must not know which backend does the real work.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Mapping, Sequence

    from bmoe.io.backend import BackendStatistics, OnComplete, Place, ReadBackend, Target
    from bmoe.io.files import DirectFile


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """What goes wrong with one read.

    Attributes:
        errno: Complete with `-errno`, whatever was read.
        short_bytes: Complete with at most this many bytes.
        after_reads: Keep the completion back until so many reads accepted later have completed.
        hold: Keep the completion back until `FaultyBackend.release`.
    """

    errno: int | None = None
    short_bytes: int | None = None
    after_reads: int = 0
    hold: bool = False


@dataclass(slots=True)
class _Held:
    tag: int
    result: int
    index: int
    fault: Fault
    later_completions: int = 0


class FaultyBackend:
    """A `ReadBackend` around another one, with faults by the index of the read.

    Every read is really made; the faults change what is told of it and when.

    Args:
        inner: Does the work.
        script: Faults by read index: the first read accepted is 0, the next 1, and so on.
        every: The fault of all reads that the script does not name.
    """

    def __init__(
        self, inner: ReadBackend, script: Mapping[int, Fault], *, every: Fault | None = None
    ) -> None:
        self.inner = inner
        self.script = script
        self.every = every
        self.name = inner.name
        self.queue_depth = inner.queue_depth
        self._on_complete: OnComplete | None = None
        self._index = 0
        self._indices: dict[int, int] = {}  # by tag
        self._held: list[_Held] = []
        self._released = False

    @property
    def registered(self) -> bool:
        """As the inner backend's."""
        return self.inner.registered

    @property
    def unregistered_reason(self) -> str | None:
        """As the inner backend's."""
        return self.inner.unregistered_reason

    @property
    def fallback_reason(self) -> str | None:
        """As the inner backend's."""
        return self.inner.fallback_reason

    @property
    def in_flight(self) -> int:
        """Those of the inner backend, and the completions held back."""
        return self.inner.in_flight + len(self._held)

    @property
    def held(self) -> list[int]:
        """Tags of the completions held back, oldest first."""
        return [held.tag for held in self._held]

    def release(self) -> None:
        """Deliver everything held back, and hold nothing back from now on."""
        self._released = True
        held, self._held = self._held, []
        self._deliver([entry.tag for entry in held], [entry.result for entry in held])

    def start(self, loop: asyncio.AbstractEventLoop, on_complete: OnComplete) -> None:
        """As the inner backend's."""
        self._on_complete = on_complete
        self.inner.start(loop, self._complete)

    def add_file(self, file: DirectFile) -> int:
        """As the inner backend's."""
        return self.inner.add_file(file)

    def file(self, file_id: int) -> DirectFile:
        """As the inner backend's."""
        return self.inner.file(file_id)

    def add_buffer(self, view: memoryview, *, register: bool = True) -> int:
        """As the inner backend's."""
        return self.inner.add_buffer(view, register=register)

    def remove_buffer(self, buffer_id: int) -> None:
        """As the backend's."""
        self.inner.remove_buffer(buffer_id)

    def prepare(self, buffer_id: int, view: memoryview) -> Target:
        """As the inner backend's."""
        return self.inner.prepare(buffer_id, view)

    def read(self, file_id: int, offset_bytes: int, target: Target, tag: int) -> None:
        """As the inner backend's."""
        self._indices[tag] = self._index
        self._index += 1
        self.inner.read(file_id, offset_bytes, target, tag)

    def read_many(self, tags: Sequence[int], places: Sequence[Place], targets: Sequence[Target]) -> None:
        """As the inner backend's."""
        for tag, (file_id, offset_bytes, _), target in zip(tags, places, targets, strict=True):
            self.read(file_id, offset_bytes, target, tag)

    def submit(self) -> None:
        """As the inner backend's."""
        self.inner.submit()

    async def aclose(self) -> None:
        """Close the inner backend, then deliver what is still held back."""
        await self.inner.aclose()
        self.release()

    def statistics(self) -> BackendStatistics:
        """Those of the inner backend: the truth behind the faults."""
        return self.inner.statistics()

    def _complete(self, tags: list[int], results: list[int]) -> None:
        told_tags: list[int] = []
        told_results: list[int] = []
        for tag, result in zip(tags, results, strict=True):
            index = self._indices.pop(tag)
            for held in self._held:
                held.later_completions += held.index < index
            fault = self.script.get(index, self.every)
            told = result if fault is None else _told(fault, result)
            if fault is not None and not self._released and (fault.hold or fault.after_reads):
                self._held.append(_Held(tag, told, index, fault))
            else:
                told_tags.append(tag)
                told_results.append(told)
        due = [e for e in self._held if not e.fault.hold and e.later_completions >= e.fault.after_reads]
        self._held = [entry for entry in self._held if entry not in due]
        told_tags += [entry.tag for entry in due]
        told_results += [entry.result for entry in due]
        self._deliver(told_tags, told_results)

    def _deliver(self, tags: list[int], results: list[int]) -> None:
        if tags and self._on_complete is not None:
            self._on_complete(tags, results)


def _told(fault: Fault, result: int) -> int:
    if fault.errno is not None:
        return -fault.errno
    return result if fault.short_bytes is None else min(result, fault.short_bytes)
