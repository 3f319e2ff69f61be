"""Synthetic models: what is in the file, that llama.cpp runs it, and that nothing else is left behind."""

from __future__ import annotations

import ctypes
import dataclasses
import hashlib
import math
import os
import re
import struct
import tracemalloc
from functools import partial
from typing import TYPE_CHECKING, Any

import llama_cpp
import numpy as np
import pytest
from click.testing import CliRunner
from gguf import GGUFReader, quants
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from hypothesis import given
from hypothesis import strategies as st

import bmoe.synth
from bmoe.cli.synth import line_progress, synth_group
from bmoe.io.errors import BmoeError, FileError, FormatError, UsageError
from bmoe.synth import PRESETS, QUANTISATIONS, SynthReport, random_model, tiny_shape, upcycle
from bmoe.synth import metadata as values
from bmoe.synth.blocks import RANDOM_TYPES, random_chunks
from bmoe.synth.reader import read_model
from bmoe.synth.tokenizer import byte_tokenizer
from bmoe.synth.writer import PlannedTensor, write_model
from tests.models import model_folder, tiny_moe

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

PAGE_BYTES = 4096
TEXT = b"The quick brown fox jumps over the lazy dog."


def evaluate(path: str, text: bytes = TEXT) -> tuple[NDArray[np.float32], dict[int, NDArray[np.int32]]]:
    """Logits [tokens, vocabulary] of the text, and the experts of each layer [tokens, top_k]."""
    ggml = ctypes.CDLL("libggml-base.so.0")
    for name, result in (
        ("ggml_get_name", ctypes.c_char_p),
        ("ggml_get_data", ctypes.c_void_p),
        ("ggml_nelements", ctypes.c_int64),
    ):
        function = getattr(ggml, name)
        function.restype, function.argtypes = result, [ctypes.c_void_p]
    routes: dict[int, NDArray[np.int32]] = {}
    model_parameters = llama_cpp.llama_model_default_params()
    model_parameters.n_gpu_layers = 0
    model = llama_cpp.llama_model_load_from_file(path.encode(), model_parameters)
    assert model is not None, path
    counts = {key: _metadata_integer(model, key) for key in ("expert_count", "expert_used_count")}

    def on_node(tensor: int, ask: bool, _: object) -> bool:
        name = ggml.ggml_get_name(tensor) or b""
        if not name.startswith(b"ffn_moe_topk-"):
            return not ask
        if not ask:
            experts, top_k = counts["expert_count"], counts["expert_used_count"]
            rows = ggml.ggml_nelements(tensor) // top_k
            # A view of the first top_k columns of a sorted [rows, experts].
            ids = (ctypes.c_int32 * (rows * experts)).from_address(ggml.ggml_get_data(tensor))
            routes[int(name.split(b"-")[1])] = np.array(ids).reshape(rows, experts)[:, :top_k]
        return True

    callback = llama_cpp.ggml_backend_sched_eval_callback(on_node)
    parameters = llama_cpp.llama_context_default_params()
    parameters.n_ctx = parameters.n_batch = parameters.n_ubatch = 128
    parameters.n_threads = parameters.n_threads_batch = 2
    parameters.cb_eval = callback
    context = llama_cpp.llama_init_from_model(model, parameters)
    vocabulary = llama_cpp.llama_model_get_vocab(model)
    tokens = (llama_cpp.llama_token * 128)()
    count = llama_cpp.llama_tokenize(vocabulary, text, len(text), tokens, 128, True, True)
    batch = llama_cpp.llama_batch_init(count, 0, 1)
    try:
        batch.n_tokens = count
        for index in range(count):
            batch.token[index], batch.pos[index] = tokens[index], index
            batch.n_seq_id[index], batch.seq_id[index][0], batch.logits[index] = 1, 0, 1
        assert llama_cpp.llama_decode(context, batch) == 0
        width = llama_cpp.llama_vocab_n_tokens(vocabulary)
        logits = np.ctypeslib.as_array(llama_cpp.llama_get_logits(context), (count, width)).copy()
    finally:
        llama_cpp.llama_batch_free(batch)
        llama_cpp.llama_free(context)
        llama_cpp.llama_model_free(model)
    return logits, routes


def _metadata_integer(model: Any, key: str) -> int:
    text = ctypes.create_string_buffer(64)
    llama_cpp.llama_model_meta_val_str(model, b"general.architecture", text, 64)
    full = text.value + b"." + key.encode()
    found = llama_cpp.llama_model_meta_val_str(model, full, text, 64)
    return int(text.value) if found > 0 else 0


def write_dense(path: str, kinds: dict[str, str], *, units: int, width: int = 256) -> None:
    """A dense llama model with two layers; `kinds` maps gate, up and down to block types."""
    keys = {
        "block_count": 2,
        "context_length": 512,
        "embedding_length": width,
        "feed_forward_length": units,
        "attention.head_count": 4,
        "attention.head_count_kv": 2,
        "rope.dimension_count": width // 4,
    }
    tokenizer = byte_tokenizer()
    entries = {
        "general.architecture": values.text("llama"),
        "general.name": values.text("tiny dense"),
        **{f"llama.{key}": values.u32(value) for key, value in keys.items()},
        "llama.attention.layer_norm_rms_epsilon": values.f32(1e-6),
        **tokenizer.metadata,
        "tokenizer.chat_template": values.text("{{ messages }}"),
    }
    tensors = [
        planned("token_embd.weight", "F32", width, tokenizer.vocabulary, deviation=1.0),
        planned("output_norm.weight", "F32", width, mean=1.0),
        planned("output.weight", "F32", width, tokenizer.vocabulary),
    ]
    for layer in range(2):
        name = f"blk.{layer}.{{}}.weight".format
        tensors += [
            planned(name("attn_norm"), "F32", width, mean=1.0),
            planned(name("attn_q"), "F32", width, width),
            planned(name("attn_k"), "F32", width, width // 2),
            planned(name("attn_v"), "F32", width, width // 2),
            planned(name("attn_output"), "F32", width, width),
            planned(name("ffn_norm"), "F32", width, mean=1.0),
            planned(name("ffn_down"), kinds["down"], units, width),
            planned(name("ffn_gate"), kinds["gate"], width, units),
            planned(name("ffn_up"), kinds["up"], width, units),
        ]
    write_model(path, metadata=entries, tensors=tensors)


def planned(
    name: str, kind: str, *shape: int, deviation: float | None = None, mean: float = 0.0
) -> PlannedTensor:
    deviation = (0.1 if mean else 1 / math.sqrt(shape[0])) if deviation is None else deviation
    block = GGMLQuantizationType[kind]
    make = partial(random_chunks, block, math.prod(shape), deviation=deviation, mean=mean, seed=3, name=name)
    return PlannedTensor(name=name, kind=block, shape=shape, chunks=make)


def uniform(kind: str) -> dict[str, str]:
    return dict.fromkeys(("gate", "up", "down"), kind)


def digest(path: str) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_tiny(path: Path, **changes: Any) -> SynthReport:
    """The smallest model that llama.cpp runs, with Q8_0 matrices."""
    arguments = {"quantisation": "Q8_0", "seed": 1}
    shape = dataclasses.replace(
        tiny_shape(), layers=2, embedding=64, head_dim=16, experts=4, top_k=2, expert_width=32
    )
    return random_model(str(path), **{"shape": shape, **arguments, **changes})


# The file.


def test_a_random_model_has_the_tensors_and_keys_of_its_shape() -> None:
    reader = GGUFReader(tiny_moe("Q4_K", layers=2, experts=8, top_k=3, expert_width=512))
    fields = {name: field.contents() for name, field in reader.fields.items()}
    assert fields["general.architecture"] == "qwen3moe"
    assert fields["qwen3moe.block_count"] == 2
    assert fields["qwen3moe.expert_count"] == 8
    assert fields["qwen3moe.expert_used_count"] == 3
    assert fields["qwen3moe.expert_feed_forward_length"] == 512
    assert len(fields["tokenizer.ggml.tokens"]) == 259
    tensors = {t.name: (t.tensor_type.name, tuple(map(int, t.shape))) for t in reader.tensors}
    assert len(tensors) == 3 + 2 * 12
    assert tensors["token_embd.weight"] == ("Q4_K", (256, 259))
    assert tensors["blk.1.ffn_gate_exps.weight"] == ("Q4_K", (256, 512, 8))
    assert tensors["blk.1.ffn_down_exps.weight"] == ("Q4_K", (512, 256, 8))
    assert tensors["blk.1.ffn_gate_inp.weight"] == ("F32", (256, 8))
    assert tensors["blk.1.attn_q_norm.weight"] == ("F32", (64,))


def test_the_report_counts_the_bytes_of_an_expert_layer_by_layer(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    report = random_model(str(path), shape=tiny_shape(), quantisation="Q4_K_M", seed=1)
    q4, q6 = 256 * 144, 256 * 210
    assert report.expert_bytes == (2 * q4 + q6, 3 * q4, 2 * q4 + q6)
    assert report.size_bytes == path.stat().st_size
    assert (report.moe_layers, report.experts, report.top_k) == (3, 16, 4)


# SHA-256 of whole files; also seen with numpy 1.26 and with its SIMD paths off.
GOLDEN = {
    "F32": "5982ccee0d83307925d846802bdef95007f9812167d567dbcc07d48b7daf654e",
    "F16": "b867ad4950776a788277d487e287a86b6c7460a0f82b2314f004c0589e0b578b",
    "BF16": "656ef4a4b2c82d4ee82f2238d0ca976a4230c0c416564b48f25b7d23217943ed",
    "Q8_0": "d442c5eb00640fa536128a3b7f883b12d40063bc854997781bb78e36e1ba2813",
    "Q4_0": "c281fd49379aefe72e986e41c227958efd6ef17cac723d0b031a351eef06b9e4",
    "Q4_K": "e6dc20a00c9e399434bd586ceb89940dc2c4349e769517bf9018d65225b23270",
    "Q6_K": "0391fe97a73492171d172b8a51bb99b1e29951aa3ab4ab5c16dc4fc96b9faf53",
    "Q4_K_M": "8203e6310773b1d94e35862c7c1c02eeb59326d08df99f90592c5f20ace1af31",
    "MXFP4": "3c023492b2ac797d4d2232091a252451e19596ba75a3011e8eb44c2bc9c693aa",
}


@pytest.mark.parametrize("quantisation", sorted(GOLDEN))
def test_a_seed_gives_the_same_bytes_everywhere(quantisation: str) -> None:
    path = tiny_moe(quantisation, layers=1, experts=2, top_k=1)
    assert digest(path) == GOLDEN[quantisation]


def test_another_seed_gives_other_weights(tmp_path: Path) -> None:
    write_tiny(tmp_path / "a", seed=1)
    write_tiny(tmp_path / "b", seed=2)
    a, b = GGUFReader(tmp_path / "a"), GGUFReader(tmp_path / "b")
    for one, other in zip(a.tensors, b.tensors, strict=True):
        assert not np.array_equal(one.data, other.data), one.name


@pytest.mark.parametrize("alignment_bytes", [8, 32, 4096])
def test_offsets_follow_the_alignment(tmp_path: Path, alignment_bytes: int) -> None:
    write_tiny(tmp_path / "m", alignment_bytes=alignment_bytes)
    reader = GGUFReader(tmp_path / "m")
    assert reader.alignment == alignment_bytes
    assert all(tensor.data_offset % alignment_bytes == 0 for tensor in reader.tensors)
    assert read_model(str(tmp_path / "m")).alignment_bytes == alignment_bytes


def test_a_tokenizer_is_taken_whole_from_another_model(tmp_path: Path) -> None:
    write_dense(str(tmp_path / "dense"), uniform("F32"), units=64)
    write_tiny(tmp_path / "m", tokenizer_from=str(tmp_path / "dense"))
    taken, source = read_model(str(tmp_path / "m")).metadata, read_model(str(tmp_path / "dense")).metadata
    keys = [key for key in source if key.startswith("tokenizer.")]
    assert "tokenizer.chat_template" in keys
    assert {key: taken[key] for key in keys} == {key: source[key] for key in keys}


def test_the_byte_tokenizer_spells_and_joins_any_text() -> None:
    model = llama_cpp.Llama(tiny_moe("Q8_0"), vocab_only=True, verbose=False)
    text = "Grüße, 世界!\n  two spaces".encode()
    tokens = model.tokenize(text, add_bos=True)
    assert tokens == [1] + [3 + byte for byte in text]
    assert model.detokenize(tokens) == text
    model.close()


# The weights.


@pytest.mark.parametrize("kind", RANDOM_TYPES, ids=lambda kind: kind.name)
def test_weights_are_centred_and_have_the_deviation_asked_for(kind: GGMLQuantizationType) -> None:
    raw = b"".join(random_chunks(kind, 1 << 18, deviation=0.02, seed=5, name="weights"))
    assert len(raw) == (1 << 18) // GGML_QUANT_SIZES[kind][0] * GGML_QUANT_SIZES[kind][1]
    weights = quants.dequantize(np.frombuffer(raw, np.uint8), kind).astype(np.float64)
    assert np.isfinite(weights).all()
    assert weights.std() == pytest.approx(0.02, rel=0.02)
    assert abs(weights.mean()) < 0.02 * 0.02


@pytest.mark.parametrize("quantisation", QUANTISATIONS)
def test_no_page_and_no_expert_occurs_twice_in_a_tensor(quantisation: str) -> None:
    for tensor in GGUFReader(tiny_moe(quantisation)).tensors:
        raw = tensor.data.tobytes()
        pages = [raw[at : at + PAGE_BYTES] for at in range(0, len(raw), PAGE_BYTES)]
        assert len(set(pages)) == len(pages), tensor.name
        if tensor.name.endswith("_exps.weight"):
            slice_bytes = len(raw) // 16
            slices = {raw[at : at + slice_bytes] for at in range(0, len(raw), slice_bytes)}
            assert len(slices) == 16, tensor.name


@pytest.mark.parametrize("kind", ["F16", "Q4_K", "Q5_0"])
def test_weights_are_made_in_bounded_memory(kind: str) -> None:
    chunks = random_chunks(GGMLQuantizationType[kind], 1 << 26, deviation=1.0, seed=1, name="big")
    tracemalloc.start()
    try:
        largest = max(len(chunk) for chunk in chunks)
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert largest <= 4 << 20
    assert peak_bytes < 32 << 20


# In llama.cpp.


@pytest.mark.parametrize("quantisation", QUANTISATIONS)
def test_every_quantisation_runs_and_routes_by_token(quantisation: str) -> None:
    logits, routes = evaluate(tiny_moe(quantisation))
    assert np.isfinite(logits).all()
    assert 0.5 < logits.std() < 2
    assert_routing_varies(routes, layers=range(3))


@pytest.mark.parametrize("quantisation", ["F32", "Q4_K_M"])
@pytest.mark.parametrize(
    ("arch", "dense_layers"), [("llama", 0), ("qwen3moe", 0), ("gemma4", 0), ("gemma4", 1)]
)
def test_every_architecture_runs_and_routes_by_token(arch: str, dense_layers: int, quantisation: str) -> None:
    logits, routes = evaluate(tiny_moe(quantisation, arch=arch, dense_layers=dense_layers))
    assert np.isfinite(logits).all()
    assert 0.5 < logits.std() < 2
    assert_routing_varies(routes, layers=range(dense_layers, 3))


def assert_routing_varies(routes: dict[int, NDArray[np.int32]], layers: range) -> None:
    assert sorted(routes) == list(layers)
    for chosen in routes.values():
        assert len(np.unique(chosen)) >= 8  # of 16
        assert len({tuple(sorted(row)) for row in chosen.tolist()}) > 5


@pytest.mark.parametrize("preset", sorted(set(PRESETS) - {"q3", "q3s"}))
def test_the_small_presets_run(preset: str, tmp_path: Path) -> None:
    path = str(tmp_path / "m.gguf")
    random_model(path, shape=PRESETS[preset], quantisation="Q8_0", seed=1)
    assert np.isfinite(evaluate(path)[0]).all()


# Upcycling.

MIXES = {
    "F32": (uniform("F32"), 320),
    "F16": (uniform("F16"), 320),
    "Q8_0": (uniform("Q8_0"), 320),
    "Q4_1": (uniform("Q4_1"), 320),
    "Q4_K": (uniform("Q4_K"), 2048),
    "mixed": ({"gate": "Q4_K", "up": "Q6_K", "down": "Q5_0"}, 320),
}


@pytest.mark.parametrize("mix", MIXES)
def test_upcycled_experts_compute_the_dense_function(mix: str, tmp_path: Path) -> None:
    kinds, units = MIXES[mix]
    dense, moe = str(tmp_path / "dense"), str(tmp_path / "moe")
    write_dense(dense, kinds, units=units)
    report = upcycle(dense, moe, experts=6, top_k=3, seed=1)
    assert (report.moe_layers, report.experts, report.top_k) == (2, 6, 3)
    expected, _ = evaluate(dense)
    got, routes = evaluate(moe)
    # Only the order of float sums differs, but a last bit can turn the rounding of an activation.
    assert np.abs(got - expected).max() < (1e-4 if mix == "F32" else 0.03)
    assert len({tuple(sorted(row)) for row in routes[0].tolist()}) > 5


def test_a_misplaced_slice_of_an_upcycled_model_changes_the_logits(tmp_path: Path) -> None:
    dense, moe = str(tmp_path / "dense"), str(tmp_path / "moe")
    write_dense(dense, uniform("Q8_0"), units=320)
    upcycle(dense, moe, experts=4, top_k=2, seed=1)
    expected, _ = evaluate(moe)
    gate = read_model(moe).tensor_at("blk.0.ffn_gate_exps.weight")
    assert gate is not None
    slice_bytes = gate.size_bytes // 4
    with open(moe, "r+b") as file:
        file.seek(gate.offset_bytes)
        first = file.read(slice_bytes)
        file.write(first)  # over the second expert's
    assert np.abs(evaluate(moe)[0] - expected).max() > 0.1


def test_upcycled_experts_are_permutations_in_blocks_of_32_units(tmp_path: Path) -> None:
    dense, moe = str(tmp_path / "dense"), str(tmp_path / "moe")
    write_dense(dense, uniform("Q4_1"), units=320)
    upcycle(dense, moe, experts=4, top_k=2, seed=1)
    before = {t.name: t.data for t in GGUFReader(dense).tensors}
    after = {t.name: t.data for t in GGUFReader(moe).tensors}
    for layer in range(2):
        old = {p: before[f"blk.{layer}.ffn_{p}.weight"] for p in ("gate", "up", "down")}
        new = {p: after[f"blk.{layer}.ffn_{p}_exps.weight"] for p in ("gate", "up", "down")}
        gate_blocks = [block.tobytes() for block in old["gate"].reshape(10, -1)]
        orders = [
            [gate_blocks.index(block.tobytes()) for block in expert.reshape(10, -1)] for expert in new["gate"]
        ]
        assert orders[0] == list(range(10))
        assert len(set(map(tuple, orders))) == 4
        for expert, order in enumerate(orders):
            assert sorted(order) == list(range(10))
            up = old["up"].reshape(10, -1)[order]
            down = old["down"].reshape(256, 10, -1)[:, order]
            assert new["up"][expert].tobytes() == up.tobytes()
            assert new["down"][expert].tobytes() == down.tobytes()


def test_upcycling_keeps_everything_else(tmp_path: Path) -> None:
    dense, moe = str(tmp_path / "dense"), str(tmp_path / "moe")
    write_dense(dense, uniform("F16"), units=256)
    upcycle(dense, moe, experts=4, top_k=2, seed=1)
    old, new = read_model(dense), read_model(moe)
    changed = {key for key in new.metadata if new.metadata[key] != old.metadata.get(key)}
    assert changed == {"general.name", "llama.expert_count", "llama.expert_used_count"}
    assert new.metadata["general.name"].text() == "tiny dense (4 experts, top 2)"
    before = {t.name: t.data.tobytes() for t in GGUFReader(dense).tensors}
    after = {t.name: t.data.tobytes() for t in GGUFReader(moe).tensors}
    kept = [name for name in before if "ffn_" not in name or "norm" in name]
    assert {name: after[name] for name in kept} == {name: before[name] for name in kept}


def test_upcycling_is_reproducible(tmp_path: Path) -> None:
    write_dense(str(tmp_path / "dense"), uniform("Q8_0"), units=256)
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        upcycle(str(tmp_path / "dense"), str(tmp_path / name), experts=4, top_k=2, seed=seed)
    assert digest(str(tmp_path / "a")) == digest(str(tmp_path / "b")) != digest(str(tmp_path / "c"))


@pytest.mark.parametrize(
    ("kinds", "units", "experts", "complaint"),
    [
        (uniform("Q4_K"), 256, 2, "256 hidden units of Q4_K cannot be put in 2 different orders"),
        (uniform("F32"), 80, 4, "80 hidden units of F32 cannot be put in 4 different orders"),
        (uniform("F32"), 96, 7, "96 hidden units of F32 cannot be put in 7 different orders"),
    ],
)
def test_upcycling_refuses_units_that_do_not_divide(
    kinds: dict[str, str], units: int, experts: int, complaint: str, tmp_path: Path
) -> None:
    write_dense(str(tmp_path / "dense"), kinds, units=units)
    with pytest.raises(FormatError, match=complaint):
        upcycle(str(tmp_path / "dense"), str(tmp_path / "moe"), experts=experts, top_k=1, seed=1)


def test_upcycling_refuses_other_architectures_and_experts(tmp_path: Path) -> None:
    for arch, complaint in (("qwen3moe", "got qwen3moe"), ("llama", "experts cannot take over")):
        with pytest.raises(FormatError, match=complaint):
            upcycle(tiny_moe("Q8_0", arch=arch), str(tmp_path / "m"), experts=4, top_k=2, seed=1)


@pytest.mark.parametrize(
    ("experts", "top_k", "seed"), [(1, 1, 1), (1025, 1, 1), (4, 5, 1), (4, 0, 1), (4, 2, -1)]
)
def test_upcycling_refuses_impossible_counts(experts: int, top_k: int, seed: int, tmp_path: Path) -> None:
    with pytest.raises(UsageError):
        upcycle("missing", str(tmp_path / "m"), experts=experts, top_k=top_k, seed=seed)


def test_upcycling_onto_the_source_is_refused(tmp_path: Path) -> None:
    dense = str(tmp_path / "dense")
    write_dense(dense, uniform("F32"), units=256)
    before = digest(dense)
    with pytest.raises(UsageError, match="is the source itself"):
        upcycle(dense, dense, experts=4, top_k=2, seed=1)
    assert digest(dense) == before


# Bad arguments.


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"architecture": "gpt5"}, "architecture gpt5: choose from afmoe, arctic"),
        ({"layers": 0}, "layers 0: must be from 1 to 512"),
        ({"top_k": 17}, "top_k 17: there are only 16 experts"),
        ({"experts": 1, "top_k": 1}, "experts 1: must be from 2 to 1024"),
        ({"kv_heads": 3}, "kv_heads 3: must divide the 4 heads"),
        ({"head_dim": 63}, "head_dim 63: must be even"),
        ({"dense_layers": 3}, "dense_layers 3: no layer is left"),
        ({"dense_layers": 1}, "dense_layers 1: qwen3moe has experts in every layer"),
        ({"rope_base": math.nan}, "must be above zero"),
        ({"architecture": "gemma4", "dense_width": 0}, "dense_width 0"),
        (
            {"expert_width": 128},
            "ffn_down_exps.weight has rows of 128 values, Q4_K needs whole blocks of 256",
        ),
    ],
)
def test_a_shape_that_cannot_be_is_refused(change: dict[str, Any], complaint: str, tmp_path: Path) -> None:
    path = tmp_path / "m"
    with pytest.raises(UsageError, match=complaint):
        random_model(str(path), shape=dataclasses.replace(tiny_shape(), **change), quantisation="Q4_K")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"quantisation": "Q9"}, "quantisation Q9: choose from BF16, F16"),
        ({"seed": -1}, "seed -1"),
        ({"seed": 2**64}, "seed 18446744073709551616"),
        ({"alignment_bytes": 48}, "alignment 48"),
        ({"alignment_bytes": 4}, "alignment 4"),
    ],
)
def test_a_choice_that_does_not_exist_is_refused(
    change: dict[str, Any], complaint: str, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=complaint):
        write_tiny(tmp_path / "m", **change)
    assert not list(tmp_path.iterdir())


# Hostile input.


def head(*keys: tuple[str, int, bytes], tensors: bytes = b"", tensor_count: int = 0) -> bytes:
    """The start of a GGUF file with those key values and that tensor table."""
    entries = b"".join(string(key) + struct.pack("<I", kind) + payload for key, kind, payload in keys)
    return b"GGUF" + struct.pack("<IQQ", 3, tensor_count, len(keys)) + entries + tensors


def string(text: str) -> bytes:
    return struct.pack("<Q", len(text)) + text.encode()


def table(name: str = "t", *, shape: tuple[int, ...] = (32,), kind: int = 0, offset: int = 0) -> bytes:
    rank = len(shape)
    return string(name) + struct.pack(f"<I{rank}QIQ", rank, *shape, kind, offset)


HOSTILE = {
    "only a magic": (b"GGUF", "the file ends early"),
    "not gguf": (b"PK\x03\x04 and more", "is not a GGUF file"),
    "old": (b"GGUF" + struct.pack("<I", 1), "got 1"),
    "big-endian": (b"GGUF" + struct.pack(">I", 3), "a big-endian file"),
    "endless keys": (b"GGUF" + struct.pack("<IQQ", 3, 0, 1 << 60), "a count exceeds"),
    "endless tensors": (b"GGUF" + struct.pack("<IQQ", 3, 1 << 60, 0), "a count exceeds"),
    "endless string": (head(("k", 8, struct.pack("<Q", 1 << 62))), "the file ends early"),
    "endless array": (head(("k", 9, struct.pack("<IQ", 5, 1 << 61))), "a count exceeds"),
    "endless strings": (head(("k", 9, struct.pack("<IQ", 8, 1 << 61))), "a count exceeds"),
    "nested array": (head(("k", 9, struct.pack("<IQ", 9, 0))), "arrays of arrays"),
    "unknown value": (head(("k", 99, b"\0" * 9)), "value type not known"),
    "key twice": (head(("k", 0, b"\0"), ("k", 0, b"\0")), "occurs twice"),
    "name of no encoding": (
        b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1) + b"\xff" + bytes(9),
        "a name is not UTF-8",
    ),
    "odd alignment": (head(("general.alignment", 4, struct.pack("<I", 48))), "is no alignment"),
    "huge alignment": (head(("general.alignment", 4, struct.pack("<I", 1 << 31))), "is no alignment"),
    "rank": (head(tensors=table(shape=(1,) * 5), tensor_count=1), "rank not supported"),
    "zero": (head(tensors=table(shape=(0,)), tensor_count=1), "a dimension is zero"),
    "unknown type": (head(tensors=table(kind=999), tensor_count=1), "type not known"),
    "part of a block": (head(tensors=table(shape=(31,), kind=2), tensor_count=1), "no whole blocks"),
    "odd offset": (head(tensors=table(offset=1), tensor_count=1), "not a multiple of 32"),
    "long name": (head(tensors=table("n" * 64), tensor_count=1), "tensor name too long"),
    "past the end": (head(tensors=table(offset=1 << 40), tensor_count=1), "past the end of the file"),
    "overflow": (head(tensors=table(shape=(1 << 62, 1 << 62)), tensor_count=1), "past the end of the file"),
    "tensor twice": (head(tensors=table() * 2, tensor_count=2) + bytes(256), "two tensors of one name"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_file_is_one_format_error(case: str, tmp_path: Path) -> None:
    content, complaint = HOSTILE[case]
    path = tmp_path / "hostile"
    path.write_bytes(content)
    with pytest.raises(FormatError, match=re.escape(complaint)) as caught:
        upcycle(str(path), str(tmp_path / "m"), experts=4, top_k=2, seed=1)
    assert "\n" not in str(caught.value)
    assert str(path) in str(caught.value)


def test_a_model_cut_anywhere_is_refused(tmp_path: Path) -> None:
    write_dense(str(tmp_path / "dense"), uniform("F32"), units=256)
    content = (tmp_path / "dense").read_bytes()
    cut = tmp_path / "cut"
    for size in [*range(1, 9000, 97), len(content) // 2, len(content) - 33]:
        cut.write_bytes(content[:size])
        with pytest.raises(FormatError):
            upcycle(str(cut), str(tmp_path / "m"), experts=4, top_k=2, seed=1)


@pytest.fixture(scope="module")
def dense_header() -> bytes:
    path = os.path.join(model_folder(), "dense-for-damage")
    write_dense(path, uniform("F32"), units=64)
    with open(path, "rb") as file:
        content: bytes = file.read(9000)
    return content


@given(damage=st.lists(st.tuples(st.integers(0, 8999), st.integers(0, 255)), min_size=1, max_size=4))
def test_a_damaged_header_is_read_or_refused(dense_header: bytes, damage: list[tuple[int, int]]) -> None:
    content = bytearray(dense_header)
    for at, value in damage:
        content[at] = value
    path = os.path.join(model_folder(), "damaged")
    with open(path, "wb") as file:
        file.write(content)
        file.truncate(4 << 20)
    try:
        model = read_model(path)
    except FormatError:
        return
    assert all(tensor.offset_bytes + tensor.size_bytes <= 4 << 20 for tensor in model.tensors)


def test_a_source_without_a_vocabulary_is_refused(tmp_path: Path) -> None:
    (tmp_path / "bare").write_bytes(head(("general.architecture", 8, string("llama"))))
    with pytest.raises(FormatError, match="no vocabulary"):
        write_tiny(tmp_path / "m", tokenizer_from=str(tmp_path / "bare"))


def test_a_missing_source_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(FileError, match="no such file"):
        write_tiny(tmp_path / "m", tokenizer_from=str(tmp_path / "missing"))


# Whole or not at all.


def test_progress_ends_at_the_size_of_the_file(tmp_path: Path) -> None:
    calls: list[tuple[int, int]] = []
    report = write_tiny(tmp_path / "m", on_progress=lambda done, total: calls.append((done, total)))
    assert calls[-1] == (report.size_bytes, report.size_bytes)
    assert [done for done, _ in calls] == sorted(done for done, _ in calls)


@pytest.mark.parametrize("failure", [KeyboardInterrupt, RuntimeError])
def test_an_interrupted_write_leaves_what_was_there(tmp_path: Path, failure: type[BaseException]) -> None:
    (tmp_path / "m").write_bytes(b"precious")

    def interrupt(done: int, total: int) -> None:
        assert (tmp_path / "m").read_bytes() == b"precious"
        if done > total // 2:
            raise failure

    with pytest.raises(failure):
        write_tiny(tmp_path / "m", on_progress=interrupt)
    assert [path.name for path in tmp_path.iterdir()] == ["m"]
    assert (tmp_path / "m").read_bytes() == b"precious"


def test_a_source_that_shrinks_leaves_nothing(tmp_path: Path) -> None:
    dense = tmp_path / "dense"
    write_dense(str(dense), uniform("F32"), units=256)

    def shrink(done: int, total: int) -> None:
        if done > total // 2:
            os.truncate(dense, 5000)

    with pytest.raises(FileError, match=r"dense at byte \d+: the file ends early"):
        upcycle(str(dense), str(tmp_path / "m"), experts=4, top_k=2, seed=1, on_progress=shrink)
    assert [path.name for path in tmp_path.iterdir()] == ["dense"]


def test_a_full_drive_is_noticed_before_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.statvfs(tmp_path)
    fields = dict(zip(("f_bavail", "f_frsize"), (10, 4096), strict=True))
    full = type(
        "Full", (), {**{name: getattr(real, name) for name in dir(real) if name[:2] == "f_"}, **fields}
    )
    monkeypatch.setattr(os, "statvfs", lambda _: full)
    with pytest.raises(FileError, match=r"not enough free space; expected \d+ bytes .*, got 40960 bytes"):
        write_tiny(tmp_path / "m")
    assert not list(tmp_path.iterdir())


def test_an_unwritable_destination_is_one_line(tmp_path: Path) -> None:
    for destination in (tmp_path / "missing" / "m", tmp_path):
        with pytest.raises(FileError):
            write_tiny(destination)


def test_bytes_that_do_not_match_the_plan_are_our_bug(tmp_path: Path) -> None:
    short = PlannedTensor(name="t", kind=GGMLQuantizationType.F32, shape=(32,), chunks=lambda: [b"short"])
    with pytest.raises(RuntimeError, match="5 bytes made, 128 declared"):
        write_model(str(tmp_path / "m"), metadata={}, tensors=[short])
    assert not list(tmp_path.iterdir())


# The command.


def invoke(*arguments: str) -> Any:
    return CliRunner().invoke(synth_group, arguments)


def test_the_random_command_says_what_it_made(tmp_path: Path) -> None:
    path = str(tmp_path / "m.gguf")
    result = invoke("random", path, "--layers", "2", "--experts", "4", "--top-k", "2", "--quant", "Q4_0")
    assert result.exit_code == 0, result.exception
    size_bytes = os.path.getsize(path)
    assert result.stdout.splitlines()[-1] == (
        f"{path}: {size_bytes} bytes ({size_bytes / 2**20:.1f} MiB), 4 experts in each of 2 layers, top 2, "
        "110592 bytes per expert"
    )


def test_the_upcycle_command_says_what_it_made(tmp_path: Path) -> None:
    write_dense(str(tmp_path / "dense"), uniform("Q8_0"), units=256)
    result = invoke(
        "upcycle", str(tmp_path / "dense"), str(tmp_path / "moe"), "--experts", "4", "--top-k", "2"
    )
    assert result.exit_code == 0, result.exception
    assert "4 experts in each of 2 layers, top 2, 208896 bytes per expert" in result.stdout


@pytest.mark.parametrize("command", ["upcycle", "random"])
def test_an_existing_destination_needs_force(command: str, tmp_path: Path) -> None:
    write_dense(str(tmp_path / "dense"), uniform("F32"), units=256)
    destination = tmp_path / "m"
    destination.write_bytes(b"precious")
    source = [str(tmp_path / "dense")] if command == "upcycle" else []
    result = invoke(command, *source, str(destination))
    assert isinstance(result.exception, UsageError)
    assert "exists already (--force replaces it)" in str(result.exception)
    assert destination.read_bytes() == b"precious"
    assert invoke(command, *source, str(destination), "--experts", "4", "--force").exit_code == 0
    assert destination.read_bytes()[:4] == b"GGUF"


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--preset", "huge"], "preset huge: choose from q3, q3s, tiny"),
        (["--arch", "gpt5"], "architecture gpt5"),
        (["--quant", "Q9"], "quantisation Q9"),
        (["--expert-width", "100"], "whole blocks of 256"),
    ],
)
def test_the_command_raises_what_it_cannot_do(arguments: list[str], complaint: str, tmp_path: Path) -> None:
    result = invoke("random", str(tmp_path / "m"), *arguments)
    assert isinstance(result.exception, BmoeError)
    assert complaint in str(result.exception)


def test_progress_lines_are_seconds_apart(tmp_path: Path) -> None:
    now = iter([0.0, 1.0, 3.5, 4.0, 7.0])
    with open(tmp_path / "lines", "w", encoding="utf-8") as stream:
        on_progress = line_progress(stream, lambda: next(now))
        for done in (10, 20, 30, 40):
            on_progress(done << 20, 40 << 20)
    lines = (tmp_path / "lines").read_text(encoding="utf-8")
    assert lines == "writing: 20 of 40 MiB (50 %)\nwriting: 40 of 40 MiB (100 %)\n"


def test_public_names_are_sorted_and_exist() -> None:
    assert sorted(bmoe.synth.__all__) == sorted(set(bmoe.synth.__all__))
    assert all(hasattr(bmoe.synth, name) for name in bmoe.synth.__all__)
