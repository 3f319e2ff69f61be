"""What the tensors of every architecture are put together from: norms, attention, feed-forwards.

A `Part` yields the tensors of one piece of a layer. Deviations are chosen so that activations keep unit
scale: 1/sqrt(row length) for a matrix, 1 for embeddings as the graph sees them, and norms near 1. Norms
are not exactly 1 because a tensor of equal pages would hide a misplaced one.

Knows no architecture, block type, file or random number.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal

if TYPE_CHECKING:
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


Part = Callable[["ModelShape", int], Iterator[TensorSpec]]
"""The tensors of one piece of layer number `int`."""


# Single tensors. A name without "blk." gets its layer's prefix and the suffix ".weight".


def full_name(layer: int | None, name: str) -> str:
    """`name` as it stands in the file; one with a dot keeps its ending, one with "blk." its all."""
    if name.startswith("blk."):
        return name
    prefix = "" if layer is None else f"blk.{layer}."
    return prefix + name if "." in name else f"{prefix}{name}.weight"


def matrix(layer: int | None, name: str, *shape: int) -> TensorSpec:
    """Weights of a matrix product: `shape[0]` values in, unit scale out."""
    return TensorSpec(
        name=full_name(layer, name),
        shape=shape,
        kind="matrix",
        deviation=1 / math.sqrt(shape[0]),
        layer=layer,
    )


def floats(
    layer: int | None, name: str, *shape: int, mean: float = 0.0, deviation: float | None = None
) -> TensorSpec:
    """F32 values, by default with a matrix's deviation: for rows too short for blocks."""
    spread = 1 / math.sqrt(shape[0]) if deviation is None else deviation
    return TensorSpec(
        name=full_name(layer, name), shape=shape, kind="float", deviation=spread, mean=mean, layer=layer
    )


def norm(layer: int | None, name: str, width: int, *, centre: float = 1.0) -> TensorSpec:
    """The weights of a norm, around `centre`."""
    return floats(layer, name, width, mean=centre, deviation=0.1 * centre)


def bias(layer: int | None, name: str, *shape: int) -> TensorSpec:
    """`name` with ".bias": small offsets."""
    return floats(layer, f"{name}.bias", *shape, deviation=0.1)


def router_matrix(shape: ModelShape, layer: int, *, input_rms: float = 1.0) -> TensorSpec:
    """The router of a layer whose input has that rms."""
    return TensorSpec(
        name=full_name(layer, "ffn_gate_inp"),
        shape=(shape.embedding, shape.experts),
        kind="router",
        deviation=ROUTER_SPREAD / (input_rms * math.sqrt(shape.embedding)),
        layer=layer,
    )


def embeddings(shape: ModelShape, vocabulary: int, *, deviation: float = 1.0) -> TensorSpec:
    """The token embeddings."""
    return TensorSpec(
        name="token_embd.weight",
        shape=(shape.embedding, vocabulary),
        kind="matrix",
        deviation=deviation,
    )


def outer(shape: ModelShape, vocabulary: int) -> Iterator[TensorSpec]:
    """What most models have outside their layers."""
    yield embeddings(shape, vocabulary)
    yield norm(None, "output_norm", shape.embedding)
    yield matrix(None, "output", shape.embedding, vocabulary)


# Parts of a layer, and how they are put together.


def layer_of(*parts: Part) -> Part:
    """The parts one after the other."""

    def block(shape: ModelShape, layer: int) -> Iterator[TensorSpec]:
        for part in parts:
            yield from part(shape, layer)

    return block


def leading_dense(dense: Part, rest: Part) -> Part:
    """`dense` in the first `dense_layers` layers, `rest` behind them."""
    return choice(lambda shape, layer: layer < shape.dense_layers, dense, rest)


def choice(which: Callable[[ModelShape, int], bool], yes: Part, no: Part) -> Part:
    """One of two parts, by layer."""

    def block(shape: ModelShape, layer: int) -> Iterator[TensorSpec]:
        return yes(shape, layer) if which(shape, layer) else no(shape, layer)

    return block


def norms(*names: str) -> Part:
    """Norms of the stream's width."""

    def block(shape: ModelShape, layer: int) -> Iterator[TensorSpec]:
        for name in names:
            yield norm(layer, name, shape.embedding)

    return block


def biases_of_width(*names: str) -> Part:
    """Biases of the stream's width."""

    def block(shape: ModelShape, layer: int) -> Iterator[TensorSpec]:
        for name in names:
            yield bias(layer, name, shape.embedding)

    return block


def attention(
    *,
    first: str = "attn_norm",
    biased: bool = False,
    fused: bool = False,
    gated: Literal["", "query", "own"] = "",
    every_head_kv: bool = False,
) -> Part:
    """Plain attention: its norm, and the projections of query, key, value and output.

    Args:
        first: Name of the norm before it.
        biased: Query, key and value have biases.
        fused: The three are one matrix.
        gated: A gate on the output: in the query's matrix, which doubles it, or in its own.
        every_head_kv: Every head has its own keys and values, whatever the shape's kv_heads.
    """

    def block(shape: ModelShape, layer: int) -> Iterator[TensorSpec]:
        query = shape.heads * shape.head_dim
        kv = query if every_head_kv else shape.kv_heads * shape.head_dim
        yield norm(layer, first, shape.embedding)
        if fused:
            yield matrix(layer, "attn_qkv", shape.embedding, query + 2 * kv)
        else:
            yield matrix(layer, "attn_q", shape.embedding, 2 * query if gated == "query" else query)
            yield matrix(layer, "attn_k", shape.embedding, kv)
            yield matrix(layer, "attn_v", shape.embedding, kv)
        if biased:
            for name, width in (("attn_q", query), ("attn_k", kv), ("attn_v", kv)):
                yield bias(layer, name, width)
        if gated == "own":
            yield matrix(layer, "attn_gate", shape.embedding, query)
        yield matrix(layer, "attn_output", query, shape.embedding)

    return block


def head_norms(*, query_centre: Callable[[ModelShape], float] = lambda _: 1.0) -> Part:
    """Norms of queries and keys, head by head."""

    def block(shape: ModelShape, layer: int) -> Iterator[TensorSpec]:
        yield norm(layer, "attn_q_norm", shape.head_dim, centre=query_centre(shape))
        yield norm(layer, "attn_k_norm", shape.head_dim)

    return block


def wide_norms(shape: ModelShape, layer: int) -> Iterator[TensorSpec]:
    """Norms of queries and keys over all heads at once."""
    yield norm(layer, "attn_q_norm", shape.heads * shape.head_dim)
    yield norm(layer, "attn_k_norm", shape.kv_heads * shape.head_dim)


def sinks(shape: ModelShape, layer: int) -> Iterator[TensorSpec]:
    """One logit per head that attends to nothing."""
    yield floats(layer, "attn_sinks", shape.heads, deviation=1.0)


def dense_ffn(shape: ModelShape, layer: int) -> Iterator[TensorSpec]:
    """A feed-forward of `dense_width` units."""
    yield matrix(layer, "ffn_gate", shape.embedding, shape.dense_width)
    yield matrix(layer, "ffn_up", shape.embedding, shape.dense_width)
    yield matrix(layer, "ffn_down", shape.dense_width, shape.embedding)


def router(shape: ModelShape, layer: int) -> Iterator[TensorSpec]:
    """The router of a normed stream."""
    yield router_matrix(shape, layer)


def selection_bias(shape: ModelShape, layer: int) -> Iterator[TensorSpec]:
    """Offsets that change which experts are chosen, not their weights."""
    yield bias(layer, "exp_probs_b", shape.experts)


def split_experts(shape: ModelShape, layer: int) -> Iterator[TensorSpec]:
    """Experts with gate, up and down apart."""
    yield matrix(layer, "ffn_gate_exps", shape.embedding, shape.expert_width, shape.experts)
    yield matrix(layer, "ffn_up_exps", shape.embedding, shape.expert_width, shape.experts)
    yield matrix(layer, "ffn_down_exps", shape.expert_width, shape.embedding, shape.experts)


def fused_experts(shape: ModelShape, layer: int) -> Iterator[TensorSpec]:
    """Experts with gate and up in one matrix."""
    yield matrix(layer, "ffn_gate_up_exps", shape.embedding, 2 * shape.expert_width, shape.experts)
    yield matrix(layer, "ffn_down_exps", shape.expert_width, shape.embedding, shape.experts)


def ungated_experts(shape: ModelShape, layer: int) -> Iterator[TensorSpec]:
    """Experts with up and down only."""
    yield matrix(layer, "ffn_up_exps", shape.embedding, shape.expert_width, shape.experts)
    yield matrix(layer, "ffn_down_exps", shape.expert_width, shape.embedding, shape.experts)


def expert_biases(shape: ModelShape, layer: int) -> Iterator[TensorSpec]:
    """A bias for the router and for each projection of each expert."""
    yield bias(layer, "ffn_gate_inp", shape.experts)
    yield bias(layer, "ffn_gate_exps", shape.expert_width, shape.experts)
    yield bias(layer, "ffn_up_exps", shape.expert_width, shape.experts)
    yield bias(layer, "ffn_down_exps", shape.embedding, shape.experts)


def shared_expert(*, gated: bool = False, up_gate: bool = True) -> Part:
    """An expert of `expert_width` units that every token uses.

    Args:
        gated: With a scalar gate of its own.
        up_gate: With a gate projection.
    """

    def block(shape: ModelShape, layer: int) -> Iterator[TensorSpec]:
        if gated:
            yield floats(layer, "ffn_gate_inp_shexp", shape.embedding)
        if up_gate:
            yield matrix(layer, "ffn_gate_shexp", shape.embedding, shape.expert_width)
        yield matrix(layer, "ffn_up_shexp", shape.embedding, shape.expert_width)
        yield matrix(layer, "ffn_down_shexp", shape.expert_width, shape.embedding)

    return block


def nextn_tensors(shape: ModelShape, layer: int) -> Iterator[TensorSpec]:
    """What a multi-token-prediction block has beside a layer's own tensors."""
    yield matrix(layer, "nextn.eh_proj.weight", 2 * shape.embedding, shape.embedding)
    yield norm(layer, "nextn.enorm.weight", shape.embedding)
    yield norm(layer, "nextn.hnorm.weight", shape.embedding)
    yield norm(layer, "nextn.shared_head_norm.weight", shape.embedding)
