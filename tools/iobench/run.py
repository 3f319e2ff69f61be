"""A whole run: from settings to a result.

Owns the order of things: which rows there are, that they are interleaved, what the page cache holds
meanwhile. Must not know how results are shown or kept.

Repeats are the outer loop and rows the inner one, so that whatever changes on the machine in the course
of minutes falls on all rows alike.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import gc
import os
import platform
import statistics
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from bmoe import __version__
from bmoe.io import DirectFile, available_bytes, open_backend
from bmoe.io.errors import BmoeError, MemoryBudgetError, UsageError
from bmoe.io.mounts import mount_of
from bmoe.io.scheduling import set_slice_ns
from bmoe.tools.iobench import page_cache, verdict
from bmoe.tools.iobench.burners import Burners
from bmoe.tools.iobench.experts import ExpertLayout, read_layout
from bmoe.tools.iobench.lanes import ExpertWalk, RandomWalk
from bmoe.tools.iobench.measure import Sample, measure
from bmoe.tools.iobench.result import (
    MIB,
    SCHEMA_VERSION,
    FileFacts,
    Flag,
    Group,
    Host,
    Latencies,
    Result,
    Row,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from bmoe.tools.iobench.lanes import Walk
    from bmoe.tools.iobench.measure import BackendName
    from bmoe.tools.iobench.settings import Settings

    OnProgress = Callable[[int, int], None]  # done, total: milliseconds, or layers of a replay

# As the engine has it while it decodes.
_SWITCH_INTERVAL_S: Final = 50e-6
_MEMORY_RESERVE: Final = 0.9


@dataclass(frozen=True, kw_only=True, slots=True)
class _Spec:
    group: Group
    lanes: int


async def run(settings: Settings, on_progress: OnProgress) -> Result:
    """Measure.

    Raises:
        UsageError: The settings do not fit the file.
        FileError: The file cannot be read.
        BackendError: A backend that was asked for by name does not work here.
        MemoryBudgetError: No memory for the buffers.
    """
    notes: list[Flag] = []
    with contextlib.ExitStack() as stack:
        first = stack.enter_context(DirectFile.open(settings.path, direct=not settings.buffered))
        layout, no_layout_reason = _layout(settings)
        files = [first]
        if layout is not None:
            files += [
                stack.enter_context(DirectFile.open(path, direct=not settings.buffered))
                for path in layout.paths[1:]
            ]
        backends = await _backends(settings, notes)
        cached_before = _cached(files)
        for file in files:
            page_cache.drop(file.fd)
        dropped = _cached(files)
        memory_mib_per_s = page_cache.memory_bytes_per_s() / MIB
        rows: list[Row] = []
        replay = None
        with _as_the_engine_runs():
            if settings.replay is None:
                rows, dropped = await _rows(settings, files, layout, backends, on_progress)
            else:
                from bmoe.tools.iobench.replay_rows import replay_rows

                replay = await replay_rows(settings, files, layout, backends, on_progress)
        facts = _file_facts(settings.path, files, settings, cached_before, _cached(files))
    knees = verdict.knees(rows)
    blocks = [file.block_bytes for file in files]
    return Result(
        schema=SCHEMA_VERSION,
        tool="bmoe-iobench",
        version=__version__,
        created_utc=dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
        command=settings.command,
        seconds=settings.seconds,
        repeat=settings.repeat,
        host=Host(
            kernel=platform.release(),
            machine=platform.machine(),
            cpus=len(os.sched_getaffinity(0)),
            memory_mib_per_s=round(memory_mib_per_s),
        ),
        file=facts,
        rows=rows,
        knees=knees,
        verdict=verdict.verdict(rows, knees, layout, blocks, no_layout_reason) if rows else None,
        replay=replay,
        flags=notes + verdict.flags(rows, facts, memory_mib_per_s=memory_mib_per_s, dropped=dropped),
    )


def _layout(settings: Settings) -> tuple[ExpertLayout | None, str | None]:
    """The model's experts, or why there are none. Only the expert pattern insists on them."""
    try:
        layout = read_layout(settings.path)
    except BmoeError as error:
        if settings.engine_pattern:
            raise
        return None, str(error)
    if layout is None:
        reason = f"{settings.path} is no GGUF model with experts"
        if settings.engine_pattern:
            raise UsageError(f"--engine-pattern: {reason}")
        return None, reason
    return layout, None


async def _backends(settings: Settings, notes: list[Flag]) -> tuple[BackendName, ...]:
    """What to read with. An asked-for backend that does not work is an error, another one a note."""
    for name in settings.backends:
        await open_backend(name, 1).aclose()
    if settings.backends:
        return settings.backends
    chosen = open_backend("auto", 1)
    await chosen.aclose()
    if chosen.fallback_reason is not None:
        notes.append(Flag(code="no-io-uring", text=f"reading with threads: {chosen.fallback_reason}"))
    return ("uring",) if chosen.name == "uring" else ("threads",)


@contextlib.contextmanager
def _as_the_engine_runs() -> Iterator[None]:
    """Scheduling and collector as in a session that decodes."""
    interval = sys.getswitchinterval()
    slice_ns = set_slice_ns()
    gc.collect()
    gc.freeze()
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    try:
        yield
    finally:
        sys.setswitchinterval(interval)
        gc.unfreeze()
        if slice_ns is not None:
            set_slice_ns(slice_ns)


def _specs(settings: Settings, layout: ExpertLayout | None, backends: Sequence[BackendName]) -> list[_Spec]:
    shapes: list[tuple[str, int, int, int]] = []
    if settings.engine_pattern and layout is not None:
        pieces = max(map(len, layout.entries))
        shapes.append(("experts", layout.expert_bytes // len(layout.entries), pieces, layout.slice_bytes))
    shapes += [
        ("random", kib << 10, pieces, -(-(kib << 10) // pieces))
        for kib in settings.read_kib
        for pieces in settings.scatter
    ]
    return [
        _Spec(
            group=Group(
                backend=backend,
                pattern=pattern,
                read_bytes=read_bytes,
                pieces=pieces,
                piece_bytes=piece_bytes,
                compute_load=load,
            ),
            lanes=lanes,
        )
        for backend in backends
        for load in settings.compute_load
        for pattern, read_bytes, pieces, piece_bytes in shapes
        for lanes in settings.lanes
    ]


async def _rows(
    settings: Settings,
    files: Sequence[DirectFile],
    layout: ExpertLayout | None,
    backends: Sequence[BackendName],
    on_progress: OnProgress,
) -> tuple[list[Row], float | None]:
    """All rows, and the most that was cached as a sample began."""
    dropped = _cached(files)
    specs = _specs(settings, layout, backends)
    for spec in specs:
        walk = _walk(spec, files, layout)  # too small a file is told before anything is measured
        _check_memory(walk.max_window_bytes * spec.lanes)
    samples: list[list[Sample]] = [[] for _ in specs]
    cached: list[list[float | None]] = [[] for _ in specs]
    seconds = settings.seconds / settings.repeat
    total_ms = round(len(specs) * settings.seconds * 1e3)
    done = 0
    for _ in range(settings.repeat):
        for index, spec in enumerate(specs):
            if settings.buffered or not all(file.direct for file in files):
                for file in files:
                    page_cache.drop(file.fd)
                dropped = _cached(files)
            cached[index].append(dropped)
            with Burners(spec.group.compute_load) as burners:
                sample = await measure(
                    files,
                    _walk(spec, files, layout),
                    backend="uring" if spec.group.backend == "uring" else "threads",
                    lanes=spec.lanes,
                    seconds=seconds,
                    burners=burners,
                    register=settings.register,
                )
            samples[index].append(sample)
            done += 1
            on_progress(round(done * seconds * 1e3), total_ms)
    rows = [_row(*parts) for parts in zip(specs, samples, cached, strict=True)]
    return rows, _most(dropped, *(row.cached_fraction for row in rows))


def _walk(spec: _Spec, files: Sequence[DirectFile], layout: ExpertLayout | None) -> Walk:
    if spec.group.pattern == "experts":
        assert layout is not None
        return ExpertWalk(files, layout, spec.lanes)
    return RandomWalk(files[0], spec.group.read_bytes, spec.group.pieces, spec.lanes)


def _check_memory(needed_bytes: int) -> None:
    there = available_bytes()
    if there is not None and needed_bytes > _MEMORY_RESERVE * there:
        raise MemoryBudgetError(
            f"the buffers of a row take {needed_bytes // MIB} MiB, and {there // MIB} MiB are available",
            hint="fewer --lanes or a smaller --slice-kb",
        )


def _row(spec: _Spec, samples: Sequence[Sample], cached: Sequence[float | None]) -> Row:
    def median_of(cpu_ns: Callable[[Sample], int]) -> float:
        return round(statistics.median(cpu_ns(s) / 1e3 / (s.window_bytes / MIB) for s in samples), 2)

    rates = [round(s.bytes_per_s / MIB, 1) for s in samples]
    total_ns = sum(sum(s.submission_ns) + sum(s.completion_ns) for s in samples)
    return Row(
        group=spec.group,
        lanes=spec.lanes,
        most_in_flight=min(max(s.most_in_flight for s in samples), _most_threads(spec)),
        mib_per_s=round(statistics.median(rates), 1),
        samples_mib_per_s=rates,
        submission_us=Latencies.of_ns([ns for s in samples for ns in s.submission_ns]),
        completion_us=Latencies.of_ns([ns for s in samples for ns in s.completion_ns]),
        latency_ms=round(total_ns / max(sum(len(s.completion_ns) for s in samples), 1) / 1e6, 4),
        cpu_user_us_per_mib=median_of(lambda s: s.cpu_user_ns),
        cpu_system_us_per_mib=median_of(lambda s: s.cpu_system_ns),
        reads=sum(len(s.completion_ns) for s in samples),
        read_mib=round(sum(s.window_bytes for s in samples) / MIB, 1),
        direct=all(s.direct for s in samples),
        registered=all(s.registered for s in samples),
        unregistered_reason=next((s.unregistered_reason for s in samples if s.unregistered_reason), None),
        cached_fraction=_most(*cached),
    )


def _most_threads(spec: _Spec) -> int:
    """What the pool can have in preadv at one time; it takes more reads than that and queues them."""
    from bmoe.io.threads import MAX_THREADS

    return MAX_THREADS if spec.group.backend == "threads" else spec.lanes


def _cached(files: Sequence[DirectFile]) -> float | None:
    """The cached fraction of all files together."""
    parts = [(page_cache.cached_fraction(file.fd, file.size_bytes), file.size_bytes) for file in files]
    if any(part is None for part, _ in parts):
        return None
    return sum((part or 0.0) * size for part, size in parts) / sum(size for _, size in parts)


def _most(*fractions: float | None) -> float | None:
    return None if None in fractions else max(f for f in fractions if f is not None)


def _file_facts(
    path: str, files: Sequence[DirectFile], settings: Settings, before: float | None, after: float | None
) -> FileFacts:
    mount = mount_of(path)
    return FileFacts(
        path=path,
        size_bytes=sum(file.size_bytes for file in files),
        mount_point=None if mount is None else mount.mount_point,
        file_system=None if mount is None else mount.file_system,
        source=None if mount is None else mount.source,
        direct=not settings.buffered and all(file.direct for file in files),
        fallback_reason=next((f.fallback_reason for f in files if f.fallback_reason), None),
        block_bytes=max(file.block_bytes for file in files),
        cached_before=None if before is None else round(before, 4),
        cached_after=None if after is None else round(after, 4),
    )
