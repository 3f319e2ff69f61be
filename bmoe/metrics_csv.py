"""Figures per token in the reference engine's CSV format, version 2, so that its scripts read ours.

It owns the columns and how our figures map to them (docs/formats.md). It must not know how a run is made.
"""

from __future__ import annotations

import mmap
import os
from typing import TYPE_CHECKING, Final

from bmoe import __version__
from bmoe.io.errors import FileError, UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bmoe.config import GenerateRequest, SessionConfig
    from bmoe.records import EffectiveConfig, LoadReport, MemorySample, RunSummary, StepMetrics, TokenEvent

_MIB: Final = 1 << 20
COLUMNS: Final = (
    "step,steps,wall_ms,io_ms,compute_ms,read_bytes,cache_hit_pct,stall_ms,mgmt_ms,majflt,cpu_ms,"
    "dense_resident_frac,turn,majflt_mib,cache_budget_mib,rss_mib,rss_anon_mib,rss_file_mib,swap_mib,"
    "mem_available_mib,mem_free_mib,swap_free_mib,loop_overhead_ms,mtp_batch,mtp_draft_ms,drain_ms,adopt_ms,"
    "ra_issue_ms,ra_wd_ms"
)


class MetricsCsv:
    """One file. `begin` it once the model is open; then a `token` each, and `summary` after each generation.

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
            if os.path.exists(path) and os.path.exists(model_path) and os.path.samefile(path, model_path):
                raise UsageError(f"{path} is the model: the figures would be written into it")
            self._file = open(path, "w", encoding="utf-8", errors="replace")  # noqa: SIM115 (closed by `close`)
        except (OSError, ValueError) as error:
            raise self._cannot(error) from None
        self._lookups = self._hits = 0
        self._memory: MemorySample | None = None
        self._steps = 0
        self._load_s = 0.0
        self._cache_bytes = 0

    def begin(
        self, config: SessionConfig, effective: EffectiveConfig, load: LoadReport, request: GenerateRequest
    ) -> None:
        """The preamble and the columns."""
        self._steps = request.n_predict or 0
        self._load_s = load.wall_ns / 1e9
        e, sampling = effective, request.sampling
        streaming = e.mode == "streaming"
        self._cache_bytes = e.cache_bytes or 0
        lines = (
            "# bmoe_metrics v2",
            f"# engine=bmoe-{__version__}",
            _pairs(
                "# ",
                model=os.path.basename(e.model_path),
                arch=e.architecture,
                n_layer=e.moe_layers,
                n_expert=e.experts,
                n_expert_used=e.top_k,
                threads=e.threads,
                n_ctx=e.context_tokens,
                n_ubatch=e.ubatch_tokens,
                chatml=int(bool(request.messages)),
            ),
            _pairs(
                "# ",
                moe_stream=int(streaming),
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
                seed=0 if sampling.seed is None else sampling.seed,
                compute_trace_layers=int(config.compute_trace_layers is not None),
                spec="off",
                spec_draft_max=0,
                mtp_p_min=0,
                ngram_min_match=0,
            ),
            COLUMNS,
        )
        self._write("".join(f"{line}\n" for line in lines))

    def prefill(self, batches: Sequence[StepMetrics]) -> None:
        """The prompt counts in the cumulative hit rate."""
        for batch in batches:
            self._count(batch)

    def _count(self, m: StepMetrics) -> None:
        self._lookups += m.lookups or 0
        self._hits += m.hits or 0
        self._memory = m.memory or self._memory
        self._cache_bytes = m.cache_bytes or self._cache_bytes

    def token(self, event: TokenEvent, *, turn: int = 0) -> None:
        """A row."""
        m = event.metrics
        self._count(m)
        s = self._memory
        memory = (
            (
                s.rss_bytes,
                s.rss_anon_bytes,
                s.rss_file_bytes,
                s.swap_bytes,
                s.mem_available_bytes,
                s.mem_free_bytes,
                s.swap_free_bytes,
            )
            if s
            else (None,) * 7
        )
        dense = None if s is None else s.dense_resident
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
            "-1" if dense is None else f"{dense:.3f}",
            str(turn),
            f"{m.major_faults * mmap.PAGESIZE / _MIB:.2f}",
            f"{self._cache_bytes / _MIB:.1f}",
            *("-1" if value is None else f"{value / _MIB:.1f}" for value in memory),
            _ms(m.overhead_ns),
            "1",
            *["0.000"] * 5,
        )
        self._write(",".join(fields) + "\n")

    def _hit_pct(self) -> float:
        return 100 * self._hits / self._lookups if self._lookups else -1.0

    def summary(self, s: RunSummary, *, cycle_bytes: int) -> None:
        """The trailer of a generation."""
        n = s.tokens
        per_token = (1 / n) if n else 0.0
        seconds = s.decode_ns / 1e9
        self._write(
            _pairs(
                "# summary ",
                **{
                    "tokens": n,
                    "s/tok": f"{seconds * per_token:.4f}",
                    "tok/s": f"{s.decode_tokens_per_s or 0:.3f}",
                    "read_MiB": f"{(s.decode_read_bytes or 0) / _MIB:.1f}",
                    "io_s": "-1",
                    "compute_s/tok": f"{s.compute_ns / 1e9 * per_token:.4f}",
                    "io_s/tok": "-1",
                    "cache_hit_pct": f"{self._hit_pct():.2f}",
                    "n_prompt": s.prompt_tokens,
                    "load_s": f"{self._load_s:.3f}",
                    "prefill_s": f"{s.prefill_ns / 1e9:.3f}",
                    "prefill_tps": f"{s.prefill_tokens_per_s or 0:.2f}",
                    "stall_s/tok": f"{(s.stall_ns or 0) / 1e9 * per_token:.4f}",
                    "mgmt_s/tok": f"{(s.hook_ns or 0) / 1e9 * per_token:.4f}",
                    "cache_budget_MiB": f"{self._cache_bytes / _MIB:.0f}",
                    "cpu_s/tok": f"{s.cpu_ns / 1e9 * per_token:.4f}",
                    "token_demand_MiB": f"{cycle_bytes / _MIB:.1f}",
                    "experts_routed": -1 if s.routed is None else s.routed,
                    "experts_dropped": -1 if s.dropped is None else s.dropped,
                    "loop_overhead_s/tok": f"{s.overhead_ns / 1e9 * per_token:.4f}",
                    "evictions": -1 if s.evictions is None else s.evictions,
                    "rereads": -1 if s.rereads is None else s.rereads,
                },
            )
            + "\n"
        )

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

    def _cannot(self, error: Exception) -> FileError:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        return FileError(f"the figures cannot be written: {reason}", path=self._path)


def _ms(value_ns: int | None) -> str:
    return "0.000" if value_ns is None else f"{value_ns / 1e6:.3f}"


def _pairs(head: str, **values: object) -> str:
    """`key=value` words on one line; white space in a value would end it."""
    return head + " ".join(f"{key}={'_'.join(str(value).split())}" for key, value in values.items())
