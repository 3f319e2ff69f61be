"""Requests, slots, readiness and the hook: what moves experts from files into a running matmul.

Knows no model, no token and no policy. `bmoe.pipeline.native` binds the C part, `streamer` is the asyncio
part, `slots` the geometry, `policy` the seam to cache policies.
"""

from __future__ import annotations

from bmoe.pipeline.native import Engine, EngineCounters, StreamedTensor, bind_ggml
from bmoe.pipeline.policy import EvictionPolicy, UseHistory
from bmoe.pipeline.slots import SlotClass, SlotPlan, plan_slots
from bmoe.pipeline.streamer import Streamer, StreamerStatistics

__all__ = [
    "Engine",
    "EngineCounters",
    "EvictionPolicy",
    "SlotClass",
    "SlotPlan",
    "StreamedTensor",
    "Streamer",
    "StreamerStatistics",
    "UseHistory",
    "bind_ggml",
    "plan_slots",
]
