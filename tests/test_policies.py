"""The order in which policies give experts up, as literal lists."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bmoe.io.errors import UsageError
from bmoe.pipeline.policy import UseHistory
from bmoe.policies import POLICIES, AgedFrequency, LeastRecentlyUsed, RecurringFrequency, policy_named

LAYERS, EXPERTS = 3, 2  # entries 0 1 | 2 3 | 4 5


def history(last_use: list[int], frequency: list[float]) -> UseHistory:
    return UseHistory(
        last_use=np.array(last_use, dtype=np.uint32),
        frequency=np.array(frequency, dtype=np.float64),
        layer_of=np.repeat(np.arange(LAYERS, dtype=np.int32), EXPERTS),
        layers=LAYERS,
    )


def order(policy: str, h: UseHistory, candidates: list[int], count: int, layer: int = -1) -> list[int]:
    chosen = policy_named(policy)(h).victims(np.array(candidates, dtype=np.int32), count, layer)
    assert chosen.dtype == np.int32
    found: list[int] = chosen.tolist()
    return found


EVERY = list(range(LAYERS * EXPERTS))


def test_aged_gives_up_the_least_used_first() -> None:
    h = history([1] * 6, [5.0, 1.0, 4.0, 0.5, 3.0, 2.0])
    assert order("aged", h, EVERY, 6) == [3, 1, 5, 4, 2, 0]
    assert order("aged", h, EVERY, 2) == [3, 1]
    assert order("aged", h, [0, 2, 4], 2) == [4, 2]


@pytest.mark.parametrize(
    ("layer", "wanted"),
    [
        (-1, [4, 5, 2, 3, 0, 1]),  # layer 0 is next: the last layer's turn is farthest away
        (0, [0, 1, 4, 5, 2, 3]),  # layer 1 is next: layer 0 has just run
        (1, [2, 3, 0, 1, 4, 5]),
        (2, [4, 5, 2, 3, 0, 1]),
    ],
)
def test_aged_breaks_ties_towards_the_layer_whose_turn_is_farthest(layer: int, wanted: list[int]) -> None:
    assert order("aged", history([1] * 6, [2.0] * 6), EVERY, 6, layer) == wanted


def test_recurring_spares_what_its_layer_has_just_used() -> None:
    """Equal counts, layer 1 in flight at batch 9; age is in turns of the expert's own layer."""
    h = history([9, 8, 9, 8, 8, 7], [2.0] * 6)
    # Entries 0, 2 (this batch) and 4 (whose layer is still to come) were used in their layer's last turn.
    assert order("recurring", h, EVERY, 6, layer=1) == [3, 1, 5, 2, 0, 4]
    assert order("aged", h, EVERY, 6, layer=1) == [2, 3, 0, 1, 4, 5]


def test_aged_lets_the_cycle_outweigh_a_small_difference_only() -> None:
    """Layer 2 has just run: its experts count 2/3 of a fifth less than layer 0's."""
    small, large = 1.1, 1.2
    h = history([1] * 6, [1.0, 1.0, 1.0, 1.0, small, large])
    assert order("aged", h, EVERY, 6, layer=2) == [2, 3, 4, 0, 1, 5]


def test_lru_gives_up_what_was_used_longest_ago() -> None:
    h = history([7, 3, 5, 9, 4, 8], [0.0] * 6)
    assert order("lru", h, EVERY, 6) == [1, 4, 2, 0, 5, 3]
    assert order("lru", h, EVERY, 3) == [1, 4, 2]
    assert order("lru", h, [3, 5, 0], 2) == [0, 5]


def test_lru_takes_the_earliest_layer_of_one_batch_first() -> None:
    h = history([4, 4, 4, 3, 4, 3], [0.0] * 6)
    assert order("lru", h, EVERY, 6) == [3, 5, 0, 1, 2, 4]


def test_lru_orders_clocks_near_the_end_of_their_range() -> None:
    top = 2**32 - 1
    assert order("lru", history([top, top - 1, top - 2, 0, top, 1], [0.0] * 6), EVERY, 6) == [
        3,
        5,
        2,
        1,
        0,
        4,
    ]


@pytest.mark.parametrize("policy", POLICIES)
def test_equal_experts_go_by_number_also_when_not_all_are_wanted(policy: str) -> None:
    """The cut falls among equals: which of them are chosen is not left to a partition's whim."""
    many = 400
    h = UseHistory(
        last_use=np.full(many, 3, dtype=np.uint32),
        frequency=np.ones(many),
        layer_of=np.zeros(many, dtype=np.int32),
        layers=1,
    )
    for count in (1, 7, 64, 399):
        assert order(policy, h, list(range(many)), count) == list(range(count))


@pytest.mark.parametrize("policy", POLICIES)
def test_no_candidate_and_no_wish_give_nothing(policy: str) -> None:
    h = history([1] * 6, [1.0] * 6)
    assert order(policy, h, [], 0) == []
    assert order(policy, h, [1, 2], 0) == []


@settings(deadline=None, derandomize=True)
@given(
    uses=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), min_size=6, max_size=6),
    candidates=st.lists(st.integers(0, 5), unique=True),
    count=st.integers(0, 6),
    layer=st.integers(-1, LAYERS - 1),
    policy=st.sampled_from(sorted(POLICIES)),
)
def test_a_ranking_is_the_head_of_the_full_ranking(
    uses: list[tuple[int, int]], candidates: list[int], count: int, layer: int, policy: str
) -> None:
    candidates = sorted(candidates)
    count = min(count, len(candidates))
    h = history([a for a, _ in uses], [float(b) for _, b in uses])
    full = order(policy, h, candidates, len(candidates), layer)
    assert sorted(full) == candidates
    assert order(policy, h, candidates, count, layer) == full[:count]


def test_policies_are_found_by_name() -> None:
    assert dict(POLICIES) == {
        "aged": AgedFrequency,
        "lru": LeastRecentlyUsed,
        "recurring": RecurringFrequency,
    }
    assert policy_named("lru") is LeastRecentlyUsed
    with pytest.raises(UsageError, match="cache policy 'fifo' is not one of aged, lru"):
        policy_named("fifo")
