"""Cache replay against literal hit counts, a slow replay, and figures from real models."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bmoe.io.errors import FormatError, UsageError
from bmoe.pipeline.native import Engine
from bmoe.policies import POLICIES
from bmoe.route import Lookups, make_lookups, read_trace, replay
from bmoe.route.caches import REFERENCE_POLICIES
from bmoe.route.engine_policy import EnginePolicy
from bmoe.route.outcomes import (
    Outcome,
    Speed,
    default_policies,
    policy_names,
    replayer,
    validate,
    verdicts,
)
from tests.native_steps import Doorbell, Native, tensors_of
from tests.route_oracle import MIB, RECORDED, Cell, lookups_of, slow_hits, text_of

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

    from bmoe.pipeline.policy import UseHistory

SIZES = {0: 3, 1: 2}


def look(cells: list[Cell], path: Path, sizes: dict[int, int] = SIZES) -> Lookups:
    path.write_text(text_of(cells, sizes))
    return make_lookups(read_trace(str(path)))


# A prompt of three tokens, then six decoded ones: layer 0 has a favourite, layer 1 goes round.
GOLDEN = [
    *[Cell(step=s, layer=0, experts=e, phase=0) for s, e in enumerate([(1, 2), (2, 3), (1, 4)])],
    *[Cell(step=s, layer=1, experts=e, phase=0) for s, e in enumerate([(5, 6), (6, 5), (7, 5)])],
    *[
        Cell(step=3 + s, layer=layer, experts=experts)
        for s, pair in enumerate(
            [((1, 2), (5, 6)), ((1, 3), (7, 0)), ((1, 2), (5, 6)), ((4, 1), (7, 0)), ((1, 2), (5, 6))]
        )
        for layer, experts in enumerate(pair)
    ],
]


def test_a_prompt_layer_is_one_batch_and_looks_each_expert_up_once(tmp_path: Path) -> None:
    found = look(GOLDEN, tmp_path / "t.csv")
    assert np.diff(found.batch_start).tolist() == [4, 3] + [2] * 10
    assert found.clock.tolist() == [1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6]
    assert found.decode.tolist() == [False] * 2 + [True] * 10
    assert (found.entries, found.layers, found.tokens, found.cycle_bytes) == (8, 2, 5, 10)
    # Layer 0's prompt routed 1 2 2 3 1 4: first uses 1 2 3 4, last uses 2 3 1 4.
    assert found.entry[:4].tolist() == [0, 1, 2, 3]
    assert found.entry[found.by_last_row[:4]].tolist() == [1, 2, 0, 3]


@pytest.mark.parametrize(
    ("policy", "hits"),
    [
        ("belady", [8, 13, 17, 19]),
        ("lru", [2, 7, 11, 19]),
        ("lfu", [4, 9, 14, 19]),
        ("layer", [8, 12, 15, 19]),
        ("layerlfu", [8, 12, 15, 19]),
        ("random", [3, 8, 16, 19]),
    ],
)
def test_hits_of_a_small_trace(policy: str, hits: list[int], tmp_path: Path) -> None:
    """Of 20 decode lookups at 9, 12, 16 and 24 bytes; a token's experts are 10."""
    found = look(GOLDEN, tmp_path / "t.csv")
    prepared = REFERENCE_POLICIES[policy](found)
    assert [int(prepared.hits(b)[found.in_decode].sum()) for b in (9, 12, 16, 24)] == hits


CELLS = st.lists(
    st.tuples(st.booleans(), st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=3, unique=True),
                                      min_size=2, max_size=2)),
    min_size=1, max_size=14,
).map(
    lambda tokens: [
        Cell(step=s, layer=layer, experts=tuple(experts), phase=int(s >= prompt))
        for prompt in [sum(is_prompt for is_prompt, _ in tokens) // 2]
        for phase in (0, 1)
        for s, layer, experts in (
            [(s, la, token[la]) for la in (0, 1) for s, (_, token) in enumerate(tokens) if s < prompt]
            if phase == 0
            else [(s, la, token[la]) for s, (_, token) in enumerate(tokens) if s >= prompt for la in (0, 1)]
        )
    ]
)  # fmt: skip


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("caches") / "t.csv"


@settings(deadline=None, derandomize=True, max_examples=60)
@given(
    cells=CELLS,
    budget=st.integers(1, 40),
    policy=st.sampled_from(sorted(set(REFERENCE_POLICIES) - {"belady"})),
)
def test_each_policy_hits_where_the_slow_replay_hits(
    cells: list[Cell], budget: int, policy: str, scratch: Path
) -> None:
    found = look(cells, scratch)
    assert REFERENCE_POLICIES[policy](found).hits(budget).tolist() == slow_hits(cells, SIZES, budget, policy)


@settings(deadline=None, derandomize=True, max_examples=60)
@given(cells=CELLS, budget=st.integers(1, 40))
def test_belady_hits_as_often_as_a_search_of_the_whole_future(
    cells: list[Cell], budget: int, scratch: Path
) -> None:
    """Ties may fall otherwise, so counts are compared, with sizes equal: then no tie matters."""
    sizes = {0: 2, 1: 2}
    found = look(cells, scratch, sizes)
    assert int(REFERENCE_POLICIES["belady"](found).hits(budget).sum()) == sum(
        slow_hits(cells, sizes, budget, "belady")
    )


@settings(deadline=None, derandomize=True, max_examples=60)
@given(cells=CELLS, slots=st.integers(1, 12))
def test_no_policy_beats_belady_and_more_room_never_hurts_belady_or_lru(
    cells: list[Cell], slots: int, scratch: Path
) -> None:
    found = look(cells, scratch, {0: 1, 1: 1})
    bound = REFERENCE_POLICIES["belady"](found).hits(slots)
    for name in ("lru", "lfu", "random", *(n for n in policy_names() if n not in REFERENCE_POLICIES)):
        assert replayer(name, found).hits(slots).sum() <= bound.sum(), name
    assert REFERENCE_POLICIES["belady"](found).hits(slots + 1).sum() >= bound.sum()
    smaller, larger = (REFERENCE_POLICIES["lru"](found).hits(n) for n in (slots, slots + 1))
    assert not (smaller & ~larger).any(), "what a small lru cache holds, a larger one holds too"


@settings(deadline=None, derandomize=True, max_examples=30)
@given(cells=CELLS, budget=st.integers(1, 40))
def test_pieces_of_a_long_trace_make_no_difference(cells: list[Cell], budget: int, scratch: Path) -> None:
    found = look(cells, scratch)
    whole = [REFERENCE_POLICIES[name](found).hits(budget).tolist() for name in REFERENCE_POLICIES]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("bmoe.route.lookups._CHUNK", 3)
        assert [REFERENCE_POLICIES[name](found).hits(budget).tolist() for name in REFERENCE_POLICIES] == whole


# --- the engine's own policies ------------------------------------------------------------------------------


class Watching:
    """Evicts by number, and keeps what it was shown."""

    name = "watching"
    half_life_batches = 16.0

    def __init__(self, history: UseHistory) -> None:
        self.history = history
        self.calls: list[tuple[list[int], int, int]] = []

    def victims(self, candidates: NDArray[np.int32], count: int, layer: int) -> NDArray[np.int32]:
        self.calls.append((candidates.tolist(), count, layer))
        return candidates[:count]


def watch(made: list[Watching], history: UseHistory) -> Watching:
    """Makes one and keeps it."""
    made.append(Watching(history))
    return made[-1]


def test_a_registered_policy_is_replayed_under_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Watching] = []
    monkeypatch.setitem(POLICIES, "watching", partial(watch, made))
    assert "watching" in default_policies()
    found = look(GOLDEN, tmp_path / "t.csv")
    replayer("watching", found).hits(12)
    [policy] = made
    # After the prompt's first layer, 4 x 3 bytes fit. Its second brings 3 x 2 more: 6 bytes too many, of
    # which an entry frees at least 2, and only the first layer's are candidates.
    assert policy.calls[0] == ([0, 1, 2, 3], 3, 1)


def test_the_history_a_policy_sees_is_the_one_native_code_keeps(tmp_path: Path) -> None:
    """The same trace announced to the real native engine leaves the same clock and use counts."""
    experts = 8
    bell = Doorbell()
    engine = Engine(tensors_of(2, experts, (64, 64, 64)), slots=64, event_fd=bell.fd)
    native = Native(engine)
    found = look(GOLDEN, tmp_path / "t.csv")
    made: list[Watching] = []
    EnginePolicy(found, partial(watch, made)).hits(1000)
    passes = 0
    for (_, layer, routed), clock in zip(lookups_of(GOLDEN), found.clock.tolist(), strict=True):
        if clock != passes:
            native.begin_batch()
            passes = clock
        native.announce(3 * layer, list(dict.fromkeys(expert for _, expert in routed)))
    used = sorted(
        {
            layer * experts + expert
            for _, la, routed in lookups_of(GOLDEN)
            for layer, expert in routed
            if la == layer
        }
    )
    np.testing.assert_array_equal(made[0].history.last_use, engine.last_use[used])
    np.testing.assert_array_equal(made[0].history.frequency, engine.frequency[used])
    bell.close()


def test_use_counts_survive_a_change_of_unit(tmp_path: Path) -> None:
    """11,000 passes grow the unit past its limit; the order of counts stays."""
    cells = [Cell(step=s, layer=0, experts=(0, 1 + s % 7)) for s in range(11_000)]
    found = look(cells, tmp_path / "t.csv")
    made: list[Watching] = []
    EnginePolicy(found, partial(watch, made)).hits(10**6)
    counts = made[0].history.frequency
    assert np.isfinite(counts).all()
    assert counts.argmax() == 0
    assert counts.max() < 1e200 * 30


def test_the_engines_lru_is_the_references_where_layers_do_not_tie(tmp_path: Path) -> None:
    """The engine's clock ticks per pass, and within one the earlier layer counts as older: the same order."""
    generator = np.random.default_rng(5)
    cells = [
        Cell(step=s, layer=la, experts=(int(generator.integers(8)),)) for s in range(200) for la in (0, 1)
    ]
    found = look(cells, tmp_path / "t.csv")
    for budget in (4, 9, 17, 30):
        a, b = replayer("lru", found).hits(budget), replayer("engine:lru", found).hits(budget)
        assert a.tolist() == b.tolist()


# --- figures ------------------------------------------------------------------------------------------------


def test_outcomes_count_what_was_missed(tmp_path: Path) -> None:
    found = look(GOLDEN, tmp_path / "t.csv", {0: 3 * MIB, 1: 2 * MIB})
    [outcome] = replay(found, policies=["lru"], budgets_mib=[16])
    assert outcome.hit_pct_decode == 55.0
    assert outcome.hit_pct_cum == 100 * 11 / 27
    missed = ~replayer("lru", found).hits(16 * MIB)
    assert outcome.read_mib == found.size_of[found.entry[missed]].sum() / MIB
    assert outcome.read_mib_per_token is not None
    assert outcome.read_mib_per_token * 5 + 18 == outcome.read_mib
    assert outcome.ideal_tokens_per_s is None


def test_speed_is_bounded_by_the_longer_of_reading_and_computing(tmp_path: Path) -> None:
    """Two tokens of two layers: the first reads all its 10 MiB, the second nothing."""
    cells = [Cell(step=s, layer=la, experts=(1, 2)) for s in (0, 1) for la in (0, 1)]
    found = look(cells, tmp_path / "t.csv", {0: 3 * MIB, 1: 2 * MIB})
    slow = Speed(bandwidth_bytes_per_s=100 * MIB, compute_ns=10e6)
    [outcome] = replay(found, policies=["lru"], budgets_mib=[100], speed=slow)
    assert outcome.ideal_tokens_per_s == pytest.approx(2 / (0.100 + 0.010))
    assert outcome.layered_tokens_per_s == pytest.approx(2 / (0.060 + 0.040 + 0.010))
    fast = Speed(bandwidth_bytes_per_s=1000 * MIB, compute_ns=10e6)
    [outcome] = replay(found, policies=["lru"], budgets_mib=[100], speed=fast)
    assert outcome.ideal_tokens_per_s == pytest.approx(2 / (0.010 + 0.010))
    assert outcome.layered_tokens_per_s == pytest.approx(2 / (0.006 + 0.005 + 0.010))


def outcome(policy: str, budget: int, hits: float) -> Outcome:
    return Outcome(
        policy=policy, budget_mib=budget, hit_pct_decode=hits, hit_pct_cum=hits, read_mib=0,
        read_mib_per_token=0, ideal_tokens_per_s=None, layered_tokens_per_s=None,
    )  # fmt: skip


def test_verdicts_warn_name_the_best_step_and_say_when_no_policy_helps() -> None:
    outcomes = [
        outcome(policy, budget, hits)
        for budget, row in {100: (30, 0), 200: (60, 40), 400: (62, 61)}.items()
        for policy, hits in zip(("belady", "lru"), row, strict=True)
    ]
    warning, best, little = verdicts(outcomes, cycle_bytes=150 * MIB)
    assert warning == (
        "warning: 100 MiB is below one token's experts, 150 MiB: lru gives up each expert just before its "
        "next turn"
    )
    assert best == "best step: from 100 to 200 MiB, +40.0 points, or 400.0 per 1000 MiB"
    assert little == "no policy helps at 400 MiB: belady itself gains 1.0 points at most"


def test_an_unknown_policy_is_refused_with_those_there_are(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"policy 'fifo' is not one of belady, lru, .*, engine:lru"):
        replayer("fifo", look(GOLDEN, tmp_path / "t.csv"))


def test_validation_compares_with_the_record(tmp_path: Path) -> None:
    cells = [
        Cell(step=0, layer=0, experts=(1, 2), residency=(0, 0)),
        Cell(step=1, layer=0, experts=(1, 3), residency=(1, 2)),  # 3 was prefetched, which lru does not know
    ]
    (tmp_path / "t.csv").write_text(text_of(cells, {0: MIB}))
    trace = read_trace(str(tmp_path / "t.csv"))
    found = validate(trace, make_lookups(trace), 10)
    assert (found.recorded_pct, found.replayed_pct, found.equal_pct, found.lookups) == (50.0, 25.0, 75.0, 4)
    (tmp_path / "bare.csv").write_text("turn,phase,step,layer,slot,expert,expert_bytes\n0,1,0,0,0,1,9\n")
    bare = read_trace(str(tmp_path / "bare.csv"))
    with pytest.raises(FormatError, match="no residency column"):
        validate(bare, make_lookups(bare), 10)


# --- real models --------------------------------------------------------------------------------------------

recorded = pytest.mark.skipif(not RECORDED.exists(), reason="the recorded traces are not here")


def decode_hits(name: str, policies: tuple[str, ...], budgets: tuple[int, ...]) -> dict[int, list[str]]:
    found = make_lookups(read_trace(str(RECORDED / f"{name}.route.csv")))
    table: dict[int, list[str]] = {}
    for o in replay(found, policies=policies, budgets_mib=budgets):
        table.setdefault(o.budget_mib, []).append(f"{o.hit_pct_decode:.1f}")
    return table


@recorded
def test_the_known_figures_of_qwen_are_reproduced_to_the_digit() -> None:
    """../shared/data/README.md, made by the reference's script."""
    assert decode_hits("qwen", tuple(REFERENCE_POLICIES), (500, 1000, 2000, 4000)) == {
        500: ["45.3", "0.0", "26.6", "9.8", "38.3", "38.3"],
        1000: ["62.7", "37.7", "40.2", "26.7", "42.3", "45.1"],
        2000: ["79.4", "56.5", "58.6", "49.1", "59.4", "63.3"],
        4000: ["92.7", "80.3", "80.8", "74.0", "79.7", "81.7"],
    }


@recorded
@pytest.mark.parametrize(
    ("name", "budget", "hits"),
    [
        ("qwen", 3000, ["87.8", "70.6", "74.2"]),
        ("gptoss", 3000, ["67.8", "44.8", "44.5"]),
        ("gemma", 4000, ["92.9", "81.9", "84.3"]),
    ],
)
def test_the_figures_the_reference_published_are_reproduced(name: str, budget: int, hits: list[str]) -> None:
    """Engine notes 8.1; all three were recorded on the device at one of these budgets."""
    assert decode_hits(name, ("belady", "lru", "layerlfu"), (budget,)) == {budget: hits}


@recorded
@pytest.mark.parametrize(
    ("name", "budget", "cumulative"),
    [("qwen", 4000, "74.9"), ("gemma", 4000, "76.8"), ("gptoss", 3000, "32.4")],
)
def test_an_lru_replay_agrees_with_the_device_in_every_lookup(
    name: str, budget: int, cumulative: str
) -> None:
    trace = read_trace(str(RECORDED / f"{name}.route.csv"))
    found = make_lookups(trace)
    assert validate(trace, found, budget).equal_pct == 100.0
    [lru] = replay(found, policies=["lru"], budgets_mib=[budget])
    assert f"{lru.hit_pct_cum:.1f}" == cumulative


@recorded
@pytest.mark.parametrize("name", ["gemma", "gptoss"])
@pytest.mark.parametrize("policy", ["lru", "lfu", "random", "layer", "layerlfu"])
def test_the_start_of_a_recorded_trace_hits_where_the_slow_replay_hits(
    name: str, policy: str, tmp_path: Path
) -> None:
    trace = read_trace(str(RECORDED / f"{name}.route.csv"))
    cells = [
        Cell(step=int(trace.step[low]), layer=int(trace.layer[low]), phase=int(trace.phase[low]),
             experts=tuple(trace.expert[low:high].tolist()))
        for low, high in zip(trace.cell_start[:-1], trace.cell_start[1:], strict=True)
        if trace.layer[low] < 8 and trace.step[low] >= int(trace.step[trace.phase == 1].min()) - 4
        and trace.step[low] < int(trace.step[trace.phase == 1].min()) + 25
    ]  # fmt: skip
    sizes = {la: trace.expert_bytes_of[la] for la in range(8)}
    (tmp_path / "t.csv").write_text(text_of(cells, sizes, experts=128, top_k=trace.top_k))
    found = make_lookups(read_trace(str(tmp_path / "t.csv")))
    for budget in (60 * MIB, 200 * MIB, 500 * MIB):
        assert replayer(policy, found).hits(budget).tolist() == slow_hits(
            cells, sizes, budget, policy, top_k=trace.top_k
        )


@recorded
def test_our_policy_is_above_lru_everywhere() -> None:
    """design.md section 6 has the first figures; a policy that is the default must not fall below them."""
    for name, floor in {
        "qwen": (27.7, 41.6, 61.0, 82.7),
        "gemma": (30.9, 46.1, 64.5, 83.8),
        "gptoss": (14.6, 23.7, 37.1, 51.9),
    }.items():
        table = decode_hits(name, ("aged", "lru"), (500, 1000, 2000, 4000))
        for (aged, lru), least in zip(table.values(), floor, strict=True):
            assert float(aged) >= least
            assert float(aged) > float(lru)
