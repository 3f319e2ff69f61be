"""What a finished synthetic model is, in the numbers that matter for streaming it."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bmoe.synth.writer import PlannedTensor


@dataclass(frozen=True, kw_only=True, slots=True)
class SynthReport:
    """A model that was written.

    Attributes:
        path: The file, the first of a split set.
        size_bytes: Its size.
        architecture: As llama.cpp knows it.
        moe_layers: Layers with experts.
        experts: Experts in each of them.
        top_k: Experts a token is routed to.
        expert_bytes: All slices of one expert, for each layer with experts, in order.
    """

    path: str
    size_bytes: int
    architecture: str
    moe_layers: int
    experts: int
    top_k: int
    expert_bytes: tuple[int, ...]


def expert_bytes_by_layer(tensors: Sequence[PlannedTensor], experts: int) -> tuple[int, ...]:
    """The bytes of one expert in each layer that has experts."""
    totals: defaultdict[int, int] = defaultdict(int)
    for tensor in tensors:
        if tensor.name.endswith("_exps.weight"):
            totals[int(tensor.name.split(".")[1])] += tensor.size_bytes // experts
    return tuple(totals[layer] for layer in sorted(totals))
