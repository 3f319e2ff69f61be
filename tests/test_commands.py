"""The commands as a user runs them: real processes, real models, real signals."""

from __future__ import annotations

import csv
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from tests.models import tiny_moe

ROOT = Path(__file__).resolve().parent.parent
SCHEMA = json.loads((ROOT / "docs" / "schema" / "run-log.v2.schema.json").read_text(encoding="utf-8"))
SMALL = ("-t", "1", "-c", "512", "--cache-mb", "1")


def command(*words: str) -> list[str]:
    return [sys.executable, "-m", "bmoe", *words]


def bmoe(*words: str, stdin: str | None = None) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        command(*words),
        cwd=ROOT,
        capture_output=True,
        input=stdin and stdin.encode(),
        timeout=120,
        check=False,
    )
    # Decoded here: text mode would turn a generated carriage return into a new line.
    return subprocess.CompletedProcess(done.args, done.returncode, done.stdout.decode(), done.stderr.decode())


@pytest.fixture(scope="module")
def model() -> str:
    return tiny_moe("Q4_K", layers=3, experts=16, top_k=4)


def test_decode_streams_the_text_of_the_resident_model(model: str) -> None:
    streamed = bmoe("decode", "-m", model, "-p", "Hello", "-n", "24", "--ignore-eog", *SMALL)
    resident = bmoe(
        "decode",
        "-m",
        model,
        "-p",
        "Hello",
        "-n",
        "24",
        "--ignore-eog",
        "--resident",
        "--no-repack",
        "-t",
        "1",
        "-c",
        "512",
    )
    assert (streamed.returncode, resident.returncode) == (0, 0)
    assert streamed.stdout == resident.stdout != ""
    assert streamed.stderr.startswith("mode: streaming, overlap; ")
    assert resident.stderr.startswith("mode: resident; repacking off; ")


def test_decode_reads_the_prompt_from_a_file_or_from_standard_input(model: str, tmp_path: Path) -> None:
    file = tmp_path / "prompt.txt"
    file.write_text("Hello", encoding="utf-8")
    rest = ("-m", model, "-n", "8", "--quiet", *SMALL)
    typed = bmoe("decode", "-p", "Hello", *rest)
    assert (typed.returncode, typed.stderr) == (0, "")
    assert bmoe("decode", "-f", str(file), *rest).stdout == typed.stdout
    assert bmoe("decode", "-", *rest, stdin="Hello").stdout == typed.stdout


def events_of(log: Path) -> list[dict[str, Any]]:
    """The log's events, each valid by the schema."""
    events = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
    for event in events:
        jsonschema.validate(event, SCHEMA)
    assert [e["seq"] for e in events] == list(range(len(events)))
    assert events[-1] | {"event": "run_end", "exit_code": 0} == events[-1]
    return events


def test_the_log_of_a_run_is_valid_and_adds_up(model: str, tmp_path: Path) -> None:
    log, figures = tmp_path / "run.jsonl", tmp_path / "run.csv"
    files = (
        "--log-json",
        str(log),
        "--log-layers",
        "--csv",
        str(figures),
        "--io-trace",
        str(tmp_path / "io"),
    )
    run = bmoe("decode", "-m", model, "-p", "Hello", "-n", "12", "--ignore-eog", *files, *SMALL)
    assert run.returncode == 0
    assert "; traced, so slower than otherwise: read trace\n" in run.stderr
    events = events_of(log)
    tokens, layers = ([e for e in events if e["event"] == name] for name in ("token", "layer"))
    (summary,) = [e for e in events if e["event"] == "summary"]
    (prefill,) = [e for e in events if e["event"] == "prefill"]
    assert "".join(t["text"] for t in tokens) == run.stdout.removesuffix("\n")
    assert summary["summary"]["tokens"] == len(tokens) == 12
    assert {e["turn"] for e in (*tokens, *layers, summary, prefill)} == {0}
    assert [e["step"] for e in layers] == [t["index"] for t in tokens]
    assert events[0]["effective"]["traced"] == "read trace"
    assert len(events[0]["effective"]["model_sha256"]) == 64

    steps = [t["metrics"] for t in tokens]
    for m in (*prefill["batches"], *steps):
        assert m["wall_ns"] == m["stall_ns"] + m["hook_ns"] + m["compute_ns"]
    for m, layer in zip(steps, layers, strict=True):
        for name in ("lookups", "hits"):
            assert sum(x[name] for x in layer["layers"]) == m[name]
    totals = {"wall_ns": "decode_ns", "read_bytes": "decode_read_bytes"}
    for name in (
        "wall_ns",
        "stall_ns",
        "hook_ns",
        "compute_ns",
        "cpu_ns",
        "reads",
        "read_bytes",
        "evictions",
    ):
        assert sum(m[name] for m in steps) == summary["summary"][totals.get(name, name)]

    rows = list(csv.DictReader(x for x in figures.read_text().splitlines() if not x.startswith("#")))
    assert [int(r["read_bytes"]) for r in rows] == [m["read_bytes"] for m in steps]
    assert [float(r["wall_ms"]) for r in rows] == [pytest.approx(m["wall_ns"] / 1e6, abs=6e-4) for m in steps]


def test_what_a_resident_run_cannot_measure_is_null(model: str, tmp_path: Path) -> None:
    log = tmp_path / "run.jsonl"
    run = bmoe(
        "decode", "-m", model, "-p", "Hello", "-n", "2", "--resident", "--log-json", str(log), *SMALL[:4]
    )
    assert run.returncode == 0
    (summary,) = [e["summary"] for e in events_of(log) if e["event"] == "summary"]
    for m in (e["metrics"] for e in events_of(log) if e["event"] == "token"):
        assert m["wall_ns"] == m["compute_ns"] > 0
        assert {m[name] for name in ("stall_ns", "hook_ns", "lookups", "reads", "io_busy_ns")} == {None}
    assert (summary["stall_ns"], summary["hit_rate"], summary["slots_total"]) == (None, None, None)


def test_verify_says_identical_with_the_digest(model: str) -> None:
    run = bmoe("verify", "-m", model, "-n", "8", *SMALL)
    assert run.returncode == 0
    assert run.stdout.startswith("identical  sha256 ")


def test_a_file_cut_short_is_one_line_that_names_it(model: str, tmp_path: Path) -> None:
    cut = tmp_path / "cut.gguf"
    shutil.copyfile(model, cut)
    os.truncate(cut, cut.stat().st_size - 5000)
    run = bmoe("decode", "-m", str(cut), "-p", "Hello", *SMALL)
    assert (run.returncode, run.stdout) == (1, "")
    assert run.stderr.count("\n") == 1
    assert str(cut) in run.stderr
    assert "past the end of the file" in run.stderr


@pytest.mark.parametrize("name", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_in_the_middle_of_decoding_ends_with_a_summary(model: str, name: signal.Signals) -> None:
    process = subprocess.Popen(
        command(
            "decode",
            "-m",
            model,
            "-p",
            "Hello",
            "-n",
            "20000",
            "--ignore-eog",
            "-t",
            "1",
            "-c",
            "30000",
            "--cache-mb",
            "1",
        ),
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None
    first = process.stdout.read(1)  # the first text is out
    process.send_signal(name)
    _, err = process.communicate(timeout=60)
    assert first
    assert process.returncode == 128 + name
    assert b"cancelled" in err
    assert b"Traceback" not in err
