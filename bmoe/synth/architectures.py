"""What llama.cpp expects of each architecture: metadata keys and tensors, one table entry each.

An `Architecture` says which keys (without the `architecture.` prefix) and which parts a layer has.
recurrent.py and latent.py hold the parts that only few have.

Knows nothing of block types, files or random numbers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from bmoe.io.errors import UsageError
from bmoe.synth import latent, recurrent
from bmoe.synth.metadata import boolean, booleans, f32, i32s, u32
from bmoe.synth.parts import (
    Part,
    TensorSpec,
    attention,
    bias,
    biases_of_width,
    choice,
    dense_ffn,
    embeddings,
    expert_biases,
    fused_experts,
    head_norms,
    layer_of,
    leading_dense,
    matrix,
    nextn_tensors,
    norm,
    norms,
    outer,
    router,
    router_matrix,
    selection_bias,
    shared_expert,
    sinks,
    split_experts,
    ungated_experts,
    wide_norms,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from bmoe.gguf_values import MetadataValue
    from bmoe.synth.shape import ModelShape

    Keys = dict[str, MetadataValue]

_SIGMOID: Final = 2  # llama.cpp's number of a gating function
_WINDOW_TOKENS: Final = 32  # shorter than any test's prompt


@dataclass(frozen=True, kw_only=True, slots=True)
class Architecture:
    """One architecture.

    Attributes:
        keys: Its metadata beyond the common keys, without the name's prefix; replaces common ones.
        block: The tensors of one layer.
        outer: The tensors outside the layers, given the vocabulary's size.
        dense_first: Leading layers may be dense.
        square: Queries must be as wide as the stream.
        nextn: The tensors of a multi-token-prediction block, where it can have them.
    """

    keys: Callable[[ModelShape], Keys]
    block: Part
    outer: Callable[[ModelShape, int], Iterator[TensorSpec]] = outer
    dense_first: bool = False
    square: bool = False
    nextn: Part | None = None


def architecture_of(shape: ModelShape) -> Architecture:
    """The table entry for `shape`.

    Raises:
        UsageError: The architecture is not known, or cannot have this shape.
    """
    name = shape.architecture
    entry = ARCHITECTURES.get(name)
    if entry is None:
        raise UsageError(f"architecture {name}: choose from {', '.join(sorted(ARCHITECTURES))}")
    if shape.dense_layers and not entry.dense_first:
        raise UsageError(f"dense_layers {shape.dense_layers}: {name} has experts in every layer")
    if shape.nextn_layers and entry.nextn is None:
        raise UsageError(f"nextn_layers {shape.nextn_layers}: {name} has no such blocks here")
    if entry.square and shape.heads * shape.head_dim != shape.embedding:
        raise UsageError(
            f"embedding {shape.embedding}: {name} needs heads * head_dim, {shape.heads * shape.head_dim}"
        )
    if not shape.dense_width and any(
        tensor.shape and not min(tensor.shape) for tensor in entry.block(shape, 0)
    ):
        raise UsageError(f"dense_width 0: {name} has dense feed-forwards")
    return entry


def model_metadata(shape: ModelShape, vocabulary: int) -> Keys:
    """Every `<architecture>.*` key of the model."""
    keys = {
        "block_count": u32(shape.layers + shape.nextn_layers),
        "context_length": u32(shape.context),
        "embedding_length": u32(shape.embedding),
        "feed_forward_length": u32(shape.dense_width or shape.expert_width),
        "attention.head_count": u32(shape.heads),
        "attention.head_count_kv": u32(shape.kv_heads),
        "attention.key_length": u32(shape.head_dim),
        "attention.value_length": u32(shape.head_dim),
        "attention.layer_norm_rms_epsilon": f32(shape.rms_epsilon),
        "rope.freq_base": f32(shape.rope_base),
        "expert_count": u32(shape.experts),
        "expert_used_count": u32(shape.top_k),
        "vocab_size": u32(vocabulary),
    }
    keys |= architecture_of(shape).keys(shape)
    if shape.nextn_layers:
        keys["nextn_predict_layers"] = u32(shape.nextn_layers)
    return {f"{shape.architecture}.{key}": value for key, value in keys.items()}


def model_tensors(shape: ModelShape, vocabulary: int) -> list[TensorSpec]:
    """Every tensor of the model, in file order."""
    entry = architecture_of(shape)
    tensors = list(entry.outer(shape, vocabulary))
    for layer in range(shape.layers):
        tensors += entry.block(shape, layer)
    for layer in range(shape.layers, shape.layers + shape.nextn_layers):
        assert entry.nextn is not None
        tensors += entry.nextn(shape, layer)
    return tensors


# Groups of keys.


def _expert_width(shape: ModelShape) -> Keys:
    return {"expert_feed_forward_length": u32(shape.expert_width)}


def _experts_are_the_ffn(shape: ModelShape) -> Keys:
    """Experts are as wide as the key for dense layers says; there is no other key."""
    return {"feed_forward_length": u32(shape.expert_width)}


def _shared_width(shape: ModelShape) -> Keys:
    return _expert_width(shape) | {"expert_shared_feed_forward_length": u32(shape.expert_width)}


def _shared_one(shape: ModelShape) -> Keys:
    """One shared expert, weights of the chosen ones that sum to 2.5, leading dense layers."""
    return _expert_width(shape) | {
        "expert_shared_count": u32(1),
        "leading_dense_block_count": u32(shape.dense_layers),
        "expert_weights_scale": f32(2.5),
        "expert_weights_norm": boolean(value=True),
    }


def _sigmoid(shape: ModelShape) -> Keys:
    return _shared_one(shape) | {"expert_gating_func": u32(_SIGMOID)}


def _whole_rope(shape: ModelShape) -> Keys:
    return {"rope.dimension_count": u32(shape.head_dim)}


def _windows(shape: ModelShape) -> list[bool]:
    """Which layers attend to a sliding window: every other one, the last never."""
    return [layer % 2 == 0 and layer != shape.layers - 1 for layer in range(shape.layers)]


def _plus(*groups: Callable[[ModelShape], Keys], **more: MetadataValue) -> Callable[[ModelShape], Keys]:
    def keys(shape: ModelShape) -> Keys:
        found: Keys = {}
        for group in groups:
            found |= group(shape)
        return found | {name.replace("__", "."): value for name, value in more.items()}

    return keys


# Parts that single architectures need.


def _gemma4_windows(shape: ModelShape) -> list[bool]:
    """All but every third, and the last one never."""
    return [layer % 3 != 2 and layer != shape.layers - 1 for layer in range(shape.layers)]


def _gemma4_keys(shape: ModelShape) -> Keys:
    return _expert_width(shape) | {
        "attention.sliding_window": u32(_WINDOW_TOKENS),
        "attention.sliding_window_pattern": booleans(_gemma4_windows(shape)),
        "attention.key_length_swa": u32(shape.head_dim),
        "attention.value_length_swa": u32(shape.head_dim),
        "embedding_length_per_layer_input": u32(0),
        "rope.freq_base_swa": f32(10000.0),
    }


def _gemma4_outer(shape: ModelShape, vocabulary: int) -> Iterator[TensorSpec]:
    # The graph multiplies embeddings by sqrt(embedding), and uses them as the output matrix too.
    yield embeddings(shape, vocabulary, deviation=1 / math.sqrt(shape.embedding))
    yield norm(None, "output_norm", shape.embedding)
    yield norm(None, "rope_freqs", shape.head_dim // 2)


def _gemma4_experts(shape: ModelShape, layer: int) -> Iterator[TensorSpec]:
    # The router sees the normed stream divided by sqrt(embedding), times a learnt scale near 1.
    yield router_matrix(shape, layer, input_rms=1 / math.sqrt(shape.embedding))
    yield norm(layer, "ffn_gate_inp.scale", shape.embedding)
    yield norm(layer, "pre_ffw_norm_2", shape.embedding)
    yield norm(layer, "post_ffw_norm_1", shape.embedding)
    yield norm(layer, "post_ffw_norm_2", shape.embedding)
    yield from fused_experts(shape, layer)
    yield norm(layer, "ffn_down_exps.scale", shape.experts)


def _phimoe_outer(shape: ModelShape, vocabulary: int) -> Iterator[TensorSpec]:
    yield from outer(shape, vocabulary)
    yield bias(None, "output_norm", shape.embedding)
    yield bias(None, "output", vocabulary)


def _lfm2_outer(shape: ModelShape, vocabulary: int) -> Iterator[TensorSpec]:
    # Its output norm has another name, and the embeddings are the output matrix.
    yield embeddings(shape, vocabulary)
    yield norm(None, "token_embd_norm", shape.embedding)


def _arctic_dense(shape: ModelShape, layer: int) -> Iterator[TensorSpec]:
    """A feed-forward as wide as the stream beside the experts, which have a 1-D tensor named as they are."""
    for name in ("ffn_gate", "ffn_up", "ffn_down"):
        yield matrix(layer, name, shape.embedding, shape.embedding)
    yield norm(layer, "ffn_norm_exps", shape.embedding)


def _grove_chunks(shape: ModelShape, layer: int) -> Iterator[TensorSpec]:
    """Smaller experts, one for every two of the others."""
    count = shape.experts // 2
    yield matrix(layer, "ffn_gate_chexps", shape.embedding, shape.expert_width, count)
    yield matrix(layer, "ffn_up_chexps", shape.embedding, shape.expert_width, count)
    yield matrix(layer, "ffn_down_chexps", shape.expert_width, shape.embedding, count)


def _narrow_ffn(shape: ModelShape, layer: int) -> Iterator[TensorSpec]:
    """A dense feed-forward as wide as one expert."""
    yield matrix(layer, "ffn_gate", shape.embedding, shape.expert_width)
    yield matrix(layer, "ffn_up", shape.embedding, shape.expert_width)
    yield matrix(layer, "ffn_down", shape.expert_width, shape.embedding)


def _interleaved(_: ModelShape, layer: int) -> bool:
    """Every second layer has experts."""
    return layer % 2 == 1


_NOTHING: Final = layer_of()
_MOE: Final = layer_of(router, split_experts)
_BIASED_MOE: Final = layer_of(router, selection_bias, split_experts)
_SHARED_MOE: Final = layer_of(_MOE, shared_expert())
_BIASED_SHARED_MOE: Final = layer_of(_BIASED_MOE, shared_expert())
_GATED_SHARED_MOE: Final = layer_of(_MOE, shared_expert(gated=True))
_QK_NORMED: Final = layer_of(attention(), head_norms())
_GLM: Final = layer_of(attention(biased=True), head_norms(), norms("post_attention_norm"))
_DELTA_NET: Final = choice(
    recurrent.is_recurrent, recurrent.delta_net, layer_of(attention(gated="query"), head_norms())
)
_QWEN_TAIL: Final = layer_of(norms("post_attention_norm"), _GATED_SHARED_MOE)
_QWEN_NEXTN: Final = layer_of(attention(gated="query"), head_norms(), _QWEN_TAIL, nextn_tensors)

ARCHITECTURES: Final = {
    "afmoe": Architecture(
        keys=_plus(
            _sigmoid, attention__sliding_window=u32(_WINDOW_TOKENS), attention__sliding_window_pattern=u32(2)
        ),
        block=layer_of(
            attention(gated="own"),
            head_norms(),
            norms("post_attention_norm", "ffn_norm", "post_ffw_norm"),
            leading_dense(dense_ffn, _BIASED_SHARED_MOE),
        ),
        dense_first=True,
    ),
    "arctic": Architecture(
        keys=_plus(_experts_are_the_ffn, _whole_rope),
        block=layer_of(attention(), norms("ffn_norm"), _arctic_dense, _MOE),
        square=True,
    ),
    "bailingmoe": Architecture(
        keys=_plus(_shared_one, _whole_rope),
        block=layer_of(attention(), norms("ffn_norm"), _SHARED_MOE),
    ),
    "bailingmoe2": Architecture(
        keys=_plus(_sigmoid, _whole_rope),
        block=layer_of(
            attention(fused=True),
            head_norms(),
            norms("ffn_norm"),
            leading_dense(dense_ffn, _BIASED_SHARED_MOE),
        ),
        dense_first=True,
        square=True,
    ),
    "dbrx": Architecture(
        keys=_plus(
            _experts_are_the_ffn,
            attention__layer_norm_epsilon=f32(1e-5),
            attention__clamp_kqv=f32(8.0),
        ),
        block=layer_of(attention(fused=True), norms("attn_output_norm"), _MOE),
        square=True,
    ),
    "deepseek": Architecture(
        keys=_plus(_shared_one, _whole_rope),
        block=layer_of(attention(), norms("ffn_norm"), leading_dense(dense_ffn, _SHARED_MOE)),
        dense_first=True,
        square=True,
    ),
    "deepseek2": Architecture(
        keys=_plus(_sigmoid, latent.keys),
        block=layer_of(latent.attention, norms("ffn_norm"), leading_dense(dense_ffn, _BIASED_SHARED_MOE)),
        dense_first=True,
    ),
    "dots1": Architecture(
        keys=lambda shape: _sigmoid(shape) | {"attention.head_count_kv": u32(shape.heads)},
        block=layer_of(
            attention(every_head_kv=True),
            head_norms(),
            norms("ffn_norm"),
            leading_dense(dense_ffn, _BIASED_SHARED_MOE),
        ),
        dense_first=True,
    ),
    "ernie4_5-moe": Architecture(
        keys=lambda shape: (
            _shared_width(shape)
            | {
                "interleave_moe_layer_step": u32(1),
                "leading_dense_block_count": u32(shape.dense_layers),
            }
        ),
        block=layer_of(attention(), norms("ffn_norm"), leading_dense(dense_ffn, _BIASED_SHARED_MOE)),
        dense_first=True,
    ),
    "exaone-moe": Architecture(
        keys=_plus(
            _sigmoid,
            _shared_width,
            attention__sliding_window=u32(_WINDOW_TOKENS),
            attention__sliding_window_pattern=u32(2),
        ),
        block=layer_of(_QK_NORMED, norms("ffn_norm"), leading_dense(dense_ffn, _BIASED_SHARED_MOE)),
        dense_first=True,
    ),
    "gemma4": Architecture(
        keys=_gemma4_keys,
        block=layer_of(
            attention(),
            # Scores are not divided by sqrt(head_dim) in the graph; the query's norm does it.
            head_norms(query_centre=lambda shape: 1 / math.sqrt(shape.head_dim)),
            norms("post_attention_norm", "ffn_norm"),
            dense_ffn,
            norms("post_ffw_norm"),
            leading_dense(_NOTHING, _gemma4_experts),
        ),
        outer=_gemma4_outer,
        dense_first=True,
    ),
    "glm4moe": Architecture(
        keys=_sigmoid,
        block=layer_of(_GLM, leading_dense(dense_ffn, _BIASED_SHARED_MOE)),
        dense_first=True,
        nextn=layer_of(_GLM, _BIASED_SHARED_MOE, nextn_tensors),
    ),
    "gpt-oss": Architecture(
        keys=_plus(_expert_width, attention__sliding_window=u32(_WINDOW_TOKENS)),
        block=layer_of(
            attention(biased=True),
            biases_of_width("attn_output"),
            sinks,
            norms("post_attention_norm"),
            _MOE,
            expert_biases,
        ),
    ),
    "granitehybrid": Architecture(
        keys=_plus(_experts_are_the_ffn, recurrent.mamba2_keys, logit_scale=f32(1.0)),
        block=layer_of(
            choice(recurrent.is_recurrent, recurrent.mamba2, attention()), norms("ffn_norm"), _MOE
        ),
    ),
    "granitemoe": Architecture(
        keys=_plus(
            _experts_are_the_ffn,
            logit_scale=f32(1.0),
            residual_scale=f32(0.5),
            embedding_scale=f32(2.0),
            attention__scale=f32(0.1),
        ),
        block=layer_of(attention(), norms("ffn_norm"), _MOE),
    ),
    "grok": Architecture(
        keys=_plus(_expert_width, _whole_rope, embedding_scale=f32(1.0), logit_scale=f32(1.0)),
        block=layer_of(
            attention(), norms("attn_output_norm", "ffn_norm"), _MOE, dense_ffn, norms("layer_output_norm")
        ),
        square=True,
    ),
    "grovemoe": Architecture(
        keys=lambda shape: (
            _expert_width(shape)
            | {
                "expert_chunk_feed_forward_length": u32(shape.expert_width),
                "expert_group_scale": f32(0.05),
                "experts_per_group": u32(2),
            }
        ),
        block=layer_of(_QK_NORMED, norms("ffn_norm"), _MOE, _grove_chunks),
    ),
    "hunyuan-moe": Architecture(
        keys=_plus(_shared_width, _experts_are_the_ffn),
        block=layer_of(_QK_NORMED, norms("ffn_norm"), _SHARED_MOE),
    ),
    "jamba": Architecture(
        keys=_plus(_experts_are_the_ffn, recurrent.mamba_keys),
        block=layer_of(
            choice(recurrent.is_recurrent, recurrent.mamba, attention()),
            norms("ffn_norm"),
            choice(_interleaved, _MOE, _narrow_ffn),
        ),
        square=True,
    ),
    "lfm2moe": Architecture(
        keys=lambda shape: (
            _expert_width(shape)
            | {
                "attention.head_count_kv": recurrent.kv_heads_by_layer(shape),
                "leading_dense_block_count": u32(shape.dense_layers),
                "expert_gating_func": u32(_SIGMOID),
                "shortconv.l_cache": u32(3),
            }
        ),
        block=layer_of(
            choice(recurrent.is_recurrent, recurrent.short_convolution, _QK_NORMED),
            norms("ffn_norm"),
            leading_dense(dense_ffn, _BIASED_MOE),
        ),
        outer=_lfm2_outer,
        dense_first=True,
        square=True,
    ),
    "llama": Architecture(
        keys=_plus(_experts_are_the_ffn, _whole_rope),
        block=layer_of(attention(), norms("ffn_norm"), _MOE),
    ),
    "llama4": Architecture(
        keys=_plus(_expert_width, _whole_rope, interleave_moe_layer_step=u32(2)),
        block=layer_of(attention(), norms("ffn_norm"), choice(_interleaved, _SHARED_MOE, dense_ffn)),
    ),
    "mellum": Architecture(
        keys=_plus(
            _expert_width,
            attention__sliding_window=u32(_WINDOW_TOKENS),
            attention__sliding_window_pattern=u32(2),
        ),
        block=layer_of(_QK_NORMED, norms("ffn_norm"), _MOE),
    ),
    "mimo2": Architecture(
        keys=lambda shape: (
            _expert_width(shape)
            | {
                "attention.sliding_window": u32(_WINDOW_TOKENS),
                "attention.sliding_window_pattern": booleans(_windows(shape)),
            }
        ),
        block=layer_of(attention(), sinks, norms("ffn_norm"), leading_dense(dense_ffn, _BIASED_MOE)),
        dense_first=True,
    ),
    "minimax-m2": Architecture(
        keys=_plus(_experts_are_the_ffn, _expert_width, expert_gating_func=u32(_SIGMOID)),
        block=layer_of(attention(), wide_norms, norms("ffn_norm"), _BIASED_MOE),
    ),
    "nemotron_h_moe": Architecture(
        keys=recurrent.nemotron_keys,
        block=choice(
            _interleaved,
            layer_of(
                norms("attn_norm"), router, selection_bias, ungated_experts, shared_expert(up_gate=False)
            ),
            choice(lambda _, layer: layer % 4 == 0, recurrent.mamba2, attention()),
        ),
    ),
    "olmoe": Architecture(
        keys=lambda shape: _experts_are_the_ffn(shape) | {"attention.head_count_kv": u32(shape.heads)},
        block=layer_of(attention(every_head_kv=True), norms("attn_q_norm", "attn_k_norm", "ffn_norm"), _MOE),
        square=True,
    ),
    "phimoe": Architecture(
        keys=_plus(_experts_are_the_ffn, _whole_rope),
        block=layer_of(
            attention(biased=True),
            norms("ffn_norm"),
            biases_of_width("attn_norm", "attn_output", "ffn_norm"),
            _MOE,
        ),
        outer=_phimoe_outer,
        square=True,
    ),
    "qwen2moe": Architecture(
        keys=_shared_width,
        block=layer_of(attention(biased=True), norms("ffn_norm"), _GATED_SHARED_MOE),
        square=True,
    ),
    "qwen35moe": Architecture(
        keys=lambda shape: (
            _shared_width(shape)
            | recurrent.delta_net_keys(shape)
            | {"rope.dimension_sections": i32s([shape.head_dim // part for part in (4, 8, 8)] + [0])}
        ),
        block=layer_of(_DELTA_NET, _QWEN_TAIL),
        nextn=_QWEN_NEXTN,
    ),
    "qwen3moe": Architecture(keys=_expert_width, block=layer_of(_QK_NORMED, norms("ffn_norm"), _MOE)),
    "qwen3next": Architecture(
        keys=_plus(_shared_width, recurrent.delta_net_keys),
        block=layer_of(_DELTA_NET, _QWEN_TAIL),
        nextn=_QWEN_NEXTN,
    ),
    "smallthinker": Architecture(
        keys=_plus(_expert_width, expert_gating_func=u32(_SIGMOID)),
        block=layer_of(attention(), norms("ffn_norm"), _MOE),
    ),
}
"""By the name in `general.architecture`."""
