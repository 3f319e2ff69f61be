"""`upcycle`: a dense llama model made a mixture of experts that says the same, without touching a weight.

Each expert is the layer's own feed-forward with its hidden units in another order: rows of gate and up,
and the same columns of down. A sum does not care for the order of its terms, so every expert computes
the same function (up to rounding) from different bytes; llama.cpp makes the weights of the chosen
experts sum to 1, so any choice gives the dense model's text. A slice that lands in the wrong place does
not: then gate, up and down disagree about the order.

Units move in whole blocks of down's type, 32 at least, since columns inside a block share its scales.

Knows the llama architecture's names; leaves reading and writing files to reader.py and writer.py.
"""

from __future__ import annotations

import math
import os
import re
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final

import numpy as np
from gguf.constants import GGMLQuantizationType

from bmoe.gguf_types import packed_bytes
from bmoe.io.errors import FormatError, ReadError, UsageError
from bmoe.synth import metadata
from bmoe.synth.blocks import CHUNK_BYTES
from bmoe.synth.parts import ROUTER_SPREAD
from bmoe.synth.random_model import check_seed, router_chunks
from bmoe.synth.reader import SourceModel, SourceTensor, read_exactly, read_model
from bmoe.synth.report import SynthReport, expert_bytes_by_layer
from bmoe.synth.shape import MAX_EXPERTS
from bmoe.synth.writer import PlannedTensor, write_model

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from numpy.typing import NDArray

_MIN_BLOCK_UNITS: Final = 32
_FEED_FORWARD = re.compile(r"blk\.([0-9]{1,6})\.ffn_(gate|up|down)\.weight")
_OTHER_FEED_FORWARD = re.compile(r"blk\.[0-9]+\.ffn_(?!norm\.weight$)")


@dataclass(frozen=True, kw_only=True, slots=True)
class _Layer:
    """A dense feed-forward: gate and up are [width, units], down is [units, width], in ggml's order."""

    gate: SourceTensor
    up: SourceTensor
    down: SourceTensor
    block_units: int

    @property
    def units(self) -> int:
        return self.down.shape[0]

    @property
    def width(self) -> int:
        return self.down.shape[1]


def upcycle(
    source: str,
    destination: str,
    *,
    experts: int,
    top_k: int,
    seed: int,
    on_progress: Callable[[int, int], None] | None = None,
) -> SynthReport:
    """Writes `destination`, a mixture of experts with the text of the dense model `source`.

    Metadata is kept, but for the name, which says what was done, and the two expert counts. Expert 0
    keeps the dense order. The same arguments give the same bytes on any machine.

    Args:
        source: A GGUF file of architecture llama without experts.
        destination: The file to make; replaced if it exists.
        experts: Experts per layer.
        top_k: Experts a token is routed to.
        seed: From 0 to 2**64 - 1; decides orders and routers.
        on_progress: Called with (bytes done, bytes in total).

    Raises:
        UsageError: Counts out of range, or both paths name one file.
        FormatError: `source` is no such model, or cannot be split into enough different experts.
        FileError: A file cannot be read or written, or the drive is too full.
    """
    check_seed(seed)
    if not 2 <= experts <= MAX_EXPERTS:
        raise UsageError(f"experts {experts}: must be from 2 to {MAX_EXPERTS}")
    if not 1 <= top_k <= experts:
        raise UsageError(f"top_k {top_k}: must be from 1 to the number of experts, {experts}")
    model = read_model(source)
    if os.path.exists(destination) and os.path.samefile(source, destination):
        raise UsageError(f"{destination}: is the source itself; choose another destination")
    layers = _layers(model, experts)
    entries = dict(model.metadata)
    name = entries.get("general.name")
    title = (None if name is None else name.text()) or "upcycled"
    entries["general.name"] = metadata.text(f"{title} ({experts} experts, top {top_k})")
    entries["llama.expert_count"] = metadata.u32(experts)
    entries["llama.expert_used_count"] = metadata.u32(top_k)
    try:
        descriptor = os.open(source, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise ReadError(f"cannot be opened: {error.strerror}", path=source) from error
    try:
        tensors = list(_planned(model, layers, _Source(descriptor, source), experts, seed))
        size_bytes = write_model(
            destination,
            metadata=entries,
            tensors=tensors,
            alignment_bytes=model.alignment_bytes,
            on_progress=on_progress,
        )
    finally:
        os.close(descriptor)
    return SynthReport(
        path=destination,
        size_bytes=size_bytes,
        architecture="llama",
        moe_layers=len(layers),
        experts=experts,
        top_k=top_k,
        expert_bytes=expert_bytes_by_layer(tensors, experts),
    )


def _layers(model: SourceModel, experts: int) -> dict[int, _Layer]:
    """The dense feed-forwards, checked, by layer."""
    if model.architecture != "llama":
        raise FormatError(
            "only dense models of the llama architecture can be upcycled",
            path=model.path,
            field="general.architecture",
            got=model.architecture,
        )
    parts: dict[int, dict[str, SourceTensor]] = {}
    for tensor in model.tensors:
        match = _FEED_FORWARD.fullmatch(tensor.name)
        if match:
            parts.setdefault(int(match[1]), {})[match[2]] = tensor
        elif _OTHER_FEED_FORWARD.match(tensor.name):
            raise FormatError(
                "has a feed-forward tensor that experts cannot take over", path=model.path, field=tensor.name
            )
    count = model.metadata.get("llama.block_count")
    wanted = None if count is None else count.integer()
    if not parts or len(parts) != wanted or max(parts) != wanted - 1:
        raise FormatError(
            "does not have a dense feed-forward in every layer",
            path=model.path,
            expected=f"{wanted} layers",
            got=len(parts),
        )
    return {layer: _layer(model.path, layer, parts[layer], experts) for layer in sorted(parts)}


def _layer(path: str, layer: int, parts: dict[str, SourceTensor], experts: int) -> _Layer:
    missing = {"gate", "up", "down"} - parts.keys()
    if missing:
        raise FormatError(f"layer {layer} has no ffn_{min(missing)}.weight", path=path)
    gate, up, down = parts["gate"], parts["up"], parts["down"]
    if len(down.shape) != 2 or gate.shape != down.shape[::-1] or up.shape != gate.shape:
        raise FormatError(
            f"the feed-forward of layer {layer} does not fit together",
            path=path,
            got=f"gate {gate.shape}, up {up.shape}, down {down.shape}",
        )
    block_units = math.lcm(_MIN_BLOCK_UNITS, down.kind.block_values)
    units = down.shape[0]
    if units % block_units or math.factorial(min(units // block_units, 8)) < experts:
        raise FormatError(
            f"{units} hidden units of {_kind(down).name} cannot be put in {experts} different orders by "
            f"whole blocks of {block_units}",
            path=path,
            field=down.name,
        )
    return _Layer(gate=gate, up=up, down=down, block_units=block_units)


def _planned(
    model: SourceModel, layers: dict[int, _Layer], source: _Source, experts: int, seed: int
) -> Iterator[PlannedTensor]:
    """The tensors of the new model: the old order, the router just before a layer's first expert tensor."""
    routed: set[int] = set()
    for tensor in model.tensors:
        match = _FEED_FORWARD.fullmatch(tensor.name)
        if not match:
            yield PlannedTensor(
                name=tensor.name,
                kind=_kind(tensor),
                shape=tensor.shape,
                chunks=partial(source.copy, tensor),
            )
            continue
        number, projection = int(match[1]), match[2]
        layer = layers[number]
        if number not in routed:
            routed.add(number)
            yield _router(f"blk.{number}.ffn_gate_inp.weight", layer.width, experts, seed)
        orders = _orders(layer.units // layer.block_units, experts, seed, number)
        permute = source.permuted_columns if projection == "down" else source.permuted_rows
        yield PlannedTensor(
            name=f"blk.{number}.ffn_{projection}_exps.weight",
            kind=_kind(tensor),
            shape=(*tensor.shape, experts),
            chunks=partial(permute, tensor, orders, layer.block_units),
        )


def _router(name: str, width: int, experts: int, seed: int) -> PlannedTensor:
    deviation = ROUTER_SPREAD / math.sqrt(width)
    return PlannedTensor(
        name=name,
        kind=GGMLQuantizationType.F32,
        shape=(width, experts),
        chunks=partial(router_chunks, width, experts, deviation=deviation, seed=seed, name=name),
    )


def _kind(tensor: SourceTensor) -> GGMLQuantizationType:
    return GGMLQuantizationType(tensor.kind.code)


def _orders(blocks: int, experts: int, seed: int, layer: int) -> list[NDArray[np.intp]]:
    """A different order of `blocks` for each expert, the first one unchanged."""
    generator = np.random.PCG64([seed, layer])
    orders = [np.arange(blocks)]
    seen = {orders[0].tobytes()}
    while len(orders) < experts:
        order = np.argsort(generator.random_raw(blocks), kind="stable")
        if order.tobytes() not in seen:
            seen.add(order.tobytes())
            orders.append(order)
    return orders


class _Source:
    """Reads of the dense model's tensors, as they are or reordered, a few MiB at a time."""

    def __init__(self, descriptor: int, path: str) -> None:
        self._descriptor = descriptor
        self._path = path

    def _read(self, buffer: memoryview, offset_bytes: int) -> None:
        read_exactly(self._descriptor, buffer, offset_bytes, self._path)

    def copy(self, tensor: SourceTensor) -> Iterator[memoryview]:
        """The tensor's bytes unchanged."""
        for start in range(0, tensor.size_bytes, CHUNK_BYTES):
            chunk = memoryview(bytearray(min(CHUNK_BYTES, tensor.size_bytes - start)))
            self._read(chunk, tensor.offset_bytes + start)
            yield chunk

    def permuted_rows(
        self, tensor: SourceTensor, orders: list[NDArray[np.intp]], block_rows: int
    ) -> Iterator[memoryview]:
        """For each order, the tensor with its blocks of rows in that order."""
        block_bytes = block_rows * packed_bytes(tensor.kind, tensor.shape[:1])
        per_chunk = max(1, CHUNK_BYTES // block_bytes)
        for order in orders:
            for start in range(0, len(order), per_chunk):
                some = order[start : start + per_chunk]
                chunk = memoryview(bytearray(len(some) * block_bytes))
                for place, block in enumerate(some):
                    into = chunk[place * block_bytes : (place + 1) * block_bytes]
                    self._read(into, tensor.offset_bytes + int(block) * block_bytes)
                yield chunk

    def permuted_columns(
        self, tensor: SourceTensor, orders: list[NDArray[np.intp]], block_columns: int
    ) -> Iterator[memoryview]:
        """For each order, the tensor with its blocks of columns in that order."""
        row_bytes = packed_bytes(tensor.kind, tensor.shape[:1])
        block_bytes = packed_bytes(tensor.kind, (block_columns,))
        rows_per_chunk = max(1, CHUNK_BYTES // row_bytes)
        for order in orders:
            for start in range(0, tensor.shape[1], rows_per_chunk):
                rows = np.empty((min(rows_per_chunk, tensor.shape[1] - start), row_bytes), np.uint8)
                self._read(rows.data.cast("B"), tensor.offset_bytes + start * row_bytes)
                moved = rows.reshape(len(rows), -1, block_bytes)[:, order]
                yield np.ascontiguousarray(moved).data.cast("B")
