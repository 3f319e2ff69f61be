"""The reference engine's per-token format: exact text, its sentinels, and files that cannot be."""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path

import pytest

import bmoe
from bmoe.config import GenerateRequest, Sampling, SessionConfig
from bmoe.io.errors import FileError, UsageError
from bmoe.metrics_csv import COLUMNS, MetricsCsv
from bmoe.records import EffectiveConfig, MemorySample, RunSummary, StepMetrics, TokenEvent
from tests.fakes import EFFECTIVE, LOAD, MIB, RESIDENT, RESIDENT_STEP, STEP, SUMMARY

CONFIG = SessionConfig(model_path="some/my model.gguf", threads=2, drop_cold_experts=0.75)
REQUEST = GenerateRequest(prompt="x", n_predict=4)
MEMORY = MemorySample(
    rss_bytes=900 * MIB,
    rss_anon_bytes=850 * MIB,
    rss_file_bytes=50 * MIB,
    swap_bytes=0,
    mem_available_bytes=1234 * MIB,
    mem_free_bytes=MIB // 2,
    swap_free_bytes=None,
    dense_resident=0.8245,
)

GOLDEN = (Path(__file__).parent / "data" / "metrics-v2.csv").read_text().replace("VERSION", bmoe.__version__)


def written(
    path: Path,
    steps: list[StepMetrics],
    summary: RunSummary,
    *,
    effective: EffectiveConfig = EFFECTIVE,
    prefill: StepMetrics = STEP,
    request: GenerateRequest = REQUEST,
) -> str:
    """The file of one generation."""
    file = MetricsCsv(str(path), model_path="m.gguf")
    file.begin(CONFIG, effective, LOAD, request)
    file.prefill([prefill])
    for i, step in enumerate(steps):
        file.token(TokenEvent(index=i, token=1, text="x", metrics=step))
    file.summary(summary)
    file.close()
    return path.read_text()


def test_a_streaming_run_is_exactly_this_text(tmp_path: Path) -> None:
    steps = [
        replace(STEP, overhead_ns=None),
        replace(STEP, major_faults=512, memory=MEMORY),
        replace(STEP, hits=96, cache_bytes=400 * MIB),
    ]
    summary = replace(
        SUMMARY,
        tokens=3,
        decode_ns=150_000_000,
        decode_read_bytes=180 * MIB,
        stall_ns=36_000_000,
        hook_ns=180_000,
        compute_ns=113_820_000,
        overhead_ns=800_000,
        cpu_ns=240_000_000,
        slots_used=300,
        routed=288,
        dropped=5,
    )
    effective = replace(EFFECTIVE, model_path="some/my model.gguf", layers=13)
    request = replace(REQUEST, sampling=Sampling(temperature=0.7))
    text = written(tmp_path / "m.csv", steps, summary, effective=effective, request=request)
    # The prompt's 96 lookups with 72 hits and two tokens alike make 75 %; the third has 96 hits of 96.
    assert text == GOLDEN


def test_what_is_not_measured_is_what_the_reference_writes_then(tmp_path: Path) -> None:
    summary = replace(
        SUMMARY,
        decode_read_bytes=None,
        hit_rate=None,
        stall_ns=None,
        slots_used=None,
        slots_total=None,
        evictions=None,
        rereads=None,
        reads=None,
    )
    text = written(tmp_path / "m.csv", [RESIDENT_STEP], summary, effective=RESIDENT, prefill=RESIDENT_STEP)
    rows = [line for line in text.splitlines() if not line.startswith("#")]
    [row] = csv.DictReader(rows)
    assert row["compute_ms"] == row["wall_ms"] == "50.000"
    assert {row[name] for name in ("io_ms", "stall_ms", "mgmt_ms")} == {"0.000"}
    assert (row["read_bytes"], row["cache_hit_pct"], row["dense_resident_frac"]) == ("0", "-1.00", "-1.000")
    assert (row["rss_mib"], row["cache_budget_mib"]) == ("0.0", "0.0")
    assert "# moe_stream=0 cache_mb=0 " in text
    assert " cache_hit_pct=-1.0 " in text
    assert " cache_resident_MiB=0.0 cache_budget_MiB=0.0 " in text


def test_a_generation_without_tokens_has_a_trailer_of_zeros(tmp_path: Path) -> None:
    text = written(tmp_path / "m.csv", [], replace(SUMMARY, tokens=0, decode_ns=0))
    assert "# summary tokens=0 s/tok=0.000 tok/s=0.000 " in text


def test_a_run_that_is_traced_or_lossy_says_so_in_the_preamble(tmp_path: Path) -> None:
    effective = replace(EFFECTIVE, traced="read trace", lossy="top 2 instead of 4")
    text = written(tmp_path / "m.csv", [STEP], SUMMARY, effective=effective)
    assert "\n# traced=read_trace\n# lossy=top_2_instead_of_4\nstep,steps," in text


def test_the_columns_are_those_of_the_recorded_files_and_more_after_them() -> None:
    # The header of the reference's version 1 recordings.
    v1 = (
        "step,steps,wall_ms,io_ms,compute_ms,read_bytes,cache_hit_pct,stall_ms,mgmt_ms,majflt,cpu_ms,"
        "dense_resident_frac,turn,majflt_mib,cache_budget_mib,rss_mib,rss_anon_mib,rss_file_mib,swap_mib,"
        "mem_available_mib,mem_free_mib,swap_free_mib"
    )
    assert COLUMNS.startswith(v1 + ",")
    assert GOLDEN.count(f"\n{COLUMNS}\n") == 1


def test_a_file_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    with pytest.raises(FileError, match="the figures cannot be written: Is a directory"):
        MetricsCsv(str(tmp_path), model_path="m.gguf")
    file = MetricsCsv("/dev/full", model_path="m.gguf")
    with pytest.raises(FileError, match="/dev/full: the figures cannot be written: No space left on device"):
        file.begin(CONFIG, EFFECTIVE, LOAD, REQUEST)
    with pytest.raises(FileError):
        file.close()


def test_the_model_is_not_overwritten(tmp_path: Path) -> None:
    model = tmp_path / "m.gguf"
    model.write_bytes(b"GGUF")
    with pytest.raises(UsageError, match="is the model"):
        MetricsCsv(str(model), model_path=str(model))
    assert model.read_bytes() == b"GGUF"
