"""Graphs made by hand through ggml's own API, and a pool that has every slice: the hook without a model."""

from __future__ import annotations

import ctypes
import os
from ctypes import POINTER, c_bool, c_char, c_char_p, c_int, c_int32, c_int64, c_size_t, c_void_p
from typing import TYPE_CHECKING, Any

import numpy as np

from bmoe.llama_library import ggml_base, llama
from bmoe.pipeline.native import Engine, Segment, StreamedTensor, bind_ggml, lib

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

F32, I32 = 0, 26


class GgmlTensor(ctypes.Structure):
    """`struct ggml_tensor`; test_native.py compares the same layout with the headers."""


GgmlTensor._fields_ = (
    ("type", c_int),
    ("buffer", c_void_p),
    ("ne", c_int64 * 4),
    ("nb", c_size_t * 4),
    ("op", c_int),
    ("op_params", c_int32 * 16),
    ("flags", c_int32),
    ("src", POINTER(GgmlTensor) * 10),
    ("view_src", POINTER(GgmlTensor)),
    ("view_offs", c_size_t),
    ("data", c_void_p),
    ("name", c_char * 64),
)

Node = Any  # a pointer to GgmlTensor


class _InitParams(ctypes.Structure):
    _fields_ = (("mem_size", c_size_t), ("mem_buffer", c_void_p), ("no_alloc", c_bool))


def _bind() -> tuple[Any, Any]:
    base = ggml_base()
    cpu = ctypes.CDLL("libggml-cpu.so.0", mode=os.RTLD_NOLOAD | os.RTLD_NOW)
    tensor = POINTER(GgmlTensor)
    for library, name, result, arguments in (
        (base, "ggml_init", c_void_p, (_InitParams,)),
        (base, "ggml_free", None, (c_void_p,)),
        (base, "ggml_new_tensor_2d", tensor, (c_void_p, c_int, c_int64, c_int64)),
        (base, "ggml_new_tensor_3d", tensor, (c_void_p, c_int, c_int64, c_int64, c_int64)),
        (base, "ggml_view_2d", tensor, (c_void_p, tensor, c_int64, c_int64, c_size_t, c_size_t)),
        (base, "ggml_set_name", tensor, (tensor, c_char_p)),
        (base, "ggml_mul_mat_id", tensor, (c_void_p, tensor, tensor, tensor)),
        (base, "ggml_mul_mat", tensor, (c_void_p, tensor, tensor)),
        (base, "ggml_new_graph", c_void_p, (c_void_p,)),
        (base, "ggml_build_forward_expand", None, (c_void_p, tensor)),
        (base, "ggml_graph_n_nodes", c_int, (c_void_p,)),
        (base, "ggml_graph_node", tensor, (c_void_p, c_int)),
        (cpu, "ggml_graph_compute_with_ctx", c_int, (c_void_p, c_void_p, c_int)),
    ):
        function = getattr(library, name)
        function.restype = result
        function.argtypes = arguments
    return base, cpu


class Graphs:
    """A file image in memory, weights that lie in it, graphs over them, and an engine for its experts.

    Attributes:
        image: The file: F32 values.
        engine: Knows `streamed`; every slice of it has a slot of its own (`serve` fills them).
    """

    def __init__(
        self, streamed: Sequence[StreamedTensor], image: NDArray[np.float32], *, serial: bool = False
    ) -> None:
        llama()
        bind_ggml()
        self._base, self._cpu = _bind()
        self.image = image
        self._context = self._base.ggml_init(_InitParams(16 << 20, None, False))
        self.event_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        slots = sum(t.experts for t in streamed)
        self.engine = Engine(
            streamed, slots=slots, event_fd=self.event_fd, watchdog_ns=5_000_000_000, serial=serial
        )
        lib.bm_set_mapping(self.engine.handle, 0, image.ctypes.data, image.nbytes)
        # Slices with the same bytes as in the file, elsewhere: what is computed from them came from a slot.
        self._slots = [
            image[(t.file_offset + e * t.slice_bytes) // 4 :][: t.slice_bytes // 4].copy()
            for t in streamed
            for e in range(t.experts)
        ]
        self.engine.slot_address[:] = [slot.ctypes.data for slot in self._slots]
        self._dense: NDArray[np.float32] | None = None

    def close(self) -> None:
        self._base.ggml_free(self._context)
        self.engine.close()
        os.close(self.event_fd)

    def serve(self) -> None:
        """Every slice is read: wanted once, given its slot, ready."""
        for i, t in enumerate(self.engine.tensors):
            every = (c_int32 * t.experts)(*range(t.experts))
            lib.bm_test_announce(self.engine.handle, i, every, t.experts)
        out = (c_int32 * self.engine.slices)()
        while n := lib.bm_take(self.engine.handle, out, len(out)):
            assert lib.bm_assign(self.engine.handle, out, out, n) == 0
            assert lib.bm_ready(self.engine.handle, out, n) == 0
        lib.bm_reset(self.engine.handle)

    def load_dense(self, start: int, end: int) -> NDArray[np.float32]:
        """Says that file bytes [start, end) lie in memory of their own, which is returned."""
        self._dense = self.image[start // 4 : end // 4].copy()
        segment = (Segment * 1)(Segment(start=start, end=end, file=0, address=self._dense.ctypes.data))
        assert lib.bm_set_segments(self.engine.handle, segment, 1) == 0
        return self._dense

    def weight(self, name: str, shape: tuple[int, int, int], offset: int, kind: int = F32) -> Node:
        """A weight that lies in the image at a byte offset."""
        t = self._base.ggml_new_tensor_3d(self._context, kind, *shape)
        self._base.ggml_set_name(t, name.encode())
        t.contents.data = self.image.ctypes.data + offset
        return t

    def matrix(self, values: NDArray[np.float32] | NDArray[np.int32]) -> Node:
        """A tensor in ordinary memory, filled; at most three dimensions."""
        kind = I32 if values.dtype == np.int32 else F32
        ne = (*values.shape[::-1], 1, 1)[:3]
        make = self._base.ggml_new_tensor_2d if values.ndim == 2 else self._base.ggml_new_tensor_3d
        t = make(self._context, kind, *(ne[:2] if values.ndim == 2 else ne))
        ctypes.memmove(t.contents.data, np.ascontiguousarray(values).ctypes.data, values.nbytes)
        return t

    def view(self, t: Node, columns: int, rows: int, stride_bytes: int, offset_bytes: int = 0) -> Node:
        return self._base.ggml_view_2d(self._context, t, columns, rows, stride_bytes, offset_bytes)

    def mul_mat_id(self, weight: Node, act: Node, ids: Node) -> Node:
        return self._base.ggml_mul_mat_id(self._context, weight, act, ids)

    def mul_mat(self, weight: Node, act: Node) -> Node:
        return self._base.ggml_mul_mat(self._context, weight, act)

    def graph(self, *outputs: Node) -> Any:
        graph = self._base.ggml_new_graph(self._context)
        for output in outputs:
            self._base.ggml_build_forward_expand(graph, output)
        return graph

    def nodes(self, graph: Any) -> list[Node]:
        return [self._base.ggml_graph_node(graph, i) for i in range(self._base.ggml_graph_n_nodes(graph))]

    def ask(self, graph: Any) -> None:
        """The ask pass, as llama.cpp's scheduler does it."""
        eval_callback = ctypes.CFUNCTYPE(c_bool, c_void_p, c_bool, c_void_p)(("bm_eval", lib))
        for node in self.nodes(graph):
            assert not eval_callback(ctypes.addressof(node.contents), True, self.engine.handle)

    def compute(self, graph: Any, threads: int = 1) -> None:
        assert self._cpu.ggml_graph_compute_with_ctx(self._context, graph, threads) == 0

    @staticmethod
    def values(t: Node) -> NDArray[np.float32]:
        """A copy of a node's values, slowest dimension first."""
        n = t.contents
        flat = np.ctypeslib.as_array(ctypes.cast(n.data, POINTER(ctypes.c_float)), (int(np.prod(n.ne[:])),))
        return flat.reshape(n.ne[2], n.ne[1], n.ne[0]).copy()


def blank(t: Node) -> None:
    """Overwrites a node's result, so that an old one is not taken for a new one."""
    ctypes.memset(t.contents.data, 0x7F, int(np.prod(t.contents.ne[:])) * 4)
