"""What is to be measured: the options of a run as one record.

Owns names and defaults. Must not know the command line, nor how anything is measured.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from bmoe.tools.iobench.measure import BackendName

DEFAULT_LANES: Final = (1, 2, 4, 8, 12, 16, 24, 32)
DEFAULT_READ_KIB: Final = 4096


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplaySettings:
    """What to replay.

    Attributes:
        trace: The file.
        cache_mib: Budget of the cache.
        policy: Its name.
        max_tokens: How many decoded tokens; None for all.
    """

    trace: str
    cache_mib: int
    policy: str
    max_tokens: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """What to measure.

    Attributes:
        path: The file.
        lanes: Reads in flight, a row each.
        read_kib: Sizes of logical reads, a curve each; empty for none but the expert pattern.
        scatter: Pieces per logical read, a curve each.
        seconds: Per row, shared out over the repeats.
        repeat: Samples per row.
        buffered: Through the page cache.
        compute_load: Busy threads, a curve each.
        backends: A curve each; empty for io_uring where it works and else threads.
        register: Use registered buffers where they work.
        engine_pattern: A curve with reads where the model's experts lie.
        replay: Instead of all rows.
        command: The options as they would be typed.
    """

    path: str
    lanes: tuple[int, ...] = DEFAULT_LANES
    read_kib: tuple[int, ...] = (DEFAULT_READ_KIB,)
    scatter: tuple[int, ...] = (1,)
    seconds: float = 5.0
    repeat: int = 3
    buffered: bool = False
    compute_load: tuple[int, ...] = (0,)
    backends: tuple[BackendName, ...] = ()
    register: bool = True
    engine_pattern: bool = False
    replay: ReplaySettings | None = None
    command: str = ""
