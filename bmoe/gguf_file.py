"""Facts of a GGUF model, read through ggml's own C API: nothing is parsed here, no weight is read.

It owns the reading of headers and of split sets. It must not know streaming: which tensors are experts
is `model.py`'s business.
"""

from __future__ import annotations

import ctypes
import os
import re
from ctypes import POINTER, c_bool, c_char_p, c_float, c_int, c_int32, c_int64, c_size_t, c_void_p
from dataclasses import dataclass
from typing import Any, NamedTuple

from bmoe.io.errors import FileError, FormatError, UsageError
from bmoe.llama_library import ggml_base, log_lines

_SHARD = re.compile(r"^(?P<prefix>.*)-(?P<index>\d{5})-of-(?P<count>\d{5})\.gguf$")
_STRING, _ARRAY = 8, 9
_SCALARS = {
    0: "u8",
    1: "i8",
    2: "u16",
    3: "i16",
    4: "u32",
    5: "i32",
    6: "f32",
    7: "bool",
    10: "u64",
    11: "i64",
    12: "f64",
}
_MAX_DIMS = 4


class _GgufInit(ctypes.Structure):
    _fields_ = (("no_alloc", c_bool), ("ctx", POINTER(c_void_p)))


class _TensorHead(ctypes.Structure):
    """The start of `ggml_tensor`, as far as its shape; checked by the hook's layout check."""

    _fields_ = (
        ("type", c_int),
        ("buffer", c_void_p),
        ("ne", c_int64 * _MAX_DIMS),
        ("nb", c_size_t * _MAX_DIMS),
    )


def _bind() -> Any:
    lib = ggml_base()
    for name, result, arguments in (
        ("gguf_init_from_file", c_void_p, (c_char_p, _GgufInit)),
        ("gguf_free", None, (c_void_p,)),
        ("ggml_free", None, (c_void_p,)),
        ("gguf_get_data_offset", c_size_t, (c_void_p,)),
        ("gguf_get_n_kv", c_int64, (c_void_p,)),
        ("gguf_get_key", c_char_p, (c_void_p, c_int64)),
        ("gguf_get_kv_type", c_int, (c_void_p, c_int64)),
        ("gguf_get_val_str", c_char_p, (c_void_p, c_int64)),
        ("gguf_get_arr_n", c_size_t, (c_void_p, c_int64)),
        ("gguf_get_n_tensors", c_int64, (c_void_p,)),
        ("gguf_get_tensor_name", c_char_p, (c_void_p, c_int64)),
        ("gguf_get_tensor_offset", c_size_t, (c_void_p, c_int64)),
        ("gguf_get_tensor_size", c_size_t, (c_void_p, c_int64)),
        ("ggml_get_tensor", POINTER(_TensorHead), (c_void_p, c_char_p)),
        ("ggml_type_name", c_char_p, (c_int,)),
    ):
        function = getattr(lib, name)
        function.restype = result
        function.argtypes = arguments
    scalar: dict[str, Any] = {
        "u8": ctypes.c_uint8,
        "i8": ctypes.c_int8,
        "u16": ctypes.c_uint16,
        "i16": ctypes.c_int16,
        "u32": ctypes.c_uint32,
        "i32": c_int32,
        "f32": c_float,
        "bool": c_bool,
        "u64": ctypes.c_uint64,
        "i64": c_int64,
        "f64": ctypes.c_double,
    }
    for kind, result in scalar.items():
        function = getattr(lib, f"gguf_get_val_{kind}")
        function.restype = result
        function.argtypes = (c_void_p, c_int64)
    return lib


@dataclass(frozen=True, slots=True)
class TensorFacts:
    """One tensor: where it is and what shape it has.

    `ne` is ggml's order, fastest dimension first. `offset_bytes` is absolute in file number `file`.
    """

    name: str
    file: int
    offset_bytes: int
    size_bytes: int
    ggml_type: int
    type_name: str
    ne: tuple[int, int, int, int]
    nb: tuple[int, int, int, int]


@dataclass(frozen=True, slots=True)
class GgufFacts:
    """A model's header: one file, or all shards of a split set.

    `metadata` holds scalars and strings of the first shard; arrays appear as `None`.
    """

    paths: tuple[str, ...]
    sizes_bytes: tuple[int, ...]
    metadata: dict[str, int | float | bool | str | None]
    tensors: tuple[TensorFacts, ...]

    @property
    def architecture(self) -> str:
        """`general.architecture`, or an empty string."""
        value = self.metadata.get("general.architecture")
        return value if isinstance(value, str) else ""

    def arch_int(self, key: str, default: int = 0) -> int:
        """`<architecture>.<key>` when it is an integer."""
        value = self.metadata.get(f"{self.architecture}.{key}")
        return value if isinstance(value, int) and not isinstance(value, bool) else default


class _Shard(NamedTuple):
    path: str
    number: int
    size_bytes: int


def shard_paths(path: str) -> tuple[str, ...]:
    """All files of the model that `path` names: itself, or its split set.

    Raises:
        UsageError: `path` is a shard but not the first.
        FileError: A shard is missing.
    """
    match = _SHARD.match(path)
    if match is None or int(match["count"]) <= 1:
        return (path,)
    count = int(match["count"])
    paths = tuple(f"{match['prefix']}-{i:05d}-of-{count:05d}.gguf" for i in range(1, count + 1))
    if int(match["index"]) != 1:
        raise UsageError(
            f"{path} is shard {int(match['index'])} of {count}", hint=f"give the first: {paths[0]}"
        )
    for shard in paths:
        if not os.path.exists(shard):
            raise FileError("a shard of the model is missing", path=shard, expected=f"{count} files")
    return paths


def read_gguf(path: str) -> GgufFacts:
    """Reads the header of a model.

    Raises:
        FileError: A file cannot be opened or a shard is missing.
        FormatError: A file is not a GGUF that ggml accepts, or a tensor lies outside it.
        UsageError: A shard other than the first was given.
    """
    paths = shard_paths(path)
    lib = _bind()
    tensors: list[TensorFacts] = []
    metadata: dict[str, int | float | bool | str | None] = {}
    sizes: list[int] = []
    for number, shard in enumerate(paths):
        size = _check_file(shard)
        sizes.append(size)
        context = c_void_p()
        with log_lines() as lines:
            handle = lib.gguf_init_from_file(os.fsencode(shard), _GgufInit(True, ctypes.pointer(context)))
        if not handle:
            why = "; ".join(line for line in lines if line) or "ggml gives no reason"
            raise FormatError(f"not a GGUF file that llama.cpp can read: {why}", path=shard)
        try:
            if number == 0:
                metadata = _metadata(lib, handle)
            tensors.extend(_tensors(lib, handle, context, _Shard(shard, number, size)))
        finally:
            lib.gguf_free(handle)
            lib.ggml_free(context)
    return GgufFacts(paths=paths, sizes_bytes=tuple(sizes), metadata=metadata, tensors=tuple(tensors))


def _check_file(path: str) -> int:
    """Size of a regular file that starts with GGUF's magic."""
    from bmoe.io.files import DirectFile  # noqa: PLC0415 (keeps this module light for `inspect`)

    with DirectFile.open(path, direct=False) as file:
        magic = os.pread(file.fd, 4, 0)
        if magic != b"GGUF":
            raise FormatError(
                "not a GGUF file", path=path, offset_bytes=0, field="magic", expected=b"GGUF", got=magic
            )
        return file.size_bytes


def _metadata(lib: Any, handle: int) -> dict[str, int | float | bool | str | None]:
    values: dict[str, int | float | bool | str | None] = {}
    for i in range(lib.gguf_get_n_kv(handle)):
        key = lib.gguf_get_key(handle, i).decode("utf-8", "replace")
        kind = lib.gguf_get_kv_type(handle, i)
        if kind == _STRING:
            values[key] = lib.gguf_get_val_str(handle, i).decode("utf-8", "replace")
        elif kind in _SCALARS:
            values[key] = getattr(lib, f"gguf_get_val_{_SCALARS[kind]}")(handle, i)
        else:
            values[key] = None
    return values


def _tensors(lib: Any, handle: int, context: c_void_p, shard: _Shard) -> list[TensorFacts]:
    base = lib.gguf_get_data_offset(handle)
    found = []
    for i in range(lib.gguf_get_n_tensors(handle)):
        raw = lib.gguf_get_tensor_name(handle, i)
        name = raw.decode("utf-8", "replace")
        offset = base + lib.gguf_get_tensor_offset(handle, i)
        length = lib.gguf_get_tensor_size(handle, i)
        if offset + length > shard.size_bytes:
            raise FormatError(
                "the file is cut short: a tensor reaches past its end",
                path=shard.path,
                offset_bytes=offset,
                field=name,
                expected=f"at least {offset + length} bytes",
                got=f"{shard.size_bytes} bytes",
                hint="copy or download it again",
            )
        head = lib.ggml_get_tensor(context, raw).contents
        found.append(
            TensorFacts(
                name=name,
                file=shard.number,
                offset_bytes=offset,
                size_bytes=length,
                ggml_type=head.type,
                type_name=lib.ggml_type_name(head.type).decode(),
                ne=tuple(head.ne),
                nb=tuple(head.nb),
            )
        )
    return found
