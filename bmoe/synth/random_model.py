"""`random_model`: a model of random weights, of any shape and quantisation.

It joins the parts (shape, architecture, tokenizer, block types, bytes) and owns none of them; what is
its own is the router, whose rows differ in length so that experts differ in popularity.
"""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, Final

import numpy as np
from gguf.constants import GGMLQuantizationType

from bmoe.gguf_header import DEFAULT_ALIGNMENT_BYTES
from bmoe.io.errors import UsageError
from bmoe.synth import metadata
from bmoe.synth.architectures import model_metadata, model_tensors
from bmoe.synth.blocks import random_chunks
from bmoe.synth.quantisation import block_type
from bmoe.synth.report import SynthReport, expert_bytes_by_layer
from bmoe.synth.tokenizer import byte_tokenizer, tokenizer_of
from bmoe.synth.writer import PlannedTensor, write_model, write_split

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from bmoe.synth.parts import TensorSpec
    from bmoe.synth.shape import ModelShape

MAX_SEED: Final = 2**64 - 1
_MAX_SHARDS: Final = 99_999
_ROUTER_ROWS: Final = (0.4, 1.6)  # the shortest and the longest row, as a multiple of the deviation


def random_model(
    destination: str,
    *,
    shape: ModelShape,
    quantisation: str,
    tokenizer_from: str | None = None,
    seed: int = 1,
    alignment_bytes: int = DEFAULT_ALIGNMENT_BYTES,
    phase_bytes: int | None = None,
    shards: int = 1,
    bare_first: bool = False,
    on_progress: Callable[[int, int], None] | None = None,
) -> SynthReport:
    """Writes a model of random weights to `destination`.

    The same arguments give the same bytes on any machine. Matrices take the quantisation; norms and
    routers are F32.

    Args:
        destination: The file to make; replaced if it exists.
        shape: The model's numbers.
        quantisation: One of `QUANTISATIONS`.
        tokenizer_from: A GGUF file whose tokenizer and chat template the model gets; by default it
            spells bytes, with a vocabulary of 259.
        seed: From 0 to 2**64 - 1.
        alignment_bytes: Of the tensors' offsets.
        phase_bytes: Where the first tensor lies within a page of 4 KiB.
        shards: More than one makes a split set, with tensors dealt to its files in turn.
        bare_first: Its first file has metadata only.
        on_progress: Called with (bytes done, bytes in total).

    Raises:
        UsageError: A choice that does not exist, or choices that do not fit each other.
        FormatError: `tokenizer_from` is no GGUF file with a vocabulary.
        FileError: A file cannot be read or written, or the drive is too full.
    """
    check_seed(seed)
    if not 1 + bare_first <= shards <= _MAX_SHARDS or (shards > 1 and phase_bytes is not None):
        raise UsageError(
            f"shards {shards}: must be up to {_MAX_SHARDS}, two for a bare first, without a phase"
        )
    tokenizer = byte_tokenizer() if tokenizer_from is None else tokenizer_of(tokenizer_from)
    entries = {
        "general.architecture": metadata.text(shape.architecture),
        "general.name": metadata.text(f"random {shape.architecture} {quantisation} seed {seed}"),
        "general.quantization_version": metadata.u32(2),
        **model_metadata(shape, tokenizer.vocabulary),
        **tokenizer.metadata,
    }
    tensors = [
        _planned(spec, block_type(quantisation, spec), seed)
        for spec in model_tensors(shape, tokenizer.vocabulary)
    ]
    if shards > 1:
        filled = shards - bare_first
        destination, size_bytes = write_split(
            destination,
            metadata=entries,
            shards=[()] * bare_first + [tensors[start::filled] for start in range(filled)],
            alignment_bytes=alignment_bytes,
            on_progress=on_progress,
        )
    else:
        size_bytes = write_model(
            destination,
            metadata=entries,
            tensors=tensors,
            alignment_bytes=alignment_bytes,
            phase_bytes=phase_bytes,
            on_progress=on_progress,
        )
    expert_bytes = expert_bytes_by_layer(tensors, shape.experts)
    return SynthReport(
        path=destination,
        size_bytes=size_bytes,
        architecture=shape.architecture,
        moe_layers=len(expert_bytes),
        experts=shape.experts,
        top_k=shape.top_k,
        expert_bytes=expert_bytes,
    )


def check_seed(seed: int) -> None:
    """Refuses what is no seed.

    Raises:
        UsageError: It is negative or longer than 64 bits.
    """
    if not 0 <= seed <= MAX_SEED:
        raise UsageError(f"seed {seed}: must be from 0 to {MAX_SEED}")


def router_chunks(
    width: int, experts: int, *, deviation: float, seed: int, name: str
) -> Iterator[memoryview]:
    """The F32 weights of a router, [experts, width], one row per piece.

    Rows lie evenly around zero, so that the token decides; their lengths, drawn from 0.4 to 1.6 times
    the deviation, make some experts' logits reach further than others'.
    """
    low, high = _ROUTER_ROWS
    centre, spread = (low + high) / 2, (high - low) / math.sqrt(12)
    lengths = b"".join(
        random_chunks(
            GGMLQuantizationType.F32, experts, deviation=spread, mean=centre, seed=seed, name=name + "/rows"
        )
    )
    for expert, length in enumerate(np.frombuffer(lengths, "<f4")):
        yield from random_chunks(
            GGMLQuantizationType.F32,
            width,
            deviation=deviation * float(length),
            seed=seed,
            name=f"{name}/{expert}",
        )


def _planned(spec: TensorSpec, kind: GGMLQuantizationType, seed: int) -> PlannedTensor:
    if spec.kind == "router":
        width, experts = spec.shape
        chunks = partial(router_chunks, width, experts, deviation=spec.deviation, seed=seed, name=spec.name)
    else:
        chunks = partial(
            random_chunks,
            kind,
            math.prod(spec.shape),
            deviation=spec.deviation,
            mean=spec.mean,
            seed=seed,
            name=spec.name,
        )
    return PlannedTensor(name=spec.name, kind=kind, shape=spec.shape, chunks=chunks)
