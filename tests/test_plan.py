"""`bmoe plan`: the arithmetic of a run to come agrees with what a session does."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bmoe.budget import MIB
from bmoe.cli import main
from bmoe.io.errors import UsageError
from bmoe.plan import DriveFigure, PlanRequest, hit_range, plan_run
from bmoe.session import Session
from bmoe.tools.iobench.drives import drive_key, drives_path
from tests.models import tiny_moe
from tests.runs import config, run
from tests.test_architectures import gate_model
from tests.test_synth import uniform, write_dense

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(autouse=True)
def no_drives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def test_slots_are_those_that_a_session_makes() -> None:
    path = tiny_moe("Q4_K_M")
    cache_bytes = 2 * MIB
    made = plan_run(PlanRequest(path=path, cache_bytes=cache_bytes))

    async def scenario() -> None:
        async with await Session.open(config(path, cache_bytes=cache_bytes)) as session:
            assert session.streaming is not None
            assert session.streaming.plan.total_slots == made.slots
            assert session.effective.cache_experts == made.cache_experts
            assert session.effective.cache_bytes == made.cache_bytes
            assert session.effective.dense_bytes == made.dense_bytes

    run(scenario())
    assert made.verdict == "streams"


def test_memory_adds_up_under_a_supposed_size() -> None:
    made = plan_run(PlanRequest(path=tiny_moe("Q4_K"), ram_bytes=300 * MIB, ubatch_tokens=64))
    assert made.verdict == "does not fit"
    assert made.reason is not None
    assert "no memory is left" in made.reason
    roomy = plan_run(PlanRequest(path=tiny_moe("Q4_K"), ram_bytes=4000 * MIB, ubatch_tokens=64))
    assert roomy.verdict == "streams"
    assert roomy.cache_experts == roomy.total_experts
    assert roomy.hit_range == (1.0, 1.0)
    assert roomy.floor_bytes == 500 * MIB
    parts = (roomy.dense_bytes, roomy.kv_bytes, roomy.compute_bytes, roomy.process_bytes, roomy.cache_bytes)
    assert sum(part or 0 for part in parts) <= 4000 * MIB - 500 * MIB


def test_repacked_weights_take_what_they_take(capsys: pytest.CaptureFixture[str]) -> None:
    model = tiny_moe("Q4_K")
    plain = plan_run(PlanRequest(path=model, ram_bytes=4000 * MIB))
    for mode in ("mmap", "warm", "locked", "repack"):  # an output of its own: nothing is kept twice
        made = plan_run(PlanRequest(path=model, ram_bytes=4000 * MIB, dense_weights=mode))
        assert made.dense_bytes == plain.dense_bytes
    assert main(["plan", model, "--ram", "4000", "--dense-weights", "repack"]) == 0
    assert "streams" in capsys.readouterr().out
    assert main(["plan", model, "--simulate", "x.csv", "--dense-weights", "repack"]) == 2


def test_a_cache_that_does_not_fit_is_told() -> None:
    made = plan_run(PlanRequest(path=tiny_moe("Q4_K"), ram_bytes=100 * MIB, cache_bytes=2 * MIB))
    assert made.verdict == "does not fit"
    assert plan_run(PlanRequest(path=tiny_moe("Q4_K"), cache_bytes=1)).verdict == "does not fit"


def test_a_dense_model_runs_resident(tmp_path: Path) -> None:
    write_dense(str(tmp_path / "dense"), uniform("F32"), units=64)
    made = plan_run(PlanRequest(path=str(tmp_path / "dense")))
    assert made.verdict == "resident"
    assert made.advice == ()
    assert (made.slots, made.hit_range) == (None, None)


def test_more_experts_per_token_read_more() -> None:
    path = gate_model("qwen3moe")
    few, many = (
        plan_run(PlanRequest(path=path, cache_bytes=2 * MIB, n_expert_used=number)) for number in (1, 12)
    )
    assert many.cycle_bytes == 12 * few.cycle_bytes
    with pytest.raises(UsageError):
        plan_run(PlanRequest(path=path, n_expert_used=13))


def test_recurrent_layers_have_no_cache_of_keys() -> None:
    hybrid = plan_run(PlanRequest(path=gate_model("lfm2moe"), cache_bytes=2 * MIB))
    plain = plan_run(PlanRequest(path=gate_model("qwen3moe"), cache_bytes=2 * MIB))
    assert 0 < hybrid.kv_bytes - plain.kv_bytes // 2 < MIB  # but a state


@given(st.floats(0, 1, exclude_min=True), st.floats(0, 1, exclude_min=True))
def test_a_larger_share_never_hits_less(one: float, other: float) -> None:
    low, high = hit_range(min(one, other)), hit_range(max(one, other))
    assert 0 <= low[0] <= low[1] <= 1
    assert low[0] <= high[0] + 1e-12
    assert low[1] <= high[1] + 1e-12


def test_hits_are_those_of_the_recorded_models_at_their_shares() -> None:
    assert hit_range(0.239)[1] == pytest.approx(0.827)
    assert hit_range(0.0149)[0] == pytest.approx(0.179)
    assert hit_range(0.0344)[1] == pytest.approx(0.371)


def remember_drive(path: str, mib_per_s: float) -> None:
    record = {"mib_per_s": mib_per_s, "created_utc": "2026-01-02T03:04:05+00:00"}
    os.makedirs(os.path.dirname(drives_path()), exist_ok=True)
    with open(drives_path(), "w", encoding="ascii") as file:
        json.dump({"schema": 1, "drives": {drive_key(path): record}}, file)


def test_the_drives_figure_gives_a_bound() -> None:
    path = tiny_moe("Q4_K")
    unknown = plan_run(PlanRequest(path=path, cache_bytes=2 * MIB))
    assert (unknown.drive, unknown.bound_tokens_per_s) == (None, None)
    assert any(path in sentence and "bmoe-iobench" in sentence for sentence in unknown.advice)
    remember_drive(path, 100.0)
    made = plan_run(PlanRequest(path=path, cache_bytes=2 * MIB))
    assert made.drive == DriveFigure(mib_per_s=100.0, created_utc="2026-01-02T03:04:05+00:00")
    assert made.read_range_bytes is not None
    assert made.bound_tokens_per_s is not None
    assert made.bound_tokens_per_s[0] == pytest.approx(100 * MIB / made.read_range_bytes[1])
    assert made.bound_tokens_per_s[1] == pytest.approx(100 * MIB / made.read_range_bytes[0])


# The command.


def test_the_command_shows_one_screen(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", tiny_moe("Q4_K"), "--cache-mb", "2"]) == 0
    shown = capsys.readouterr().out
    assert len(shown.splitlines()) < 40
    for words in ("streams", "slots", "hits", "available", "not measured", "bmoe-iobench"):
        assert words in shown


def test_what_does_not_fit_is_code_1(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", tiny_moe("Q4_K"), "--ram", "200"]) == 1
    assert "does not fit: no memory is left" in capsys.readouterr().out


def test_the_command_gives_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", tiny_moe("Q4_K"), "--ram", "4000", "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert (record["schema"], record["tool"], record["verdict"]) == (1, "bmoe plan", "streams")
    assert record["available_bytes"] == 4000 * MIB
    assert record["drive"] is None


def test_wrong_requests_are_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", tiny_moe("Q4_K"), "--ram", "lots"]) == 2
    assert main(["plan", tiny_moe("Q4_K"), "--n-expert-used", "99"]) == 2
    assert main(["plan"]) == 2
    assert capsys.readouterr().err.count("\n") == 3
