"""Automatic sizing of the expert cache: the arithmetic, and the words that tell it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from bmoe.budget import CacheBudget, cache_budget, compute_bytes, kv_cache_bytes
from bmoe.io.errors import MemoryBudgetError
from tests.models import tiny_moe
from tests.runs import layout_of

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
    assert kv_cache_bytes(layout(), 1) * 2048 == kv_cache_bytes(layout(), 2048)


def test_compute_buffers_grow_with_the_batch() -> None:
    assert compute_bytes(layout(), 512) == 512 * 4 * (12 * 256 + 2 * 4 * (256 + 256))


def test_automatic_size_is_what_is_left() -> None:
    got = budget(floor_bytes=GIB)
    kv = kv_cache_bytes(layout(), 2048)
    compute = compute_bytes(layout(), 512) + 128 * MIB
    assert got.auto
    assert got.cache_bytes == 8 * GIB - layout().dense_bytes - kv - compute - GIB
    assert got.arithmetic == "8192 MiB available - 0 dense - 3 KV - 142 compute - 1024 floor"


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
