"""Layers that carry a state instead of a cache: state-space, delta-net and short-convolution parts.

In a hybrid model every second layer attends, the others are one of these; `is_recurrent` says which.

Knows no block type, file or random number.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from bmoe.synth.metadata import f32, i32s, u32
from bmoe.synth.parts import floats, matrix, norm

if TYPE_CHECKING:
    from collections.abc import Iterator

    from bmoe.gguf_values import MetadataValue
    from bmoe.synth.parts import TensorSpec
    from bmoe.synth.shape import ModelShape

_KERNEL: Final = 4  # inputs that a convolution sees
_STATE: Final = 16
_INTERVAL: Final = 2


def is_recurrent(_: ModelShape, layer: int) -> bool:
    """Whether a layer carries a state: all but every second."""
    return layer % _INTERVAL != _INTERVAL - 1


def kv_heads_by_layer(shape: ModelShape) -> MetadataValue:
    """Key-value heads of each layer: none where it does not attend."""
    return i32s([0 if is_recurrent(shape, layer) else shape.kv_heads for layer in range(shape.layers)])


# Delta net: linear attention whose state is a matrix per value head, twice as many as key heads.


def _value_heads(shape: ModelShape) -> int:
    return 2 * shape.kv_heads


def delta_net_keys(shape: ModelShape) -> dict[str, MetadataValue]:
    """Heads as wide as the attention's."""
    return {
        "full_attention_interval": u32(_INTERVAL),
        "ssm.conv_kernel": u32(_KERNEL),
        "ssm.inner_size": u32(_value_heads(shape) * shape.head_dim),
        "ssm.state_size": u32(shape.head_dim),
        "ssm.time_step_rank": u32(_value_heads(shape)),
        "ssm.group_count": u32(shape.kv_heads),
    }


def delta_net(shape: ModelShape, layer: int) -> Iterator[TensorSpec]:
    """Projections, convolution, decay and gates; qwen3next has the two scalar gates in one matrix."""
    heads = _value_heads(shape)
    values = heads * shape.head_dim
    mixed = 2 * shape.kv_heads * shape.head_dim + values
    yield norm(layer, "attn_norm", shape.embedding)
    yield matrix(layer, "attn_qkv", shape.embedding, mixed)
    yield matrix(layer, "attn_gate", shape.embedding, values)
    yield floats(layer, "ssm_conv1d", _KERNEL, mixed)
    yield floats(layer, "ssm_dt.bias", heads, deviation=0.1)
    yield floats(layer, f"blk.{layer}.ssm_a", heads, mean=-1.0, deviation=0.1)
    if shape.architecture == "qwen3next":
        yield matrix(layer, "ssm_ba", shape.embedding, 2 * heads)
    else:
        yield matrix(layer, "ssm_beta", shape.embedding, heads)
        yield matrix(layer, "ssm_alpha", shape.embedding, heads)
    yield norm(layer, "ssm_norm", shape.head_dim)
    yield matrix(layer, "ssm_out", values, shape.embedding)


# State space: Mamba as in jamba, Mamba 2 as in the others. Twice as wide as the stream.


def _mamba_heads(shape: ModelShape) -> int:
    return 2 * shape.heads


def _state_space_keys(shape: ModelShape, time_step_rank: int) -> dict[str, MetadataValue]:
    return {
        "ssm.conv_kernel": u32(_KERNEL),
        "ssm.inner_size": u32(2 * shape.embedding),
        "ssm.state_size": u32(_STATE),
        "ssm.time_step_rank": u32(time_step_rank),
    }


def mamba_keys(shape: ModelShape) -> dict[str, MetadataValue]:
    """Mamba, and which layers attend."""
    return _state_space_keys(shape, _STATE) | {"attention.head_count_kv": kv_heads_by_layer(shape)}


def mamba(shape: ModelShape, layer: int) -> Iterator[TensorSpec]:
    """One state row per channel."""
    inner = 2 * shape.embedding
    yield norm(layer, "attn_norm", shape.embedding)
    yield matrix(layer, "ssm_in", shape.embedding, 2 * inner)
    yield floats(layer, "ssm_conv1d", _KERNEL, inner)
    yield floats(layer, "ssm_conv1d.bias", inner, deviation=0.1)
    yield matrix(layer, "ssm_x", inner, 3 * _STATE)
    yield norm(layer, "ssm_dt_norm", _STATE)
    yield floats(layer, "ssm_dt", _STATE, inner)
    yield floats(layer, "ssm_dt.bias", inner, deviation=0.1)
    yield norm(layer, "ssm_b_norm", _STATE)
    yield norm(layer, "ssm_c_norm", _STATE)
    yield floats(layer, f"blk.{layer}.ssm_a", _STATE, inner, mean=-1.0, deviation=0.1)
    yield floats(layer, f"blk.{layer}.ssm_d", inner, mean=1.0, deviation=0.1)
    yield matrix(layer, "ssm_out", inner, shape.embedding)


def mamba2_keys(shape: ModelShape) -> dict[str, MetadataValue]:
    """Mamba 2, and which layers attend."""
    return _state_space_keys(shape, _mamba_heads(shape)) | {
        "ssm.group_count": u32(1),
        "attention.head_count_kv": kv_heads_by_layer(shape),
    }


def mamba2(shape: ModelShape, layer: int) -> Iterator[TensorSpec]:
    """One state per head, with a single decay."""
    inner, heads = 2 * shape.embedding, _mamba_heads(shape)
    mixed = inner + 2 * _STATE
    yield norm(layer, "attn_norm", shape.embedding)
    yield matrix(layer, "ssm_in", shape.embedding, inner + mixed + heads)
    yield floats(layer, "ssm_conv1d", _KERNEL, mixed)
    yield floats(layer, "ssm_conv1d.bias", mixed, deviation=0.1)
    yield floats(layer, "ssm_dt.bias", heads, deviation=0.1)
    yield floats(layer, f"blk.{layer}.ssm_a", 1, heads, mean=-1.0, deviation=0.1)
    yield floats(layer, f"blk.{layer}.ssm_d", 1, heads, mean=1.0, deviation=0.1)
    yield norm(layer, "ssm_norm", inner)
    yield matrix(layer, "ssm_out", inner, shape.embedding)


def nemotron_keys(shape: ModelShape) -> dict[str, MetadataValue]:
    """A layer is one thing only: Mamba 2, experts, attention, experts, and again."""
    layers = range(shape.layers)
    return _state_space_keys(shape, _mamba_heads(shape)) | {
        "ssm.group_count": u32(1),
        "attention.layer_norm_epsilon": f32(shape.rms_epsilon),
        "attention.head_count_kv": i32s([shape.kv_heads if layer % 4 == 2 else 0 for layer in layers]),
        "feed_forward_length": i32s([shape.expert_width if layer % 2 else 0 for layer in layers]),
        "expert_feed_forward_length": u32(shape.expert_width),
        "expert_shared_feed_forward_length": u32(shape.expert_width),
        "expert_shared_count": u32(1),
    }


# Short convolution: a gated convolution over the last inputs, its state.


def short_convolution(shape: ModelShape, layer: int) -> Iterator[TensorSpec]:
    """A convolution over three inputs between two projections."""
    yield norm(layer, "attn_norm", shape.embedding)
    yield floats(layer, "shortconv.conv.weight", 3, shape.embedding)
    yield matrix(layer, "shortconv.in_proj.weight", shape.embedding, 3 * shape.embedding)
    yield matrix(layer, "shortconv.out_proj.weight", shape.embedding, shape.embedding)
