"""How fast `bmoe logs` reads logs, and how fast many runs are asked.

    python -m tools.bench_logs [--mb N] [--runs N] [--folder DIR]

Makes three sets of logs of realistic shape: one file of runs of 256 tokens, one of such runs that log their
layers too (a fifth of the size), and many runs of 12 tokens in a file each. Ingests each in a process of its
own with one CPU into a new database; then asks those of the first and the last. Timed is `ingest`, and closing
with its checkpoint: neither making the logs, which leaves them in the page cache, nor starting Python, nor
opening. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

_TOKENS = 256
_SHORT_TOKENS = 12
_LAYERS = 48
_QUERIES = {
    "fastest runs": "SELECT run_id, decode_tokens_per_s FROM runs ORDER BY decode_tokens_per_s DESC LIMIT 10",
    "by policy": "SELECT policy, threads, count(*), median(decode_tokens_per_s) FROM runs GROUP BY ALL",
    "by setting": "SELECT config->>'queue_depth' AS depth, avg(decode_tokens_per_s) FROM runs GROUP BY 1",
    "percentiles": "SELECT quantile_cont(wall_ns, [0.05, 0.5, 0.95]) FROM steps WHERE phase = 'decode'",
    "hit rates": "SELECT run_id, sum(hits) / sum(lookups) AS h FROM steps GROUP BY 1 ORDER BY h LIMIT 10",
    "warm-up": "SELECT step, avg(wall_ns) FROM steps WHERE phase = 'decode' GROUP BY 1 ORDER BY 1",
    "one run": "SELECT * FROM steps WHERE run_id = (SELECT max(run_id) FROM runs) ORDER BY step",
    "ends": "SELECT body->>'$.summary.end' AS reason, count(*) FROM events WHERE event = 'summary' GROUP BY 1",
}


def run_lines(rng: random.Random, *, tokens: int, layers: int) -> Iterator[dict[str, Any]]:
    """A run's events, with made-up figures of the size of real ones."""
    run_id, seq, mono_ns = f"{rng.getrandbits(128):032x}", 0, rng.randrange(10**15)
    threads, policy = rng.choice((2, 4, 8)), rng.choice(("aged", "lru"))

    def event(name: str, **fields: object) -> dict[str, Any]:
        nonlocal seq, mono_ns
        mono_ns += rng.randrange(10**8)
        second, micro = divmod(mono_ns // 1000, 10**6)
        time = f"2026-{1 + second % 12:02d}-{1 + second % 28:02d}T{second % 24:02d}:{second % 60:02d}:07.{micro:06d}Z"
        head = {"schema": 2, "event": name, "run_id": run_id, "seq": seq, "mono_ns": mono_ns, "time": time}
        seq += 1
        return {**head, **fields}

    effective = {
        "mode": "streaming", "mode_reason": None, "model_path": "/models/Qwen3-30B-A3B-Q4_K_M.gguf",
        "model_name": "Qwen3 30B A3B", "architecture": "qwen3moe", "model_bytes": 18_556_686_912,
        "moe_layers": 48, "experts": 128, "top_k": 8, "expert_bytes": 17 << 30, "dense_bytes": 1 << 30,
        "cycle_bytes": 1 << 30, "threads": threads, "context_tokens": 2048, "ubatch_tokens": 512,
        "overlap": True, "io_backend": "uring", "queue_depth": rng.choice((8, 32)), "cache_bytes": 4 << 30,
        "policy": policy, "cache_arithmetic": "what is available less a floor, in words " * 3, "traced": None,
    }  # fmt: skip
    yield event("run_start", argv=["decode", "-m", "x.gguf"] * 4, requested=effective, effective=effective,
                prompt={"bytes": 100, "sha256": f"{rng.getrandbits(256):064x}"}, request={"n_predict": tokens},
                machine={"kernel": "6.8.0", "cpu": "a CPU", "cpus": 16}, versions={"python": "3.11.9"})  # fmt: skip
    yield event("load", report={"wall_ns": 10**10, "dense_ns": 10**9, "dense_bytes": 1 << 30})
    yield event("prefill", turn=0, batches=[_step(rng, 0)], total={})
    for i in range(tokens):
        yield event("token", turn=0, index=i, token=rng.randrange(150_000), text=rng.choice((" the", ",", "\n")),
                    reasoning="", metrics=_step(rng, i))  # fmt: skip
        if layers:
            yield event("layer", turn=0, step=i, layers=[
                {"layer": n, "lookups": 8, "hits": rng.randrange(9), "read_bytes": rng.randrange(10**7),
                 "stall_ns": rng.randrange(10**6), "experts_ns": rng.randrange(10**6)} for n in range(layers)
            ])  # fmt: skip
    yield event("summary", turn=0, summary={"end": "length", "tokens": tokens}, decode_tokens_per_s=9.5)
    yield event("run_end", exit_code=0)


def _step(rng: random.Random, index: int) -> dict[str, Any]:
    under = rng.randrange
    memory = None
    if index % 8 == 0:
        names = ("rss_bytes", "rss_anon_bytes", "rss_file_bytes", "swap_bytes", "mem_available_bytes",
                 "mem_free_bytes", "swap_free_bytes")  # fmt: skip
        memory = {**{name: under(10**10) for name in names}, "dense_resident": 1.0}
    return {
        "tokens": 1, "wall_ns": 10**7 + under(10**8), "stall_ns": under(10**7), "hook_ns": under(10**6),
        "compute_ns": under(10**8), "experts_ns": under(10**8), "loop_ns": under(10**7), "lookups": 384,
        "hits": under(384), "reads": under(500), "read_bytes": under(10**8), "speculative_bytes": 0,
        "evictions": under(400), "rereads": under(400), "slots_used": under(9000), "cache_bytes": 4 << 30,
        "submit_latency_ns": under(10**5), "read_latency_ns": under(10**6), "io_busy_ns": under(10**8),
        "dropped": None, "cpu_ns": under(10**9), "minor_faults": under(100), "major_faults": 0,
        "overhead_ns": under(10**6), "memory": memory,
    }  # fmt: skip


def _text(lines: Iterator[dict[str, Any]]) -> str:
    return "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines)


def make_long(path: str, size_bytes: int, *, layers: int) -> None:
    """One file of about so many bytes: some runs that differ, over and over under ids of their own."""
    rng = random.Random(1)  # noqa: S311 (figures of a benchmark)
    texts = [_text(run_lines(rng, tokens=_TOKENS, layers=layers)) for _ in range(20)]
    with open(path, "w", encoding="ascii") as file:
        while file.tell() < size_bytes:
            for text in texts:
                old = text[text.index('"run_id":"') + 10 :][:32]
                file.write(text.replace(old, f"{rng.getrandbits(128):032x}"))


def make_short(folder: str, count: int) -> None:
    """So many files of one short run."""
    rng = random.Random(2)  # noqa: S311 (as above)
    for n in range(count):
        os.makedirs(os.path.join(folder, f"{n % 100:02d}"), exist_ok=True)
        with open(os.path.join(folder, f"{n % 100:02d}", f"{n}.jsonl"), "w", encoding="ascii") as file:
            file.write(_text(run_lines(rng, tokens=_SHORT_TOKENS, layers=0)))


def _ingest(db: str, path: str) -> dict[str, Any]:
    """In the child: one CPU, one ingestion."""
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    from bmoe.logs import ingest, open_logs

    rss_before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    store = open_logs(db, read_only=False)
    wall, cpu = time.perf_counter(), time.process_time()
    found = ingest(store, [path])
    store.close()
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    return {
        "data_mb": found.data_bytes / 1e6,
        "lines": found.lines,
        "runs": found.runs,
        "rejected": found.rejected,
        "wall_s": wall,
        "cpu_s": cpu,
        "mb_per_s": found.data_bytes / 1e6 / wall,
        "mb_per_cpu_s": found.data_bytes / 1e6 / cpu,
        "peak_rss_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "rss_before_mib": rss_before / 1024,
        "database_mib": os.path.getsize(db) / (1 << 20),
    }


def _ask(db: str) -> dict[str, float]:
    from bmoe.logs import open_logs

    took = {}
    with open_logs(db) as store:
        for name, query in _QUERIES.items():
            start = time.perf_counter()
            store.sql(query)
            took[name] = time.perf_counter() - start
    return took


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--mb", type=int, default=1000, help="size of the long runs' log")
    parser.add_argument("--runs", type=int, default=10_000, help="number of short runs")
    parser.add_argument("--folder", help="where the logs go, which are deleted afterwards")
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(_ingest(*options.child)))
        return
    folder = tempfile.mkdtemp(prefix="bench-logs-", dir=options.folder)
    try:
        result: dict[str, Any] = {}
        for name in ("long", "layers", "short"):
            path = os.path.join(folder, name if name == "short" else f"{name}.jsonl")
            if name == "short":
                make_short(path, options.runs)
            elif name == "layers":
                make_long(path, options.mb * 200_000, layers=_LAYERS)
            else:
                make_long(path, options.mb * 1_000_000, layers=0)
            db = os.path.join(folder, f"{name}.duckdb")
            command = [sys.executable, "-m", "tools.bench_logs", "--child", db, path]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            r = result[name] = json.loads(done.stdout)
            print(
                f"{name}: {r['data_mb']:.0f} MB, {r['runs']} runs in {r['wall_s']:.2f} s: {r['mb_per_s']:.0f} MB/s, "
                f"{r['mb_per_cpu_s']:.0f} MB per CPU second; peak {r['peak_rss_mib']:.0f} MiB; database "
                f"{r['database_mib']:.0f} MiB; {r['rejected']} rejected"
            )
        for name in ("short", "long"):
            result[f"{name}_queries_s"] = _ask(os.path.join(folder, f"{name}.duckdb"))
            for query, seconds in result[f"{name}_queries_s"].items():
                print(f"{name}, {query}: {1000 * seconds:.0f} ms")
        print(json.dumps(result))
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
