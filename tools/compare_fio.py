"""Compares `bmoe-iobench` with fio: same file, sizes, depths and engine, turn by turn.

    python -m tools.compare_fio FILE [--read-kib 64,1024] [--lanes 1,8] [--rounds 5] [--seconds 1]

Each round runs every pair, fio and iobench one after the other, and who goes first alternates, so that
drift falls on both. fio runs as one job with io_uring, O_DIRECT, registered buffers, random offsets at
whole pages; its figures begin after 0.2 s of ramp. `--fio-memory shmhuge` gives it huge pages, as ours
are; it needs some in /proc/sys/vm/nr_hugepages. What lies outside the window of iobench is said in
bmoe/tools/iobench/measure.py. CPU is user and system time of the process: of fio as a share of its run
time, so its resolution is coarse. Prints a table of medians and, last, JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import statistics
import subprocess
import sys
import time

import uvloop

from bmoe.tools.iobench import Settings, run

_MIB = 1 << 20
_PAGE_BYTES = os.sysconf("SC_PAGESIZE")  # what iobench aligns offsets to


def fio(path: str, read_kib: int, lanes: int, seconds: float, memory: str) -> tuple[float, float, float]:
    """MiB/s, CPU µs per MiB, and median completion latency in µs of one fio run."""
    words = [
        *("fio", "--name=compare", f"--filename={path}", "--readonly", "--rw=randread", "--direct=1"),
        *("--ioengine=io_uring", "--fixedbufs=1", "--norandommap", "--randrepeat=0", "--thread"),
        *(
            f"--bs={read_kib}k",
            f"--blockalign={_PAGE_BYTES}",
            f"--iodepth={lanes}",
            "--time_based",
            f"--runtime={seconds * 1e3:.0f}ms",
        ),
        *("--ramp_time=200ms", f"--iomem={memory}", "--output-format=json"),
    ]
    ran = subprocess.run(words, check=True, capture_output=True, text=True)
    job = json.loads(ran.stdout)["jobs"][0]
    # Not bw_bytes: that counts the reads of the drain at the end, but not the time they took, which
    # is 6 % of a run of 0.8 s with 128 MiB in flight. This agrees with depth / mean latency.
    mib_per_s = job["read"]["total_ios"] * read_kib / 1024 / (job["read"]["runtime"] / 1e3)
    cpu = (job["usr_cpu"] + job["sys_cpu"]) / 100 * 1e6 / mib_per_s
    return mib_per_s, cpu, job["read"]["clat_ns"]["percentile"]["50.000000"] / 1e3


def iobench(path: str, read_kib: int, lanes: int, seconds: float) -> tuple[float, float, float]:
    """The same of one run of bmoe-iobench."""
    settings = Settings(
        path=path, lanes=(lanes,), read_kib=(read_kib,), seconds=seconds, repeat=1, backends=("uring",)
    )
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        (row,) = runner.run(run(settings, lambda done, total: None)).rows  # noqa: ARG005 (nobody looks)
    return row.mib_per_s, row.cpu_user_us_per_mib + row.cpu_system_us_per_mib, row.completion_us.p50


def wait_idle(share: float) -> None:
    """Until the CPUs were idle for that share of half a second: others' work is no result."""

    def ticks() -> tuple[int, int]:
        with open("/proc/stat", encoding="ascii") as file:
            numbers = [int(number) for number in file.readline().split()[1:9]]
        return numbers[3] + numbers[4], sum(numbers)

    while True:
        idle, total = ticks()
        time.sleep(0.5)
        idle_after, total_after = ticks()
        if idle_after - idle >= share * (total_after - total):
            return


def main() -> int:
    """Runs the comparison."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("file")
    parser.add_argument("--read-kib", default="64,256,1024,4096")
    parser.add_argument("--lanes", default="1,4,8,32")
    parser.add_argument("--fio-memory", default="malloc", help="fio's --iomem")
    parser.add_argument(
        "--idle", type=float, default=0.0, help="wait before each pair for this share of idle"
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=1.0)
    asked = parser.parse_args()
    pairs = [(int(kib), int(n)) for kib in asked.read_kib.split(",") for n in asked.lanes.split(",")]
    taken: dict[tuple[int, int], list[tuple[tuple[float, ...], tuple[float, ...]]]] = {p: [] for p in pairs}
    with contextlib.suppress(KeyboardInterrupt):  # what was measured by then is shown
        for turn in range(asked.rounds):
            for pair in pairs:
                wait_idle(asked.idle)
                if turn % 2:
                    ours = iobench(asked.file, *pair, asked.seconds)
                    theirs = fio(asked.file, *pair, asked.seconds, asked.fio_memory)
                else:
                    theirs = fio(asked.file, *pair, asked.seconds, asked.fio_memory)
                    ours = iobench(asked.file, *pair, asked.seconds)
                taken[pair].append((ours, theirs))
            print(f"round {turn + 1} of {asked.rounds}", file=sys.stderr)
    print("| KiB | lanes | iobench MiB/s | fio MiB/s | ratio (min..max) | CPU µs/MiB | fio | p50 µs | fio |")
    print("|---|---|---|---|---|---|---|---|---|")
    for (kib, lanes), rounds in taken.items():
        if not rounds:
            continue
        sides = zip(*rounds, strict=True)
        us, them = ([statistics.median(figure) for figure in zip(*side, strict=True)] for side in sides)
        ratios = sorted(a[0] / b[0] for a, b in rounds)
        spread = f"{statistics.median(ratios):.3f} ({ratios[0]:.2f}..{ratios[-1]:.2f})"
        figures = [f"{us[0]:.0f}", f"{them[0]:.0f}", spread]
        figures += [f"{side[index]:.0f}" for index in (1, 2) for side in (us, them)]
        print(f"| {kib} | {lanes} | {' | '.join(figures)} |")
    print(json.dumps([{"read_kib": k, "lanes": n, "rounds": r} for (k, n), r in taken.items()]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
