"""Facts of a GGUF model: one file, or all shards of a split set, checked before llama.cpp sees them.

It owns split sets and the facts that the rest of bmoe uses; the bytes are gguf_header.py's, llama.cpp's
demands gguf_rules.py's. It must not know streaming (which tensors are experts is `model.py`'s business),
and needs no llama.cpp.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from bmoe.gguf_header import MAGIC, GgufHeader, read_header
from bmoe.gguf_rules import check_rules
from bmoe.io.errors import FileError, FormatError, UsageError

if TYPE_CHECKING:
    from bmoe.gguf_values import Plain

_SHARD: Final = re.compile(
    r"^(?P<prefix>.*)-(?P<index>[0-9]{5})-of-(?P<count>[0-9]{5})\.gguf$", re.DOTALL | re.ASCII
)
_SPLIT_NUMBER, _SPLIT_COUNT, _SPLIT_TENSORS = "split.no", "split.count", "split.tensors.count"
MAX_SHARDS: Final = 256
"""As many files as the native side has room for (BM_MAX_FILES)."""


@dataclass(frozen=True, slots=True)
class TensorFacts:
    """One tensor: where it is and what shape it has.

    `ne` is ggml's order, fastest dimension first. `offset_bytes` is absolute in file number `file`.
    """

    name: str
    file: int
    offset_bytes: int
    size_bytes: int
    ggml_type: int
    type_name: str
    ne: tuple[int, int, int, int]
    nb: tuple[int, int, int, int]


@dataclass(frozen=True, slots=True)
class GgufFacts:
    """A model's header: one file, or all shards of a split set.

    `metadata` holds the first shard's values: numbers, flags, strings, short arrays of integers or flags
    as tuples; other arrays appear as `None`.
    """

    paths: tuple[str, ...]
    sizes_bytes: tuple[int, ...]
    metadata: dict[str, Plain]
    tensors: tuple[TensorFacts, ...]

    @property
    def architecture(self) -> str:
        """`general.architecture`, or an empty string."""
        value = self.metadata.get("general.architecture")
        return value if isinstance(value, str) else ""

    def arch_int(self, key: str, default: int = 0) -> int:
        """`<architecture>.<key>` when it is an integer, the largest when it is one per layer."""
        value = self.metadata.get(f"{self.architecture}.{key}")
        if isinstance(value, tuple):
            return max(value, default=default)
        return value if isinstance(value, int) and not isinstance(value, bool) else default

    def arch_ints(self, key: str, layers: int, default: int = 0) -> tuple[int, ...]:
        """`<architecture>.<key>` for each of `layers` layers; a single value holds for all."""
        value = self.metadata.get(f"{self.architecture}.{key}")
        if isinstance(value, tuple) and len(value) >= layers:
            return value[:layers]
        return (self.arch_int(key, default),) * layers


def shard_paths(path: str) -> tuple[str, ...]:
    """All files of the model that `path` names: itself, or its split set.

    Raises:
        UsageError: `path` is a shard but not the first.
        FileError: A shard is missing.
    """
    match = _SHARD.match(path)
    if match is None or int(match["count"]) <= 1:
        return (path,)
    count = int(match["count"])
    if count > MAX_SHARDS:
        raise UsageError(
            f"{path} is one of {count} shards; at most {MAX_SHARDS} can be streamed",
            hint="merge them with llama-gguf-split --merge",
        )
    paths = tuple(f"{match['prefix']}-{i:05d}-of-{count:05d}.gguf" for i in range(1, count + 1))
    if int(match["index"]) != 1:
        raise UsageError(
            f"{path} is shard {int(match['index'])} of {count}", hint=f"give the first: {paths[0]}"
        )
    for shard in paths:
        if not os.path.exists(shard):
            raise FileError("a shard of the model is missing", path=shard, expected=f"{count} files")
    return paths


def read_gguf(path: str) -> GgufFacts:
    """Reads the header of a model.

    Raises:
        FileError: A file cannot be opened or a shard is missing.
        FormatError: A file is not a GGUF that llama.cpp accepts, or shards do not belong together.
        UsageError: A shard other than the first was given.
    """
    headers = _headers(path)
    facts = GgufFacts(
        paths=tuple(header.path for header in headers),
        sizes_bytes=tuple(header.size_bytes for header in headers),
        metadata={key: value.plain() for key, value in headers[0].metadata.items()},
        tensors=tuple(fact for number, header in enumerate(headers) for fact in _tensors(header, number)),
    )
    check_rules(facts)
    return facts


def _headers(path: str) -> list[GgufHeader]:
    """The header of every file of the model, which belong together.

    llama.cpp goes by what the first header says, users by names: both have to agree.
    """
    paths = shard_paths(path)
    first = read_header(paths[0])
    count = _split_value(first, _SPLIT_COUNT) or 1
    if count > 1 and len(paths) == 1:
        raise FormatError(
            f"is one of {count} shards, but is not named like one",
            path=path,
            expected=f"a name that ends in -00001-of-{count:05d}.gguf",
            hint=_joined_hint(first) or "give all shards their names back",
        )
    if len(paths) > 1 and count != len(paths):
        raise FormatError(
            "its name and its header disagree about the number of shards",
            path=paths[0],
            field=_SPLIT_COUNT,
            expected=len(paths),
            got=count,
        )
    headers = [first, *(read_header(shard) for shard in paths[1:])]
    if len(headers) > 1:
        _check_set(headers)
    return headers


def _check_set(headers: list[GgufHeader]) -> None:
    """Refuses shards that are not the parts of one model, each in its place."""
    owners: dict[str, str] = {}
    for number, header in enumerate(headers):
        if (hint := _joined_hint(header)) is not None:
            raise FormatError("holds more than one shard", path=header.path, hint=hint)
        for key, expected in ((_SPLIT_NUMBER, number), (_SPLIT_COUNT, len(headers))):
            got = _split_value(header, key)
            if got != expected:
                raise FormatError(
                    f"is not shard {number + 1} of this model",
                    path=header.path,
                    field=key,
                    expected=expected,
                    got=got,
                )
        if header.architecture not in {None, headers[0].architecture}:
            raise FormatError(
                "is a shard of another model",
                path=header.path,
                expected=headers[0].architecture,
                got=header.architecture,
            )
        for tensor in header.tensors:
            if (owner := owners.setdefault(tensor.name, header.path)) != header.path:
                raise FormatError(
                    f"is a shard of another model: {owner} has the tensor too",
                    path=header.path,
                    field=tensor.name,
                )
    total = _split_value(headers[0], _SPLIT_TENSORS)
    if total != len(owners):
        raise FormatError(
            "the shards do not make one model",
            path=headers[0].path,
            field=_SPLIT_TENSORS,
            expected=f"{total} tensors",
            got=len(owners),
        )


def _split_value(header: GgufHeader, key: str) -> int | None:
    value = header.metadata.get(key)
    return None if value is None else value.integer()


def _joined_hint(header: GgufHeader) -> str | None:
    """What to do about a file behind whose last tensor another GGUF file begins."""
    with open(header.path, "rb", buffering=0) as file:
        file.seek(header.end_bytes)
        joined = file.read(len(MAGIC)) == MAGIC
    return "shards are joined by llama-gguf-split --merge, not by cat" if joined else None


def _tensors(header: GgufHeader, number: int) -> list[TensorFacts]:
    found = []
    for tensor in header.tensors:
        ne = (*tensor.shape, 1, 1, 1)[:4]
        row = tensor.shape[0] // tensor.kind.block_values * tensor.kind.block_bytes
        found.append(
            TensorFacts(
                name=tensor.name,
                file=number,
                offset_bytes=tensor.offset_bytes,
                size_bytes=tensor.size_bytes,
                ggml_type=tensor.kind.code,
                type_name=tensor.kind.name,
                ne=(ne[0], ne[1], ne[2], ne[3]),
                nb=(tensor.kind.block_bytes, row, row * ne[1], row * ne[1] * ne[2]),
            )
        )
    return found
