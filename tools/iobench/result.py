"""The records of a run: what is shown, drawn, kept, and written as JSON.

Owns their fields, which docs/iobench.md explains and docs/schema/iobench.v1.schema.json checks. Must not
know how anything is measured. None is "not measured", never zero.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

SCHEMA_VERSION: Final = 1
MIB: Final = 1 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class Latencies:
    """A distribution of latencies, in microseconds."""

    p50: float
    p90: float
    p99: float
    max: float

    @classmethod
    def of_ns(cls, values_ns: Sequence[int]) -> Latencies:
        """Of at least one latency."""
        values = np.asarray(values_ns, dtype=np.float64) / 1e3
        p50, p90, p99 = np.percentile(values, [50, 90, 99])
        return cls(
            p50=round(float(p50), 2),
            p90=round(float(p90), 2),
            p99=round(float(p99), 2),
            max=round(float(values.max()), 2),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """What the rows of one curve have in common; they differ in lanes.

    Attributes:
        backend: `uring` or `threads`.
        pattern: `random`, or `experts` where the model's experts lie.
        read_bytes: Of a logical read; the mean of an expert in the expert pattern.
        pieces: Reads per logical read (`--scatter`; an expert's slices).
        piece_bytes: Of one read as asked for, on average.
        compute_load: Busy threads beside it.
    """

    backend: str
    pattern: str
    read_bytes: int
    pieces: int
    piece_bytes: int
    compute_load: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One line of the table: a group at one number of lanes, over all repeats.

    Attributes:
        group: What was read, and by what.
        lanes: Reads in flight.
        most_in_flight: What the backend really had in flight: 16 at most for the threads.
        mib_per_s: The median of the samples.
        samples_mib_per_s: Of each repeat, in the order they were run.
        submission_us: Queueing to handing over, all samples together.
        completion_us: Handing over to the event loop's callback, likewise.
        latency_ms: The mean of both together.
        cpu_user_us_per_mib: CPU time in user mode per MiB read, the median of the samples.
        cpu_system_us_per_mib: In the kernel, likewise.
        reads: In all samples.
        read_mib: In all samples, aligned windows.
        direct: Past the page cache; False shows as BUFFERED.
        registered: Into registered buffers.
        unregistered_reason: Why not, although wanted.
        cached_fraction: Of the file, in the page cache as a sample began, the highest; None: not told.
    """

    group: Group
    lanes: int
    most_in_flight: int
    mib_per_s: float
    samples_mib_per_s: list[float]
    submission_us: Latencies
    completion_us: Latencies
    latency_ms: float
    cpu_user_us_per_mib: float
    cpu_system_us_per_mib: float
    reads: int
    read_mib: float
    direct: bool
    registered: bool
    unregistered_reason: str | None
    cached_fraction: float | None

    @property
    def mode(self) -> str:
        """How it was really read, in three words."""
        how = "direct" if self.direct else "BUFFERED"
        threads = f"threads({self.most_in_flight})"
        backend = threads if self.group.backend == "threads" else self.group.backend
        return f"{backend} {how}{' registered' if self.registered else ''}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Knee:
    """Where more lanes stop helping.

    Attributes:
        group: Which curve.
        peak_mib_per_s: Its highest point.
        peak_lanes: There.
        knee_lanes: The fewest lanes within 3 % of it.
        knee_mib_per_s: There.
    """

    group: Group
    peak_mib_per_s: float
    peak_lanes: int
    knee_lanes: int
    knee_mib_per_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Scatter:
    """One logical read in pieces against in one, at the peaks of both curves.

    Attributes:
        backend: Of both.
        read_bytes: Of the logical read.
        compute_load: Of both.
        pieces: Of the scattered one.
        ratio: Its bandwidth over the other's.
        costs: It is more than 3 % slower; None if it is and yet the samples of both overlap.
    """

    backend: str
    read_bytes: int
    compute_load: int
    pieces: int
    ratio: float
    costs: bool | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Bound:
    """What the drive allows, reads alone.

    Attributes:
        hit_rate: Of the experts that a token needs, those found in the cache.
        read_mib_per_token: The rest, in aligned windows.
        tokens_per_s: No more than this.
    """

    hit_rate: float
    read_mib_per_token: float
    tokens_per_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """What the engine should make of it.

    Attributes:
        knee: The curve it rests on: idle, direct and io_uring where there is one, and of the read size
            nearest to the model's slices.
        queue_depth: Recommended: the knee.
        scatter: Of each comparison that was asked for.
        model_slice_bytes: Mean slice of the model's experts; None if it is no mixture of experts.
        cycle_mib: Aligned windows of one token's experts, with nothing cached.
        bounds: Tokens per second at several hit rates; empty without a model.
        no_bounds_reason: Why there are none.
    """

    knee: Knee
    queue_depth: int
    scatter: list[Scatter]
    model_slice_bytes: int | None
    cycle_mib: float | None
    bounds: list[Bound]
    no_bounds_reason: str | None


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplayRow:
    """A recorded trace's misses, read at one queue depth.

    Attributes:
        backend: What read.
        queue_depth: Reads in flight at most.
        tokens: Decoded in the trace.
        hit_rate: Of decode lookups.
        misses: Experts read while decoding.
        read_mib: While decoding, aligned windows.
        gib_per_s: The median of the samples, decoding; None if nothing was read.
        samples_gib_per_s: Of each repeat.
        token_us: I/O time of a token: sum over its layers, of all samples. `max` is the slowest token.
        mean_token_ms: The mean; the median of the samples.
        tokens_per_s: From that mean: I/O alone; None if nothing was read.
        prefill_read_mib: Before decoding.
        prefill_gib_per_s: The median of the samples; None if nothing was read.
        direct: Past the page cache.
        registered: Into registered buffers.
    """

    backend: str
    queue_depth: int
    tokens: int
    hit_rate: float
    misses: int
    read_mib: float
    gib_per_s: float | None
    samples_gib_per_s: list[float]
    token_us: Latencies
    mean_token_ms: float
    tokens_per_s: float | None
    prefill_read_mib: float
    prefill_gib_per_s: float | None
    direct: bool
    registered: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Replay:
    """A replay of a route trace.

    Attributes:
        trace: The file.
        trace_model: The model it was recorded from, as its header says.
        policy: Of the cache.
        cache_mib: Its budget.
        cache_experts: The most experts that were resident at one time.
        cycle_mib: What one token of the trace routes over.
        layout: `model` if the experts lie in the file as in the trace's model, `laid over` if they were
            given places in a file that is something else.
        rows: One for each backend and depth.
    """

    trace: str
    trace_model: str
    policy: str
    cache_mib: int
    cache_experts: int
    cycle_mib: float
    layout: str
    rows: list[ReplayRow]


@dataclass(frozen=True, kw_only=True, slots=True)
class Flag:
    """Something that a reader of the figures must know.

    Attributes:
        code: For programs.
        text: For people.
    """

    code: str
    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class FileFacts:
    """The file that was read.

    Attributes:
        path: As given.
        size_bytes: All its shards.
        mount_point: Of its file system; None as all that cannot be told.
        file_system: Its type.
        source: The device.
        direct: Could be opened past the page cache, and was meant to.
        fallback_reason: Why not.
        block_bytes: What reads are aligned to.
        cached_before: Fraction in the page cache before anything was done.
        cached_after: When all was done.
    """

    path: str
    size_bytes: int
    mount_point: str | None
    file_system: str | None
    source: str | None
    direct: bool
    fallback_reason: str | None
    block_bytes: int
    cached_before: float | None
    cached_after: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Host:
    """Where it was run."""

    kernel: str
    machine: str
    cpus: int
    memory_mib_per_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """All of a run.

    Attributes:
        schema: Version of this record.
        tool: `bmoe-iobench`.
        version: Of bmoe.
        created_utc: When, ISO 8601.
        command: The options in effect, as they would be typed.
        seconds: Per row, shared out over the repeats.
        repeat: Samples per row, the rows interleaved.
        host: Where.
        file: What was read.
        rows: The table; empty after a replay.
        knees: Of each curve.
        verdict: None after a replay.
        replay: None without one.
        flags: What casts doubt on the figures, or explains them.
    """

    schema: int
    tool: str
    version: str
    created_utc: str
    command: str
    seconds: float
    repeat: int
    host: Host
    file: FileFacts
    rows: list[Row]
    knees: list[Knee]
    verdict: Verdict | None
    replay: Replay | None
    flags: list[Flag]

    def as_json(self) -> dict[str, Any]:
        """Plain objects for `json.dumps`."""
        return dataclasses.asdict(self)
