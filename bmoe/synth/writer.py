"""Writes a GGUF file, whole or not at all, in bounded memory.

The layout (version 3, little-endian) is written here rather than with gguf's writer, which wants each
tensor whole in memory. Knows nothing of what the tensors mean or where their bytes come from.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from bmoe.io.errors import FileError, UsageError
from bmoe.synth.metadata import string_bytes, u32

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from bmoe.synth.metadata import MetadataValue

MAGIC: Final = b"GGUF"
VERSION: Final = 3
DEFAULT_ALIGNMENT_BYTES: Final = 32
ALIGNMENT_KEY: Final = "general.alignment"
MIN_ALIGNMENT_BYTES: Final = 8
MAX_ALIGNMENT_BYTES: Final = 1 << 20
_PUSH_BYTES: Final = 32 << 20
MAX_NAME_BYTES: Final = 63  # GGML_MAX_NAME holds the terminating zero too

Chunk = bytes | bytearray | memoryview


def tensor_bytes(kind: GGMLQuantizationType, shape: Sequence[int]) -> int:
    """The size of a tensor whose rows, `shape[0]` values each, are whole blocks of `kind`."""
    block_values, block_bytes = GGML_QUANT_SIZES[kind]
    values = 1
    for extent in shape:
        values *= extent
    return values // block_values * block_bytes


def is_alignment(alignment_bytes: int) -> bool:
    """Whether tensors may be aligned to that."""
    in_range = MIN_ALIGNMENT_BYTES <= alignment_bytes <= MAX_ALIGNMENT_BYTES
    return in_range and not alignment_bytes & (alignment_bytes - 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedTensor:
    """A tensor to be written.

    Attributes:
        name: Unique in the file, at most 63 bytes.
        kind: The type of its values.
        shape: Extents in ggml's order, the row length first.
        chunks: Called once, when its turn comes; yields exactly `size_bytes` in pieces small enough to
            hold in memory.
    """

    name: str
    kind: GGMLQuantizationType
    shape: tuple[int, ...]
    chunks: Callable[[], Iterable[Chunk]]

    @property
    def size_bytes(self) -> int:
        """The bytes of its values, without padding."""
        return tensor_bytes(self.kind, self.shape)


def write_model(
    destination: str,
    *,
    metadata: Mapping[str, MetadataValue],
    tensors: Sequence[PlannedTensor],
    alignment_bytes: int = DEFAULT_ALIGNMENT_BYTES,
    on_progress: Callable[[int, int], None] | None = None,
) -> int:
    """Writes `destination` whole or not at all, replacing what was there.

    The bytes go to a hidden file beside it, which is renamed once all of them are on the drive and
    removed on any failure, Ctrl-C included.

    Args:
        destination: The file to make.
        metadata: Key values, written in this order; the alignment is added where it is not 32.
        tensors: Written in this order.
        alignment_bytes: What tensor offsets are multiples of: a power of two from 8 to 1 MiB.
        on_progress: Called with (bytes done, bytes in total), at the end with two equal numbers.

    Returns:
        The size of the file in bytes.

    Raises:
        UsageError: The alignment is no such power of two.
        FileError: The drive is too full, or the operating system refused.
    """
    if not is_alignment(alignment_bytes):
        raise UsageError(
            f"alignment {alignment_bytes}: must be a power of two from {MIN_ALIGNMENT_BYTES} to "
            f"{MAX_ALIGNMENT_BYTES} bytes"
        )
    header = _header(metadata, tensors, alignment_bytes)
    total = len(header) + sum(_padded(tensor.size_bytes, alignment_bytes) for tensor in tensors)
    with _replacing(destination, total) as descriptor:
        done = pushed = 0
        for chunk in _stream(header, tensors, alignment_bytes):
            _write_all(descriptor, chunk)
            done += len(chunk)
            if done - pushed >= _PUSH_BYTES:
                # Linux starts writing the range out; else all of it would wait for the fsync at 100 %.
                os.posix_fadvise(descriptor, pushed, done - pushed, os.POSIX_FADV_DONTNEED)
                pushed = done
            if on_progress is not None:
                on_progress(done, total)
        os.fsync(descriptor)
    return total


def _header(
    metadata: Mapping[str, MetadataValue], tensors: Sequence[PlannedTensor], alignment_bytes: int
) -> bytes:
    """Everything before the first tensor's bytes, padded."""
    entries = {key: value for key, value in metadata.items() if key != ALIGNMENT_KEY}
    if alignment_bytes != DEFAULT_ALIGNMENT_BYTES:
        entries[ALIGNMENT_KEY] = u32(alignment_bytes)
    parts = [MAGIC, struct.pack("<IQQ", VERSION, len(tensors), len(entries))]
    for key, value in entries.items():
        parts += string_bytes(key), struct.pack("<I", value.type), value.payload
    offset = 0
    for tensor in tensors:
        if len(tensor.name.encode()) > MAX_NAME_BYTES:
            raise RuntimeError(f"tensor name {tensor.name} is longer than {MAX_NAME_BYTES} bytes")
        parts.append(string_bytes(tensor.name))
        rank = len(tensor.shape)
        parts.append(struct.pack(f"<I{rank}QIQ", rank, *tensor.shape, tensor.kind, offset))
        offset += _padded(tensor.size_bytes, alignment_bytes)
    header = b"".join(parts)
    return header.ljust(_padded(len(header), alignment_bytes), b"\0")


def _stream(header: bytes, tensors: Sequence[PlannedTensor], alignment_bytes: int) -> Iterator[Chunk]:
    yield header
    for tensor in tensors:
        made = 0
        for chunk in tensor.chunks():
            made += len(chunk)
            yield chunk
        if made != tensor.size_bytes:
            raise RuntimeError(f"tensor {tensor.name}: {made} bytes made, {tensor.size_bytes} declared")
        yield bytes(_padded(made, alignment_bytes) - made)


def _padded(size_bytes: int, alignment_bytes: int) -> int:
    return -(-size_bytes // alignment_bytes) * alignment_bytes


def _write_all(descriptor: int, chunk: Chunk) -> None:
    rest = memoryview(chunk)
    while rest:
        rest = rest[os.write(descriptor, rest) :]


@contextlib.contextmanager
def _replacing(destination: str, size_bytes: int) -> Iterator[int]:
    """A descriptor of a new file that becomes `destination` when the block ends well."""
    folder, name = os.path.split(os.path.abspath(destination))
    hidden = os.path.join(folder, f".{name}.{secrets.token_hex(4)}.partial")
    try:
        if os.path.isdir(destination):
            raise FileError("is a directory, not a file to write", path=destination)
        _check_space(folder, size_bytes)
        descriptor = os.open(hidden, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        try:
            try:
                yield descriptor
            finally:
                os.close(descriptor)
            os.replace(hidden, destination)
        except BaseException:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(hidden)
            raise
    except OSError as error:
        raise FileError(f"cannot be written: {error.strerror or error}", path=destination) from error


def _check_space(folder: str, size_bytes: int) -> None:
    state = os.statvfs(folder)
    free_bytes = state.f_bavail * state.f_frsize
    if size_bytes > free_bytes:
        raise FileError(
            "not enough free space",
            path=folder,
            expected=f"{size_bytes} bytes ({size_bytes / 2**20:.1f} MiB)",
            got=f"{free_bytes} bytes ({free_bytes / 2**20:.1f} MiB)",
        )
