"""Presence, protection and eviction: the native tables against a model, then the real engine, delayed.

The model steps the real native functions through random interleavings. The engine runs with delays
injected at every step, hostile policies and more threads than cores.
"""

from __future__ import annotations

import random
import threading
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from bmoe import policies
from bmoe.pipeline.native import ABSENT, READING, READY, RUN, STOP_CANCEL, STOP_IO, WANTED, Engine, lib
from tests.models import tiny_moe
from tests.native_steps import HOSTILE, RANKS, Doorbell, Native, make_policy, tensors_of
from tests.runs import assert_same_as_resident, cache_of_slots, config

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from bmoe.session import Session

# --- the model ------------------------------------------------------------------------------------------

LAYERS, EXPERTS = 2, 3
SLICES = LAYERS * RANKS * EXPERTS
SLOT_BYTES = 4096


class Protocol(RuleBasedStateMachine):
    """What the tables must be after every step, kept in plain lists."""

    @initialize(
        slots=st.tuples(st.integers(1, 4), st.integers(1, 3)),
        seed=st.integers(0, 2**32 - 1),
        one_class=st.booleans(),
    )
    def open(self, slots: tuple[int, int], seed: int, one_class: bool) -> None:
        self.bell = Doorbell()
        self.random = random.Random(seed)  # noqa: S311 (schedules, not secrets)
        per_class = slots[:1] if one_class else slots
        self.class_of_rank = [0, 0, 0] if one_class else [0, 0, 1]
        first = 0
        self.slots_of: list[range] = []
        for count in per_class:
            self.slots_of.append(range(first, first + count))
            first += count
        self.tensors = tensors_of(LAYERS, EXPERTS, [64, 64, 96])
        self.engine = Engine(self.tensors, slots=first, event_fd=self.bell.fd)
        self.native = Native(self.engine)
        self.engine.slot_address[:] = [SLOT_BYTES * (1 + s) for s in range(first)]
        self.engine.phase[:] = [32 * (s % 5) for s in range(SLICES)]

        self.state = [ABSENT] * SLICES
        self.pins = [0] * SLICES
        self.want = [0] * SLICES
        self.slot_of: list[int | None] = [None] * SLICES
        self.slice_in: list[int | None] = [None] * first
        self.epoch = self.clock = 0
        self.last_use = [0] * (LAYERS * EXPERTS)
        self.ring: list[int] = []  # posted and not delivered
        self.pending: list[int] = []  # delivered and without a slot
        self.starved = self.rung = self.rings = self.stopped = False
        # The compute side: the layer in flight, the rank announced last, what is left of that matmul.
        self.layer: int | None = None
        self.experts: list[int] = []
        self.rank = 0
        self.work: list[int] = []
        self.seat: dict[int, int] = {}  # pinned slices that have a slot: which
        self.begin_batch()

    def teardown(self) -> None:
        if hasattr(self, "engine"):
            try:
                self.run_to_the_end()
            finally:
                self.engine.close()
                self.bell.close()

    # names

    def slice_id(self, layer: int, rank: int, expert: int) -> int:
        return (layer * RANKS + rank) * EXPERTS + expert

    def class_of(self, slice_id: int) -> int:
        return self.class_of_rank[slice_id // EXPERTS % RANKS]

    def entry_of(self, slice_id: int) -> int:
        return slice_id // (RANKS * EXPERTS) * EXPERTS + slice_id % EXPERTS

    def free_slots(self, c: int) -> list[int]:
        return [s for s in self.slots_of[c] if self.slice_in[s] is None]

    def in_state(self, *states: int) -> list[int]:
        return [s for s in range(SLICES) if self.state[s] in states]

    # what a step does to the model

    def ring_bell(self) -> None:
        if not self.rung:
            self.rung = self.rings = True

    def announce(self, rank: int) -> None:
        assert self.layer is not None
        posted = False
        if rank == 0:
            self.epoch += 1
            for x in self.experts:
                self.last_use[self.layer * EXPERTS + x] = self.clock
                for k in range(RANKS):
                    self.want[self.slice_id(self.layer, k, x)] = self.epoch
        for k in range(rank, RANKS if rank == 0 else rank + 1):
            for x in self.experts:
                s = self.slice_id(self.layer, k, x)
                if self.state[s] == ABSENT:
                    self.state[s] = WANTED
                    self.ring.append(s)
                    posted = True
                if k == rank:
                    self.pins[s] += 1
                    slot = self.slot_of[s]
                    if slot is not None:
                        self.seat[s] = slot
        if posted or self.starved:
            self.ring_bell()
        self.rank = rank
        self.work = [self.slice_id(self.layer, rank, x) for x in self.experts]
        self.native.announce(self.layer * RANKS + rank, self.experts)

    def finish(self, s: int) -> None:
        assert self.native.is_ready(s)
        slot = self.slot_of[s]
        assert slot is not None
        assert self.native.data(s) == SLOT_BYTES * (1 + slot) + 32 * (s % 5)
        self.native.unpin(s)
        self.pins[s] -= 1
        self.want[s] = 0
        del self.seat[s]
        self.work.remove(s)
        if self.starved:
            self.ring_bell()

    def take(self, rooms: Iterable[int]) -> None:
        """As the loop does it: quieten the bell, then take until nothing comes."""
        self.bell.quieten()
        self.rings = False
        for room in rooms:
            self.rung = False
            got = self.native.take(room)
            assert got == self.ring[:room]
            self.pending += got
            del self.ring[:room]
            if not got:
                break
        assert not self.ring

    def assign(self, s: int, slot: int) -> None:
        self.pending.remove(s)
        assert self.native.assign([s], [slot]) == 0
        self.state[s] = READING
        self.slot_of[s] = slot
        self.slice_in[slot] = s
        if self.pins[s]:
            self.seat[s] = slot

    def complete(self, slots: Sequence[int]) -> None:
        assert self.native.ready(slots) == 0
        for slot in slots:
            s = self.slice_in[slot]
            assert s is not None
            self.state[s] = READY

    def may_evict(self, s: int, *, force: bool) -> bool:
        spared = not force and self.want[s] == self.epoch
        return self.state[s] == READY and not self.pins[s] and not spared

    def vacate(self, s: int) -> None:
        slot = self.slot_of[s]
        assert slot is not None
        self.state[s] = ABSENT
        self.slot_of[s] = None
        self.slice_in[slot] = None

    def sweep(self, c: int, most: int, *, force: bool) -> bool:
        expected: list[int] = []
        for passed in (False, True) if force else (False,):
            for slot in self.slots_of[c]:
                s = self.slice_in[slot]
                if s is not None and len(expected) < most and self.may_evict(s, force=passed):
                    self.vacate(s)
                    expected.append(slot)
        assert self.native.sweep(self.slots_of[c], most, force=force) == expected
        return bool(expected)

    # the steps

    @precondition(lambda self: not self.stopped and self.layer is None)
    @rule(
        layer=st.integers(0, LAYERS - 1), experts=st.permutations(range(EXPERTS)), n=st.integers(1, EXPERTS)
    )
    def start_layer(self, layer: int, experts: list[int], n: int) -> None:
        self.layer, self.experts = layer, experts[:n]
        self.announce(0)

    @precondition(lambda self: not self.stopped and self.layer is not None and not self.work)
    @rule()
    def next_matmul(self) -> None:
        if self.rank == RANKS - 1:
            self.layer = None
        else:
            self.announce(self.rank + 1)

    @precondition(lambda self: any(self.state[s] == READY for s in self.work))
    @rule(data=st.data())
    def compute(self, data: st.DataObject) -> None:
        self.finish(data.draw(st.sampled_from([s for s in self.work if self.state[s] == READY])))

    @rule(rooms=st.lists(st.integers(1, 4), max_size=4))
    def loop_wakes(self, rooms: list[int]) -> None:
        self.take([*rooms, SLICES, SLICES])

    @precondition(lambda self: any(self.free_slots(self.class_of(s)) for s in self.pending))
    @rule(data=st.data())
    def start_read(self, data: st.DataObject) -> None:
        s = data.draw(st.sampled_from([s for s in self.pending if self.free_slots(self.class_of(s))]))
        self.assign(s, data.draw(st.sampled_from(self.free_slots(self.class_of(s)))))

    @precondition(lambda self: self.in_state(READING))
    @rule(data=st.data())
    def reads_complete(self, data: st.DataObject) -> None:
        reading = [slot for s in self.in_state(READING) if (slot := self.slot_of[s]) is not None]
        self.complete(data.draw(st.lists(st.sampled_from(reading), min_size=1, unique=True)))

    @rule(s=st.integers(0, SLICES - 1), force=st.booleans())
    def evict(self, s: int, force: bool) -> None:
        if self.may_evict(s, force=force):
            slot = self.slot_of[s]
            self.vacate(s)
            assert self.native.evict(s, force=force) == slot
        else:
            assert self.native.evict(s, force=force) == -1

    @precondition(lambda self: self.in_state(READY))
    @rule(data=st.data(), stale=st.booleans())
    def evict_entry(self, data: st.DataObject, stale: bool) -> None:
        entry = self.entry_of(data.draw(st.sampled_from(self.in_state(READY))))
        used = self.last_use[entry]
        layer, expert = divmod(entry, EXPERTS)
        slices = [self.slice_id(layer, k, expert) for k in range(RANKS)]
        if stale and used:
            assert self.native.evict_entry(layer, expert, used - 1) == []
            return
        gone = [s for s in slices if self.may_evict(s, force=False)]
        slots = [self.slot_of[s] for s in gone]
        for s in gone:
            self.vacate(s)
        assert self.native.evict_entry(layer, expert, used) == slots

    @rule(c=st.integers(0, 1), most=st.integers(1, 8), force=st.booleans())
    def sweep_class(self, c: int, most: int, force: bool) -> None:
        self.sweep(min(c, len(self.slots_of) - 1), most, force=force)

    @rule(on=st.booleans())
    def starve(self, on: bool) -> None:
        self.starved = on
        self.native.starve(on)

    @rule()
    def begin_batch(self) -> None:
        self.clock += 1
        self.native.begin_batch()

    @precondition(lambda self: self.in_state(READING))
    @rule(data=st.data())
    def read_fails(self, data: st.DataObject) -> None:
        s = data.draw(st.sampled_from(self.in_state(READING)))
        slot = self.slot_of[s]
        assert slot is not None
        self.vacate(s)
        self.seat.pop(s, None)
        assert not self.native.abandon(slot, again=False)
        self.stop(STOP_IO)  # a pinned slice that nobody reads must not be waited for

    @precondition(lambda self: self.in_state(READING))
    @rule(data=st.data())
    def read_of_an_earlier_batch_fails(self, data: st.DataObject) -> None:
        """Nobody's error; but a matmul of this batch may have come to count on it."""
        s = data.draw(st.sampled_from(self.in_state(READING)))
        slot = self.slot_of[s]
        assert slot is not None
        self.vacate(s)
        self.seat.pop(s, None)
        assert self.native.abandon(slot, again=True) == bool(self.pins[s])
        if self.pins[s]:
            self.state[s] = WANTED
            self.pending.append(s)

    @rule()
    def cancel(self) -> None:
        self.stop(STOP_CANCEL)

    def stop(self, why: int) -> None:
        if not self.stopped:
            self.reason = why
        self.stopped = True
        self.ring_bell()
        self.native.stop(why)

    @precondition(lambda self: self.stopped)
    @rule()
    def reset(self) -> None:
        """The batch was given up. Reads in flight stay as they are."""
        self.native.reset()
        self.state = [ABSENT if s == WANTED else s for s in self.state]
        self.pins, self.want = [0] * SLICES, [0] * SLICES
        self.ring, self.pending, self.work = [], [], []
        self.seat = {}
        self.starved = self.rung = self.stopped = False
        self.layer = None

    # what must always hold

    @invariant()
    def tables_are_the_models(self) -> None:
        if not hasattr(self, "engine"):
            return
        assert [self.native.word(s) for s in range(SLICES)] == list(zip(self.state, self.pins, strict=True))
        assert self.engine.slot_slice.tolist() == [-1 if s is None else s for s in self.slice_in]
        present = [0] * (LAYERS * EXPERTS)
        for s in self.in_state(READING, READY):
            present[self.entry_of(s)] += 1
        assert self.engine.present.tolist() == present
        assert self.engine.last_use.tolist() == self.last_use
        assert self.bell.rings == self.rings
        assert self.engine.stop_reason()[0] == (self.reason if self.stopped else RUN)

    @invariant()
    def the_protocol_holds(self) -> None:
        if not hasattr(self, "engine"):
            return
        for s, slot in self.seat.items():
            assert self.slot_of[s] == slot, "a pinned slice lost its slot"
        seated = [s for s in self.slice_in if s is not None]
        assert len(seated) == len(set(seated)), "a slice has two slots"
        assert sorted(seated) == self.in_state(READING, READY)
        assert sorted(self.ring + self.pending) == self.in_state(WANTED), (
            "a request got lost, or was made twice"
        )
        if self.ring:
            assert self.rings, "requests wait and nobody rang"
        for s in self.work:
            assert self.pins[s] == 1
            assert self.stopped or self.state[s] != ABSENT, (
                "a slice is waited for and nobody was asked for it"
            )

    # liveness: from here on only what wakes the loop makes it act

    def run_to_the_end(self) -> None:
        if self.stopped:
            self.reset()
        self.pump()
        layers_left = 2
        while True:
            can: list[Callable[[], None]] = []
            if self.rings:
                can.append(self.serve)
            if self.in_state(READING):
                can.append(self.complete_some_read)
            if any(self.state[s] == READY for s in self.work):
                can.append(self.finish_some)
            if self.layer is not None and not self.work:
                can.append(self.next_matmul)
            if self.layer is None and layers_left:
                layers_left -= 1
                can.append(self.start_some_layer)
            if not can:
                break
            self.random.choice(can)()
            self.tables_are_the_models()
            self.the_protocol_holds()
        assert self.layer is None, "the compute side waits and nothing will happen any more"
        assert not self.pending
        assert not self.ring

    def complete_some_read(self) -> None:
        slot = self.slot_of[self.random.choice(self.in_state(READING))]
        assert slot is not None
        self.complete([slot])
        self.pump()

    def finish_some(self) -> None:
        self.finish(self.random.choice([s for s in self.work if self.state[s] == READY]))

    def start_some_layer(self) -> None:
        self.layer = self.random.randrange(LAYERS)
        self.experts = self.random.sample(range(EXPERTS), EXPERTS)
        self.announce(0)

    def serve(self) -> None:
        self.take([SLICES, SLICES])
        self.pump()

    def pump(self) -> None:
        """The least that a streamer must do: starve, look once more, then sleep until rung."""
        while self.pending and not self.start_some_read():
            if self.starved:
                break
            self.starved = True
            self.native.starve(True)
        if not self.pending and self.starved:
            self.starved = False
            self.native.starve(False)

    def start_some_read(self) -> bool:
        for s in sorted(self.pending, key=lambda s: not self.pins[s]):
            c = self.class_of(s)
            if (
                self.free_slots(c)
                or self.sweep(c, 1, force=False)
                or (self.pins[s] and self.sweep(c, 1, force=True))
            ):
                self.assign(s, self.random.choice(self.free_slots(c)))
                return True
        return False


TestProtocol = Protocol.TestCase
TestProtocol.settings = settings(
    max_examples=150,
    stateful_step_count=50,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow],
)


# --- the engine, delayed ---------------------------------------------------------------------------------

PROMPT = "Delays and hostile victims change nothing at all."


def delayed(seed: int) -> Callable[[Session], None]:
    def prepare(session: Session) -> None:
        assert session.streaming is not None
        lib.bm_test_delays(session.streaming.engine.handle, seed)

    return prepare


@pytest.mark.slow
@pytest.mark.parametrize("policy", HOSTILE)
@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "serial"])
@pytest.mark.parametrize("threads", [1, 2, 4])
def test_delays_at_every_step_change_no_digest(
    threads: int, overlap: bool, policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One layer, so that what a layer evicts is often its own; fewer slots than top-k, and around it."""
    monkeypatch.setitem(policies.POLICIES, "hostile", make_policy(policy))
    path = tiny_moe("Q4_K", layers=1)
    for seed, slots in enumerate((1, 3, 8, 11), start=1):
        wanted = config(
            path,
            threads=threads,
            ubatch_tokens=16,
            overlap=overlap,
            policy="hostile",
            cache_bytes=cache_of_slots(path, slots),
        )
        assert_same_as_resident(wanted, PROMPT[:15], 4, prepare=delayed(seed * 7919))


@pytest.mark.parametrize("slots", [6, 7, 8])
def test_a_serial_layer_whose_own_slices_are_taken_goes_on(slots: int) -> None:
    """`up` and `down` of the layer are resident and spared, and `gate` needs their slots.

    Nobody reads them anew before their own matmul: to wait for the whole layer would be to wait for ever.
    """
    path = tiny_moe("Q4_K", layers=1)
    wanted = config(
        path, threads=2, policy="lru", overlap=False, cache_bytes=cache_of_slots(path, slots), watchdog_s=5.0
    )
    assert_same_as_resident(wanted, "abcdefgh", 40)


@pytest.mark.parametrize("slots", [2, 9])
def test_a_busy_python_thread_changes_no_digest(slots: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(policies.POLICIES, "hostile", make_policy("most needed"))
    path = tiny_moe("Q4_K_M")
    size = cache_of_slots(tiny_moe("Q6_K"), 2 * slots)
    enough = threading.Event()

    def spin() -> None:
        while not enough.is_set():
            sum(range(200))

    busy = threading.Thread(target=spin)
    busy.start()
    try:
        wanted = config(path, threads=2, policy="hostile", cache_bytes=size)
        assert_same_as_resident(wanted, PROMPT[:20], 3, prepare=delayed(slots))
    finally:
        enough.set()
        busy.join()


@pytest.mark.parametrize("seed", [1, 2])
def test_delays_change_no_digest_over_two_slot_sizes(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(policies.POLICIES, "hostile", make_policy("anything"))
    path = tiny_moe("Q4_K_M")
    wanted = config(path, threads=3, policy="hostile", io_backend="threads", queue_depth=2)
    assert_same_as_resident(wanted, PROMPT, 6, prepare=delayed(seed))
