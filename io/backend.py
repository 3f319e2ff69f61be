"""The seam for reads: what every backend does, in the words the rest of bmoe uses.

Owns the protocol and its records. Must not know how any backend works.

A read is `(file, offset, target, tag)`. The consumer makes its targets once, queues reads by the handful,
submits them with one call and gets tags back, many per wake-up. Nothing here waits, and nothing judges a
result: a short read is a number, and `read_queue` decides what it means.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import asyncio

    from bmoe.io.files import DirectFile

# (tags, results), index by index. A result is the number of bytes read, or -errno.
OnComplete = Callable[[list[int], list[int]], None]


# (file_id, offset_bytes, need_bytes): where a read starts, and how many of its bytes matter.
Place = tuple[int, int, int]


class Target:
    """A prepared destination, reusable for any number of reads, one at a time.

    Opaque to its holder but for these attributes. A backend keeps it alive while a read into it is in
    flight, and with it all that the kernel looks at.

    Attributes:
        buffer_id: The buffer in which it lies.
        view: The bytes that a read fills.
    """

    __slots__ = ("buffer_id", "view")

    def __init__(self, buffer_id: int, view: memoryview) -> None:
        self.buffer_id = buffer_id
        self.view = view


@dataclass(frozen=True, kw_only=True, slots=True)
class BackendStatistics:
    """Counts since the backend was opened.

    Attributes:
        reads: Reads accepted.
        read_bytes: Bytes that arrived.
        submissions: Times that reads were handed over (system calls, for io_uring).
        completions: Reads that came back, well or not.
        errors: Completions with a negative result.
        wake_ups: Times the event loop was woken for completions.
        max_in_flight: Most reads that the kernel (or the pool) had at one time.
        submit_ns: Time spent handing reads over, in total.
    """

    reads: int
    read_bytes: int
    submissions: int
    completions: int
    errors: int
    wake_ups: int
    max_in_flight: int
    submit_ns: int


class ReadBackend(Protocol):
    """Asynchronous positioned reads. All methods are for the event loop's thread."""

    @property
    def name(self) -> str:
        """`uring`, `threads` or `null`."""

    @property
    def queue_depth(self) -> int:
        """The most reads in the kernel at one time; more wait inside the backend."""

    @property
    def registered(self) -> bool:
        """True iff every buffer added for registration so far is registered with the kernel."""

    @property
    def unregistered_reason(self) -> str | None:
        """Why `registered` is False; None when it is True."""

    @property
    def fallback_reason(self) -> str | None:
        """Why this backend and not a better one, when `auto` had to settle for it."""

    @property
    def in_flight(self) -> int:
        """Reads accepted whose completion has not been delivered."""

    def start(self, loop: asyncio.AbstractEventLoop, on_complete: OnComplete) -> None:
        """Deliver completions on `loop`.

        `on_complete` is called once per wake-up with everything that has completed. May be called again,
        with nothing in flight, to hand the backend to another consumer or loop.
        """

    def add_file(self, file: DirectFile) -> int:
        """The id of `file` for `read`; the same one when it was added before. Stays open till `aclose`."""

    def file(self, file_id: int) -> DirectFile:
        """The file behind an id."""

    def add_buffer(self, view: memoryview, *, register: bool = True) -> int:
        """The id of a stretch of memory for `prepare`.

        Never fails for want of rights or of locked memory: the buffer then works unregistered.

        Args:
            view: Writable and contiguous; to be registered, at most 1 GiB and touched before
                (see `AnonymousMemory.touch`).
            register: False for memory that is read into once, not worth the locked memory.
        """

    def remove_buffer(self, buffer_id: int) -> None:
        """Let a stretch of memory go. No read into it may be in flight, and its targets are void."""

    def prepare(self, buffer_id: int, view: memoryview) -> Target:
        """A target for `view`, which lies inside that buffer."""

    def read(self, file_id: int, offset_bytes: int, target: Target, tag: int) -> None:
        """Queue a read that fills `target.view` from `offset_bytes` on. Never blocks.

        Args:
            file_id: From `add_file`.
            offset_bytes: A multiple of the file's block size.
            target: Its length is a multiple of the block size, its address of the memory alignment.
            tag: Comes back with the completion; 0 to 2^63 - 1. No two reads in flight share one.
        """

    def read_many(self, tags: Sequence[int], places: Sequence[Place], targets: Sequence[Target]) -> None:
        """Queue several reads, index by index: `read` in one call. A place's last item is not looked at."""

    def submit(self) -> None:
        """Hand over all that is queued, as far as the queue depth allows. Never blocks."""

    async def aclose(self) -> None:
        """Stop: reads not yet handed over complete with -ECANCELED, the others are waited for.

        The kernel may write into a target until its completion was reaped, so no buffer may be freed
        before this has returned. Idempotent.
        """

    def statistics(self) -> BackendStatistics:
        """Counts so far."""
