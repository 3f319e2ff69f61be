"""The shape of a random model: its numbers, their limits, and named presets.

Knows no architecture's tensors; which numbers an architecture uses is architectures.py's business.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from bmoe.io.errors import UsageError

MAX_EXPERTS: Final = 1024  # LLAMA_MAX_EXPERTS
MAX_LAYERS: Final = 512  # LLAMA_MAX_LAYERS
_MAX_EXTENT: Final = 1 << 24  # far beyond any model, and no product of two overflows 64 bits


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelShape:
    """What a model is made of; checked on construction.

    Attributes:
        architecture: A name llama.cpp knows, among `architectures.ARCHITECTURES`.
        layers: Blocks in total.
        embedding: Width of the residual stream.
        heads: Attention heads.
        kv_heads: Key and value heads; divides `heads`.
        head_dim: Width of a head; even.
        experts: Experts per layer.
        top_k: Experts a token is routed to.
        expert_width: Hidden units of one expert.
        dense_width: Hidden units of a dense or shared feed-forward, where the architecture has one.
        dense_layers: Leading layers without experts, where the architecture allows them.
        nextn_layers: Multi-token-prediction blocks behind the layers, where the architecture allows them.
        context: The context length the model claims to be trained for.
        rope_base: Base of the rotary frequencies.
        rms_epsilon: Of the norms.

    Raises:
        UsageError: A number is out of range or does not fit the others.
    """

    architecture: str
    layers: int
    embedding: int
    heads: int
    kv_heads: int
    head_dim: int
    experts: int
    top_k: int
    expert_width: int
    dense_width: int = 0
    dense_layers: int = 0
    nextn_layers: int = 0
    context: int = 4096
    rope_base: float = 1e6
    rms_epsilon: float = 1e-6

    def __post_init__(self) -> None:
        for name, low, high in (
            ("layers", 1, MAX_LAYERS),
            ("embedding", 1, _MAX_EXTENT),
            ("heads", 1, _MAX_EXTENT),
            ("kv_heads", 1, _MAX_EXTENT),
            ("head_dim", 2, _MAX_EXTENT),
            ("experts", 2, MAX_EXPERTS),
            ("top_k", 1, MAX_EXPERTS),
            ("expert_width", 1, _MAX_EXTENT),
            ("dense_width", 0, _MAX_EXTENT),
            ("dense_layers", 0, MAX_LAYERS),
            ("nextn_layers", 0, MAX_LAYERS - self.layers),
            ("context", 1, 1 << 30),
        ):
            value = getattr(self, name)
            if not low <= value <= high:
                raise UsageError(f"{name} {value}: must be from {low} to {high}")
        if self.top_k > self.experts:
            raise UsageError(f"top_k {self.top_k}: there are only {self.experts} experts")
        if self.dense_layers >= self.layers:
            raise UsageError(f"dense_layers {self.dense_layers}: no layer is left for experts")
        if self.heads % self.kv_heads:
            raise UsageError(f"kv_heads {self.kv_heads}: must divide the {self.heads} heads")
        if self.head_dim % 2:
            raise UsageError(f"head_dim {self.head_dim}: must be even, rotary positions turn pairs")
        if not self.rope_base > 0 or not self.rms_epsilon > 0:
            raise UsageError("rope_base and rms_epsilon must be above zero")


def _qwen3_30b(layers: int) -> ModelShape:
    return ModelShape(
        architecture="qwen3moe",
        layers=layers,
        embedding=2048,
        heads=32,
        kv_heads=4,
        head_dim=128,
        experts=128,
        top_k=8,
        expert_width=768,
        dense_width=6144,
        context=40960,
    )


def tiny_shape(architecture: str = "qwen3moe") -> ModelShape:
    """A shape for tests: a few MiB, rows of 256 so that every block type fits."""
    return ModelShape(
        architecture=architecture,
        layers=3,
        embedding=256,
        heads=4,
        kv_heads=2,
        head_dim=64,
        experts=16,
        top_k=4,
        expert_width=256,
        dense_width=256,
    )


PRESETS: Final = {
    "q3": _qwen3_30b(48),
    "q3s": _qwen3_30b(12),
    "tiny": tiny_shape(),
    "tiny-gemma4": tiny_shape("gemma4"),
    "tiny-llama": tiny_shape("llama"),
}
"""`q3` is Qwen3-30B-A3B; `q3s` its first twelve layers, about 4.5 GB in Q4_K with a vocabulary of 150k."""
