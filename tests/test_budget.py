"""Automatic sizing of the expert cache: the arithmetic, and the words that tell it."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from bmoe import llama_library
from bmoe.budget import (
    CacheBudget,
    cache_budget,
    compute_bytes,
    dense_memory_bytes,
    fixed_bytes,
    kv_cache_bytes,
)
from bmoe.io.errors import MemoryBudgetError
from bmoe.pipeline.native import bind_ggml
from bmoe.runtime import Context, Model, RuntimeConfig
from tests.models import tiny_moe
from tests.runs import layout_of
from tests.test_architectures import GATES, gate_model

if TYPE_CHECKING:
    from bmoe.model import ModelLayout

MIB = 1 << 20
GIB = 1 << 30


def layout() -> ModelLayout:
    """3 layers, width 256, 2 key-value heads of 64, 16 experts of width 256, top-4, 259 tokens."""
    return layout_of(tiny_moe("Q4_K"))


def budget(**changes: Any) -> CacheBudget:
    asked: dict[str, Any] = {
        "wanted_bytes": None,
        "floor_bytes": None,
        "everything_bytes": 100 * GIB,
        "available_bytes": 8 * GIB,
        "context_tokens": 2048,
        "ubatch_tokens": 512,
    }
    return cache_budget(layout(), **(asked | changes))


def test_a_wish_is_granted_as_it_is() -> None:
    assert budget(wanted_bytes=77 * MIB) == CacheBudget(77 * MIB, auto=False, arithmetic=None)
    assert budget(wanted_bytes=GIB, available_bytes=MIB).cache_bytes == GIB


def test_more_than_everything_is_everything() -> None:
    assert budget(wanted_bytes=5 * GIB, everything_bytes=GIB).cache_bytes == GIB
    assert budget(everything_bytes=GIB).cache_bytes == GIB


def test_the_kv_cache_counts_keys_and_values_of_all_layers_in_f16() -> None:
    assert kv_cache_bytes(layout(), 2048) == 2048 * 3 * 2 * (64 + 64) * 2
    assert kv_cache_bytes(layout(), 1) == kv_cache_bytes(layout(), 256)
    assert kv_cache_bytes(layout(), 257) * 4 == kv_cache_bytes(layout(), 2048)


def test_compute_buffers_grow_with_the_batch_and_the_context() -> None:
    """Gate, up, what they give together, and down, of four experts; four times the residual stream."""
    widest = 4 * (256 + 256 + 256 + 256) + 4 * 256
    assert compute_bytes(layout(), 512) == 512 * (widest * 4 * 11 // 10)
    assert compute_bytes(layout(), 512, 1000) == compute_bytes(layout(), 512) + 512 * 1024 * 2
    assert compute_bytes(layout(), 512, 0, 8) == compute_bytes(layout(), 512) + 8 * MIB


def test_automatic_size_is_what_is_left() -> None:
    got = budget(floor_bytes=GIB)
    room = 8 * GIB - fixed_bytes(layout(), context_tokens=2048, ubatch_tokens=512) - GIB
    assert got.auto
    assert got.cache_bytes == room - room // 512  # what the pages of the cache need in page tables
    assert (
        got.arithmetic == "8192 MiB available - 0 dense - 3 KV - 13 compute - 96 process - 1024 floor = 7041"
    )
    assert got.warning is None


def test_a_control_group_that_limits_is_named() -> None:
    words = budget(limited_by_group=True).arithmetic
    assert words is not None
    assert words.startswith("8192 MiB available in the control group - 0 dense")


def test_what_the_process_has_already_is_not_counted_twice() -> None:
    """But no more than a process has before it opens a session."""
    fresh, later = budget(), budget(own_bytes=30 * MIB)
    assert 29 * MIB < later.cache_bytes - fresh.cache_bytes <= 30 * MIB
    assert later.arithmetic is not None
    assert " - 66 process - " in later.arithmetic
    assert budget(own_bytes=GIB) == budget(own_bytes=48 * MIB)


def test_repacked_tied_embeddings_are_there_twice() -> None:
    tied = layout_of(gate_model("gemma4"))
    embeddings = next(t.size_bytes for t in tied.facts.tensors if t.name == "token_embd.weight")
    assert dense_memory_bytes(tied, "repack") == tied.dense_bytes + embeddings
    assert dense_memory_bytes(tied, "mmap") == dense_memory_bytes(tied, "anon") == tied.dense_bytes
    assert dense_memory_bytes(layout(), "repack") == layout().dense_bytes


def test_a_ceiling_binds_only_automatic_sizing() -> None:
    got = budget(ceil_bytes=GIB)
    assert got.cache_bytes == GIB
    assert got.arithmetic is not None
    assert got.arithmetic.endswith(", at most 1024 by the ceiling")
    assert budget(ceil_bytes=50 * GIB) == budget()
    assert budget(ceil_bytes=GIB, everything_bytes=MIB).cache_bytes == MIB
    assert budget(ceil_bytes=GIB, wanted_bytes=2 * GIB).cache_bytes == 2 * GIB
    assert budget(ceil_bytes=5 * MIB, available_bytes=None) == CacheBudget(
        5 * MIB, auto=True, arithmetic="available memory is unknown, at most 5 by the ceiling"
    )


def test_a_wish_that_memory_does_not_grant_is_warned_of() -> None:
    got = budget(wanted_bytes=GIB, available_bytes=GIB)
    assert got.cache_bytes == GIB
    assert got.warning == "1139 MiB are needed and 1024 available: the kernel may end this program"
    assert budget(wanted_bytes=GIB, available_bytes=1140 * MIB).warning is None
    assert budget(wanted_bytes=GIB, available_bytes=None).warning is None


@pytest.mark.parametrize(
    ("available", "floor"),
    [(GIB, 256 * MIB), (4 * GIB, 512 * MIB), (12 * GIB, 1536 * MIB), (64 * GIB, 1536 * MIB)],
)
def test_the_floor_is_an_eighth_within_bounds(available: int, floor: int) -> None:
    got = budget(available_bytes=available)
    assert got == budget(available_bytes=available, floor_bytes=floor)


def test_unknown_memory_is_said_to_be_unknown() -> None:
    assert budget(available_bytes=None) == CacheBudget(
        GIB, auto=True, arithmetic="available memory is unknown"
    )
    assert budget(available_bytes=None, everything_bytes=MIB).cache_bytes == MIB


def test_no_room_is_an_error_that_shows_the_sum() -> None:
    with pytest.raises(MemoryBudgetError) as caught:
        budget(available_bytes=300 * MIB)
    assert caught.value.message.startswith("no memory is left for an expert cache: 300 MiB available - ")
    assert caught.value.hint is not None
    assert "--cache-mb" in caught.value.hint


# Against llama.cpp's own words.


def allocated(path: str, context_tokens: int, ubatch_tokens: int) -> tuple[float, float]:
    """MiB of the context's memory and of the compute buffers, as llama.cpp logs them."""
    runtime = RuntimeConfig(
        path=path, threads=1, context_tokens=context_tokens, ubatch_tokens=ubatch_tokens, repack=False
    )
    llama_library.llama()
    bind_ggml()
    lines: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(llama_library, "_GGML_LOG_LEVEL_WARN", 0)  # every line
        patch.setattr(llama_library, "_sinks", [SimpleNamespace(append=lines.append)])
        model = Model(runtime, lazy=True)
        Context(model, runtime, engine_handle=None).close()
        model.close()
    text = "\n".join(lines)
    memory = re.findall(r"(?:KV|RS) buffer size = *([\d.]+) MiB", text)
    compute = re.findall(r"compute buffer size = *([\d.]+) MiB", text)
    assert memory
    assert compute
    return sum(map(float, memory)), sum(map(float, compute))


@pytest.mark.parametrize("architecture", sorted(GATES))
def test_estimates_are_what_llama_cpp_allocates_or_a_little_more(architecture: str) -> None:
    path = gate_model(architecture)
    of = layout_of(path)
    memory, compute = allocated(path, 4096, 256)
    estimate = kv_cache_bytes(of, 4096) / MIB
    assert memory - 0.05 <= estimate <= 1.1 * memory
    assert compute <= compute_bytes(of, 256, 4096) / MIB <= 1.6 * compute
