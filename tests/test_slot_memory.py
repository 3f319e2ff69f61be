"""`bmoe.io.slot_memory` and the mapping below it."""

from __future__ import annotations

import ctypes
import errno
import mmap
import re
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bmoe.io import anonymous_memory
from bmoe.io.anonymous_memory import HUGE_PAGE_BYTES, view_address
from bmoe.io.errors import MemoryBudgetError
from bmoe.io.memory_figures import process_memory
from bmoe.io.slot_memory import MAX_CHUNK_BYTES, SlotMemory

PAGE = mmap.PAGESIZE


class StubLibc:
    """Refuses every madvise with one errno."""

    def __init__(self, number: int) -> None:
        self.number = number

    def madvise(self, *_: object) -> int:
        ctypes.set_errno(self.number)
        return -1


@given(slot_pages=st.integers(1, 40), slots=st.integers(1, 50), chunk_bytes=st.integers(1, 60 * PAGE))
@settings(max_examples=60, deadline=None)
def test_slots_lie_back_to_back_and_never_straddle_a_chunk(
    slot_pages: int, slots: int, chunk_bytes: int
) -> None:
    with SlotMemory(slot_pages * PAGE, slots, chunk_bytes) as memory:
        assert memory.base_address % HUGE_PAGE_BYTES == 0
        seen = 0
        for chunk in range(memory.chunks):
            view = memory.chunk_view(chunk)
            assert view.nbytes <= max(chunk_bytes, memory.slot_bytes)
            for slot in range(seen, seen + view.nbytes // memory.slot_bytes):
                assert memory.slot_address(slot) == memory.base_address + slot * memory.slot_bytes
                assert view_address(memory.slot_view(slot)) == memory.slot_address(slot)
                assert view_address(view) <= memory.slot_address(slot)
                assert memory.slot_address(slot) + memory.slot_bytes <= view_address(view) + view.nbytes
            seen += view.nbytes // memory.slot_bytes
        assert seen == slots


@pytest.mark.parametrize(
    ("slot_bytes", "slots", "chunk_bytes"),
    [(0, 1, 1), (PAGE + 1, 1, 1), (-PAGE, 1, 1), (MAX_CHUNK_BYTES + PAGE, 1, 1), (PAGE, 0, 1), (PAGE, 1, 0)],
)
def test_refuses_impossible_geometry(slot_bytes: int, slots: int, chunk_bytes: int) -> None:
    with pytest.raises(ValueError, match=r"slot_bytes|slots"):
        SlotMemory(slot_bytes, slots, chunk_bytes)


def test_chunks_stay_within_what_one_registered_buffer_may_be() -> None:
    with SlotMemory(MAX_CHUNK_BYTES // 2, 5, chunk_bytes=8 << 30) as memory:
        assert (memory.chunk_slots, memory.chunks) == (2, 3)


def test_refuses_more_than_the_address_space() -> None:
    with pytest.raises(MemoryBudgetError, match="cannot reserve"):
        SlotMemory(1 << 30, 1 << 24)


def test_chunks_become_usable_in_order() -> None:
    with SlotMemory(PAGE, 10, chunk_bytes=4 * PAGE) as memory:
        assert memory.populated_slots == 0
        ranges = [memory.populate_next_chunk() for _ in range(4)]
        assert ranges == [range(4), range(4, 8), range(8, 10), None]
        assert memory.populated_slots == 10


def test_populating_gives_real_memory_and_keeps_content() -> None:
    with SlotMemory(8 << 20, 8, chunk_bytes=32 << 20) as memory:
        before = process_memory().anon_bytes
        memory.populate_next_chunk()
        after = process_memory().anon_bytes
        assert before is not None
        assert after is not None
        assert after - before >= 31 << 20
        memory.slot_view(3)[-4:] = b"kept"
        memory.populate_next_chunk()
        assert bytes(memory.slot_view(3)[-4:]) == b"kept"


def test_populating_twice_at_once_gives_every_slot_once() -> None:
    with SlotMemory(PAGE, 64, chunk_bytes=PAGE) as memory:
        got: list[range] = []

        def work() -> None:
            while (slots := memory.populate_next_chunk()) is not None:
                got.append(slots)

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(slots.start for slots in got) == list(range(64))


def test_old_kernels_get_their_memory_by_writing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(anonymous_memory, "_libc", StubLibc(errno.EINVAL))
    with SlotMemory(PAGE, 4, chunk_bytes=PAGE) as memory:
        assert memory.populate_next_chunk() == range(1)


def test_lack_of_memory_is_a_budget_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(anonymous_memory, "_libc", StubLibc(errno.ENOMEM))
    with SlotMemory(PAGE, 4) as memory:
        with pytest.raises(MemoryBudgetError, match="Cannot allocate memory"):
            memory.populate_next_chunk()
        assert memory.populated_slots == 0


def test_mapping_wants_huge_pages_and_is_not_forked() -> None:
    with SlotMemory(2 << 20, 4) as memory, open("/proc/self/smaps", encoding="ascii") as smaps:
        entries = re.split(r"^(?=[0-9a-f]+-[0-9a-f]+ )", smaps.read(), flags=re.MULTILINE)
        for entry in entries[1:]:
            start, end = (int(edge, 16) for edge in entry.split(" ", 1)[0].split("-"))
            if start <= memory.base_address < end:
                flags = entry.rsplit("VmFlags:", 1)[1].split()
                assert {"hg", "dc"} <= set(flags)
                return
    pytest.fail("the mapping is not in smaps")


def test_close_frees_memory_although_views_live() -> None:
    """And they read as zeros, rather than crash."""
    memory = SlotMemory(8 << 20, 8)
    memory.populate_next_chunk()
    kept = memory.slot_view(7)
    kept[:4] = b"data"
    before = process_memory().anon_bytes
    memory.close()
    memory.close()
    after = process_memory().anon_bytes
    assert before is not None
    assert after is not None
    assert before - after >= 60 << 20
    assert bytes(kept[:4]) == bytes(4)


def test_populating_after_close_is_refused() -> None:
    memory = SlotMemory(PAGE, 4, chunk_bytes=PAGE)
    memory.close()
    with pytest.raises(ValueError, match="closed"):
        memory.populate_next_chunk()


@pytest.mark.parametrize("index", [-1, 4])
def test_indices_outside_are_refused(index: int) -> None:
    with SlotMemory(PAGE, 4, chunk_bytes=PAGE) as memory:
        for method in (memory.slot_address, memory.slot_view, memory.chunk_view):
            with pytest.raises(IndexError):
                method(index)
