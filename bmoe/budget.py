"""How much memory the expert cache may take.

It owns the arithmetic of automatic sizing, what llama.cpp will need beside the cache, and says both in words.
It must not know how memory is measured.

The estimates follow what llama.cpp 0.3.36 of llama-cpp-python allocates for the architectures of bmoe.synth
(tests compare them); where they cannot be exact they are too high, since too low is a killed process.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from bmoe.dense import transient_bytes
from bmoe.io.errors import MemoryBudgetError

if TYPE_CHECKING:
    from bmoe.gguf_file import GgufFacts
    from bmoe.model import ModelLayout

MIB: Final = 1 << 20
# Python with its modules, llama.cpp's code and graphs, rings, stacks: seen 40 to 60 MiB.
PROCESS_BYTES: Final = 96 * MIB
# A vocabulary's strings and tables: 330 bytes per token, and for a moment the file's header beside it.
_TOKEN_BYTES: Final = 500
# Whole 4 KiB pages have an 8-byte entry in a table. Where huge pages are used it is next to nothing.
_PAGE_TABLE_SHARE: Final = 512
# What a process has before its session opens; more is something else's, and does not go away.
_OWN_MOST_BYTES: Final = 48 * MIB
_THREAD_BYTES: Final = 768 << 10  # and tiles of heads; seen 0.3 to 1 MiB per thread in all
_CELLS: Final = 256  # llama.cpp rounds the context up to it
_NO_FLASH_ATTENTION: Final = frozenset({"grok"})
_CHUNKED_ATTENTION: Final = frozenset({"llama4"})  # whether the file says so or not
_RECURRENT: Final = re.compile(r"^blk\.(\d+)\.(ssm_|shortconv\.)")
_ATTENDING: Final = re.compile(r"^blk\.(\d+)\.(attn_k|attn_kv_a_mqa)\.weight$")
_FEED_FORWARD: Final = re.compile(
    r"^blk\.\d+\.ffn_(gate|up|gate_shexp|up_shexp|gate_chexps|up_chexps)\.weight$"
)


@dataclass(frozen=True, slots=True)
class CacheBudget:
    """A budget and how it came about.

    Attributes:
        cache_bytes: For expert slots.
        auto: Whether it was worked out.
        arithmetic: How, in words; None when it was asked for.
        warning: What is dangerous about it, in words; None when nothing is.
    """

    cache_bytes: int
    auto: bool
    arithmetic: str | None
    warning: str | None = None


def kv_cache_bytes(layout: ModelLayout, context_tokens: int) -> int:
    """What the context's memory takes: keys and values in F16, and the state of recurrent layers in F32.

    Layers with a sliding window keep the whole context too, as bmoe makes its contexts.
    """
    facts = layout.facts
    layers = max(facts.arch_int("block_count") - facts.arch_int("nextn_predict_layers"), 0)
    cells = -(-context_tokens // _CELLS) * _CELLS
    heads = facts.arch_int("attention.head_count", 1)
    kv_heads = facts.arch_ints("attention.head_count_kv", layers, heads)  # 0 where a layer is recurrent
    key, value = _head_widths(facts)
    if facts.arch_int("attention.key_length_mla"):
        value = 0  # latent attention: values are made from the keys
    recurrent = _layers(facts, _RECURRENT)
    attending = [i for i in range(layers) if i not in recurrent - _layers(facts, _ATTENDING)]
    indexer = facts.arch_int("attention.indexer.key_length") * len(attending)
    per_cell = sum(kv_heads[i] for i in attending) * (key + value) + indexer
    return 2 * cells * per_cell + len([i for i in recurrent if i < layers]) * _state_bytes(facts)


def _head_widths(facts: GgufFacts) -> tuple[int, int]:
    """Of a key and of a value, the larger where kinds of layers differ."""
    width = facts.arch_int("embedding_length") // max(facts.arch_int("attention.head_count", 1), 1)
    key, value = (
        max(facts.arch_int(f"attention.{kind}_length", width), facts.arch_int(f"attention.{kind}_length_swa"))
        for kind in ("key", "value")
    )
    return key, value


def _state_bytes(facts: GgufFacts) -> int:
    """Of one recurrent layer: the convolution's last inputs and the state."""
    short = max(facts.arch_int("shortconv.l_cache") - 1, 0) * facts.arch_int("embedding_length")
    inner, state = facts.arch_int("ssm.inner_size"), facts.arch_int("ssm.state_size")
    mixed = inner + 2 * facts.arch_int("ssm.group_count") * state
    return 4 * (short + max(facts.arch_int("ssm.conv_kernel") - 1, 0) * mixed + inner * state)


def compute_bytes(layout: ModelLayout, ubatch_tokens: int, context_tokens: int = 0, threads: int = 0) -> int:
    """What llama.cpp's buffers and the hook's scratch touch for the widest graph, at most.

    Memory that is reserved and never touched costs nothing and is not counted: logits of every row, which
    only tools that ask for them touch.

    Args:
        layout: The model.
        ubatch_tokens: Rows of the widest graph.
        context_tokens: Its columns of attention; 0 leaves attention's masks out.
        threads: Compute threads; each has tiles of its own. 0 leaves them out.
    """
    facts = layout.facts
    cells = -(-context_tokens // _CELLS) * _CELLS
    windows = facts.arch_int("attention.sliding_window") or facts.architecture in _CHUNKED_ATTENTION
    per_cell = 4 if windows else 2  # a mask in F16 for each kind of layer
    if facts.architecture in _NO_FLASH_ATTENTION:
        per_cell += 4 + 6 * facts.arch_int("attention.head_count", 1)  # scores in F32, and once more in F16
    key, value = _head_widths(facts)
    per_thread = _THREAD_BYTES + 2048 * (key + value)
    # A tenth more: what matmuls convert their inputs into.
    return ubatch_tokens * (_widest_floats(layout) * 4 * 11 // 10 + cells * per_cell) + threads * per_thread


def _widest_floats(layout: ModelLayout) -> int:
    """F32 values that a token has at once in the widest part of a block, residual stream included."""
    facts = layout.facts
    width = facts.arch_int("embedding_length")
    outputs: dict[int, int] = {}
    for tensor in layout.tensors:
        # What an expert's matmul gives, and for the last one what it takes.
        taken = tensor.ne0 if tensor.name.endswith("down_exps.weight") else 0
        outputs[tensor.layer] = outputs.get(tensor.layer, 0) + tensor.ne1 + taken
    experts = layout.top_k * max(outputs.values(), default=0) + 4 * width
    dense = 3 * max((t.ne[1] for t in facts.tensors if _FEED_FORWARD.match(t.name)), default=0) + 4 * width
    heads = facts.arch_int("attention.head_count", 1)
    key, value = _head_widths(facts)
    if latent := facts.arch_int("attention.key_length_mla"):
        attention = heads * (latent + 2 * key + value) + 2 * width
    else:
        kv_heads = facts.arch_int("attention.head_count_kv", heads)
        attention = 3 * heads * key + kv_heads * (key + value) + 3 * width
    inner = facts.arch_int("ssm.inner_size")
    mixed = 6 * (inner + facts.arch_int("ssm.group_count") * facts.arch_int("ssm.state_size"))
    return max(experts, dense, attention, mixed + 2 * width if inner else 0)


def process_bytes(layout: ModelLayout) -> int:
    """What the program itself takes, the vocabulary included."""
    embeddings = (t.ne[1] for t in layout.facts.tensors if t.name == "token_embd.weight")
    return PROCESS_BYTES + _TOKEN_BYTES * max(embeddings, default=0)


def dense_memory_bytes(layout: ModelLayout, dense_weights: str) -> int:
    """What the weights that are no experts take in this mode: in the page cache or copied, the same."""
    tensors = {t.name: t.size_bytes for t in layout.facts.tensors}
    # Tied embeddings are looked up as they are in the file, and multiplied as repacked.
    twice = dense_weights == "repack" and "output.weight" not in tensors
    return layout.dense_bytes + (tensors.get("token_embd.weight", 0) if twice else 0)


def repacking_bytes(
    layout: ModelLayout, context_tokens: int, ubatch_tokens: int, threads: int, dense_weights: str
) -> int:
    """What repacking takes while it loads beyond what KV cache and compute buffers take later."""
    later = kv_cache_bytes(layout, context_tokens) + compute_bytes(
        layout, ubatch_tokens, context_tokens, threads
    )
    return max(0, transient_bytes(layout, dense_weights) - later)


def fixed_bytes(
    layout: ModelLayout,
    *,
    context_tokens: int,
    ubatch_tokens: int,
    threads: int = 0,
    own_bytes: int = 0,
    dense_weights: str = "anon",
) -> int:
    """All that is needed beside the cache, less what this process has already; as for `cache_budget`."""
    dense = dense_memory_bytes(layout, dense_weights)
    return (
        dense
        + dense // _PAGE_TABLE_SHARE
        + kv_cache_bytes(layout, context_tokens)
        + compute_bytes(layout, ubatch_tokens, context_tokens, threads)
        + repacking_bytes(layout, context_tokens, ubatch_tokens, threads, dense_weights)
        + process_bytes(layout)
        - min(own_bytes, _OWN_MOST_BYTES)
    )


def default_floor_bytes(available_bytes: int) -> int:
    """Memory that automatic sizing leaves to others."""
    return min(1536 * MIB, max(256 * MIB, available_bytes // 8))


def shortage(
    layout: ModelLayout,
    *,
    cache_bytes: int,
    available_bytes: int | None,
    context_tokens: int,
    ubatch_tokens: int,
    threads: int = 0,
    own_bytes: int = 0,
    dense_weights: str = "anon",
) -> str | None:
    """Why this cache and all that is beside it do not fit, in words; None if they do or it is not known."""
    fixed = fixed_bytes(
        layout,
        context_tokens=context_tokens,
        ubatch_tokens=ubatch_tokens,
        threads=threads,
        own_bytes=own_bytes,
        dense_weights=dense_weights,
    )
    needed = fixed + cache_bytes + cache_bytes // _PAGE_TABLE_SHARE
    if available_bytes is None or needed <= available_bytes:
        return None
    return f"{-(-needed // MIB)} MiB are needed and {available_bytes // MIB} available"


def cache_budget(
    layout: ModelLayout,
    *,
    wanted_bytes: int | None,
    floor_bytes: int | None,
    everything_bytes: int,
    available_bytes: int | None,
    context_tokens: int,
    ubatch_tokens: int,
    ceil_bytes: int | None = None,
    limited_by_group: bool = False,
    threads: int = 0,
    own_bytes: int = 0,
    dense_weights: str = "anon",
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
        ceil_bytes: Automatic: the most to take; None is no bound.
        limited_by_group: Whether a control group is what limits `available_bytes`; for the words.
        threads: Compute threads, for their buffers.
        own_bytes: Anonymous memory that this process has already, so that `available_bytes` lacks it.
        dense_weights: The mode of the weights that are no experts.

    Raises:
        MemoryBudgetError: Automatic sizing leaves nothing.
    """
    if wanted_bytes is not None:
        cache = min(wanted_bytes, everything_bytes)
        short = shortage(
            layout,
            cache_bytes=cache,
            available_bytes=available_bytes,
            context_tokens=context_tokens,
            ubatch_tokens=ubatch_tokens,
            threads=threads,
            own_bytes=own_bytes,
            dense_weights=dense_weights,
        )
        danger = None if short is None else f"{short}: the kernel may end this program"
        return CacheBudget(cache, auto=False, arithmetic=None, warning=danger)
    most = everything_bytes if ceil_bytes is None else min(ceil_bytes, everything_bytes)
    ceiling = "" if most == everything_bytes else f", at most {most // MIB} by the ceiling"
    if available_bytes is None:
        words = f"available memory is unknown{ceiling}"
        return CacheBudget(min(1024 * MIB, most), auto=True, arithmetic=words)
    floor = floor_bytes if floor_bytes is not None else default_floor_bytes(available_bytes)
    fixed = fixed_bytes(
        layout,
        context_tokens=context_tokens,
        ubatch_tokens=ubatch_tokens,
        threads=threads,
        own_bytes=own_bytes,
        dense_weights=dense_weights,
    )
    repacking = repacking_bytes(layout, context_tokens, ubatch_tokens, threads, dense_weights)
    room = available_bytes - fixed - floor
    room -= max(0, room) // _PAGE_TABLE_SHARE
    words = (
        f"{available_bytes // MIB} MiB available{' in the control group' if limited_by_group else ''}"
        f" - {dense_memory_bytes(layout, dense_weights) // MIB} dense"
        f" - {kv_cache_bytes(layout, context_tokens) // MIB} KV"
        f" - {compute_bytes(layout, ubatch_tokens, context_tokens, threads) // MIB} compute"
        f"{f' - {repacking // MIB} repacking' if repacking else ''}"
        f" - {(process_bytes(layout) - min(own_bytes, _OWN_MOST_BYTES)) // MIB} process"
        f" - {floor // MIB} floor"
    )
    if room <= 0:
        raise MemoryBudgetError(
            f"no memory is left for an expert cache: {words}",
            hint="lower --ctx-size, --ubatch or --cache-floor-mb, or set --cache-mb",
        )
    return CacheBudget(
        min(room, most), auto=True, arithmetic=f"{words} = {room // MIB}{ceiling if most < room else ''}"
    )


def _layers(facts: GgufFacts, pattern: re.Pattern[str]) -> set[int]:
    """Numbers of the blocks that have a tensor of such a name."""
    return {int(match[1]) for t in facts.tensors if (match := pattern.match(t.name))}
