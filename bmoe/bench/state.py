"""In what state the machine is when a run begins, and what else went on while it ran.

Owns the figures and the rules by which a run is contaminated. Must not know what happens to such a run.

A run is measured against a quiet machine, not against a timer: load averages lag by minutes and hold our own
last run, so what counts is the CPU time of others over a moment before the run, and during it. The clock that
the kernel tells is constant in most virtual machines; a fixed piece of work, timed, sees a slow CPU anyway.
"""

from __future__ import annotations

import hashlib
import os
import statistics
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Protocol

from bmoe.io import machine_memory
from bmoe.tools.iobench.page_cache import cached_fraction

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bmoe.bench.sides import Side

_WINDOW_S: Final = 0.3
_WORK: Final = bytes(1 << 20)
_WORK_TRIES: Final = 7

OTHERS_LIMIT: Final = 0.10  # of one CPU
STEAL_LIMIT: Final = 0.05
WARM_SHARE: Final = 0.99
DROPPED_SHARE: Final = 0.02
SLOWER_LIMIT: Final = 1.15
COMPUTE_LIMIT: Final = 1.20
DRIVE_LIMIT: Final = 1.25
FAULTS_FACTOR: Final = 10.0
FAULTS_FLOOR: Final = 10.0


@dataclass(frozen=True, kw_only=True, slots=True)
class EntryState:
    """Before a run.

    Attributes:
        cached_share: Of the model's files, in the page cache; None when the kernel does not say.
        available_bytes: MemAvailable.
        load_average: Over the last minute, our own runs included.
        others_cpus: CPUs' worth of time that others took over a moment.
        clock_mhz: Median of what the kernel tells, or None.
        work_us: A fixed piece of work on one CPU.
    """

    cached_share: float | None
    available_bytes: int | None
    load_average: float
    others_cpus: float
    clock_mhz: float | None
    work_us: float


@dataclass(frozen=True, kw_only=True, slots=True)
class CpuTimes:
    """Sums over all CPUs since the machine started, in seconds."""

    busy_s: float
    steal_s: float


class StateReader(Protocol):
    """What is asked of the machine; tests put another in its place."""

    def entry(self, paths: Sequence[str]) -> EntryState:
        """The state now."""

    def cpu_times(self) -> CpuTimes:
        """Counters to subtract."""

    def clock_mhz(self) -> float | None:
        """The CPUs' clock now, where it is told."""


class MachineState:
    """The machine as it is."""

    def entry(self, paths: Sequence[str]) -> EntryState:
        """See `EntryState`. Takes a third of a second."""
        before, t0, own = self.cpu_times(), time.monotonic(), time.process_time()
        time.sleep(_WINDOW_S)
        after, own = self.cpu_times(), time.process_time() - own
        others = (after.busy_s - before.busy_s - own) / (time.monotonic() - t0)
        return EntryState(
            cached_share=cached_share(paths),
            available_bytes=machine_memory().available_bytes,
            load_average=os.getloadavg()[0],
            others_cpus=max(0.0, others),
            clock_mhz=self.clock_mhz(),
            work_us=_work_us(),
        )

    def cpu_times(self) -> CpuTimes:
        """From /proc/stat: user, nice, system, irq, softirq are busy; idle and iowait are not."""
        with open("/proc/stat", encoding="ascii") as file:
            fields = [int(word) for word in file.readline().split()[1:9]]
        tick = os.sysconf("SC_CLK_TCK")
        user, nice, system, _, _, irq, softirq, steal = fields
        return CpuTimes(busy_s=(user + nice + system + irq + softirq) / tick, steal_s=steal / tick)

    def clock_mhz(self) -> float | None:
        """Median over the CPUs."""
        return _clock_mhz()


def cached_share(paths: Sequence[str]) -> float | None:
    """The part of the files that is in the page cache, together."""
    cached = total = 0.0
    for path in paths:
        fd = os.open(path, os.O_RDONLY)
        try:
            size = os.fstat(fd).st_size
            share = cached_fraction(fd, size)
        finally:
            os.close(fd)
        if share is None:
            return None
        cached += share * size
        total += size
    return cached / max(total, 1)


def entry_flags(side: Side, entry: EntryState, model_bytes: int, best_work_us: float | None) -> list[str]:
    """What is wrong with the machine for this side, a word or two each.

    Args:
        side: What is about to run.
        entry: The state.
        model_bytes: Size of the model's files.
        best_work_us: The best of the benchmark so far, or None.
    """
    flags = []
    if entry.others_cpus > OTHERS_LIMIT:
        flags.append("other load before")
    if best_work_us is not None and entry.work_us > SLOWER_LIMIT * best_work_us:
        flags.append("slow CPU")
    share = entry.cached_share
    if share is not None and side.page_cache == "warm" and share < WARM_SHARE:
        # What cannot be cached is what the side is about, not an accident.
        room = (entry.available_bytes or 0) + share * model_bytes
        if model_bytes < room:
            flags.append("not in the page cache")
    if share is not None and side.page_cache == "dropped" and share > DROPPED_SHARE:
        flags.append("still in the page cache")
    return flags


def run_flags(
    side: Side,
    figures: dict[str, Any],
    others: Sequence[dict[str, Any]],
    *,
    others_cpus: float,
    steal_share: float,
    clocks_mhz: tuple[float | None, float | None],
) -> list[str]:
    """What went wrong while it ran.

    Args:
        side: What ran.
        figures: What it measured.
        others: Figures of the side's other rounds.
        others_cpus: CPUs' worth of time that others took.
        steal_share: Of one CPU, what the hypervisor took.
        clocks_mhz: Before and after.
    """
    flags = []
    if others_cpus > OTHERS_LIMIT:
        flags.append("other load")
    if steal_share > STEAL_LIMIT:
        flags.append("stolen time")
    before, after = clocks_mhz
    if before and after and after * SLOWER_LIMIT < before:
        flags.append("clock fell")
    flags += compared_flags(side, figures, others)
    return flags


def compared_flags(side: Side, figures: dict[str, Any], others: Sequence[dict[str, Any]]) -> list[str]:
    """What only other rounds can tell: a drive or a computation that got slower, faults that jump."""
    flags = []
    rates = [f["drive_gib_per_s"] for f in others if f.get("drive_gib_per_s")]
    if rates and figures.get("drive_gib_per_s", 0) * DRIVE_LIMIT < max(rates) and side.kind == "drive":
        flags.append("drive slowed")
    compute = [f["compute_ms_per_token"] for f in others if f.get("compute_ms_per_token")]
    mine = figures.get("compute_ms_per_token")
    # Resident runs that do not fit wait for the drive inside what looks like computing.
    if mine and compute and side.page_cache != "dropped" and mine > COMPUTE_LIMIT * min(compute):
        flags.append("compute rose")
    faults = [f["major_faults_per_token"] for f in others if f.get("major_faults_per_token") is not None]
    mine = figures.get("major_faults_per_token")
    if mine is not None and faults and side.page_cache != "dropped":
        limit = max(FAULTS_FLOOR, FAULTS_FACTOR * statistics.median(faults))
        if mine > limit:
            flags.append("page faults jumped")
    return flags


def _clock_mhz() -> float | None:
    try:
        with open("/proc/cpuinfo", encoding="ascii", errors="replace") as file:
            clocks = [float(line.partition(":")[2]) for line in file if line.startswith("cpu MHz")]
    except (OSError, ValueError):
        return None
    if not clocks:
        for cpu in os.sched_getaffinity(0):
            try:
                with open(
                    f"/sys/devices/system/cpu/cpu{cpu}/cpufreq/scaling_cur_freq", encoding="ascii"
                ) as file:
                    clocks.append(int(file.read()) / 1e3)
            except (OSError, ValueError):
                return None
    return statistics.median(clocks) if clocks else None


def _work_us() -> float:
    """The best of a few times that hashing a MiB takes."""
    best = float("inf")
    for _ in range(_WORK_TRIES):
        t0 = time.perf_counter_ns()
        hashlib.sha256(_WORK).digest()
        best = min(best, (time.perf_counter_ns() - t0) / 1e3)
    return best
