"""What the model's drive gives to the engine's reads: its bandwidth, and bursts as layers make them.

Owns the bursts; the bandwidth is measured by bmoe-iobench's code, with experts read where they lie. Must not
know what the bounds make of it.

A layer asks for a few slices at once and waits for all of them, so what its reads take is not their bytes
over the bandwidth of a deep queue. A burst is that pattern alone: N slices at random places, handed over
together, timed from then to the callback that brings the last one, on a drive that is otherwise idle.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import statistics
import time
from typing import TYPE_CHECKING, Any, Final

from bmoe.io import DirectFile, ReadQueue, SlotMemory, open_backend
from bmoe.io.errors import UsageError
from bmoe.tools.iobench.burners import Burners
from bmoe.tools.iobench.experts import ExpertLayout, read_layout
from bmoe.tools.iobench.lanes import ExpertWalk
from bmoe.tools.iobench.measure import measure, open_buffers, slot_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bmoe.io import BackendChoice
    from bmoe.tools.iobench.measure import BackendName

BURSTS: Final = (1, 2, 3, 4, 6, 9, 12, 16, 24, 32)
_DEPTH: Final = 32
_REPEATS: Final = 15
_CPU_BURSTS: Final = 50
_CPU_BURST: Final = 12
_MIB: Final = 1 << 20
_SEED: Final = 1


async def measure_drive(path: str, backend: BackendChoice, *, seconds: float) -> dict[str, Any]:
    """Bandwidth with 32 reads in flight, and the time of bursts.

    Args:
        path: The model.
        backend: As in SessionConfig.
        seconds: For the bandwidth.

    Raises:
        UsageError: The model has no experts.
        BmoeError: It cannot be read.
    """
    layout = read_layout(path)
    if layout is None:
        raise UsageError(f"{path} has no experts to read")
    with contextlib.ExitStack() as stack:
        files = [stack.enter_context(DirectFile.open(p)) for p in layout.paths]
        chosen = open_backend(backend, 1)
        await chosen.aclose()
        name: BackendName = "uring" if chosen.name == "uring" else "threads"
        with Burners(0) as none:
            sample = await measure(
                files,
                ExpertWalk(files, layout, _DEPTH),
                backend=name,
                lanes=_DEPTH,
                seconds=seconds,
                burners=none,
                register=True,
            )
        bursts = _Bursts(files, layout, name)
        try:
            await bursts.open()
            burst_s = {n: statistics.median([await bursts.run(n) for _ in range(_REPEATS)]) for n in BURSTS}
            cpu0 = time.process_time()
            for _ in range(_CPU_BURSTS):
                await bursts.run(_CPU_BURST)
            burst_cpu_s = time.process_time() - cpu0
        finally:
            await bursts.aclose()
    cpu_us = (sample.cpu_user_ns + sample.cpu_system_ns) / 1e3
    return {
        "drive_gib_per_s": sample.bytes_per_s / (1 << 30),
        "drive_cpu_us_per_mib": cpu_us / (sample.window_bytes / _MIB),
        "read_bytes": layout.slice_bytes,
        "depth": _DEPTH,
        "backend": name,
        "direct": sample.direct,
        "registered": sample.registered,
        "burst_s": {str(n): value for n, value in burst_s.items()},
        "burst_cpu_us_per_mib": burst_cpu_s * 1e6 / (_CPU_BURSTS * _CPU_BURST * layout.slice_bytes / _MIB),
    }


class _Bursts:
    """Reads of slices, N at a time."""

    def __init__(self, files: Sequence[DirectFile], layout: ExpertLayout, backend: BackendName) -> None:
        self._files = files
        self._slices = [slice_ for entry in layout.entries for slice_ in entry]
        self._choose = random.Random(_SEED)  # noqa: S311 (places, not secrets)
        self._backend = open_backend(backend, _DEPTH)
        blocks = max(file.block_bytes for file in files)
        size = slot_bytes(max(length for _, _, length in self._slices) + blocks, files)
        self._memory = SlotMemory(size, _DEPTH)
        self._queue = ReadQueue(self._backend, blocks, _DEPTH)
        self._left = 0
        self._done: asyncio.Future[None]

    async def open(self) -> None:
        """Memory and files."""
        self._file_ids = [self._queue.add_file(file) for file in self._files]
        buffers = await open_buffers(self._backend, self._memory, register=True)
        self._targets = [self._backend.prepare(buffers[i], self._memory.slot_view(i)) for i in range(_DEPTH)]
        self._queue.start(asyncio.get_running_loop(), self._on_done, self._on_error)

    async def run(self, reads: int) -> float:
        """Seconds that a burst of so many reads takes."""
        places = []
        for file, offset, length in self._choose.sample(self._slices, min(reads, len(self._slices))):
            start = offset - offset % self._files[file].block_bytes
            end = min(offset + length, self._files[file].size_bytes)
            places.append((self._file_ids[file], start, end - start))
        tags = list(range(len(places)))
        self._left = len(places)
        self._done = asyncio.get_running_loop().create_future()
        t0 = time.monotonic()
        self._queue.read_many(tags, places, self._targets[: len(places)])
        self._queue.submit()
        await self._done
        return time.monotonic() - t0

    def _on_done(self, tags: Sequence[int]) -> None:
        self._left -= len(tags)
        if not self._left:
            self._done.set_result(None)

    def _on_error(self, _: int, error: Exception) -> None:
        if not self._done.done():
            self._done.set_exception(error)

    async def aclose(self) -> None:
        """Frees all."""
        await self._queue.aclose()
        self._memory.close()
