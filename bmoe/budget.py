"""How much memory the expert cache may take.

It owns the arithmetic of automatic sizing and says it in words. It must not know how memory is measured.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from bmoe.io.errors import MemoryBudgetError

if TYPE_CHECKING:
    from bmoe.model import ModelLayout

MIB = 1 << 20
# Python, llama.cpp's code and small buffers, the io_uring rings: seen 60 to 120 MiB.
PROCESS_BYTES = 128 * MIB


@dataclass(frozen=True, slots=True)
class CacheBudget:
    """A budget and how it came about."""

    cache_bytes: int
    auto: bool
    arithmetic: str | None


def kv_cache_bytes(layout: ModelLayout, context_tokens: int) -> int:
    """Estimate of the KV cache in F16. Too high for models with sliding windows."""
    facts = layout.facts
    layers = max(facts.arch_int("block_count") - facts.arch_int("nextn_predict_layers"), 0)
    heads = facts.arch_int("attention.head_count", 1)
    kv_heads = sum(facts.arch_ints("attention.head_count_kv", layers, heads))  # 0 where a layer is recurrent
    width = facts.arch_int("embedding_length") // max(heads, 1)
    key = facts.arch_int("attention.key_length", width)
    value = facts.arch_int("attention.value_length", width)
    return context_tokens * kv_heads * (key + value) * 2


def compute_bytes(layout: ModelLayout, ubatch_tokens: int) -> int:
    """Estimate of what llama.cpp's compute buffers and the hook's scratch touch for the widest graph.

    Reserved but never touched memory (logits of every row) costs nothing and is not counted.
    """
    width = layout.facts.arch_int("embedding_length")
    expert_width = min((t.ne1 for t in layout.tensors), default=0)
    per_token = 4 * (12 * width + 2 * layout.top_k * (width + expert_width))
    return ubatch_tokens * per_token


def default_floor_bytes(available_bytes: int) -> int:
    """Memory that automatic sizing leaves to others."""
    return min(1536 * MIB, max(256 * MIB, available_bytes // 8))


def cache_budget(
    layout: ModelLayout,
    *,
    wanted_bytes: int | None,
    floor_bytes: int | None,
    everything_bytes: int,
    available_bytes: int | None,
    context_tokens: int,
    ubatch_tokens: int,
) -> CacheBudget:
    """The memory for expert slots.

    Args:
        layout: The model.
        wanted_bytes: What the user asked for; None sizes automatically.
        floor_bytes: Automatic: memory to leave to others; None takes an eighth of what is available, at
            least 256 MiB and at most 1536 MiB.
        everything_bytes: Slot memory for all experts: more is never used.
        available_bytes: Memory that could be had now, before dense weights are read; None when unknown.
        context_tokens: For the KV cache.
        ubatch_tokens: For the compute buffers.

    Raises:
        MemoryBudgetError: Automatic sizing leaves nothing.
    """
    if wanted_bytes is not None:
        return CacheBudget(min(wanted_bytes, everything_bytes), auto=False, arithmetic=None)
    if available_bytes is None:
        budget = min(1024 * MIB, everything_bytes)
        return CacheBudget(budget, auto=True, arithmetic="available memory is unknown")
    floor = floor_bytes if floor_bytes is not None else default_floor_bytes(available_bytes)
    kv = kv_cache_bytes(layout, context_tokens)
    compute = compute_bytes(layout, ubatch_tokens) + PROCESS_BYTES
    room = available_bytes - layout.dense_bytes - kv - compute - floor
    words = (
        f"{available_bytes // MIB} MiB available - {layout.dense_bytes // MIB} dense - {kv // MIB} KV"
        f" - {compute // MIB} compute - {floor // MIB} floor"
    )
    if room <= 0:
        raise MemoryBudgetError(
            f"no memory is left for an expert cache: {words}",
            hint="lower --ctx-size, --ubatch or --cache-floor-mb, or set --cache-mb",
        )
    return CacheBudget(min(room, everything_bytes), auto=True, arithmetic=words)
