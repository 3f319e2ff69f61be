"""What one llama_decode cost: differences of all counters around it.

It owns which counter means what. It must not know why a batch is computed.
"""

from __future__ import annotations

import resource
import time
from typing import TYPE_CHECKING

from bmoe.io.memory_figures import machine_memory, process_memory
from bmoe.records import LayerMetrics, MemorySample, StepMetrics

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from bmoe.pipeline.native import EngineCounters
    from bmoe.pipeline.streamer import StreamerStatistics
    from bmoe.session import Session

# Reading /proc takes about 0.1 ms, so not for every token.
_MEMORY_EVERY_NS = 250_000_000


def memory_sample(session: Session) -> MemorySample:
    """Memory now."""
    process, machine = process_memory(), machine_memory()
    streaming = session.streaming
    return MemorySample(
        rss_bytes=process.rss_bytes,
        rss_anon_bytes=process.anon_bytes,
        rss_file_bytes=process.file_bytes,
        swap_bytes=process.swap_bytes,
        mem_available_bytes=machine.available_bytes,
        mem_free_bytes=machine.free_bytes,
        swap_free_bytes=machine.swap_free_bytes,
        dense_resident=streaming.dense_resident() if streaming else None,
    )


class Meter:
    """Measures one batch after the other.

    Args:
        session: Whose batches.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._streaming = session.streaming
        self._threads = session.effective.threads
        self._by_layer = session.config.layer_metrics
        self._dropping = session.config.drop_cold_experts > 0
        self._end_ns: int | None = None
        self._memory_ns = 0
        self._before: tuple[EngineCounters, StreamerStatistics] | None = None
        self._layers_before: NDArray[np.uint64] | None = None

    def begin(self) -> None:
        """Takes the counters before the call."""
        s = self._streaming
        self._before = (s.engine.statistics(), s.streamer.statistics()) if s else None
        if s and self._by_layer:
            self._layers_before = s.engine.layer_counters.copy()
        self._usage = resource.getrusage(resource.RUSAGE_SELF)
        self._cpu_ns = time.process_time_ns()
        self._t0 = time.monotonic_ns()

    def end(self, tokens: int) -> StepMetrics:
        """What the call of `tokens` tokens added to them."""
        t1 = time.monotonic_ns()
        cpu_ns = time.process_time_ns() - self._cpu_ns
        usage = resource.getrusage(resource.RUSAGE_SELF)
        wall_ns = t1 - self._t0
        overhead_ns = None if self._end_ns is None else self._t0 - self._end_ns
        self._end_ns = t1
        memory = None
        if t1 - self._memory_ns >= _MEMORY_EVERY_NS:
            self._memory_ns = t1
            memory = memory_sample(self._session)
        faults = (usage.ru_minflt - self._usage.ru_minflt, usage.ru_majflt - self._usage.ru_majflt)
        if not self._streaming or not self._before:
            return StepMetrics(
                tokens=tokens,
                wall_ns=wall_ns,
                compute_ns=wall_ns,
                cpu_ns=cpu_ns,
                minor_faults=faults[0],
                major_faults=faults[1],
                overhead_ns=overhead_ns,
                memory=memory,
            )
        e0, s0 = self._before
        e1, s1 = self._streaming.engine.statistics(), self._streaming.streamer.statistics()
        # Threads can be asleep beyond the moment at which the call returns; never count more than there is.
        stall_ns = min((e1.stall_ns - e0.stall_ns) // self._threads, wall_ns)
        hook_ns = min(e1.announce_ns - e0.announce_ns, wall_ns - stall_ns)
        submits, done = s1.submit_latencies - s0.submit_latencies, s1.reads_done - s0.reads_done
        return StepMetrics(
            tokens=tokens,
            wall_ns=wall_ns,
            stall_ns=stall_ns,
            hook_ns=hook_ns,
            compute_ns=wall_ns - stall_ns - hook_ns,
            experts_ns=e1.kernel_ns - e0.kernel_ns,
            loop_ns=s1.loop_ns - s0.loop_ns,
            lookups=e1.lookups - e0.lookups,
            hits=e1.hits - e0.hits,
            reads=s1.reads - s0.reads,
            read_bytes=s1.read_bytes - s0.read_bytes,
            speculative_bytes=s1.speculative_bytes - s0.speculative_bytes,
            evictions=s1.evictions - s0.evictions,
            rereads=s1.rereads - s0.rereads,
            slots_used=s1.slots_used,
            cache_bytes=self._streaming.cache_bytes,
            submit_latency_ns=(s1.submit_latency_ns - s0.submit_latency_ns) // submits
            if submits > 0
            else None,
            read_latency_ns=(s1.in_flight_ns - s0.in_flight_ns) // done if done > 0 else None,
            io_busy_ns=s1.io_busy_ns - s0.io_busy_ns,
            dropped=e1.dropped - e0.dropped if self._dropping else None,
            cpu_ns=cpu_ns,
            minor_faults=faults[0],
            major_faults=faults[1],
            overhead_ns=overhead_ns,
            memory=memory,
            layers=self._layers(),
        )

    def _layers(self) -> tuple[LayerMetrics, ...] | None:
        if self._layers_before is None or self._streaming is None:
            return None
        rows = (self._streaming.engine.layer_counters - self._layers_before).tolist()
        return tuple(
            LayerMetrics(
                layer=number,
                lookups=lookups,
                hits=hits,
                read_bytes=posted_bytes,
                stall_ns=stall_ns // self._threads,
                experts_ns=kernel_ns,
            )
            for number, (lookups, hits, posted_bytes, stall_ns, kernel_ns) in zip(
                self._streaming.layout.layer_numbers, rows, strict=True
            )
        )
