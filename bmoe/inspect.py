"""What a model file is, in the figures that decide how it streams; from its header alone.

It owns the summary and how layers are grouped. It must not know this machine, nor how it is shown.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Final

from bmoe.gguf_file import read_gguf
from bmoe.model import ModelLayout, lay_out

if TYPE_CHECKING:
    from collections.abc import Iterable

    from bmoe.gguf_file import GgufFacts
    from bmoe.pipeline.native import StreamedTensor

_USUAL_BLOCK_BYTES: Final = 4096
_PROJECTIONS: Final = {"ffn_gate_exps": "gate", "ffn_up_exps": "up", "ffn_down_exps": "down"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Projection:
    """One expert's part of one tensor: its name, type and bytes."""

    name: str
    type_name: str
    slice_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerGroup:
    """Layers that have the same experts.

    Attributes:
        layers: Their numbers in the file, ascending.
        experts: In each.
        projections: In order of use, as far as names tell it.
        expert_bytes: Of one expert in one layer.
    """

    layers: tuple[int, ...]
    experts: int
    projections: tuple[Projection, ...]
    expert_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSummary:
    """A model's figures.

    Attributes:
        paths: Its files.
        name: `general.name`, or None.
        architecture: `general.architecture`.
        file_bytes: All files.
        layers, moe_layers: In total; with experts.
        prediction_layers: Multi-token-prediction blocks, which are ignored.
        experts, top_k: Per layer and token (the most, where layers differ); 0 for a dense model.
        shared_experts: That every token uses, which count as dense.
        groups: Layers with experts.
        expert_bytes, dense_bytes: All experts; everything else that is loaded.
        mapped_bytes: Read row by row from the file, not loaded.
        ignored_bytes: Of blocks that are ignored.
        cycle_bytes: All experts that one token is routed to.
        worst_read_bytes: To read them, all absent, in whole blocks of 4 KiB.
        context_tokens: What it was trained for, or None.
        vocabulary: Tokens, or None.
        chat_template: Whether it has one.
    """

    paths: tuple[str, ...]
    name: str | None
    architecture: str
    file_bytes: int
    layers: int
    moe_layers: int
    prediction_layers: int
    experts: int
    top_k: int
    shared_experts: int
    groups: tuple[LayerGroup, ...]
    expert_bytes: int
    dense_bytes: int
    mapped_bytes: int
    ignored_bytes: int
    cycle_bytes: int
    worst_read_bytes: int
    context_tokens: int | None
    vocabulary: int | None
    chat_template: bool


def inspect_model(path: str) -> ModelSummary:
    """Summarises the model at `path`.

    Raises:
        FileError, FormatError, UsageError: As `read_gguf` and `lay_out`.
    """
    return summarise(lay_out(read_gguf(path)))


def summarise(layout: ModelLayout) -> ModelSummary:
    """The figures of a layout."""
    facts = layout.facts
    name = facts.metadata.get("general.name")
    prediction = facts.arch_int("nextn_predict_layers")
    tensors_bytes = sum(tensor.size_bytes for tensor in facts.tensors)
    loaded = layout.dense_bytes + layout.expert_bytes + layout.ignored_bytes
    return ModelSummary(
        paths=facts.paths,
        name=name if isinstance(name, str) else None,
        architecture=facts.architecture,
        file_bytes=sum(facts.sizes_bytes),
        layers=facts.arch_int("block_count") - prediction,
        moe_layers=len(layout.layer_numbers),
        prediction_layers=prediction,
        experts=layout.experts,
        top_k=layout.top_k,
        shared_experts=_shared_experts(facts),
        groups=_groups(layout),
        expert_bytes=layout.expert_bytes,
        dense_bytes=layout.dense_bytes,
        mapped_bytes=tensors_bytes - loaded,
        ignored_bytes=layout.ignored_bytes,
        cycle_bytes=layout.cycle_bytes,
        worst_read_bytes=worst_read_bytes(layout, _USUAL_BLOCK_BYTES),
        context_tokens=facts.arch_int("context_length") or None,
        vocabulary=next((t.ne[1] for t in facts.tensors if t.name == "token_embd.weight"), None),
        chat_template=isinstance(facts.metadata.get("tokenizer.chat_template"), str),
    )


def worst_read_bytes(layout: ModelLayout, block_bytes: int) -> int:
    """What one token reads when nothing it is routed to is there: whole blocks, its largest experts."""
    return sum(sum(heapq.nlargest(layout.top_k, _windows(tensor, block_bytes))) for tensor in layout.tensors)


def _windows(tensor: StreamedTensor, block_bytes: int) -> Iterable[int]:
    for expert in range(tensor.experts):
        start = tensor.file_offset + expert * tensor.slice_bytes
        end = start + tensor.slice_bytes
        yield -(-end // block_bytes) * block_bytes - start // block_bytes * block_bytes


def _shared_experts(facts: GgufFacts) -> int:
    """As the metadata counts them; one where only the tensors tell."""
    there = any("_shexp." in tensor.name for tensor in facts.tensors)
    return max(facts.arch_int("expert_shared_count"), 1) if there else 0


def _groups(layout: ModelLayout) -> tuple[LayerGroup, ...]:
    type_names = {tensor.name: tensor.type_name for tensor in layout.facts.tensors}
    by_layer = {layer: list(tensors) for layer, tensors in groupby(layout.tensors, key=lambda t: t.layer)}
    found: dict[tuple[int, tuple[Projection, ...]], list[int]] = {}
    for layer, tensors in by_layer.items():
        projections = tuple(
            Projection(
                name=_projection(tensor.name),
                type_name=type_names[tensor.name],
                slice_bytes=tensor.slice_bytes,
            )
            for tensor in tensors
        )
        found.setdefault((tensors[0].experts, projections), []).append(layout.layer_numbers[layer])
    return tuple(
        LayerGroup(
            layers=tuple(layers),
            experts=experts,
            projections=projections,
            expert_bytes=sum(p.slice_bytes for p in projections),
        )
        for (experts, projections), layers in found.items()
    )


def _projection(tensor_name: str) -> str:
    stem = tensor_name.split(".")[2]
    return _PROJECTIONS.get(stem, "gate and up")


def ranges(numbers: Iterable[int]) -> str:
    """Ascending numbers in short: "0-3, 5"."""
    spans: list[list[int]] = []
    for number in numbers:
        if spans and spans[-1][1] == number - 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return ", ".join(str(low) if low == high else f"{low}-{high}" for low, high in spans)
