"""The real streamer, serving a compute side played in Python, over completions in random order."""

from __future__ import annotations

import asyncio
import ctypes
import errno
import os
import random
import sys
import threading
from typing import TYPE_CHECKING, Any, Self

import pytest

from bmoe.io.files import DirectFile
from bmoe.io.null import NullBackend
from bmoe.io.read_queue import ReadQueue
from bmoe.io.slot_memory import SlotMemory
from bmoe.pipeline.native import READY, RUN, STOP_CANCEL, STOP_IO, Engine, lib
from bmoe.pipeline.slots import SlotClass, SlotPlan
from bmoe.pipeline.streamer import Streamer
from tests.native_steps import HOSTILE, RANKS, Doorbell, Native, make_policy, tensors_of
from tests.runs import run

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path


class Unordered(NullBackend):
    """Completes any of its reads at any turn of the loop; fails some of them."""

    def __init__(self, content: bytes, seed: int, *, failures: float = 0.0) -> None:
        super().__init__(64, source=self._fill)
        self._content = content
        self._random = random.Random(seed)  # noqa: S311 (schedules, not secrets)
        self.failures = failures

    def _fill(self, file_id: int, offset_bytes: int, view: memoryview) -> int:
        del file_id
        if self._random.random() < self.failures:
            view[:] = b"\xff" * len(view)
            return -errno.EIO
        piece = self._content[offset_bytes : offset_bytes + len(view)]
        view[: len(piece)] = piece
        return len(piece)

    def _collect(self, tags: list[int], results: list[int]) -> None:
        self._random.shuffle(self._handed_over)
        later = self._handed_over[self._random.randint(0, len(self._handed_over)) :]
        del self._handed_over[len(self._handed_over) - len(later) :]
        super()._collect(tags, results)
        self._handed_over += later
        if later:
            os.eventfd_write(self._eventfd, 1)


class Rig:
    """A streamer over a file that only exists in memory, and the compute side."""

    LAYERS, EXPERTS, TOP_K = 3, 6, 4
    SIZES = (3000, 3000, 5000)

    def __init__(
        self, folder: Path, *, slots: tuple[int, int], policy: str, seed: int, failures: float = 0.0
    ) -> None:
        self.tensors = tensors_of(self.LAYERS, self.EXPERTS, self.SIZES)
        last = self.tensors[-1]
        size = last.file_offset + last.experts * last.slice_bytes
        self.content = random.Random(1).randbytes(size)  # noqa: S311 (test data)
        path = folder / "experts"
        path.write_bytes(self.content)
        self.file = DirectFile.open(str(path), direct=False)
        block = self.file.block_bytes
        classes = (
            SlotClass(
                slice_bytes=3000, slot_bytes=2 * block, slots=slots[0], first_slot=0, capacity=slots[0]
            ),
            SlotClass(
                slice_bytes=5000, slot_bytes=3 * block, slots=slots[1], first_slot=slots[0], capacity=slots[1]
            ),
        )
        plan = SlotPlan(
            classes=classes,
            class_of_tensor=(0, 0, 1) * self.LAYERS,
            budget_bytes=0,
            used_bytes=0,
            total_slots=sum(slots),
            capacity=sum(slots),
            expert_slots=0,
            total_experts=self.LAYERS * self.EXPERTS,
        )
        self.bell = Doorbell()
        self.engine = Engine(self.tensors, slots=plan.total_slots, event_fd=self.bell.fd)
        self.native = Native(self.engine)
        self.memories = [SlotMemory(c.slot_bytes, c.slots, chunk_bytes=2 * c.slot_bytes) for c in classes]
        self.backend = Unordered(self.content, seed, failures=failures)
        self.queue = ReadQueue(self.backend, block, 64)
        self.streamer = Streamer(
            engine=self.engine,
            plan=plan,
            memories=self.memories,
            queue=self.queue,
            files=[self.queue.add_file(self.file)],
            block_bytes=[block],
            make_policy=make_policy(policy),
            event_fd=self.bell.fd,
        )
        self.random = random.Random(seed)  # noqa: S311 (schedules, not secrets)

    async def __aenter__(self) -> Self:
        await self.streamer.prepare()
        self.streamer.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.streamer.aclose()
        self.engine.close()
        for memory in self.memories:
            memory.close()
        self.file.close()
        self.bell.close()

    def slices(self, tensor: int, experts: Sequence[int]) -> list[int]:
        return [self.engine.first_slice[tensor] + x for x in experts]

    def check(self, tensor: int, slice_id: int) -> None:
        """The bytes in the slot are the file's."""
        t = self.tensors[tensor]
        start = t.file_offset + (slice_id - self.engine.first_slice[tensor]) * t.slice_bytes
        assert (
            ctypes.string_at(self.native.data(slice_id), t.slice_bytes)
            == self.content[start : start + t.slice_bytes]
        )

    async def matmul(self, tensor: int, experts: Sequence[int], *, leave: float = 0.0) -> bool:
        """Announces, and computes what becomes ready. False when the run was stopped, or we left it."""
        self.native.announce(tensor, experts)
        todo = self.slices(tensor, experts)
        while todo:
            if self.engine.stop_reason()[0] != RUN:
                return False
            if self.random.random() < leave:
                self.native.stop(STOP_CANCEL)
                return False
            ready = [s for s in todo if self.native.is_ready(s)]
            if ready:
                chosen = self.random.choice(ready)
                self.check(tensor, chosen)
                if self.random.random() < 0.3:
                    await asyncio.sleep(0)
                    self.check(tensor, chosen)  # pinned: still there, still the same
                self.native.unpin(chosen)
                todo.remove(chosen)
            else:
                await asyncio.sleep(0)
        return True

    async def token(self, top_k: int, *, leave: float = 0.0) -> bool:
        self.native.begin_batch()
        for layer in range(self.LAYERS):
            experts = self.random.sample(range(self.EXPERTS), top_k)
            for rank in range(RANKS):
                if not await self.matmul(layer * RANKS + rank, experts, leave=leave):
                    return False
        return True


FEW_SLOTS = [(1, 1), (2, 1), (3, 2), (5, 4), (9, 5)]


@pytest.mark.parametrize("policy", HOSTILE)
@pytest.mark.parametrize("slots", FEW_SLOTS, ids=str)
def test_the_streamer_never_hangs_and_never_moves_what_is_in_use(
    slots: tuple[int, int], policy: str, tmp_path: Path
) -> None:
    async def scenario(seed: int) -> None:
        async with asyncio.timeout(30), Rig(tmp_path, slots=slots, policy=policy, seed=seed) as rig:
            for _ in range(5):
                assert await rig.token(rig.TOP_K)
            assert await rig.token(rig.EXPERTS)
            statistics = rig.streamer.statistics()
            assert statistics.slots_used <= statistics.slots_total == sum(slots)
            assert statistics.evictions == statistics.reads - statistics.slots_used

    for seed in range(2):
        run(scenario(seed))


@pytest.mark.parametrize("policy", HOSTILE)
@pytest.mark.parametrize("slots", FEW_SLOTS, ids=str)
def test_the_streamer_is_right_again_after_cancels_and_failures(
    slots: tuple[int, int], policy: str, tmp_path: Path
) -> None:
    async def scenario(seed: int) -> None:
        async with (
            asyncio.timeout(30),
            Rig(tmp_path, slots=slots, policy=policy, seed=seed, failures=0.02) as rig,
        ):
            broken = 0
            for _ in range(12):
                if not await rig.token(rig.TOP_K, leave=0.02):
                    broken += 1
                    reason = rig.engine.stop_reason()[0]
                    assert reason in {STOP_CANCEL, STOP_IO}
                    assert (rig.streamer.error is None) or reason == STOP_IO or rig.streamer.error.slice_name
                    rig.streamer.reset()
            assert broken
            rig.backend.failures = 0.0
            while rig.queue.in_flight:  # noqa: ASYNC110 (no event tells)
                await asyncio.sleep(0)
            rig.streamer.reset()
            for _ in range(3):
                assert await rig.token(rig.TOP_K)

    for seed in range(2):
        run(scenario(seed))


@pytest.mark.parametrize("slots", FEW_SLOTS, ids=str)
def test_the_streamer_serves_a_thread(slots: tuple[int, int], tmp_path: Path) -> None:
    """The compute side in a thread of its own, changing turns with the loop as often as Python can."""

    def compute(rig: Rig, failures: list[BaseException]) -> None:
        try:
            for _ in range(4):
                rig.native.begin_batch()
                for tensor in range(rig.LAYERS * RANKS):
                    if tensor % RANKS == 0:
                        experts = rig.random.sample(range(rig.EXPERTS), rig.TOP_K)
                    rig.native.announce(tensor, experts)
                    todo = rig.slices(tensor, experts)
                    while todo:
                        assert rig.engine.stop_reason()[0] == RUN
                        for s in [s for s in todo if rig.native.is_ready(s)]:
                            rig.check(tensor, s)
                            rig.native.unpin(s)
                            todo.remove(s)
        except BaseException as failure:  # noqa: BLE001 (raised on the test's side)
            failures.append(failure)

    async def scenario() -> None:
        failures: list[BaseException] = []
        async with Rig(tmp_path, slots=slots, policy="anything", seed=3) as rig:
            thread = threading.Thread(target=compute, args=(rig, failures))
            thread.start()
            try:
                async with asyncio.timeout(30):
                    while thread.is_alive():  # noqa: ASYNC110 (as above)
                        await asyncio.sleep(0)
            finally:
                rig.native.stop(STOP_CANCEL)
                thread.join()
        assert not failures, failures[0]

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        run(scenario())
    finally:
        sys.setswitchinterval(interval)


class _BetweenLooks:
    """The native library; something happens between the streamer's first look for a slot and its second."""

    def __init__(self, event: Callable[[], None]) -> None:
        self._event = event

    def __getattr__(self, name: str) -> Any:
        return getattr(lib, name)

    def bm_set_starved(self, handle: int, on: int) -> None:
        if on:
            self._event()
        lib.bm_set_starved(handle, on)


def test_a_slot_that_is_released_just_before_the_streamer_starves_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its release rings nobody, since nobody starves yet."""

    async def scenario() -> None:
        async with asyncio.timeout(10), Rig(tmp_path, slots=(2, 1), policy="anything", seed=1) as rig:
            for tensor in range(RANKS):
                assert await rig.matmul(tensor, [0])
            (gate,), (up, other) = rig.slices(0, [0]), rig.slices(1, [0, 1])
            assert rig.native.word(gate) == rig.native.word(up) == (READY, 0)
            released: list[int] = []

            def release() -> None:
                if not released:
                    released.append(up)
                    rig.native.unpin(up)

            monkeypatch.setattr("bmoe.pipeline.streamer.lib", _BetweenLooks(release))
            rig.native.announce(0, [0])
            rig.native.announce(1, [0, 1])  # both slots are in use, and a third slice needs one
            while not rig.native.is_ready(other):  # noqa: ASYNC110 (as above)
                await asyncio.sleep(0)
            assert released == [up]
            rig.check(1, other)
            rig.native.unpin(other)
            rig.native.unpin(gate)

    run(scenario())


def test_closing_while_requests_wait_and_memory_grows_leaves_no_task_behind(tmp_path: Path) -> None:
    async def scenario() -> None:
        problems: list[dict[str, Any]] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: problems.append(context))
        async with Rig(tmp_path, slots=(9, 9), policy="anything", seed=1) as rig:
            rig.native.announce(0, list(range(rig.EXPERTS)))
            while not rig.queue.in_flight:  # noqa: ASYNC110 (as above)
                await asyncio.sleep(0)
        for _ in range(20):
            await asyncio.sleep(0)
        assert asyncio.all_tasks() == {asyncio.current_task()}
        assert problems == []

    for _ in range(5):
        run(scenario())
