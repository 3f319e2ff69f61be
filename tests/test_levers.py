"""Skipping and guessing: what is lossless changes no bit, what is lossy does what it says."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from bmoe.config import GenerateRequest, SessionConfig
from bmoe.io.errors import Cancelled, UsageError
from bmoe.pipeline.native import GUESSES
from bmoe.pipeline.spare_reads import SpareReads
from bmoe.session import Session
from tests.models import tiny_moe
from tests.runs import assert_same_as_resident, config, expected, run
from tests.test_architectures import gate_model

if TYPE_CHECKING:
    from pathlib import Path

    from bmoe.records import RunSummary

PROMPT = "Levers change bytes read, not words."
N_PREDICT = 24


def model() -> str:
    return tiny_moe(layers=6, experts=32)


def small(**changes: Any) -> SessionConfig:
    return config(model(), **({"cache_bytes": 3 << 20, "threads": 2} | changes))


async def _generate(wanted: SessionConfig, turns: int = 1) -> tuple[list[int], RunSummary, Session]:
    async with await Session.open(wanted) as session:
        for _ in range(turns):
            request = GenerateRequest(prompt=PROMPT, n_predict=N_PREDICT, ignore_eog=True)
            tokens = [event.token async for event in session.generate(request)]
        assert session.summary is not None
        session.kept = (  # type: ignore[attr-defined]  # for the test, beyond the session's life
            session.streaming.engine.statistics(),  # type: ignore[union-attr]  # it streams
            session.streaming.engine.predictions() if wanted.predict_log else None,  # type: ignore[union-attr]  # as above
        )
        return tokens, session.summary, session


def generate(wanted: SessionConfig, turns: int = 1) -> tuple[list[int], RunSummary, Any]:
    return run(_generate(wanted, turns))


@pytest.mark.parametrize(
    "lever",
    [
        {"prefetch_layers": 2},
        {"predict_prefetch": True},
        {"predict_log": True},
        {"prefetch_layers": 1, "io_backend": "threads"},
        {"drop_cold_experts": 1e-6},
        {"drop_cold_experts": 1e-6, "drop_in_prefill": True},
        {"route_ahead": 8},  # past all layers: never committed
        {"overlap": False, "predict_prefetch": True},
    ],
)
def test_what_is_lossless_changes_no_bit(lever: dict[str, Any]) -> None:
    assert_same_as_resident(small(**lever), PROMPT, N_PREDICT)


def test_read_ahead_reads_and_is_used() -> None:
    tokens, _, session = generate(small(prefetch_layers=2), turns=2)
    assert tokens == list(expected(model(), PROMPT, N_PREDICT, threads=2).tokens)
    counters, _ = session.kept
    assert counters.speculated > 0


def test_guesses_are_scored_and_the_control_is_right() -> None:
    _, _, session = generate(small(predict_log=True))
    _, predictions = session.kept
    rows, slots, hits, exact, unscored = np.moveaxis(predictions, 2, 0)
    own = GUESSES.index("own")
    assert rows[:, own].min() == N_PREDICT
    assert hits[:, own].sum() >= 0.99 * slots[:, own].sum()
    for name in ("previous", "stale", "stale-2"):
        guess = GUESSES.index(name)
        assert slots[2:, guess].min() > 0
        assert (hits[:, guess] <= slots[:, guess]).all()
        assert (exact[:, guess] <= rows[:, guess]).all()
    assert unscored[0, GUESSES.index("stale")] == N_PREDICT  # nothing comes before the first layer
    assert unscored[1:, GUESSES.index("stale")].max() == 0


def test_guesses_that_the_router_does_not_follow_end_with_a_warning() -> None:
    """A selection bias is not in the router's matrix."""
    said: list[str] = []

    async def scenario() -> bool:
        wanted = config(
            gate_model("glm4moe"),
            cache_bytes=64 << 20,
            context_tokens=512,
            predict_prefetch=True,
            predict_log=True,
        )
        async with await Session.open(wanted, on_warning=said.append) as session:
            request = GenerateRequest(prompt=PROMPT, n_predict=400, ignore_eog=True)
            async for _ in session.generate(request):
                if said:
                    session.cancel()
                    return True
        return False

    with contextlib.suppress(Cancelled):
        run(scenario())
    assert len(said) == 1
    assert "no longer guessed" in said[0]


def test_a_replayed_trace_of_fewer_experts_is_told(tmp_path: Path) -> None:
    trace = tmp_path / "t.csv"
    rows = "".join(f"0,1,0,{layer},0,{layer},1\n" for layer in range(6))
    sizes = "".join(f"# layer={layer} expert_bytes=1000 dense_bytes=1000\n" for layer in range(6))
    trace.write_text(
        f"# route_trace v1\n# model=m arch=a n_layer=6 n_expert=32 n_expert_used=1\n{sizes}"
        f"turn,phase,step,layer,slot,expert,weight\n{rows}"
    )
    said: list[str] = []

    async def scenario() -> None:
        wanted = small(replay_routing=str(trace))
        async with await Session.open(
            wanted, on_warning=said.append, on_effective=lambda _: said.append("mode")
        ):
            pass

    run(scenario())
    assert said[0] == "mode"
    assert "has 1 experts a token and the model" in said[1]


def test_dropping_reads_less_and_counts_what_it_drops() -> None:
    plain = generate(small())[1]
    tokens, dropped, _ = generate(small(drop_cold_experts=1.0))
    assert len(tokens) == N_PREDICT
    assert dropped.dropped is not None
    assert dropped.routed == 6 * 4 * N_PREDICT
    assert 0 < dropped.dropped < dropped.routed
    assert (dropped.decode_read_bytes or 0) < (plain.decode_read_bytes or 0)
    assert plain.dropped is None


def test_with_one_expert_per_token_nothing_can_be_dropped() -> None:
    one = small(n_expert_used=1)
    assert generate(dataclasses.replace(one, drop_cold_experts=1.0))[0] == generate(one)[0]


def test_dropping_by_an_imagined_cache_is_reproducible() -> None:
    wanted = small(drop_cold_experts=1.0, deterministic_cache=True)
    first, summary, _ = generate(wanted)
    assert summary.dropped
    for _ in range(2):
        again, summary_again, _ = generate(wanted)
        assert (again, summary_again.dropped) == (first, summary.dropped)


def test_substitution_prefers_what_is_in_memory() -> None:
    plain = generate(small())[1]
    tokens, summary, session = generate(small(expert_substitute=1.0))
    assert len(tokens) == N_PREDICT
    assert session.kept[0].substituted > 0
    assert summary.hit_rate is not None
    assert plain.hit_rate is not None
    assert summary.hit_rate > plain.hit_rate


def test_a_route_taken_ahead_is_committed_to_and_compared() -> None:
    _, _, session = generate(small(route_ahead=1))
    counters, _ = session.kept
    # Five of six layers have one before them; the first token of all has no guess for none of them.
    assert counters.route_committed == 5 * N_PREDICT
    assert 0 < counters.route_agreed <= 4 * counters.route_committed


def test_a_replayed_trace_decides_the_routing(tmp_path: Path) -> None:
    trace = tmp_path / "route.csv"
    lines = ["# route_trace v1", "# model=m arch=a n_layer=6 n_expert=32 n_expert_used=4"]
    lines += [f"# layer={layer} expert_bytes=1000 dense_bytes=0" for layer in range(6)]
    lines += ["turn,phase,step,layer,slot,expert,weight,residency,expert_bytes,dropped"]
    for step in range(3):
        for layer in range(6):
            lines += [f"0,1,{step},{layer},{k},{(step + layer + 5 * k) % 32},0.25,1,0,0" for k in range(4)]
    trace.write_text("\n".join(lines) + "\n")
    recorded = tmp_path / "recorded.csv"
    generate(small(replay_routing=str(trace), route_trace=str(recorded)))
    rows = [line.split(",") for line in recorded.read_text().splitlines() if line[0].isdigit()]
    assert len([r for r in rows if r[1] == "1"]) == N_PREDICT * 6 * 4
    for _, phase, at, in_layer, slot, expert, *_ in rows:
        if phase == "1":
            assert int(expert) == (int(at) % 3 + int(in_layer) + 5 * int(slot)) % 32


def test_levers_that_exclude_each_other_are_refused() -> None:
    bad_ones: tuple[dict[str, Any], ...] = (
        {"prefetch_layers": 1, "predict_prefetch": True},
        {"route_ahead": 1, "predict_log": True},
        {"drop_cold_experts": float("nan")},
        {"drop_cold_experts": 1.5},
    )
    for bad in bad_ones:
        with pytest.raises(UsageError):
            small(**bad)


def test_a_lossy_run_says_so() -> None:
    async def scenario() -> None:
        async with await Session.open(small(drop_cold_experts=0.5, route_ahead=1)) as session:
            assert session.effective.lossy is not None
            assert "dropped" in session.effective.lossy
            assert "1 layers early" in session.effective.lossy

    asyncio.run(scenario())


class TestSpareReads:
    def test_good_guesses_go_on(self) -> None:
        spare = SpareReads(most=2)
        assert [spare.reads_allowed(now_ns=n, issued=64 * n, useful=20 * n) for n in range(5)] == [2] * 5
        assert spare.pauses == 0

    def test_poor_guesses_pause_and_are_tried_again(self) -> None:
        spare = SpareReads(most=4)
        assert spare.reads_allowed(now_ns=1, issued=0, useful=0) == 4
        assert spare.reads_allowed(now_ns=2, issued=64, useful=19) == 0
        assert spare.pauses == 1
        assert spare.reads_allowed(now_ns=3_000_000_000, issued=64, useful=19) == 4

    def test_a_route_that_is_committed_to_is_always_read(self) -> None:
        spare = SpareReads(most=4, always=True)
        assert spare.reads_allowed(now_ns=10**9, issued=100, useful=0) == 4
