"""Multi-head latent attention with group routing, as deepseek2 has them: keys and tensors.

Keys and values of all heads come from one short latent row, which is also all that is cached.

Knows no block type, file or random number.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from bmoe.synth.metadata import u32
from bmoe.synth.parts import floats, matrix, norm

if TYPE_CHECKING:
    from collections.abc import Iterator

    from bmoe.gguf_values import MetadataValue
    from bmoe.synth.parts import TensorSpec
    from bmoe.synth.shape import ModelShape

_QUERY_RANK: Final = 64
_KV_RANK: Final = 64
_GROUPS: Final = 4


def _rope_width(shape: ModelShape) -> int:
    """Half of a head turns with the position; the other half does not."""
    return shape.head_dim // 2


def keys(shape: ModelShape) -> dict[str, MetadataValue]:
    """Ranks and widths; groups of experts where the numbers allow them."""
    rope = _rope_width(shape)
    found = {
        "attention.head_count_kv": u32(1),
        "attention.key_length": u32(_KV_RANK + rope),
        "attention.value_length": u32(_KV_RANK),
        "attention.key_length_mla": u32(shape.head_dim),
        "attention.value_length_mla": u32(shape.head_dim),
        "attention.q_lora_rank": u32(_QUERY_RANK),
        "attention.kv_lora_rank": u32(_KV_RANK),
        "rope.dimension_count": u32(rope),
    }
    # A group is judged by its two best, and half of the groups are used.
    if shape.experts % _GROUPS == 0 and shape.experts >= 2 * _GROUPS and 2 * shape.top_k <= shape.experts:
        found |= {"expert_group_count": u32(_GROUPS), "expert_group_used_count": u32(_GROUPS // 2)}
    return found


def attention(shape: ModelShape, layer: int) -> Iterator[TensorSpec]:
    """Down to a latent row and up again. What is shorter than a block of 256 is F32."""
    still = shape.head_dim - _rope_width(shape)
    values = shape.heads * shape.head_dim
    yield norm(layer, "attn_norm", shape.embedding)
    yield norm(layer, "attn_q_a_norm", _QUERY_RANK)
    yield norm(layer, "attn_kv_a_norm", _KV_RANK)
    yield matrix(layer, "attn_q_a", shape.embedding, _QUERY_RANK)
    yield floats(layer, "attn_q_b", _QUERY_RANK, values)
    yield matrix(layer, "attn_kv_a_mqa", shape.embedding, _KV_RANK + _rope_width(shape))
    yield floats(layer, "attn_k_b", still, _KV_RANK, shape.heads)
    yield floats(layer, "attn_v_b", _KV_RANK, shape.head_dim, shape.heads)
    yield matrix(layer, "attn_output", values, shape.embedding)
