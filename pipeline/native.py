"""Binding of the native library: types, signatures, and the engine's handle.

It owns nothing but the handle. It must not know asyncio, files, policies or models. Functions that only
touch tables are bound through `ctypes.PyDLL` (the GIL is kept: giving it up would cost more than the
call); none of them blocks.
"""

from __future__ import annotations

import bisect
import ctypes
from ctypes import POINTER, c_char_p, c_double, c_int, c_int32, c_int64, c_uint8, c_uint32, c_uint64, c_void_p
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from bmoe.io.errors import SeamError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

ABSENT, WANTED, READING, READY = 0, 1, 2, 3
"""States of a slice: the two low bits of its word; the bits above count pins."""

STATE_MASK, PIN_SHIFT = 3, 2

RUN, STOP_CANCEL, STOP_IO, STOP_STALL, STOP_FAULT = 0, 1, 2, 3, 4
"""Why compute threads are told to leave."""


class TensorDesc(ctypes.Structure):
    """`struct bm_tensor_desc` of hook.h."""

    _fields_ = (
        ("name", c_char_p),
        ("layer", c_int32),
        ("rank", c_int32),
        ("type", c_int32),
        ("experts", c_int32),
        ("first_slice", c_int32),
        ("first_entry", c_int32),
        ("file", c_int32),
        ("reserved", c_int32),
        ("ne0", c_int64),
        ("ne1", c_int64),
        ("slice_bytes", c_uint64),
        ("file_offset", c_uint64),
    )


class Segment(ctypes.Structure):
    """`struct bm_segment` of hook.h."""

    _fields_ = (
        ("start", c_uint64),
        ("end", c_uint64),
        ("file", c_int32),
        ("reserved", c_int32),
        ("address", c_void_p),
    )


_COUNTERS = (
    "lookups",
    "hits",
    "posted",
    "reposted",
    "announce_ns",
    "stall_ns",
    "waits",
    "kernel_ns",
    "nodes",
    "announced_at_ns",
    "rebound",
    "ready_wakes",
    "routed",
    "dropped",
    "substituted",
    "speculated",
    "route_committed",
    "route_passed",
    "route_agreed",
)
LAYER_COUNTERS = ("lookups", "hits", "posted_bytes", "stall_ns", "kernel_ns")
"""Columns of `Engine.layer_counters`."""
ROUTE_ROW = np.dtype(
    [
        ("layer", "<i4"),
        ("token", "<i4"),
        ("n_tokens", "<i4"),
        ("slot", "<i4"),
        ("expert", "<i4"),
        ("weight", "<f4"),
        ("read_bytes", "<u4"),
        ("residency", "u1"),
        ("dropped", "u1"),
        ("reserved", "<u2"),
    ]
)
"""`struct bm_route_row` of hook.h."""
NODE_ROW = np.dtype(
    [("wall_ns", "<u8"), ("major_faults", "<i8"), ("op", "<i4"), ("layer", "<i4"), ("name", "S64")]
)
"""`struct bm_node_row` of hook.h."""
TRACE_NODES, TRACE_LAYERS = 1, 2
GUESSES = ("previous", "stale", "stale-2", "own", "ahead")
"""What the next routing may be guessed from: the previous token, this layer's or the one before's input under
the layer's router, the layer's own input (a control, which must be right), the route taken ahead."""


class _Counters(ctypes.Structure):
    _fields_ = tuple((name, c_uint64) for name in _COUNTERS)


@dataclass(frozen=True, slots=True)
class EngineCounters:
    """What native threads counted since the engine was made.

    `lookups` and `hits` count unique experts, once per layer and graph; a hit needs no new read.
    `stall_ns` is summed over compute threads. `announced_at_ns` is CLOCK_MONOTONIC.
    """

    lookups: int
    hits: int
    posted: int
    reposted: int
    announce_ns: int
    stall_ns: int
    waits: int
    kernel_ns: int
    nodes: int
    announced_at_ns: int
    rebound: int
    ready_wakes: int
    routed: int
    dropped: int
    substituted: int
    speculated: int
    route_committed: int
    route_passed: int
    route_agreed: int


def _load() -> ctypes.PyDLL:
    path = Path(__file__).with_name("_hook.so")
    if not path.exists():
        raise SeamError(
            f"the native hook {path} has not been built", hint="run `make build`, or reinstall bmoe"
        )
    lib = ctypes.PyDLL(str(path))
    engine = c_void_p
    signatures: dict[str, tuple[Any, tuple[Any, ...]]] = {
        "bm_bind": (c_int, (c_char_p, ctypes.c_size_t)),
        "bm_check_abi": (c_int, (c_char_p, ctypes.c_size_t)),
        "bm_lazy_map_begin": (c_int, ()),
        "bm_lazy_map_end": (None, ()),
        "bm_engine_new": (
            engine,
            (
                POINTER(TensorDesc),
                c_int32,
                c_int32,
                c_int32,
                c_int32,
                c_int32,
                c_int,
                c_double,
                c_uint64,
                c_int,
            ),
        ),
        "bm_engine_free": (None, (engine,)),
        "bm_set_mapping": (None, (engine, c_int, c_uint64, c_uint64)),
        "bm_set_segments": (c_int, (engine, POINTER(Segment), c_int)),
        "bm_take": (c_int32, (engine, POINTER(c_int32), c_int32)),
        "bm_assign": (c_int, (engine, POINTER(c_int32), POINTER(c_int32), c_int32)),
        "bm_ready": (c_int, (engine, POINTER(c_int32), c_int32)),
        "bm_abandon": (c_int, (engine, c_int32, c_int)),
        "bm_evict": (c_int32, (engine, c_int32, c_int)),
        "bm_evict_ranked": (
            c_int32,
            (
                engine,
                c_void_p,  # int32 entries
                c_void_p,  # uint32 last use when ranked
                c_int32,
                c_int32,
                c_int32,
                c_int32,
                POINTER(c_int32),
                POINTER(c_int32),
            ),
        ),
        "bm_sweep": (c_int32, (engine, c_int32, c_int32, c_int32, c_int, POINTER(c_int32))),
        "bm_set_starved": (None, (engine, c_int)),
        "bm_stop": (None, (engine, c_int)),
        "bm_begin_batch": (None, (engine, c_int64, c_int64, c_int)),
        "bm_preload": (
            c_int32,
            (engine, POINTER(c_int32), POINTER(c_int32), c_int32, POINTER(c_uint8)),
        ),
        "bm_layer_counts": (POINTER(c_uint64), (engine,)),
        "bm_speculative": (POINTER(c_uint8), (engine,)),
        "bm_record_routes": (c_int, (engine,)),
        "bm_routes": (ctypes.c_size_t, (engine, POINTER(c_void_p))),
        "bm_set_replay": (c_int, (engine, c_void_p, c_int64, c_int32)),
        "bm_set_drop": (c_int, (engine, c_double, c_int, c_int, c_int32)),
        "bm_set_substitute": (None, (engine, ctypes.c_float, c_int32)),
        "bm_set_predict": (c_int, (engine, c_int, c_int, c_int, c_int, c_int32)),
        "bm_take_hints": (c_int32, (engine, POINTER(c_int32), c_int32)),
        "bm_predictions": (POINTER(c_uint64), (engine,)),
        "bm_predict_tripped": (c_int, (engine,)),
        "bm_trace_nodes": (None, (engine, c_int)),
        "bm_node_rows": (ctypes.c_size_t, (engine, POINTER(c_void_p))),
        "bm_reset": (None, (engine,)),
        "bm_stop_reason": (c_int, (engine, POINTER(c_int32))),
        "bm_slice_word": (c_uint32, (engine, c_int32)),
        "bm_fault": (c_char_p, (engine,)),
        "bm_get_counters": (POINTER(_Counters), (engine,)),
        "bm_clock": (c_uint32, (engine,)),
        "bm_current_layer": (c_int32, (engine,)),
        "bm_last_use": (POINTER(c_uint32), (engine,)),
        "bm_frequency": (POINTER(c_double), (engine,)),
        "bm_present": (POINTER(c_uint8), (engine,)),
        "bm_slot_address": (POINTER(c_uint64), (engine,)),
        "bm_phase": (POINTER(c_uint32), (engine,)),
        "bm_slot_slice": (POINTER(c_int32), (engine,)),
        "bm_last_words": (None, (c_char_p,)),
        "bm_test_announce": (None, (engine, c_int32, POINTER(c_int32), c_int32)),
        "bm_test_ready": (c_int, (engine, c_int32)),
        "bm_test_unpin": (None, (engine, c_int32)),
        "bm_test_data": (c_void_p, (engine, c_int32)),
        "bm_test_delays": (None, (engine, c_uint32)),
    }
    for name, (result, arguments) in signatures.items():
        function = getattr(lib, name)
        function.restype = result
        function.argtypes = arguments
    return lib


lib = _load()


def bind_ggml() -> None:
    """Finds ggml in the loaded libraries and checks its layout. llama_cpp must have been imported.

    Raises:
        SeamError: A library or function is missing, or a struct is laid out differently.
    """
    text = ctypes.create_string_buffer(256)
    if lib.bm_bind(text, len(text)) or lib.bm_check_abi(text, len(text)):
        raise SeamError(
            f"the loaded ggml is not the one this bmoe knows: {text.value.decode()}",
            hint="install the llama-cpp-python version that bmoe pins",
        )


def function_address(name: str) -> int:
    """Address of an exported function, for llama.cpp's callback fields."""
    address = ctypes.cast(getattr(lib, name), c_void_p).value
    assert address is not None
    return address


@dataclass(frozen=True, slots=True)
class StreamedTensor:
    """One weight tensor `[ne0, ne1, experts]` whose experts are read on demand.

    `layer` counts the layers that have experts, from 0; `rank` is the expected order of use inside it
    (the graph's order wins). `slice_bytes` is one expert; expert e lies at `file_offset + e * slice_bytes`
    of file number `file`.
    """

    name: str
    layer: int
    rank: int
    ggml_type: int
    experts: int
    ne0: int
    ne1: int
    slice_bytes: int
    file: int
    file_offset: int


class Engine:
    """Handle of a native engine and the tables it shares.

    Slices are numbered tensor by tensor, experts in order; entries (layer, expert) layer by layer. All
    tensors of a layer must have the same number of experts.

    Attributes:
        handle: Opaque, for calls through `lib`.
        first_slice: [tensors] slice id of expert 0.
        first_entry: [layers] entry id of expert 0.
        present: [entries] uint8, slices of the entry that hold a slot.
        last_use: [entries] uint32, batch clock of the last lookup.
        frequency: [entries] float64, aged use count; comparable among entries, in a growing unit.
        slot_slice: [slots] int32, slice in each slot, -1 for none.
        slot_address: [slots] uint64, where each slot starts; the streamer fills it.
        phase: [slices] uint32, where in its slot a slice starts; the streamer fills it.
        speculative: [entries] uint8, whether the entry was read unasked and has not been looked up since.
        layer_counters: [layers, 5] uint64, sums since the engine was made; `LAYER_COUNTERS` names them.
    """

    def __init__(
        self,
        tensors: Sequence[StreamedTensor],
        *,
        slots: int,
        event_fd: int,
        half_life_batches: float = 16.0,
        watchdog_ns: int = 30_000_000_000,
        serial: bool = False,
    ) -> None:
        layers = 1 + max(t.layer for t in tensors)
        self.layer_experts = [0] * layers
        for t in tensors:
            self.layer_experts[t.layer] = t.experts
        self.first_entry: list[int] = [sum(self.layer_experts[:i]) for i in range(layers)]
        self.first_slice: list[int] = []
        total = 0
        descs = (TensorDesc * len(tensors))()
        for i, t in enumerate(tensors):
            if t.experts != self.layer_experts[t.layer]:
                raise ValueError(
                    f"{t.name}: {t.experts} experts, its layer has {self.layer_experts[t.layer]}"
                )
            descs[i] = TensorDesc(
                name=t.name.encode(),
                layer=t.layer,
                rank=t.rank,
                type=t.ggml_type,
                experts=t.experts,
                first_slice=total,
                first_entry=self.first_entry[t.layer],
                file=t.file,
                ne0=t.ne0,
                ne1=t.ne1,
                slice_bytes=t.slice_bytes,
                file_offset=t.file_offset,
            )
            self.first_slice.append(total)
            total += t.experts
        self.tensors = tuple(tensors)
        self.slices = total
        self.entries = sum(self.layer_experts)
        self.slots = slots
        self.handle: int | None = lib.bm_engine_new(
            descs,
            len(tensors),
            layers,
            total,
            self.entries,
            slots,
            event_fd,
            2.0 ** (1.0 / half_life_batches),
            watchdog_ns,
            int(serial),
        )
        if not self.handle:
            raise MemoryError("bm_engine_new")
        self.present: NDArray[np.uint8] = np.ctypeslib.as_array(lib.bm_present(self.handle), (self.entries,))
        self.last_use: NDArray[np.uint32] = np.ctypeslib.as_array(
            lib.bm_last_use(self.handle), (self.entries,)
        )
        self.frequency: NDArray[np.float64] = np.ctypeslib.as_array(
            lib.bm_frequency(self.handle), (self.entries,)
        )
        self.slot_slice: NDArray[np.int32] = np.ctypeslib.as_array(lib.bm_slot_slice(self.handle), (slots,))
        self.slot_address: NDArray[np.uint64] = np.ctypeslib.as_array(
            lib.bm_slot_address(self.handle), (slots,)
        )
        self.phase: NDArray[np.uint32] = np.ctypeslib.as_array(lib.bm_phase(self.handle), (total,))
        self.layer_counters: NDArray[np.uint64] = np.ctypeslib.as_array(
            lib.bm_layer_counts(self.handle), (layers, len(LAYER_COUNTERS))
        )
        self.speculative: NDArray[np.uint8] = np.ctypeslib.as_array(
            lib.bm_speculative(self.handle), (self.entries,)
        )
        self._counters = lib.bm_get_counters(self.handle).contents

    # --- the router's choice, before the first batch ------------------------------------------------

    def record_routes(self) -> None:
        """From now on `routes` has every choice of the router."""
        if lib.bm_record_routes(self.handle):
            raise MemoryError("bm_record_routes")

    def routes(self) -> NDArray[np.void]:
        """[rows] of `ROUTE_ROW`: the choices since the last call. Between batches, on any thread."""
        return self._rows(lib.bm_routes, ROUTE_ROW)

    def set_replay(self, ids: NDArray[np.int32]) -> None:
        """Experts instead of the router's choice: [positions, layers, k] int32, -1 leaves it. Repeats."""
        assert ids.dtype == np.int32 and ids.flags.c_contiguous and ids.shape[1] == len(self.layer_experts)  # noqa: PT018 (one contract)
        if lib.bm_set_replay(self.handle, ids.ctypes.data, ids.shape[0], ids.shape[2]):
            raise MemoryError("bm_set_replay")

    def set_drop(
        self, share: float, *, renormalise: bool, in_prefill: bool, deterministic_experts: int = 0
    ) -> None:
        """Leaves experts out that are not in memory and weigh less than `share` / top-k.

        With `deterministic_experts`, by an imagined cache of that many instead of what is in memory.
        """
        if lib.bm_set_drop(self.handle, share, int(renormalise), int(in_prefill), deterministic_experts):
            raise MemoryError("bm_set_drop")

    def set_substitute(self, share: float, top_k: int) -> None:
        """Prefers experts in memory by `share` of a token's range of scores."""
        lib.bm_set_substitute(self.handle, share, top_k)

    def set_predict(self, *, temporal: int, stale: bool, log: bool, route_ahead: int, top_k: int) -> None:
        """Guesses what will be routed to; what is missing of that is handed to the streamer as hints.

        Args:
            temporal: Layers ahead for which the previous token's experts are guessed.
            stale: Guess the next layer's from its router and this layer's input.
            log: Score the guesses (`predictions`).
            route_ahead: Lossy: commit to guesses made so many layers before; 0 is off.
            top_k: Experts per token.
        """
        if lib.bm_set_predict(self.handle, temporal, int(stale), int(log), route_ahead, top_k):
            raise MemoryError("bm_set_predict")

    def predictions(self) -> NDArray[np.uint64]:
        """[layers, guesses, 5]: for each of `GUESSES`, rows, slots, hits, exact rows, rows not scored."""
        shape = (len(self.layer_experts), len(GUESSES), 5)
        return np.ctypeslib.as_array(lib.bm_predictions(self.handle), shape).copy()

    @property
    def predicting_stopped(self) -> bool:
        """Whether guesses are off because the router does not choose by its matrix alone."""
        return bool(lib.bm_predict_tripped(self.handle))

    def trace_nodes(self, mode: int) -> None:
        """TRACE_NODES or TRACE_LAYERS: `node_rows` has times. Cuts the graph."""
        lib.bm_trace_nodes(self.handle, mode)

    def node_rows(self) -> NDArray[np.void]:
        """[rows] of `NODE_ROW` since the last call. Between batches, once after each."""
        return self._rows(lib.bm_node_rows, NODE_ROW)

    def _rows(self, function: Any, dtype: np.dtype[Any]) -> NDArray[np.void]:
        pointer = c_void_p()
        n = function(self.handle, ctypes.byref(pointer))
        if not n:
            return np.empty(0, dtype)
        return np.frombuffer(ctypes.string_at(pointer.value or 0, n * dtype.itemsize), dtype)

    @property
    def announced_at_ns(self) -> int:
        """CLOCK_MONOTONIC of the last announcement that asked for something."""
        at: int = self._counters.announced_at_ns
        return at

    @property
    def speculated(self) -> int:
        """Experts looked up for the first time after being read unasked."""
        count: int = self._counters.speculated
        return count

    def tensor_of_slice(self, slice_id: int) -> int:
        """Index of the tensor that a slice belongs to."""
        return bisect.bisect_right(self.first_slice, slice_id) - 1

    def slice_name(self, slice_id: int) -> str:
        """Tensor and expert of a slice, for messages."""
        for first, t in zip(self.first_slice, self.tensors, strict=True):
            if first <= slice_id < first + t.experts:
                return f"{t.name}[{slice_id - first}]"
        return "no particular slice"

    def stop_reason(self) -> tuple[int, int]:
        """(RUN or STOP_..., slice id or -1)."""
        where = c_int32(-1)
        return lib.bm_stop_reason(self.handle, ctypes.byref(where)), where.value

    def fault(self) -> str:
        """What a STOP_FAULT was about."""
        text: bytes = lib.bm_fault(self.handle)
        return text.decode()

    def statistics(self) -> EngineCounters:
        """A snapshot of the counters."""
        return EngineCounters(*(getattr(self._counters, name) for name in _COUNTERS))

    def close(self) -> None:
        """Frees the engine. The llama_context that uses it must be gone. Arrays become invalid."""
        if self.handle:
            del self.present, self.last_use, self.frequency, self.slot_slice
            del self.slot_address, self.phase, self._counters, self.layer_counters, self.speculative
            lib.bm_engine_free(self.handle)
            self.handle = None
