"""What a model's tensors mean for streaming: which are experts, which are dense, how they are laid out.

It owns the division of a file into streamed slices and dense ranges. It must not know memory budgets,
reads or llama.cpp's runtime.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Self

from bmoe.gguf_rules import can_be_multiplied
from bmoe.io.errors import FormatError, UsageError
from bmoe.pipeline.native import StreamedTensor

if TYPE_CHECKING:
    from bmoe.gguf_file import GgufFacts, TensorFacts

_EXPERTS = re.compile(r"^blk\.(\d+)\.ffn_(gate|up|down|gate_up)_exps\.weight$")
_BLOCK = re.compile(r"^blk\.(\d+)\.")
_RANK = {"gate_up": 0, "gate": 0, "up": 1, "down": 2}
# Read row by row from the mapping by design: as large as the model itself, and never used whole.
_LAZY = frozenset({"per_layer_token_embd.weight"})
_I32_MAX = 2**31 - 1


@dataclass(frozen=True, slots=True)
class ModelLayout:
    """A model as streaming sees it.

    Attributes:
        facts: The header.
        tensors: Streamed tensors, layer by layer in the expected order of use.
        layer_numbers: The file's `blk.N` of each layer that has experts.
        dense: (file, start, end) of every other tensor that is loaded whole.
        dense_bytes: Their sum.
        expert_bytes: All experts of all layers.
        ignored_bytes: Tensors of multi-token-prediction blocks, which are not loaded.
        experts: Experts per layer (the largest, where layers differ); 0 for a dense model.
        top_k: Experts per token (the most, where layers differ).
        file_top_k: What the file says, where `top_k` is another number that was asked for; else None.
    """

    facts: GgufFacts
    tensors: tuple[StreamedTensor, ...]
    layer_numbers: tuple[int, ...]
    dense: tuple[tuple[int, int, int], ...]
    dense_bytes: int
    expert_bytes: int
    ignored_bytes: int
    experts: int
    top_k: int
    file_top_k: int | None = None

    @property
    def is_moe(self) -> bool:
        """Whether there is anything to stream."""
        return bool(self.tensors)

    @property
    def cycle_bytes(self) -> int:
        """Most bytes that one token routes over: the sum over layers of top-k experts."""
        return sum(t.slice_bytes * min(self.top_k, t.experts) for t in self.tensors)

    def uses_file(self, number: int) -> bool:
        """Whether anything of file `number` is loaded whole or streamed."""
        return any(t.file == number for t in self.tensors) or any(d[0] == number for d in self.dense)

    def with_top_k(self, top_k: int) -> Self:
        """The layout with another number of experts per token.

        Raises:
            UsageError: There are not as many experts, none at all, or layers differ in the file.
        """
        key = f"{self.facts.architecture}.expert_used_count"
        if not self.is_moe:
            raise UsageError(f"{self.facts.paths[0]} has no experts, so their number cannot be changed")
        if not 1 <= top_k <= self.experts:
            raise UsageError(f"{top_k} experts per token: {self.facts.paths[0]} has {self.experts}")
        if isinstance(self.facts.metadata.get(key), tuple):
            raise UsageError(f"{self.facts.paths[0]} has one {key} per layer, which cannot be overridden")
        if top_k == self.top_k:
            return self
        return replace(self, top_k=top_k, file_top_k=self.top_k)


def lay_out(facts: GgufFacts) -> ModelLayout:
    """Divides a model's tensors.

    Args:
        facts: The header.

    Raises:
        FormatError: Expert tensors of one layer disagree about the number of experts, or with the
            metadata, or are of a type that cannot be multiplied.
    """
    found: dict[int, list[tuple[int, TensorFacts]]] = {}
    dense: list[tuple[int, int, int]] = []
    ignored_bytes = 0
    blocks = facts.arch_int("block_count") - facts.arch_int("nextn_predict_layers")
    for tensor in facts.tensors:
        block = _BLOCK.match(tensor.name)
        if block and int(block[1]) >= blocks > 0:
            ignored_bytes += tensor.size_bytes
            continue
        match = _EXPERTS.match(tensor.name)
        if match and tensor.ne[2] > 1 and tensor.ne[3] == 1:
            found.setdefault(int(match[1]), []).append((_RANK[match[2]], tensor))
        elif tensor.name not in _LAZY and tensor.size_bytes:
            dense.append((tensor.file, tensor.offset_bytes, tensor.offset_bytes + tensor.size_bytes))
    streamed: list[StreamedTensor] = []
    for layer, number in enumerate(sorted(found)):
        ranked = sorted(found[number], key=lambda pair: pair[0])
        # A layer's own count, unless the metadata has one: then the layer must have that.
        expected = facts.arch_int("expert_count") or ranked[0][1].ne[2]
        for rank, (_, tensor) in enumerate(ranked):
            if tensor.ne[2] != expected or tensor.ne[2] > _I32_MAX:
                raise FormatError(
                    "the number of experts is not the layer's",
                    path=facts.paths[tensor.file],
                    offset_bytes=tensor.offset_bytes,
                    field=tensor.name,
                    expected=f"{expected} experts",
                    got=tensor.ne[2],
                )
            if not can_be_multiplied(tensor.type_name):
                raise FormatError(
                    f"experts cannot be of type {tensor.type_name}",
                    path=facts.paths[tensor.file],
                    offset_bytes=tensor.offset_bytes,
                    field=tensor.name,
                )
            streamed.append(
                StreamedTensor(
                    name=tensor.name,
                    layer=layer,
                    rank=rank,
                    ggml_type=tensor.ggml_type,
                    experts=tensor.ne[2],
                    ne0=tensor.ne[0],
                    ne1=tensor.ne[1],
                    slice_bytes=tensor.nb[2],
                    file=tensor.file,
                    file_offset=tensor.offset_bytes,
                )
            )
    experts = max((t.experts for t in streamed), default=0)
    return ModelLayout(
        facts=facts,
        tensors=tuple(streamed),
        layer_numbers=tuple(sorted(found)),
        dense=tuple(dense),
        dense_bytes=sum(end - start for _, start, end in dense),
        expert_bytes=sum(t.slice_bytes * t.experts for t in streamed),
        ignored_bytes=ignored_bytes,
        experts=experts,
        top_k=min(facts.arch_int("expert_used_count"), experts) if experts else 0,
    )
