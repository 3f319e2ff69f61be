"""Binding of the native part for dense weights: repacked copies, warming a mapping, residency.

It owns the handle of the repacked copies. It must not know files, reads or modes. What takes long (repacking,
warming) gives up the GIL and is for worker threads.
"""

from __future__ import annotations

import ctypes
from ctypes import POINTER, c_char_p, c_int, c_int32, c_int64, c_size_t, c_uint64, c_void_p
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from bmoe.io.errors import MemoryBudgetError, SeamError
from bmoe.pipeline.native import bind_ggml, lib

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bmoe.pipeline.native import Engine

MAX_PROBES: Final = 128
"""Pages that `Residency` looks at: more than this changes no decision."""

_PAGE_BYTES: Final = 4096
# One request for reading ahead; every drive takes as much at once.
_AHEAD_BYTES: Final = 128 << 10


class _Weight(ctypes.Structure):
    """`struct bm_weight` of dense.c."""

    _fields_ = (
        ("name", c_char_p),
        ("ne0", c_int64),
        ("ne1", c_int64),
        ("start", c_uint64),
        ("type", c_int32),
        ("file", c_int32),
        ("repacked", c_int32),
        ("reserved", c_int32),
    )


_unlocked = ctypes.CDLL(lib._name)  # the same library; its functions run without the GIL
_unlocked.bm_repacked_fill.restype = None
_unlocked.bm_repacked_fill.argtypes = (c_void_p, c_int, c_void_p)
_unlocked.bm_warm.restype = None
_unlocked.bm_warm.argtypes = (c_void_p, c_uint64, c_uint64)
_unlocked.bm_repacked_new.restype = c_void_p
_unlocked.bm_repacked_new.argtypes = (POINTER(_Weight), c_int, c_char_p, c_size_t)
lib.bm_repacked_free.restype = None
lib.bm_repacked_free.argtypes = (c_void_p,)
lib.bm_repacked_buffer.restype = c_uint64
lib.bm_repacked_buffer.argtypes = (c_void_p, c_int, POINTER(c_uint64))
lib.bm_repacked_used.restype = c_uint64
lib.bm_repacked_used.argtypes = (c_void_p,)
lib.bm_repacked_attach.restype = None
lib.bm_repacked_attach.argtypes = (c_void_p, c_void_p)
lib.bm_resident_pages.restype = c_int
lib.bm_resident_pages.argtypes = (POINTER(c_uint64), c_int)


@dataclass(frozen=True, slots=True)
class Matrix:
    """A weight `[ne0, ne1]` of ggml's type number `ggml_type`, at byte `offset_bytes` of file `file`."""

    name: str
    ggml_type: int
    ne0: int
    ne1: int
    file: int
    offset_bytes: int
    size_bytes: int


class RepackedWeights:
    """Copies of matrices in the layouts that llama.cpp's CPU backend multiplies fastest.

    Args:
        matrices: Candidates. ggml says which of them it has a layout for on this processor.

    Attributes:
        taken: Indices into `matrices` of those.
        bytes: Memory of the copies.

    Raises:
        SeamError: The loaded ggml lacks a function.
        MemoryBudgetError: No memory.
    """

    def __init__(self, matrices: Sequence[Matrix]) -> None:
        bind_ggml()
        array = (_Weight * max(len(matrices), 1))()
        for entry, m in zip(array, matrices, strict=False):
            entry.name, entry.ne0, entry.ne1 = m.name.encode(), m.ne0, m.ne1
            entry.type, entry.file, entry.start = m.ggml_type, m.file, m.offset_bytes
        error = ctypes.create_string_buffer(256)
        self._handle: int | None = _unlocked.bm_repacked_new(array, len(matrices), error, len(error))
        if not self._handle:
            if error.value:
                raise SeamError(f"repacking is not possible: {error.value.decode()}")
            total = sum(m.size_bytes for m in matrices) >> 20
            raise MemoryBudgetError(
                f"no memory for {total} MiB of repacked dense weights", hint="use --dense-weights anon"
            )
        self.taken: Final = tuple(i for i in range(len(matrices)) if array[i].repacked)
        self.bytes: Final = sum(size for _, size in self.spans())

    def fill(self, index: int, address: int) -> None:
        """Repacks matrix number `index`, one of `taken`, from the file's bytes at `address`.

        From worker threads, several matrices at a time.
        """
        assert self._handle
        _unlocked.bm_repacked_fill(self._handle, index, address)

    def attach(self, engine: Engine) -> None:
        """Has an engine's graphs use the copies, all filled. It knows the mapping; no batch runs yet."""
        lib.bm_repacked_attach(self._handle, engine.handle)

    def spans(self) -> list[tuple[int, int]]:
        """`(address, length in bytes)` of the copies' memory."""
        found: list[tuple[int, int]] = []
        base = c_uint64()
        while size_bytes := lib.bm_repacked_buffer(self._handle, len(found), ctypes.byref(base)):
            found.append((base.value, size_bytes))
        return found

    @property
    def used(self) -> int:
        """Matmuls of graphs, so far, that were pointed to a copy."""
        count: int = lib.bm_repacked_used(self._handle)
        return count

    def close(self) -> None:
        """Frees the copies; idempotent. The llama_context whose graphs name them must be gone."""
        if self._handle:
            lib.bm_repacked_free(self._handle)
            self._handle = None


def probe_pages(spans: Sequence[tuple[int, int]], probes: int) -> list[int]:
    """Addresses of at most `probes` pages, evenly spaced over `(address, length in bytes)` of each span.

    At least one, unless there is nothing: in the middle of each share of the bytes.
    """
    step = max(-(-sum(length for _, length in spans) // probes), _PAGE_BYTES)
    pages, into = [], min(step, sum(length for _, length in spans)) // 2
    for address, length in spans:
        found = range(into, length, step)  # `into` is how far in the next probe lies
        pages += [(address + at) // _PAGE_BYTES * _PAGE_BYTES for at in found]
        into += len(found) * step - length
    return pages


class Residency:
    """How much of some memory is resident, sampled at evenly spaced pages.

    Args:
        spans: `(address, length in bytes)` of own memory or of mappings, which must stay mapped.
        probes: Pages to look at.
    """

    def __init__(self, spans: Sequence[tuple[int, int]], probes: int = MAX_PROBES) -> None:
        pages = probe_pages(spans, probes)
        self._pages = (c_uint64 * len(pages))(*pages)

    def fraction(self) -> float | None:
        """From 0 to 1; None when there is nothing to look at or the kernel does not say. About 0.1 ms."""
        count = lib.bm_resident_pages(self._pages, len(self._pages)) if len(self._pages) else -1
        return None if count < 0 else count / len(self._pages)


def warm(address: int, length_bytes: int) -> None:
    """Reads a stretch of a file mapping into memory and maps it. For worker threads.

    Args:
        address: Start of a page.
        length_bytes: Up to the end of the mapping.
    """
    _unlocked.bm_warm(address, length_bytes, _AHEAD_BYTES)
