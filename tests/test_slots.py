"""How a budget becomes slots."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bmoe.io.errors import MemoryBudgetError
from bmoe.pipeline.native import StreamedTensor
from bmoe.pipeline.slots import SlotClass, plan_slots, slot_bytes_for, total_slot_bytes

MIB = 1 << 20
KIB = 1 << 10


def tensors(*layers: tuple[int, tuple[int, ...]]) -> list[StreamedTensor]:
    """Per layer: the number of experts, and the slice sizes of its tensors."""
    found = []
    for layer, (experts, sizes) in enumerate(layers):
        for rank, size in enumerate(sizes):
            found.append(
                StreamedTensor(
                    name=f"blk.{layer}.{rank}",
                    layer=layer,
                    rank=rank,
                    ggml_type=0,
                    experts=experts,
                    ne0=1,
                    ne1=1,
                    slice_bytes=size,
                    file=0,
                    file_offset=0,
                )
            )
    return found


blocks = st.sampled_from([512, 1024, 2048, 4096, 8192, 16384, 65536])


@settings(deadline=None, derandomize=True)
@given(slice_bytes=st.integers(1, 4 * MIB), block=blocks, offset=st.integers(0, 1 << 40))
def test_a_slot_takes_the_window_of_a_slice_anywhere_in_a_file(
    slice_bytes: int, block: int, offset: int
) -> None:
    slot = slot_bytes_for(slice_bytes, block)
    assert slot % 4096 == 0
    assert slot % block == 0, "a read of the whole slot must be whole blocks"
    start = offset - offset % block
    assert offset + slice_bytes <= start + slot
    assert slot < slice_bytes + block + 2 * max(block, 4096)


def test_slots_of_real_experts_waste_little() -> None:
    """Qwen3-30B's Q4_K slice of 884,736 bytes: two blocks at most."""
    assert slot_bytes_for(884_736, 512) == 888_832
    assert slot_bytes_for(884_736, 4096) == 888_832
    assert slot_bytes_for(552_960, 512) == 557_056


def test_slices_of_one_size_share_one_class() -> None:
    plan = plan_slots(tensors((16, (36_864, 36_864, 36_864)), (16, (36_864,) * 3)), 10 * 40_960, 4096)
    assert plan.classes == (
        SlotClass(slice_bytes=36_864, slot_bytes=40_960, slots=10, first_slot=0, capacity=10),
    )
    assert plan.class_of_tensor == (0,) * 6
    assert plan.total_slots == 10
    assert (plan.expert_slots, plan.total_experts) == (3, 32)
    assert (plan.budget_bytes, plan.used_bytes) == (409_600, 409_600)


def test_two_sizes_share_a_budget_by_what_each_would_need() -> None:
    """As in Q4_K_M: in every other layer the down projection is larger."""
    layers = [(8, (100 * KIB, 100 * KIB, 200 * KIB if i % 2 else 100 * KIB)) for i in range(4)]
    plan = plan_slots(tensors(*layers), 4 * MIB, 4096)
    assert plan.classes == (
        SlotClass(slice_bytes=100 * KIB, slot_bytes=104 * KIB, slots=28, first_slot=0, capacity=28),
        SlotClass(slice_bytes=200 * KIB, slot_bytes=204 * KIB, slots=5, first_slot=28, capacity=5),
    )
    assert plan.class_of_tensor == (0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 1)
    assert plan.total_slots == 33
    assert plan.used_bytes == 28 * 104 * KIB + 5 * 204 * KIB <= plan.budget_bytes


def test_everything_is_the_most_that_is_used() -> None:
    found = tensors((8, (5000, 7000)), (4, (5000, 7000)))
    everything = total_slot_bytes(found, 512)
    assert everything == 12 * (8192 + 8192)
    for budget in (everything, 10 * everything):
        plan = plan_slots(found, budget, 512)
        assert [c.slots for c in plan.classes] == [12, 12]
        assert plan.used_bytes == everything
        assert plan.expert_slots == plan.total_experts == 12


def promised_least(found: list[StreamedTensor], budget: int, block: int) -> int | None:
    """What the refusal says would work, in bytes; None when the budget does."""
    try:
        plan_slots(found, budget, block)
    except MemoryBudgetError as error:
        promised = re.search(r"(\d+) MiB", error.hint or "")
        return int(promised[1]) * MIB if promised else 0
    return None


model = st.lists(
    st.tuples(st.integers(1, 64), st.lists(st.integers(1, 3 * MIB), min_size=1, max_size=3)),
    min_size=1,
    max_size=4,
)


@settings(deadline=None, derandomize=True)
@given(layers=model, budget=st.integers(1, 400 * MIB), block=blocks)
def test_a_plan_is_within_its_budget_and_complete(
    layers: list[tuple[int, list[int]]], budget: int, block: int
) -> None:
    found = tensors(*[(experts, tuple(sizes)) for experts, sizes in layers])
    least = promised_least(found, budget, block)
    plan = plan_slots(found, budget if least is None else least, block)
    if least is None:
        assert plan.used_bytes <= budget
    else:
        assert least > budget
    assert {c.slice_bytes for c in plan.classes} == {t.slice_bytes for t in found}
    first = 0
    for c in plan.classes:
        assert c.slots >= 1
        assert c.first_slot == first
        assert c.slots <= sum(t.experts for t in found if t.slice_bytes == c.slice_bytes)
        first += c.slots
    assert first == plan.total_slots
    for t, number in zip(found, plan.class_of_tensor, strict=True):
        assert plan.classes[number].slice_bytes == t.slice_bytes
    assert plan.expert_slots <= plan.total_experts


def test_less_than_a_slot_of_every_size_is_refused() -> None:
    found = tensors((8, (MIB, 4 * MIB)))
    with pytest.raises(MemoryBudgetError) as caught:
        plan_slots(found, MIB, 4096)
    assert str(caught.value) == (
        "an expert cache of 1048576 bytes has no room for one slice of 1048576 bytes"
        " (the least that works for this model is 6 MiB)"
    )


def test_rounding_wastes_under_3_percent_of_a_real_budget() -> None:
    """Two classes of hundreds of KiB: less than one slot of each is lost."""
    layers = [(128, (884_736, 884_736, 1_290_240 if i % 2 else 884_736)) for i in range(12)]
    for budget in (250 * MIB, 500 * MIB, 1000 * MIB):
        plan = plan_slots(tensors(*layers), budget, 4096)
        kept = sum(c.slots * c.slice_bytes for c in plan.classes)
        assert kept >= 0.97 * budget
