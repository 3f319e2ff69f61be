"""Runs one side in a fresh process and takes what it reports.

Owns how a side becomes a process: page cache, limits, command, result. Must not know rounds, nor whether the
machine was fit for it.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from bmoe.bench.caps import Limits, confined
from bmoe.bench.external import find_rates, words_of
from bmoe.bench.process import run_process
from bmoe.bench.state import DROPPED_SHARE, WARM_SHARE, cached_share
from bmoe.io import available_bytes
from bmoe.tools.iobench import page_cache

if TYPE_CHECKING:
    from bmoe.bench.process import Finished
    from bmoe.bench.sides import Side

_PIECE_BYTES: Final = 8 << 20
_CHARACTERS_PER_TOKEN: Final = 4
_ROOM: Final = 0.9
MIB: Final = 1 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class Execution:
    """What one process gave.

    Attributes:
        figures: Its measurements; None when it failed.
        error: Why, in one line.
        cpu_s, wall_s: Of the process.
    """

    figures: dict[str, Any] | None
    error: str | None
    cpu_s: float
    wall_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Executor:
    """Runs sides.

    Attributes:
        paths: The model's files.
        text: What prompts and fed tokens are cut from.
        timeout_s: For one run.
        drive_seconds: For the drive's bandwidth.
    """

    paths: tuple[str, ...]
    text: str
    timeout_s: float = 1800
    drive_seconds: float = 3

    def prepare(self, side: Side) -> None:
        """Brings the file into the page cache, or out of it, as the side wants it."""
        if side.page_cache == "warm":
            self._warm()
        elif side.page_cache == "dropped":
            self._drop()

    def execute(self, side: Side, *, route_trace: str | None = None) -> Execution:
        """One run.

        Args:
            side: Which.
            route_trace: Records routing there; the figures are then not comparable.

        Raises:
            UsageError: Its limits cannot be set here.
        """
        limits = Limits(
            memory_bytes=side.cap_bytes, drive_bytes_per_s=side.drive_bytes_per_s, path=self.paths[0]
        )
        with confined(limits) as confinement:
            if side.kind == "external":
                assert side.command is not None
                values = {
                    "model": side.model,
                    "prompt": self.text[: side.prompt_tokens * _CHARACTERS_PER_TOKEN],
                    "n": str(side.tokens),
                    "threads": str(side.threads),
                }
                command, job = words_of(side.command, values), ""
            else:
                command = [sys.executable, "-m", "bmoe.bench.child"]
                job = json.dumps(
                    {
                        "side": side.as_json(),
                        "text": self.text,
                        "drive_seconds": self.drive_seconds,
                        "route_trace": route_trace,
                    }
                )
            done = run_process(command, confinement=confinement, timeout_s=self.timeout_s, stdin=job)
        figures, error = self._result(side, done)
        if figures is not None:
            for name, peak in (("anon", done.peak_anon_bytes), ("file", done.peak_file_bytes)):
                figures[f"peak_{name}_mib"] = None if peak is None else peak / MIB
        return Execution(figures=figures, error=error, cpu_s=done.cpu_s, wall_s=done.wall_s)

    def _result(self, side: Side, done: Finished) -> tuple[dict[str, Any] | None, str | None]:
        if done.timed_out:
            return None, f"took longer than {self.timeout_s:g} s"
        if done.code:
            return None, _reason(side, done)
        if side.kind == "external":
            assert side.pattern is not None
            found: dict[str, Any] = dict(find_rates(side.pattern, f"{done.errors}\n{done.output}"))
            if "decode_tok_per_s" not in found:
                return None, f"{side.pattern!r} finds no number in what it wrote"
            return found, None
        try:
            figures: dict[str, Any] = json.loads(done.output.splitlines()[-1])
        except (IndexError, ValueError):
            return None, "it wrote no result"
        return figures, None

    def _warm(self) -> None:
        share = cached_share(self.paths)
        size = sum(os.stat(path).st_size for path in self.paths)
        room = available_bytes()
        if share is None or share >= WARM_SHARE or (room is not None and size * (1 - share) > _ROOM * room):
            return  # unknown, done, or in vain: pages would push each other out
        buffer = bytearray(_PIECE_BYTES)
        for path in self.paths:
            with open(path, "rb", buffering=0) as file:
                while file.readinto(buffer):
                    pass

    def _drop(self) -> None:
        for path in self.paths:
            fd = os.open(path, os.O_RDONLY)
            try:
                page_cache.drop(fd)
            finally:
                os.close(fd)
        share = cached_share(self.paths)
        if share is not None and share > DROPPED_SHARE and os.geteuid() == 0:
            try:
                with open("/proc/sys/vm/drop_caches", "w", encoding="ascii") as file:
                    file.write("1")
            except OSError:
                return  # in a container; the entry state says that pages are left


def _reason(side: Side, done: Finished) -> str:
    if done.code < 0:
        name = signal.Signals(-done.code).name
        hint = ": out of memory under its cap" if name == "SIGKILL" and side.cap_bytes is not None else ""
        return f"ended by {name}{hint}"
    lines = (
        done.errors.strip().splitlines() or done.output.strip().splitlines() or ["it failed without a word"]
    )
    return lines[-1][:500]
