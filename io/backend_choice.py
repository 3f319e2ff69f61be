"""Which backend reads: io_uring where it works, threads where it does not.

Owns the order of preference. Must not know what is read.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from bmoe.io.errors import BackendError, UsageError

if TYPE_CHECKING:
    from bmoe.io.backend import ReadBackend

BackendChoice = Literal["auto", "uring", "threads"]


def open_backend(choice: BackendChoice, queue_depth: int) -> ReadBackend:
    """A backend, not started.

    Args:
        choice: `auto` prefers io_uring and keeps the reason in `fallback_reason` when it cannot have it.
        queue_depth: The most reads in the kernel at one time.

    Raises:
        BackendError: `uring` was asked for by name and does not work here.
        UsageError: No such choice.
    """
    if choice not in {"auto", "uring", "threads"}:
        raise UsageError(f"I/O backend {choice!r}, expected auto, uring or threads")
    reason: str | None = None
    if choice != "threads":
        try:
            return _open_uring(queue_depth)
        except BackendError as error:
            if choice == "uring":
                raise
            reason = str(error)
    from bmoe.io.threads import ThreadsBackend  # noqa: PLC0415 (only what runs is imported)

    backend = ThreadsBackend(queue_depth)
    backend.fallback_reason = reason
    return backend


def _open_uring(queue_depth: int) -> ReadBackend:
    try:
        from bmoe.io.uring import UringBackend  # noqa: PLC0415 (it may not be importable)
    except ImportError as error:
        raise BackendError(
            f"io_uring cannot be used: python-liburing does not load: {error}",
            hint="pip install liburing==2026.3.30",
        ) from error
    return UringBackend(queue_depth)
