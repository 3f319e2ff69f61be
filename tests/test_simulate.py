"""The simulator agrees with what is worked out by hand, and its command says what is wrong in one line."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING

import numpy as np
import pytest

from bmoe.bench.bounds import burst_s
from bmoe.cli import main
from bmoe.io.errors import FormatError, UsageError
from bmoe.simulate import (
    DRIVES,
    GIB,
    Drive,
    Machine,
    calibrated,
    dense_bytes_per_token,
    drive_named,
    load_workload,
    simulate,
    with_fitted_latency,
)
from tests.models import tiny_moe
from tests.runs import layout_of

if TYPE_CHECKING:
    from pathlib import Path

MIB = 1 << 20
# Two layers of four experts of 3 MiB, top 1. Three tokens; the second repeats the first in both layers, the
# third asks for others.
TRACE = f"""# route_trace v1
# model=m arch=a n_layer=2 n_expert=4 n_expert_used=1
# layer=0 expert_bytes={3 * MIB} dense_bytes={10 * MIB}
# layer=1 expert_bytes={3 * MIB} dense_bytes={10 * MIB}
turn,phase,step,layer,slot,expert,weight
0,1,0,0,0,0,1
0,1,0,1,0,1,1
0,1,1,0,0,0,1
0,1,1,1,0,1,1
0,1,2,0,0,2,1
0,1,2,1,0,3,1
"""
DRIVE = Drive(name="d", bytes_per_s=1 * GIB, single_bytes_per_s=0.25 * GIB, latency_s=0.001)
MACHINE = Machine(
    name="m",
    cores=2,
    dense_s_per_byte=1e-3 / MIB,
    expert_s_per_byte=2e-3 / MIB,
    loop_s_per_byte=1e-3 / MIB,
    layer_latency_s=0.01,
)


@pytest.fixture
def trace(tmp_path: Path) -> str:
    path = tmp_path / "t.csv"
    path.write_text(TRACE)
    return str(path)


def test_a_small_trace_takes_the_time_worked_out_by_hand(trace: str) -> None:
    work = load_workload(trace, None)
    assert (work.tokens, work.dense_bytes, work.expert_bytes) == (3, 20 * MIB, 24 * MIB)
    assert work.cycle_bytes == 6 * MIB
    (one,) = simulate(work, drives=[DRIVE], machines=[MACHINE], caches_bytes=[24 * MIB], policy="lru")
    # Tokens 1 and 3 miss in both layers, token 2 hits. A miss is three reads of 1 MiB at once: 1 ms and, at
    # 0.25 GiB/s for each or 1 GiB/s for all, 1/256 s. Computing takes 6 ms, and 1.5 ms more beside reads.
    read_s = 0.001 + 1 / 256
    layer_s = max(read_s, 0.006 + 0.0015)
    token_s = 0.020 + (4 * layer_s + 2 * 0.006) / 3 + 4 * 0.01 / 3
    assert one.token_ms == pytest.approx(1e3 * token_s)
    assert one.tok_per_s == pytest.approx(1 / token_s)
    assert one.hit_rate == pytest.approx(1 / 3)
    assert one.mib_per_token == pytest.approx(12 / 3)
    assert one.dense_ms == pytest.approx(20.0)
    assert one.experts_ms == pytest.approx(12.0)
    assert one.waiting_ms == pytest.approx(1e3 * 4 * 0.0015 / 3)
    assert one.latency_ms == pytest.approx(40 / 3)


def test_a_limit_that_averages_counts_by_the_token(trace: str) -> None:
    work = load_workload(trace, None)
    drive = dataclasses.replace(DRIVE, sustained_bytes_per_s=1 << 20)
    (one,) = simulate(work, drives=[drive], machines=[MACHINE], caches_bytes=[24 * MIB], policy="lru")
    assert one.token_ms == pytest.approx(1e3 * one.mib_per_token)
    many = dataclasses.replace(DRIVE, sustained_bytes_per_s=1 << 40)
    (other,) = simulate(work, drives=[many], machines=[MACHINE], caches_bytes=[24 * MIB], policy="lru")
    (plain,) = simulate(work, drives=[DRIVE], machines=[MACHINE], caches_bytes=[24 * MIB], policy="lru")
    assert other.token_ms == plain.token_ms


def test_a_cache_for_one_expert_misses_everything(trace: str) -> None:
    work = load_workload(trace, None)
    (one,) = simulate(work, drives=[DRIVE], machines=[MACHINE], caches_bytes=[3 * MIB], policy="lru")
    assert one.hit_rate == 0
    assert one.mib_per_token == pytest.approx(6.0)


def test_only_the_last_tokens_count_when_asked_for(tmp_path: Path) -> None:
    rows = [line for line in TRACE.splitlines() if line[0] == "0"]
    path = tmp_path / "two.csv"
    path.write_text(TRACE + "".join(f"1{row[1:]}\n" for row in rows))
    both = load_workload(str(path), None, last_tokens=3)
    assert both.tokens == 3
    (one,) = simulate(both, drives=[DRIVE], machines=[MACHINE], caches_bytes=[24 * MIB], policy="aged")
    assert one.hit_rate == 1
    assert one.latency_ms == one.waiting_ms == 0
    assert load_workload(str(path), None, last_tokens=2).tokens == 2
    assert load_workload(str(path), None, last_tokens=100).tokens == 6


def test_scale_makes_weights_larger_and_hits_stay(trace: str) -> None:
    small, large = load_workload(trace, None), load_workload(trace, None, scale=10)
    assert large.expert_bytes == 10 * small.expert_bytes
    (a,) = simulate(small, drives=[DRIVE], machines=[MACHINE], caches_bytes=[12 * MIB], policy="aged")
    (b,) = simulate(large, drives=[DRIVE], machines=[MACHINE], caches_bytes=[120 * MIB], policy="aged")
    assert a.hit_rate == b.hit_rate
    assert b.mib_per_token == pytest.approx(10 * a.mib_per_token)
    assert b.dense_ms == pytest.approx(10 * a.dense_ms)


def test_sizes_are_the_models_when_there_is_one(tmp_path: Path) -> None:
    model = tiny_moe("Q4_K", layers=2, experts=8, top_k=2)
    layout = layout_of(model)
    path = tmp_path / "t.csv"
    path.write_text(TRACE)
    work = load_workload(str(path), model)
    assert work.slices == 3
    assert work.expert_bytes == layout.expert_bytes
    per_expert = sum(t.slice_bytes for t in layout.tensors if t.layer == 0)
    assert work.lookups.size_of.tolist() == [per_expert] * 4
    names = {t.name: t.size_bytes for t in layout.facts.tensors}
    assert (
        work.dense_bytes == dense_bytes_per_token(layout) == layout.dense_bytes - names["token_embd.weight"]
    )
    with pytest.raises(FormatError, match=r"too few layers for this model; expected 3 or more, got 2"):
        load_workload(str(path), tiny_moe("Q4_K"))


def test_measured_bursts_take_the_place_of_a_formula(trace: str) -> None:
    figures = {
        "read_bytes": MIB,
        "drive_gib_per_s": 2.0,
        "burst_cpu_us_per_mib": 30.0,
        "burst_s": {"1": 0.001, "2": 0.0015, "4": 0.002},
    }
    cached = {"decode_tok_per_s": 20.0, "experts_s_per_token": 0.03}
    work = load_workload(trace, None)
    drive, machine = calibrated(work, figures, cached, threads=2, submit_us=200.0)
    reads = np.array([0.0, 1.0, 3.0, 4.0, 12.0])
    want = [0.0, *(burst_s(figures, n) for n in (1, 3, 4, 12))]
    assert drive.burst_s(reads, reads * MIB).tolist() == pytest.approx(want)
    # With everything cached, the prediction is what was measured with everything cached.
    fast = Drive(name="", bytes_per_s=1e15, single_bytes_per_s=1e15, latency_s=0)
    free = Machine(
        name="",
        cores=1,
        dense_s_per_byte=machine.dense_s_per_byte,
        expert_s_per_byte=machine.expert_s_per_byte,
        loop_s_per_byte=0,
        layer_latency_s=0,
    )
    (one,) = simulate(work, drives=[fast], machines=[free], caches_bytes=[24 * MIB], policy="aged")
    assert one.tok_per_s == pytest.approx(20.0)
    assert machine.layer_latency_s == pytest.approx(200e-6)


def test_a_faster_drive_or_a_larger_cache_is_never_slower(trace: str) -> None:
    work = load_workload(trace, None)
    drives = [DRIVES["ufs"], DRIVES["pcie4"], DRIVES["pcie5"]]
    machines = [
        Machine.of_cores(n, core_bytes_per_s=10 * GIB, memory_bytes_per_s=60 * GIB) for n in (4, 8, 16)
    ]
    found = simulate(work, drives=drives, machines=machines, caches_bytes=[6 * MIB, 24 * MIB], policy="aged")
    speed = {(s.cache_bytes, s.drive, s.machine): s.tok_per_s for s in found}
    assert len(speed) == 18
    for (cache, drive, machine), tok_per_s in speed.items():
        assert tok_per_s <= speed[24 * MIB, drive, machine]
        assert tok_per_s <= speed[cache, "pcie5", machine]
        assert tok_per_s <= speed[cache, drive, "16 cores"]
    # Memory sets a limit that more cores do not move.
    assert Machine.of_cores(32, core_bytes_per_s=10 * GIB, memory_bytes_per_s=60 * GIB).dense_s_per_byte == (
        pytest.approx(1 / (60 * GIB))
    )


def test_a_latency_fitted_at_one_point_is_found_again_at_another(trace: str) -> None:
    work = load_workload(trace, None)
    (small, large) = simulate(
        work, drives=[DRIVE], machines=[MACHINE], caches_bytes=[3 * MIB, 24 * MIB], policy="lru"
    )
    unknown = dataclasses.replace(MACHINE, layer_latency_s=0.5)
    fitted = with_fitted_latency(
        work, DRIVE, unknown, cache_bytes=3 * MIB, policy="lru", tok_per_s=small.tok_per_s
    )
    assert fitted.layer_latency_s == pytest.approx(MACHINE.layer_latency_s)
    (again,) = simulate(work, drives=[DRIVE], machines=[fitted], caches_bytes=[24 * MIB], policy="lru")
    assert again.tok_per_s == pytest.approx(large.tok_per_s)


def test_drives_are_names_or_numbers() -> None:
    assert drive_named("pcie4").bytes_per_s == 7 * GIB
    assert drive_named("2.5").bytes_per_s == 2.5 * GIB
    for wrong in ("tape", "0", "nan", "-1", "inf"):
        with pytest.raises(UsageError, match="is neither one of ufs, pcie4, pcie5"):
            drive_named(wrong)


def test_the_command_shows_a_table_or_json(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "--simulate", trace, "--drive", "ufs,3", "--cores", "4", "--cache", "50%,24"]
    assert main([*words, "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert [(p["drive"], p["cache_bytes"]) for p in record["predictions"]] == [
        ("ufs", 12 * MIB),
        ("3 GiB/s", 12 * MIB),
        ("ufs", 24 * MIB),
        ("3 GiB/s", 24 * MIB),
    ]
    assert main(words) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 6
    assert lines[1].split()[:2] == ["drive", "machine"]


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["--simulate", "{trace}", "--drive", "tape"], "drive 'tape' is neither"),
        (["--simulate", "{trace}", "--cores", "x"], "'x' is not a whole number"),
        (["--simulate", "{trace}", "--cache", "5 apples"], "is not a size"),
        (["--simulate", "{trace}", "--policy", "magic"], "magic"),
        (["--simulate", "{trace}", "--ram", "100"], "--ram has no meaning with --simulate"),
        (["--simulate", "{trace}", "--calibrate", "{trace}"], "is no JSON"),
        (["--simulate", "/nowhere"], "/nowhere"),
        (["--simulate", "{trace}", "/nowhere"], "/nowhere"),
        (["/nowhere", "--cores", "3"], "--cores has no meaning without --simulate"),
        ([], "missing argument 'MODEL'"),
    ],
)
def test_bad_input_is_one_line(
    words: list[str], error: str, trace: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code = main(["plan", *(word.format(trace=trace) for word in words)])
    captured = capsys.readouterr()
    assert code in {1, 2}
    assert len(captured.err.splitlines()) == 1
    assert error in captured.err
