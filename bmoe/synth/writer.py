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

from bmoe.gguf_header import (
    ALIGNMENT_KEY,
    DEFAULT_ALIGNMENT_BYTES,
    MAGIC,
    MAX_ALIGNMENT_BYTES,
    MAX_NAME_BYTES,
    MIN_ALIGNMENT_BYTES,
    is_alignment,
)
from bmoe.io.errors import FileError, UsageError
from bmoe.synth.metadata import i32, string_bytes, text, u16, u32

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from bmoe.gguf_values import MetadataValue

VERSION: Final = 3
_PUSH_BYTES: Final = 32 << 20
_PAGE_BYTES: Final = 4096
_PADDING_KEY: Final = "bmoe.padding"

Chunk = bytes | bytearray | memoryview


def tensor_bytes(kind: GGMLQuantizationType, shape: Sequence[int]) -> int:
    """The size of a tensor whose rows, `shape[0]` values each, are whole blocks of `kind`."""
    block_values, block_bytes = GGML_QUANT_SIZES[kind]
    values = 1
    for extent in shape:
        values *= extent
    return values // block_values * block_bytes


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


def write_split(
    destination: str,
    *,
    metadata: Mapping[str, MetadataValue],
    shards: Sequence[Sequence[PlannedTensor]],
    alignment_bytes: int = DEFAULT_ALIGNMENT_BYTES,
    on_progress: Callable[[int, int], None] | None = None,
) -> tuple[str, int]:
    """Writes a split set: the metadata in the first file, in the others what says where they belong.

    Args:
        destination: What the set is named after; `x.gguf` becomes `x-00001-of-0000N.gguf` and so on.
        metadata: As for `write_model`.
        shards: The tensors of each file, none allowed.
        alignment_bytes: As for `write_model`.
        on_progress: Called with (bytes done, bytes in total) of the file being written.

    Returns:
        The path of the first file, and the size of all.

    Raises:
        UsageError, FileError: As `write_model`; files that are complete stay.
    """
    stem = destination.removesuffix(".gguf")
    count = len(shards)
    paths = [f"{stem}-{number:05d}-of-{count:05d}.gguf" for number in range(1, count + 1)]
    total = 0
    for number, (path, tensors) in enumerate(zip(paths, shards, strict=True)):
        place = {
            "split.no": u16(number),
            "split.count": u16(count),
            "split.tensors.count": i32(sum(map(len, shards))),
        }
        total += write_model(
            path,
            metadata={**metadata, **place} if number == 0 else place,
            tensors=tensors,
            alignment_bytes=alignment_bytes,
            on_progress=on_progress,
        )
    return paths[0], total


def write_model(
    destination: str,
    *,
    metadata: Mapping[str, MetadataValue],
    tensors: Sequence[PlannedTensor],
    alignment_bytes: int = DEFAULT_ALIGNMENT_BYTES,
    phase_bytes: int | None = None,
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
        phase_bytes: Where the first tensor lies within a page of 4 KiB: a multiple of the alignment.
            Metadata is padded for it.
        on_progress: Called with (bytes done, bytes in total), at the end with two equal numbers.

    Returns:
        The size of the file in bytes.

    Raises:
        UsageError: The alignment is no such power of two, or the phase none of its multiples.
        FileError: The drive is too full, or the operating system refused.
    """
    if not is_alignment(alignment_bytes):
        raise UsageError(
            f"alignment {alignment_bytes}: must be a power of two from {MIN_ALIGNMENT_BYTES} to "
            f"{MAX_ALIGNMENT_BYTES} bytes"
        )
    header = _header(metadata, tensors, alignment_bytes)
    if phase_bytes is not None:
        if not 0 <= phase_bytes < _PAGE_BYTES or phase_bytes % alignment_bytes:
            raise UsageError(
                f"phase {phase_bytes}: must be a multiple of {alignment_bytes} below {_PAGE_BYTES}"
            )
        bare = len(_header({**metadata, _PADDING_KEY: text("")}, tensors, alignment_bytes))
        padding = text("." * ((phase_bytes - bare) % _PAGE_BYTES))
        header = _header({**metadata, _PADDING_KEY: padding}, tensors, alignment_bytes)
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
