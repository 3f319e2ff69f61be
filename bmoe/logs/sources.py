"""Log files as pieces of whole lines: plain, gzip or zstd, growing, torn or broken.

Owns finding files, unpacking, where a line ends, and how far a file was read. Must not know what a line
says, but for one thing: a last line without its line feed is whole when it is a whole JSON object.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import stat
import zlib
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, Self

import zstandard

from bmoe.io.errors import FileError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

MAX_LINE_BYTES: Final = 8 << 20
READ_BYTES: Final = 64 << 20  # no line that is read is longer
TOO_LONG: Final = f"longer than {MAX_LINE_BYTES >> 20} MiB"
KEPT_CHARS: Final = 500  # of a line that is rejected
_KEPT_BYTES: Final = 4 * KEPT_CHARS
_MOST_LINES: Final = 1 << 20  # of a piece, since lines take memory even when they are empty
_UNPACK_BYTES: Final = 4 << 20
# Input per call, since the output has no limit: a bomb of zstd unpacks this to 128 MiB, one of gzip to 4.
_PACKED_BYTES: Final = 4 << 10
_HEAD_BYTES: Final = 4 << 10
_MAGIC: Final = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd"}
_SUFFIXES: Final = (".jsonl", ".ndjson", ".json", ".log", ".csv")
_PACKED_SUFFIXES: Final = (".gz", ".zst")


@dataclass(frozen=True, kw_only=True)
class Piece:
    """Some whole lines of a file.

    Attributes:
        data: The lines with their line feeds, which only a file's last one may lack. A view is of a buffer
            that the next piece will fill.
        offset_bytes: Of the first one, in the unpacked file.
        line: Number of the first one, from 1.
        fault: Why these bytes are no lines to be read; None for lines. They are cut to a beginning then.
        skipped_bytes: With a fault, how much was cut off.
        lines: How many line feeds; with a fault also those cut off.
    """

    data: bytes | memoryview
    offset_bytes: int
    line: int
    lines: int
    fault: str | None = None
    skipped_bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class FileRecord:
    """A row of `files`, without its counts.

    Attributes:
        size_bytes: When it was read to its end; -1 while it was not.
    """

    packing: str
    inode: int
    size_bytes: int
    mtime_ns: int
    head_digest: str
    head_bytes: int
    bytes_done: int
    lines_done: int
    finished: bool


class LogFile:
    """A file from where it was left. A context manager.

    Args:
        path: Links resolved.
        before: How far it was read; None for never.
        buffer: What to read into, not empty. One for many files saves the kernel from finding memory again
            and again.

    Attributes:
        record: What to remember; valid for everything that `pieces` has given so far.
        size_bytes: Of the file when it was opened.
        raw_bytes: Read of the file itself, for progress.
        unchanged: There is nothing new in it.
        again: It is what it was but has to be read from its beginning, all that was said of it included.

    Raises:
        FileError: It cannot be read or is no file.
    """

    def __init__(self, path: str, before: FileRecord | None, buffer: bytearray) -> None:
        self.path = path
        self._buffer = buffer
        try:
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
        except (OSError, ValueError) as error:
            raise _unreadable(path, error) from None
        try:
            self._begin(before)
        except OSError as error:
            self.close()
            raise _unreadable(path, error) from None
        except BaseException:
            self.close()
            raise

    def _begin(self, before: FileRecord | None) -> None:
        now = os.fstat(self._fd)
        if not stat.S_ISREG(now.st_mode):
            raise FileError("is not a file", path=self.path)
        head = os.pread(self._fd, _HEAD_BYTES, 0)
        packing = next((name for magic, name in _MAGIC.items() if head.startswith(magic)), "plain")
        same = (
            before is not None
            and before.packing == packing
            and now.st_size >= max(before.size_bytes, before.bytes_done if packing == "plain" else 0)
            and before.head_digest == hashlib.sha256(head[: before.head_bytes]).hexdigest()
        )
        as_it_was = before is not None and (before.inode, before.size_bytes, before.mtime_ns) == (
            now.st_ino,
            now.st_size,
            now.st_mtime_ns,
        )
        whole = before is not None and before.finished and before.size_bytes == now.st_size
        self.unchanged = same and (as_it_was or whole)
        continued = same and packing == "plain"
        self.again = same and not continued
        self.record = FileRecord(
            packing=packing,
            inode=now.st_ino,
            size_bytes=-1,
            mtime_ns=now.st_mtime_ns,
            head_digest=hashlib.sha256(head).hexdigest(),
            head_bytes=len(head),
            bytes_done=before.bytes_done if before is not None and continued else 0,
            lines_done=before.lines_done if before is not None and continued else 0,
            finished=False,
        )
        self.raw_bytes = self.record.bytes_done
        self.size_bytes = now.st_size
        self._broken: str | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def pieces(self) -> Iterator[Piece]:
        """What is new in it, in pieces of a few MiB, as far as it is whole.

        Raises:
            FileError: A read failed.
        """
        try:
            yield from self._pieces()
        except OSError as error:
            raise _unreadable(self.path, error) from None

    def _pieces(self) -> Iterator[Piece]:
        if self.record.packing == "plain":
            yield from self._plain_pieces()
            whole = self.record.bytes_done == self.raw_bytes
        else:
            yield from self._packed_pieces()
            whole = self._broken is None
        self.record = replace(self.record, size_bytes=self.size_bytes, finished=whole)

    def _plain_pieces(self) -> Iterator[Piece]:
        """Every read begins at a line, so that nothing has to be put together."""
        buffer = self._buffer
        while size := os.preadv(self._fd, [buffer], self.record.bytes_done):
            self.raw_bytes = self.record.bytes_done + size
            end = buffer.rfind(b"\n", 0, size) + 1
            if end:
                lines = buffer.count(b"\n", 0, end)
                while lines > _MOST_LINES and (half := buffer.rfind(b"\n", 0, end // 2) + 1):
                    end, lines = half, buffer.count(b"\n", 0, half)
                yield self._piece(memoryview(buffer)[:end], lines=lines)
            elif size < len(buffer):
                if _is_object(data := bytes(buffer[:size])):
                    yield self._piece(data, lines=0)
                return
            elif size < READ_BYTES:
                buffer = bytearray(READ_BYTES)
            else:
                end = self._line_end(self.raw_bytes)
                if not end:
                    return
                kept = bytes(buffer[:_KEPT_BYTES])
                yield self._piece(
                    kept, lines=1, fault=TOO_LONG, lost=end - self.record.bytes_done - len(kept)
                )

    def _line_end(self, start: int) -> int:
        """Where the line ends that goes on at `start`; 0 if it does not."""
        while data := os.pread(self._fd, _UNPACK_BYTES, start):
            end = data.find(b"\n") + 1
            if end:
                return start + end
            start += len(data)
            self.raw_bytes = start
        return 0

    def _packed_pieces(self) -> Iterator[Piece]:
        rest = b""  # the beginning of a line
        lost = 0  # of it, bytes that are not in `rest`, because it is too long
        for unpacked in self._unpacked():
            data = unpacked
            end = data.find(b"\n") + 1
            if len(rest) + lost + (end or len(data)) > MAX_LINE_BYTES:
                lost += len(rest) + (end or len(data))
                rest = (rest + (data[:end] if end else data))[:_KEPT_BYTES]
                lost -= len(rest)
                if not end:
                    continue
                yield self._piece(rest, lines=1, fault=TOO_LONG, lost=lost)
                data, rest, lost = data[end:], b"", 0
            end = data.rfind(b"\n") + 1
            if end:
                yield self._piece(rest + data[:end], lines=data.count(b"\n"))
                rest = data[end:]
            else:
                rest += data
        if self._broken is not None:
            kept = rest[:_KEPT_BYTES]
            yield self._piece(kept, lines=0, fault=self._broken, lost=lost + len(rest) - len(kept))
        elif rest:
            yield self._piece(rest, lines=0, fault=TOO_LONG if lost else None, lost=lost)

    def _piece(
        self, data: bytes | memoryview, *, lines: int, fault: str | None = None, lost: int = 0
    ) -> Piece:
        piece = Piece(
            data=data,
            offset_bytes=self.record.bytes_done,
            line=self.record.lines_done + 1,
            lines=lines,
            fault=fault,
            skipped_bytes=lost,
        )
        self.record = replace(
            self.record,
            bytes_done=self.record.bytes_done + len(data) + lost,
            lines_done=self.record.lines_done + piece.lines,
        )
        return piece

    def _unpacked(self) -> Iterator[bytes]:
        """The content in pieces of some MiB; what breaks it off is left in `_broken`."""
        gathered = bytearray()
        decoder: Any = None
        while data := os.pread(self._fd, _PACKED_BYTES, self.raw_bytes):
            self.raw_bytes += len(data)
            while data:
                decoder = decoder or _decoder(self.record.packing)
                try:
                    gathered += decoder.decompress(data)
                except (zlib.error, zstandard.ZstdError) as error:
                    yield bytes(gathered)
                    self._broken = f"the {self.record.packing} archive is broken here: {error}"
                    return
                data = b""
                if decoder.eof:  # archives may be set one after the other; gzip's may be padded
                    data = decoder.unused_data.lstrip(b"\0")
                    decoder = None
            if len(gathered) >= _UNPACK_BYTES:
                yield from _cut(gathered)
                gathered.clear()
        yield from _cut(gathered)
        if decoder is not None:
            self._broken = f"the {self.record.packing} archive is cut off here"


def find_files(paths: Iterable[str], *, missing_ok: bool = False) -> tuple[list[str], list[str]]:
    """The files that are meant, links resolved, each once.

    Args:
        paths: Files, which are taken whatever they are, and folders, which are searched for what may be a
            log by its name and first line.
        missing_ok: Whether a path may not exist yet.

    Returns:
        The files, and those in folders that have a log's name but are something else.

    Raises:
        FileError: A path does not exist.
    """
    found: dict[str, None] = {}
    others: dict[str, None] = {}
    for path in paths:
        if os.path.isdir(path):
            for folder, folders, names in os.walk(path):
                folders.sort()
                for name in sorted(names):
                    if _has_log_name(name):
                        file = os.path.realpath(os.path.join(folder, name))
                        (found if _begins_like_a_log(file) else others)[file] = None
        elif os.path.exists(path):
            found[os.path.realpath(path)] = None
        elif not missing_ok:
            raise FileError("there is no such file", path=path)
    return list(found), [file for file in others if file not in found]


def _has_log_name(name: str) -> bool:
    stem, suffix = os.path.splitext(name)
    return (stem if suffix in _PACKED_SUFFIXES else name).endswith(_SUFFIXES)


def _begins_like_a_log(path: str) -> bool:
    """Whether to read a file that nobody named: a JSON object on its first line, or a CSV of ours."""
    try:
        with LogFile(path, None, bytearray()) as file:
            if not file.size_bytes:
                return True
            packed = file.record.packing != "plain"
            head = next(file._unpacked(), b"") if packed else os.pread(file._fd, _HEAD_BYTES, 0)
    except (FileError, OSError):
        return True  # to be reported as what it is
    line = head.lstrip()[:_HEAD_BYTES].split(b"\n")[0].rstrip()
    return (line[:1] == b"{" and len(line) > 1) or line.startswith((b"# bmoe_metrics", b"# model=", b"step,"))


def _decoder(packing: str) -> Any:
    return zlib.decompressobj(31) if packing == "gzip" else zstandard.ZstdDecompressor().decompressobj()


def _cut(data: bytearray) -> Iterator[bytes]:
    for start in range(0, len(data), _UNPACK_BYTES):
        yield bytes(data[start : start + _UNPACK_BYTES])


def _is_object(line: bytes) -> bool:
    """Whether nothing can follow: of a line that is being written no beginning is a whole object."""
    if line[:1] == b"{" and line.rstrip()[-1:] == b"}":
        with contextlib.suppress(ValueError, RecursionError):
            return isinstance(json.loads(line), dict)
    return False


def _unreadable(path: str, error: Exception) -> FileError:
    reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return FileError(f"cannot be read: {reason}", path=path)
