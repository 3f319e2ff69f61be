"""The governor against made-up neighbours: it gives in time, takes slowly, and never oscillates."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bmoe.governor import Governor, GovernorLimits
from bmoe.io.pressure import PressureReading

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from bmoe.governor import Decision

MIB = 1 << 20
GIB = 1 << 30
S = 1_000_000_000
PERIOD_NS = S // 4
LIMITS = GovernorLimits.leaving(GIB)


@dataclass
class World:
    """A machine with a cache and neighbours, read four times a second."""

    total_bytes: int = 8 * GIB
    cache_bytes: int = 4 * GIB
    held_bytes: int | None = None
    least_bytes: int = 256 * MIB
    most_bytes: int = 4 * GIB
    limits: GovernorLimits = LIMITS
    now_ns: int = 0
    stall_ns: int | None = None
    least_room_bytes: int = 1 << 62
    decisions: list[tuple[int, Decision]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.governor = Governor(self.limits)

    def tick(self, others_bytes: int, *, noise_bytes: int = 0, **reading: Any) -> Decision:
        held = self.cache_bytes if self.held_bytes is None else min(self.held_bytes, self.cache_bytes)
        room = self.total_bytes - others_bytes - held
        self.least_room_bytes = min(self.least_room_bytes, room)
        figures = {"available_bytes": max(0, room + noise_bytes), "some_stall_ns": self.stall_ns}
        decision = self.governor.step(
            PressureReading(**(figures | reading)),
            self.now_ns,
            self.cache_bytes,
            self.least_bytes,
            self.most_bytes,
            held_bytes=self.held_bytes,
        )
        assert self.least_bytes <= decision.cache_bytes <= max(self.cache_bytes, self.most_bytes)
        assert (decision.cache_bytes < self.cache_bytes) == (decision.action == "shrink")
        assert (decision.cache_bytes > self.cache_bytes) == (decision.action == "grow")
        if decision.action != "keep":
            assert decision.reason
            self.decisions.append((self.now_ns, decision))
        self.cache_bytes = decision.cache_bytes
        self.now_ns += PERIOD_NS
        return decision

    def run(self, others: Iterable[int], **how: Any) -> None:
        for others_bytes in others:
            self.tick(others_bytes, **how)

    @property
    def actions(self) -> list[str]:
        return [decision.action for _, decision in self.decisions]

    @property
    def turns(self) -> int:
        """How often giving and taking took turns."""
        return sum(a != b for a, b in itertools.pairwise(self.actions))


def seconds(n: float) -> int:
    return round(n * S / PERIOD_NS)


def most_turns(limits: GovernorLimits, t_ns: int) -> int:
    doublings = math.log2(limits.regrow_most_ns / limits.regrow_wait_ns)
    return 2 * math.floor(1 + doublings + t_ns / (5 * limits.regrow_wait_ns)) + 1


def test_a_quiet_machine_is_left_alone() -> None:
    world = World()
    world.run([2 * GIB] * seconds(600))
    assert world.decisions == []


def test_giving_is_at_once_and_restores_the_target() -> None:
    world = World()
    world.tick(3 * GIB)
    world.tick(3 * GIB + 700 * MIB)  # 324 MiB left, 512 are to be
    assert world.actions == ["shrink"]
    assert world.decisions[0][1].reason == "324 MiB of memory left, at least 512 MiB is to be"
    room = world.total_bytes - 3 * GIB - 700 * MIB - world.cache_bytes
    assert LIMITS.target_bytes <= room < LIMITS.target_bytes + LIMITS.unit_bytes
    world.run([3 * GIB + 700 * MIB] * seconds(600))
    assert world.actions == ["shrink"]


def test_steps_are_whole_units() -> None:
    world = World(cache_bytes=3 * GIB)
    world.run([4 * GIB + 900 * MIB + 12345] * 4)
    world.run([GIB] * seconds(120))
    before = 3 * GIB
    for _, decision in world.decisions:
        assert (decision.cache_bytes - before) % LIMITS.unit_bytes == 0
        before = decision.cache_bytes
    assert set(world.actions) == {"shrink", "grow"}


def test_a_neighbour_in_steps_gets_its_memory_and_leaves_it_again() -> None:
    """Eight steps of 384 MiB up, a minute each, then all is freed: all is grown back."""
    world = World()
    for step in range(9):
        world.run([2 * GIB + step * 384 * MIB] * seconds(60))
    assert set(world.actions) == {"shrink"}
    assert world.least_room_bytes >= 128 * MIB
    assert world.cache_bytes < 3 * GIB
    world.run([2 * GIB] * seconds(200))
    assert world.turns == 1
    assert world.cache_bytes == 4 * GIB


def test_taking_waits_and_goes_step_by_step() -> None:
    world = World(cache_bytes=2 * GIB)
    world.run([GIB] * seconds(60))
    assert world.decisions[0][0] == LIMITS.regrow_wait_ns
    times = [t for t, _ in world.decisions]
    assert all(b - a >= LIMITS.grow_step_ns for a, b in itertools.pairwise(times))
    assert world.cache_bytes == 4 * GIB
    assert world.decisions[0][1].reason == "more than 1024 MiB of memory left for 10 s"


def test_a_steady_allocation_is_met_before_it_is_there() -> None:
    """A neighbour that takes 1 GiB/s: what falls twice is expected to fall on."""
    world = World()
    world.run([2 * GIB + i * 256 * MIB for i in range(16)])
    assert world.least_room_bytes >= 256 * MIB
    assert "about to be" in (world.decisions[0][1].reason or "")


def test_a_slow_leak_is_followed_without_a_turn() -> None:
    world = World()
    world.run([2 * GIB + i * MIB // 2 for i in range(seconds(1500))])
    assert set(world.actions) == {"shrink"}
    assert world.least_room_bytes >= LIMITS.low_bytes - MIB
    assert len(world.decisions) < 20


def test_a_sawtooth_is_answered_ever_more_slowly() -> None:
    """A neighbour that takes 2 GiB for 15 s in every 45 s, for four hours."""
    world = World()
    hours = 4 * 3600
    world.run([2 * GIB + (2 * GIB if t / 4 % 45 < 15 else 0) for t in range(4 * hours)])
    turns = [t for t, d in world.decisions if d.action == "shrink"]
    late = [t for t in turns if t > hours * S // 2]
    assert world.turns <= 16
    assert len(late) <= 6
    assert world.governor.regrow_wait_ns > LIMITS.regrow_wait_ns


def test_patience_comes_back_when_memory_stays() -> None:
    world = World()
    for _ in range(4):
        world.run([4 * GIB] * seconds(5))
        world.run([2 * GIB] * seconds(4 * 80 - 20))
    assert world.governor.regrow_wait_ns == LIMITS.regrow_wait_ns


def test_noise_within_the_dead_band_moves_nothing() -> None:
    world = World(total_bytes=6 * GIB + 800 * MIB)
    for i in range(seconds(600)):
        world.tick(2 * GIB, noise_bytes=(-1) ** i * 100 * MIB)
    assert world.decisions == []


def test_memory_not_taken_yet_counts_as_taken() -> None:
    """A cache that is still empty does not think that its own budget is room to grow."""
    world = World(cache_bytes=2 * GIB, held_bytes=0, total_bytes=5 * GIB)
    world.run([2 * GIB] * seconds(60))
    assert world.decisions == []
    short = World(cache_bytes=2 * GIB, held_bytes=0, total_bytes=4 * GIB)
    short.run([2 * GIB])
    assert short.actions == ["shrink"]


def test_it_gives_no_more_than_it_may() -> None:
    world = World()
    world.run([7 * GIB + 900 * MIB] * 10)
    assert world.cache_bytes == world.least_bytes
    decision = world.tick(8 * GIB)
    assert decision.action == "keep"
    assert decision.reason is not None
    assert decision.reason.endswith("no more can be given")


def test_nothing_is_known_and_nothing_is_done() -> None:
    world = World()
    world.run([8 * GIB] * seconds(60), available_bytes=None, some_stall_ns=None)
    assert set(world.actions) <= {"grow"}
    assert world.cache_bytes == world.most_bytes


# Stalls.


def stalled(world: World, share: float, n: int, others_bytes: int = 3 * GIB, **how: Any) -> None:
    for _ in range(n):
        world.stall_ns = (world.stall_ns or 0) + round(share * PERIOD_NS)
        world.tick(others_bytes, **how)


def test_stalls_near_the_edge_make_it_give() -> None:
    world = World(stall_ns=0)
    stalled(world, 0.3, seconds(1.5))
    assert world.actions == ["shrink"]
    assert world.decisions[0][1].reason == "the machine waited for memory 30 % of the time"
    own = World(stall_ns=0)
    stalled(own, 0.3, seconds(1.5), stall_is_own=True)
    assert own.decisions[0][1].reason == "this program waited for memory 30 % of the time"


def test_short_stalls_and_stalls_with_plenty_left_are_none_of_its_business() -> None:
    world = World(stall_ns=0)
    stalled(world, 0.05, seconds(60))
    stalled(World(stall_ns=0), 1.0, seconds(60), others_bytes=0)
    assert world.decisions == []
    plenty = World(stall_ns=0, total_bytes=16 * GIB)
    stalled(plenty, 1.0, seconds(60))
    assert plenty.decisions == []


def test_when_giving_does_not_help_it_stops_giving() -> None:
    """Stalls that have another cause cost a few steps, ever more rarely, and what was given comes back."""
    world = World(stall_ns=0)
    stalled(world, 0.5, seconds(6), others_bytes=3 * GIB + 400 * MIB)
    assert world.actions == ["shrink"] * LIMITS.trials
    stalled(world, 0.5, seconds(3600), others_bytes=3 * GIB + 400 * MIB)
    assert world.actions.count("shrink") <= 8 * LIMITS.trials
    assert world.turns <= 22  # twice for each time that it listens again, after 10, 20, 40 ... 640 s
    assert max(d.cache_bytes for t, d in world.decisions if t > 1800 * S) >= 3 * GIB + 512 * MIB


def test_refaults_stand_in_for_stalls() -> None:
    for name in ("anon_refault_bytes", "file_refault_bytes", "swap_in_bytes"):
        world = World()
        for i in range(seconds(1.5)):
            world.tick(3 * GIB, **{name: i * 8 * MIB})
        assert world.actions == ["shrink"]
        assert world.decisions[0][1].reason == "32 MiB per second of memory are read back"


def test_counters_that_go_back_say_nothing() -> None:
    world = World()
    for i in range(seconds(10)):
        world.tick(3 * GIB, some_stall_ns=(10 - i) * S, anon_refault_bytes=(10 - i) * GIB)
    assert world.decisions == []


# What holds whatever it reads.

mib = st.integers(0, 9 * 1024).map(lambda n: n * MIB)
spans = st.lists(st.tuples(mib, st.integers(1, seconds(120))), min_size=1, max_size=40)


@settings(deadline=None, max_examples=60)
@given(spans, st.integers(0, 200), st.booleans())
def test_turns_are_bounded_whatever_the_neighbour_does(
    phases: list[tuple[int, int]], noise_mib: int, stalls: bool
) -> None:
    world = World(stall_ns=0 if stalls else None)
    for others_bytes, ticks in phases:
        for i in range(ticks):
            if stalls and (others_bytes >> 20) % 3 == 0:
                world.stall_ns = (world.stall_ns or 0) + PERIOD_NS // 2
            world.tick(others_bytes, noise_bytes=(-1) ** i * noise_mib * MIB)
    assert world.turns <= most_turns(LIMITS, world.now_ns)


@settings(deadline=None, max_examples=40)
@given(mib, st.integers(256, 4096), st.integers(0, 4 * 1024))
def test_an_unchanging_neighbour_is_answered_once(others: int, cache_mib: int, total_mib: int) -> None:
    """From any start: it goes one way, and then rests."""
    total = max(4 * GIB + total_mib * MIB, others + 256 * MIB)
    world = World(total_bytes=total, cache_bytes=min(cache_mib * MIB, total - others))
    world.run([others] * seconds(300))
    assert world.turns == 0
    settled = len(world.decisions)
    world.run([others] * seconds(300))
    assert len(world.decisions) == settled


@settings(deadline=None, max_examples=40)
@given(st.lists(st.integers(-256, 256), min_size=1, max_size=300))
def test_room_is_never_used_up_by_a_neighbour_of_known_speed(steps: list[int]) -> None:
    """As long as the cache has something to give, and a neighbour takes at most half of low per reading."""
    world = World()
    others = 3 * GIB
    for step in steps:
        others = min(max(0, others + step * MIB), 6 * GIB)
        world.tick(others)
    assert world.least_room_bytes >= LIMITS.low_bytes - 256 * MIB


def test_marks_must_be_in_order() -> None:
    bad: list[Callable[[], GovernorLimits]] = [
        lambda: GovernorLimits(low_bytes=2, target_bytes=1, high_bytes=GIB),
        lambda: GovernorLimits(low_bytes=0, target_bytes=1, high_bytes=2),
        lambda: GovernorLimits(low_bytes=0, target_bytes=MIB, high_bytes=GIB, unit_bytes=0),
    ]
    for make in bad:
        with pytest.raises(ValueError, match=r"marks|closer"):
            make()
    tiny = GovernorLimits.leaving(0)
    assert (tiny.low_bytes, tiny.high_bytes) == (64 * MIB, 128 * MIB)
    kept = GovernorLimits.leaving(GIB, reserve_bytes=GIB)
    assert (kept.low_bytes, kept.target_bytes, kept.high_bytes) == (1536 * MIB, 1792 * MIB, 2048 * MIB)
