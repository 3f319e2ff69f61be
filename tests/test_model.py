"""Which tensors of a file are streamed, which are dense, and how they are numbered; split sets."""

from __future__ import annotations

import itertools
import os
from pathlib import Path
from typing import TYPE_CHECKING

import gguf
import numpy as np
import pytest

from bmoe.config import GenerateRequest
from bmoe.gguf_file import read_gguf
from bmoe.io.errors import FileError, FormatError, UsageError
from bmoe.model import ModelLayout, lay_out
from bmoe.verify import verify
from tests.models import tiny_moe
from tests.runs import config, run

if TYPE_CHECKING:
    from collections.abc import Mapping

EXPERTS, WIDTH, UNITS = 4, 64, 32


def write_gguf(
    path: Path, shapes: Mapping[str, tuple[int, ...]], *, arch: str = "qwen3moe", top_k: int = 2
) -> str:
    """A file of F32 tensors by their shapes in ggml's order (fastest first)."""
    writer = gguf.GGUFWriter(str(path), arch)
    writer.add_uint32(f"{arch}.expert_used_count", top_k)
    for name, shape in shapes.items():
        writer.add_tensor(name, np.zeros(shape[::-1], dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return str(path)


def split_layer(number: int, experts: int = EXPERTS) -> dict[str, tuple[int, ...]]:
    return {
        f"blk.{number}.ffn_down_exps.weight": (UNITS, WIDTH, experts),
        f"blk.{number}.ffn_gate_exps.weight": (WIDTH, UNITS, experts),
        f"blk.{number}.ffn_up_exps.weight": (WIDTH, UNITS, experts),
    }


def laid_out(path: Path, shapes: Mapping[str, tuple[int, ...]]) -> ModelLayout:
    return lay_out(read_gguf(write_gguf(path / "model.gguf", shapes)))


def test_a_layers_experts_are_in_the_order_of_use(tmp_path: Path) -> None:
    layout = laid_out(tmp_path, split_layer(0))
    assert [(t.name, t.layer, t.rank) for t in layout.tensors] == [
        ("blk.0.ffn_gate_exps.weight", 0, 0),
        ("blk.0.ffn_up_exps.weight", 0, 1),
        ("blk.0.ffn_down_exps.weight", 0, 2),
    ]
    gate, _, down = layout.tensors
    assert (gate.experts, gate.ne0, gate.ne1, gate.slice_bytes) == (EXPERTS, WIDTH, UNITS, WIDTH * UNITS * 4)
    assert (down.ne0, down.ne1) == (UNITS, WIDTH)
    assert layout.is_moe
    assert (layout.experts, layout.top_k) == (EXPERTS, 2)
    assert layout.expert_bytes == 3 * EXPERTS * WIDTH * UNITS * 4
    assert layout.cycle_bytes == 3 * 2 * WIDTH * UNITS * 4


def test_a_fused_projection_comes_before_down(tmp_path: Path) -> None:
    shapes = {
        "blk.0.ffn_down_exps.weight": (UNITS, WIDTH, EXPERTS),
        "blk.0.ffn_gate_up_exps.weight": (WIDTH, 2 * UNITS, EXPERTS),
    }
    layout = laid_out(tmp_path, shapes)
    assert [t.name for t in layout.tensors] == ["blk.0.ffn_gate_up_exps.weight", "blk.0.ffn_down_exps.weight"]


# Names that end alike, or have experts in them, and are no streamed matmul's weight.
LOOKALIKES = {
    "blk.0.ffn_norm_exps.weight": (WIDTH,),
    "blk.0.ffn_gate_exps.bias": (UNITS, EXPERTS),
    "blk.0.ffn_down_exps.scale": (EXPERTS,),
    "blk.0.ffn_up_exps.weight.lora_a": (WIDTH, 4, EXPERTS),
    "blk.0.ffn_up_exps.weight.lora_b": (4, UNITS, EXPERTS),
    "blk.0.ffn_gate_chexps.weight": (WIDTH, UNITS, EXPERTS),
    "blk.0.ffn_gate_shexp.weight": (WIDTH, UNITS),
    "blk.0.ffn_gate_inp.weight": (WIDTH, EXPERTS),
    "v.blk.0.ffn_gate_exps.weight": (WIDTH, UNITS, EXPERTS),
    "blk.x.ffn_gate_exps.weight": (WIDTH, UNITS, EXPERTS),
    "blk.1.ffn_gate_exps.weight": (WIDTH, UNITS, 1),
    "blk.2.ffn_gate_exps.weight": (WIDTH, UNITS),
    "token_embd.weight": (WIDTH, 300),
}


def test_names_that_only_look_like_experts_are_dense(tmp_path: Path) -> None:
    layout = laid_out(tmp_path, split_layer(0) | LOOKALIKES)
    assert {t.name for t in layout.tensors} == set(split_layer(0))
    by_name = {t.name: t for t in layout.facts.tensors}
    wanted = sorted(
        (0, by_name[name].offset_bytes, by_name[name].offset_bytes + by_name[name].size_bytes)
        for name in LOOKALIKES
    )
    assert sorted(layout.dense) == wanted
    assert layout.dense_bytes == sum(end - start for _, start, end in wanted)


def test_every_byte_of_every_tensor_is_streamed_or_dense(tmp_path: Path) -> None:
    layout = laid_out(tmp_path, split_layer(0) | LOOKALIKES)
    streamed = [(t.file_offset, t.file_offset + t.experts * t.slice_bytes) for t in layout.tensors]
    dense = [(start, end) for _, start, end in layout.dense]
    spans = sorted(streamed + dense)
    assert spans == sorted((t.offset_bytes, t.offset_bytes + t.size_bytes) for t in layout.facts.tensors)
    assert all(a[1] <= b[0] for a, b in itertools.pairwise(spans))


def test_what_is_read_lazily_by_design_is_neither(tmp_path: Path) -> None:
    layout = laid_out(tmp_path, split_layer(0) | {"per_layer_token_embd.weight": (WIDTH, 300)})
    assert layout.dense == ()


def test_layers_are_numbered_in_their_numeric_order(tmp_path: Path) -> None:
    layout = laid_out(tmp_path, split_layer(10) | split_layer(2) | split_layer(1, experts=8))
    assert layout.layer_numbers == (1, 2, 10)
    assert [(t.name.split(".")[1], t.layer) for t in layout.tensors[::3]] == [("1", 0), ("2", 1), ("10", 2)]
    assert layout.experts == 8


def test_top_k_never_exceeds_the_experts(tmp_path: Path) -> None:
    assert lay_out(read_gguf(write_gguf(tmp_path / "a.gguf", split_layer(0), top_k=3))).top_k == 3
    assert lay_out(read_gguf(write_gguf(tmp_path / "b.gguf", split_layer(0), top_k=99))).top_k == EXPERTS


def test_a_dense_model_has_nothing_to_stream(tmp_path: Path) -> None:
    layout = laid_out(tmp_path, {"blk.0.ffn_gate.weight": (WIDTH, UNITS)})
    assert not layout.is_moe
    assert (layout.experts, layout.top_k, layout.expert_bytes, layout.layer_numbers) == (0, 0, 0, ())


def test_a_layer_whose_tensors_disagree_is_refused(tmp_path: Path) -> None:
    shapes = split_layer(0) | {"blk.0.ffn_up_exps.weight": (WIDTH, UNITS, EXPERTS + 1)}
    with pytest.raises(FormatError) as caught:
        laid_out(tmp_path, shapes)
    assert caught.value.field == "blk.0.ffn_up_exps.weight"
    assert (caught.value.expected, caught.value.got) == ("4 experts", 5)


def split(source: str, folder: Path, tensors_per_file: int) -> list[str]:
    """The same model as a split set; the paths in order."""
    reader = gguf.GGUFReader(source)
    arch = reader.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(str(folder / "part.gguf"), arch, split_max_tensors=tensors_per_file)
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name == "general.architecture":
            continue
        kind, inner = field.types[0], field.types[-1]
        writer.add_key_value(
            name, field.contents(), kind, sub_type=inner if kind == gguf.GGUFValueType.ARRAY else None
        )
    for tensor in reader.tensors:
        writer.add_tensor(
            tensor.name, np.array(tensor.data), raw_shape=tensor.data.shape, raw_dtype=tensor.tensor_type
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return sorted(str(path) for path in folder.glob("part-*.gguf"))


def test_a_split_model_streams_from_all_its_files(tmp_path: Path) -> None:
    paths = split(tiny_moe("Q4_K_M", layers=2), tmp_path, 10)
    assert len(paths) >= 3
    facts = read_gguf(paths[0])
    assert facts.paths == tuple(paths)
    assert facts.sizes_bytes == tuple(os.stat(path).st_size for path in paths)
    layout = lay_out(facts)
    assert len({t.file for t in layout.tensors}) >= 2
    assert len({file for file, _, _ in layout.dense}) >= 2
    got = run(verify(config(paths[0], threads=2), GenerateRequest(prompt="in pieces", n_predict=4)))
    assert got.identical


def test_a_split_set_is_named_by_its_first_file_and_complete(tmp_path: Path) -> None:
    paths = split(tiny_moe("Q4_K", layers=2), tmp_path, 10)
    with pytest.raises(UsageError) as wrong:
        read_gguf(paths[1])
    assert wrong.value.hint == f"give the first: {paths[0]}"
    Path(paths[-1]).unlink()
    with pytest.raises(FileError) as missing:
        read_gguf(paths[0])
    assert missing.value.path == paths[-1]


def test_a_file_cut_short_inside_a_tensor_is_refused(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf", split_layer(0))
    os.truncate(path, os.stat(path).st_size - 4096)
    with pytest.raises(FormatError) as caught:
        read_gguf(path)
    assert caught.value.path == path
