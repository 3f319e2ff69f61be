"""Where the experts of a GGUF model lie, told by its header alone.

Owns the division of a model's files into experts and their slices. Must not know llama.cpp, which has to
be neither installed nor loadable, nor who reads the slices.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from bmoe.io.errors import FileError, FormatError, UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bmoe.synth.reader import SourceModel

_SHARD: Final = re.compile(r"^(?P<prefix>.*)-(?P<index>\d{5})-of-(?P<count>\d{5})\.gguf$", re.DOTALL)
_EXPERTS: Final = re.compile(r"^blk\.(\d{1,9})\.ffn_(gate|up|down|gate_up)_exps\.weight$")
_RANK: Final = {"gate_up": 0, "gate": 0, "up": 1, "down": 2}
_MAGIC: Final = b"GGUF"

# (file index, offset, length) of one projection's weights of one expert.
Slice = tuple[int, int, int]


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertLayout:
    """The experts of a model.

    Attributes:
        paths: Its files.
        layers: The file's `blk.N` of each layer that has experts, ascending.
        experts: Of each of those layers.
        entries: The slices of each expert in order of use; layer by layer, experts in order.
        top_k: Experts per token and layer.
    """

    paths: tuple[str, ...]
    layers: tuple[int, ...]
    experts: tuple[int, ...]
    entries: tuple[tuple[Slice, ...], ...]
    top_k: int

    @property
    def expert_bytes(self) -> int:
        """All experts of all layers."""
        return sum(length for entry in self.entries for _, _, length in entry)

    @property
    def slice_bytes(self) -> int:
        """Of a slice, on average."""
        return self.expert_bytes // sum(map(len, self.entries))

    def cycle_bytes(self, blocks: Sequence[int] | None = None) -> int:
        """What one token routes over: top-k average experts of every layer.

        Args:
            blocks: Block size of each file, to count the windows that a read really takes.
        """
        first, total = 0, 0.0
        for count in self.experts:
            layer = self.entries[first : first + count]
            total += min(self.top_k, count) / count * sum(_read_bytes(s, blocks) for e in layer for s in e)
            first += count
        return round(total)


def read_layout(path: str) -> ExpertLayout | None:
    """The experts of the model at `path`; None when it is no GGUF file or has none.

    Raises:
        FormatError: It is a GGUF file and its header is broken, or its layers contradict themselves.
        FileError: It cannot be read, or a shard is missing.
        UsageError: It is a shard, and not the first.
    """
    if not _is_gguf(path):
        return None
    from bmoe.synth.reader import read_model

    models = [read_model(shard) for shard in _shards(path)]
    found: dict[int, dict[int, tuple[int, list[Slice]]]] = {}
    for file_index, model in enumerate(models):
        for tensor in model.tensors:
            match = _EXPERTS.match(tensor.name)
            if match is None or len(tensor.shape) != 3 or tensor.shape[2] < 2:
                continue
            count = tensor.shape[2]
            length = tensor.size_bytes // count
            slices = [(file_index, tensor.offset_bytes + e * length, length) for e in range(count)]
            found.setdefault(int(match[1]), {})[_RANK[match[2]]] = (count, slices)
    if not found:
        return None
    layers = tuple(sorted(found))
    experts: list[int] = []
    entries: list[tuple[Slice, ...]] = []
    for layer in layers:
        projections = [found[layer][rank] for rank in sorted(found[layer])]
        counts = {count for count, _ in projections}
        if len(counts) != 1:
            raise FormatError(
                "the layer's expert tensors disagree", path=path, field=f"blk.{layer}", got=sorted(counts)
            )
        experts.append(counts.pop())
        entries += zip(*(slices for _, slices in projections), strict=True)
    top_k = _top_k(models[0])
    if top_k is None:
        raise FormatError("does not say how many experts a token uses", path=path, field="expert_used_count")
    return ExpertLayout(
        paths=tuple(model.path for model in models),
        layers=layers,
        experts=tuple(experts),
        entries=tuple(entries),
        top_k=min(top_k, max(experts)),
    )


def _read_bytes(slice_: Slice, blocks: Sequence[int] | None) -> int:
    from bmoe.tools.iobench.lanes import window

    return slice_[2] if blocks is None else window(slice_, blocks)[2]


def _top_k(model: SourceModel) -> int | None:
    value = model.metadata.get(f"{model.architecture}.expert_used_count")
    number = None if value is None else value.integer()
    return number if number is not None and number > 0 else None


def _is_gguf(path: str) -> bool:
    try:
        with open(path, "rb") as file:
            return bool(file.read(len(_MAGIC)) == _MAGIC)
    except OSError as error:
        raise FileError("cannot be read", path=path, got=error.strerror) from error


def _shards(path: str) -> tuple[str, ...]:
    """All files of the split set that `path` begins, or itself."""
    match = _SHARD.match(path)
    if match is None or int(match["count"]) <= 1:
        return (path,)
    count, index = int(match["count"]), int(match["index"])
    first = f"{match['prefix']}-00001-of-{count:05d}.gguf"
    if index != 1:
        raise UsageError(f"{path} is shard {index} of {count}", hint=f"give the first: {first}")
    shards = [f"{match['prefix']}-{i:05d}-of-{count:05d}.gguf" for i in range(1, count + 1)]
    for shard in shards:
        if not os.path.exists(shard):
            raise FileError("a shard of the model is missing", path=shard, expected=f"{count} files")
    return tuple(shards)
