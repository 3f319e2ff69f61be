"""Runs one program to its end, watching its memory.

Owns the process: started under limits, in a session of its own, sampled while it runs, killed when it takes
too long or whoever waits for it is interrupted. Must not know what it measures.

Memory is sampled from /proc/PID/status: the kernel keeps those sums, while smaps_rollup walks every page
under the lock that page faults need, which a measured program would feel.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from bmoe.io.errors import BmoeError, UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bmoe.bench.caps import Confinement

_SAMPLE_EVERY_S: Final = 0.1
_MOST_OUTPUT_BYTES: Final = 16 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class Finished:
    """What a program did.

    Attributes:
        code: Its exit code, negative after a signal.
        output, errors: What it wrote, up to 16 MiB each.
        wall_s, cpu_s: Of the whole process.
        peak_anon_bytes, peak_file_bytes: The most that was resident, sampled; None when it was over at once.
        timed_out: It was killed.
    """

    code: int
    output: str
    errors: str
    wall_s: float
    cpu_s: float
    peak_anon_bytes: int | None
    peak_file_bytes: int | None
    timed_out: bool


def run_process(
    command: Sequence[str], *, confinement: Confinement, timeout_s: float, stdin: str = ""
) -> Finished:
    """Runs a command.

    Args:
        command: Words.
        confinement: Limits.
        timeout_s: Then it is killed.
        stdin: What it reads.

    Raises:
        BmoeError: It cannot be started.
    """
    launch = [sys.executable, "-m", "bmoe.bench.launch", *confinement.joins, "--"]
    with (
        tempfile.TemporaryFile() as output,
        tempfile.TemporaryFile() as errors,
        tempfile.TemporaryFile() as into,
    ):
        into.write(stdin.encode())
        into.seek(0)
        started = time.monotonic()
        try:
            process = subprocess.Popen(  # noqa: S603 (words of ours or the user's, no shell)
                [*confinement.prefix, *launch, *command],
                stdin=into,
                stdout=output,
                stderr=errors,
                start_new_session=True,
                env=_environment(),
            )
        except OSError as error:
            raise BmoeError(f"{command[0]} cannot be started: {error.strerror}") from error
        peaks: dict[str, int] = {}
        try:
            in_time = _wait(process.pid, timeout_s, peaks)
        except BaseException:
            _kill(process.pid)
            process.wait()
            raise
        if not in_time:
            _kill(process.pid)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        return Finished(
            code=process.returncode,
            output=_text(output),
            errors=_text(errors),
            wall_s=time.monotonic() - started,
            cpu_s=usage.ru_utime + usage.ru_stime,
            peak_anon_bytes=peaks.get("RssAnon"),
            peak_file_bytes=peaks.get("RssFile"),
            timed_out=not in_time,
        )


def check_confinement(confinement: Confinement) -> None:
    """Starts nothing under limits, to see whether that works.

    Raises:
        UsageError: It does not.
    """
    done = run_process([sys.executable, "-c", ""], confinement=confinement, timeout_s=30)
    if done.code:
        reason = (done.errors.strip().splitlines() or ["it failed without a word"])[-1]
        raise UsageError(f"a process cannot be limited by {confinement.how}: {reason}", hint="run as root")


def _environment() -> dict[str, str]:
    # This very bmoe, also when it is not installed; and numpy's threads would spin beside llama.cpp's.
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    paths = [root, *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(dict.fromkeys(p for p in paths if p)),
        "OPENBLAS_NUM_THREADS": os.environ.get("OPENBLAS_NUM_THREADS", "1"),
    }


def _wait(pid: int, timeout_s: float, peaks: dict[str, int]) -> bool:
    """Until the process has ended; False when the time is up."""
    fd = os.pidfd_open(pid)
    deadline = time.monotonic() + timeout_s
    try:
        while (left := deadline - time.monotonic()) > 0:
            if select.select([fd], [], [], min(_SAMPLE_EVERY_S, left))[0]:
                return True
            _sample(pid, peaks)
    finally:
        os.close(fd)
    return False


def _sample(pid: int, peaks: dict[str, int]) -> None:
    with (
        contextlib.suppress(OSError),
        open(f"/proc/{pid}/status", encoding="ascii", errors="replace") as file,
    ):
        for line in file:
            name, _, value = line.partition(":")
            if name in {"RssAnon", "RssFile"}:
                peaks[name] = max(peaks.get(name, 0), int(value.split()[0]) << 10)


def _kill(pid: int) -> None:
    # The session that was made for it: a shell's children go too.
    with contextlib.suppress(OSError):
        os.killpg(pid, signal.SIGKILL)


def _text(file: object) -> str:
    file.seek(0)  # type: ignore[attr-defined]  # tempfile's type has no name
    raw: bytes = file.read(_MOST_OUTPUT_BYTES)  # type: ignore[attr-defined]  # same
    return raw.decode("utf-8", "replace")
