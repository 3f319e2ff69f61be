"""The speed table of docs/benchmarks.md: streaming against resident runs and against the physical bounds.

Every side runs in a fresh process; sides are interleaved (A B C A B C ...), so that a drifting machine
touches all alike; medians and ratios are printed, the last line of stdout is JSON. Text is fed token by
token instead of the model's own choices, so that routing varies as in real use. Outside the timing
window: loading, tokenizing, and a first generation of the same length that fills the cache (steady state).

Bounds, per token (docs/benchmarks.md explains them):
  layered  D + sum over layers of max(read time, E / layers)
  ideal    max(missed bytes / bandwidth, D + E)
E is the time in expert matmuls and D the rest, both from the side whose experts are all cached. The read
time of a layer is taken twice: its bytes over the drive's full bandwidth, and what a burst of that many
reads takes on the idle drive ("at depth"); both are measured in the same interleaving.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import random
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import uvloop

if TYPE_CHECKING:
    from collections.abc import Iterator

    from bmoe.session import Session

MIB = 1 << 20
BURSTS = (1, 2, 3, 4, 6, 9, 12, 16, 24, 32)
ROOT = Path(__file__).resolve().parent.parent


# --- one side, in its own process ------------------------------------------------------------------------


async def run_side(side: dict[str, Any]) -> dict[str, Any]:
    """Decodes (and prefills) once and reports raw figures."""
    from bmoe.config import GenerateRequest, SessionConfig
    from bmoe.session import Session

    if side.get("drop_cache"):
        drop_page_cache(side["model"])
    config = SessionConfig(
        model_path=side["model"],
        threads=side["threads"],
        mode="resident" if side["resident"] else "stream",
        repack=side.get("repack", False),
        overlap=side.get("overlap", True),
        policy=side.get("policy", "aged"),
        cache_bytes=side["cache_mib"] * MIB if side.get("cache_mib") else None,
        queue_depth=side.get("queue_depth"),
        context_tokens=side["prompt_tokens"] + side["tokens"] + 64,
    )
    session = await Session.open(config)
    async with session:
        tokens = session.model.tokenize(side["text"])
        while len(tokens) < side["prompt_tokens"] + side["tokens"]:
            tokens += tokens
        prompt = b"".join(map(session.model.piece, tokens[: side["prompt_tokens"]])).decode("utf-8", "ignore")
        forced = tuple(tokens[side["prompt_tokens"] : side["prompt_tokens"] + side["tokens"]])
        for _ in range(2 if session.streaming and side["tokens"] > 1 else 1):
            events = [
                e
                async for e in session.generate(
                    GenerateRequest(prompt=prompt, n_predict=len(forced), forced=forced, ignore_eog=True)
                )
            ]
        steps = [e.metrics for e in events]
        summary = session.summary
        assert summary is not None
        out: dict[str, Any] = {
            "load_s": session.load_report.wall_ns / 1e9,
            "prefill_s": summary.prefill_ns / 1e9,
            "prompt_tokens": summary.prompt_tokens,
            "peak_rss_mib": (summary.peak_rss_bytes or 0) / MIB,
        }
        if steps:
            wall_s = sum(m.wall_ns for m in steps) / 1e9
            out |= {
                "tok_s": len(steps) / wall_s,
                "cpu_s_tok": sum(m.cpu_ns for m in steps) / 1e9 / len(steps),
                "major_faults_tok": sum(m.major_faults for m in steps) / len(steps),
            }
        if session.streaming:
            out["prefill_mib"] = sum(m.read_bytes or 0 for m in session.prefill_metrics) / MIB
            if steps:
                read_bytes = sum(m.read_bytes or 0 for m in steps)
                asked = session.streaming.streamer.request_bytes
                out |= {
                    "mib_tok": read_bytes / MIB / len(steps),
                    "hit": sum(m.hits or 0 for m in steps) / max(1, sum(m.lookups or 0 for m in steps)),
                    "stall_ms_tok": sum(m.stall_ns or 0 for m in steps) / 1e6 / len(steps),
                    "experts_s_tok": sum(m.experts_ns or 0 for m in steps) / 1e9 / len(steps),
                    "gib_s": read_bytes / wall_s / (1 << 30),
                    "submit_us_p50": (summary.submit_latency_ns_p50 or 0) / 1e3,
                    "layers": session.effective.moe_layers,
                    "measured_tokens": len(steps),
                    "layer_reads": last_requests(asked, sum(m.reads or 0 for m in steps), session),
                }
    return out


def last_requests(asked_bytes: list[int], reads: int, session: Session) -> dict[int, int]:
    """How many of the last announcements asked for how many slices, as far back as `reads` goes."""
    assert session.streaming is not None
    tensors = session.streaming.engine.tensors
    mean_bytes = sum(t.slice_bytes for t in tensors) / len(tensors)
    counts: dict[int, int] = {}
    for asked in reversed(asked_bytes):
        if reads <= 0:
            break
        slices = round(asked / mean_bytes)
        counts[slices] = counts.get(slices, 0) + 1
        reads -= slices
    return counts


def drop_page_cache(path: str) -> None:
    """Asks the kernel to forget the file's pages."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)


async def measure_drive(side: dict[str, Any]) -> dict[str, Any]:  # noqa: PLR0915 (one measurement, top to bottom)
    """Random slice-sized direct reads through the engine's own backend, deep queue: bandwidth and CPU."""
    from bmoe.gguf_file import read_gguf
    from bmoe.io import DirectFile, ReadQueue, SlotMemory, open_backend
    from bmoe.model import lay_out
    from bmoe.pipeline.slots import slot_bytes_for

    layout = lay_out(read_gguf(side["model"]))
    file = DirectFile.open(side["model"])
    size = slot_bytes_for(layout.tensors[0].slice_bytes, file.block_bytes)
    depth = 32
    memory = SlotMemory(size, depth)
    while memory.populate_next_chunk() is not None:
        pass
    backend = open_backend("auto", depth)
    queue = ReadQueue(backend, file.block_bytes, depth)
    loop = asyncio.get_running_loop()
    done = asyncio.Event()
    choose = random.Random(side["seed"])  # noqa: S311 (offsets, not secrets)
    left = 0
    again = 0

    def place() -> tuple[int, int, int]:
        blocks = (file.size_bytes - size) // file.block_bytes
        return (file_id, choose.randrange(blocks) * file.block_bytes, size)

    def start(tags: list[int]) -> None:
        queue.read_many(tags, [place() for _ in tags], [targets[t] for t in tags])
        queue.submit()

    def on_done(tags: list[int]) -> None:
        nonlocal left, again
        left -= len(tags)
        more = tags[: min(again, len(tags))]
        again -= len(more)
        if more:
            start(more)
        if left == 0:
            done.set()

    def on_error(_: int, error: Exception) -> None:
        raise error

    async def burst(reads: int, total: int) -> float:
        nonlocal left, again
        left, again = total, total - reads
        done.clear()
        t0 = time.monotonic()
        start(list(range(reads)))
        await done.wait()
        return time.monotonic() - t0

    file_id = queue.add_file(file)
    buffer = [backend.add_buffer(memory.chunk_view(c)) for c in range(memory.chunks)]
    targets = [backend.prepare(buffer[s // memory.chunk_slots], memory.slot_view(s)) for s in range(depth)]
    queue.start(loop, on_done, on_error)
    cpu0 = time.process_time()
    wall = await burst(depth, side["reads"])
    cpu = time.process_time() - cpu0
    bursts = {n: statistics.median([await burst(n, n) for _ in range(15)]) for n in BURSTS}
    cpu0 = time.process_time()
    for _ in range(50):
        await burst(12, 12)
    burst_cpu = time.process_time() - cpu0
    await queue.aclose()
    memory.close()
    mib = side["reads"] * size / MIB
    return {
        "gib_s": mib / 1024 / wall,
        "cpu_us_per_mib": cpu * 1e6 / mib,
        "read_kib": size / 1024,
        "registered": backend.registered,
        "direct": file.direct,
        "burst_s": bursts,
        "burst_cpu_us_per_mib": burst_cpu * 1e6 / (50 * 12 * size / MIB),
    }


# --- memory caps ---------------------------------------------------------------------------------------


@contextlib.contextmanager
def memory_cap(limit_bytes: int | None) -> Iterator[Path | None]:
    """A cgroup with a memory limit, v1 or v2; None when no limit is asked for."""
    if limit_bytes is None:
        yield None
        return
    v1, v2 = Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")
    base, limit = (v1, "memory.limit_in_bytes") if v1.is_dir() else (v2, "memory.max")
    group = base / f"bmoe-bench-{os.getpid()}"
    group.mkdir()
    try:
        (group / limit).write_text(str(limit_bytes))
        yield group / "cgroup.procs"
    finally:
        with contextlib.suppress(OSError):
            group.rmdir()


def run_child(side: dict[str, Any], timeout_s: float) -> dict[str, Any]:
    """Runs one side in a fresh process."""
    quiet = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}  # as the command line does
    with memory_cap(side.get("cap_bytes")) as procs:
        command = [sys.executable, "-m", "tools.bench_streaming", "--side", json.dumps(side)]
        if procs is not None:
            command = ["sh", "-c", f'echo $$ > {procs} && exec "$@"', "sh", *command]
        done = subprocess.run(
            command, capture_output=True, text=True, cwd=ROOT, timeout=timeout_s, check=False, env=quiet
        )
        time.sleep(0.2)
    if done.returncode:
        raise SystemExit(f"{side['name']}: exit {done.returncode}\n{done.stderr}")
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


# --- the table -------------------------------------------------------------------------------------------


def sides_of(options: argparse.Namespace) -> list[dict[str, Any]]:
    """The matrix, in interleaving order."""
    common = {
        "model": str(options.model),
        "text": options.text.read_text(encoding="utf-8")[:100_000],
        "threads": options.threads,
        "prompt_tokens": options.prompt_tokens,
        "tokens": options.tokens,
    }
    sides: list[dict[str, Any]] = [{**common, "name": "drive", "drive": True, "reads": 600}]
    sides += [
        {**common, "name": "resident", "resident": True, "repack": True},
        {**common, "name": "resident, no repacking", "resident": True, "repack": False},
        {**common, "name": "everything cached", "resident": False, "cache_mib": 1 << 20},
    ]
    for cache in options.caches:
        sides.append({**common, "name": f"cache {cache} MiB", "resident": False, "cache_mib": cache})
        if options.serial:
            serial = {
                **common,
                "name": f"cache {cache} MiB, no overlap",
                "resident": False,
                "cache_mib": cache,
            }
            sides.append({**serial, "overlap": False})
    if options.cap_mb:
        cap = options.cap_mb * 1000 * 1000
        # Pages cached for another process are not charged to the group: without them the cap is a cap.
        few = {
            **common,
            "tokens": options.capped_tokens,
            "cap_bytes": cap,
            "prompt_tokens": 4,
            "drop_cache": True,
        }
        sides.append(
            {**few, "name": f"resident, {options.cap_mb} MB cgroup", "resident": True, "repack": False}
        )
        streamed = {**few, "tokens": options.tokens, "resident": False, "cache_mib": options.caches[0]}
        sides.append({**streamed, "name": f"cache {options.caches[0]} MiB, {options.cap_mb} MB cgroup"})
    if options.prefill:
        wide = {**common, "tokens": 1, "prompt_tokens": options.prefill}
        sides.append(
            {**wide, "name": f"prefill {options.prefill}, resident", "resident": True, "repack": False}
        )
        streamed = {**wide, "name": f"prefill {options.prefill}, cache 1000 MiB", "resident": False}
        sides.append({**streamed, "cache_mib": 1000, "drop_cache": True})
    return sides


def main() -> int:
    """Parses, runs the rounds, prints the table and one line of JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?", type=Path)
    parser.add_argument("--text", type=Path, default=ROOT / "docs" / "architecture.md")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--prompt-tokens", type=int, default=32)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--caches", type=lambda s: [int(x) for x in s.split(",")], default=[500, 1000, 2000])
    parser.add_argument("--cap-mb", type=int, default=0, help="memory cgroup for the capped sides, in MB")
    parser.add_argument("--capped-tokens", type=int, default=6, help="the capped resident side is slow")
    parser.add_argument("--prefill", type=int, default=0, help="prompt length of the prefill sides")
    parser.add_argument("--serial", action="store_true", help="also without overlap")
    parser.add_argument("--only", help="comma list of substrings of side names")
    parser.add_argument("--side", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side:
        side = json.loads(options.side)
        work = measure_drive(side) if side.get("drive") else run_side(side)
        print(json.dumps(uvloop.run(work)))
        return 0
    if options.model is None:
        parser.error("a model is needed")
    sides = sides_of(options)
    if options.only:
        sides = [s for s in sides if any(part in s["name"] for part in options.only.split(","))]
    results: dict[str, list[dict[str, Any]]] = {s["name"]: [] for s in sides}
    for round_number in range(options.rounds):
        for side in sides:
            print(f"round {round_number + 1}: {side['name']}", file=sys.stderr, flush=True)
            results[side["name"]].append(run_child({**side, "seed": round_number}, 1800))
    print(table(results))
    print(json.dumps({"argv": sys.argv[1:], "load_average": os.getloadavg(), "results": results}))
    return 0


def median(rows: list[dict[str, Any]], key: str) -> float | None:
    """Median over rounds of a figure, None where it was not measured."""
    values = [r[key] for r in rows if r.get(key) is not None]
    return statistics.median(values) if values else None


HEADINGS = (
    "side",
    "tok/s (min to max)",
    "MiB/token",
    "GiB/s",
    "hit",
    "stall ms",
    "CPU ms/token",
    "submit us",
    "layered",
    "of it",
    "at depth",
    "of it",
    "ideal",
)
FIGURES = (
    ("mib_tok", 1.0, ".1f"),
    ("gib_s", 1.0, ".2f"),
    ("hit", 1.0, ".3f"),
    ("stall_ms_tok", 1.0, ".1f"),
    ("cpu_s_tok", 1e3, ".1f"),
    ("submit_us_p50", 1.0, ".0f"),
)


def table(results: dict[str, list[dict[str, Any]]]) -> str:
    """Markdown: medians, spread of tok/s, and the bounds where they can be had."""
    drive = results.get("drive", [])
    lines = ["| " + " | ".join(HEADINGS) + " |", "|---" * len(HEADINGS) + "|"]
    for name, rows in results.items():
        rates = [r["tok_s"] for r in rows if "tok_s" in r]
        if not rates or name.startswith("prefill"):
            continue
        cells = [name, f"{statistics.median(rates):.1f} ({min(rates):.1f} to {max(rates):.1f})"]
        for key, scale, form in FIGURES:
            value = median(rows, key)
            cells.append("" if value is None else format(value * scale, form))
        cells += (
            bound_cells(rates, rows, results)
            if rows[0].get("layer_reads") and "cgroup" not in name
            else [""] * 5
        )
        lines.append("| " + " | ".join(cells) + " |")
    bandwidth = median(drive, "gib_s")
    if bandwidth:
        cpu, size = median(drive, "cpu_us_per_mib"), median(drive, "read_kib")
        bursts = ", ".join(f"{n}: {1e3 * burst_s(drive, n):.2f}" for n in BURSTS)
        lines.append(
            f"\ndrive: {bandwidth:.2f} GiB/s at {size:.0f} KiB, {cpu:.1f} us of CPU per MiB"
            f" ({median(drive, 'burst_cpu_us_per_mib'):.1f} in bursts of 12)"
        )
        lines.append(f"\nbursts on the idle drive, reads: ms: {bursts}")
    for name, rows in results.items():
        if not name.startswith("prefill"):
            continue
        note = f"{median(rows, 'prefill_s'):.2f} s for {rows[0]['prompt_tokens']} tokens"
        mib = median(rows, "prefill_mib")
        if mib and bandwidth:
            note += f", {mib:.0f} MiB read ({mib / 1024 / bandwidth:.2f} s at the drive's bandwidth)"
        lines.append(f"\n{name}: {note}, load {median(rows, 'load_s'):.2f} s")
    return "\n".join(lines)


def bound_cells(
    rates: list[float], rows: list[dict[str, Any]], results: dict[str, list[dict[str, Any]]]
) -> list[str]:
    """The last five columns: both layered bounds with the share reached, and the ideal one."""
    drive, cached = results.get("drive", []), results.get("everything cached", [])
    if not drive or not cached:
        return [""] * 5
    full, at_depth, ideal = bounds(rows, cached, drive)
    cells = []
    for bound in (full, at_depth):
        # Round by round: the drive's speed drifts more than anything else here.
        share = statistics.median([r * b for r, b in zip(rates, bound, strict=True)])
        cells += [f"{1 / statistics.median(bound):.1f}", f"{share:.0%}"]
    return [*cells, f"{1 / statistics.median(ideal):.1f}"]


def burst_s(drive: list[dict[str, Any]], reads: int) -> float:
    """Median time of a burst of this many reads, between measured sizes by interpolation."""
    points: list[tuple[int, float]] = [
        (n, statistics.median([r["burst_s"][str(n)] for r in drive])) for n in BURSTS
    ]
    for (n0, t0), (n1, t1) in itertools.pairwise(points):
        if reads <= n1:
            return t0 + (t1 - t0) * (reads - n0) / (n1 - n0)
    return points[-1][1] * reads / points[-1][0]


def bounds(
    rows: list[dict[str, Any]], cached: list[dict[str, Any]], drive: list[dict[str, Any]]
) -> tuple[list[float], list[float], list[float]]:
    """Seconds per token of a side, by round: layered at full bandwidth, layered at depth, ideal."""
    full: list[float] = []
    at_depth: list[float] = []
    ideal: list[float] = []
    for row, all_cached, disk in zip(rows, cached, drive, strict=True):
        whole, experts, layers = 1 / all_cached["tok_s"], all_cached["experts_s_tok"], all_cached["layers"]
        slice_s = disk["read_kib"] / 1024 / 1024 / disk["gib_s"]
        tokens = row["measured_tokens"]
        asked = {int(n): count for n, count in row["layer_reads"].items()}
        rest = whole - experts + (tokens * layers - sum(asked.values())) * experts / layers / tokens
        each = experts / layers
        full.append(rest + sum(c * max(n * slice_s, each) for n, c in asked.items()) / tokens)
        at_depth.append(rest + sum(c * max(burst_s([disk], n), each) for n, c in asked.items()) / tokens)
        ideal.append(max(sum(n * c for n, c in asked.items()) * slice_s / tokens, whole))
    return full, at_depth, ideal


if __name__ == "__main__":
    sys.exit(main())
