"""Stand-ins for what the command line runs: records with fixed figures, and a session that follows a script.

`python -m tests.fakes NAME ARGUMENT…` is the command line over the session of that name in `SESSIONS`, for
tests that need a process of their own.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import signal
import sys
import time
from typing import TYPE_CHECKING, Any

from bmoe.io.errors import Cancelled
from bmoe.records import (
    CacheResize,
    EffectiveConfig,
    LoadProgress,
    LoadReport,
    PrefillProgress,
    RunSummary,
    StepMetrics,
    TokenEvent,
)

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Sequence

    from bmoe.config import GenerateRequest, SessionConfig

MIB = 1 << 20

EFFECTIVE = EffectiveConfig(
    mode="streaming",
    mode_reason=None,
    model_path="some/model.gguf",
    model_name="Some Model",
    architecture="qwen3moe",
    model_bytes=4000 * MIB,
    moe_layers=12,
    experts=128,
    top_k=8,
    expert_bytes=3840 * MIB,
    dense_bytes=160 * MIB,
    cycle_bytes=240 * MIB,
    threads=2,
    context_tokens=2048,
    ubatch_tokens=512,
    overlap=True,
    io_backend="uring",
    io_fallback_reason=None,
    registered_buffers=True,
    unregistered_reason=None,
    direct=True,
    direct_fallback_reason=None,
    queue_depth=32,
    cache_bytes=500 * MIB,
    cache_auto=False,
    cache_arithmetic=None,
    cache_experts=200,
    total_experts=1536,
    policy="aged",
    lazy_map=True,
    repack=False,
    llama_cpp_version="0.3.36",
    bmoe_version="0.1.0",
)

RESIDENT = dataclasses.replace(
    EFFECTIVE,
    mode="resident",
    overlap=None,
    io_backend=None,
    registered_buffers=None,
    direct=None,
    queue_depth=None,
    cache_bytes=None,
    cache_auto=None,
    cache_experts=None,
    policy=None,
    lazy_map=None,
    repack=True,
)

LOAD = LoadReport(wall_ns=310_000_000, dense_ns=80_000_000, dense_bytes=160 * MIB)

STEP = StepMetrics(
    tokens=1,
    wall_ns=50_000_000,
    stall_ns=12_000_000,
    hook_ns=60_000,
    compute_ns=37_940_000,
    experts_ns=30_000_000,
    loop_ns=3_000_000,
    lookups=96,
    hits=72,
    reads=72,
    read_bytes=60 * MIB,
    speculative_bytes=0,
    evictions=72,
    rereads=8,
    slots_used=600,
    cache_bytes=500 * MIB,
    submit_latency_ns=90_000,
    read_latency_ns=1_500_000,
    io_busy_ns=25_000_000,
    dropped=None,
    cpu_ns=80_000_000,
    minor_faults=3,
    major_faults=0,
    overhead_ns=400_000,
)

RESIDENT_STEP = dataclasses.replace(
    STEP,
    stall_ns=None,
    hook_ns=None,
    compute_ns=50_000_000,
    experts_ns=None,
    loop_ns=None,
    lookups=None,
    hits=None,
    reads=None,
    read_bytes=None,
    speculative_bytes=None,
    evictions=None,
    rereads=None,
    slots_used=None,
    cache_bytes=None,
    submit_latency_ns=None,
    read_latency_ns=None,
    io_busy_ns=None,
)

SUMMARY = RunSummary(
    end="length",
    prompt_tokens=12,
    tokens=4,
    prefill_ns=600_000_000,
    decode_ns=200_000_000,
    prefill_read_bytes=700 * MIB,
    decode_read_bytes=240 * MIB,
    hit_rate=0.75,
    stall_ns=48_000_000,
    overhead_ns=1_600_000,
    cpu_ns=320_000_000,
    submit_latency_ns_p50=78_400,
    submit_latency_ns_p99=310_000,
    slots_used=600,
    slots_total=600,
    evictions=288,
    rereads=32,
    reads=288,
    peak_rss_bytes=900 * MIB,
)


class Thought(str):
    """A text of the reasoning."""

    __slots__ = ()


class FakeSession:
    """Stands where the class `Session` stands: `open` gives this very object.

    Args:
        script: What `generate` does, in order: yields a text or a thought as a token, raises an error, calls
            a function (which may be a coroutine function); "wait" waits for `cancel`.
        opening: The same for `open`, for errors and functions.
        effective: What runs.
    """

    def __init__(
        self,
        script: Sequence[str | BaseException | Callable[[], Any]] = ("Hello", ", world"),
        *,
        opening: Sequence[BaseException | Callable[[], Any]] = (),
        effective: EffectiveConfig = EFFECTIVE,
    ) -> None:
        self.effective = effective
        self.load_report = LOAD
        self.summary: RunSummary | None = None
        self.prefill_metrics: list[StepMetrics] = []
        self.model = self
        self.streaming = None
        self.config: SessionConfig | None = None
        self.request: GenerateRequest | None = None
        self.closed = False
        self._script = script
        self._opening = opening
        self._cancelled: asyncio.Event
        self._loop: asyncio.AbstractEventLoop

    async def open(
        self,
        config: SessionConfig,
        *,
        on_effective: Callable[[EffectiveConfig], None] | None = None,
        on_progress: Callable[[LoadProgress], None] | None = None,
        on_warning: Callable[[str], None] | None = None,
        on_resize: Callable[[CacheResize], None] | None = None,
    ) -> FakeSession:
        self.on_warning, self.on_resize = on_warning, on_resize
        self.config = config
        if on_effective is not None:
            on_effective(self.effective)
        self._loop = asyncio.get_running_loop()
        self._cancelled = asyncio.Event()
        if on_progress is not None:
            on_progress(LoadProgress(done_bytes=40 * MIB, total_bytes=160 * MIB))
        for step in self._opening:
            await _do(step)
        return self

    def tokenize(self, text: str, *, add_special: bool = True) -> list[int]:
        return list(text.encode()) if not add_special else [1, *text.encode()]

    async def generate(
        self, request: GenerateRequest, *, on_prefill: Callable[[PrefillProgress], None] | None = None
    ) -> AsyncGenerator[TokenEvent, None]:
        self.request = request
        made = 0
        end: Any = "error"
        try:
            self.prefill_metrics[:] = [dataclasses.replace(STEP, tokens=12, overhead_ns=None)]
            if on_prefill is not None:
                on_prefill(PrefillProgress(done_tokens=12, total_tokens=12))
            for step in self._script:
                if step == "wait":
                    await self._cancelled.wait()
                    end = "cancelled"
                    raise Cancelled("cancelled")
                if isinstance(step, str):
                    thought = step if isinstance(step, Thought) else ""
                    text = "" if thought else step
                    yield TokenEvent(index=made, token=100 + made, text=text, reasoning=thought, metrics=STEP)
                    made += 1
                else:
                    await _do(step)
            end = "length"
        finally:
            self.summary = dataclasses.replace(SUMMARY, end=end, tokens=made)

    def cancel(self) -> None:
        self._loop.call_soon_threadsafe(self._cancelled.set)

    async def aclose(self) -> None:
        self.closed = True


async def _do(step: BaseException | Callable[[], Any]) -> None:
    if isinstance(step, BaseException):
        raise step
    result = step()
    if asyncio.iscoroutine(result):
        await result


def interrupt_self() -> None:
    """Ctrl-C."""
    os.kill(os.getpid(), signal.SIGINT)


async def _work_that_cannot_be_interrupted() -> None:
    """Like llama.cpp's loader: on another thread, and waited for whatever happens."""
    work = asyncio.get_running_loop().run_in_executor(None, time.sleep, 60)
    while not work.done():
        try:
            await asyncio.shield(work)
        except asyncio.CancelledError:
            sys.stderr.write("still loading\n")


def _interrupted_twice() -> None:
    interrupt_self()
    interrupt_self()


SESSIONS = {
    "stuck": FakeSession(opening=[interrupt_self, _work_that_cannot_be_interrupted]),
    "interrupted-twice": FakeSession(opening=[_interrupted_twice, _work_that_cannot_be_interrupted]),
    "terminated": FakeSession(["Hello", lambda: os.kill(os.getpid(), signal.SIGTERM), "wait"]),
    "endless": FakeSession(["x" * 999 + "\n"] * 100_000),
}


if __name__ == "__main__":
    from bmoe.cli import decode_run, main

    vars(decode_run)["Session"] = SESSIONS[sys.argv[1]]
    sys.exit(main(sys.argv[2:]))
