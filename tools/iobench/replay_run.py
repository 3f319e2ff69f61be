"""The misses of a replayed run, really read, with the barrier between layers that the engine has.

Owns the timing. Must not know traces or caches: it gets lists of experts and their places.

What lies inside the timing window of a layer: from queueing its first read to the callback that brings
the last. As in the engine the first projection of all missed experts is handed over first, then the
others, and the next layer asks for nothing before this one has everything. Nothing else lies inside: no
compute, no choice of victims, no work between layers.
"""

from __future__ import annotations

import asyncio
import gc
from collections import deque
from dataclasses import dataclass
from time import perf_counter_ns
from typing import TYPE_CHECKING, Final

from bmoe.io import ReadQueue, SlotMemory, open_backend
from bmoe.tools.iobench.measure import open_buffers, slot_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from bmoe.io import DirectFile, Target
    from bmoe.tools.iobench.lanes import Window
    from bmoe.tools.iobench.measure import BackendName
    from bmoe.tools.iobench.replay import ReplayPlan

# More targets than this only matter to prefill, which asks for hundreds of slices at once.
_MAX_SLOTS: Final = 128
_SLOT_BUDGET_BYTES: Final = 256 << 20
_STEPS_PER_REPORT: Final = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplaySample:
    """What one replay gave.

    Attributes:
        token_ns: I/O time of each decoded token, the sum over its layers.
        decode_bytes: Aligned windows read for them.
        prefill_ns: I/O time before.
        prefill_bytes: Aligned windows read then.
        registered: Into registered buffers.
    """

    token_ns: list[int]
    decode_bytes: int
    prefill_ns: int
    prefill_bytes: int
    registered: bool


async def replay(
    files: Sequence[DirectFile],
    entries: Sequence[tuple[Window, ...]],
    plan: ReplayPlan,
    *,
    backend: BackendName,
    queue_depth: int,
    register: bool,
    on_step: Callable[[int], None],
) -> ReplaySample:
    """Read a plan's misses.

    Args:
        files: By the index in the windows.
        entries: The windows of each expert.
        plan: What to read.
        backend: What reads.
        queue_depth: Reads in flight at most.
        register: Register the buffers with the kernel.
        on_step: Called now and then with the number of layers done.

    Raises:
        ReadError: The file did not deliver.
        BackendError: The backend does not work here.
        MemoryBudgetError: No memory for the buffers.
    """
    longest = max(length for entry in entries for _, _, length in entry)
    size = slot_bytes(longest, files)
    slots = max(min(queue_depth, _MAX_SLOTS), min(_MAX_SLOTS, _SLOT_BUDGET_BYTES // size))
    reader = open_backend(backend, queue_depth)
    queue = ReadQueue(reader, max(file.block_bytes for file in files), slots)
    with SlotMemory(size, slots) as memory:
        try:
            file_ids = [queue.add_file(file) for file in files]
            buffers = await open_buffers(reader, memory, register=register)
            run = _Replay(
                files,
                file_ids,
                entries,
                plan,
                queue=queue,
                memory=memory,
                buffers=buffers,
                on_step=on_step,
            )
            await run.run()
        finally:
            await queue.aclose()
    return ReplaySample(
        token_ns=run.token_ns,
        decode_bytes=run.decode_bytes,
        prefill_ns=run.prefill_ns,
        prefill_bytes=run.prefill_bytes,
        registered=register and reader.registered,
    )


class _Replay:
    """One layer after the other; everything happens in the queue's callback."""

    def __init__(
        self,
        files: Sequence[DirectFile],
        file_ids: Sequence[int],
        entries: Sequence[tuple[Window, ...]],
        plan: ReplayPlan,
        *,
        queue: ReadQueue,
        memory: SlotMemory,
        buffers: Sequence[int],
        on_step: Callable[[int], None],
    ) -> None:
        self.token_ns = [0] * plan.tokens
        self.decode_bytes = self.prefill_ns = self.prefill_bytes = 0
        self._sizes = [file.size_bytes for file in files]
        self._file_ids = file_ids
        self._entries = entries
        self._steps = plan.steps
        self._step = 0
        self._queue = queue
        self._memory = memory
        self._buffers = buffers
        self._on_step = on_step
        self._targets: list[dict[int, Target]] = [{} for _ in range(memory.slots)]
        self._free = list(range(memory.slots))
        self._pending: deque[list[Window]] = deque()  # by projection
        self._started_ns = 0
        self._error: Exception | None = None
        self._over = asyncio.Event()

    async def run(self) -> None:
        """Until everything is read and nothing in flight."""
        self._queue.start(asyncio.get_running_loop(), self._on_done, self._on_error)
        gc.collect()
        self._next_layer()
        await self._over.wait()
        if self._error is not None:
            raise self._error

    def _next_layer(self) -> None:
        if self._step == len(self._steps):
            self._over.set()
            return
        experts = [self._entries[entry] for entry in self._steps[self._step].entries]
        projections = max(map(len, experts))
        self._pending.extend([e[p] for e in experts if p < len(e)] for p in range(projections))
        self._started_ns = perf_counter_ns()
        self._pump()

    def _pump(self) -> None:
        """Hand over what there are targets for, one projection at a time."""
        while self._pending and self._free:
            windows = self._pending[0]
            now, later = windows[: len(self._free)], windows[len(self._free) :]
            if later:
                self._pending[0] = later
            else:
                self._pending.popleft()
            slots = self._free[-len(now) :]
            del self._free[-len(now) :]
            places = [
                (self._file_ids[file], offset, min(length, self._sizes[file] - offset))
                for file, offset, length in now
            ]
            targets = [self._target(slot, w[2]) for slot, w in zip(slots, now, strict=True)]
            self._queue.read_many(slots, places, targets)
            self._queue.submit()
            read_bytes = sum(need for _, _, need in places)
            if self._steps[self._step].token is None:
                self.prefill_bytes += read_bytes
            else:
                self.decode_bytes += read_bytes

    def _target(self, slot: int, length: int) -> Target:
        target = self._targets[slot].get(length)
        if target is None:
            view = self._memory.slot_view(slot)[:length]
            target = self._queue.backend.prepare(self._buffers[slot], view)
            self._targets[slot][length] = target
        return target

    def _on_done(self, slots: list[int]) -> None:
        now = perf_counter_ns()
        self._free += slots
        if self._error is not None:
            if not self._queue.in_flight:
                self._over.set()
            return
        try:
            if self._pending:
                self._pump()
            elif not self._queue.in_flight:
                self._layer_done(now - self._started_ns)
        except Exception as bug:  # noqa: BLE001 (raised by `run`: an event loop would only log it)
            self._on_error(-1, bug)

    def _layer_done(self, took_ns: int) -> None:
        token = self._steps[self._step].token
        if token is None:
            self.prefill_ns += took_ns
        else:
            self.token_ns[token] += took_ns
        self._step += 1
        if self._step % _STEPS_PER_REPORT == 0:
            self._on_step(self._step)
        self._next_layer()

    def _on_error(self, slot: int, error: Exception) -> None:  # noqa: ARG002 (the error says where)
        self._error = self._error or error
        self._pending.clear()
        if not self._queue.in_flight:
            self._over.set()
