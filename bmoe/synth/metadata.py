"""Metadata values to write, made from Python.

Knows nothing of keys, files or tensors.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

from bmoe.gguf_values import SCALAR_FORMATS, MetadataValue, ValueType

if TYPE_CHECKING:
    from collections.abc import Sequence


def string_bytes(text: str) -> bytes:
    """A GGUF string: u64 length in bytes, then UTF-8."""
    encoded = text.encode()
    return struct.pack("<Q", len(encoded)) + encoded


def text(value: str) -> MetadataValue:
    """A STRING."""
    return MetadataValue(type=ValueType.STRING, payload=string_bytes(value))


def u16(value: int) -> MetadataValue:
    """A UINT16."""
    return _scalar(ValueType.UINT16, value)


def i32(value: int) -> MetadataValue:
    """An INT32."""
    return _scalar(ValueType.INT32, value)


def u32(value: int) -> MetadataValue:
    """A UINT32."""
    return _scalar(ValueType.UINT32, value)


def f32(value: float) -> MetadataValue:
    """A FLOAT32."""
    return _scalar(ValueType.FLOAT32, value)


def boolean(value: bool) -> MetadataValue:
    """A BOOL."""
    return _scalar(ValueType.BOOL, value)


def texts(values: Sequence[str]) -> MetadataValue:
    """An ARRAY of STRING."""
    return _array(ValueType.STRING, len(values), b"".join(map(string_bytes, values)))


def i32s(values: Sequence[int]) -> MetadataValue:
    """An ARRAY of INT32."""
    return _array(ValueType.INT32, len(values), struct.pack(f"<{len(values)}i", *values))


def f32s(values: Sequence[float]) -> MetadataValue:
    """An ARRAY of FLOAT32."""
    return _array(ValueType.FLOAT32, len(values), struct.pack(f"<{len(values)}f", *values))


def booleans(values: Sequence[bool]) -> MetadataValue:
    """An ARRAY of BOOL."""
    return _array(ValueType.BOOL, len(values), bytes(values))


def _scalar(kind: ValueType, value: float) -> MetadataValue:
    return MetadataValue(type=kind, payload=struct.pack(SCALAR_FORMATS[kind], value))


def _array(element: ValueType, count: int, elements: bytes) -> MetadataValue:
    header = struct.pack("<IQ", element, count)
    return MetadataValue(type=ValueType.ARRAY, payload=header + elements)
