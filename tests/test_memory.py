"""What a streaming run keeps in memory, measured in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from bmoe.budget import kv_cache_bytes
from bmoe.gguf_file import read_gguf
from bmoe.io.files import DirectFile
from bmoe.model import lay_out
from bmoe.synth import ModelShape, random_model

MIB = 1 << 20
BUDGET = 24 * MIB
OVERHEAD = 200 * MIB
CONTEXT = 512

MEASURE = """
import asyncio, json, sys
from bmoe.session import Session
from tests.runs import config, generated

def status(field):
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith(field + ":"))

def through_mapping(path):
    \"\"\"Resident bytes of this process that are pages of the file.\"\"\"
    total, ours = 0, False
    with open("/proc/self/smaps") as lines:
        for line in lines:
            first = line.split(maxsplit=1)[0]
            if "-" in first:
                ours = line.rstrip().endswith(path)
            elif ours and first == "Rss:":
                total += int(line.split()[1]) << 10
    return total

async def main(path, cache, context):
    seen = []
    def look(_):
        seen.append((status("RssAnon"), through_mapping(path)))
    wanted = config(path, threads=2, cache_bytes=int(cache), context_tokens=int(context), ubatch_tokens=64)
    async with await Session.open(wanted) as session:
        look(None)
        await generated(session, "x" * 300, 12, on_token=look, on_prefill=look)
        look(None)
        s = session.streaming
        print(json.dumps({
            "anonymous": max(a for a, _ in seen),
            "upper_bound": status("VmHWM") - status("RssFile") - status("RssShmem"),
            "mapped": max(m for _, m in seen),
            "direct": session.effective.direct,
            "lazy_map": session.effective.lazy_map,
            "read": s.streamer.statistics().slice_bytes,
            "evictions": s.streamer.statistics().evictions,
            "slots": s.plan.used_bytes,
        }))

asyncio.run(main(*sys.argv[1:]))
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """288 MiB of experts: were they all kept, no overhead could hide them."""
    path = str(tmp_path_factory.mktemp("memory") / "model.gguf")
    shape = ModelShape(
        architecture="qwen3moe",
        layers=4,
        embedding=512,
        heads=4,
        kv_heads=2,
        head_dim=64,
        experts=96,
        top_k=4,
        expert_width=512,
    )
    random_model(path, shape=shape, quantisation="Q8_0", seed=1)
    return path


def cached_bytes(path: str) -> int:
    """Bytes of a file in the page cache."""
    done = subprocess.run(
        ["fincore", "--bytes", "--noheadings", "--output", "RES", path],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        pytest.skip("util-linux has no fincore here")
    return int(done.stdout)


def forget(path: str) -> None:
    """Drops a file from the page cache."""
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)


def measured(path: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, path, str(BUDGET), str(CONTEXT)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.slow
def test_memory_is_the_budget_the_dense_weights_the_kv_cache_and_little_else(model: str) -> None:
    layout = lay_out(read_gguf(model))
    forget(model)
    cold = cached_bytes(model)
    found = measured(model)
    # It did stream: more than the budget holds, and evicted what it could not keep.
    assert layout.expert_bytes > BUDGET + OVERHEAD
    assert found["slots"] <= BUDGET
    assert found["read"] > 2 * BUDGET
    assert found["evictions"] > 0
    allowed = BUDGET + layout.dense_bytes + kv_cache_bytes(layout, CONTEXT) + OVERHEAD
    assert found["anonymous"] <= found["upper_bound"] <= allowed

    # Nothing came through llama.cpp's mapping but the header it parses.
    assert found["lazy_map"]
    assert found["mapped"] <= 4 * MIB
    with DirectFile.open(model) as file:
        if not file.direct:
            pytest.skip(f"no O_DIRECT here: {file.fallback_reason}")
    assert found["direct"]
    if cold < 4 * MIB:
        assert cached_bytes(model) <= cold + 4 * MIB, "reads went through the page cache"
