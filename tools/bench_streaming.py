"""The speed table of docs/benchmarks.md: streaming against resident runs and against the physical bounds.

Every side runs in a fresh process; sides are interleaved (A B C A B C ...), so that a drifting machine
touches all alike; medians and ratios are printed, the last line of stdout is JSON. Text is fed token by
token instead of the model's own choices, so that routing varies as in real use. Outside the timing
window: loading, tokenizing, the first quarter of the tokens (the cache warms).

Bounds, per token (docs/benchmarks.md explains them):
  layered  D + sum over layers of max(missed bytes / bandwidth, E / layers)
  ideal    max(missed bytes / bandwidth, D + E)
with E the time in expert matmuls and D the rest, both from the side whose experts are all cached, and the
drive's bandwidth at this slice size measured in the same interleaving.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
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

MIB = 1 << 20
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
        words = Path(side["text"]).read_text(encoding="utf-8")
        tokens = session.model.tokenize(words)
        while len(tokens) < side["prompt_tokens"] + side["tokens"]:
            tokens += tokens
        prompt = b"".join(map(session.model.piece, tokens[: side["prompt_tokens"]])).decode("utf-8", "ignore")
        forced = tuple(tokens[side["prompt_tokens"] : side["prompt_tokens"] + side["tokens"]])
        # All experts cached: one run to fill, a second to measure.
        repeats = 2 if side.get("fill") else 1
        for _ in range(repeats):
            events = [
                e
                async for e in session.generate(
                    GenerateRequest(prompt=prompt, n_predict=len(forced), forced=forced, ignore_eog=True)
                )
            ]
        steps = [e.metrics for e in events][len(events) // 4 :]
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
                    "layer_mib": [b / MIB for b in last_requests(asked, sum(m.reads or 0 for m in steps), session)],
                }
    return out


def last_requests(asked_bytes: list[int], reads: int, session: Any) -> list[int]:
    """The last announcements' bytes that add up to this many slice reads (slices are of about one size)."""
    tensors = session.streaming.engine.tensors
    left = reads * sum(t.slice_bytes for t in tensors) / len(tensors)
    taken: list[int] = []
    for asked in reversed(asked_bytes):
        if left <= 0:
            break
        taken.append(asked)
        left -= asked
    return taken


def drop_page_cache(path: str) -> None:
    """Asks the kernel to forget the file's pages."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)


async def measure_drive(side: dict[str, Any]) -> dict[str, Any]:
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
    left = side["reads"]
    started = 0

    def offset() -> int:
        return choose.randrange((file.size_bytes - size) // file.block_bytes) * file.block_bytes

    def on_done(tags: list[int]) -> None:
        nonlocal left, started
        left -= len(tags)
        for tag in tags:
            if started < side["reads"]:
                started += 1
                queue.read(tag, file_id, offset(), size, targets[tag])
        queue.submit()
        if left <= 0:
            done.set()

    def on_error(_: int, error: Exception) -> None:
        raise error

    file_id = queue.add_file(file)
    buffer = [backend.add_buffer(memory.chunk_view(c)) for c in range(memory.chunks)]
    targets = [backend.prepare(buffer[s // memory.chunk_slots], memory.slot_view(s)) for s in range(depth)]
    queue.start(loop, on_done, on_error)
    t0, cpu0 = time.monotonic(), time.process_time()
    for tag in range(depth):
        started += 1
        queue.read(tag, file_id, offset(), size, targets[tag])
    queue.submit()
    await done.wait()
    wall, cpu = time.monotonic() - t0, time.process_time() - cpu0
    await queue.aclose()
    memory.close()
    mib = side["reads"] * size / MIB
    return {
        "gib_s": mib / 1024 / wall,
        "cpu_us_per_mib": cpu * 1e6 / mib,
        "read_kib": size / 1024,
        "registered": backend.registered,
        "direct": file.direct,
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
    with memory_cap(side.get("cap_bytes")) as procs:
        command = [sys.executable, "-m", "tools.bench_streaming", "--side", json.dumps(side)]
        if procs is not None:
            command = ["sh", "-c", f'echo $$ > {procs} && exec "$@"', "sh", *command]
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=timeout_s, check=False)
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
        "text": str(options.text),
        "threads": options.threads,
        "prompt_tokens": options.prompt_tokens,
        "tokens": options.tokens,
    }
    sides: list[dict[str, Any]] = [{**common, "name": "drive", "drive": True, "reads": 600}]
    sides += [
        {**common, "name": "resident", "resident": True, "repack": True},
        {**common, "name": "resident, no repacking", "resident": True, "repack": False},
        {**common, "name": "everything cached", "resident": False, "cache_mib": 1 << 20, "fill": True},
    ]
    for cache in options.caches:
        sides.append({**common, "name": f"cache {cache} MiB", "resident": False, "cache_mib": cache})
        if options.serial:
            serial = {**common, "name": f"cache {cache} MiB, no overlap", "resident": False, "cache_mib": cache}
            sides.append({**serial, "overlap": False})
    if options.cap_mb:
        cap = options.cap_mb * 1000 * 1000
        few = {**common, "tokens": options.capped_tokens, "cap_bytes": cap, "prompt_tokens": 4}
        sides.append({**few, "name": f"resident, {options.cap_mb} MB cgroup", "resident": True, "repack": False})
        streamed = {**few, "tokens": options.tokens, "resident": False, "cache_mib": options.caches[0]}
        sides.append({**streamed, "name": f"cache {options.caches[0]} MiB, {options.cap_mb} MB cgroup"})
    if options.prefill:
        wide = {**common, "tokens": 1, "prompt_tokens": options.prefill}
        sides.append({**wide, "name": f"prefill {options.prefill}, resident", "resident": True, "repack": False})
        streamed = {**wide, "name": f"prefill {options.prefill}, cache 1000 MiB", "resident": False}
        sides.append({**streamed, "cache_mib": 1000, "drop_cache": True})
    return sides


def main() -> int:
    """Parses, runs the rounds, prints the table and one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
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


def table(results: dict[str, list[dict[str, Any]]]) -> str:
    """Markdown: medians, spread of tok/s, and the bounds where they can be had."""
    bandwidth = median(results.get("drive", []), "gib_s")
    cached = results.get("everything cached", [])
    lines = [
        "| side | tok/s (min to max) | MiB/token | GiB/s | hit | stall ms | CPU ms/token | layered bound | of it | ideal |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name, rows in results.items():
        rates = [r["tok_s"] for r in rows if "tok_s" in r]
        if name == "drive" or not rates or name.startswith("prefill"):
            continue
        cells = [name, f"{statistics.median(rates):.1f} ({min(rates):.1f} to {max(rates):.1f})"]
        for key, form in (("mib_tok", ".1f"), ("gib_s", ".2f"), ("hit", ".3f"), ("stall_ms_tok", ".1f")):
            value = median(rows, key)
            cells.append("" if value is None else format(value, form))
        cells.append(f"{1e3 * (median(rows, 'cpu_s_tok') or 0):.1f}")
        if bandwidth and cached and rows[0].get("layer_mib") and name.startswith("cache") and "cgroup" not in name:
            layered, ideal = bounds(rows, cached, bandwidth)
            cells += [f"{1 / layered:.1f}", f"{statistics.median(rates) * layered:.0%}", f"{1 / ideal:.1f}"]
        else:
            cells += ["", "", ""]
        lines.append("| " + " | ".join(cells) + " |")
    for name, rows in results.items():
        if name == "drive":
            cpu, size = median(rows, "cpu_us_per_mib"), median(rows, "read_kib")
            lines.append(f"\ndrive: {bandwidth:.2f} GiB/s at {size:.0f} KiB, {cpu:.1f} us of CPU per MiB")
        if name.startswith("prefill"):
            note = f"{median(rows, 'prefill_s'):.2f} s for {rows[0]['prompt_tokens']} tokens"
            mib = median(rows, "prefill_mib")
            if mib and bandwidth:
                note += f", {mib:.0f} MiB read ({mib / 1024 / bandwidth:.2f} s at the drive's bandwidth)"
            lines.append(f"\n{name}: {note}, load {median(rows, 'load_s'):.2f} s")
    return "\n".join(lines)


def bounds(rows: list[dict[str, Any]], cached: list[dict[str, Any]], bandwidth_gib_s: float) -> tuple[float, float]:
    """(layered, ideal) seconds per token of a side."""
    whole = 1 / (median(cached, "tok_s") or 1)
    experts = median(cached, "experts_s_tok") or 0.0
    layers = int(cached[0]["layers"])
    layered, ideal = [], []
    for row in rows:
        tokens = row["measured_tokens"]
        reads = [mib / 1024 / bandwidth_gib_s for mib in row["layer_mib"]]
        silent = tokens * layers - len(reads)
        overlap = sum(max(r, experts / layers) for r in reads) + silent * experts / layers
        layered.append(whole - experts + overlap / tokens)
        ideal.append(max(sum(reads) / tokens, whole))
    return statistics.median(layered), statistics.median(ideal)


if __name__ == "__main__":
    sys.exit(main())
