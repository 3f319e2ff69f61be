"""Synthetic runs for the tests of reports and comparisons: figures by rule, as the lines of a log."""

from __future__ import annotations

import dataclasses
import datetime as dt
import hashlib
import json
import tempfile
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from bmoe.logs import LogStore, ingest, open_logs
from bmoe.logs.run_data import Run, load_run
from bmoe.records import EffectiveConfig, LayerMetrics, LoadReport, MemorySample, RunSummary, StepMetrics
from bmoe.telemetry import SCHEMA_VERSION

if TYPE_CHECKING:
    from collections.abc import Iterator

MIB = 1 << 20
MS = 1_000_000


@dataclass(frozen=True, kw_only=True)
class SyntheticRun:
    """A run of one turn. Series are per decoded token; ints stand for all tokens.

    `compute_ns`, `stall_ns` and `hook_ns` make up the wall time.
    """

    run_id: str
    tokens: int
    compute_ns: Any = 40 * MS
    stall_ns: Any = 8 * MS
    hook_ns: Any = 2 * MS
    overhead_ns: Any = 1 * MS
    cpu_ns: Any = 150 * MS
    lookups: Any = 100
    hits: Any = 80
    read_bytes: Any = 20 * MIB
    major_faults: Any = 0
    cache_budget_bytes: Any = 512 * MIB
    swap_bytes: Any = 0
    token_ids: Any = None
    layers: int = 0
    prompt: str = "a prompt"
    started: str = "2026-11-30T10:00:00.000000Z"
    config: dict[str, Any] = field(default_factory=dict)
    machine: dict[str, Any] = field(default_factory=dict)
    exit_code: int | None = 0

    def series(self, name: str) -> list[int]:
        return [int(v) for v in np.broadcast_to(getattr(self, name), (self.tokens,)).tolist()]

    def lines(self) -> list[str]:
        """The log, JSON Lines."""
        made = [self._start(), {"event": "load", "report": dataclasses.asdict(
            LoadReport(wall_ns=1_500 * MS, dense_ns=None, dense_bytes=None))}]  # fmt: skip
        batch = step(tokens=16, wall_ns=800 * MS, stall_ns=200 * MS, hook_ns=0, read_bytes=300 * MIB)
        made.append({"event": "prefill", "batches": [record(batch)], "total": total(batch)})
        steps = self.steps()
        ids = range(1000, 1000 + self.tokens) if self.token_ids is None else self.token_ids
        for i, (token, metrics) in enumerate(zip(ids, steps, strict=True)):
            made.append(
                {"event": "token", "index": i, "token": int(token), "text": "x", "metrics": record(metrics)}
            )
            if metrics.layers is not None:
                layers = [dataclasses.asdict(layer) for layer in metrics.layers]
                made.append({"event": "layer", "turn": 0, "step": i, "layers": layers})
        if self.exit_code is not None:
            made += [self._summary(steps), {"event": "run_end", "exit_code": self.exit_code}]
        start = dt.datetime.fromisoformat(self.started)
        return [
            json.dumps({
                "schema": SCHEMA_VERSION, "event": fields.pop("event"), "run_id": self.run_id, "seq": seq,
                "mono_ns": 10**12 + seq * 50 * MS,
                "time": (start + dt.timedelta(milliseconds=50 * seq)).isoformat().replace("+00:00", "Z"),
                **fields,
            })
            for seq, fields in enumerate(made)
        ]  # fmt: skip

    def steps(self) -> list[StepMetrics]:
        names = (
            "compute_ns", "stall_ns", "hook_ns", "overhead_ns", "cpu_ns", "lookups", "hits", "read_bytes",
            "major_faults", "cache_budget_bytes", "swap_bytes",
        )  # fmt: skip
        made = []
        for i, values in enumerate(zip(*map(self.series, names), strict=True)):
            v = dict(zip(names, values, strict=True))
            made.append(
                step(
                    tokens=1,
                    wall_ns=v["compute_ns"] + v["stall_ns"] + v["hook_ns"],
                    stall_ns=v["stall_ns"],
                    hook_ns=v["hook_ns"],
                    overhead_ns=v["overhead_ns"] if i else None,
                    cpu_ns=v["cpu_ns"],
                    lookups=v["lookups"],
                    hits=v["hits"],
                    read_bytes=v["read_bytes"],
                    major_faults=v["major_faults"],
                    cache_bytes=v["cache_budget_bytes"],
                    memory=memory(i, v["swap_bytes"]) if i % 8 == 0 else None,
                    layers=self._layers(i, v["stall_ns"]),
                )
            )
        return made

    def _layers(self, index: int, stall_ns: int) -> tuple[LayerMetrics, ...] | None:
        if not self.layers:
            return None
        return tuple(
            LayerMetrics(
                layer=layer,
                lookups=8,
                hits=(layer + index) % 9,
                read_bytes=(8 - (layer + index) % 9) * MIB,
                stall_ns=stall_ns // self.layers,
                experts_ns=stall_ns // self.layers,
            )
            for layer in range(self.layers)
        )

    def _start(self) -> dict[str, Any]:
        return {
            "event": "run_start",
            "argv": ["decode"],
            "requested": {},
            "effective": {**dataclasses.asdict(effective()), **self.config},
            "prompt": {"bytes": len(self.prompt), "sha256": hashlib.sha256(self.prompt.encode()).hexdigest()},
            "request": {"n_predict": self.tokens, "forced_tokens": 0, "ignore_eog": False},
            "machine": {
                "kernel": "6.1", "architecture": "x86_64", "cpu": "a CPU", "cpus": 8, "usable_cpus": 8,
                "memory_bytes": 16 << 30, **self.machine,
            },
            "versions": {"python": "3.11.9", "numpy": "2.0"},
        }  # fmt: skip

    def _summary(self, steps: list[StepMetrics]) -> dict[str, Any]:
        def decoded(name: str) -> int:
            return int(sum(getattr(s, name) or 0 for s in steps))

        wall = decoded("wall_ns")
        summary = RunSummary(
            end="length", prompt_tokens=16, tokens=len(steps), prefill_ns=800 * MS, decode_ns=wall,
            prefill_read_bytes=300 * MIB, decode_read_bytes=decoded("read_bytes"),
            hit_rate=decoded("hits") / decoded("lookups") if steps else None, stall_ns=decoded("stall_ns"),
            overhead_ns=decoded("overhead_ns"), cpu_ns=decoded("cpu_ns"), submit_latency_ns_p50=None,
            submit_latency_ns_p99=None, slots_used=None, slots_total=None, evictions=0, rereads=0, reads=0,
            peak_rss_bytes=None, hook_ns=decoded("hook_ns"), compute_ns=decoded("compute_ns"),
        )  # fmt: skip
        return {
            "event": "summary",
            "summary": record(summary),
            "prefill_tokens_per_s": summary.prefill_tokens_per_s,
            "decode_tokens_per_s": summary.decode_tokens_per_s,
        }


def record(value: Any) -> dict[str, Any]:
    return dataclasses.asdict(value)


def total(batch: StepMetrics) -> dict[str, Any]:
    return {k: v for k, v in dataclasses.asdict(batch).items() if k not in {"memory", "layers"}}


def effective() -> EffectiveConfig:
    return EffectiveConfig(
        mode="streaming", mode_reason=None, model_path="/models/toy.gguf", model_name="Toy 8x1",
        architecture="qwen3moe", model_bytes=2 << 30, moe_layers=4, experts=8, top_k=2, expert_bytes=1 << 30,
        dense_bytes=1 << 30, cycle_bytes=256 * MIB, threads=4, context_tokens=2048, ubatch_tokens=512,
        overlap=True, io_backend="uring", io_fallback_reason=None, registered_buffers=True,
        unregistered_reason=None, direct=True, direct_fallback_reason=None, queue_depth=32,
        cache_bytes=512 * MIB, cache_auto=False, cache_arithmetic=None, cache_experts=16, total_experts=32,
        policy="aged", lazy_map=True, repack=False, llama_cpp_version="0.3.36", bmoe_version="0.1.0",
    )  # fmt: skip


def step(**figures: Any) -> StepMetrics:
    """Measurements of one llama_decode: those given, and plain ones for the rest."""
    wall, stall, hook = figures["wall_ns"], figures["stall_ns"], figures["hook_ns"]
    values: dict[str, Any] = {
        "compute_ns": wall - stall - hook, "experts_ns": wall // 2, "loop_ns": wall // 20, "lookups": 100,
        "hits": 50, "reads": 40, "speculative_bytes": 0, "evictions": 3, "rereads": 1, "slots_used": 90,
        "cache_bytes": 512 * MIB, "submit_latency_ns": 50_000, "read_latency_ns": 400_000,
        "io_busy_ns": wall // 4, "dropped": None, "cpu_ns": wall * 3, "minor_faults": 5, "major_faults": 0,
        "overhead_ns": None,
    }  # fmt: skip
    return StepMetrics(**{**values, **figures})


def memory(index: int, swap_bytes: int) -> MemorySample:
    return MemorySample(
        rss_bytes=(2000 + index // 4) * MIB,
        rss_anon_bytes=(1800 + index // 4) * MIB,
        rss_file_bytes=200 * MIB,
        swap_bytes=swap_bytes,
        mem_available_bytes=(4000 - index // 4) * MIB,
        mem_free_bytes=None,
        swap_free_bytes=None,
        dense_resident=None,
    )


def noisy(seed: int, tokens: int, mean_ns: float, *, spread: float = 0.15, rho: float = 0.4) -> Any:
    """[tokens] times that vary log-normally and resemble the ones before, about a warm-up's course."""
    rng = np.random.default_rng(seed)
    drive = rng.normal(size=tokens)
    level = np.empty(tokens)
    now = rng.normal()
    for i in range(tokens):
        now = rho * now + np.sqrt(1 - rho * rho) * drive[i]
        level[i] = now
    warm = 1 + 1.5 * np.exp(-np.arange(tokens) / 20)
    return (mean_ns * warm * np.exp(spread * level - spread**2 / 2)).astype(np.int64)


@contextmanager
def database(*runs: SyntheticRun) -> Iterator[LogStore]:
    """A database in memory with these runs."""
    with tempfile.TemporaryDirectory() as folder, open_logs(":memory:", read_only=False) as store:
        path = Path(folder, "runs.jsonl")
        path.write_text("".join(f"{line}\n" for run in runs for line in run.lines()), encoding="utf-8")
        ingest(store, [str(path)])
        yield store


def loaded(*runs: SyntheticRun) -> list[Run]:
    """The runs as reports take them, through the database."""
    with database(*runs) as store:
        return [load_run(store, run.run_id) for run in runs]
