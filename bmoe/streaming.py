"""Puts the pipeline together for one model: files, dense image, slots, native engine, streamer.

It owns the order in which these are made and torn down. It must not know tokens or llama.cpp's contexts.
"""

from __future__ import annotations

import asyncio
import os
from ctypes import c_int32
from typing import TYPE_CHECKING

from bmoe.dense import DenseWeights
from bmoe.io.backend_choice import open_backend
from bmoe.io.errors import SeamError
from bmoe.io.files import DirectFile
from bmoe.io.read_queue import ReadQueue
from bmoe.io.slot_memory import SlotMemory
from bmoe.pipeline.native import Engine, lib
from bmoe.pipeline.slots import SlotPlan, least_slot_bytes, plan_slots
from bmoe.pipeline.spare_reads import SpareReads
from bmoe.pipeline.streamer import Streamer
from bmoe.policies import policy_named
from bmoe.replayed_routing import replay_table

if TYPE_CHECKING:
    from collections.abc import Callable

    from bmoe.config import DenseMode, SessionConfig
    from bmoe.io.backend import ReadBackend
    from bmoe.model import ModelLayout


# More keeps no drive busier but makes all of a layer's reads arrive together at the end (docs/LOG.md).
_IN_FLIGHT_BYTES = 4 << 20


class StreamingEngine:
    """Everything that streams one model's experts. Made by `open`.

    Attributes:
        engine: The native engine; its handle goes to the llama_context.
        streamer: The asyncio side.
        plan: The slots.
        backend: What reads.
        files: The model's files.
        dense: The dense weights; None before they are loaded.
        replayed_top_k: Experts a token of a recorded routing that is replayed; None without one.
    """

    def __init__(self, layout: ModelLayout) -> None:
        self.layout = layout
        self.files: list[DirectFile] = []
        self.backend: ReadBackend
        self.plan: SlotPlan
        self.engine: Engine
        self.streamer: Streamer
        self.dense: DenseWeights | None = None
        self.replayed_top_k: int | None = None
        self._memories: list[SlotMemory] = []
        self._mappings: dict[int, tuple[int, int]] = {}
        self._dense_mode: DenseMode = "anon"
        self._event_fd = -1
        self._queue: ReadQueue | None = None
        self._streaming = False
        self._resizing = asyncio.Lock()

    def open_files(self, *, direct: bool) -> None:
        """Opens and probes the model's files.

        Raises:
            FileError: One cannot be opened.
        """
        for path in self.layout.facts.paths:
            self.files.append(DirectFile.open(path, direct=direct))

    @property
    def block_bytes(self) -> int:
        """The largest read alignment among the files."""
        return max(f.block_bytes for f in self.files)

    async def prepare(
        self,
        config: SessionConfig,
        cache_bytes: int,
        *,
        wrap_backend: Callable[[ReadBackend], ReadBackend] | None = None,
    ) -> None:
        """Makes the backend, the native engine and the first slots.

        Args:
            config: Backend, depth, policy, overlap, watchdog.
            cache_bytes: Budget for slots.
            wrap_backend: Tests put faults between the queue and the backend here.

        Raises:
            MemoryBudgetError: The budget is below the least that works, or memory is short.
            BackendError: The backend was asked for by name and does not work.
        """
        self._dense_mode = config.dense_weights
        self.plan = plan_slots(self.layout.tensors, cache_bytes, self.block_bytes, can_grow=True)
        widest = max(c.slot_bytes for c in self.plan.classes)
        depth = config.queue_depth or min(64, max(4, _IN_FLIGHT_BYTES // widest))
        backend = open_backend(config.io_backend, depth)
        self.backend = wrap_backend(backend) if wrap_backend else backend
        # Tags are slots while streaming; loading dense weights needs a few of its own.
        self._queue = ReadQueue(self.backend, self.block_bytes, max(64, self.plan.capacity))
        self._memories = [SlotMemory(c.slot_bytes, c.capacity) for c in self.plan.classes]
        self._event_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self.engine = Engine(
            self.layout.tensors,
            slots=self.plan.capacity,
            event_fd=self._event_fd,
            half_life_batches=config.half_life_batches,
            watchdog_ns=int(config.watchdog_s * 1e9),
            serial=not config.overlap,
        )
        self._set_routing(config)
        self.streamer = Streamer(
            engine=self.engine,
            plan=self.plan,
            memories=self._memories,
            queue=self._queue,
            files=[self._queue.add_file(f) for f in self.files],
            block_bytes=[f.block_bytes for f in self.files],
            make_policy=policy_named(config.policy),
            event_fd=self._event_fd,
        )
        if config.prefetch_layers or config.predict_prefetch or config.route_ahead:
            most = depth if config.route_ahead else max(2, depth // 4)
            self.streamer.follow_hints(SpareReads(most=most, always=config.route_ahead > 0))
        self._streaming = True
        await self.streamer.prepare()

    def _set_routing(self, config: SessionConfig) -> None:
        """What is to be done with the router's choice; nothing, by default."""
        engine = self.engine
        if config.replay_routing is not None:
            table = replay_table(config.replay_routing, layers=len(self.layout.layer_numbers))
            self.replayed_top_k = min(table.shape[2], self.layout.top_k)
            engine.set_replay(table)
        if config.drop_cold_experts > 0:
            engine.set_drop(
                config.drop_cold_experts,
                renormalise=config.drop_renormalise,
                in_prefill=config.drop_in_prefill,
                deterministic_experts=self.plan.expert_slots if config.deterministic_cache else 0,
            )
        if config.prefetch_layers or config.predict_prefetch or config.predict_log or config.route_ahead:
            engine.set_predict(
                temporal=config.prefetch_layers,
                stale=config.predict_prefetch,
                log=config.predict_log,
                route_ahead=config.route_ahead,
                top_k=self.layout.top_k,
            )
        if config.expert_substitute > 0:
            engine.set_substitute(config.expert_substitute, self.layout.top_k)

    async def load_dense(self, on_progress: Callable[[int, int], None]) -> None:
        """Brings everything that is not an expert to where the configuration wants it.

        After `set_mapping` of every file.

        Raises:
            ReadError: A read failed.
            MemoryBudgetError: No memory, or not as much may be locked.
            SeamError: Repacking is wanted and this llama.cpp cannot.
        """
        assert self._queue is not None
        self.dense = DenseWeights(self._dense_mode, self.layout, self.files)
        await self.dense.load(self._queue, self._mappings, on_progress)
        self.dense.attach(self.engine)

    @property
    def cache_bytes(self) -> int:
        """Slot memory under the present budget."""
        return self.plan.used_bytes

    @property
    def least_bytes(self) -> int:
        """The least budget that works."""
        return least_slot_bytes(self.layout.tensors, self.block_bytes)

    async def resize(self, cache_bytes: int) -> int:
        """Another budget for slots, also while compute threads run; the budget that is in effect.

        Raises:
            MemoryBudgetError: Below the least that works.
        """
        async with self._resizing:
            plan = plan_slots(self.layout.tensors, cache_bytes, self.block_bytes, can_grow=True)
            self.plan = plan
            await self.streamer.pool.resize(plan)
        return self.plan.used_bytes

    def dense_resident(self) -> float | None:
        """Share of the dense weights that is in memory, sampled; None when that is not known."""
        return self.dense.resident_fraction() if self.dense else None

    def set_mapping(self, file: int, address: int, length_bytes: int) -> None:
        """Says where llama.cpp has mapped file number `file`."""
        self._mappings[file] = (address, length_bytes)
        lib.bm_set_mapping(self.engine.handle, file, address, length_bytes)

    def start(self) -> None:
        """Starts serving the native engine; after `load_dense`."""
        self.streamer.start()

    def check_seam(self) -> None:
        """After the first batch: the hook must have served it.

        Raises:
            SeamError: No expert matmul was seen, so nothing was streamed.
        """
        if self.engine.statistics().nodes == 0:
            raise SeamError(
                "llama.cpp ran no expert matmul that the hook knows",
                hint="run with --resident; please report the model's architecture",
            )

    def stop(self, reason: int) -> None:
        """Tells compute threads to leave; from any thread."""
        if self.engine.handle:
            lib.bm_stop(self.engine.handle, c_int32(reason))

    async def aclose(self) -> None:
        """Tears down. The llama_context must be gone; no compute thread runs."""
        if self._streaming:
            await self.streamer.aclose()
        elif self._queue is not None:
            await self._queue.aclose()
        await asyncio.sleep(0)
        if hasattr(self, "engine"):
            self.engine.close()
        for memory in self._memories:
            memory.close()
        if self.dense is not None:
            self.dense.close()
        for file in self.files:
            file.close()
        if self._event_fd >= 0:
            os.close(self._event_fd)
            self._event_fd = -1
