"""A session: one model opened once, generations one after the other, asynchronously.

It owns the life cycle (open, generate, cancel, close) and the decode thread. It must not know how experts are
read (streaming.py), what is measured (generation.py), nor how anything is shown.
"""

from __future__ import annotations

import asyncio
import ctypes
import dataclasses
import gc
import importlib.metadata
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Self, TypeVar

from bmoe import __version__
from bmoe.budget import CacheBudget, cache_budget
from bmoe.cache_care import CacheCare
from bmoe.dialogue import Dialogue
from bmoe.generation import Generation
from bmoe.gguf_file import read_gguf
from bmoe.io.errors import BmoeError, Cancelled, SeamError, StallError, UsageError
from bmoe.io.memory_figures import available_bytes, process_memory
from bmoe.io.scheduling import set_slice_ns
from bmoe.llama_library import bound_spinning, llama
from bmoe.model import lay_out
from bmoe.pipeline.native import STOP_CANCEL, STOP_FAULT, STOP_IO, STOP_STALL, bind_ggml
from bmoe.pipeline.slots import total_slot_bytes
from bmoe.records import (
    CacheResize,
    CacheState,
    EffectiveConfig,
    LoadProgress,
    LoadReport,
    PrefillProgress,
    RunSummary,
    StepMetrics,
    TokenEvent,
)
from bmoe.runtime import (
    AbortedBatch,
    Context,
    Model,
    RuntimeConfig,
    refuse_unsafe_environment,
)
from bmoe.streaming import StreamingEngine
from bmoe.traces import Traces
from bmoe.warm import model_identity

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Sequence

    from bmoe.chat.messages import Message
    from bmoe.config import GenerateRequest, SessionConfig
    from bmoe.generation import Event
    from bmoe.io.backend import ReadBackend
    from bmoe.model import ModelLayout

_T = TypeVar("_T")

# A busy Python thread keeps the GIL this long before the event loop gets its turn; the default is 5 ms.
_SWITCH_INTERVAL_S = 50e-6
_switch_interval: list[float] = []


def _shorten_switch_interval() -> None:
    """For as long as any session is open; what was set before comes back with the last one's close."""
    _switch_interval.append(sys.getswitchinterval() if not _switch_interval else _switch_interval[0])
    sys.setswitchinterval(_SWITCH_INTERVAL_S)


def _restore_switch_interval() -> None:
    before = _switch_interval.pop()
    if not _switch_interval:
        sys.setswitchinterval(before)


class Session:
    """A model that generates. Made by `open`; `aclose` it, or use `async with await Session.open(...)`.

    Attributes:
        effective: What really runs.
        load_report: How opening went.
        summary: Of the last generation, also after a cancel or an error; None before the first.
        prefill_metrics: One record per prompt batch of the last generation.
        context: The llama context, for tools that work below the session (`verify`).
        streaming: The pipeline, or None when resident.
        dialogue: The conversation and the model's template.
        traces: What is recorded beside the figures, or None when nothing is.
        on_resize: Called on the loop when the cache's budget has changed.
        on_warning: Called on the loop with what the user should know meanwhile.
    """

    effective: EffectiveConfig
    load_report: LoadReport

    def __init__(self, config: SessionConfig) -> None:
        self.config = config
        self.summary: RunSummary | None = None
        self.prefill_metrics: list[StepMetrics] = []
        self.streaming: StreamingEngine | None = None
        self.context: Context
        self.model: Model
        self.dialogue: Dialogue
        self.traces: Traces | None = None
        self.on_resize: Callable[[CacheResize], None] = lambda _: None
        self.on_warning: Callable[[str], None] = lambda _: None
        self._early_warnings: list[str] | None = []
        self._care: CacheCare | None = None
        self._turn = 0
        self._guessing = config.predict_prefetch or config.predict_log or config.route_ahead > 0
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="bmoe-decode")
        self._cancelled = threading.Event()
        self._stop_flag = ctypes.c_int(0)
        self._shortened = False
        self._slice_ns: int | None = None
        self._closed = False
        # Opening counts as busy: it can be cancelled.
        self._busy = True
        self._state = threading.RLock()

    # --- open and close -----------------------------------------------------------------------------

    @classmethod
    async def open(
        cls,
        config: SessionConfig,
        *,
        on_effective: Callable[[EffectiveConfig], None] | None = None,
        on_progress: Callable[[LoadProgress], None] | None = None,
        on_warning: Callable[[str], None] | None = None,
        on_resize: Callable[[CacheResize], None] | None = None,
        wrap_backend: Callable[[ReadBackend], ReadBackend] | None = None,
    ) -> Self:
        """Loads a model and makes everything ready for the first token.

        Args:
            config: What is wanted.
            on_effective: Called on the loop once it is settled what will run, before weights are read.
            on_progress: Called on the loop as weights are read.
            on_warning: The attribute of this name.
            on_resize: The attribute of this name.
            wrap_backend: Tests inject faults here.

        Raises:
            BmoeError: Any leaf of `bmoe.io.errors`; nothing is left open.
        """
        session = cls(config)
        session.on_warning = on_warning or session.on_warning
        session.on_resize = on_resize or session.on_resize
        try:
            await session._open(
                on_effective or (lambda _: None), on_progress or (lambda _: None), wrap_backend
            )
        except BaseException:
            session._warn_freely()
            await session.aclose()
            raise
        return session

    async def _open(
        self,
        on_effective: Callable[[EffectiveConfig], None],
        on_progress: Callable[[LoadProgress], None],
        wrap_backend: Callable[[ReadBackend], ReadBackend] | None,
    ) -> None:
        t0 = time.monotonic_ns()
        config = self.config
        if config.mode != "resident":
            bound_spinning()
        layout = await self._in_thread(lambda: lay_out(read_gguf(config.model_path)))
        overrides: tuple[tuple[str, int], ...] = ()
        if config.n_expert_used is not None:
            layout = layout.with_top_k(config.n_expert_used)
            overrides = ((f"{layout.facts.architecture}.expert_used_count", layout.top_k),)
        await self._in_thread(llama)  # not before the file is known to be one that it can be given
        bind_ggml()
        if config.mode == "stream" and not layout.is_moe:
            raise UsageError(f"{config.model_path} has no expert tensors to stream", hint="use --resident")
        stream = layout.is_moe and config.mode != "resident"
        runtime = RuntimeConfig(
            path=config.model_path,
            threads=config.threads,
            context_tokens=config.context_tokens,
            ubatch_tokens=min(config.ubatch_tokens, config.context_tokens),
            repack=not stream and (config.repack or config.dense_weights == "repack"),
            plain_experts=not stream and config.dense_weights == "repack",
            overrides=overrides,
        )
        dense_ns: int | None = None
        if stream:
            refuse_unsafe_environment()
            budget = await self._load_streaming(layout, runtime, wrap_backend)
            self.dialogue = Dialogue(self.model, layout.facts.metadata)
            self.effective = self._effective(layout, runtime, budget)
            on_effective(self.effective)
            self._warn_freely()
            dense_ns = await self._load_dense(on_progress)
            assert self.streaming is not None
            self._care = CacheCare(
                self.streaming,
                config,
                resize=lambda size, reason: self.set_cache_bytes(size, reason=reason),
                on_warning=self._warn,
            )
            self._care.begin()
            self.effective = dataclasses.replace(self.effective, warm_experts=self._care.warm_experts)
        else:
            self.effective = self._effective(layout, runtime, None)
            on_effective(self.effective)
            await self._load_resident(layout, runtime, on_progress)
            self.dialogue = Dialogue(self.model, layout.facts.metadata)
            self.effective = self._effective(layout, runtime, None)
        gc.collect()
        gc.freeze()
        _shorten_switch_interval()
        self._shortened = True
        if stream:
            self._slice_ns = set_slice_ns()
        self.load_report = LoadReport(
            wall_ns=time.monotonic_ns() - t0,
            dense_ns=dense_ns,
            dense_bytes=layout.dense_bytes if stream else None,
        )
        self._busy = False

    async def _load_streaming(
        self,
        layout: ModelLayout,
        runtime: RuntimeConfig,
        wrap_backend: Callable[[ReadBackend], ReadBackend] | None,
    ) -> CacheBudget:
        """Everything but the weights: files, slots, llama.cpp's model (mapped, not read) and context."""
        config = self.config
        streaming = self.streaming = StreamingEngine(layout)
        streaming.open_files(direct=config.direct)
        budget = cache_budget(
            layout,
            wanted_bytes=config.cache_bytes,
            floor_bytes=config.cache_floor_bytes,
            everything_bytes=total_slot_bytes(layout.tensors, streaming.block_bytes),
            available_bytes=available_bytes(),
            context_tokens=config.context_tokens,
            ubatch_tokens=runtime.ubatch_tokens,
            ceil_bytes=config.cache_ceil_bytes,
            threads=runtime.threads,
            own_bytes=process_memory().anon_bytes or 0,
            dense_weights=config.dense_weights,
        )
        if budget.warning:
            self._warn(budget.warning)
        await streaming.prepare(config, budget.cache_bytes, wrap_backend=wrap_backend)
        if streaming.replayed_top_k not in {None, layout.top_k}:
            self._warn(
                f"{config.replay_routing} has {streaming.replayed_top_k} experts a token and the model "
                f"{layout.top_k}: the others are the model's own; --n-expert-used {streaming.replayed_top_k}"
            )
        if _traced(config):
            self.traces = Traces(config, streaming)
        await self._in_thread(lambda: self._load_model(runtime, lazy=True, files=layout.facts.paths))
        for number, path in enumerate(layout.facts.paths):
            new = self.model.new_mappings[number]
            if not new and not layout.uses_file(number):
                continue  # llama.cpp unmaps a shard that has only metadata, or nothing that is loaded
            if len(new) != 1:
                raise SeamError(f"llama.cpp mapped {path} {len(new)} times, expected once")
            streaming.set_mapping(number, *new[0])
        handle = streaming.engine.handle
        await self._in_thread(lambda: self._make_context(runtime, handle))
        return budget

    def _warn(self, text: str) -> None:
        """What the user should know, but not before what runs: that is the first line."""
        if self._early_warnings is not None:
            self._early_warnings.append(text)
        else:
            self.on_warning(text)  # whoever listens by then

    def _warn_freely(self) -> None:
        early, self._early_warnings = self._early_warnings, None
        for text in early or ():
            self.on_warning(text)

    async def _load_dense(self, on_progress: Callable[[LoadProgress], None]) -> int:
        assert self.streaming is not None
        t0 = time.monotonic_ns()
        await self.streaming.load_dense(
            lambda done, total: on_progress(LoadProgress(done_bytes=done, total_bytes=total))
        )
        if self.streaming.dense is not None and self.streaming.dense.note is not None:
            self._warn(self.streaming.dense.note)
        self.streaming.start()
        return time.monotonic_ns() - t0

    async def _load_resident(
        self, layout: ModelLayout, runtime: RuntimeConfig, on_progress: Callable[[LoadProgress], None]
    ) -> None:
        loop = asyncio.get_running_loop()
        total = sum(layout.facts.sizes_bytes)

        def progress(fraction: float) -> bool:
            done = LoadProgress(done_bytes=int(fraction * total), total_bytes=total)
            loop.call_soon_threadsafe(on_progress, done)
            return not self._cancelled.is_set()

        await self._in_thread(lambda: self._load_model(runtime, lazy=False, on_progress=progress))
        await self._in_thread(lambda: self._make_context(runtime, None))

    # On the decode thread, so that whoever cancels `open` still finds what came into being.

    def _load_model(
        self,
        runtime: RuntimeConfig,
        *,
        lazy: bool,
        files: Sequence[str] = (),
        on_progress: Callable[[float], bool] | None = None,
    ) -> None:
        self.model = Model(runtime, lazy=lazy, files=files, on_progress=on_progress)

    def _make_context(self, runtime: RuntimeConfig, engine_handle: int | None) -> None:
        self.context = Context(self.model, runtime, engine_handle=engine_handle, stop_flag=self._stop_flag)

    def _close_llama(self) -> None:
        if hasattr(self, "context"):
            self.context.close()
        if hasattr(self, "model"):
            self.model.close()

    def _effective(
        self, layout: ModelLayout, runtime: RuntimeConfig, budget: CacheBudget | None
    ) -> EffectiveConfig:
        s, config, facts = self.streaming, self.config, layout.facts
        dialogue = getattr(self, "dialogue", None)
        name = facts.metadata.get("general.name")
        reasons = sorted({f.fallback_reason for f in s.files if f.fallback_reason}) if s else []
        return EffectiveConfig(
            mode="streaming" if s else "resident",
            mode_reason="the model has no experts" if config.mode == "auto" and not s else None,
            model_path=config.model_path,
            model_name=name if isinstance(name, str) else None,
            architecture=facts.architecture,
            model_bytes=sum(facts.sizes_bytes),
            moe_layers=len(layout.layer_numbers),
            experts=layout.experts,
            top_k=layout.top_k,
            file_top_k=layout.file_top_k,
            expert_bytes=layout.expert_bytes,
            dense_bytes=layout.dense_bytes,
            cycle_bytes=layout.cycle_bytes,
            threads=runtime.threads,
            context_tokens=runtime.context_tokens,
            ubatch_tokens=runtime.ubatch_tokens,
            overlap=config.overlap if s else None,
            io_backend=s.backend.name if s else None,
            io_fallback_reason=s.backend.fallback_reason if s else None,
            registered_buffers=s.backend.registered if s else None,
            unregistered_reason=s.backend.unregistered_reason if s else None,
            direct=all(f.direct for f in s.files) if s else None,
            direct_fallback_reason="; ".join(reasons) or None,
            queue_depth=s.backend.queue_depth if s else None,
            cache_bytes=s.plan.used_bytes if s else None,
            cache_auto=budget.auto if budget else None,
            cache_arithmetic=budget.arithmetic if budget else None,
            cache_experts=s.plan.expert_slots if s else None,
            total_experts=s.plan.total_experts if s else layout.experts * len(layout.layer_numbers),
            policy=config.policy if s else None,
            lazy_map=self.model.lazy_map if s else None,
            repack=runtime.repack,
            dense_weights=config.dense_weights if s or runtime.plain_experts else None,
            chat_template=dialogue.template is not None if dialogue else False,
            chat_template_problem=dialogue.problem if dialogue else None,
            think_control=dialogue.think_control if dialogue else None,
            traced=_traced(config) if s else None,
            lossy=_lossy(config, layout) if s else None,
            give_back=config.give_back if s else None,
            layers=facts.arch_int("block_count"),
            model_sha256=model_identity(layout),
            llama_cpp_version=importlib.metadata.version("llama-cpp-python"),
            bmoe_version=__version__,
        )

    async def aclose(self) -> None:
        """Frees everything. Idempotent; waits for a generation that is running."""
        self.cancel()
        if self._care is not None:
            care, self._care = self._care, None
            await care.aclose(keep=self._turn > 0)
        if not self._closed:
            self._closed = True
            await self._in_thread(self._close_llama)
        if self.streaming:
            await self.streaming.aclose()
            self.streaming = None
        if self.traces:
            self.traces.close()
            self.traces = None
        self._executor.shutdown()
        gc.unfreeze()
        if self._shortened:
            self._shortened = False
            _restore_switch_interval()
        if self._slice_ns is not None:
            set_slice_ns(self._slice_ns)
            self._slice_ns = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def _in_thread(self, function: Callable[[], _T]) -> _T:
        return await asyncio.get_running_loop().run_in_executor(self._executor, function)

    async def on_decode_thread(self, function: Callable[[], _T]) -> _T:
        """Runs a function that uses `context` on its thread; an abort ends it with the real reason.

        Raises:
            BmoeError: As `generate`, and whatever the function raises.
        """
        self._begin()
        work = asyncio.get_running_loop().run_in_executor(self._executor, function)
        failure: BaseException | None = None
        try:
            result = await asyncio.shield(work)
        except asyncio.CancelledError:
            self.cancel()
            await self._wait_for(work)
            self._settle(work.exception())
            raise
        except (AbortedBatch, BmoeError) as error:
            failure = error
        except BaseException:
            self._settle(None)
            raise
        if (reason := self._settle(failure)) is not None:
            raise reason
        return result

    async def _wait_for(self, work: asyncio.Future[Any]) -> asyncio.CancelledError | None:
        """Waits until the decode thread is done, whoever cancels the waiting; returns that, to be raised."""
        interrupted: asyncio.CancelledError | None = None
        while not work.done():
            try:
                await asyncio.wait((work,))
            except asyncio.CancelledError as again:
                self.cancel()
                interrupted = again
        return interrupted

    def _begin(self) -> None:
        with self._state:
            if self._busy:
                raise RuntimeError("one thing at a time: a generation is running")
            self._busy = True

    # --- generate -------------------------------------------------------------------------------------

    def cancel(self) -> None:
        """Ends what is running (opening or a generation), from any thread or a signal handler.

        Nothing of a generation that was cancelled is kept. Without one running, nothing happens: a
        generation begins when its first token is awaited.
        """
        with self._state:
            if not self._busy:
                return
            self._cancelled.set()
            self._stop_flag.value = 1
            if self.streaming and hasattr(self.streaming, "engine"):
                self.streaming.stop(STOP_CANCEL)

    async def generate(
        self,
        request: GenerateRequest,
        *,
        on_prefill: Callable[[PrefillProgress], None] | None = None,
    ) -> AsyncGenerator[TokenEvent, None]:
        """Computes the prompt and yields tokens as they are made.

        Args:
            request: What to generate.
            on_prefill: Called on the loop after every batch of the prompt.

        However it ends, if not with the last token: the conversation is then what it was before.

        Raises:
            Cancelled: `cancel` was called.
            UsageError: The prompt is empty, or prompt and tokens do not fit the context, or something was
                asked for that this model does not offer.
            ReadError: Expert bytes could not be read; no token that used them was yielded.
            StallError: A wait for one slice exceeded the watchdog.
            DecodeError: llama.cpp failed.
        """
        self._begin()
        loop = asyncio.get_running_loop()
        events: asyncio.Queue[Event] = asyncio.Queue()

        def post(event: Event) -> None:
            loop.call_soon_threadsafe(events.put_nowait, event)

        run = Generation(self, request, post, turn=self._turn)
        self._turn += 1
        work = loop.run_in_executor(self._executor, run)
        finished = False
        try:
            while (event := await events.get()) is not None:
                if isinstance(event, PrefillProgress):
                    if on_prefill is not None:
                        on_prefill(event)
                    continue
                if self._guessing:
                    self._watch_guessing()
                yield event
            finished = True
        finally:
            if not finished:
                self.cancel()
            interrupted = await self._wait_for(work)
            error = self._settle(work.result(), run)
            self.summary = run.summary(error)
            if interrupted is not None:
                raise interrupted
        if error is not None:
            raise error

    def _watch_guessing(self) -> None:
        """Says once that the native watchdog has ended guessing."""
        if self.streaming is not None and self.streaming.engine.predicting_stopped:
            self._guessing = False
            self._warn(
                "routing is no longer guessed: this model's router is not its matrix alone (selection bias, "
                "or groups of experts), so guesses from it are wrong"
            )

    def _settle(self, failure: BaseException | None, run: Generation | None = None) -> BaseException | None:
        """After the decode thread is done: the real reason of an abort, and a clean slate."""
        if self._closed:  # the handles are gone, or going on the decode thread
            return Cancelled("cancelled") if isinstance(failure, AbortedBatch) else failure
        error = self._why_aborted(failure) if isinstance(failure, AbortedBatch) else failure
        with self._state:  # a cancel that comes later finds nothing to cancel
            self._busy = False
            self._cancelled.clear()
            self._stop_flag.value = 0
            if self.streaming:
                self.streaming.streamer.reset()
        if error is not None and hasattr(self, "context"):
            # llama.cpp has rolled the batch back; recurrent state it cannot.
            if run is not None:
                run.roll_back(error)
            else:
                self.context.clear()
        return error

    def _why_aborted(self, failure: AbortedBatch) -> BaseException:
        """What made llama.cpp stop in the middle of a batch, or between two."""
        if self.streaming:
            engine, streamer = self.streaming.engine, self.streaming.streamer
            reason, slice_id = engine.stop_reason()
            if reason == STOP_IO:
                return streamer.error or BmoeError("an expert read failed")
            if reason == STOP_STALL:
                return StallError(
                    f"no progress for {self.config.watchdog_s:g} s while waiting for "
                    f"{engine.slice_name(slice_id)}"
                )
            if reason == STOP_FAULT:
                return streamer.bug or BmoeError(engine.fault())
        del failure
        return Cancelled("cancelled")

    # --- conversation and cache -----------------------------------------------------------------------

    @property
    def conversation(self) -> tuple[Message, ...]:
        """What was said so far, answers included."""
        return self.dialogue.messages

    def set_conversation(self, messages: Sequence[Message]) -> None:
        """Goes on from other messages (a saved conversation), or with none from nothing.

        What the context holds of their beginning is reused by the next request that continues.

        Raises:
            RuntimeError: A generation is running.
        """
        with self._state:
            if self._busy:
                raise RuntimeError("one thing at a time: a generation is running")
            self.dialogue.messages = tuple(messages)

    @property
    def last_message(self) -> Message | None:
        """What the last generation that went through has said; None before one."""
        return self.dialogue.last_message

    def cache_state(self) -> CacheState | None:
        """The expert cache now; None when resident."""
        if self.streaming is None:
            return None
        slots, counters = self.streaming.streamer.statistics(), self.streaming.engine.statistics()
        return CacheState(
            cache_bytes=self.streaming.cache_bytes,
            slots_used=slots.slots_used,
            slots_ready=slots.slots_ready,
            slots_total=slots.slots_total,
            lookups=counters.lookups,
            hits=counters.hits,
        )

    async def set_cache_bytes(self, cache_bytes: int, *, reason: str = "asked") -> int:
        """Makes the expert cache larger or smaller, also while generating; the output does not change.

        Args:
            cache_bytes: The new budget. More than all experts is cut to that.
            reason: For whoever listens to `on_resize`.

        Returns:
            The budget that is in effect.

        Raises:
            UsageError: Nothing is streamed.
            MemoryBudgetError: Below the least that works.
        """
        if self.streaming is None:
            raise UsageError("the model is resident: there is no expert cache")
        before = self.streaming.cache_bytes
        after = await self.streaming.resize(cache_bytes)
        if after != before:
            self.on_resize(CacheResize(from_bytes=before, cache_bytes=after, reason=reason))
        return after

    @property
    def is_cancelled(self) -> bool:
        """Whether `cancel` was called since the last generation ended."""
        return self._cancelled.is_set()


def _traced(config: SessionConfig) -> str | None:
    """What is recorded that costs time, in words."""
    parts = {
        "compute trace by node": config.compute_trace,
        "compute trace by layer": config.compute_trace_layers,
        "route trace": config.route_trace,
        "read trace": config.io_trace,
    }
    return ", ".join(name for name, on in parts.items() if on) or None


def _lossy(config: SessionConfig, layout: ModelLayout) -> str | None:
    """What may change the output, in words."""
    parts = []
    if layout.file_top_k is not None:
        parts.append(f"top {layout.top_k} instead of {layout.file_top_k}")
    if config.drop_cold_experts > 0:
        where = " in the prompt too" if config.drop_in_prefill else ""
        how = "" if config.drop_renormalise else ", not renormalised"
        parts.append(f"experts dropped below {config.drop_cold_experts:g} of an equal share{where}{how}")
    if config.expert_substitute > 0:
        parts.append(f"experts in memory preferred by {config.expert_substitute:g} of the score range")
    if config.replay_routing is not None:
        parts.append(f"SYNTHETIC routing replayed from {config.replay_routing}")
    if config.route_ahead:
        parts.append(f"routing taken {config.route_ahead} layers early")
    return "; ".join(parts) or None
