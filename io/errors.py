"""Every error that bmoe raises on purpose, in one tree.

    BmoeError                      the world's fault, one clear line; exit code 1
    ├── UsageError                 the request's fault; exit code 2
    ├── FileError                  a file: path, offset_bytes, field, expected, got
    │   ├── FormatError            its content is not what the format says
    │   └── ReadError              bytes that could not be read; slice_name where one is known
    ├── BackendError               no such I/O backend here, and why
    ├── SeamError                  llama.cpp is not what this bmoe was built against
    ├── MemoryBudgetError          what was asked does not fit
    ├── StallError                 the watchdog: a wait of seconds, and for which slice
    ├── DecodeError                llama.cpp refused or failed a batch
    └── Cancelled                  the caller asked to stop

It lives in the lowest layer because all layers raise from it; it knows only names and numbers.
Our own bugs are not here: those are assertions and `RuntimeError`.
"""

from __future__ import annotations


class BmoeError(Exception):
    """Base of every expected failure. `str(error)` is one line fit for a terminal.

    Args:
        message: What happened, in one sentence.
        hint: What to do about it, in one sentence, where a cure is known.
    """

    exit_code = 1

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        text = self.message if self.hint is None else f"{self.message} ({self.hint})"
        return " ".join(text.split())


class UsageError(BmoeError):
    """A request that cannot be served as made: a bad value, or values that exclude each other."""

    exit_code = 2


class FileError(BmoeError):
    """Something about one file.

    Args:
        message: What is wrong.
        path: The file.
        offset_bytes: Where in it, if anywhere in particular.
        field: The field or tensor at that place.
        expected: What should be there.
        got: What is there.
        hint: The cure, where known.
    """

    def __init__(
        self,
        message: str,
        *,
        path: str,
        offset_bytes: int | None = None,
        field: str | None = None,
        expected: object = None,
        got: object = None,
        hint: str | None = None,
    ) -> None:
        where = path if offset_bytes is None else f"{path} at byte {offset_bytes}"
        if field is not None:
            where += f", {field}"
        text = f"{where}: {message}"
        if expected is not None:
            text += f"; expected {expected}"
        if got is not None:
            text += f"{'; ' if expected is None else ', '}got {got}"
        super().__init__(text, hint=hint)
        self.path = path
        self.offset_bytes = offset_bytes
        self.field = field
        self.expected = expected
        self.got = got


class FormatError(FileError):
    """A file whose content breaks its format, or that is not of that format at all."""


class ReadError(FileError):
    """A read that failed or came short for good: never turned into text, always into this.

    Attributes:
        slice_name: What was being read, where the reader knows.
    """

    slice_name: str | None = None

    def __str__(self) -> str:
        text = super().__str__()
        return text if self.slice_name is None else f"{text} (while reading {self.slice_name})"


class BackendError(BmoeError):
    """An I/O backend that was asked for by name and cannot run here."""


class SeamError(BmoeError):
    """The loaded llama.cpp does not have the layout or the behaviour that the hook relies on."""


class MemoryBudgetError(BmoeError):
    """The memory that was asked for is not there."""


class StallError(BmoeError):
    """A compute thread waited for a slice longer than the watchdog allows."""


class DecodeError(BmoeError):
    """`llama_decode` refused or failed a batch."""


class Cancelled(BmoeError):  # noqa: N818 (named for what happened, as asyncio.CancelledError is)
    """The caller cancelled."""

    exit_code = 130
