"""Live figures of a run for Prometheus, over HTTP on the loopback interface.

It owns the metrics' names, and the server's thread. It must not know how a run is made. What a scrape reads
is a snapshot that is replaced as a whole, so that the event loop never waits for a reader.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import socket
import threading
from typing import TYPE_CHECKING, Any, Final

from bmoe.io.errors import BmoeError, UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from bmoe.records import EffectiveConfig, MemorySample, StepMetrics

HOST: Final = "127.0.0.1"
_SECONDS: Final = 1e-9
# Upper edges, in seconds, of the tokens' histogram.
_EDGES: Final = (0.005, 0.01, 0.02, 0.035, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)

# Counters of both phases: name, (field of StepMetrics, factor), help. Names get `_total`.
_COUNTERS: Final = (
    ("tokens", "tokens", 1, "Tokens computed."),
    ("wall_seconds", "wall_ns", _SECONDS, "Time in llama_decode."),
    ("stall_seconds", "stall_ns", _SECONDS, "Of that, compute threads waiting for reads."),
    ("hook_seconds", "hook_ns", _SECONDS, "Of that, looking up experts and asking for reads."),
    ("compute_seconds", "compute_ns", _SECONDS, "Of that, the rest."),
    ("overhead_seconds", "overhead_ns", _SECONDS, "Time between one llama_decode and the next."),
    ("io_busy_seconds", "io_busy_ns", _SECONDS, "Time with at least one read in flight."),
    ("loop_seconds", "loop_ns", _SECONDS, "Time of the event loop busy with streaming."),
    ("cpu_seconds", "cpu_ns", _SECONDS, "CPU time of the process within llama_decode."),
    ("expert_lookups", "lookups", 1, "Experts looked up, each once per layer and llama_decode."),
    ("expert_hits", "hits", 1, "Of those, found in the cache."),
    ("expert_dropped", "dropped", 1, "Experts left out."),
    ("reads", "reads", 1, "Reads started."),
    ("read_bytes", "read_bytes", 1, "Bytes of them."),
    ("speculative_bytes", "speculative_bytes", 1, "Of those, read before they were asked for."),
    ("evictions", "evictions", 1, "Slices given up."),
    ("rereads", "rereads", 1, "Reads of slices that had been read before."),
    ("minor_faults", "minor_faults", 1, "Page faults served without reading."),
    ("major_faults", "major_faults", 1, "Page faults that had to read."),
)
_STATES: Final = (
    ("cache_bytes", "Memory for experts, as it is now."),
    ("slots_used", "Slots that hold a slice."),
)
_MEMORY: Final = (
    ("rss_bytes", "Resident memory of the process."),
    ("rss_anon_bytes", "Of that, its own."),
    ("rss_file_bytes", "Of that, of files."),
    ("swap_bytes", "Of the process, swapped out."),
    ("mem_available_bytes", "Of the machine, available."),
)


class LiveFigures:
    """What the run has done so far. A collector in the sense of prometheus_client.

    Args:
        run_id: The log's.
    """

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id
        self._info: dict[str, str] = {}
        self._sums: dict[tuple[str, str], int] = {}
        self._last: dict[str, int] = {}
        self._buckets = [0] * (len(_EDGES) + 1)
        self._token_ns = 0
        self._events = {"warnings": 0, "cache_resizes": 0}

    def begin(self, effective: EffectiveConfig) -> None:
        """Says what runs."""
        e = effective
        self._info = {
            "run_id": self._run_id,
            "version": e.bmoe_version,
            "model": e.model_name or e.model_path,
            "architecture": e.architecture,
            "mode": e.mode,
            "policy": e.policy or "",
            "io_backend": e.io_backend or "",
            "traced": e.traced or "",
            "lossy": e.lossy or "",
        }
        self._last = {} if e.cache_bytes is None else {"cache_bytes": e.cache_bytes}

    def prefill(self, batches: Sequence[StepMetrics]) -> None:
        """The prompt is computed."""
        for batch in batches:
            self._add("prefill", batch)

    def token(self, metrics: StepMetrics) -> None:
        """A token was generated."""
        self._add("decode", metrics)
        seconds = metrics.wall_ns * _SECONDS
        at = next((i for i, edge in enumerate(_EDGES) if seconds <= edge), len(_EDGES))
        buckets = self._buckets.copy()
        buckets[at] += 1
        self._buckets = buckets
        self._token_ns += metrics.wall_ns

    def warning(self) -> None:
        """The user was told something."""
        self._events = self._events | {"warnings": self._events["warnings"] + 1}

    def cache_resize(self, cache_bytes: int) -> None:
        """The cache has another budget."""
        self._events = self._events | {"cache_resizes": self._events["cache_resizes"] + 1}
        self._last = self._last | {"cache_bytes": cache_bytes}

    def _add(self, phase: str, m: StepMetrics) -> None:
        sums = self._sums.copy()
        for _, field, _, _ in _COUNTERS:
            if (value := getattr(m, field)) is not None:
                sums[phase, field] = sums.get((phase, field), 0) + value
        last = {name: value for name, _ in _STATES if (value := getattr(m, name)) is not None}
        if m.memory is not None:
            last |= _sizes(m.memory)
        self._sums, self._last = sums, self._last | last

    def collect(self) -> Iterator[Any]:
        """Everything that was measured so far; on the server's thread."""
        from prometheus_client.core import (  # noqa: PLC0415 (only a run that serves needs it)
            CounterMetricFamily,
            GaugeMetricFamily,
            HistogramMetricFamily,
            InfoMetricFamily,
        )

        info, sums, last, events = self._info, self._sums, self._last, self._events
        yield InfoMetricFamily("bmoe_run", "The run.", value=info)
        for name, field, factor, words in _COUNTERS:
            counter = CounterMetricFamily(f"bmoe_{name}", words, labels=["phase"])
            found = [(phase, sums[phase, field]) for phase in ("prefill", "decode") if (phase, field) in sums]
            for phase, value in found:
                counter.add_metric([phase], value * factor)
            if found:
                yield counter
        for name, words in (*_STATES, *_MEMORY):
            if name in last:
                yield GaugeMetricFamily(f"bmoe_{name}", words, value=last[name])
        yield CounterMetricFamily("bmoe_warnings", "Warnings shown.", value=events["warnings"])
        yield CounterMetricFamily(
            "bmoe_cache_resizes", "Times that the cache's budget changed.", value=events["cache_resizes"]
        )
        buckets = itertools.accumulate(self._buckets)
        yield HistogramMetricFamily(
            "bmoe_token_seconds",
            "llama_decode of a generated token.",
            buckets=list(zip([*map(str, _EDGES), "+Inf"], buckets, strict=True)),
            sum_value=self._token_ns * _SECONDS,
        )


def _sizes(memory: MemorySample) -> dict[str, int]:
    return {name: value for name, _ in _MEMORY if (value := getattr(memory, name)) is not None}


class MetricsServer:
    """Serves one run's figures at `http://127.0.0.1:PORT/metrics` until closed.

    Args:
        figures: What is served.
        port: Where; 0 picks a free port.

    Attributes:
        port: The one that is served.

    Raises:
        UsageError: The port is taken or not allowed, or prometheus_client is not installed.
        BmoeError: The system refuses for another reason.
    """

    def __init__(self, figures: LiveFigures, port: int) -> None:
        try:
            from prometheus_client import CollectorRegistry, start_http_server  # noqa: PLC0415 (same)
        except ImportError:
            raise UsageError(
                "--metrics-port needs the package prometheus_client", hint="pip install 'bmoe[metrics]'"
            ) from None
        registry = CollectorRegistry(auto_describe=False)
        registry.register(figures)
        try:
            self._server, self._thread = start_http_server(port, addr=HOST, registry=registry)
        except OSError as error:
            if error.errno in {errno.EADDRINUSE, errno.EACCES}:
                why = "is in use" if error.errno == errno.EADDRINUSE else "is not allowed"
                raise UsageError(
                    f"port {port} of {HOST} {why}", hint="--metrics-port 0 picks a free one"
                ) from None
            raise BmoeError(f"port {port} of {HOST} cannot be served: {error.strerror}") from None
        self.port = self._server.server_port

    @property
    def url(self) -> str:
        """Where Prometheus finds it."""
        return f"http://{HOST}:{self.port}/metrics"

    def close(self) -> None:
        """Ends serving. Idempotent."""
        # The server looks for the end every half second, and when somebody comes.
        ending = threading.Thread(target=self._server.shutdown)
        ending.start()
        with contextlib.suppress(OSError):
            socket.create_connection((HOST, self.port), timeout=1).close()
        ending.join()
        self._server.server_close()
        self._thread.join()
