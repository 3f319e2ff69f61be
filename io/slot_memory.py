"""The memory of the cache: equal slots in one mapping, made usable chunk by chunk.

Owns slot geometry and how far the memory has been touched. Must not know what is in a slot, nor who
reads into it.
"""

from __future__ import annotations

import mmap
import threading
from typing import TYPE_CHECKING, Final, Self

from bmoe.io.anonymous_memory import AnonymousMemory

if TYPE_CHECKING:
    from types import TracebackType

# The kernel's limit for one registered buffer (io_uring_register(2)).
MAX_CHUNK_BYTES: Final = 1 << 30


class SlotMemory:
    """`slots` slots of `slot_bytes` each, back to back, in chunks of whole slots.

    A chunk is the unit of touching memory and of registering it with io_uring, so no slot straddles a
    chunk's edge.

    Args:
        slot_bytes: Size of a slot: a multiple of the page size, at most 1 GiB.
        slots: How many.
        chunk_bytes: A chunk holds as many whole slots as fit in this, at least one.

    Attributes:
        chunk_slots: Slots per chunk; the last chunk may hold fewer.
        chunks: How many chunks there are.
        populated_slots: Slots `[0, populated_slots)` have memory and can be read into.
        base_address: Address of slot 0, aligned to 2 MiB.

    Raises:
        ValueError: A geometry that cannot be.
        MemoryBudgetError: No address space for it.
    """

    def __init__(self, slot_bytes: int, slots: int, chunk_bytes: int = 64 << 20) -> None:
        if slot_bytes <= 0 or slot_bytes % mmap.PAGESIZE:
            raise ValueError(f"slot_bytes is {slot_bytes}, expected a multiple of {mmap.PAGESIZE}")
        if slot_bytes > MAX_CHUNK_BYTES:
            raise ValueError(f"slot_bytes is {slot_bytes}, expected at most {MAX_CHUNK_BYTES}")
        if slots <= 0 or chunk_bytes <= 0:
            raise ValueError(f"{slots} slots in chunks of {chunk_bytes} bytes")
        self.slot_bytes: Final = slot_bytes
        self.slots: Final = slots
        self.chunk_slots: Final = max(1, min(chunk_bytes, MAX_CHUNK_BYTES) // slot_bytes)
        self.chunks: Final = -(-slots // self.chunk_slots)
        self.populated_slots = 0
        self._memory = AnonymousMemory(slot_bytes * slots)
        self.base_address: Final = self._memory.address
        self._populating = threading.Lock()

    def slot_address(self, slot: int) -> int:
        """Where slot `slot` starts."""
        return self.base_address + self._checked(slot, self.slots, "slot") * self.slot_bytes

    def slot_view(self, slot: int) -> memoryview:
        """The bytes of slot `slot`."""
        start_bytes = self._checked(slot, self.slots, "slot") * self.slot_bytes
        return self._memory.view[start_bytes : start_bytes + self.slot_bytes]

    def chunk_view(self, chunk: int) -> memoryview:
        """The bytes of all slots of chunk `chunk`."""
        slots = self._chunk(self._checked(chunk, self.chunks, "chunk"))
        return self._memory.view[slots.start * self.slot_bytes : slots.stop * self.slot_bytes]

    def slots_view(self, slots: range) -> memoryview:
        """The bytes of consecutive slots."""
        return self._memory.view[slots.start * self.slot_bytes : slots.stop * self.slot_bytes]

    def give_back(self, first_slot: int) -> None:
        """Return the memory of slots `[first_slot, populated_slots)` to the kernel.

        No read into them may be in flight, and none may be registered with a backend.
        """
        with self._populating:
            if first_slot < self.populated_slots:
                self._memory.give_back(first_slot * self.slot_bytes, self.populated_slots * self.slot_bytes)
                self.populated_slots = first_slot

    def populate_next_chunk(self, most_slots: int | None = None) -> range | None:
        """Give the next chunk its memory; the slots that became usable, or None when all are.

        Takes about a second per GiB with the GIL released: for a worker thread.

        Args:
            most_slots: Go no further than this, which may leave a chunk in part; None is all.

        Raises:
            MemoryBudgetError: The kernel has no memory for it.
            ValueError: Closed.
        """
        with self._populating:
            most = self.slots if most_slots is None else min(self.slots, most_slots)
            first = self.populated_slots
            if first >= most:
                return None
            slots = range(first, min((first // self.chunk_slots + 1) * self.chunk_slots, most))
            self._memory.touch(slots.start * self.slot_bytes, slots.stop * self.slot_bytes)
            self.populated_slots = slots.stop
            return slots

    def close(self) -> None:
        """Give the memory back; idempotent. Views handed out before stay valid and read as zeros.

        No read into a slot may be in flight, and a backend that registered the chunks must be closed
        first: it pins their pages.
        """
        self._memory.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _chunk(self, chunk: int) -> range:
        first = chunk * self.chunk_slots
        return range(first, min(first + self.chunk_slots, self.slots))

    @staticmethod
    def _checked(index: int, count: int, name: str) -> int:
        if not 0 <= index < count:
            raise IndexError(f"{name} {index} of {count}")
        return index
