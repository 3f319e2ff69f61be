"""Reads the header of a GGUF file that nobody vouches for.

gguf's own reader maps the file and trusts its counts; here every count and offset is checked against
the size of the file before anything is allocated, and whatever is wrong is one FormatError. Metadata
stays as bytes (see metadata.py). Knows nothing of what keys and tensors mean.
"""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, BinaryIO, Final

from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType

from bmoe.io.errors import FileError, FormatError, ReadError
from bmoe.synth.metadata import SCALAR_FORMATS, MetadataValue
from bmoe.synth.writer import (
    ALIGNMENT_KEY,
    DEFAULT_ALIGNMENT_BYTES,
    MAGIC,
    MAX_NAME_BYTES,
    is_alignment,
    tensor_bytes,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

_SUPPORTED_VERSIONS: Final = (2, 3)  # of one layout; version 1 had 32-bit counts
_MAX_VALUE_BYTES: Final = 256 << 20  # a vocabulary of a million tokens is under 32 MiB
_MAX_RANK: Final = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceTensor:
    """A tensor of the file.

    Attributes:
        name: As in the file.
        kind: The type of its values.
        shape: ggml's order, the row length first.
        offset_bytes: Of its first byte, from the start of the file.
        size_bytes: Without padding.
    """

    name: str
    kind: GGMLQuantizationType
    shape: tuple[int, ...]
    offset_bytes: int
    size_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceModel:
    """What the header says, all of it within the file.

    Attributes:
        path: The file.
        metadata: Key values in file order.
        tensors: In file order.
        alignment_bytes: Of the tensors' offsets.
    """

    path: str
    metadata: dict[str, MetadataValue]
    tensors: tuple[SourceTensor, ...]
    alignment_bytes: int

    @property
    def architecture(self) -> str | None:
        """`general.architecture`, where it is a string."""
        value = self.metadata.get("general.architecture")
        return None if value is None else value.text()

    def tensor_at(self, name: str) -> SourceTensor | None:
        """The tensor of that name, if there is one."""
        return next((tensor for tensor in self.tensors if tensor.name == name), None)


def read_model(path: str) -> SourceModel:
    """Reads and checks the header of `path`.

    Raises:
        FormatError: It is no GGUF file, or its content contradicts itself or the file's size.
        FileError: It cannot be opened or read.
    """
    try:
        with open(path, "rb") as file:
            return _Parser(path, file, os.fstat(file.fileno()).st_size).model()
    except OSError as error:
        raise FileError(f"cannot be read: {error.strerror or error}", path=path) from error


def read_exactly(descriptor: int, buffer: memoryview, offset_bytes: int, path: str) -> None:
    """Fills `buffer` from `offset_bytes`.

    Raises:
        ReadError: The file ends before, or the operating system refused.
    """
    rest = buffer
    while rest:
        at = offset_bytes + len(buffer) - len(rest)
        try:
            count = os.preadv(descriptor, [rest], at)
        except OSError as error:
            raise ReadError(f"cannot be read: {error.strerror}", path=path, offset_bytes=at) from error
        if not count:
            raise ReadError("the file ends early", path=path, offset_bytes=at, expected=f"{len(rest)} bytes")
        rest = rest[count:]


class _Parser:
    """A cursor over one file's header."""

    def __init__(self, path: str, file: BinaryIO, size_bytes: int) -> None:
        self._path = path
        self._file = file
        self._size_bytes = size_bytes
        self._at = 0
        self._field = "header"

    def model(self) -> SourceModel:
        if self._take(4) != MAGIC:
            raise FormatError("is not a GGUF file", path=self._path)
        version = self._u32()
        if version not in _SUPPORTED_VERSIONS:
            swapped = int.from_bytes(version.to_bytes(4, "little"), "big") in _SUPPORTED_VERSIONS
            got = "a big-endian file" if swapped else version
            raise self._wrong("GGUF version not supported", expected="2 or 3, little-endian", got=got)
        tensor_count, key_count = self._u64(), self._u64()
        # The shortest entries: an empty name with a rank and a type; an empty key with a byte.
        self._check_count(tensor_count, 8 + 4 + 8 + 4 + 8)
        self._check_count(key_count, 8 + 4 + 1)
        metadata = dict(self._entries(key_count))
        alignment_bytes = self._alignment(metadata)
        infos = [self._tensor_info() for _ in range(tensor_count)]
        data_start = -(-self._at // alignment_bytes) * alignment_bytes
        tensors = tuple(self._placed(info, data_start, alignment_bytes) for info in infos)
        if len({tensor.name for tensor in tensors}) != len(tensors):
            raise FormatError("has two tensors of one name", path=self._path)
        return SourceModel(
            path=self._path, metadata=metadata, tensors=tensors, alignment_bytes=alignment_bytes
        )

    def _entries(self, count: int) -> Iterator[tuple[str, MetadataValue]]:
        seen: set[str] = set()
        for index in range(count):
            self._field = f"key {index}"
            key = self._string()
            self._field = f"key {key!r}"
            if key in seen:
                raise self._wrong("the key occurs twice")
            seen.add(key)
            kind = self._value_type()
            yield key, MetadataValue(type=kind, payload=self._payload(kind))

    def _payload(self, kind: GGUFValueType) -> bytes:
        if kind is GGUFValueType.STRING:
            return self._string_payload()
        if kind is not GGUFValueType.ARRAY:
            return self._take(struct.calcsize(SCALAR_FORMATS[kind]))
        element = self._value_type()
        count = self._u64()
        header = struct.pack("<IQ", element, count)
        if element is GGUFValueType.ARRAY:
            raise self._wrong("arrays of arrays are not part of the format")
        if element is not GGUFValueType.STRING:
            element_bytes = struct.calcsize(SCALAR_FORMATS[element])
            self._check_count(count, element_bytes)
            return header + self._take(count * element_bytes)
        self._check_count(count, 8)
        start = self._at
        strings = []
        for _ in range(count):
            strings.append(self._string_payload())
            if self._at - start > _MAX_VALUE_BYTES:
                raise self._wrong("value too large", expected=f"at most {_MAX_VALUE_BYTES} bytes")
        return header + b"".join(strings)

    def _tensor_info(self) -> SourceTensor:
        """One entry of the table, its offset still relative to the data section."""
        self._field = "tensor table"
        name = self._string()
        if len(name.encode()) > MAX_NAME_BYTES:
            raise self._wrong("tensor name too long", expected=f"at most {MAX_NAME_BYTES} bytes")
        self._field = f"tensor {name!r}"
        rank = self._u32()
        if not 1 <= rank <= _MAX_RANK:
            raise self._wrong("rank not supported", expected=f"1 to {_MAX_RANK}", got=rank)
        shape = tuple(self._u64() for _ in range(rank))
        code = self._u32()
        try:
            kind = GGMLQuantizationType(code)
        except ValueError:
            raise self._wrong("type not known", got=code) from None
        if min(shape) < 1:
            raise self._wrong("a dimension is zero", got=shape)
        block_values = GGML_QUANT_SIZES[kind][0]
        if shape[0] % block_values:
            raise self._wrong(f"rows are no whole blocks of {kind.name}", got=shape[0])
        size_bytes = tensor_bytes(kind, shape)
        return SourceTensor(
            name=name, kind=kind, shape=shape, offset_bytes=self._u64(), size_bytes=size_bytes
        )

    def _placed(self, tensor: SourceTensor, data_start: int, alignment_bytes: int) -> SourceTensor:
        self._field = f"tensor {tensor.name!r}"
        if tensor.offset_bytes % alignment_bytes:
            raise self._wrong(f"offset is not a multiple of {alignment_bytes}", got=tensor.offset_bytes)
        offset = data_start + tensor.offset_bytes
        if offset + tensor.size_bytes > self._size_bytes:
            raise FormatError(
                "the tensor reaches past the end of the file",
                path=self._path,
                offset_bytes=offset,
                field=tensor.name,
                expected=f"{tensor.size_bytes} bytes",
                got=f"{max(0, self._size_bytes - offset)} bytes",
            )
        return replace(tensor, offset_bytes=offset)

    def _alignment(self, metadata: dict[str, MetadataValue]) -> int:
        value = metadata.get(ALIGNMENT_KEY)
        alignment_bytes = DEFAULT_ALIGNMENT_BYTES if value is None else value.integer()
        if alignment_bytes is None or not is_alignment(alignment_bytes):
            self._field = ALIGNMENT_KEY
            raise self._wrong("is no alignment", expected="a power of two up to 1 MiB", got=alignment_bytes)
        return alignment_bytes

    def _value_type(self) -> GGUFValueType:
        code = self._u32()
        try:
            return GGUFValueType(code)
        except ValueError:
            raise self._wrong("value type not known", got=code) from None

    def _string(self) -> str:
        try:
            return self._string_payload()[8:].decode()
        except UnicodeDecodeError:
            raise self._wrong("a name is not UTF-8") from None

    def _string_payload(self) -> bytes:
        length = self._take(8)
        return length + self._take(int.from_bytes(length, "little"))

    def _u32(self) -> int:
        return int.from_bytes(self._take(4), "little")

    def _u64(self) -> int:
        return int.from_bytes(self._take(8), "little")

    def _check_count(self, count: int, element_bytes: int) -> None:
        if count > (self._size_bytes - self._at) // element_bytes:
            raise self._wrong("a count exceeds what the file can hold", got=count)

    def _take(self, count: int) -> bytes:
        left = self._size_bytes - self._at
        if count > left:
            raise self._wrong("the file ends early", expected=f"{count} bytes", got=f"{left} bytes")
        if count > _MAX_VALUE_BYTES:
            raise self._wrong("value too large", expected=f"at most {_MAX_VALUE_BYTES} bytes", got=count)
        taken = self._file.read(count)
        if len(taken) != count:  # the file shrank while we read it
            raise self._wrong("the file ends early", expected=f"{count} bytes", got=f"{len(taken)} bytes")
        self._at += count
        return taken

    def _wrong(self, message: str, *, expected: object = None, got: object = None) -> FormatError:
        return FormatError(
            message, path=self._path, offset_bytes=self._at, field=self._field, expected=expected, got=got
        )
