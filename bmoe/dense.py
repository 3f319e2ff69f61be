"""Where the weights that are no experts are kept, and how they get there.

It owns the modes of `--dense-weights` and the memory behind them. It must not know tokens, slots or how the
graph is changed: `segments` say what lies where, and the native side points tensors there.

    anon     read by our own direct reads into anonymous memory with huge pages
    locked   the same, and the kernel may never take it back
    repack   matrices in llama.cpp's repacked layouts, the rest as anon: other kernels, other rounding
    mmap     left in llama.cpp's mapping, read page by page as they are touched
    warm     left in the mapping, which is read once from end to end
"""

from __future__ import annotations

import asyncio
import ctypes
import os
from functools import partial
from typing import TYPE_CHECKING, Final

from bmoe.io.errors import MemoryBudgetError
from bmoe.io.memory_figures import memlock_limit_bytes
from bmoe.io.range_image import MERGE_GAP_BYTES, RangeImage
from bmoe.pipeline.dense_memory import Matrix, RepackedWeights, Residency, warm
from bmoe.pipeline.native import Segment, lib

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from bmoe.config import DenseMode
    from bmoe.gguf_file import TensorFacts
    from bmoe.io.files import DirectFile
    from bmoe.io.read_queue import ReadQueue
    from bmoe.model import ModelLayout
    from bmoe.pipeline.native import Engine

    OnProgress = Callable[[int, int], None]
    Range = tuple[int, int, int]

# Rows are looked up in it, which needs the plain layout, whatever else is done with it.
_LOOKED_UP: Final = "token_embd.weight"
_OUTPUT: Final = "output.weight"
# Read and repacked at a time: plain bytes that exist beside their copies.
_BATCH_BYTES: Final = 64 << 20
_MAX_WORKERS: Final = 4
_WARM_BYTES: Final = 8 << 20
_PAGE_BYTES: Final = os.sysconf("SC_PAGESIZE")
_MLOCK_ONFAULT: Final = 1

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mlock2.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint)
_libc.munlock.argtypes = (ctypes.c_void_p, ctypes.c_size_t)


class DenseWeights:
    """The dense weights of one model under one mode. Made, then `load`ed, then `attach`ed.

    Args:
        mode: One of the above.
        layout: The model.
        files: Its files, in order.

    Attributes:
        mode: As given.
        note: What else is to be said of it, or None.
        bytes: Memory of its own that they take; 0 where they stay in the mapping.
        total_bytes: What `load` reads.
        repacked: The repacked copies, or None.

    Raises:
        MemoryBudgetError: No memory, or not as much may be locked: said before anything is read.
        SeamError: Repacking is wanted and this ggml cannot.
    """

    def __init__(self, mode: DenseMode, layout: ModelLayout, files: Sequence[DirectFile]) -> None:
        self.mode: Final = mode
        self.note: str | None = None
        self.repacked: RepackedWeights | None = None
        self._files = files
        self._ranges: Sequence[Range] = layout.dense
        self._image: RangeImage | None = None
        self._locked: tuple[int, int] | None = None
        self._residency: Residency | None = None
        self._matrices: tuple[Matrix, ...] = ()
        plain = list(layout.dense)
        try:
            if mode == "repack":
                self._matrices = repackable(layout)
                self.repacked = RepackedWeights(self._matrices)
                taken = [self._matrices[i] for i in self.repacked.taken]
                if not taken:
                    self.note = "llama.cpp has no repacked layout for any of the dense weights on this CPU"
                moved = {(m.file, m.offset_bytes) for m in taken if m.name != _LOOKED_UP}
                plain = [r for r in plain if r[:2] not in moved]
            if plain and mode in {"anon", "locked", "repack"}:
                self._image = RangeImage(files, plain)
            if mode == "locked":
                self._lock()
        except BaseException:
            self.close()
            raise
        image_bytes = self._image.total_bytes if self._image else 0
        self.bytes: Final = image_bytes + (self.repacked.bytes if self.repacked else 0)
        if mode in {"mmap", "warm"}:
            self.total_bytes = layout.dense_bytes if mode == "warm" else 0
        else:
            copied = [self._matrices[i] for i in self.repacked.taken] if self.repacked else []
            self.total_bytes = image_bytes + sum(m.size_bytes for m in copied if m.name != _LOOKED_UP)

    @property
    def segments(self) -> list[tuple[int, int, int, int]]:
        """`(file, start, end, address)` of what tensors are to be pointed to, by file and offset."""
        return self._image.segments() if self._image else []

    async def load(
        self, queue: ReadQueue, mappings: Mapping[int, tuple[int, int]], on_progress: OnProgress
    ) -> None:
        """Brings the weights to where the mode keeps them.

        Args:
            queue: For reads; idle, and left idle.
            mappings: By file: where llama.cpp has its first byte, and the length of the mapping.
            on_progress: Called with (bytes done, bytes in all).

        Raises:
            ReadError: A read failed.
            MemoryBudgetError: No memory.
        """
        done = 0

        def progress(part_bytes: int, _: int) -> None:
            on_progress(min(done + part_bytes, self.total_bytes), self.total_bytes)

        if self._image:
            await self._image.load(queue, progress)
            done = self._image.total_bytes
        if self.repacked:
            for batch in self._batches(self.repacked.taken):
                done += await self._repack(self.repacked, batch, queue, progress)
            if tied := [i for i in self.repacked.taken if self._matrices[i].name == _LOOKED_UP]:
                await _in_threads([partial(self._repack_tied, self.repacked, tied[0])])
        spans = list(self._mapped(mappings)) if self.mode in {"mmap", "warm"} else self._own_spans()
        if self.mode == "warm":
            for address, length in spans:
                for start in range(0, length, _WARM_BYTES):
                    size_bytes = min(_WARM_BYTES, length - start)
                    await _in_threads([partial(warm, address + start, size_bytes)])
                    done += size_bytes
                    progress(0, 0)
        if self._image or self.repacked or all(map(_pages_are_told, self._files)):
            self._residency = Residency(spans)

    def attach(self, engine: Engine) -> None:
        """Has an engine's graphs use what was loaded. It knows the mappings; no batch runs yet."""
        segments = self.segments
        array = (Segment * max(len(segments), 1))()
        for i, (file, start, end, address) in enumerate(segments):
            array[i] = Segment(start=start, end=end, file=file, address=address)
        if lib.bm_set_segments(engine.handle, array, len(segments)):
            raise MemoryError("bm_set_segments")
        if self.repacked:
            self.repacked.attach(engine)

    def resident_fraction(self) -> float | None:
        """Share of the weights' bytes that is in memory, sampled; None when the kernel does not say.

        About 0.1 ms: for a few times a second.
        """
        return self._residency.fraction() if self._residency else None

    def close(self) -> None:
        """Gives the memory back; idempotent. The llama_context must be gone."""
        self._residency = None
        if self.repacked:
            self.repacked.close()
        if self._image:
            if self._locked:  # locked memory cannot be given back page by page
                _libc.munlock(*self._locked)
                self._locked = None
            self._image.close()

    # --- anon, locked -----------------------------------------------------------------------------------

    def _own_spans(self) -> list[tuple[int, int]]:
        own = [(address, end - start) for _, start, end, address in self.segments]
        return own + (self.repacked.spans() if self.repacked else [])

    def _lock(self) -> None:
        spans = self._own_spans()
        if not spans:
            return
        low = min(a for a, _ in spans) // _PAGE_BYTES * _PAGE_BYTES
        high = -(-max(a + n for a, n in spans) // _PAGE_BYTES) * _PAGE_BYTES
        # On fault: the limit is checked now, in one piece, and pages are locked as the load touches them.
        if _libc.mlock2(low, high - low, _MLOCK_ONFAULT):
            number = ctypes.get_errno()
            limit_bytes = memlock_limit_bytes()
            needed = f"cannot lock {-(-(high - low) >> 20)} MiB of dense weights"
            if limit_bytes is None:
                raise MemoryBudgetError(f"{needed}: {os.strerror(number)}", hint="use --dense-weights anon")
            raise MemoryBudgetError(
                f"{needed}: this process may lock {limit_bytes / 2**20:.3g} MiB (RLIMIT_MEMLOCK)",
                hint=f"raise it, ulimit -l {-(-(high - low) >> 10)} or more, or use --dense-weights anon",
            )
        self._locked = (low, high - low)

    # --- mmap, warm -------------------------------------------------------------------------------------

    def _mapped(self, mappings: Mapping[int, tuple[int, int]]) -> Iterator[tuple[int, int]]:
        """`(address, length)` in whole pages of the ranges in the mapping, neighbours merged."""
        merged: list[list[int]] = []
        for file, start, end in sorted(self._ranges):
            if merged and merged[-1][0] == file and start - merged[-1][2] < MERGE_GAP_BYTES:
                merged[-1][2] = max(end, merged[-1][2])
            else:
                merged.append([file, start, end])
        for file, start, end in merged:
            base, length = mappings[file]
            first = start // _PAGE_BYTES * _PAGE_BYTES
            yield base + first, min(-(-end // _PAGE_BYTES) * _PAGE_BYTES, length) - first

    # --- repack -----------------------------------------------------------------------------------------

    def _batches(self, taken: Sequence[int]) -> Iterator[list[int]]:
        batch: list[int] = []
        for i in sorted(taken, key=lambda i: (self._matrices[i].file, self._matrices[i].offset_bytes)):
            if self._matrices[i].name == _LOOKED_UP:
                continue
            if batch and sum(self._matrices[j].size_bytes for j in [*batch, i]) > _BATCH_BYTES:
                yield batch
                batch = []
            batch.append(i)
        if batch:
            yield batch

    async def _repack(
        self, repacked: RepackedWeights, batch: Sequence[int], queue: ReadQueue, progress: OnProgress
    ) -> int:
        """Reads some matrices and repacks them; the bytes read."""
        left = {i: self._matrices[i] for i in batch}
        ranges = [(m.file, m.offset_bytes, m.offset_bytes + m.size_bytes) for m in left.values()]
        with RangeImage(self._files, ranges) as image:
            await image.load(queue, progress)

            def fill() -> None:
                # Shared by all workers: the next matrix goes to whoever is free.
                while left:
                    try:
                        i, m = left.popitem()
                    except KeyError:
                        return
                    repacked.fill(i, image.address_of(m.file, m.offset_bytes))

            await _in_threads([fill] * min(_MAX_WORKERS, len(os.sched_getaffinity(0)), len(left)))
            return image.total_bytes

    def _repack_tied(self, repacked: RepackedWeights, index: int) -> None:
        """Tied embeddings lie in the image, plain."""
        assert self._image is not None
        matrix = self._matrices[index]
        repacked.fill(index, self._image.address_of(matrix.file, matrix.offset_bytes))


def transient_bytes(layout: ModelLayout, mode: str) -> int:
    """Memory that loading takes beside the weights, for a moment before anything else is touched."""
    if mode != "repack":
        return 0
    largest = max((m.size_bytes for m in repackable(layout) if m.name != _LOOKED_UP), default=0)
    return max(largest, min(_BATCH_BYTES, layout.dense_bytes)) if largest else 0


def repackable(layout: ModelLayout) -> tuple[Matrix, ...]:
    """The dense weights that matmuls may use: every matrix, but for embeddings with an output of their own.

    Without `output.weight` the embeddings are the output matrix too.
    """
    dense = {(file, start) for file, start, _ in layout.dense}
    tied = all(t.name != _OUTPUT for t in layout.facts.tensors)
    return tuple(
        _matrix(t)
        for t in layout.facts.tensors
        if (t.file, t.offset_bytes) in dense
        and t.name.endswith(".weight")
        and t.ne[1] > 1
        and t.ne[2] == t.ne[3] == 1
        and (tied or t.name != _LOOKED_UP)
    )


def _matrix(t: TensorFacts) -> Matrix:
    return Matrix(
        name=t.name,
        ggml_type=t.ggml_type,
        ne0=t.ne[0],
        ne1=t.ne[1],
        file=t.file,
        offset_bytes=t.offset_bytes,
        size_bytes=t.size_bytes,
    )


def _pages_are_told(file: DirectFile) -> bool:
    """Whether the kernel tells this process which of a file's pages are cached: to owners and writers.

    Others are told that all are (Linux 5.2).
    """
    status = os.fstat(file.fd)
    return status.st_uid == os.geteuid() or os.access(f"/proc/self/fd/{file.fd}", os.W_OK, effective_ids=True)


async def _in_threads(functions: Sequence[Callable[[], object]]) -> None:
    """Runs them in worker threads, to their end also when this task is cancelled: they use our memory."""
    loop = asyncio.get_running_loop()
    work = [loop.run_in_executor(None, function) for function in functions]
    try:
        await asyncio.shield(asyncio.gather(*work))
    except asyncio.CancelledError:
        await asyncio.wait(work)
        raise
