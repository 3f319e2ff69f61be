"""Ingestion: every whole line arrives once, what is none is kept and located, whatever becomes of the file."""

from __future__ import annotations

import atexit
import gzip
import json
import os
import random
import re
import tempfile
import threading
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import duckdb
import pyarrow.parquet as pq
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from bmoe.cli import main
from bmoe.config import GenerateRequest, SessionConfig
from bmoe.io.errors import FileError, UsageError
from bmoe.logs import (
    IngestReport,
    LogStore,
    default_db_path,
    follow,
    ingest,
    json_lines,
    open_logs,
    sources,
    tables,
)
from bmoe.records import LayerMetrics, TokenEvent
from bmoe.telemetry import open_run_log
from tests.fakes import EFFECTIVE, LOAD, RESIDENT, RESIDENT_STEP, STEP, SUMMARY

if TYPE_CHECKING:
    from collections.abc import Iterator

RECORDED = Path(__file__).parent.parent.parent / "shared" / "data" / "token-metrics"
DOC = Path(__file__).parent.parent / "docs" / "logs.md"
MS = 1_000_000
MIB = 1 << 20
METRICS = (
    "stall_ns", "hook_ns", "experts_ns", "loop_ns", "lookups", "hits", "reads", "read_bytes", "evictions",
    "rereads", "cpu_ns", "minor_faults", "major_faults", "overhead_ns",
)  # fmt: skip
METRICS_2 = (
    "compute_ns", "speculative_bytes", "slots_used", "cache_bytes", "submit_latency_ns", "read_latency_ns",
    "io_busy_ns", "dropped",
)  # fmt: skip
LAYER = ("lookups", "hits", "read_bytes", "stall_ns", "experts_ns")
PREAMBLE = """# bmoe_metrics v2
# engine=x
# model=Some.gguf arch=qwen3moe n_layer=48 threads=4 n_ctx=2048 n_ubatch=512 chatml=0
# moe_stream=1 cache_mb=4000 overlap=1
# temp=0 compute_trace_layers=0
"""
HEADER = "step,steps,wall_ms,io_ms,compute_ms,read_bytes,cache_hit_pct,stall_ms,mgmt_ms,majflt,cpu_ms,turn\n"


def metrics(i: int, schema: int = 2, **changes: Any) -> dict[str, Any]:
    names = METRICS if schema == 1 else METRICS + METRICS_2
    found: dict[str, Any] = {"tokens": 1, "wall_ns": 50 * MS + i, **dict.fromkeys(names, 1000 + i)}
    if schema == 2:
        found["memory"] = None
    return {**found, **changes}


class Log:
    """Lines of a run, made up."""

    def __init__(self, run_id: str = "a" * 32, schema: int = 2) -> None:
        self.run_id = run_id
        self.schema = schema
        self.seq = 0

    def event(self, name: str, **fields: Any) -> str:
        head = {"schema": self.schema, "event": name, "run_id": self.run_id, "seq": self.seq}
        head |= {"mono_ns": 10**12 + self.seq, "time": f"2026-11-30T10:00:00.{self.seq:06d}Z"}
        self.seq += 1
        return json.dumps({**head, **fields}, separators=(",", ":"))

    def token(self, i: int, *, turn: int = 0, **changes: Any) -> str:
        place = {"turn": turn} if self.schema == 2 else {}
        return self.event(
            "token", **place, index=i, token=7 + i, text="é\n", metrics=metrics(i, self.schema, **changes)
        )

    def run(self, tokens: int, *, layers: int = 0) -> list[str]:
        lines = [
            self.event(
                "run_start",
                argv=[],
                requested={"threads": 2},
                effective={
                    "model_name": "Toy",
                    "threads": 2,
                    "cache_bytes": 5,
                    "overlap": True,
                    "traced": None,
                },
                prompt={"bytes": 1, "sha256": "ab"},
                machine={"cpus": 2},
                versions={"python": "3.11"},
            ),
            self.event("prefill", turn=0, batches=[metrics(0, self.schema, tokens=9)], total={}),
        ]
        for i in range(tokens):
            lines.append(self.token(i))
            if layers:
                rows = [{"layer": n, **dict.fromkeys(LAYER, n + i)} for n in range(layers)]
                lines.append(self.event("layer", turn=0, step=i, layers=rows))
        summary = {"tokens": tokens, "decode_ns": sum(50 * MS + i for i in range(tokens))}
        return [*lines, self.event("summary", turn=0, summary=summary), self.event("run_end", exit_code=0)]


@pytest.fixture
def store() -> Iterator[LogStore]:
    with open_logs(":memory:", read_only=False) as store:
        yield store


def write(path: Path, lines: list[str], end: str = "\n") -> str:
    path.write_bytes("".join(line + end for line in lines).encode())
    return str(path)


def contents(store: LogStore) -> dict[str, list[dict[str, Any]]]:
    """All rows that do not depend on where they were read."""
    return {
        table.name: store.sql(
            f"SELECT * {'EXCLUDE file' if table is tables.RUNS else ''} FROM {table.name} ORDER BY ALL"
        ).to_pylist()
        for table in (tables.RUNS, tables.STEPS, tables.LAYERS, tables.EVENTS)
    }


def rejects(store: LogStore) -> list[tuple[int, int, str]]:
    return [(r["line"], r["byte_offset"], r["reason"]) for r in store.rejects().to_pylist()]


def count(store: LogStore, table: str) -> int:
    [[found]] = store.fetch(f"SELECT count(*) FROM {table}")
    return int(found)


def test_figures_are_those_of_the_runs_own_summary(store: LogStore, tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    log = open_run_log(str(path))
    log.run_start(
        requested=SessionConfig(model_path="m.gguf", threads=2),
        effective=EFFECTIVE,
        request=GenerateRequest(prompt="x"),
        prompt="x",
        argv=[],
    )
    log.load(LOAD)
    steps = [replace(STEP, wall_ns=STEP.wall_ns + i, tokens=1, hits=i) for i in range(20)]
    log.prefill([replace(STEP, overhead_ns=None)])
    for i, step in enumerate(steps):
        log.token(TokenEvent(index=i, token=i, text="x", metrics=step))
    summary = replace(
        SUMMARY,
        tokens=20,
        decode_ns=sum(step.wall_ns for step in steps),
        decode_read_bytes=sum(step.read_bytes or 0 for step in steps),
        stall_ns=sum(step.stall_ns or 0 for step in steps),
        cpu_ns=sum(step.cpu_ns for step in steps),
        hit_rate=sum(range(20)) / (20 * (STEP.lookups or 0)),
    )
    log.summary(summary)
    log.run_end(0)
    log.close()

    found = ingest(store, [str(path)])
    assert (found.lines, found.rejected, found.duplicates, found.runs) == (25, 0, 0, 1)
    [run] = store.runs().to_pylist()
    assert run["run_id"] == log.run_id
    assert (run["n_tokens"], run["decode_ns"]) == (summary.tokens, summary.decode_ns)
    assert run["decode_tokens_per_s"] == pytest.approx(summary.decode_tokens_per_s, rel=1e-12)
    assert (run["complete"], run["exit_code"], run["schema"]) == (True, 0, 2)
    assert run["model_path"] == EFFECTIVE.model_path
    assert json.loads(run["config"])["cycle_bytes"] == EFFECTIVE.cycle_bytes
    assert json.loads(run["summary"])["decode_read_bytes"] == summary.decode_read_bytes
    [sums] = store.sql(
        "SELECT sum(read_bytes)::BIGINT AS read_bytes, sum(stall_ns)::BIGINT AS stall_ns, "
        "sum(cpu_ns)::BIGINT AS cpu_ns, sum(hits) / sum(lookups) AS hit_rate FROM steps WHERE phase = 'decode'"
    ).to_pylist()
    assert (sums["read_bytes"], sums["stall_ns"]) == (summary.decode_read_bytes, summary.stall_ns)
    assert (sums["cpu_ns"], sums["hit_rate"]) == (summary.cpu_ns, summary.hit_rate)
    [prefill] = store.sql("SELECT * FROM steps WHERE phase = 'prefill'").to_pylist()
    assert (prefill["step"], prefill["wall_ns"], prefill["overhead_ns"]) == (0, STEP.wall_ns, None)


def test_unmeasured_is_null(store: LogStore, tmp_path: Path) -> None:
    log = open_run_log(str(tmp_path / "run.jsonl"))
    log.run_start(
        requested=SessionConfig(model_path="m.gguf"), effective=RESIDENT, request=None, prompt="", argv=[]
    )
    log.token(TokenEvent(index=0, token=1, text="", metrics=RESIDENT_STEP))
    log.close()
    ingest(store, [str(tmp_path)])
    [step] = store.sql("SELECT stall_ns, hits, read_bytes, rss_bytes FROM steps").to_pylist()
    assert set(step.values()) == {None}
    [run] = store.runs().to_pylist()
    assert (run["cache_bytes"], run["policy"], run["complete"], run["summary"]) == (None, None, False, None)


@pytest.mark.parametrize("schema", [1, 2])
@pytest.mark.parametrize("separators", [(",", ":"), (", ", ": ")])
def test_both_schemas_are_read_however_they_are_spaced(
    store: LogStore, tmp_path: Path, schema: int, separators: tuple[str, str]
) -> None:
    """Lines that DuckDB reads and lines that are judged one by one give the same rows."""
    lines = Log(schema=schema).run(3, layers=2 if schema == 2 else 0)
    spaced = [json.dumps(json.loads(line), separators=separators) for line in lines]
    found = ingest(store, [write(tmp_path / "a.jsonl", spaced)])
    assert (found.lines, found.rejected) == (len(lines), 0)
    rows = store.steps(["a" * 32]).to_pylist()
    assert [(r["phase"], r["step"], r["token"], r["tokens"]) for r in rows] == [
        ("prefill", 0, None, 9),
        ("decode", 0, 7, 1),
        ("decode", 1, 8, 1),
        ("decode", 2, 9, 1),
    ]
    assert [r["wall_ns"] for r in rows[1:]] == [50 * MS, 50 * MS + 1, 50 * MS + 2]
    assert rows[3]["cache_budget_bytes"] == (1002 if schema == 2 else None)
    assert {rows[3][name] for name in METRICS} == {1002}
    assert count(store, "layers") == (6 if schema == 2 else 0)


def test_what_runs_write_is_read_the_fast_way(
    store: LogStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The writer's own lines of tokens and layers leave DuckDB without a doubt: the speed hangs on that."""
    doubted: list[str] = []

    def parse(text: bytes) -> Any:
        line = json.loads(text)
        doubted.append(line["event"])
        return line

    monkeypatch.setattr(json_lines, "parse", parse)
    log = open_run_log(str(tmp_path / "run.jsonl"))
    layer = LayerMetrics(layer=0, lookups=1, hits=1, read_bytes=0, stall_ns=0, experts_ns=1)
    for step in (STEP, RESIDENT_STEP, replace(STEP, layers=(layer,))):
        log.token(TokenEvent(index=log._seq, token=1, text="é", metrics=step))
    log.warning("x")
    log.close()
    assert ingest(store, [str(tmp_path)]).lines == 5
    assert doubted == ["warning"]


def test_memory_and_layers_have_their_places(store: LogStore, tmp_path: Path) -> None:
    log = Log()
    memory = {name: i for i, name in enumerate((
        "rss_bytes", "rss_anon_bytes", "rss_file_bytes", "swap_bytes", "mem_available_bytes",
        "mem_free_bytes", "swap_free_bytes"), start=1)}  # fmt: skip
    lines = [log.token(0, memory={**memory, "dense_resident": 0.25}), *Log("b" * 32).run(1, layers=2)]
    ingest(store, [write(tmp_path / "a.jsonl", lines)])
    [row] = store.steps(["a" * 32]).to_pylist()
    assert {name: row[name] for name in memory} == memory
    assert row["dense_resident"] == 0.25
    rows = store.sql("SELECT * EXCLUDE run_id FROM layers ORDER BY layer").to_pylist()
    assert rows == [{"turn": 0, "step": 0, "layer": n, **dict.fromkeys(LAYER, n)} for n in range(2)]


def test_the_same_run_is_stored_once(store: LogStore, tmp_path: Path) -> None:
    """A copy under another name, archives, and a file that holds its run twice add nothing."""
    lines = Log().run(5, layers=3)
    path = Path(write(tmp_path / "a.jsonl", lines))
    ingest(store, [str(path)])
    before = contents(store)
    data = path.read_bytes()
    (tmp_path / "copy.log").write_bytes(data + data)
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(data))
    half = len(data) // 2
    frames = [zstandard.ZstdCompressor().compress(part) for part in (data[:half], data[half:])]
    (tmp_path / "c.jsonl.zst").write_bytes(b"".join(frames))

    found = ingest(store, [str(tmp_path)])
    assert (found.files, found.unchanged, found.runs, found.rejected) == (3, 1, 0, 0)
    assert found.duplicates == found.lines == 4 * len(lines)
    assert contents(store) == before
    again = ingest(store, [str(tmp_path)])
    assert (again.unchanged, again.lines) == (4, 0)


def test_a_line_that_says_something_else_about_the_same_is_a_reject(store: LogStore, tmp_path: Path) -> None:
    log = Log()
    lines = [log.token(0), log.event("warning", message="x")]
    other = Log()
    lines += [other.token(0, wall_ns=5), other.event("warning", message="y"), Log().token(0)]
    found = ingest(store, [write(tmp_path / "a.jsonl", lines)])
    assert (found.rejected, found.duplicates) == (2, 1)
    assert [(line, reason) for line, _, reason in rejects(store)] == [
        (3, "another line says something else about the same"),
        (4, "another line says something else about the same"),
    ]
    assert store.sql("SELECT wall_ns FROM steps").to_pylist() == [{"wall_ns": 50 * MS}]


def test_a_killed_writer_loses_only_the_line_it_was_writing(tmp_path: Path) -> None:
    """Cut at 50 random places: the whole lines arrive, the torn one when it is whole, each of them once."""
    data = Path(write(tmp_path / "whole", Log().run(12, layers=2))).read_bytes()
    with open_logs(":memory:", read_only=False) as store:
        ingest(store, [str(tmp_path / "whole")])
        expected = contents(store)
    rng = random.Random(6)
    for n in range(50):
        cut = rng.randrange(len(data))
        path = tmp_path / f"{n}.jsonl"
        path.write_bytes(data[:cut])
        with open_logs(":memory:", read_only=False) as store:
            found = ingest(store, [str(path)])
            # A line that lacks nothing but its line feed is whole.
            whole = data[:cut].count(b"\n") + (data[cut : cut + 1] == b"\n")
            assert (found.lines, found.rejected) == (whole, 0)
            assert found.unfinished == (
                () if data[cut - 1 : cut] in {b"\n", b""} or data[cut : cut + 1] == b"\n" else (str(path),)
            )
            if n % 2:  # the writer was not dead
                with path.open("ab") as file:
                    file.write(data[cut:])
                rest = ingest(store, [str(path)])
                assert rest.lines == data.count(b"\n") - whole
                assert contents(store) == expected
                assert not rejects(store)
            elif cut and found.unfinished:  # the next run's first line ends it
                with path.open("ab") as file:
                    file.write(b"\n" + Log("b" * 32).token(0).encode() + b"\n")
                rest = ingest(store, [str(path)])
                assert (rest.lines, rest.rejected, rest.runs) == (2, 1, 1)
                [(line, offset, _)] = rejects(store)
                assert (line, offset) == (whole + 1, data[:cut].rfind(b"\n") + 1)


def test_a_killed_ingestion_goes_on_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bmoe.logs.ingestion.READ_BYTES", 4096)
    monkeypatch.setattr("bmoe.logs.ingestion._BATCH_BYTES", 2048)
    monkeypatch.setattr("bmoe.logs.ingestion._COMMIT_BYTES", 3000)
    lines = Log().run(40)
    path = write(tmp_path / "a.jsonl", lines)
    with open_logs(":memory:", read_only=False) as store:
        ingest(store, [path])
        expected = contents(store)

    def kill(done: int, total: int) -> None:
        if done > total / 2:
            raise KeyboardInterrupt

    db = str(tmp_path / "logs.duckdb")
    with open_logs(db, read_only=False) as store, pytest.raises(KeyboardInterrupt):
        ingest(store, [path], progress=kill)
    with open_logs(db, read_only=False) as store:
        [[done]] = store.fetch("SELECT bytes_done FROM files")
        stored = count(store, "steps")
        assert 0 < done < os.path.getsize(path)
        assert stored < 41
        rest = ingest(store, [path])
        assert rest.duplicates == 0
        assert rest.lines < len(lines)
        assert contents(store) == expected


def test_what_is_no_line_is_located_and_kept(store: LogStore, tmp_path: Path) -> None:
    log = Log()
    bad = [
        "garbage",
        '{"schema":2,"event":"token"',
        '{"a":1}',
        log.token(0).replace('"schema":2', '"schema":3'),
        log.token(1, wall_ns="soon"),
        log.token(2, hits=True),
        log.token(3, hits=-1),
        log.token(4, wall_ns=None),
        log.token(5, hits=1 << 63),
        log.token(6, memory=[1]),
        log.token(7).replace('"turn":0', '"turn":"x"'),
        log.event("layer", turn=0, step=0, layers=[{"layer": 1}, None]),
        log.event("layer", turn=0, step=0, layers=[{"layer": 1, "hits": "?"}]),
        log.event("prefill", turn=0, batches=[metrics(0, cpu_ns="?")]),
        log.event("run_start", effective=[]),
        log.event("summary", summary=3),
        log.event("run_end", exit_code="0"),
        log.event("warning").replace("2026-11-30", "some day"),
        '{"event":"warning","event":"x"}',
        log.event("warning", message=float("nan")),
        log.event("warning", message="x").replace('"x"', r'"\ud800"'),
        "[" * 3000,
        "[1,2]",
        "\x00\x01",
        "step",
        '"a string"',
    ]
    raw = b"\xff\xfe broken text \xe9"
    path = tmp_path / "a.jsonl"
    good = log.token(50)
    path.write_bytes(b"\n".join([*(line.encode() for line in bad), raw, b"", good.encode(), b"  ", b""]))
    found = ingest(store, [str(path)])
    assert (found.rejected, found.lines, found.duplicates) == (len(bad) + 1, len(bad) + 2, 0)
    assert count(store, "steps") == 1
    table = store.rejects().to_pylist()
    assert [r["line"] for r in table] == list(range(1, len(bad) + 2))
    assert [r["text"] for r in table[:3]] == bad[:3]
    assert table[3]["reason"] == "schema 3 is unknown; known are 1 and 2"
    assert table[4]["reason"].startswith("metrics.wall_ns is no number")
    assert table[-1]["text"] == "\\xff\\xfe broken text \\xe9"
    data = path.read_bytes()
    for row, line in zip(table, data.split(b"\n"), strict=False):
        assert data[row["byte_offset"] :].startswith(line)
        assert row["reason"]
        assert len(row["text"]) <= 500


def test_events_that_are_not_known_yet_are_kept(store: LogStore, tmp_path: Path) -> None:
    log = Log()
    lines = [
        log.event("pressure", some=10),
        log.token(0, new_figure=1),
        log.event("cache_resize", cache_bytes=1),
    ]
    found = ingest(store, [write(tmp_path / "a.jsonl", lines)])
    assert found.rejected == 0
    rows = store.sql("SELECT event, body, seq FROM events ORDER BY seq").to_pylist()
    assert [(r["event"], r["seq"]) for r in rows] == [("pressure", 0), ("cache_resize", 2)]
    assert json.loads(rows[0]["body"])["some"] == 10


def test_lines_that_are_too_long_are_passed_over(
    store: LogStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "MAX_LINE_BYTES", 5000)
    monkeypatch.setattr("bmoe.logs.batch.MAX_LINE_BYTES", 5000)
    monkeypatch.setattr("bmoe.logs.ingestion.READ_BYTES", 8000)
    monkeypatch.setattr(sources, "READ_BYTES", 8000)
    log = Log()
    lines = [log.token(0), "x" * 6000, log.token(1), "{" + "y" * 30_000, log.token(2)]
    path = write(tmp_path / "a.jsonl", lines)
    (tmp_path / "a.gz").write_bytes(gzip.compress(Path(path).read_bytes()))
    for file in (path, str(tmp_path / "a.gz")):
        ingest(store, [file])
    assert count(store, "steps") == 3
    found = store.rejects().to_pylist()
    assert [(r["line"], r["text"]) for r in found] == [(2, "x" * 500), (4, "{" + "y" * 499)] * 2
    assert {r["byte_offset"] for r in found} == {len(lines[0]) + 1, sum(map(len, lines[:3])) + 3}
    assert [r[0] for r in store.fetch("SELECT bytes_done FROM files")] == [os.path.getsize(path)] * 2


@pytest.mark.parametrize("pack", [gzip.compress, zstandard.ZstdCompressor().compress])
def test_what_is_whole_of_an_archive_is_kept(store: LogStore, tmp_path: Path, pack: Any) -> None:
    lines = Log().run(1500)
    data = "".join(line + "\n" for line in lines).encode()
    packed = pack(data)
    path = tmp_path / "a.packed"
    path.write_bytes(packed[: len(packed) // 2])
    found = ingest(store, [str(path)])
    assert found.rejected == 1
    assert 1 < found.lines < len(lines)
    assert rejects(store)[0][2].endswith("archive is cut off here")
    assert ingest(store, [str(path)]).unchanged == 1

    path.write_bytes(packed)
    rest = ingest(store, [str(path)])
    assert (rest.lines, rest.duplicates) == (len(lines), found.lines - 1)
    assert not rejects(store), "it was read again, and is whole now"

    path.write_bytes(packed + packed[:2] + b"\xff" * 300)
    broken = ingest(store, [str(path)])
    assert (broken.rejected, broken.duplicates) == (1, len(lines))
    assert "broken here" in rejects(store)[-1][2]


FOLDER = tempfile.TemporaryDirectory()  # of the examples, which a fixture would not be anew for
atexit.register(FOLDER.cleanup)


@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_in_any_soup_of_lines_each_is_stored_known_or_rejected(data: st.DataObject) -> None:
    """No line is lost, whole lines always arrive, and reading in two parts or again changes nothing."""
    log = Log()
    good = [log.token(i) for i in range(3)] + [log.event("warning", message="x")]
    good += [json.dumps(json.loads(log.token(i))) for i in range(3, 5)]
    noise = st.one_of(
        st.binary(max_size=40),
        st.text(max_size=40).map(str.encode),
        st.sampled_from(good).flatmap(lambda s: st.integers(0, len(s) - 1).map(lambda n: s[:n].encode())),
        st.sampled_from(
            ["# bmoe_metrics v2", "# a=b", HEADER.strip(), "1,2,3", "# summary tokens=3", "step,"]
        ).map(str.encode),
    ).map(lambda line: line.replace(b"\n", b" "))
    lines = data.draw(st.lists(st.one_of(st.sampled_from(good).map(str.encode), noise), max_size=30))
    content = b"".join(line + b"\n" for line in lines)
    cut = data.draw(st.integers(0, len(content)))
    wanted = {line for line in lines if line.decode("utf-8", "replace") in good}
    results = []
    path = Path(FOLDER.name, "soup")
    for parts in ([content], [content[:cut], content]):
        with open_logs(":memory:", read_only=False) as store:
            total = IngestReport()
            for part in parts:
                path.write_bytes(part)
                found = ingest(store, [str(path)])
                total = replace(
                    total, lines=total.lines + found.lines, duplicates=total.duplicates + found.duplicates
                )
            assert count(store, "steps WHERE run_id = 'aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa'") + count(
                store, "events WHERE event = 'warning'"
            ) == len(wanted)
            kept = count(store, "steps") + count(store, "events") + count(store, "rejects") + total.duplicates
            quiet = total.lines - kept  # lines of a CSV that only tell about others
            assert 0 <= quiet <= sum(line.strip().startswith((b"#", b"step,")) for line in lines)
            assert total.lines == sum(bool(line.strip()) for line in lines)
            results.append((contents(store), store.rejects().to_pylist()))
    assert results[0] == results[1]


@settings(max_examples=30, deadline=None)
@given(
    value=st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-5, 1 << 70),
        st.floats(),
        st.text(max_size=5),
        st.just([]),
        st.just({"a": 1}),
    ),
    name=st.sampled_from(["wall_ns", "hits", "memory", "tokens"]),
)
def test_no_value_is_lost_on_the_way(value: Any, name: str) -> None:
    """A figure arrives as it is, rounded at most, or its line is rejected."""
    line = Log().token(0, **{name: value})
    path = Path(FOLDER.name, "value")
    path.write_text(line + "\n")
    with open_logs(":memory:", read_only=False) as store:
        found = ingest(store, [str(path)])
        rows = store.steps(["a" * 32]).to_pylist()
        if not found.rejected:
            [row] = rows
            if name != "memory" and value is not None:
                assert row[name] == round(float(value)) or row[name] == int(value)
                assert not isinstance(value, bool | list | dict)
            else:
                assert value in (None, {"a": 1})
        else:
            assert not rows


def csv_text(*rows: tuple[float, ...], preamble: str = PREAMBLE, header: str = HEADER) -> str:
    return preamble + header + "".join(",".join(map(str, row)) + "\n" for row in rows)


def test_a_csv_has_sessions_of_generations(store: LogStore, tmp_path: Path) -> None:
    first = (1, 2, 50.5, 10, 40, 1000, 12.5, 7.5, 3, 2, 90, 0)
    text = csv_text(first, (2, 2, 60, 0, 60, 0, -1, 0, 0, 0, 90, 0)) + "# summary tokens=2 tok/s=18.1 x=y\n"
    text += "1,1,70,0,70,0,25,0,0,0,90,1\n# summary tokens=1\n"
    text += csv_text((1, 2, 51, 10, 40, 1000, 12.5, 7.5, 3, 2, 90, 0))
    (tmp_path / "t.csv").write_text(text)
    found = ingest(store, [str(tmp_path)])
    assert (found.runs, found.rejected, found.lines) == (2, 0, 18)
    done, open_ = sorted(store.runs().to_pylist(), key=lambda run: -run["n_tokens"])
    assert (done["source"], done["schema"], done["n_tokens"], done["complete"]) == ("bmoe-csv", 2, 3, True)
    assert (done["threads"], done["cache_bytes"], done["overlap"], done["traced"]) == (
        4,
        4000 * MIB,
        True,
        False,
    )
    assert (done["model_path"], done["mode"], done["ubatch_tokens"]) == ("Some.gguf", "streaming", 512)
    assert json.loads(done["config"])["n_layer"] == 48
    assert json.loads(done["summary"]) == {"tokens": 1}
    assert (open_["n_tokens"], open_["complete"]) == (1, False)
    steps = store.steps([done["run_id"]]).to_pylist()
    assert [(s["turn"], s["step"], s["wall_ns"]) for s in steps] == [
        (0, 0, 50_500_000),
        (0, 1, 60_000_000),
        (1, 0, 70_000_000),
    ]
    assert [s["cache_hit_ratio_cumulative"] for s in steps] == [0.125, None, 0.25]
    assert (steps[0]["stall_ns"], steps[0]["hook_ns"], steps[0]["io_ns"]) == (
        7_500_000,
        3_000_000,
        10_000_000,
    )
    assert (steps[0]["hits"], steps[0]["rss_bytes"], steps[0]["overhead_ns"]) == (None, None, None)
    bodies = store.sql("SELECT seq, body FROM events WHERE event = 'summary' ORDER BY seq").to_pylist()
    assert json.loads(bodies[0]["body"]) == {"tokens": 2, "tok/s": 18.1, "x": "y"}


def test_a_csv_without_preamble_or_turns_is_read(store: LogStore, tmp_path: Path) -> None:
    text = (
        csv_text((1, 50), (2, 51), (1, 52), preamble="", header="step,wall_ms\n")
        + "# summary tokens=1\n1,53\n"
    )
    (tmp_path / "t.csv").write_text(text)
    assert ingest(store, [str(tmp_path)]).rejected == 0
    [run] = store.runs().to_pylist()
    assert (run["source"], run["model_path"], run["n_tokens"], run["complete"]) == ("csv-v1", None, 4, False)
    steps = store.steps([run["run_id"]]).to_pylist()
    assert [(s["turn"], s["step"]) for s in steps] == [(0, 0), (0, 1), (1, 0), (2, 0)]


def test_a_csv_is_one_run_however_it_is_read(store: LogStore, tmp_path: Path) -> None:
    rows = [(i, 9, 50 + i, 10, 40, 1000, 12.5, 7.5, 3, 2, 90, 0) for i in range(1, 10)]
    text = csv_text(*rows) + "# summary tokens=9\n"
    path = tmp_path / "t.csv"
    for cut in range(0, len(text) + 1, 37):
        path.write_text(text[:cut])
        assert ingest(store, [str(path)]).duplicates == 0
    path.write_text(text)
    ingest(store, [str(path)])
    (tmp_path / "u.csv.gz").write_bytes(gzip.compress(text.encode()))
    copy = ingest(store, [str(tmp_path / "u.csv.gz")])
    assert (copy.duplicates, copy.rejected, copy.runs) == (10, 0, 0)
    [run] = store.runs().to_pylist()
    assert (run["n_tokens"], run["complete"], count(store, "rejects")) == (9, True, 0)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("1,2,3\n", "the header has 12 columns, the line 3"),
        ("1,2,x,10,40,1000,12.5,7.5,3,2,90,0\n", "'x' is no number"),
        ("1,2,nan,10,40,1000,12.5,7.5,3,2,90,0\n", "'nan' is no number"),
        ("1.5,2,3,10,40,1000,12.5,7.5,3,2,90,0\n", "step or turn is no number of its kind"),
        ("1,2,,10,40,1000,12.5,7.5,3,2,90,0\n", "'' is no number"),
        ("1,2,999999999999999,0,0,0,0,0,0,0,0,0\n", "a number is too large"),
        ("# summary tokens=3\n", "a summary without rows before it"),
        ("# bmoe_metrics v9\n", "bmoe_metrics v9 is unknown; known are v1 and v2"),
        ("step,turn\n", "a header without wall_ms: this is no per-token CSV"),
    ],
)
def test_what_is_no_line_of_a_csv_is_said(store: LogStore, tmp_path: Path, line: str, reason: str) -> None:
    (tmp_path / "t.csv").write_text(PREAMBLE + HEADER + line)
    ingest(store, [str(tmp_path)])
    assert [r[2] for r in rejects(store)] == [reason]


@pytest.mark.skipif(not RECORDED.exists(), reason="no recorded metrics here")
@pytest.mark.parametrize("name", ["qwen_k6", "pc-D-t8", "pc-I-c5000-overlap"])
def test_recorded_csvs_give_the_means_that_their_summaries_state(store: LogStore, name: str) -> None:
    ingest(store, [str(RECORDED / f"{name}.csv")])
    [run] = store.runs().to_pylist()
    stated = json.loads(run["summary"])
    assert (run["n_tokens"], run["complete"]) == (stated["tokens"], True)
    assert run["decode_tokens_per_s"] == pytest.approx(stated["tok/s"], abs=6e-4)
    [mean] = store.sql(
        'SELECT avg(wall_ns) / 1e9 AS "s/tok", avg(compute_ns) / 1e9 AS "compute_s/tok", '
        'avg(io_ns) / 1e9 AS "io_s/tok", avg(hook_ns) / 1e9 AS "mgmt_s/tok", '
        'sum(read_bytes) / 1048576 AS "read_MiB", avg(cpu_ns) / 1e9 AS "cpu_s/tok", '
        'avg(major_faults) AS "majflt/tok", avg(stall_ns) / 1e9 AS "stall_s/tok", '
        "100 * last(cache_hit_ratio_cumulative ORDER BY step) AS cache_hit_pct FROM steps"
    ).to_pylist()
    serial = not run["overlap"]
    for key, value in mean.items():
        if key in {"cpu_s/tok", "majflt/tok"} and stated["cpu_s/tok"] == 0:
            assert value is None, "that machine did not measure it"
        elif key == "stall_s/tok" and serial:
            assert value == mean["io_s/tok"], "without overlap all of compute waits"
        else:
            digits = {"read_MiB": 0.06, "cache_hit_pct": 0.06, "cpu_s/tok": 6e-5, "majflt/tok": 6e-3}
            assert value == pytest.approx(stated[key], abs=digits.get(key, 6e-4)), key
    [parts] = store.sql(
        "SELECT max(abs(wall_ns - stall_ns - hook_ns - compute_ns)) AS rest FROM steps"
    ).to_pylist()
    assert parts["rest"] <= 2500, "the parts make up the whole, in microseconds as recorded"


def test_following_reads_what_is_written(tmp_path: Path) -> None:
    """Every look finds what was written before it, and lets others have the database in between."""
    db, path = str(tmp_path / "logs.duckdb"), tmp_path / "a.jsonl"
    log = Log()
    writes = [[log.token(0), log.token(1)[:50]], None, [], [log.token(2)], [log.token(3)]]
    reports: list[IngestReport] = []

    class Stop(threading.Event):
        """Writes instead of waiting, and stops after the last write."""

        def wait(self, timeout: float | None = None) -> bool:  # noqa: ARG002 (its signature)
            if not writes:
                self.set()
                return True
            lines = writes.pop(0)
            with path.open("ab") as file:
                if lines is None:
                    file.write(log_line_1[50:].encode() + b"\n")
                elif len(lines) == 2:
                    file.write(f"{lines[0]}\n{lines[1]}".encode())
                else:
                    file.writelines(f"{line}\n".encode() for line in lines)
            if os.path.exists(db):
                with open_logs(db) as store:
                    seen.append(count(store, "steps"))
            return False

    other = Log()
    other.token(0)
    log_line_1 = other.token(1)
    seen: list[int] = []
    follow(db, [str(path)], report=reports.append, stop=Stop())
    with open_logs(db) as store:
        assert count(store, "steps") == 4
        assert not rejects(store)
    assert seen == [1, 2, 2, 3]
    assert [r.lines for r in reports] == [1, 1, 1, 1]


def test_a_file_that_was_replaced_is_read_from_its_beginning(store: LogStore, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    write(path, ["garbage", *Log("a" * 32).run(9)])
    ingest(store, [str(path)])
    write(path, Log("b" * 32).run(2))
    found = ingest(store, [str(path)])
    assert (found.runs, found.lines, found.duplicates) == (1, 6, 0)
    assert len(rejects(store)) == 1, "what was said of the old file stands"


def test_folders_give_logs_and_name_the_rest(tmp_path: Path, store: LogStore) -> None:
    write(tmp_path / "a.jsonl", Log().run(1))
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "route.csv").write_text("# bmoe_route v1\nturn,phase\n0,decode\n")
    (tmp_path / "deep" / "report.json").write_text('{\n "tool": "x"\n}\n')
    (tmp_path / "deep" / "picture.png").write_bytes(b"png")
    (tmp_path / "deep" / "empty.log").write_bytes(b"")
    (tmp_path / "deep" / "link.log").symlink_to(tmp_path / "a.jsonl")
    (tmp_path / "deep" / "pipe.log").symlink_to("/dev/null")
    found = ingest(store, [str(tmp_path), str(tmp_path / "a.jsonl")])
    assert (found.files, found.runs) == (2, 1)
    assert [Path(path).name for path in found.passed_over] == ["report.json", "route.csv"]
    assert found.unreadable == (("/dev/null", "/dev/null: is not a file"),)
    with pytest.raises(FileError, match="there is no such file"):
        ingest(store, [str(tmp_path / "none")])


def test_queries_reach_nothing_else(tmp_path: Path) -> None:
    db = str(tmp_path / "logs.duckdb")
    with open_logs(db, read_only=False) as store:
        ingest(store, [write(tmp_path / "a.jsonl", Log().run(1))])
    secret = tmp_path / "secret.csv"
    secret.write_text("a\n1\n")
    with open_logs(db) as store:
        for query in (
            f"SELECT * FROM read_csv('{secret}')",
            f"SELECT * FROM '{secret}'",
            f"COPY runs TO '{tmp_path / 'out.csv'}'",
            f"ATTACH '{tmp_path / 'other.db'}'",
            "DELETE FROM runs",
            "SET enable_external_access = true",
            "SELECT * FROM secret",
            "SELEC 1",
            "",
        ):
            with pytest.raises(UsageError) as error:
                store.sql(query)
            assert "\n" not in str(error.value)
        assert store.sql("SELECT ? + 1 AS x", [2]).to_pylist() == [{"x": 3}]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.jsonl", "logs.duckdb", "secret.csv"]


def test_a_database_that_is_none_is_said_in_a_line(tmp_path: Path) -> None:
    with pytest.raises(FileError, match="there is no log database"):
        open_logs(str(tmp_path / "none"))
    (tmp_path / "text").write_text("garbage" * 1000)
    with pytest.raises(FileError, match="this is no DuckDB database"):
        open_logs(str(tmp_path / "text"))
    with duckdb.connect(str(tmp_path / "other")) as other:
        other.execute("CREATE TABLE x (i INTEGER)").fetchall()
    with pytest.raises(FileError, match="not of bmoe's logs"):
        open_logs(str(tmp_path / "other"), read_only=False)
    with open_logs(str(tmp_path / "ours"), read_only=False) as store:
        store.fetch("UPDATE format SET version = 99")
    with pytest.raises(FileError, match="has format 99"):
        open_logs(str(tmp_path / "ours"))


def test_the_default_database_is_in_the_users_data_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", "/data/of/user")
    assert default_db_path() == "/data/of/user/bmoe/logs.duckdb"
    monkeypatch.setenv("XDG_DATA_HOME", "relative")
    monkeypatch.setenv("HOME", "/home/user")
    assert default_db_path() == "/home/user/.local/share/bmoe/logs.duckdb"


def test_the_command_line(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    db, path = str(tmp_path / "sub" / "l.duckdb"), write(tmp_path / "a.jsonl", [*Log().run(2), "garbage"])
    assert main(["logs", "runs", "--db", db]) == 1
    assert "there is no log database (bmoe logs ingest makes one)" in capfd.readouterr().err
    assert main(["logs", "ingest", path, "--db", db]) == 0
    out, err = capfd.readouterr()
    assert out == f"7 lines of 1 file, 1 new run, 0 lines known, 1 rejected\n{db}: 1 run, 3 steps\n"
    assert err == "note: 1 line could not be read; see bmoe logs rejects\n"
    assert main(["logs", "rejects", "--db", db]) == 0
    assert capfd.readouterr().out == (
        f"{path}:7: neither a JSON object nor a line of a per-token CSV: garbage\n"
    )
    assert main(["logs", "runs", "--db", db, "--model", "TOY", "--last", "1"]) == 0
    assert "aaaaaaaaaaaa  2026-11-30 10:00:00  Toy" in capfd.readouterr().out
    assert main(["logs", "runs", "--db", db, "--json"]) == 0
    [run] = json.loads(capfd.readouterr().out)
    assert run["config"]["model_name"] == "Toy"
    assert main(["logs", "runs", "--db", db, "--model", "other", "--json"]) == 0
    assert json.loads(capfd.readouterr().out) == []
    query = "SELECT phase, sum(tokens) AS n, NULL AS x, [1.5] AS l FROM steps GROUP BY 1 ORDER BY 1"
    assert main(["logs", "sql", query, "--db", db, "--format", "json"]) == 0
    assert json.loads(capfd.readouterr().out)[0] == {"phase": "decode", "n": 2, "x": None, "l": [1.5]}
    assert main(["logs", "sql", query, "--db", db, "--format", "csv"]) == 0
    assert capfd.readouterr().out == "phase,n,x,l\ndecode,2,,[1.5]\nprefill,9,,[1.5]\n"
    assert main(["logs", "sql", "SELECT nothing", "--db", db]) == 2
    err = capfd.readouterr().err
    assert err.startswith("bmoe: error: Binder Error")
    assert err.count("\n") == 1
    assert main(["logs", "export", "--parquet", str(tmp_path / "pq"), "--db", db]) == 0
    assert pq.read_table(tmp_path / "pq" / "steps.parquet").num_rows == 3
    assert pq.read_table(tmp_path / "pq" / "runs.parquet").column_names == list(tables.RUNS.names)
    assert main(["logs", "ingest", "/dev/null", "--db", db]) == 1
    assert capfd.readouterr().err == "error: /dev/null: is not a file\n"


def test_the_field_dictionary_is_in_the_documentation() -> None:
    assert tables.dictionary() in DOC.read_text(encoding="utf-8")


def test_the_queries_in_the_documentation_work(store: LogStore, tmp_path: Path) -> None:
    ingest(store, [write(tmp_path / "a.jsonl", Log().run(3, layers=2))])
    [block] = re.findall(r"```sql\n(.*?)```", DOC.read_text(encoding="utf-8"), re.DOTALL)
    queries = block.split(";\n")[:-1]
    assert len(queries) == 6
    assert [store.sql(query).num_rows > 0 for query in queries] == [False, True, True, True, True, False]
