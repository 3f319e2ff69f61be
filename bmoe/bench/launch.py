"""`python -m bmoe.bench.launch [FILE]... -- COMMAND...`: joins control groups, then becomes the command.

Owns the last steps before a measured program runs: it dies with whoever started it, and its process number is
written into each FILE (`cgroup.procs`). Must import nothing that costs memory: what it touches is charged to
the group. Joining comes before the program starts, so that all it reads counts.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Never returns."""
    at = sys.argv.index("--")
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    for path in sys.argv[1:at]:
        with open(path, "w", encoding="ascii") as file:
            file.write(str(os.getpid()))
    command = sys.argv[at + 1 :]
    try:
        os.execvp(command[0], command)  # noqa: S606 (a command of the user's, as words)
    except OSError as error:
        sys.exit(f"{command[0]}: {error.strerror}")


if __name__ == "__main__":
    main()
