"""One metadata value of a GGUF file: its type tag and its bytes, turned into Python on request.

Values are kept as the file's own bytes, so that what is copied from one model to another (a tokenizer, a
chat template) arrives bit for bit. Knows nothing of keys, files or tensors.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum
from typing import Final


class ValueType(IntEnum):
    """The type tags of the format."""

    UINT8 = 0
    INT8 = 1
    UINT16 = 2
    INT16 = 3
    UINT32 = 4
    INT32 = 5
    FLOAT32 = 6
    BOOL = 7
    STRING = 8
    ARRAY = 9
    UINT64 = 10
    INT64 = 11
    FLOAT64 = 12


SCALAR_FORMATS: Final = {
    ValueType.UINT8: "<B",
    ValueType.INT8: "<b",
    ValueType.UINT16: "<H",
    ValueType.INT16: "<h",
    ValueType.UINT32: "<I",
    ValueType.INT32: "<i",
    ValueType.FLOAT32: "<f",
    ValueType.BOOL: "<?",
    ValueType.UINT64: "<Q",
    ValueType.INT64: "<q",
    ValueType.FLOAT64: "<d",
}
"""The `struct` format of every scalar type."""

ARRAY_HEAD_BYTES: Final = 12  # element type (u32) and count (u64)
_FRACTIONS: Final = frozenset({ValueType.FLOAT32, ValueType.FLOAT64})

Plain = int | float | bool | str | tuple[int, ...] | None


@dataclass(frozen=True, kw_only=True, slots=True)
class MetadataValue:
    """A value as it stands in the file.

    Attributes:
        type: The type tag.
        payload: What follows the tag: a little-endian scalar; a u64 length and UTF-8 for a string; the
            element type (u32), the count (u64) and the elements for an array. A reader may leave the
            elements of a long array out.
    """

    type: ValueType
    payload: bytes

    def integer(self) -> int | None:
        """The value of any integer type, `None` for the other types."""
        if self.type not in SCALAR_FORMATS or self.type in _FRACTIONS or self.type is ValueType.BOOL:
            return None
        return int(struct.unpack(SCALAR_FORMATS[self.type], self.payload)[0])

    def text(self) -> str | None:
        """The value of a string; `None` for the other types, and for bytes that are not UTF-8."""
        if self.type is not ValueType.STRING:
            return None
        try:
            return self.payload[8:].decode()
        except UnicodeDecodeError:
            return None

    def array_length(self) -> int | None:
        """How many elements an array has, `None` for the other types."""
        if self.type is not ValueType.ARRAY:
            return None
        return int.from_bytes(self.payload[4:ARRAY_HEAD_BYTES], "little")

    def plain(self) -> Plain:
        """A number, a flag, a string (what is not UTF-8 replaced), or a tuple of integers or flags.

        `None` for other arrays, and for those whose elements were left out.
        """
        if self.type is ValueType.STRING:
            return self.payload[8:].decode(errors="replace")
        if self.type is not ValueType.ARRAY:
            value: int | float | bool = struct.unpack(SCALAR_FORMATS[self.type], self.payload)[0]
            return value
        element = ValueType(int.from_bytes(self.payload[:4], "little"))
        if element not in SCALAR_FORMATS or element in _FRACTIONS or len(self.payload) == ARRAY_HEAD_BYTES:
            return None
        elements = struct.iter_unpack(SCALAR_FORMATS[element], self.payload[ARRAY_HEAD_BYTES:])
        return tuple(int(value) for (value,) in elements)
