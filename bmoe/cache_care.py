"""What is done for the expert cache between generations and beside them: warm start, giving memory back.

It owns when that happens in a session's life. It must not know how it is decided (warm.py, governor.py) or
done (streaming.py).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from bmoe.config import MIB
from bmoe.governor import Governor, GovernorLimits
from bmoe.io.errors import BmoeError
from bmoe.io.pressure import PressureSensor
from bmoe.pressure_watch import CacheSizes, PressureEvent, PressureWatch
from bmoe.warm import load_warm_entries, save_warm_state

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from bmoe.config import SessionConfig
    from bmoe.streaming import StreamingEngine

_LEAST_FLOOR_BYTES = 256 * MIB


class CacheCare:
    """Looks after one session's cache. `begin` it once the engine serves; `aclose` it before the engine.

    Args:
        streaming: The cache.
        config: What is wanted.
        resize: Sets the budget, with a reason; the session's, which tells who listens.
        on_warning: Told what the user should know.

    Attributes:
        warm_experts: How many are being preloaded; None when nothing was asked for.
    """

    def __init__(
        self,
        streaming: StreamingEngine,
        config: SessionConfig,
        *,
        resize: Callable[[int, str], Awaitable[int]],
        on_warning: Callable[[str], None],
    ) -> None:
        self._streaming = streaming
        self._config = config
        self._resize = resize
        self._on_warning = on_warning
        self._sensor: PressureSensor | None = None
        self._watch: PressureWatch | None = None
        self.warm_experts: int | None = None

    def begin(self) -> None:
        """Starts preloading, and watching memory, as far as asked for.

        Raises:
            FileError, FormatError: The file of `warm` is none.
        """
        if self._config.warm is not None:
            self._warm_up(self._config.warm)
        if self._config.give_back:
            self._start_watch()

    def _warm_up(self, source: str) -> None:
        streaming = self._streaming
        warm = load_warm_entries(source, streaming.layout, streaming.plan)
        if warm.note is not None:
            self._on_warning(warm.note)
        self.warm_experts = len(warm.entries)
        streaming.engine.frequency[:] = warm.frequencies(streaming.layout, self._config.half_life_batches)
        streaming.streamer.preload(warm.slices(streaming.layout))

    def _start_watch(self) -> None:
        self._sensor = PressureSensor()
        floor = self._config.cache_floor_bytes
        mapped = self._config.dense_weights in {"mmap", "warm"}  # page cache that is needed, not room
        limits = GovernorLimits.leaving(
            max(_LEAST_FLOOR_BYTES, floor or 0),
            reserve_bytes=self._streaming.layout.dense_bytes if mapped else 0,
        )
        most = self._streaming.cache_bytes
        least = min(most, max(self._streaming.least_bytes, 64 * MIB))

        def sizes() -> CacheSizes:
            statistics, plan = self._streaming.streamer.statistics(), self._streaming.plan
            held = statistics.slots_ready * plan.used_bytes // max(1, plan.total_slots)
            return CacheSizes(
                cache_bytes=self._streaming.cache_bytes, held_bytes=held, least_bytes=least, most_bytes=most
            )

        def tell(event: PressureEvent) -> None:
            if event.kind in {"short", "refused"}:
                self._on_warning(f"memory is short: {event.reason}")

        self._watch = PressureWatch(
            read=self._sensor.read,
            governor=Governor(limits),
            sizes=sizes,
            resize=self._resize,
            on_event=tell,
        )
        if not self._watch.start():
            self._on_warning("this system does not tell how short memory is: the cache keeps its size")

    async def aclose(self, *, keep: bool) -> None:
        """Ends watching. With `keep`, what the run has learned of the experts is kept for the next one."""
        if self._watch is not None:
            await self._watch.aclose()
        if self._sensor is not None:
            self._sensor.close()
            self._sensor = None
        if keep and self._config.warm == "auto":
            try:
                save_warm_state(None, self._streaming.layout, self._streaming.engine.frequency)
            except BmoeError as error:
                self._on_warning(f"what this run has learned is not kept: {error}")
