"""Reads the header of a GGUF file that nobody vouches for: the only parser of it in this project.

Every count, length and offset is checked against the size of the file before anything is allocated, and
whatever is wrong is one FormatError. What passes, ggml's own reader takes too: where ggml is laxer (empty
and control characters in names, dimensions of 0) such a file would end the process later, in llama.cpp.
Memory is a window of a few MiB; time is bounded by limits far beyond any model. Must not know what keys
and tensors mean.
"""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from bmoe.gguf_types import GGML_TYPES, GgmlType, packed_bytes
from bmoe.gguf_values import ARRAY_HEAD_BYTES, SCALAR_FORMATS, MetadataValue, ValueType
from bmoe.io.errors import FormatError, ReadError
from bmoe.io.files import DirectFile

if TYPE_CHECKING:
    from collections.abc import Iterator

MAGIC: Final = b"GGUF"
ALIGNMENT_KEY: Final = "general.alignment"
DEFAULT_ALIGNMENT_BYTES: Final = 32
MIN_ALIGNMENT_BYTES: Final = 8
MAX_ALIGNMENT_BYTES: Final = 1 << 20
MAX_NAME_BYTES: Final = 63  # GGML_MAX_NAME holds the terminating zero too

_SUPPORTED_VERSIONS: Final = (2, 3)  # of one layout; version 1 had 32-bit counts
_MAX_RANK: Final = 4
_I64_MAX: Final = 2**63 - 1
# A vocabulary of a million tokens with its merges is under 64 MiB; the largest model has 50,000 tensors
# when its experts are not merged.
_MAX_HEADER_BYTES: Final = 128 << 20
_MAX_KEYS: Final = 1 << 16
_MAX_TENSORS: Final = 1 << 17
_MAX_STRINGS: Final = 1 << 22
_SHORT_ARRAY_BYTES: Final = 64 << 10
_WINDOW_BYTES: Final = 1 << 20
_U64: Final = struct.Struct("<Q")


def is_alignment(alignment_bytes: int) -> bool:
    """Whether tensors may be aligned to that."""
    in_range = MIN_ALIGNMENT_BYTES <= alignment_bytes <= MAX_ALIGNMENT_BYTES
    return in_range and not alignment_bytes & (alignment_bytes - 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class HeaderTensor:
    """A tensor of the file.

    Attributes:
        name: As in the file.
        kind: The type of its values.
        shape: ggml's order, the row length first.
        offset_bytes: Of its first byte, from the start of the file.
        size_bytes: Without padding.
    """

    name: str
    kind: GgmlType
    shape: tuple[int, ...]
    offset_bytes: int
    size_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class GgufHeader:
    """What the header says, all of it within the file.

    Attributes:
        path: The file.
        size_bytes: Of the file.
        metadata: Key values in file order.
        tensors: In file order.
        alignment_bytes: Of the tensors' offsets.
        end_bytes: Where the last tensor's padding ends, or the header's without tensors.
    """

    path: str
    size_bytes: int
    metadata: dict[str, MetadataValue]
    tensors: tuple[HeaderTensor, ...]
    alignment_bytes: int
    end_bytes: int

    @property
    def architecture(self) -> str | None:
        """`general.architecture`, where it is a string."""
        value = self.metadata.get("general.architecture")
        return None if value is None else value.text()

    def tensor_at(self, name: str) -> HeaderTensor | None:
        """The tensor of that name, if there is one."""
        return next((tensor for tensor in self.tensors if tensor.name == name), None)


def read_header(path: str, *, arrays: bool = False) -> GgufHeader:
    """Reads and checks the header of `path`.

    Args:
        path: The file.
        arrays: Keep all arrays whole; else the elements of long ones, and of those of strings, are left
            out.

    Raises:
        FormatError: It is no GGUF file, or its content contradicts itself or the file's size.
        FileError: It cannot be opened or read, or is no regular file.
    """
    with DirectFile.open(path, direct=False) as file:
        return _Parser(file, arrays).header()


class _Parser:
    """A cursor over one file's header: a window of bytes, and where in it we are."""

    def __init__(self, file: DirectFile, arrays: bool) -> None:
        self._file = file
        self._path = file.path
        self._size_bytes = file.size_bytes
        self._arrays = arrays
        self._window = b""
        self._base = 0  # the window's offset in the file
        self._pos = 0  # ours in the window
        self._field = "header"

    def header(self) -> GgufHeader:
        if self._take(4) != MAGIC:
            raise FormatError("is not a GGUF file", path=self._path)
        version = self._u32()
        if version not in _SUPPORTED_VERSIONS:
            swapped = int.from_bytes(version.to_bytes(4, "little"), "big") in _SUPPORTED_VERSIONS
            got = "a big-endian file" if swapped else version
            raise self._wrong("GGUF version not supported", expected="2 or 3, little-endian", got=got)
        tensor_count, key_count = self._u64(), self._u64()
        # The shortest entries: an empty name with a rank and a type; an empty key with a byte.
        self._check_count(tensor_count, 8 + 4 + 8 + 4 + 8, most=_MAX_TENSORS)
        self._check_count(key_count, 8 + 4 + 1, most=_MAX_KEYS)
        metadata = dict(self._entries(key_count))
        alignment_bytes = self._alignment(metadata)
        infos = [self._tensor_info() for _ in range(tensor_count)]
        if len({tensor.name for tensor in infos}) != len(infos):
            raise FormatError("has two tensors of one name", path=self._path)
        data_start = -(-self._at // alignment_bytes) * alignment_bytes
        tensors, end = self._placed(infos, data_start, alignment_bytes)
        return GgufHeader(
            path=self._path,
            size_bytes=self._size_bytes,
            metadata=metadata,
            tensors=tensors,
            alignment_bytes=alignment_bytes,
            end_bytes=end,
        )

    # --- metadata -------------------------------------------------------------------------------------

    def _entries(self, count: int) -> Iterator[tuple[str, MetadataValue]]:
        seen: set[str] = set()
        for index in range(count):
            self._field = f"key {index}"
            key = self._name()
            self._field = f"key {key!r}"
            if key in seen:
                raise self._wrong("the key occurs twice")
            seen.add(key)
            kind = self._value_type()
            yield key, MetadataValue(type=kind, payload=self._payload(kind))

    def _payload(self, kind: ValueType) -> bytes:
        if kind is ValueType.STRING:
            return self._string_payload()
        if kind is not ValueType.ARRAY:
            return self._take(struct.calcsize(SCALAR_FORMATS[kind]))
        element = self._value_type()
        count = self._u64()
        head = struct.pack("<IQ", element, count)
        assert len(head) == ARRAY_HEAD_BYTES
        if element is ValueType.ARRAY:
            raise self._wrong("arrays of arrays are not part of the format")
        start = self._at
        if element is ValueType.STRING:
            self._check_count(count, 8, most=_MAX_STRINGS)
            self._skip_strings(count)
        else:
            element_bytes = struct.calcsize(SCALAR_FORMATS[element])
            self._check_count(count, element_bytes)
            self._skip(count * element_bytes)
        size_bytes = self._at - start
        short = element is not ValueType.STRING and size_bytes <= _SHORT_ARRAY_BYTES
        return head + self._read(start, size_bytes) if self._arrays or short else head

    def _skip_strings(self, count: int) -> None:
        """Goes past `count` strings; a tight loop, as a model has several hundred thousand."""
        unpack = _U64.unpack_from
        while count:
            window, pos, last = self._window, self._pos, len(self._window) - 8
            while count and pos <= last:
                end = pos + 8 + unpack(window, pos)[0]
                if end > last + 8:
                    break
                pos = end
                count -= 1
            self._pos = pos
            if count:  # one that the window does not hold whole
                self._skip(self._u64())
                count -= 1

    def _alignment(self, metadata: dict[str, MetadataValue]) -> int:
        value = metadata.get(ALIGNMENT_KEY)
        if value is None:
            return DEFAULT_ALIGNMENT_BYTES
        alignment_bytes = value.integer() if value.type is ValueType.UINT32 else None
        if alignment_bytes is None or not is_alignment(alignment_bytes):
            self._field = ALIGNMENT_KEY
            raise self._wrong(
                "is no alignment", expected="a u32, a power of two from 8 to 1 MiB", got=alignment_bytes
            )
        return alignment_bytes

    # --- tensors --------------------------------------------------------------------------------------

    def _tensor_info(self) -> HeaderTensor:
        """One entry of the table, its offset still relative to the data section."""
        self._field = "tensor table"
        name = self._name()
        if len(name.encode()) > MAX_NAME_BYTES:
            raise self._wrong("tensor name too long", expected=f"at most {MAX_NAME_BYTES} bytes")
        self._field = f"tensor {name!r}"
        rank = self._u32()
        if not 1 <= rank <= _MAX_RANK:
            raise self._wrong("rank not supported", expected=f"1 to {_MAX_RANK}", got=rank)
        shape = struct.unpack(f"<{rank}Q", self._take(8 * rank))
        code = self._u32()
        kind = GGML_TYPES.get(code)
        if kind is None:
            raise self._wrong("type not known", got=code)
        if min(shape) < 1:
            raise self._wrong("a dimension is zero", got=shape)
        if shape[0] % kind.block_values:
            raise self._wrong(f"rows are no whole blocks of {kind.name}", got=shape[0])
        return HeaderTensor(
            name=name,
            kind=kind,
            shape=shape,
            offset_bytes=self._u64(),
            size_bytes=packed_bytes(kind, shape),
        )

    def _placed(
        self, infos: list[HeaderTensor], data_start: int, alignment_bytes: int
    ) -> tuple[tuple[HeaderTensor, ...], int]:
        """The tensors where they are; each must follow the one before it, as ggml demands."""
        placed = []
        expected = 0
        for tensor in infos:
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
                    hint="copy or download it again",
                )
            if tensor.offset_bytes != expected:
                raise self._wrong(
                    "does not follow the tensor before it", expected=expected, got=tensor.offset_bytes
                )
            expected += -(-tensor.size_bytes // alignment_bytes) * alignment_bytes
            placed.append(
                HeaderTensor(
                    name=tensor.name,
                    kind=tensor.kind,
                    shape=tensor.shape,
                    offset_bytes=offset,
                    size_bytes=tensor.size_bytes,
                )
            )
        return tuple(placed), data_start + expected if placed else self._at

    # --- bytes ----------------------------------------------------------------------------------------

    @property
    def _at(self) -> int:
        return self._base + self._pos

    def _value_type(self) -> ValueType:
        code = self._u32()
        try:
            return ValueType(code)
        except ValueError:
            raise self._wrong("value type not known", got=code) from None

    def _name(self) -> str:
        """A key or a tensor's name. ggml cuts names at a zero byte, and so must see none."""
        raw = self._string_payload()[8:]
        try:
            name = raw.decode()
        except UnicodeDecodeError:
            raise self._wrong("a name is not UTF-8") from None
        if not name:
            raise self._wrong("a name is empty")
        if not name.isprintable():
            raise self._wrong("a name has control characters", got=repr(name))
        return name

    def _string_payload(self) -> bytes:
        length = self._take(8)
        return length + self._take(int.from_bytes(length, "little"))

    def _u32(self) -> int:
        return int.from_bytes(self._take(4), "little")

    def _u64(self) -> int:
        return int.from_bytes(self._take(8), "little")

    def _check_count(self, count: int, element_bytes: int, *, most: int = _I64_MAX) -> None:
        if count > (self._size_bytes - self._at) // element_bytes:
            raise self._wrong("a count exceeds what the file can hold", got=count)
        if count > most:
            raise self._wrong("a count exceeds every known model's", expected=f"at most {most}", got=count)

    def _take(self, count: int) -> bytes:
        self._check_left(count)
        if self._pos + count > len(self._window):
            self._base, self._pos = self._at, 0
            wanted = min(max(count, _WINDOW_BYTES), self._size_bytes - self._base)
            self._window = self._read(self._base, wanted)
        taken = self._window[self._pos : self._pos + count]
        self._pos += count
        return taken

    def _skip(self, count: int) -> None:
        self._check_left(count)
        self._pos += count
        if self._pos > len(self._window):
            self._base, self._pos, self._window = self._at, 0, b""

    def _check_left(self, count: int) -> None:
        left = self._size_bytes - self._at
        if count > left:
            raise self._wrong("the file ends early", expected=f"{count} bytes", got=f"{left} bytes")
        if self._at + count > _MAX_HEADER_BYTES:
            raise self._wrong("the header is too large", expected=f"at most {_MAX_HEADER_BYTES} bytes")

    def _read(self, offset_bytes: int, count: int) -> bytes:
        try:
            got = os.pread(self._file.fd, count, offset_bytes)
        except OSError as error:
            raise ReadError(
                f"cannot be read: {error.strerror}", path=self._path, offset_bytes=offset_bytes
            ) from error
        if len(got) != count:  # the file shrank while we read it
            raise self._wrong("the file ends early", expected=f"{count} bytes", got=f"{len(got)} bytes")
        return got

    def _wrong(self, message: str, *, expected: object = None, got: object = None) -> FormatError:
        return FormatError(
            message, path=self._path, offset_bytes=self._at, field=self._field, expected=expected, got=got
        )
