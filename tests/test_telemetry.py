"""The JSON log: every line valid by the schema, whole, and without what it must not hold."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bmoe import records
from bmoe.config import GenerateRequest, SessionConfig
from bmoe.io.errors import FileError, ReadError, UsageError
from bmoe.records import TokenEvent
from bmoe.telemetry import RunLog, open_run_log, without_prompt
from tests.fakes import EFFECTIVE, LOAD, RESIDENT, RESIDENT_STEP, STEP, SUMMARY

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

SCHEMA_PATH = Path(__file__).parent.parent / "docs" / "schema" / "run-log.v2.schema.json"
SCHEMA: dict[str, Any] = json.loads(SCHEMA_PATH.read_text())
VALIDATOR = jsonschema.Draft202012Validator(SCHEMA)
CONFIG = SessionConfig(model_path="some/model.gguf", threads=2)


def lines(path: Path) -> list[dict[str, Any]]:
    """The log's objects, each valid by the schema."""
    text = path.read_bytes()
    assert text.endswith(b"\n") or not text
    found = [json.loads(line, parse_constant=pytest.fail) for line in text.splitlines()]
    for line in found:
        VALIDATOR.validate(line)
    return found


@pytest.fixture
def log_path(tmp_path: Path) -> Path:
    return tmp_path / "run.jsonl"


@pytest.fixture
def log(log_path: Path) -> Iterator[RunLog]:
    log = open_run_log(str(log_path))
    yield log
    log.close()


def start(log: RunLog, **changes: Any) -> None:
    given: dict[str, Any] = {
        "requested": CONFIG,
        "effective": EFFECTIVE,
        "request": GenerateRequest(prompt="x"),
        "prompt": "a secret",
        "argv": [],
    }
    log.run_start(**{**given, **changes})


def test_the_schema_is_a_schema() -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMA)


@pytest.mark.parametrize(
    ("definition", "record"),
    [
        ("requested", SessionConfig),
        ("effective", records.EffectiveConfig),
        ("load_report", records.LoadReport),
        ("step_metrics", records.StepMetrics),
        ("step_total", records.StepMetrics),
        ("summary", records.RunSummary),
        ("memory", records.MemorySample),
        ("layer_metrics", records.LayerMetrics),
    ],
)
def test_the_schema_has_exactly_the_fields_of_the_records(definition: str, record: type) -> None:
    properties = SCHEMA["$defs"][definition]
    names = [field.name for field in dataclasses.fields(record)]
    left_out = {"step_metrics": {"layers"}, "step_total": {"layers", "memory"}}.get(definition, set())
    assert list(properties["properties"]) == [name for name in names if name not in left_out]
    assert properties["required"] == list(properties["properties"])


@pytest.mark.parametrize(("effective", "step"), [(EFFECTIVE, STEP), (RESIDENT, RESIDENT_STEP)])
def test_every_event_is_valid_and_numbered(
    log: RunLog, log_path: Path, effective: records.EffectiveConfig, step: records.StepMetrics
) -> None:
    start(log, effective=effective)
    log.load(LOAD)
    log.prefill([replace(step, overhead_ns=None), step])
    layers = (records.LayerMetrics(layer=3, lookups=8, hits=6, read_bytes=9, stall_ns=5, experts_ns=7),)
    log.token(TokenEvent(index=0, token=7, text="né\n", metrics=replace(step, layers=layers)))
    log.cache_resize(records.CacheResize(from_bytes=2, cache_bytes=1, reason="asked"))
    log.warning("memory is short")
    log.summary(SUMMARY)
    log.error(ReadError("came short", path="m.gguf", offset_bytes=4096, expected=10, got=3))
    log.run_end(1)

    found = lines(log_path)
    assert [line["event"] for line in found] == [
        "run_start",
        "load",
        "prefill",
        "token",
        "layer",
        "cache_resize",
        "warning",
        "summary",
        "io_error",
        "error",
        "run_end",
    ]
    assert [line["seq"] for line in found] == list(range(11))
    assert {line["run_id"] for line in found} == {log.run_id}
    assert sorted(line["mono_ns"] for line in found) == [line["mono_ns"] for line in found]
    assert found[0]["effective"] == dataclasses.asdict(effective)
    assert found[2]["total"]["wall_ns"] == 2 * step.wall_ns
    assert found[2]["total"]["overhead_ns"] == step.overhead_ns
    assert found[2]["total"]["reads"] == (None if step.reads is None else 2 * step.reads)
    assert found[3]["text"] == "né\n"
    plain = {name: value for name, value in dataclasses.asdict(step).items() if name != "layers"}
    assert found[3]["metrics"] == plain
    assert found[4]["layers"] == [dataclasses.asdict(layers[0])]
    assert found[9] | {"type": "ReadError"} == found[9]
    assert found[9]["message"] == "m.gguf at byte 4096: came short; expected 10, got 3"


def test_the_log_knows_the_prompt_only_by_its_digest(log: RunLog, log_path: Path) -> None:
    start(log, argv=without_prompt(["decode", "-p", "a secret", "-m", "m.gguf"]))
    [line] = lines(log_path)
    assert b"a secret" not in log_path.read_bytes()
    assert line["prompt"] == {"bytes": 8, "sha256": hashlib.sha256(b"a secret").hexdigest()}
    assert line["argv"] == ["decode", "-p", "<prompt>", "-m", "m.gguf"]
    assert line["request"]["n_predict"] == 128


@pytest.mark.parametrize(
    "words",
    [
        ["-p", "a secret"],
        ["-pa secret"],
        ["--prompt", "a secret"],
        ["--prompt=a secret"],
        ["--system", "a secret"],
        ["--system=a secret"],
    ],
)
def test_no_spelling_of_the_option_lets_the_prompt_through(words: list[str]) -> None:
    assert "secret" not in " ".join(without_prompt(["decode", *words, "-n", "3"]))
    assert without_prompt(["decode", *words, "-n", "3"])[-2:] == ["-n", "3"]


def test_a_run_that_did_not_open_has_no_effective_configuration(log: RunLog, log_path: Path) -> None:
    start(log, effective=None, request=None)
    [line] = lines(log_path)
    assert (line["effective"], line["request"]) == (None, None)
    assert line["requested"]["threads"] == 2


def test_machine_and_versions_are_real(log: RunLog, log_path: Path) -> None:
    start(log)
    [line] = lines(log_path)
    assert line["machine"]["kernel"] == os.uname().release
    assert line["machine"]["memory_bytes"] > 1 << 20
    assert re.match(r"\d+\.\d+", line["versions"]["numpy"])
    assert re.match(r"\d+\.\d+", line["versions"]["llama-cpp-python"])


@given(text=st.text(st.characters(exclude_categories=())))
def test_any_text_is_one_valid_ascii_line(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    path = tmp_path_factory.mktemp("log") / "run.jsonl"
    log = open_run_log(str(path))
    log.token(TokenEvent(index=0, token=1, text=text, metrics=STEP))
    log.close()
    raw = path.read_bytes()
    assert raw.isascii()
    assert len(raw.decode().splitlines()) == 1
    [line] = lines(path)
    line["text"].encode()  # no lone surrogates
    if not any("\ud800" <= c <= "\udfff" for c in text):
        assert line["text"] == text


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_number_that_is_not_finite_becomes_null(log: RunLog, log_path: Path, value: float) -> None:
    log.summary(replace(SUMMARY, hit_rate=value))
    assert lines(log_path)[0]["summary"]["hit_rate"] is None


def test_runs_are_appended_and_a_broken_last_line_swallows_nothing(log_path: Path) -> None:
    log_path.write_bytes(b'{"schema":2,"event":"run_st')
    for code in (0, 1):
        log = open_run_log(str(log_path))
        log.run_end(code)
        log.close()
    broken, *whole = log_path.read_bytes().splitlines()
    assert broken == b'{"schema":2,"event":"run_st'
    assert [json.loads(line)["exit_code"] for line in whole] == [0, 1]


def test_every_event_is_in_the_file_when_its_call_returns(log: RunLog, log_path: Path) -> None:
    for index in range(3):
        log.token(TokenEvent(index=index, token=1, text="x", metrics=STEP))
        assert len(lines(log_path)) == index + 1


def test_without_a_target_nothing_is_written() -> None:
    log = open_run_log(None)
    assert log.fd is None
    start(log)
    log.token(TokenEvent(index=0, token=1, text="x", metrics=STEP))
    log.close()


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda folder: folder / "none" / "run.jsonl", "No such file or directory"),
        (lambda folder: folder, "Is a directory"),
        (lambda folder: folder / "a\0b", "null"),
    ],
)
def test_a_target_that_cannot_be_opened_is_refused_with_its_name(
    tmp_path: Path, make: Callable[[Path], Path], reason: str
) -> None:
    with pytest.raises(FileError, match=rf"the log cannot be opened: .*{reason}") as caught:
        open_run_log(str(make(tmp_path)))
    assert caught.value.path == str(make(tmp_path))


def test_the_model_is_never_the_log(tmp_path: Path) -> None:
    model = tmp_path / "model.gguf"
    model.write_bytes(b"GGUF")
    (tmp_path / "link").symlink_to(model)
    with pytest.raises(UsageError, match="is the model"):
        open_run_log(str(tmp_path / "link"), model_path=str(model))
    assert model.read_bytes() == b"GGUF"


def test_a_full_disk_is_reported_once_and_then_the_log_is_silent() -> None:
    log = open_run_log("/dev/full")
    with pytest.raises(FileError, match="/dev/full: the log cannot be written: No space left on device"):
        log.run_end(0)
    log.run_end(0)
    log.close()
