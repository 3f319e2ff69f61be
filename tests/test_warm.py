"""Warm starts: the state file from run to run, warm sets, budgets, and files that mean no good."""

from __future__ import annotations

import json
import os
import shutil
import stat
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jsonschema
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bmoe.io.errors import BmoeError, FileError, FormatError
from bmoe.pipeline.slots import SlotPlan, plan_slots, total_slot_bytes
from bmoe.route.warmset import WarmSet, as_json
from bmoe.warm import load_warm_entries, model_identity, save_warm_state, state_path
from tests.models import tiny_moe
from tests.runs import cache_of_part, layout_of
from tests.test_architectures import gate_model

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from bmoe.model import ModelLayout

SCHEMAS = Path(__file__).parent.parent / "docs" / "schema"


@pytest.fixture(autouse=True)
def cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def layout() -> ModelLayout:
    """3 layers of 16 experts, all slices of one size."""
    return layout_of(tiny_moe("Q4_K"))


def everything(of: ModelLayout | None = None) -> SlotPlan:
    of = layout() if of is None else of
    return plan_slots(of.tensors, total_slot_bytes(of.tensors, 4096), 4096)


def uses(*favourites: tuple[int, int, float]) -> NDArray[np.float64]:
    """[48] uses: the named (layer, expert, count), the rest 0."""
    counts = np.zeros((3, 16))
    for layer, expert, count in favourites:
        counts[layer, expert] = count
    return counts.ravel()


def record_of(path: str) -> dict[str, Any]:
    record: dict[str, Any] = json.loads(Path(path).read_text())
    return record


def test_what_a_run_used_most_comes_first_in_the_next() -> None:
    save_warm_state(None, layout(), uses((0, 5, 3e9), (0, 1, 1e9), (1, 2, 4), (2, 15, 9), (2, 0, 1)))
    start = load_warm_entries("auto", layout(), everything())
    assert start.entries == ((1, 2), (2, 15), (0, 5), (0, 1), (2, 0))
    assert (start.origin, start.note) == (state_path(layout()), None)
    assert start.worth[0, 5] == pytest.approx(0.75)


def test_the_file_is_as_its_schema_says_private_and_alone(cache_folder: Path) -> None:
    path = save_warm_state(None, layout(), uses((0, 5, 1.0)))
    schema = json.loads((SCHEMAS / "warm-state.v1.schema.json").read_text())
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.Draft202012Validator(schema).validate(record_of(path))
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
    assert os.listdir(cache_folder / "bmoe" / "warm") == [os.path.basename(path)]


def test_no_more_is_taken_than_there_are_slots() -> None:
    path = tiny_moe("Q4_K_M")  # two sizes of slices
    of = layout_of(path)
    save_warm_state(None, of, np.arange(48, 0, -1.0))
    plan = plan_slots(of.tensors, cache_of_part(path, 0.3), 4096)
    start = load_warm_entries("auto", of, plan)
    wanted = [0] * len(plan.classes)
    for layer, _ in start.entries:
        for number, tensor in enumerate(of.tensors):
            if tensor.layer == layer:
                wanted[plan.class_of_tensor[number]] += 1
    assert all(n <= c.slots for n, c in zip(wanted, plan.classes, strict=True))
    assert 5 < len(start.entries) < 20


def test_slices_and_frequencies_are_numbered_as_the_engine_does() -> None:
    save_warm_state(None, layout(), uses((0, 5, 1.0), (1, 2, 3.0), (1, 3, 1.0)))
    start = load_warm_entries("auto", layout(), everything())
    assert start.entries == ((0, 5), (1, 2), (1, 3))
    # Three tensors of 16 slices in each layer.
    assert start.slices(layout()) == [5, 21, 37, 50, 66, 82, 51, 67, 83]
    frequencies = start.frequencies(layout(), 16.0)
    assert frequencies.shape == (48,)
    steady = 4 / (1 - 2 ** (-1 / 16))  # four experts per token
    assert frequencies[5] == pytest.approx(steady / 2)
    assert frequencies[16 + 2] == pytest.approx(steady * 3 / 8)
    assert frequencies.sum() == pytest.approx(steady)


def test_layers_of_different_sizes_keep_their_own_experts() -> None:
    of = layout_of(gate_model("glm4moe"))  # a dense layer first, and a block that is not loaded
    counts = np.arange(1.0, 1 + 12 * len(of.layer_numbers))
    save_warm_state(None, of, counts)
    start = load_warm_entries("auto", of, everything(of))
    assert len(start.entries) == len(counts)
    assert start.frequencies(of, 16.0).argmax() in range(len(counts))
    assert sorted(start.slices(of)) == list(range(sum(t.experts for t in of.tensors)))


def test_runs_are_averaged_and_what_one_did_not_see_is_kept() -> None:
    save_warm_state(None, layout(), uses((0, 1, 1.0), (1, 7, 2.0)))
    save_warm_state(None, layout(), uses((0, 2, 5.0)))
    rows = record_of(state_path(layout()))["uses_ppm"]
    assert (rows[0][1], rows[0][2]) == (500_000, 500_000)
    assert (rows[1][7], sum(rows[2])) == (1_000_000, 0)


def test_odd_counts_are_worth_nothing() -> None:
    counts = uses((0, 1, 1.0), (0, 2, -5.0), (0, 3, np.nan), (0, 4, np.inf))
    save_warm_state(None, layout(), counts)
    assert load_warm_entries("auto", layout(), everything()).entries == ((0, 1),)


def test_a_first_run_is_cold_and_says_so() -> None:
    start = load_warm_entries("auto", layout(), everything())
    assert (start.entries, start.note) == ((), "nothing is kept of this model yet")
    assert not start.frequencies(layout(), 16.0).any()


def test_identity_is_the_models_and_not_the_paths(tmp_path: Path) -> None:
    copy = str(tmp_path / "other name.gguf")
    shutil.copy(tiny_moe("Q4_K"), copy)
    assert model_identity(layout_of(copy)) == model_identity(layout())
    others = {model_identity(layout_of(p)) for p in (tiny_moe("Q4_K_M"), tiny_moe("Q4_K", seed=2))}
    assert model_identity(layout()) not in others
    assert model_identity(layout().with_top_k(2)) == model_identity(layout())


def test_a_state_that_is_anothers_is_refused_by_name_and_passed_over_by_auto(tmp_path: Path) -> None:
    other = layout_of(tiny_moe("Q4_K_M"))
    path = save_warm_state(str(tmp_path / "state.json"), other, uses((0, 1, 1.0)))
    with pytest.raises(FormatError, match="is of another model"):
        load_warm_entries(path, layout(), everything())
    os.makedirs(os.path.dirname(state_path(layout())))
    shutil.copy(path, state_path(layout()))
    start = load_warm_entries("auto", layout(), everything())
    assert start.entries == ()
    assert start.note is not None
    assert start.note.startswith("the start is cold: ")
    save_warm_state(None, layout(), uses((0, 3, 1.0)))  # and is replaced
    assert load_warm_entries("auto", layout(), everything()).entries == ((0, 3),)


def test_a_state_can_be_named(tmp_path: Path) -> None:
    path = save_warm_state(str(tmp_path / "deep" / "state.json"), layout(), uses((2, 3, 1.0)))
    assert load_warm_entries(path, layout(), everything()).entries == ((2, 3),)
    with pytest.raises(FileError, match="cannot be read: No such file"):
        load_warm_entries(path + "x", layout(), everything())


def test_what_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path in (str(tmp_path / "file" / "state.json"), str(tmp_path)):
        with pytest.raises(FileError, match="cannot be written") as caught:
            save_warm_state(path, layout(), uses())
        assert "\n" not in str(caught.value)
    assert sorted(os.listdir(tmp_path)) == ["file"]


# Warm sets.


def write_set(path: Path, **changes: Any) -> str:
    warm = WarmSet(
        model=os.path.basename(tiny_moe("Q4_K")),
        architecture="qwen3moe",
        budget_bytes=1,
        size_bytes=1,
        layers=3,
        experts=16,
        covered=0.5,
        chosen=((2, 7), (0, 1), (0, 2)),
    )
    path.write_text(json.dumps(json.loads(as_json(warm)) | changes))
    return str(path)


def test_a_warm_set_is_taken_in_its_order(tmp_path: Path) -> None:
    start = load_warm_entries(write_set(tmp_path / "set"), layout(), everything())
    assert start.entries == ((2, 7), (0, 1), (0, 2))
    assert start.note is None
    assert start.worth[2, 7] == 1.0
    assert start.worth[0, 1] == pytest.approx(2 / 3)
    renamed = load_warm_entries(write_set(tmp_path / "set", model="x.gguf"), layout(), everything())
    assert renamed.note is not None
    odd = load_warm_entries(write_set(tmp_path / "set", model=[{}]), layout(), everything())
    assert odd.note is not None
    assert "traces of 'x.gguf'" in renamed.note


def test_a_warm_set_names_the_files_layers(tmp_path: Path) -> None:
    of = layout_of(gate_model("deepseek2"))  # layer 0 is dense
    changes = {"architecture": "deepseek2", "experts_per_layer": 12, "experts": [[3, 0], [1, 11]]}
    start = load_warm_entries(write_set(tmp_path / "set", **changes), of, everything(of))
    assert start.entries == ((2, 0), (0, 11))
    with pytest.raises(FormatError, match="no expert 1 in layer 0"):
        load_warm_entries(
            write_set(tmp_path / "set", **(changes | {"experts": [[0, 1]]})), of, everything(of)
        )


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"architecture": "llama"}, "expected qwen3moe, got 'llama'"),
        ({"experts_per_layer": 17}, "expected 16 experts, got 17"),
        ({"experts": [[0, 16]]}, "no expert 16 in layer 0"),
        ({"experts": [[9, 1]]}, "no expert 1 in layer 9"),
        ({"experts": [[0, -1]]}, "entry 0 of its experts is no pair"),
        ({"experts": [[0, 1], [True, 1]]}, "entry 1 of its experts"),
        ({"experts": [[0, 1, 2]]}, "entry 0"),
        ({"experts": [[0, 1.0]]}, "entry 0"),
        ({"experts": "all"}, "lists no experts"),
        ({"experts": [[0, 1]] * 49}, "more than there are"),
        ({"schema": 2}, "neither a warm state nor a warm set"),
        ({"kind": ["bmoe warmset"]}, "neither a warm state nor a warm set"),
    ],
)
def test_bad_warm_sets_are_one_line(tmp_path: Path, changes: dict[str, Any], why: str) -> None:
    with pytest.raises(FormatError, match=why) as caught:
        load_warm_entries(write_set(tmp_path / "set", **changes), layout(), everything())
    assert "\n" not in str(caught.value)


# Files that mean no good.


def refused(path: str | Path) -> str:
    with pytest.raises(BmoeError) as caught:
        load_warm_entries(str(path), layout(), everything())
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 1000
    return str(caught.value)


@pytest.mark.parametrize(
    ("raw", "why"),
    [
        (b"", "is not JSON"),
        (b"\xff\xfe\x00", "is not JSON"),
        (b"[" * 100_000, "is not JSON"),
        (b'{"schema":' + b"9" * 10_000 + b"}", "is not JSON"),
        (b"[1]", "is not a JSON object"),
        (b"{}", "is neither"),
        (b" " * (9 << 20), "is larger than"),
    ],
)
def test_broken_content_is_one_line(tmp_path: Path, raw: bytes, why: str) -> None:
    (tmp_path / "x").write_bytes(raw)
    assert why in refused(tmp_path / "x")


def test_things_that_are_no_files_are_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    assert "is not a regular file" in refused(tmp_path / "fifo")
    assert "not a regular file" in refused("/dev/zero")
    assert "cannot be read" in refused(tmp_path)
    assert "cannot be read" in refused("a\0b")


@pytest.mark.parametrize(
    "changes",
    [
        {"uses_ppm": None},
        {"uses_ppm": [[0] * 16] * 2},
        {"uses_ppm": [[0] * 16, [0] * 16, [0] * 15]},
        {"uses_ppm": [[0] * 16, [0] * 16, [0] * 15 + [-1]]},
        {"uses_ppm": [[0] * 16, [0] * 16, [0] * 15 + [1_000_001]]},
        {"uses_ppm": [[0] * 16, [0] * 16, [0] * 15 + [0.5]]},
        {"uses_ppm": [[0] * 16, [0] * 16, "0" * 16]},
        {"model": None},
        {"model": "0" * 64, "name": "x\n" * 10_000},
    ],
)
def test_broken_states_are_one_line(tmp_path: Path, changes: dict[str, Any]) -> None:
    path = save_warm_state(str(tmp_path / "state"), layout(), uses((0, 0, 1.0)))
    Path(path).write_text(json.dumps(record_of(path) | changes))
    refused(path)


@settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_any_damage_is_refused_or_harmless(tmp_path: Path, data: st.DataObject) -> None:
    """Some bytes of a good file replaced: one line, or entries of this model."""
    path = save_warm_state(str(tmp_path / "fuzz"), layout(), np.arange(48.0))
    raw = bytearray(Path(path).read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    Path(path).write_bytes(raw[: data.draw(st.integers(len(raw) // 2, len(raw)))])
    found: list[tuple[int, int]] = []
    line = ""
    try:
        found += load_warm_entries(path, layout(), everything()).entries
    except BmoeError as error:
        line = str(error)
    os.unlink(path)
    assert "\n" not in line
    assert len(set(found)) == len(found)
    assert all(0 <= layer < 3 and 0 <= expert < 16 for layer, expert in found)
