"""What a session reports: the effective configuration, every token's measurements, the summary.

Plain records; nothing here measures, formats or prints. Unmeasured is None, never 0. All `_ns` are
nanoseconds, all `_bytes` bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True, slots=True)
class EffectiveConfig:
    """What really runs, as opposed to what was asked for.

    Attributes:
        mode: "streaming" or "resident".
        mode_reason: Why not the one asked for (a dense model runs resident), or None.
        model_path: As given.
        model_name: `general.name`, or None.
        architecture: `general.architecture`.
        model_bytes: All files.
        moe_layers, experts, top_k: Shape; 0 for a dense model.
        file_top_k: The file's own top-k where another was asked for, which is lossy; else None.
        expert_bytes, dense_bytes: All experts; everything else.
        cycle_bytes: Most bytes that one token routes over.
        threads, context_tokens, ubatch_tokens: As used.
        overlap: Streaming only.
        io_backend: "uring" or "threads"; None when resident.
        io_fallback_reason: Why not io_uring, or None.
        registered_buffers: Whether reads land in registered memory; None when resident.
        unregistered_reason: Why not, or None.
        direct: Whether every file is read with O_DIRECT; None when resident.
        direct_fallback_reason: Why not, or None.
        queue_depth: None when resident.
        cache_bytes: Slot memory under the budget; None when resident.
        cache_auto: Whether it was sized automatically.
        cache_arithmetic: How, in words, when it was.
        cache_experts: Whole experts that fit; of `total_experts`.
        total_experts: Over all layers.
        policy: None when resident.
        lazy_map: Whether the file was mapped without reading it; None when resident.
        repack: Whether llama.cpp's repacked layouts are in use.
        llama_cpp_version, bmoe_version: Versions.
        dense_weights: Where the weights that are no experts are; None when resident.
        chat_template: Whether the model has a chat template that works.
        chat_template_problem: Why not, when it has one.
        think_control: How reasoning can be turned off: "template" (the template has a switch), "prefill"
            (the answer is begun for the model) or "none"; None without a template.
        traced: Tracing that perturbs the run, in words; None when there is none.
        lossy: What may change the output, in words; None when nothing does.
        warm_experts: Experts to be preloaded; None when resident or not asked for.
        give_back: Whether the cache shrinks under memory pressure; None when resident.
        layers: Of the model, those without experts too.
        model_sha256: Digest of what the file's header says of the model, its weights' places included
            (`bmoe.warm.model_identity`).
    """

    mode: Literal["streaming", "resident"]
    mode_reason: str | None
    model_path: str
    model_name: str | None
    architecture: str
    model_bytes: int
    moe_layers: int
    experts: int
    top_k: int
    expert_bytes: int
    dense_bytes: int
    cycle_bytes: int
    threads: int
    context_tokens: int
    ubatch_tokens: int
    overlap: bool | None
    io_backend: str | None
    io_fallback_reason: str | None
    registered_buffers: bool | None
    unregistered_reason: str | None
    direct: bool | None
    direct_fallback_reason: str | None
    queue_depth: int | None
    cache_bytes: int | None
    cache_auto: bool | None
    cache_arithmetic: str | None
    cache_experts: int | None
    total_experts: int
    policy: str | None
    lazy_map: bool | None
    repack: bool
    llama_cpp_version: str
    bmoe_version: str
    file_top_k: int | None = None
    dense_weights: str | None = None
    chat_template: bool = False
    chat_template_problem: str | None = None
    think_control: Literal["template", "prefill", "none"] | None = None
    traced: str | None = None
    lossy: str | None = None
    warm_experts: int | None = None
    give_back: bool | None = None
    layers: int = 0
    model_sha256: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadProgress:
    """Dense weights read so far (streaming), or llama.cpp's own progress scaled to bytes (resident)."""

    done_bytes: int
    total_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadReport:
    """How opening went.

    Attributes:
        wall_ns: From the start of `open` to ready.
        dense_ns: Reading dense weights; None when resident.
        dense_bytes: Read; None when resident.
    """

    wall_ns: int
    dense_ns: int | None
    dense_bytes: int | None


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefillProgress:
    """Prompt tokens computed so far."""

    done_tokens: int
    total_tokens: int


@dataclass(frozen=True, kw_only=True, slots=True)
class MemorySample:
    """Memory of the process and of the machine at one moment; None where the kernel does not say."""

    rss_bytes: int | None
    rss_anon_bytes: int | None
    rss_file_bytes: int | None
    swap_bytes: int | None
    mem_available_bytes: int | None
    mem_free_bytes: int | None
    swap_free_bytes: int | None
    dense_resident: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerMetrics:
    """What one llama_decode did in one layer with experts.

    Attributes:
        layer: The file's `blk.N`.
        lookups, hits: Unique experts looked up; of those found.
        read_bytes: Bytes of slices asked for.
        stall_ns: Waiting for them, summed over threads, divided by threads.
        experts_ns: In the layer's expert matmuls, waiting included, as seen by one compute thread.
    """

    layer: int
    lookups: int
    hits: int
    read_bytes: int
    stall_ns: int
    experts_ns: int


@dataclass(frozen=True, kw_only=True, slots=True)
class StepMetrics:
    """Measurements around one llama_decode (a token, or one batch of the prompt).

    `wall_ns` is `stall_ns + hook_ns + compute_ns`; what runs beside (the event loop, the drive) is counted
    for itself.

    Attributes:
        tokens: Tokens computed.
        wall_ns: The call.
        stall_ns: Compute threads blocked on reads, summed over threads, divided by threads; None resident.
        hook_ns: Announcing (looking up, posting), on the critical path; None resident.
        compute_ns: What remains.
        experts_ns: In expert matmuls, waiting included, as seen by one compute thread; None resident.
        loop_ns: Event loop busy with streaming; None resident.
        lookups, hits: Unique experts looked up, and of those found; None resident.
        reads, read_bytes: Reads started and bytes of their aligned windows; None resident.
        speculative_bytes: Of those, read before they were asked for; None resident.
        evictions, rereads: None resident.
        slots_used: At the end; None resident.
        cache_bytes: Budget at the end; None resident.
        submit_latency_ns: Mean time from routing known to its first reads handed over; None without reads.
        read_latency_ns: Mean time of a read from handed over to done; None without reads.
        io_busy_ns: Time with at least one read in flight; None resident.
        dropped: Experts left out by `drop_cold_experts`; None when that is off.
        cpu_ns: CPU time of the whole process.
        minor_faults, major_faults: Of the whole process.
        overhead_ns: Between the previous llama_decode and this one; None for the first.
        memory: Sampled now and then; None in between.
        layers: By layer, when asked for; else None.
    """

    tokens: int
    wall_ns: int
    stall_ns: int | None = None
    hook_ns: int | None = None
    compute_ns: int
    experts_ns: int | None = None
    loop_ns: int | None = None
    lookups: int | None = None
    hits: int | None = None
    reads: int | None = None
    read_bytes: int | None = None
    speculative_bytes: int | None = None
    evictions: int | None = None
    rereads: int | None = None
    slots_used: int | None = None
    cache_bytes: int | None = None
    submit_latency_ns: int | None = None
    read_latency_ns: int | None = None
    io_busy_ns: int | None = None
    dropped: int | None = None
    cpu_ns: int
    minor_faults: int
    major_faults: int
    overhead_ns: int | None = None
    memory: MemorySample | None = None
    layers: tuple[LayerMetrics, ...] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenEvent:
    """One generated token.

    Attributes:
        index: From 0.
        token: Its id.
        text: What became complete with it of the answer (an unfinished character, and what may be the start
            of a stop string, is held back).
        reasoning: The same of the reasoning before the answer.
        metrics: Of the llama_decode that consumed it; every token that is reported has been decoded.
    """

    index: int
    token: int
    text: str
    metrics: StepMetrics
    reasoning: str = ""


End = Literal["length", "eog", "stop", "context", "cancelled", "error", "forced"]
"""Why a generation ended: as many tokens as asked for, the model's own end, a stop string, the context is
full, `cancel`, an error, forced tokens used up."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunSummary:
    """One generation, summed up. Decode figures exclude the prompt.

    Attributes:
        end: Why it ended.
        prompt_tokens, tokens: Prefilled, generated.
        prefill_ns, decode_ns: Sums of llama_decode wall time.
        prefill_read_bytes, decode_read_bytes: None resident.
        hit_rate: Decode hits over lookups, 0 to 1; None when resident or nothing was looked up.
        stall_ns, hook_ns, compute_ns: Decode, per `StepMetrics`; the first two None resident.
        overhead_ns: Decode time outside llama_decode.
        cpu_ns: Of decode.
        submit_latency_ns_p50, submit_latency_ns_p99: Routing known to the first reads handed to the kernel
            (the system call has returned); None unmeasured.
        slots_used, slots_total: Now; None resident.
        evictions, rereads, reads: Decode; None resident.
        peak_rss_bytes: Of the process so far, or None.
        turn: Generations before this one in the session.
        reused_tokens: Of the context, that the generation found computed and did not compute again.
        full_prefill_reason: Why nothing was reused though the conversation went on; None otherwise.
        context_tokens_used: Tokens in the context now.
        shifts: Times that the context was shifted.
        seed: Of the sampler; None when greedy.
        dropped, routed: Experts left out, of those chosen by the router, in decode; None when off.
        speculative_bytes: Of what decode read, before it was asked for; None resident.
        speculated_experts: Experts read so since the session opened that were then used.
        substituted: Choices since then that gave way to an expert in memory; None when off.
        route_committed: Layers since then routed ahead; None when off.
        route_agreed: Share of their experts that the router chose too; None when off or none.
    """

    end: End
    prompt_tokens: int
    tokens: int
    prefill_ns: int
    decode_ns: int
    prefill_read_bytes: int | None
    decode_read_bytes: int | None
    hit_rate: float | None
    stall_ns: int | None
    overhead_ns: int
    cpu_ns: int
    submit_latency_ns_p50: int | None
    submit_latency_ns_p99: int | None
    slots_used: int | None
    slots_total: int | None
    evictions: int | None
    rereads: int | None
    reads: int | None
    peak_rss_bytes: int | None
    hook_ns: int | None = None
    compute_ns: int = 0
    turn: int = 0
    reused_tokens: int = 0
    full_prefill_reason: str | None = None
    context_tokens_used: int = 0
    shifts: int = 0
    seed: int | None = None
    dropped: int | None = None
    routed: int | None = None
    speculative_bytes: int | None = None
    speculated_experts: int | None = None
    substituted: int | None = None
    route_committed: int | None = None
    route_agreed: float | None = None

    @property
    def decode_tokens_per_s(self) -> float | None:
        """Generated tokens over decode time."""
        return self.tokens / (self.decode_ns / 1e9) if self.tokens and self.decode_ns else None

    @property
    def prefill_tokens_per_s(self) -> float | None:
        """Prompt tokens over prefill time."""
        return (
            self.prompt_tokens / (self.prefill_ns / 1e9) if self.prompt_tokens and self.prefill_ns else None
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheState:
    """The expert cache now.

    Attributes:
        cache_bytes: Budget.
        slots_used, slots_ready, slots_total: Holding or receiving a slice; with memory; under the budget.
        lookups, hits: Unique experts since the session opened.
    """

    cache_bytes: int
    slots_used: int
    slots_ready: int
    slots_total: int
    lookups: int
    hits: int


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheResize:
    """The expert cache was made larger or smaller.

    Attributes:
        from_bytes, cache_bytes: Budget before and now.
        reason: "asked", or what the pressure was.
    """

    from_bytes: int
    cache_bytes: int
    reason: str
