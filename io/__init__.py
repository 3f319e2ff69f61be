"""Files, memory and reads: the lowest room, usable by itself.

Open a `DirectFile`, take a backend from `open_backend`, put a `ReadQueue` over it, and reads land by
`O_DIRECT` in a `SlotMemory` or a `RangeImage` without a copy. Knows no model and no llama.cpp, and sets
up no logging. `bmoe.io.errors` has every error of bmoe, `bmoe.io.testing` the fakes.
"""

from __future__ import annotations

from bmoe.io.anonymous_memory import AnonymousMemory
from bmoe.io.backend import BackendStatistics, ReadBackend, Target
from bmoe.io.backend_choice import BackendChoice, open_backend
from bmoe.io.files import DirectFile
from bmoe.io.memory_figures import (
    CgroupMemory,
    MachineMemory,
    ProcessMemory,
    available_bytes,
    cgroup_memory,
    machine_memory,
    memlock_limit_bytes,
    process_memory,
)
from bmoe.io.null import NullBackend
from bmoe.io.range_image import RangeImage
from bmoe.io.read_queue import ReadQueue, ReadQueueStatistics
from bmoe.io.slot_memory import SlotMemory

__all__ = [
    "AnonymousMemory",
    "BackendChoice",
    "BackendStatistics",
    "CgroupMemory",
    "DirectFile",
    "MachineMemory",
    "NullBackend",
    "ProcessMemory",
    "RangeImage",
    "ReadBackend",
    "ReadQueue",
    "ReadQueueStatistics",
    "SlotMemory",
    "Target",
    "available_bytes",
    "cgroup_memory",
    "machine_memory",
    "memlock_limit_bytes",
    "open_backend",
    "process_memory",
]
