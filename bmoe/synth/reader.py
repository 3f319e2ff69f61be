"""A model to take something from: its header, whole arrays included, and its bytes.

Parsing is bmoe.gguf_header's. Knows nothing of what keys and tensors mean.
"""

from __future__ import annotations

import os

from bmoe.gguf_header import GgufHeader as SourceModel
from bmoe.gguf_header import HeaderTensor as SourceTensor
from bmoe.gguf_header import read_header
from bmoe.io.errors import ReadError

__all__ = ["SourceModel", "SourceTensor", "read_exactly", "read_model"]


def read_model(path: str) -> SourceModel:
    """The header of `path`.

    Raises:
        FormatError: It is no GGUF file, or its content contradicts itself or the file's size.
        FileError: It cannot be opened or read.
    """
    return read_header(path, arrays=True)


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
