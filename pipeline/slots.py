"""How a byte budget becomes slots: one class of slots per distinct slice size.

Owns geometry only. It must not know what is resident, nor who reads.

A slice lies in its file at any multiple of 32 bytes, and O_DIRECT reads whole blocks, so a slot holds the
slice's window rounded outward at both ends: the slice's first byte is `slot + file_offset % block`. Slots
are whole pages; for experts of real models (hundreds of KiB) this wastes well under 1 %.
"""

from __future__ import annotations

import mmap
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bmoe.io.errors import MemoryBudgetError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bmoe.pipeline.native import StreamedTensor


@dataclass(frozen=True, slots=True)
class SlotClass:
    """Slots of one size. Their global numbers are `[first_slot, first_slot + slots)`.

    `capacity` is how many numbers are set aside for it, so that `slots` can grow; at least `slots`.
    """

    slice_bytes: int
    slot_bytes: int
    slots: int
    first_slot: int
    capacity: int


@dataclass(frozen=True, slots=True)
class SlotPlan:
    """Slot classes for a set of tensors under a budget.

    `class_of_tensor[t]` indexes `classes`. `expert_slots` is how many whole experts fit, rounded down.
    `total_slots` are in use, of `capacity` numbers.
    """

    classes: tuple[SlotClass, ...]
    class_of_tensor: tuple[int, ...]
    budget_bytes: int
    used_bytes: int
    total_slots: int
    capacity: int
    expert_slots: int
    total_experts: int


def slot_bytes_for(slice_bytes: int, block_bytes: int) -> int:
    """Size of a slot for slices of this size: the widest window, in whole pages and whole blocks."""
    unit = max(mmap.PAGESIZE, block_bytes)  # powers of two
    return -(-(slice_bytes + block_bytes) // unit) * unit


def total_slot_bytes(tensors: Sequence[StreamedTensor], block_bytes: int) -> int:
    """Budget at which every expert of every layer has a slot."""
    return sum(slot_bytes_for(t.slice_bytes, block_bytes) * t.experts for t in tensors)


def least_slot_bytes(tensors: Sequence[StreamedTensor], block_bytes: int) -> int:
    """The least budget that works: one slot for every size of slice, in proportion to what each needs."""
    sizes = [t.slice_bytes for t in tensors]
    wanted = [sum(t.experts for t in tensors if t.slice_bytes == size) for size in set(sizes)]
    return -(-total_slot_bytes(tensors, block_bytes) // min(wanted))


def plan_slots(
    tensors: Sequence[StreamedTensor], budget_bytes: int, block_bytes: int, *, can_grow: bool = False
) -> SlotPlan:
    """Divides `budget_bytes` among the slot classes in proportion to what each would need in full.

    Args:
        tensors: The streamed tensors.
        budget_bytes: Memory for slots. More than everything is cut to everything.
        block_bytes: The largest read alignment among the files.
        can_grow: Set numbers aside for all slices there are.

    Raises:
        MemoryBudgetError: The budget does not give every class at least one slot.
    """
    sizes = sorted({t.slice_bytes for t in tensors})
    wanted = {size: sum(t.experts for t in tensors if t.slice_bytes == size) for size in sizes}
    full = {size: wanted[size] * slot_bytes_for(size, block_bytes) for size in sizes}
    everything = sum(full.values())
    budget = min(budget_bytes, everything)
    classes: list[SlotClass] = []
    first = 0
    for size in sizes:
        slot_bytes = slot_bytes_for(size, block_bytes)
        slots = min(wanted[size], budget * full[size] // everything // slot_bytes)
        if slots == 0:
            least = least_slot_bytes(tensors, block_bytes)
            raise MemoryBudgetError(
                f"an expert cache of {budget_bytes} bytes has no room for one slice of {size} bytes",
                hint=f"the least that works for this model is {-(-least // (1 << 20))} MiB",
            )
        capacity = wanted[size] if can_grow else slots
        classes.append(
            SlotClass(
                slice_bytes=size, slot_bytes=slot_bytes, slots=slots, first_slot=first, capacity=capacity
            )
        )
        first += capacity
    experts = sum({t.layer: t.experts for t in tensors}.values())
    slices = sum(t.experts for t in tensors)
    return SlotPlan(
        classes=tuple(classes),
        class_of_tensor=tuple(sizes.index(t.slice_bytes) for t in tensors),
        budget_bytes=budget_bytes,
        used_bytes=sum(c.slots * c.slot_bytes for c in classes),
        total_slots=sum(c.slots for c in classes),
        capacity=first,
        expert_slots=sum(c.slots for c in classes) * experts // slices,
        total_experts=experts,
    )
