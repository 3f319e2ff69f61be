"""One metadata value of a GGUF file: its type tag and its bytes, made from or turned into Python.

Values are kept as the file's own bytes, so that what is copied from one model to another (a
tokenizer, a chat template) arrives bit for bit. Knows nothing of keys, files or tensors.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from gguf.constants import GGUFValueType

if TYPE_CHECKING:
    from collections.abc import Sequence

SCALAR_FORMATS: Final = {
    GGUFValueType.UINT8: "<B",
    GGUFValueType.INT8: "<b",
    GGUFValueType.UINT16: "<H",
    GGUFValueType.INT16: "<h",
    GGUFValueType.UINT32: "<I",
    GGUFValueType.INT32: "<i",
    GGUFValueType.FLOAT32: "<f",
    GGUFValueType.BOOL: "<?",
    GGUFValueType.UINT64: "<Q",
    GGUFValueType.INT64: "<q",
    GGUFValueType.FLOAT64: "<d",
}
"""The `struct` format of every scalar type."""

_INTEGERS: Final = frozenset(SCALAR_FORMATS) - {
    GGUFValueType.FLOAT32,
    GGUFValueType.FLOAT64,
    GGUFValueType.BOOL,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class MetadataValue:
    """A value as it stands in the file.

    Attributes:
        type: The type tag.
        payload: What follows the tag: a little-endian scalar; a u64 length and UTF-8 for a string; the
            element type (u32), the count (u64) and the elements for an array.
    """

    type: GGUFValueType
    payload: bytes

    def integer(self) -> int | None:
        """The value of any integer type, `None` for the other types."""
        if self.type not in _INTEGERS:
            return None
        return int(struct.unpack(SCALAR_FORMATS[self.type], self.payload)[0])

    def text(self) -> str | None:
        """The value of a string; `None` for the other types, and for bytes that are not UTF-8."""
        if self.type is not GGUFValueType.STRING:
            return None
        try:
            return self.payload[8:].decode()
        except UnicodeDecodeError:
            return None

    def array_length(self) -> int | None:
        """How many elements an array has, `None` for the other types."""
        if self.type is not GGUFValueType.ARRAY:
            return None
        return int.from_bytes(self.payload[4:12], "little")


def string_bytes(text: str) -> bytes:
    """A GGUF string: u64 length in bytes, then UTF-8."""
    encoded = text.encode()
    return struct.pack("<Q", len(encoded)) + encoded


def text(value: str) -> MetadataValue:
    """A STRING."""
    return MetadataValue(type=GGUFValueType.STRING, payload=string_bytes(value))


def u32(value: int) -> MetadataValue:
    """A UINT32."""
    return _scalar(GGUFValueType.UINT32, value)


def f32(value: float) -> MetadataValue:
    """A FLOAT32."""
    return _scalar(GGUFValueType.FLOAT32, value)


def boolean(value: bool) -> MetadataValue:
    """A BOOL."""
    return _scalar(GGUFValueType.BOOL, value)


def texts(values: Sequence[str]) -> MetadataValue:
    """An ARRAY of STRING."""
    return _array(GGUFValueType.STRING, len(values), b"".join(map(string_bytes, values)))


def i32s(values: Sequence[int]) -> MetadataValue:
    """An ARRAY of INT32."""
    return _array(GGUFValueType.INT32, len(values), struct.pack(f"<{len(values)}i", *values))


def f32s(values: Sequence[float]) -> MetadataValue:
    """An ARRAY of FLOAT32."""
    return _array(GGUFValueType.FLOAT32, len(values), struct.pack(f"<{len(values)}f", *values))


def booleans(values: Sequence[bool]) -> MetadataValue:
    """An ARRAY of BOOL."""
    return _array(GGUFValueType.BOOL, len(values), bytes(values))


def _scalar(kind: GGUFValueType, value: float) -> MetadataValue:
    return MetadataValue(type=kind, payload=struct.pack(SCALAR_FORMATS[kind], value))


def _array(element: GGUFValueType, count: int, elements: bytes) -> MetadataValue:
    header = struct.pack("<IQ", element, count)
    return MetadataValue(type=GGUFValueType.ARRAY, payload=header + elements)
