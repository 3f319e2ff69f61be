"""Any mixture of experts that llama.cpp runs streams exactly: architectures, types, shapes, split sets.

Each gate is `verify`: resident and streaming, every logit of a prompt and of greedy tokens compared.
docs/architectures.md is made from the gates of this file by tools/architectures_table.py.
"""

from __future__ import annotations

import functools
import json
import os
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import bmoe.verify
from bmoe.config import GenerateRequest, SessionConfig
from bmoe.gguf_file import read_gguf
from bmoe.io.errors import BmoeError, FileError, FormatError, UsageError
from bmoe.model import lay_out
from bmoe.present import mode_line
from bmoe.session import Session
from bmoe.synth import random_model, tiny_shape
from bmoe.synth.architectures import ARCHITECTURES
from bmoe.verify import VerifyReport, trace, verify
from tests.models import model_folder, tiny_moe
from tests.runs import cache_of_part, config, layout_of, run
from tests.test_synth import uniform, write_dense

if TYPE_CHECKING:
    from bmoe.synth import ModelShape
    from bmoe.verify import LogitsTrace

PROMPT = "Streaming must not change a bit, whatever the model is made of."


@dataclass(frozen=True, kw_only=True)
class Gate:
    """A model that is held to the gate.

    Attributes:
        quant: The type of its matrices.
        shape: Numbers that differ from the gates' usual ones.
    """

    quant: str = "Q4_K_M"
    shape: dict[str, Any] | None = None


GATES: dict[str, Gate] = {name: Gate() for name in sorted(ARCHITECTURES)} | {
    "deepseek2": Gate(shape={"dense_layers": 1}),
    "glm4moe": Gate(shape={"dense_layers": 1, "nextn_layers": 1}),
    "gpt-oss": Gate(quant="MXFP4"),
    "lfm2moe": Gate(shape={"dense_layers": 1}),
    "qwen35moe": Gate(shape={"nextn_layers": 1}),
}


def gate_shape(architecture: str, **changes: Any) -> ModelShape:
    """Four layers, so that hybrids have two of each kind, and 12 experts of which a token uses 3."""
    usual = {"layers": 4, "experts": 12, "top_k": 3}
    return replace(tiny_shape(architecture), **(usual | changes))


@functools.cache
def gate_model(architecture: str) -> str:
    """The path of an architecture's gate model."""
    gate = GATES[architecture]
    path = os.path.join(model_folder(), f"gate-{architecture}.gguf")
    random_model(path, shape=gate_shape(architecture, **(gate.shape or {})), quantisation=gate.quant)
    return path


@dataclass
class Seen:
    """What the streaming run did that a report does not say."""

    nodes: int = 0
    reads: int = 0
    finite: bool = False
    varied: bool = False

    @property
    def streamed(self) -> bool:
        """Experts were read from the file and computed by the hook, to logits that mean something."""
        return self.nodes > 0 and self.reads > 0 and self.finite and self.varied


def gate(path: str, *, prompt: str = PROMPT, n_predict: int = 3, **changes: Any) -> tuple[VerifyReport, Seen]:
    """Runs `verify` and looks into its streaming side."""
    seen = Seen()

    async def looking(session: Session, request: GenerateRequest) -> LogitsTrace:
        result = await trace(session, request)
        if session.streaming:
            logits = session.context.logits(-1)
            seen.finite = bool(np.isfinite(logits).all())
            seen.varied = len(set(result.positions)) > len(result.positions) // 2
            seen.nodes = session.streaming.engine.statistics().nodes
            seen.reads = session.streaming.streamer.statistics().reads
        return result

    wanted = config(path, **({"threads": 2} | changes))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bmoe.verify, "trace", looking)
        report = run(verify(wanted, GenerateRequest(prompt=prompt, n_predict=n_predict)))
    return report, seen


def assert_exact(path: str, **how: Any) -> VerifyReport:
    """Identical, from experts that really were streamed, with logits that mean something."""
    report, seen = gate(path, **how)
    assert report.identical, f"position {report.first_difference} differs"
    assert seen.streamed, seen
    return report


@pytest.mark.parametrize("ubatch", [1, 64])
@pytest.mark.parametrize("architecture", GATES)
def test_an_architecture_streams_exactly(architecture: str, ubatch: int) -> None:
    report, seen = gate(gate_model(architecture), ubatch_tokens=ubatch)
    effective = report.effective
    record_gate(architecture, ubatch, report, seen)
    assert report.identical, f"position {report.first_difference} differs"
    assert seen.streamed
    assert effective.architecture == architecture
    assert effective.moe_layers > 0


def record_gate(architecture: str, ubatch: int, report: VerifyReport, seen: Seen) -> None:
    """A line for tools/architectures_table.py, where it asks for one."""
    if path := os.environ.get("BMOE_GATES"):
        record = {
            "architecture": architecture,
            "ubatch": ubatch,
            "identical": report.identical and seen.streamed,
            "nodes": seen.nodes,
            "quant": GATES[architecture].quant,
            "moe_layers": report.effective.moe_layers,
            "experts": report.effective.experts,
            "top_k": report.effective.top_k,
            "prompt_tokens": report.prompt_tokens,
            "tokens": report.tokens,
        }
        with open(path, "a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")


# Types and shapes of expert tensors.

TYPES = (
    *("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"),
    *("IQ1_S", "IQ2_XXS", "IQ2_XS", "IQ3_XXS", "IQ3_S", "IQ4_NL", "IQ4_XS", "MXFP4", "Q4_K_M"),
)


@pytest.mark.parametrize("quant", TYPES)
def test_a_type_of_expert_weights_streams_exactly(quant: str) -> None:
    """With prefill batches that give experts more and fewer rows than the stock kernel's switch at 8."""
    assert_exact(tiny_moe(quant, layers=2, experts=8, top_k=3), ubatch_tokens=64)


def test_a_mixture_has_layers_and_projections_of_different_types() -> None:
    kinds = {(t.layer, t.rank): t.ggml_type for t in layout_of(tiny_moe("Q4_K_M", layers=2)).tensors}
    assert kinds[0, 2] != kinds[0, 0]
    assert kinds[0, 2] != kinds[1, 2]


def test_slices_at_every_phase_of_a_page_stream_exactly() -> None:
    """128 slices of 33 times 32 bytes lie at each of the 128 multiples of 32 within 4 KiB."""
    path = os.path.join(model_folder(), "phases.gguf")
    shape = gate_shape("llama", layers=1, embedding=48, head_dim=12, expert_width=11, experts=128, top_k=4)
    random_model(path, shape=shape, quantisation="F16")
    for tensor in layout_of(path).tensors:
        offsets = [tensor.file_offset + x * tensor.slice_bytes for x in range(tensor.experts)]
        assert {offset % 4096 for offset in offsets} == set(range(0, 4096, 32))
    assert_exact(path, prompt=PROMPT * 2, cache_bytes=cache_of_part(path, 0.3))


@pytest.mark.parametrize("phase", [0, 32, 2048, 4064])
def test_a_file_whose_tensors_begin_anywhere_streams_exactly(phase: int, tmp_path: Path) -> None:
    path = str(tmp_path / "m.gguf")
    random_model(path, shape=gate_shape("qwen3moe", layers=2), quantisation="Q4_K", phase_bytes=phase)
    assert min(t.offset_bytes for t in read_gguf(path).tensors) % 4096 == phase
    assert_exact(path)


def test_512_experts_of_which_a_token_uses_32_stream_exactly() -> None:
    path = tiny_moe("Q8_0", layers=2, embedding=64, experts=512, top_k=32, expert_width=32)
    assert_exact(path, prompt=PROMPT * 2)


def test_more_than_eight_threads_stream_exactly() -> None:
    assert_exact(tiny_moe("Q4_K_M", layers=2), threads=11, n_predict=2)


def test_a_context_of_several_batches_streams_exactly() -> None:
    report = assert_exact(gate_model("gpt-oss"), prompt=PROMPT * 4, ubatch_tokens=48, context_tokens=384)
    assert report.prompt_tokens > 5 * 48


# Another number of experts per token.


@pytest.mark.parametrize("number", [1, 2, 5, 12])
def test_another_number_of_experts_is_the_same_on_both_sides(number: int) -> None:
    report = assert_exact(gate_model("qwen3moe"), n_expert_used=number)
    for effective in (report.effective, report.resident_effective):
        assert (effective.top_k, effective.file_top_k) == (number, 3)
    assert (
        report.digest
        != run(verify(config(gate_model("qwen3moe"), threads=2), GenerateRequest(prompt=PROMPT))).digest
    )


def test_the_files_own_number_of_experts_is_not_lossy() -> None:
    report, _ = gate(gate_model("qwen3moe"), n_expert_used=3)
    assert report.effective.file_top_k is None


def test_more_experts_than_there_are_are_refused() -> None:
    with pytest.raises(UsageError, match=r"13 experts per token: .* has 12"):
        gate(gate_model("qwen3moe"), n_expert_used=13)


def test_a_dense_model_has_no_number_of_experts_to_change(tmp_path: Path) -> None:
    write_dense(str(tmp_path / "dense"), uniform("F32"), units=64)
    for mode in ("auto", "resident"):
        wanted = SessionConfig(model_path=str(tmp_path / "dense"), mode=mode, n_expert_used=2)
        with pytest.raises(UsageError, match="has no experts"):
            run(Session.open(wanted))


def test_the_mode_line_says_that_another_number_is_lossy() -> None:
    report, _ = gate(gate_model("qwen3moe"), n_expert_used=2, n_predict=1)
    assert "top 2 (lossy: the file says 3)" in mode_line(report.effective)


# Multi-token-prediction blocks.


def test_prediction_blocks_are_neither_streamed_nor_loaded() -> None:
    layout = layout_of(gate_model("glm4moe"))
    assert layout.layer_numbers == (1, 2, 3)
    ignored = [t for t in layout.facts.tensors if t.name.startswith("blk.4.")]
    assert any(t.name.endswith("_exps.weight") for t in ignored)
    assert layout.ignored_bytes == sum(t.size_bytes for t in ignored) > 0
    assert layout.dense_bytes + layout.expert_bytes + layout.ignored_bytes == sum(
        t.size_bytes for t in layout.facts.tensors
    )


# Split sets.


def split_model(
    folder: Path, *, shards: int = 3, bare_first: bool = False, arch: str = "qwen3moe"
) -> list[str]:
    """The paths of a split set."""
    random_model(
        str(folder / f"{arch}.gguf"),
        shape=gate_shape(arch, layers=2),
        quantisation="Q4_K_M",
        shards=shards,
        bare_first=bare_first,
    )
    return sorted(str(path) for path in folder.glob(f"{arch}-0*.gguf"))


@pytest.mark.parametrize("bare_first", [False, True], ids=["tensors first", "metadata first"])
def test_a_split_set_streams_exactly(bare_first: bool, tmp_path: Path) -> None:
    paths = split_model(tmp_path, shards=4, bare_first=bare_first)
    layout = layout_of(paths[0])
    assert bare_first == all(t.file > 0 for t in layout.facts.tensors)
    assert len({t.file for t in layout.tensors if t.layer == 0}) > 1
    report = assert_exact(paths[0])
    whole = tmp_path / "whole.gguf"
    random_model(str(whole), shape=gate_shape("qwen3moe", layers=2), quantisation="Q4_K_M")
    assert report.digest == assert_exact(str(whole)).digest


def test_shards_behind_symbolic_links_stream_exactly(tmp_path: Path) -> None:
    """As a download cache keeps them: blobs elsewhere, links with the right names."""
    (tmp_path / "blobs").mkdir()
    paths = split_model(tmp_path)
    for number, path in enumerate(paths):
        blob = tmp_path / "blobs" / f"blob{number}"
        os.rename(path, blob)
        os.symlink(blob, path)
    assert_exact(paths[0])


def refusal(path: str) -> BmoeError:
    with pytest.raises(BmoeError) as caught:
        lay_out(read_gguf(path))
    assert "\n" not in str(caught.value)
    return caught.value


def test_another_shard_than_the_first_is_a_wrong_request(tmp_path: Path) -> None:
    paths = split_model(tmp_path)
    error = refusal(paths[1])
    assert isinstance(error, UsageError)
    assert f"give the first: {paths[0]}" in str(error)


def test_a_missing_middle_shard_is_named(tmp_path: Path) -> None:
    paths = split_model(tmp_path)
    os.unlink(paths[1])
    error = refusal(paths[0])
    assert isinstance(error, FileError)
    assert error.path == paths[1]


def test_shards_that_changed_places_are_named(tmp_path: Path) -> None:
    paths = split_model(tmp_path)
    os.rename(paths[1], tmp_path / "other")
    os.rename(paths[2], paths[1])
    os.rename(tmp_path / "other", paths[2])
    assert f"{paths[1]}, split.no: is not shard 2 of this model; expected 1, got 2" in str(refusal(paths[0]))


def test_a_second_shard_named_as_the_first_is_refused(tmp_path: Path) -> None:
    paths = split_model(tmp_path)
    os.replace(paths[1], paths[0])
    assert f"{paths[0]}, split.no: is not shard 1" in str(refusal_with_all(paths))


def refusal_with_all(paths: list[str]) -> BmoeError:
    """The refusal when every name exists, whatever is behind it."""
    for path in paths:
        if not os.path.exists(path):
            shutil.copy(paths[-1], path)
    return refusal(paths[0])


def test_a_shard_of_another_set_is_refused(tmp_path: Path) -> None:
    paths = split_model(tmp_path)
    others = split_model(tmp_path, arch="llama")
    shutil.copy(others[2], paths[2])
    error = refusal(paths[0])
    assert isinstance(error, FormatError)
    assert error.path in {paths[0], paths[2]}


def test_a_shard_of_a_set_with_other_numbers_is_refused(tmp_path: Path) -> None:
    paths = split_model(tmp_path)
    others = split_model(tmp_path, shards=2, arch="llama")
    shutil.copy(others[1], paths[1])
    assert f"{paths[1]}, split.count: is not shard 2 of this model; expected 3, got 2" in str(
        refusal(paths[0])
    )


@pytest.mark.parametrize("keep_name", [True, False])
def test_shards_joined_by_cat_are_refused_with_the_cure(keep_name: bool, tmp_path: Path) -> None:
    paths = split_model(tmp_path)
    joined = paths[0] if keep_name else str(tmp_path / "joined.gguf")
    content = b"".join(Path(path).read_bytes() for path in paths)
    Path(joined).write_bytes(content)
    error = refusal(joined)
    assert error.hint == "shards are joined by llama-gguf-split --merge, not by cat"
    assert joined in str(error)


def test_a_renamed_first_shard_is_refused(tmp_path: Path) -> None:
    paths = split_model(tmp_path)
    renamed = str(tmp_path / "model.gguf")
    os.rename(paths[0], renamed)
    error = refusal(renamed)
    assert f"{renamed}: is one of 3 shards, but is not named like one" in str(error)
    assert "-00001-of-00003.gguf" in str(error)
