"""Figures per token in the reference engine's CSV format, version 2, so that its scripts read ours.

It owns the columns and how our figures map to them (docs/formats.md). It must not know how a run is made.
Unmeasured is what the reference writes then: 0, or -1 where 0 would be a value.
"""

from __future__ import annotations

import mmap
import os
from typing import TYPE_CHECKING, Final

from bmoe import __version__
from bmoe.io.errors import BmoeError, FileError, UsageError
from bmoe.io.whole_file import is_same_file

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bmoe.config import GenerateRequest, SessionConfig
    from bmoe.records import EffectiveConfig, LoadReport, MemorySample, RunSummary, StepMetrics, TokenEvent

_MIB: Final = 1 << 20
_RANDOM_SEED: Final = 0xFFFFFFFF
COLUMNS: Final = (
    "step,steps,wall_ms,io_ms,compute_ms,read_bytes,cache_hit_pct,stall_ms,mgmt_ms,majflt,cpu_ms,"
    "dense_resident_frac,turn,majflt_mib,cache_budget_mib,rss_mib,rss_anon_mib,rss_file_mib,swap_mib,"
    "mem_available_mib,mem_free_mib,swap_free_mib,loop_overhead_ms,mtp_batch,mtp_draft_ms,drain_ms,adopt_ms,"
    "ra_issue_ms,ra_wd_ms"
)
# One position per llama_decode, and none of the reference's waits and drafts.
_NEVER: Final = ("1", *["0.000"] * 5)


class MetricsCsv:
    """One file. `begin` it once the model is open; then, for each generation, `prefill`, `token`s, `summary`.

    Args:
        path: Replaced if it exists.
        model_path: What it must not be.

    Raises:
        FileError: It cannot be written; also the methods.
        UsageError: It is the model.
    """

    def __init__(self, path: str, *, model_path: str) -> None:
        self._path = path
        try:
            if is_same_file(path, model_path):
                raise UsageError(f"{path} is the model: the figures would be written into it")
            self._file = open(path, "w", encoding="utf-8", errors="replace", newline="")  # noqa: SIM115 (closed by `close`)
        except (OSError, ValueError) as error:
            raise self._cannot(error) from None
        self._lookups = self._hits = 0
        self._memory: MemorySample | None = None
        self._steps = 0
        self._load_ns = 0
        self._cycle_bytes = 0
        self._cache_bytes = 0
        self._resizes = 0
        self._io_busy_ns = self._major_faults = 0

    def begin(
        self, config: SessionConfig, effective: EffectiveConfig, load: LoadReport, request: GenerateRequest
    ) -> None:
        """The preamble and the columns.

        Args:
            config: What was asked for.
            effective: What runs.
            load: How opening went.
            request: The first generation: how it samples, and how many tokens are wanted.
        """
        self._steps = request.n_predict or 0
        self._load_ns = load.wall_ns
        self._cycle_bytes = effective.cycle_bytes
        self._cache_bytes = effective.cache_bytes or 0
        self._write("".join(f"{line}\n" for line in (*_preamble(config, effective, request), COLUMNS)))

    def prefill(self, batches: Sequence[StepMetrics]) -> None:
        """The prompt, which counts in the cumulative hit rate; the figures of decode start anew."""
        for batch in batches:
            self._count(batch)
        self._io_busy_ns = self._major_faults = 0

    def _count(self, m: StepMetrics) -> None:
        self._lookups += m.lookups or 0
        self._hits += m.hits or 0
        self._io_busy_ns += m.io_busy_ns or 0
        self._major_faults += m.major_faults
        self._memory = m.memory or self._memory
        if m.cache_bytes is not None and m.cache_bytes != self._cache_bytes:
            self._cache_bytes = m.cache_bytes
            self._resizes += 1

    def token(self, event: TokenEvent, *, turn: int = 0) -> None:
        """A row."""
        m = event.metrics
        self._count(m)
        fields = (
            str(event.index + 1),
            str(self._steps),
            _ms(m.wall_ns),
            _ms(m.io_busy_ns),
            _ms(m.compute_ns),
            str(m.read_bytes or 0),
            f"{self._hit_pct():.2f}",
            _ms(m.stall_ns),
            _ms(m.hook_ns),
            str(m.major_faults),
            _ms(m.cpu_ns),
            *_memory_fields(
                self._memory, turn=turn, major_faults=m.major_faults, cache_bytes=self._cache_bytes
            ),
            _ms(m.overhead_ns),
            *_NEVER,
        )
        self._write(",".join(fields) + "\n")

    def _hit_pct(self) -> float:
        return 100 * self._hits / self._lookups if self._lookups else -1.0

    def summary(self, s: RunSummary) -> None:
        """The trailer of a generation."""
        each = 1 / s.tokens if s.tokens else 0.0

        def seconds(value_ns: float | None, decimals: int = 3) -> str:
            return f"{(value_ns or 0) / 1e9:.{decimals}f}"

        used = (s.slots_used or 0) / s.slots_total if s.slots_total else 0
        values = {
            "tokens": s.tokens,
            "s/tok": seconds(s.decode_ns * each),
            "tok/s": f"{s.decode_tokens_per_s or 0:.3f}",
            "read_MiB": _mib(s.decode_read_bytes),
            "io_s": seconds(self._io_busy_ns, 2),
            "compute_s/tok": seconds(s.compute_ns * each),
            "io_s/tok": seconds(self._io_busy_ns * each),
            "cache_hit_pct": f"{self._hit_pct():.1f}",
            "n_prompt": s.prompt_tokens,
            "load_s": seconds(self._load_ns),
            "prefill_s": seconds(s.prefill_ns),
            "prefill_tps": f"{s.prefill_tokens_per_s or 0:.2f}",
            "stall_s/tok": seconds((s.stall_ns or 0) * each),
            "mgmt_s/tok": seconds((s.hook_ns or 0) * each),
            "cache_resident_MiB": _mib(used * self._cache_bytes),
            "cache_budget_MiB": _mib(self._cache_bytes),
            "cache_resizes": self._resizes,
            "spec_read_MiB": _mib(s.speculative_bytes),
            "spec_experts": -1 if s.speculative_bytes else 0,
            "spec_useful": s.speculated_experts or 0,
            "majflt/tok": f"{self._major_faults * each:.2f}",
            "cpu_s/tok": seconds(s.cpu_ns * each, 4),
            "token_demand_MiB": _mib(self._cycle_bytes),
            "layer_demand_MiB": -1,
            "experts_routed": s.routed or 0,
            "experts_dropped": s.dropped or 0,
            "loop_overhead_s/tok": seconds(s.overhead_ns * each, 4),
            "mtp_drafted": 0,
            "mtp_accepted": 0,
            "mtp_decodes": 0,
            "mtp_draft_s/tok": seconds(0, 4),
            "drafted_steps": 0,
            "ra_committed": s.route_committed or 0,
            "ra_passthrough": 0 if s.route_committed is None else -1,
            "ra_agree_pct": f"{100 * (s.route_agreed or 0):.1f}",
            **dict.fromkeys(("ra_gemv_ms/tok", "ra_issue_ms/tok", "ra_wd_ms/tok"), "0.000"),
            **dict.fromkeys(("drain_s/tok", "adopt_s/tok"), "0.0000"),
            "evictions": s.evictions or 0,
            "rereads": s.rereads or 0,
        }
        self._write(_pairs("# summary ", **values) + "\n")

    def _write(self, text: str) -> None:
        try:
            self._file.write(text)
            self._file.flush()
        except OSError as error:
            raise self._cannot(error) from None

    def close(self) -> None:
        """Closes the file. Idempotent."""
        try:
            self._file.close()
        except OSError as error:
            raise self._cannot(error) from None

    def _cannot(self, error: Exception) -> BmoeError:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        return FileError(f"the figures cannot be written: {reason}", path=self._path)


def _preamble(config: SessionConfig, e: EffectiveConfig, request: GenerateRequest) -> tuple[str, ...]:
    sampling = request.sampling
    return (
        "# bmoe_metrics v2",
        f"# engine=bmoe-{__version__}",
        _pairs(
            "# ",
            model=os.path.basename(e.model_path),
            arch=e.architecture,
            n_layer=e.layers,
            n_expert=e.experts,
            n_expert_used=e.top_k,
            threads=e.threads,
            n_ctx=e.context_tokens,
            n_ubatch=e.ubatch_tokens,
            chatml=int(bool(request.messages)),
        ),
        _pairs(
            "# ",
            moe_stream=int(e.mode == "streaming"),
            cache_mb=(e.cache_bytes or 0) // _MIB,
            cache_auto=int(bool(e.cache_auto)),
            cache_floor_mb=(config.cache_floor_bytes or 0) // _MIB,
            cache_ceil_mb=(config.cache_ceil_bytes or 0) // _MIB,
            force_cache=0,
            load_all=0,
            io_threads=e.queue_depth or 0,
            o_direct=int(bool(e.direct)),
            overlap=int(bool(e.overlap)),
            io_two_wave=0,
            prefetch=config.prefetch_layers,
            route_ahead=config.route_ahead,
            predict_prefetch=int(config.predict_prefetch),
            predict_log=int(config.predict_log),
            predict_spec_max=0,
            prefetch_sync=0,
            dense_weights=e.dense_weights or "mmap",
            drop_cold_frac=f"{config.drop_cold_experts:.4g}",
            drop_renorm=int(config.drop_renormalise),
            drop_prefill=int(config.drop_in_prefill),
        ),
        _pairs(
            "# ",
            temp=f"{sampling.temperature:g}",
            top_k=sampling.top_k,
            top_p=f"{sampling.top_p:g}",
            seed=_RANDOM_SEED if sampling.seed is None else sampling.seed,
            compute_trace_layers=int(config.compute_trace_layers is not None),
            spec="off",
            spec_draft_max=0,
            mtp_p_min=0,
            ngram_min_match=0,
        ),
        *(f"# {name}={_word(text)}" for name, text in (("traced", e.traced), ("lossy", e.lossy)) if text),
    )


def _memory_fields(
    s: MemorySample | None, *, turn: int, major_faults: int, cache_bytes: int
) -> tuple[str, ...]:
    """From `dense_resident_frac` to `swap_free_mib`; a sample holds until the next."""
    sizes: tuple[int | None, ...] = (None,) * 7
    if s is not None:
        sizes = (
            s.rss_bytes,
            s.rss_anon_bytes,
            s.rss_file_bytes,
            s.swap_bytes,
            s.mem_available_bytes,
            s.mem_free_bytes,
            s.swap_free_bytes,
        )
    return (
        "-1.000" if s is None or s.dense_resident is None else f"{s.dense_resident:.3f}",
        str(turn),
        f"{major_faults * mmap.PAGESIZE / _MIB:.2f}",
        _mib(cache_bytes),
        *map(_mib, sizes),
    )


def _ms(value_ns: int | None) -> str:
    return f"{(value_ns or 0) / 1e6:.3f}"


def _mib(value_bytes: float | None) -> str:
    return f"{(value_bytes or 0) / _MIB:.1f}"


def _word(value: object) -> str:
    return "_".join(str(value).split())


def _pairs(head: str, **values: object) -> str:
    """`key=value` words on one line; white space in a value would end it."""
    return head + " ".join(f"{key}={_word(value)}" for key, value in values.items())
