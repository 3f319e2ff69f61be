"""`bmoe inspect`: every figure is the file's own, and no weight is read."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from bmoe.cli import main
from bmoe.gguf_file import GgufFacts, read_gguf
from bmoe.inspect import inspect_model, ranges, worst_read_bytes
from bmoe.model import lay_out
from tests.models import tiny_moe
from tests.test_architectures import gate_model, split_model
from tests.test_synth import uniform, write_dense

SLICE_BYTES = 256 * 256 // 256 * 144


def test_a_summary_has_the_models_figures() -> None:
    summary = inspect_model(tiny_moe("Q4_K"))
    assert (summary.architecture, summary.name) == ("qwen3moe", "random qwen3moe Q4_K seed 1")
    assert (summary.layers, summary.moe_layers, summary.experts, summary.top_k) == (3, 3, 16, 4)
    assert summary.expert_bytes == 3 * 16 * 3 * SLICE_BYTES
    assert summary.cycle_bytes == 3 * 4 * 3 * SLICE_BYTES
    (group,) = summary.groups
    assert group.layers == (0, 1, 2)
    assert group.expert_bytes == 3 * SLICE_BYTES
    assert [(p.name, p.type_name, p.slice_bytes) for p in group.projections] == [
        (name, "q4_K", SLICE_BYTES) for name in ("gate", "up", "down")
    ]
    assert (summary.context_tokens, summary.vocabulary, summary.chat_template) == (4096, 259, False)
    assert (summary.shared_experts, summary.prediction_layers, summary.mapped_bytes) == (0, 0, 0)


def test_layers_of_different_types_are_apart() -> None:
    groups = inspect_model(tiny_moe("Q4_K_M", layers=5)).groups
    assert [group.layers for group in groups] == [(0, 2, 4), (1, 3)]
    assert [group.projections[2].type_name for group in groups] == ["q6_K", "q4_K"]


@pytest.mark.parametrize(
    ("architecture", "counts", "names"),
    [
        ("glm4moe", (4, 3, 1, 1), ["gate", "up", "down"]),
        ("gemma4", (4, 4, 0, 0), ["gate and up", "down"]),
        ("nemotron_h_moe", (4, 2, 1, 0), ["up", "down"]),
        ("qwen35moe", (4, 4, 1, 1), ["gate", "up", "down"]),
    ],
)
def test_architectures_are_told_apart(
    architecture: str, counts: tuple[int, int, int, int], names: list[str]
) -> None:
    s = inspect_model(gate_model(architecture))
    assert (s.layers, s.moe_layers, s.shared_experts, s.prediction_layers) == counts
    assert [p.name for p in s.groups[0].projections] == names
    assert bool(s.ignored_bytes) == bool(s.prediction_layers)


def test_the_worst_read_is_that_of_whole_blocks() -> None:
    layout = lay_out(read_gguf(tiny_moe("Q4_K")))
    assert worst_read_bytes(layout, 1) == layout.cycle_bytes
    assert layout.cycle_bytes < worst_read_bytes(layout, 4096) <= layout.cycle_bytes + 3 * 3 * 4 * 2 * 4096


def test_experts_per_layer_may_differ() -> None:
    facts = GgufFacts(("m",), (1,), {"general.architecture": "a", "a.expert_used_count": (2, 0, 5)}, ())
    assert facts.arch_int("expert_used_count") == 5
    assert facts.arch_ints("expert_used_count", 3) == (2, 0, 5)
    assert facts.arch_ints("missing", 2, 7) == (7, 7)


def test_ranges_are_short() -> None:
    assert ranges([0, 1, 2, 5, 7, 8]) == "0-2, 5, 7-8"
    assert ranges([]) == ""


# The command.


def test_the_command_shows_one_screen(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = split_model(tmp_path)
    assert main(["inspect", paths[0]]) == 0
    shown, errors = capsys.readouterr()
    assert errors == ""
    lines = shown.splitlines()
    assert len(lines) < 40
    assert all(line == line.rstrip() and len(line) <= 120 for line in lines if paths[0] not in line)
    for words in ("qwen3moe", "in 3 shards", "12 per layer, top 3, 0 shared", "token cycle", "q6_K"):
        assert words in shown


def test_the_command_gives_json(capsys: pytest.CaptureFixture[str]) -> None:
    path = gate_model("gpt-oss")
    assert main(["inspect", path, "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert (record["schema"], record["tool"]) == (1, "bmoe inspect")
    assert (record["paths"], record["architecture"], record["top_k"]) == ([path], "gpt-oss", 3)
    assert record["groups"][0]["projections"][0]["type_name"] == "mxfp4"


def test_a_dense_model_has_no_experts_to_show(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_dense(str(tmp_path / "dense"), uniform("F32"), units=64)
    assert main(["inspect", str(tmp_path / "dense")]) == 0
    shown = capsys.readouterr().out
    assert "2: 0 with experts, 2 dense" in shown
    assert "chat template  yes" in shown
    assert "token cycle" not in shown


def test_a_missing_file_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(tmp_path / "missing")]) == 1
    assert capsys.readouterr().err.count("\n") == 1


def test_what_a_file_says_cannot_drive_the_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    content = Path(tiny_moe("Q4_K")).read_bytes().replace(b"random qwen3moe", b"\x1b[2Jm! qwen3moe", 1)
    path = tmp_path / "m.gguf"
    path.write_bytes(content)
    assert main(["inspect", str(path)]) == 0
    assert "\x1b" not in capsys.readouterr().out


def test_neither_llama_cpp_nor_weights_are_loaded() -> None:
    program = (
        "import sys; from bmoe.cli import main\n"
        "assert main(['inspect', sys.argv[1]]) == 0 and main(['plan', sys.argv[1]]) == 0\n"
        "assert not [m for m in sys.modules if 'llama_cpp' in m]\n"
        "assert not [line for line in open('/proc/self/maps') if 'ggml' in line]\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program, tiny_moe("Q4_K")], capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stderr
