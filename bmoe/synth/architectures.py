"""What llama.cpp expects of each architecture: metadata keys and tensors, one table entry each.

An `Architecture` is two functions of the shape: the keys (without the `architecture.` prefix) and, for
each layer, the tensors. Deviations are chosen so that activations keep unit scale: 1/sqrt(row length)
for a matrix, 1 for embeddings as the graph sees them, and norms near 1. Norms are not exactly 1 because
a tensor of equal pages would hide a misplaced one.

Knows nothing of block types, files or random numbers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal

from bmoe.io.errors import UsageError
from bmoe.synth import metadata

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from bmoe.synth.metadata import MetadataValue
    from bmoe.synth.shape import ModelShape

ROUTER_SPREAD: Final = 1.0
"""Deviation of the router's logits over experts, for a normed token.

Measured with it on the 12-layer Qwen3-30B shape, 500 tokens of English text: 17 to 57 experts of 128
carry a layer's routing (inverse of the summed squared shares), neighbouring tokens share 14 to 46 % of
their experts, and an aged-frequency cache of 13 % and 26 % of the experts hits 55 % and 79 %: close to
the recorded traces of the real model (61 % and 83 %).
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorSpec:
    """A tensor of random weights.

    Attributes:
        name: As in the file.
        shape: ggml's order, the row length first.
        kind: `matrix` takes the model's quantisation; `float` is always F32; `router` is F32 with rows
            of different lengths, so that some experts are chosen more often than others.
        deviation: Standard deviation of the weights.
        mean: Their mean, zero for a matrix.
        layer: The block it belongs to, if any.
    """

    name: str
    shape: tuple[int, ...]
    kind: Literal["matrix", "float", "router"]
    deviation: float
    mean: float = 0.0
    layer: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Architecture:
    """One architecture.

    Attributes:
        keys: Its metadata beyond the common keys, without the name's prefix.
        block: The tensors of one layer.
        outer: The tensors outside the layers, given the vocabulary's size.
        check: Raises UsageError for a shape that it cannot have.
    """

    keys: Callable[[ModelShape], dict[str, MetadataValue]]
    block: Callable[[ModelShape, int], Iterator[TensorSpec]]
    outer: Callable[[ModelShape, int], Iterator[TensorSpec]]
    check: Callable[[ModelShape], None]


def architecture_of(shape: ModelShape) -> Architecture:
    """The table entry for `shape`, which has passed the architecture's own check.

    Raises:
        UsageError: The architecture is not known, or cannot have this shape.
    """
    entry = ARCHITECTURES.get(shape.architecture)
    if entry is None:
        raise UsageError(f"architecture {shape.architecture}: choose from {', '.join(sorted(ARCHITECTURES))}")
    entry.check(shape)
    return entry


def model_metadata(shape: ModelShape, vocabulary: int) -> dict[str, MetadataValue]:
    """Every `<architecture>.*` key of the model."""
    keys = {
        "block_count": metadata.u32(shape.layers),
        "context_length": metadata.u32(shape.context),
        "embedding_length": metadata.u32(shape.embedding),
        "feed_forward_length": metadata.u32(shape.dense_width or shape.expert_width),
        "attention.head_count": metadata.u32(shape.heads),
        "attention.head_count_kv": metadata.u32(shape.kv_heads),
        "attention.key_length": metadata.u32(shape.head_dim),
        "attention.value_length": metadata.u32(shape.head_dim),
        "attention.layer_norm_rms_epsilon": metadata.f32(shape.rms_epsilon),
        "rope.freq_base": metadata.f32(shape.rope_base),
        "expert_count": metadata.u32(shape.experts),
        "expert_used_count": metadata.u32(shape.top_k),
        "vocab_size": metadata.u32(vocabulary),
    }
    keys |= architecture_of(shape).keys(shape)
    return {f"{shape.architecture}.{key}": value for key, value in keys.items()}


def model_tensors(shape: ModelShape, vocabulary: int) -> list[TensorSpec]:
    """Every tensor of the model, in file order."""
    entry = architecture_of(shape)
    tensors = list(entry.outer(shape, vocabulary))
    for layer in range(shape.layers):
        tensors += entry.block(shape, layer)
    return tensors


# Building blocks. A name without "blk." gets its layer's prefix and the suffix ".weight".


def _matrix(layer: int | None, name: str, *shape: int, gain: float = 1.0) -> TensorSpec:
    """Weights of a matrix product: `shape[0]` values in, unit scale out."""
    deviation = gain / math.sqrt(shape[0])
    return TensorSpec(name=_full(layer, name), shape=shape, kind="matrix", deviation=deviation, layer=layer)


def _norm(layer: int | None, name: str, width: int, *, centre: float = 1.0) -> TensorSpec:
    return TensorSpec(
        name=_full(layer, name),
        shape=(width,),
        kind="float",
        deviation=0.1 * centre,
        mean=centre,
        layer=layer,
    )


def _router(shape: ModelShape, layer: int, *, input_rms: float = 1.0) -> TensorSpec:
    deviation = ROUTER_SPREAD / (input_rms * math.sqrt(shape.embedding))
    return TensorSpec(
        name=_full(layer, "ffn_gate_inp"),
        shape=(shape.embedding, shape.experts),
        kind="router",
        deviation=deviation,
        layer=layer,
    )


def _full(layer: int | None, name: str) -> str:
    prefix = "" if layer is None else f"blk.{layer}."
    return prefix + name if "." in name else f"{prefix}{name}.weight"


def _embeddings(shape: ModelShape, vocabulary: int, *, deviation: float = 1.0) -> TensorSpec:
    return TensorSpec(
        name="token_embd.weight",
        shape=(shape.embedding, vocabulary),
        kind="matrix",
        deviation=deviation,
    )


def _outer(shape: ModelShape, vocabulary: int) -> Iterator[TensorSpec]:
    yield _embeddings(shape, vocabulary)
    yield _norm(None, "output_norm", shape.embedding)
    yield _matrix(None, "output", shape.embedding, vocabulary)


def _attention(shape: ModelShape, layer: int) -> Iterator[TensorSpec]:
    query_width, kv_width = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    yield _norm(layer, "attn_norm", shape.embedding)
    yield _matrix(layer, "attn_q", shape.embedding, query_width)
    yield _matrix(layer, "attn_k", shape.embedding, kv_width)
    yield _matrix(layer, "attn_v", shape.embedding, kv_width)
    yield _matrix(layer, "attn_output", query_width, shape.embedding)


def _head_norms(shape: ModelShape, layer: int, *, query_centre: float = 1.0) -> Iterator[TensorSpec]:
    yield _norm(layer, "attn_q_norm", shape.head_dim, centre=query_centre)
    yield _norm(layer, "attn_k_norm", shape.head_dim)


def _dense_ffn(shape: ModelShape, layer: int) -> Iterator[TensorSpec]:
    yield _matrix(layer, "ffn_gate", shape.embedding, shape.dense_width)
    yield _matrix(layer, "ffn_up", shape.embedding, shape.dense_width)
    yield _matrix(layer, "ffn_down", shape.dense_width, shape.embedding)


def _split_experts(shape: ModelShape, layer: int) -> Iterator[TensorSpec]:
    yield _matrix(layer, "ffn_gate_exps", shape.embedding, shape.expert_width, shape.experts)
    yield _matrix(layer, "ffn_up_exps", shape.embedding, shape.expert_width, shape.experts)
    yield _matrix(layer, "ffn_down_exps", shape.expert_width, shape.embedding, shape.experts)


def _fused_experts(shape: ModelShape, layer: int) -> Iterator[TensorSpec]:
    yield _matrix(layer, "ffn_gate_up_exps", shape.embedding, 2 * shape.expert_width, shape.experts)
    yield _matrix(layer, "ffn_down_exps", shape.expert_width, shape.embedding, shape.experts)


def _experts_everywhere(shape: ModelShape) -> None:
    if shape.dense_layers:
        raise UsageError(
            f"dense_layers {shape.dense_layers}: {shape.architecture} has experts in every layer"
        )


# The architectures.


def _qwen3moe_keys(shape: ModelShape) -> dict[str, MetadataValue]:
    return {"expert_feed_forward_length": metadata.u32(shape.expert_width)}


def _qwen3moe_block(shape: ModelShape, layer: int) -> Iterator[TensorSpec]:
    yield from _attention(shape, layer)
    yield from _head_norms(shape, layer)
    yield _norm(layer, "ffn_norm", shape.embedding)
    yield _router(shape, layer)
    yield from _split_experts(shape, layer)


def _llama_keys(shape: ModelShape) -> dict[str, MetadataValue]:
    # Experts are as wide as the key for dense layers says; there is no other key.
    return {
        "feed_forward_length": metadata.u32(shape.expert_width),
        "rope.dimension_count": metadata.u32(shape.head_dim),
    }


def _llama_block(shape: ModelShape, layer: int) -> Iterator[TensorSpec]:
    yield from _attention(shape, layer)
    yield _norm(layer, "ffn_norm", shape.embedding)
    yield _router(shape, layer)
    yield from _split_experts(shape, layer)


def _gemma4_is_windowed(shape: ModelShape, layer: int) -> bool:
    """Whether a layer attends to a sliding window: all but every third, and the last one never."""
    return layer % 3 != 2 and layer != shape.layers - 1


def _gemma4_keys(shape: ModelShape) -> dict[str, MetadataValue]:
    return {
        "expert_feed_forward_length": metadata.u32(shape.expert_width),
        "attention.sliding_window": metadata.u32(256),
        "attention.sliding_window_pattern": metadata.booleans(
            [_gemma4_is_windowed(shape, layer) for layer in range(shape.layers)]
        ),
        "attention.key_length_swa": metadata.u32(shape.head_dim),
        "attention.value_length_swa": metadata.u32(shape.head_dim),
        "embedding_length_per_layer_input": metadata.u32(0),
        "rope.freq_base_swa": metadata.f32(10000.0),
    }


def _gemma4_outer(shape: ModelShape, vocabulary: int) -> Iterator[TensorSpec]:
    # The graph multiplies embeddings by sqrt(embedding), and uses them as the output matrix too.
    yield _embeddings(shape, vocabulary, deviation=1 / math.sqrt(shape.embedding))
    yield _norm(None, "output_norm", shape.embedding)
    yield _norm(None, "rope_freqs", shape.head_dim // 2)


def _gemma4_block(shape: ModelShape, layer: int) -> Iterator[TensorSpec]:
    yield from _attention(shape, layer)
    # Scores are not divided by sqrt(head_dim) in the graph; the query's norm does it.
    yield from _head_norms(shape, layer, query_centre=1 / math.sqrt(shape.head_dim))
    yield _norm(layer, "post_attention_norm", shape.embedding)
    yield _norm(layer, "ffn_norm", shape.embedding)
    yield from _dense_ffn(shape, layer)
    yield _norm(layer, "post_ffw_norm", shape.embedding)
    if layer < shape.dense_layers:
        return
    # The router sees the normed stream divided by sqrt(embedding), times a learnt scale near 1.
    yield _router(shape, layer, input_rms=1 / math.sqrt(shape.embedding))
    yield _norm(layer, "ffn_gate_inp.scale", shape.embedding)
    yield _norm(layer, "pre_ffw_norm_2", shape.embedding)
    yield _norm(layer, "post_ffw_norm_1", shape.embedding)
    yield _norm(layer, "post_ffw_norm_2", shape.embedding)
    yield from _fused_experts(shape, layer)
    yield _norm(layer, "ffn_down_exps.scale", shape.experts)


def _gemma4_check(shape: ModelShape) -> None:
    if not shape.dense_width:
        raise UsageError("dense_width 0: every layer of gemma4 has a dense feed-forward beside its experts")


ARCHITECTURES: Final = {
    "gemma4": Architecture(keys=_gemma4_keys, block=_gemma4_block, outer=_gemma4_outer, check=_gemma4_check),
    "llama": Architecture(keys=_llama_keys, block=_llama_block, outer=_outer, check=_experts_everywhere),
    "qwen3moe": Architecture(
        keys=_qwen3moe_keys, block=_qwen3moe_block, outer=_outer, check=_experts_everywhere
    ),
}
"""By the name in `general.architecture`."""
