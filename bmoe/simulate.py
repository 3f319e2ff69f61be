"""How fast a model would run with another drive, cache or machine, from a recorded routing.

It owns the arithmetic: a trace is replayed through the engine's own policy, what is missed is read by a model
of a drive, what is computed by a model of a machine. It must not know how anything is shown or measured.

One token takes

    dense + sum over layers of max(read, experts + loop) + latency of the layers that miss

which is the layered bound (docs/benchmarks.md) with what a real engine adds to it: the time from a routing
that is known to reads that are under way, and the CPU time that reading takes from computing.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from bmoe.bench.bounds import passing_bursts
from bmoe.io.errors import FormatError, UsageError
from bmoe.pipeline.slots import total_slot_bytes
from bmoe.policies import policy_named
from bmoe.route.engine_policy import EnginePolicy
from bmoe.route.lookups import make_lookups
from bmoe.route.reading import read_trace
from bmoe.route.spans import Spans

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from bmoe.model import ModelLayout
    from bmoe.route.lookups import Lookups
    from bmoe.route.trace import RouteTrace

GIB: Final = 1 << 30
_DEFAULT_SLICES: Final = 3  # gate, up, down
_BLOCK_BYTES: Final = 4096
_EMBEDDING: Final = "token_embd.weight"


@dataclass(frozen=True, kw_only=True, slots=True)
class Drive:
    """What reads take.

    Attributes:
        name: For tables.
        bytes_per_s: Of a deep queue.
        single_bytes_per_s: Of one read at a time, its latency aside.
        latency_s: Of one read, its bytes aside.
        depth: Reads that the drive serves at one time.
        bursts: (reads, bytes, seconds) as measured; takes the place of all others but `bytes_per_s`.
        sustained_bytes_per_s: What a limit that averages lets through in the long run; None for no limit.
    """

    name: str
    bytes_per_s: float
    single_bytes_per_s: float
    latency_s: float
    depth: int = 32
    bursts: tuple[tuple[int, float, float], ...] = ()
    sustained_bytes_per_s: float | None = None

    def burst_s(self, reads: NDArray[np.floating], read_bytes: NDArray[np.floating]) -> NDArray[np.float64]:
        """[layers] seconds until the last of `reads` reads, `read_bytes` in all, has arrived."""
        if self.bursts:
            counts = np.array([0, *(n for n, _, _ in self.bursts)], dtype=np.float64)
            times = np.array([0.0, *(s for _, _, s in self.bursts)])
            measured_bytes = self.bursts[0][1] / self.bursts[0][0]
            # As many reads of the measured size as make these bytes.
            same = read_bytes / measured_bytes
            found: NDArray[np.float64] = np.interp(same, counts, times)
            found = np.where(same > counts[-1], times[-1] * same / counts[-1], found)
            slowest: NDArray[np.float64] = np.maximum(found, read_bytes / self.bytes_per_s)
            return slowest
        rounds = np.ceil(reads / self.depth)
        each = np.divide(read_bytes, reads, out=np.zeros_like(read_bytes), where=reads > 0)
        busy = np.maximum(rounds * each / self.single_bytes_per_s, read_bytes / self.bytes_per_s)
        return np.where(reads > 0, self.latency_s + busy, 0.0)


DRIVES: Final = {
    "ufs": Drive(name="ufs", bytes_per_s=2 * GIB, single_bytes_per_s=1.9 * GIB, latency_s=150e-6),
    "pcie4": Drive(name="pcie4", bytes_per_s=7 * GIB, single_bytes_per_s=3.5 * GIB, latency_s=80e-6),
    "pcie5": Drive(name="pcie5", bytes_per_s=14 * GIB, single_bytes_per_s=5 * GIB, latency_s=70e-6),
}
"""Phone flash, and NVMe on four lanes of PCI Express 4 and 5."""


def drive_named(text: str) -> Drive:
    """A preset, or any bandwidth in GiB/s.

    Raises:
        UsageError: It is neither.
    """
    if text in DRIVES:
        return DRIVES[text]
    try:
        rate = float(text)
    except ValueError:
        rate = math.nan
    if not 0.001 <= rate <= 10_000:
        raise UsageError(
            f"drive {text!r} is neither one of {', '.join(DRIVES)} nor GiB/s from 0.001 to 10000"
        )
    return Drive(
        name=f"{rate:g} GiB/s",
        bytes_per_s=rate * GIB,
        single_bytes_per_s=min(rate, 3.5) * GIB,
        latency_s=100e-6,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """What computing takes.

    Attributes:
        name: For tables.
        cores: Compute threads, each on a core.
        dense_s_per_byte: Per byte of weights that every token uses.
        expert_s_per_byte: Per byte of experts that are used.
        loop_s_per_byte: CPU time per byte read.
        layer_latency_s: From a routing that is known to the first reads under way.
    """

    name: str
    cores: int
    dense_s_per_byte: float
    expert_s_per_byte: float
    loop_s_per_byte: float = 20e-6 / (1 << 20)
    layer_latency_s: float = 150e-6

    @classmethod
    def of_cores(cls, cores: int, *, core_bytes_per_s: float, memory_bytes_per_s: float) -> Machine:
        """Decoding is as fast as weights can be had from memory: by each core, and by all together."""
        rate = min(cores * core_bytes_per_s, memory_bytes_per_s)
        return cls(name=f"{cores} cores", cores=cores, dense_s_per_byte=1 / rate, expert_s_per_byte=1 / rate)


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A trace, as it would be run with a model.

    Attributes:
        lookups: What is routed to.
        measured: [batches] bool, the batches whose time counts.
        slices: Reads per expert.
        dense_bytes: Weights that every token uses.
        expert_bytes: All experts of all layers that the model has.
        tokens: That count.
        slot_share: Of the memory for experts, what holds them: slots are whole pages.
    """

    lookups: Lookups
    measured: NDArray[np.bool_]
    slices: float
    dense_bytes: int
    expert_bytes: int
    tokens: int
    slot_share: float = 1.0

    @property
    def cycle_bytes(self) -> float:
        """Experts that one token uses, on average."""
        look = self.lookups
        return float(look.size_of[look.entry][self.measured[look.batch_of]].sum()) / self.tokens


@dataclass(frozen=True, kw_only=True, slots=True)
class Simulated:
    """One prediction. All times per token.

    Attributes:
        drive, machine, policy: Names.
        cache_bytes: Memory for experts.
        hit_rate: Of the experts looked up.
        mib_per_token: Read.
        dense_ms, experts_ms: Computing.
        waiting_ms: For reads, beyond what computing hides.
        latency_ms: Before reads are under way.
        token_ms: All of it.
        tok_per_s: Tokens per second.
    """

    drive: str
    machine: str
    policy: str
    cache_bytes: int
    hit_rate: float
    mib_per_token: float
    dense_ms: float
    experts_ms: float
    waiting_ms: float
    latency_ms: float
    token_ms: float
    tok_per_s: float


def make_workload(
    trace: RouteTrace, layout: ModelLayout | None, *, last_tokens: int | None = None, scale: float = 1.0
) -> Workload:
    """Puts a trace and a model together.

    Args:
        trace: The routing.
        layout: The model, whose layers with experts take the trace's first ones; None takes sizes from the
            trace.
        last_tokens: Only so many decoded tokens at the end count; those before fill the cache. None for all.
        scale: Makes experts and dense weights larger or smaller than they are.

    Raises:
        FormatError: The trace has too few layers for the model, or no sizes and no model, or no tokens.
    """
    slices, slot_share = float(_DEFAULT_SLICES), 1.0
    if layout is not None:
        slot_share = layout.expert_bytes / total_slot_bytes(layout.tensors, _BLOCK_BYTES)
        trace, slices = _with_model(trace, layout)
        dense, experts = dense_bytes_per_token(layout), layout.expert_bytes
    else:
        dense = sum(trace.dense_bytes_of.values())
        experts = int(trace.sizes().sum()) * trace.experts
    lookups = make_lookups(trace)
    lookups = dataclasses.replace(
        lookups, size_of=np.maximum(1, np.rint(lookups.size_of * scale)).astype(np.int64)
    )
    measured = lookups.decode.copy()
    if last_tokens is not None:
        first = lookups.first_row[lookups.batch_start[:-1]]
        # Steps count within a turn, and turns only go up.
        token = trace.turn[first].astype(np.int64) << 32 | trace.step[first].astype(np.int64)
        decoded = np.unique(token[measured])
        measured &= token >= decoded[-min(last_tokens, len(decoded)) :].min(initial=np.iinfo(np.int64).max)
    # A token is as many batches as layers; a layer may be missing in none.
    tokens = int(np.bincount(lookups.batch_layer[measured], minlength=1).max()) if measured.any() else 0
    if not tokens:
        raise FormatError("has no decoded tokens", path=trace.path)
    return Workload(
        lookups=lookups,
        measured=measured,
        slices=slices,
        dense_bytes=round(dense * scale),
        expert_bytes=round(experts * scale),
        tokens=tokens,
        slot_share=slot_share,
    )


def _with_model(trace: RouteTrace, layout: ModelLayout) -> tuple[RouteTrace, float]:
    layers = len(layout.layer_numbers)
    if len(trace.layers) < layers:
        raise FormatError(
            "has too few layers for this model",
            path=trace.path,
            expected=f"{layers} or more",
            got=len(trace.layers),
        )
    kept = [int(number) for number in trace.layers[:layers]]
    spans = Spans(text="of the model", ranges=tuple((number, number + 1) for number in kept))
    sizes = [0] * layers
    for tensor in layout.tensors:
        sizes[tensor.layer] += tensor.slice_bytes
    chosen = trace.select(layers=spans)
    return (
        dataclasses.replace(chosen, expert_bytes_of=dict(zip(kept, sizes, strict=True))),
        len(layout.tensors) / layers,
    )


def dense_bytes_per_token(layout: ModelLayout) -> int:
    """Weights that every token uses: all but experts, and but for an embedding of which one row is read."""
    names = {tensor.name: tensor.size_bytes for tensor in layout.facts.tensors}
    rows_only = names.get(_EMBEDDING, 0) if "output.weight" in names else 0
    return layout.dense_bytes - rows_only


def simulate(
    work: Workload,
    *,
    drives: Sequence[Drive],
    machines: Sequence[Machine],
    caches_bytes: Sequence[int],
    policy: str,
) -> list[Simulated]:
    """Predicts all combinations, cache by cache.

    Args:
        work: What is run.
        drives: With what drives.
        machines: On what machines.
        caches_bytes: Memory for experts.
        policy: A name of `bmoe.policies`.

    Raises:
        UsageError: No such policy.
    """
    replay = EnginePolicy(work.lookups, policy_named(policy))
    found = []
    for cache_bytes in caches_bytes:
        hits = replay.hits(round(cache_bytes * work.slot_share))
        for drive, machine in itertools.product(drives, machines):
            one = _predict(work, hits, drive, machine)
            found.append(dataclasses.replace(one, cache_bytes=cache_bytes, policy=policy))
    return found


def _predict(work: Workload, hits: NDArray[np.bool_], drive: Drive, machine: Machine) -> Simulated:
    look, measured = work.lookups, work.measured
    batches = len(look.decode)
    batch, size = look.batch_of, look.size_of[look.entry].astype(np.float64)
    used_bytes = np.bincount(batch, weights=size, minlength=batches)[measured]
    missed_bytes = np.bincount(batch[~hits], weights=size[~hits], minlength=batches)[measured]
    missed = np.bincount(batch[~hits], minlength=batches)[measured].astype(np.float64)
    read_s = drive.burst_s(missed * work.slices, missed_bytes.astype(np.float64))
    experts_s = used_bytes * machine.expert_s_per_byte
    busy_s = experts_s + missed_bytes * machine.loop_s_per_byte / machine.cores
    layer_s = np.maximum(read_s, busy_s)
    tokens = work.tokens
    dense_s = work.dense_bytes * machine.dense_s_per_byte
    latency_s = float((missed > 0).sum()) * machine.layer_latency_s / tokens
    token_s = dense_s + float(layer_s.sum()) / tokens + latency_s
    if drive.sustained_bytes_per_s is not None:
        token_s = max(token_s, float(missed_bytes.sum()) / tokens / drive.sustained_bytes_per_s)
    counted = measured[batch]
    return Simulated(
        drive=drive.name,
        machine=machine.name,
        policy="",
        cache_bytes=0,
        hit_rate=float(hits[counted].mean()),
        mib_per_token=float(missed_bytes.sum()) / tokens / (1 << 20),
        dense_ms=dense_s * 1e3,
        experts_ms=float(experts_s.sum()) / tokens * 1e3,
        waiting_ms=float((layer_s - experts_s).sum()) / tokens * 1e3,
        latency_ms=latency_s * 1e3,
        token_ms=token_s * 1e3,
        tok_per_s=1 / token_s,
    )


def calibrated(
    work: Workload,
    drive: Mapping[str, Any],
    cached: Mapping[str, Any],
    *,
    threads: int,
    submit_us: float | None,
) -> tuple[Drive, Machine]:
    """The models of a drive and a machine from what `bmoe bench` measured of them.

    Args:
        work: What was run.
        drive: Figures of the side `drive`, with `limited` where a control group limits it.
        cached: Figures of the side with everything cached.
        threads: Of that side.
        submit_us: From routing known to reads under way, measured; None takes the default.
    """
    read_bytes = drive["read_bytes"]
    bursts = passing_bursts(drive) if drive.get("limited") else drive["burst_s"]
    points = sorted((int(n), seconds) for n, seconds in bursts.items())
    experts_s = cached["experts_s_per_token"]
    made = Machine(
        name="measured",
        cores=threads,
        dense_s_per_byte=(1 / cached["decode_tok_per_s"] - experts_s) / max(work.dense_bytes, 1),
        expert_s_per_byte=experts_s / work.cycle_bytes,
        loop_s_per_byte=drive["burst_cpu_us_per_mib"] / 1e6 / (1 << 20),
    )
    if submit_us is not None:
        made = dataclasses.replace(made, layer_latency_s=submit_us / 1e6)
    sustained = rate = drive["drive_gib_per_s"] * GIB
    if drive.get("limited"):
        rate = max(n * read_bytes / seconds for n, seconds in points)
    return (
        Drive(
            name="measured",
            bytes_per_s=rate,
            single_bytes_per_s=rate,
            latency_s=0.0,
            bursts=tuple((n, float(n * read_bytes), float(seconds)) for n, seconds in points),
            sustained_bytes_per_s=sustained if drive.get("limited") else None,
        ),
        made,
    )


def with_fitted_latency(
    work: Workload, drive: Drive, machine: Machine, *, cache_bytes: int, policy: str, tok_per_s: float
) -> Machine:
    """The machine with the latency per layer that makes one measured point come out.

    What a layer's reads take longer than on an idle drive (waking up the loop, and threads that wait) is a
    constant of a machine that nothing else tells. Fitted at one point, it is tested by all others.

    Args:
        work: What was run.
        drive: Its drive.
        machine: All else about it.
        cache_bytes: Of the measured point.
        policy: Likewise.
        tok_per_s: What was measured.

    Returns:
        The same machine if nothing was read, since then nothing can be learned.
    """
    plain = dataclasses.replace(machine, layer_latency_s=0.0)
    one_each = dataclasses.replace(machine, layer_latency_s=1.0)
    without, second_each = simulate(
        work, drives=[drive], machines=[plain, one_each], caches_bytes=[cache_bytes], policy=policy
    )
    layers_that_miss = second_each.latency_ms / 1e3
    if not layers_that_miss:
        return machine
    left_s = 1 / tok_per_s - without.token_ms / 1e3
    return dataclasses.replace(machine, layer_latency_s=max(0.0, left_s / layers_that_miss))


def load_workload(
    trace_path: str, model_path: str | None, *, last_tokens: int | None = None, scale: float = 1.0
) -> Workload:
    """`make_workload` from files.

    Raises:
        FileError, FormatError: One of them cannot be read, or they do not go together.
        UsageError: The model has no experts.
    """
    layout = None
    if model_path is not None:
        from bmoe.gguf_file import read_gguf  # noqa: PLC0415 (a trace alone does without)
        from bmoe.model import lay_out  # noqa: PLC0415 (same)

        layout = lay_out(read_gguf(model_path))
        if not layout.is_moe:
            raise UsageError(f"{model_path} has no experts: there is nothing to simulate")
    return make_workload(read_trace(trace_path), layout, last_tokens=last_tokens, scale=scale)
