"""`bmoe-iobench`: what it reads, what it makes of it, and what it tells."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bmoe.cli import iobench as cli
from bmoe.gguf_file import read_gguf
from bmoe.io import DirectFile, NullBackend
from bmoe.io.backend_choice import BackendChoice, open_backend
from bmoe.io.errors import BmoeError, FileError, FormatError, ReadError, UsageError
from bmoe.io.mounts import Mount, drive_of, mount_of
from bmoe.io.testing import Fault, FaultyBackend
from bmoe.model import lay_out
from bmoe.policies import AgedFrequency, LeastRecentlyUsed, policy_named
from bmoe.tools.iobench import Settings, drive_key, drives, measure, page_cache, recall, remember, replay_run
from bmoe.tools.iobench import run as run_iobench
from bmoe.tools.iobench.burners import Burners
from bmoe.tools.iobench.experts import ExpertLayout, read_layout
from bmoe.tools.iobench.lanes import ExpertWalk, LaneRandom, RandomWalk, window
from bmoe.tools.iobench.measure import Sample
from bmoe.tools.iobench.replay import CacheTable, place_experts, plan_replay
from bmoe.tools.iobench.result import FileFacts, Flag, Group, Latencies, Result, Row
from bmoe.tools.iobench.settings import ReplaySettings
from bmoe.tools.iobench.trace import RouteTrace, Routing, read_trace
from bmoe.tools.iobench.verdict import bounds, flags, knees, verdict
from tests.models import tiny_moe

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

SCHEMA = json.loads((Path(__file__).parent.parent / "docs/schema/iobench.v1.schema.json").read_text())
TRACES = Path(__file__).parent.parent.parent / "shared/data/route-traces"
MIB = 1 << 20


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("iobench") / "data.bin"
    path.write_bytes(os.urandom(1 * MIB) * 8)
    return str(path)


def quick(path: str, **changes: Any) -> Settings:
    base = Settings(path=path, lanes=(1, 4), read_kib=(64,), seconds=0.06, repeat=2)
    return dataclasses.replace(base, **changes)


def measured(chosen: Settings) -> Result:
    result = asyncio.run(run_iobench(chosen, lambda done, total: None))  # noqa: ARG005 (nobody looks)
    jsonschema.validate(json.loads(json.dumps(result.as_json(), allow_nan=False)), SCHEMA)
    return result


# --- what is read -----------------------------------------------------------------------------------


def test_lanes_draw_the_numbers_of_the_reference() -> None:
    """A 64-bit LCG, multiplier 6364136223846793005, increment 1442695040888963407, from lane + 1."""
    zero, one = LaneRandom(0), LaneRandom(1)
    assert [zero.draw() for _ in range(3)] == [119122791515133, 143385448121930, 182496945315991]
    assert [one.draw() for _ in range(3)] == [216231803719826, 258145240057817, 194610522493628]


def test_lanes_visit_the_same_aligned_offsets_whatever_the_others_do(data: str) -> None:
    with DirectFile.open(data) as file:
        walk = RandomWalk(file, 64 << 10, 1, 2)
        span, align = file.size_bytes - 2 * (64 << 10), os.sysconf("SC_PAGESIZE")
        expected = [n % span // align * align for n in (119122791515133, 143385448121930)]
        assert walk.next(0) == (0, expected[0], 64 << 10)
        assert walk.next(1) == (0, 216231803719826 % span // align * align, 64 << 10)
        assert walk.next(0) == (0, expected[1], 64 << 10)


def test_pieces_of_a_scattered_read_are_rounded_up_to_pages(data: str) -> None:
    with DirectFile.open(data) as file:
        walk = RandomWalk(file, 100 << 10, 3, 1)
        page = os.sysconf("SC_PAGESIZE")
        assert walk.max_window_bytes == -(-(100 << 10) // (3 * page)) * page
        assert all(walk.next(0)[1] % page == 0 for _ in range(50))


def test_file_too_small_for_the_reads_is_refused(data: str) -> None:
    with DirectFile.open(data) as file, pytest.raises(UsageError, match="too few for reads of 4096 KiB"):
        RandomWalk(file, 4096 << 10, 1, 1)


@given(
    offset=st.integers(0, 1 << 40), length=st.integers(1, 1 << 30), block=st.sampled_from([512, 4096, 65536])
)
def test_window_is_the_least_of_whole_blocks_around_a_slice(offset: int, length: int, block: int) -> None:
    file, start, size = window((0, offset, length), [block])
    assert file == start % block == size % block == 0
    assert start <= offset < start + block
    assert start + size - block < offset + length <= start + size


@pytest.mark.parametrize(
    "path",
    [
        pytest.param(tiny_moe, id="qwen3moe"),
        pytest.param(lambda: tiny_moe(arch="gemma4"), id="fused gate and up"),
        pytest.param(lambda: tiny_moe("Q4_K_M", layers=4), id="mixed types"),
    ],
)
def test_experts_lie_where_the_engine_reads_them(path: Callable[[], str]) -> None:
    """The same slices as `bmoe.model` finds through ggml, expert by expert."""
    layout = read_layout(path())
    assert layout is not None
    engine = lay_out(read_gguf(path()))
    assert (layout.top_k, layout.expert_bytes, layout.layers) == (
        engine.top_k,
        engine.expert_bytes,
        engine.layer_numbers,
    )
    expected = [
        tuple(
            (t.file, t.file_offset + expert * t.slice_bytes, t.slice_bytes)
            for t in sorted(engine.tensors, key=lambda t: t.rank)
            if t.layer == layer
        )
        for layer in range(len(layout.layers))
        for expert in range(layout.experts[layer])
    ]
    assert list(layout.entries) == expected
    assert layout.cycle_bytes() == engine.cycle_bytes


def test_expert_walk_reads_projection_by_projection() -> None:
    layout = read_layout(tiny_moe())
    assert layout is not None
    with DirectFile.open(tiny_moe()) as file:
        walk = ExpertWalk([file], layout, 2)
        for lane, drawn in ((0, 119122791515133), (1, 216231803719826), (0, 143385448121930)):
            entry = layout.entries[drawn % len(layout.entries)]
            assert [walk.next(lane) for _ in entry] == [window(s, [file.block_bytes]) for s in entry]


def test_what_is_no_mixture_of_experts_has_no_layout(data: str, tmp_path: Path) -> None:
    assert read_layout(data) is None
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(Path(tiny_moe()).read_bytes()[:999])
    with pytest.raises(FormatError, match=str(broken)):
        read_layout(str(broken))
    second = tmp_path / "m-00002-of-00003.gguf"
    second.symlink_to(tiny_moe())
    with pytest.raises(UsageError, match="give the first"):
        read_layout(str(second))
    first = tmp_path / "m-00001-of-00003.gguf"
    first.symlink_to(tiny_moe())
    with pytest.raises(FileError, match=r"m-00003-of-00003\.gguf"):
        read_layout(str(first))


# --- measuring --------------------------------------------------------------------------------------


def test_rows_say_what_was_read_and_how(data: str) -> None:
    result = measured(quick(data, backends=("uring", "threads"), scatter=(1, 3)))
    with DirectFile.open(data) as file:
        how = "direct" if file.direct else "BUFFERED"
    assert len(result.rows) == 8
    assert {(row.group.backend, row.group.pieces, row.lanes) for row in result.rows} == {
        (backend, pieces, lanes) for backend in ("uring", "threads") for pieces in (1, 3) for lanes in (1, 4)
    }
    for row in result.rows:
        window_kib = 64 if row.group.pieces == 1 else 24  # 21.3 KiB, in pages
        assert row.read_mib == round(row.reads * window_kib / 1024, 1)
        assert len(row.samples_mib_per_s) == 2
        assert min(row.samples_mib_per_s) <= row.mib_per_s <= max(row.samples_mib_per_s)
        for latencies in (row.submission_us, row.completion_us):
            assert 0 < latencies.p50 <= latencies.p90 <= latencies.p99 <= latencies.max
        assert how in row.mode
        assert row.most_in_flight == row.lanes
    assert [flag.code for flag in result.flags if flag.code == "threads-limit"] == []


def test_unregistered_on_request(data: str) -> None:
    rows = measured(quick(data, register=False, backends=("uring",))).rows
    assert all((row.registered, row.unregistered_reason) == (False, None) for row in rows)


def test_buffered_reads_shout_and_start_with_an_empty_cache(data: str) -> None:
    Path(data).read_bytes()
    result = measured(quick(data, buffered=True))
    assert all("BUFFERED" in row.mode for row in result.rows)
    assert "buffered" in [flag.code for flag in result.flags]
    assert all(row.cached_fraction in {None, 0.0} for row in result.rows)


def test_engine_pattern_and_bounds_of_a_model() -> None:
    result = measured(quick(tiny_moe(), engine_pattern=True, read_kib=(64,)))
    assert {row.group.pattern for row in result.rows} == {"experts", "random"}
    v = result.verdict
    assert v is not None
    assert v.knee.group.pattern == "experts"
    assert v.queue_depth in {1, 4}
    assert [b.hit_rate for b in v.bounds] == [0.0, 0.5, 0.75, 0.9]
    with DirectFile.open(tiny_moe()) as file:
        layout = read_layout(tiny_moe())
        assert layout is not None
        assert v.cycle_mib == round(layout.cycle_bytes([file.block_bytes]) / MIB, 2)


def test_engine_pattern_wants_a_model(data: str) -> None:
    with pytest.raises(UsageError, match="no GGUF model with experts"):
        measured(quick(data, engine_pattern=True))


def test_broken_model_is_still_a_file_to_read(tmp_path: Path, data: str) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF" + Path(data).read_bytes()[:MIB])
    v = measured(quick(str(broken))).verdict
    assert v is not None
    assert str(broken) in (v.no_bounds_reason or "")


def test_compute_load_is_busy_and_not_counted(data: str) -> None:
    result = measured(quick(data, compute_load=(0, 1)))
    assert [row.group.compute_load for row in result.rows] == [0, 0, 1, 1]
    with Burners(2) as burners:
        while burners.cpu_ns() == 0:
            threading.Event().wait(0.001)
    assert burners.cpu_ns() == 0  # nothing is left to ask


def test_repeats_are_the_outer_loop(data: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, int]] = []

    async def stub(*_: object, backend: str, lanes: int, **__: object) -> Sample:
        seen.append((backend, lanes))
        return Sample(
            window_ns=1_000_000_000,
            window_bytes=len(seen) * MIB,
            submission_ns=[1000],
            completion_ns=[2000],
            cpu_user_ns=0,
            cpu_system_ns=0,
            direct=True,
            registered=False,
            unregistered_reason=None,
            most_in_flight=lanes,
        )

    monkeypatch.setattr(sys.modules[run_iobench.__module__], "measure", stub)
    progress: list[tuple[int, int]] = []
    chosen = quick(data, backends=("uring", "threads"), seconds=1.0, repeat=2)
    result = asyncio.run(run_iobench(chosen, lambda done, total: progress.append((done, total))))
    assert seen == [("uring", 1), ("uring", 4), ("threads", 1), ("threads", 4)] * 2
    assert [row.samples_mib_per_s for row in result.rows] == [[1, 5], [2, 6], [3, 7], [4, 8]]
    assert progress == [(500 * n, 4000) for n in range(1, 9)]


def test_failed_read_ends_the_run_with_its_place(data: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def faulty(name: BackendChoice, depth: int) -> FaultyBackend:
        return FaultyBackend(open_backend(name, depth), {9: Fault(errno=5)})

    monkeypatch.setattr(measure, "open_backend", faulty)
    with pytest.raises(ReadError, match=f"{data} at byte"):
        measured(quick(data))


def test_row_that_would_not_fit_into_memory_is_refused(data: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[run_iobench.__module__], "available_bytes", lambda: 100 << 10)
    with pytest.raises(BmoeError, match="the buffers of a row take"):
        measured(quick(data))


def test_missing_io_uring_is_told_once_and_refused_by_name(
    data: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "bmoe.io.uring", None)
    result = measured(quick(data))
    assert {row.group.backend for row in result.rows} == {"threads"}
    assert [flag.code for flag in result.flags].count("no-io-uring") == 1
    with pytest.raises(BmoeError, match="python-liburing does not load"):
        measured(quick(data, backends=("uring",)))


# --- honesty ----------------------------------------------------------------------------------------


def test_cached_fraction_falls_when_dropped(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(4 * MIB))
    with path.open("rb") as file:
        assert page_cache.cached_fraction(file.fileno(), 4 * MIB) in {1.0, None}
        page_cache.drop(file.fileno())
        assert page_cache.cached_fraction(file.fileno(), 4 * MIB) in {0.0, None}
        os.pread(file.fileno(), 1, 3 * MIB)
        part = page_cache.cached_fraction(file.fileno(), 4 * MIB)
        assert part is None or 0 < part < 1


def test_both_ways_to_ask_agree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(MIB + 5))
    with path.open("rb") as file:
        by_cachestat = page_cache.cached_fraction(file.fileno(), MIB + 5)
        monkeypatch.setattr(page_cache, "_cachestat", lambda fd: None)  # noqa: ARG005 (an older kernel)
        assert page_cache.cached_fraction(file.fileno(), MIB + 5) in {by_cachestat, 1.0}


GROUP = Group(backend="uring", pattern="random", read_bytes=MIB, pieces=1, piece_bytes=MIB, compute_load=0)
LATENCIES = Latencies(p50=1.0, p90=2.0, p99=3.0, max=4.0)
FACTS = FileFacts(
    path="file",
    size_bytes=4 << 30,
    mount_point="/",
    file_system="ext4",
    source="/dev/sda",
    direct=True,
    fallback_reason=None,
    block_bytes=512,
    cached_before=0.0,
    cached_after=0.0,
)


def row(lanes: int, *samples: float, group: Group = GROUP, **changes: Any) -> Row:
    base = Row(
        group=group,
        lanes=lanes,
        most_in_flight=lanes,
        mib_per_s=sorted(samples)[len(samples) // 2],
        samples_mib_per_s=list(samples),
        submission_us=LATENCIES,
        completion_us=LATENCIES,
        latency_ms=0.1,
        cpu_user_us_per_mib=1.0,
        cpu_system_us_per_mib=1.0,
        reads=100,
        read_mib=100.0,
        direct=True,
        registered=True,
        unregistered_reason=None,
        cached_fraction=0.0,
    )
    return dataclasses.replace(base, **changes)


def codes(rows: Sequence[Row], facts: FileFacts = FACTS, dropped: float | None = 0.0) -> list[str]:
    return [flag.code for flag in flags(rows, facts, memory_mib_per_s=10_000, dropped=dropped)]


@pytest.mark.parametrize(
    ("rows", "facts", "dropped", "expected"),
    [
        ([row(1, 2000, 2010, 1990)], {}, 0.0, []),
        ([row(1, 9000)], {}, 0.0, ["as-fast-as-memory"]),
        ([row(1, 1000, 3000, 3000)], {}, 0.0, ["faster-when-repeated"]),
        ([row(1, 3000, 1000, 1000)], {}, 0.0, []),
        ([row(1, 100)], {"size_bytes": 1 << 29, "cached_before": 0.5}, 0.0, ["small-cached-file"]),
        ([row(1, 100)], {"size_bytes": 1 << 29, "cached_before": None}, 0.0, ["small-cached-file"]),
        ([row(1, 100)], {"cached_after": 0.6}, 0.0, ["cache-filled"]),
        ([row(1, 100, direct=False)], {}, 0.0, ["buffered"]),
        ([row(1, 100, direct=False)], {}, None, ["buffered", "cache-unknown"]),
        ([row(1, 100, direct=False)], {}, 0.3, ["buffered", "cache-kept"]),
        ([row(1, 100, unregistered_reason="no room")], {}, 0.0, ["unregistered"]),
        (
            [row(32, 100, group=dataclasses.replace(GROUP, backend="threads"), most_in_flight=16)],
            {},
            0.0,
            ["threads-limit"],
        ),
    ],
)
def test_doubtful_figures_are_flagged(
    rows: list[Row], facts: dict[str, Any], dropped: float | None, expected: list[str]
) -> None:
    assert codes(rows, dataclasses.replace(FACTS, **facts), dropped) == expected


# --- the verdict ------------------------------------------------------------------------------------


def test_knee_is_the_fewest_lanes_within_three_percent_of_the_peak() -> None:
    (knee,) = knees([row(1, 500), row(2, 960), row(4, 971), row(8, 1000), row(16, 990)])
    assert (knee.peak_lanes, knee.peak_mib_per_s) == (8, 1000)
    assert (knee.knee_lanes, knee.knee_mib_per_s) == (4, 971)


@pytest.mark.parametrize(
    ("scattered", "ratio", "costs"),
    [((980, 985, 990), 0.985, False), ((700, 710, 720), 0.71, True), ((700, 900, 995), 0.9, None)],
)
def test_scatter_costs_when_it_is_slower_and_the_samples_lie_apart(
    scattered: tuple[float, ...], ratio: float, costs: bool | None
) -> None:
    pieces = dataclasses.replace(GROUP, pieces=3, piece_bytes=MIB // 3)
    rows = [row(8, 990, 1000, 1010), row(8, *scattered, group=pieces)]
    (scatter,) = verdict(rows, knees(rows), None, [512], "no model").scatter
    assert (scatter.pieces, scatter.ratio, scatter.costs) == (3, ratio, costs)


def test_verdict_rests_on_the_curve_most_like_the_engine() -> None:
    layout = ExpertLayout(
        paths=("m",), layers=(0,), experts=(2,), entries=(((0, 0, 900 << 10),), ((0, 0, 900 << 10),)), top_k=1
    )
    like = dataclasses.replace(GROUP, piece_bytes=MIB)
    others = [
        dataclasses.replace(GROUP, piece_bytes=64 << 10, read_bytes=64 << 10),
        dataclasses.replace(GROUP, compute_load=2),
        dataclasses.replace(GROUP, backend="threads"),
    ]
    rows = [row(4, 3000, group=group) for group in others] + [row(4, 2000, group=like)]
    v = verdict(rows, knees(rows), layout, [4096], None)
    assert v.knee.group == like
    assert v.cycle_mib == round((904 << 10) / MIB, 2) or v.cycle_mib == round((900 << 10) / MIB, 2)


def test_bounds_are_bandwidth_over_what_is_missed() -> None:
    assert [(b.read_mib_per_token, b.tokens_per_s) for b in bounds(2000, 100)] == [
        (100, 20),
        (50, 40),
        (25, 80),
        (10, 200),
    ]


# --- what is kept -----------------------------------------------------------------------------------


def test_result_is_remembered_by_drive(data: str) -> None:
    assert recall(data) is None
    result = measured(quick(data))
    with DirectFile.open(data) as file:
        if not file.direct:
            pytest.skip("no O_DIRECT here")
    assert remember(result) is None
    record = recall(data)
    assert record is not None
    assert result.verdict is not None
    assert record["mib_per_s"] == result.verdict.knee.knee_mib_per_s
    assert [point["lanes"] for point in record["curves"][0]["rows"]] == [1, 4]
    assert recall(str(Path(data).parent)) == record
    assert os.listdir(Path(drives.drives_path()).parent) == ["drives.json"]


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b"\xff\xfe", b'{"schema": 1}', b'{"schema": 2, "drives": {}}', b"[" * 100_000],
)
def test_broken_records_count_as_none_and_are_replaced(data: str, content: bytes) -> None:
    path = Path(drives.drives_path())
    path.parent.mkdir(parents=True)
    path.write_bytes(content)
    assert recall(data) is None
    result = dataclasses.replace(measured_once(data), rows=[row(1, 100)])
    assert remember(result) is None
    assert recall(data) is not None


def test_odd_record_of_a_drive_counts_as_none(data: str) -> None:
    path = Path(drives.drives_path())
    path.parent.mkdir(parents=True)
    key = drive_key(data)
    for record in (None, 7, {}, {"mib_per_s": "fast"}):
        path.write_text(json.dumps({"schema": 1, "drives": {key: record}}))
        assert recall(data) is None


def test_buffered_result_and_unwritable_cache_are_not_kept(
    data: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = measured_once(data)
    buffered = dataclasses.replace(result, rows=[row(1, 100, direct=False)])
    assert remember(buffered) == "nothing was measured past the page cache"
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert "cannot be written" in (remember(dataclasses.replace(result, rows=[row(1, 100)])) or "")


_once: list[Result] = []


def measured_once(data: str) -> Result:
    if not _once:
        _once.append(measured(quick(data, lanes=(1,), seconds=0.05, repeat=1)))
    return _once[0]


# --- replay -----------------------------------------------------------------------------------------

PREAMBLE = """# route_trace v1
# model=/a folder/tiny.gguf arch=qwen3moe n_layer=3 n_expert=4 n_expert_used=2
# layer=0 expert_bytes=0 dense_bytes=9
# layer=1 expert_bytes=30000 dense_bytes=9
# layer=2 expert_bytes=30000 dense_bytes=9
turn,phase,step,layer,slot,expert,weight,residency,expert_bytes
"""
ROWS = """0,0,0,1,0,0,0.5,0,30000
0,0,0,1,1,1,0.5,0,30000
0,0,1,1,0,1,0.5,0,30000
0,0,1,1,1,2,nan,0,30000
0,0,1,2,0,3,0.5,0,30000
0,1,2,1,0,0,0.5,0,30000
0,1,2,1,1,3,0.5,0,30000
0,1,2,2,0,0,0.5,0,30000
0,1,3,1,0,1,0.5,0,30000
0,1,3,2,0,3,0.5,0,30000
"""


def trace_file(tmp_path: Path, text: str = PREAMBLE + ROWS) -> str:
    path = tmp_path / "trace.csv"
    path.write_text(text)
    return str(path)


def test_trace_is_read_as_batches_and_passes(tmp_path: Path) -> None:
    trace = read_trace(trace_file(tmp_path))
    assert (trace.model, trace.experts, trace.top_k, trace.tokens) == ("tiny.gguf", 4, 2, 2)
    assert trace.expert_bytes == {1: 30000, 2: 30000}
    assert trace.routings == (
        Routing(False, True, 1, (0, 1, 2)),
        Routing(False, False, 2, (3,)),
        Routing(True, True, 1, (0, 3)),
        Routing(True, False, 2, (0,)),
        Routing(True, True, 1, (1,)),
        Routing(True, False, 2, (3,)),
    )
    assert read_trace(trace_file(tmp_path), max_tokens=1).routings == trace.routings[:4]


@pytest.mark.parametrize(
    ("text", "line", "says"),
    [
        ("", 0, "is not a route trace"),
        ("\x7fELF\n", 1, "is not a route trace"),
        ("# route_trace v2\n", 1, "is not a route trace"),
        ("# route_trace v1\n", 1, "no model line"),
        (PREAMBLE.replace("n_expert=4", "n_expert=x"), 2, "the model line cannot be read"),
        (PREAMBLE.replace("n_expert=4", "n_expert=9999999999999"), 2, "the model line cannot be read"),
        (PREAMBLE.replace("n_expert=4", "n_expert=99999"), 2, "cannot be a model's"),
        (PREAMBLE.replace("used=2", "used=0"), 2, "cannot be a model's"),
        (PREAMBLE.replace("layer=0", "layer=7"), 3, "no such layer"),
        (PREAMBLE.replace("layer=1 expert_bytes=30000", "layer=1 expert_bytes=-1"), 4, "layer line"),
        (PREAMBLE.replace("30000", "99999999999"), 4, "that large"),
        (PREAMBLE.replace("turn,phase", "turn,face"), 6, "lacks columns"),
        (PREAMBLE, 0, "holds no decoded token"),
        (PREAMBLE + "0,0,0,1,0,0,0.5,0,30000\n", 0, "holds no decoded token"),
        (PREAMBLE + "0,1,0,1,0,0\n", 7, "another width"),
        (PREAMBLE + "0,1,0,1,0,four,0.5,0,30000\n", 7, "expert is not a whole number"),
        (PREAMBLE + "0,1,0,1,0,4,0.5,0,30000\n", 7, "no such expert"),
        (PREAMBLE + "0,1,0,1,0,-1,0.5,0,30000\n", 7, "no such expert"),
        (PREAMBLE + "0,1,0,0,0,1,0.5,0,30000\n", 7, "no expert_bytes for that layer"),
        (PREAMBLE + "0,2,0,1,0,1,0.5,0,30000\n", 7, "the phase is unknown"),
        (PREAMBLE + "0,1,99999999999999999999,1,0,1,0.5,0,30000\n", 7, "step is not a whole number"),
        (PREAMBLE + "0," + "9" * 5000 + "\n", 7, "too long"),
    ],
)
def test_hostile_trace_is_one_line_with_its_place(tmp_path: Path, text: str, line: int, says: str) -> None:
    path = trace_file(tmp_path, text)
    with pytest.raises(FormatError, match=says) as caught:
        read_trace(path)
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith(f"{path}:{line}:" if line else path)


@pytest.mark.parametrize("path", ["missing", ".", "nul\0"])
def test_trace_that_cannot_be_read_is_a_file_error(path: str) -> None:
    with pytest.raises(FileError):
        read_trace(path)


@settings(max_examples=60, deadline=None)
@given(data_=st.data())
def test_mangled_trace_is_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, data_: st.DataObject
) -> None:
    text = bytearray((PREAMBLE + ROWS).encode())
    for _ in range(data_.draw(st.integers(1, 4))):
        at = data_.draw(st.integers(0, len(text) - 1))
        text[at : at + data_.draw(st.integers(0, 9))] = data_.draw(st.binary(max_size=9))
        text = text or bytearray(b"#")
    path = tmp_path_factory.mktemp("mangled") / "trace.csv"
    path.write_bytes(bytes(text))
    try:
        trace = read_trace(str(path))
    except FormatError as error:
        assert "\n" not in str(error)  # noqa: PT017 (either outcome is right)
    else:
        costs = [1] * (trace.experts * len(trace.expert_bytes))
        assert plan_replay(trace, costs, 3, LeastRecentlyUsed).tokens == trace.tokens


def test_replayed_cache_reads_what_it_does_not_hold(tmp_path: Path) -> None:
    trace = read_trace(trace_file(tmp_path))
    nothing = plan_replay(trace, [1] * 8, 0, LeastRecentlyUsed)
    assert (nothing.lookups, nothing.hits, nothing.most_resident) == (5, 0, 0)
    assert [step.token for step in nothing.steps] == [None, None, 0, 0, 1, 1]
    everything = plan_replay(trace, [1] * 8, 8, LeastRecentlyUsed)
    # Resident after prefill: 0, 1, 2 of the first layer and 3 of the second (entries 0, 1, 2 and 7).
    assert [step.entries for step in everything.steps] == [(0, 1, 2), (7,), (3,), (4,)]
    assert (everything.hits, everything.most_resident) == (3, 6)


def test_policies_choose_what_goes() -> None:
    """Three places, one layer: expert 0 was used often, 1 once and last, 2 once and first."""

    def used(make: Callable[..., Any]) -> list[int]:
        table = CacheTable([4], [10] * 4, 30, make)
        for experts in ([2], [0], [0], [0], [1]):
            table.begin_pass()
            table.use(0, experts)
        table.begin_pass()
        assert table.use(0, [3]) == [3]
        return sorted(table._resident)

    assert used(LeastRecentlyUsed) == [0, 1, 3]
    assert used(AgedFrequency) == [0, 1, 3]
    table = CacheTable([4], [10] * 4, 20, AgedFrequency)
    for experts in ([0], [0], [0], [1]):
        table.begin_pass()
        table.use(0, experts)
    table.begin_pass()
    table.use(0, [2])
    assert sorted(table._resident) == [0, 2]  # recency would have kept 1


def test_what_a_layer_needs_is_never_given_up_for_it() -> None:
    table = CacheTable([4], [10] * 4, 30, AgedFrequency)
    table.begin_pass()
    assert table.use(0, [0, 1, 2]) == [0, 1, 2]
    assert table.use(0, [0, 1, 3]) == [3]
    assert sorted(table._resident) == [0, 1, 3]
    assert table.use(0, [0, 1, 2, 3]) == [2]  # more than fits: the last ones stay
    assert sorted(table._resident) == [1, 2, 3]


@functools.cache
def recorded(name: str) -> RouteTrace:
    return read_trace(str(TRACES / f"{name}.route.csv"))


@pytest.mark.skipif(not TRACES.is_dir(), reason="no recorded traces here")
@pytest.mark.parametrize(
    ("policy", "cache_mib", "hit_percent"),
    [("lru", 500, 0.0), ("lru", 1000, 37.7), ("lru", 4000, 80.3), ("aged", 500, 27.7), ("aged", 1000, 41.6)],
)
def test_recorded_run_hits_as_published(policy: str, cache_mib: int, hit_percent: float) -> None:
    """To within what evicting before instead of after the layer's reads changes."""
    trace = recorded("qwen")
    assert trace.tokens == 128
    costs = [size for size in trace.expert_bytes.values() for _ in range(trace.experts)]
    plan = plan_replay(trace, costs, cache_mib * MIB, policy_named(policy))
    assert 100 * plan.hit_rate == pytest.approx(hit_percent, abs=0.8)


@pytest.mark.skipif(not TRACES.is_dir(), reason="no recorded traces here")
@pytest.mark.parametrize(("name", "layers", "tokens"), [("gemma", 30, 128), ("gptoss", 36, 64)])
def test_other_recorded_runs_are_read(name: str, layers: int, tokens: int) -> None:
    trace = recorded(name)
    assert (len(trace.expert_bytes), trace.tokens) == (layers, tokens)


def test_experts_of_another_model_are_laid_over_the_file(tmp_path: Path, data: str) -> None:
    trace = read_trace(trace_file(tmp_path))
    with DirectFile.open(data) as file:
        how, entries = place_experts(trace, None, [file])
        assert (how, len(entries)) == ("laid over", 8)
        assert all(len(e) == 3 and o + n <= file.size_bytes for e in entries for _, o, n in e)
        assert entries[0][0][1] == 0
        assert entries[1][0][1] == 10000 // 32 * 32 // file.block_bytes * file.block_bytes
    small = tmp_path / "small"
    small.write_bytes(bytes(9000))
    with DirectFile.open(str(small)) as file, pytest.raises(UsageError, match="smaller than an expert"):
        place_experts(trace, None, [file])


def test_experts_of_the_same_model_are_read_where_they_lie() -> None:
    layout = read_layout(tiny_moe())
    assert layout is not None
    size = sum(length for _, _, length in layout.entries[0])
    trace = RouteTrace(
        path="t",
        model="m",
        experts=16,
        top_k=4,
        expert_bytes=dict.fromkeys(layout.layers, size),
        routings=(),
        tokens=1,
    )
    with DirectFile.open(tiny_moe()) as file:
        how, entries = place_experts(trace, layout, [file])
        assert how == "model"
        assert entries[5] == tuple(window(s, [file.block_bytes]) for s in layout.entries[5])


@pytest.mark.parametrize("backend", ["uring", "threads"])
def test_replay_reads_every_miss_once(tmp_path: Path, data: str, backend: str) -> None:
    wanted = ReplaySettings(trace=trace_file(tmp_path), cache_mib=1, policy="lru")
    result = measured(quick(data, backends=(backend,), replay=wanted, lanes=(1, 8), repeat=2))
    assert (result.rows, result.verdict) == ([], None)
    assert result.replay is not None
    assert [r.queue_depth for r in result.replay.rows] == [1, 8]
    with DirectFile.open(data) as file:
        _, entries = place_experts(read_trace(wanted.trace), None, [file])
    for figures in result.replay.rows:
        assert (figures.tokens, figures.hit_rate, figures.misses) == (2, 0.6, 2)
        assert figures.read_mib == round(sum(n for e in (3, 4) for _, _, n in entries[e]) / MIB, 1)
        assert len(figures.samples_gib_per_s) == 2


def test_layers_wait_for_each_other_and_projections_go_first(
    tmp_path: Path, data: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No read of a layer is queued before the last of the one before has come."""
    batches: list[tuple[int, list[int]]] = []

    class Recording(NullBackend):
        def read_many(self, tags: Any, places: Any, targets: Any) -> None:
            batches.append((self.in_flight, [place[1] for place in places]))
            super().read_many(tags, places, targets)

    monkeypatch.setattr(replay_run, "open_backend", lambda name, depth: Recording(depth))  # noqa: ARG005 (one is all there is)
    trace = read_trace(trace_file(tmp_path))
    plan = plan_replay(trace, [1] * 8, 0, LeastRecentlyUsed)
    with DirectFile.open(data) as file:
        _, entries = place_experts(trace, None, [file])
        asyncio.run(
            replay_run.replay(
                [file],
                entries,
                plan,
                backend="uring",
                queue_depth=2,
                register=True,
                on_step=lambda step: None,  # noqa: ARG005 (nobody looks)
            )
        )
    expected = []
    for step in plan.steps:
        projections = [[entries[e][p][1] for e in step.entries] for p in range(3)]
        expected += [(p * len(step.entries), offsets) for p, offsets in enumerate(projections)]
    assert batches == expected


def test_replay_of_a_full_cache_reads_nothing_while_decoding(tmp_path: Path, data: str) -> None:
    text = PREAMBLE + "0,0,0,1,0,0,0.5,0,30000\n0,1,1,1,0,0,0.5,0,0\n"
    wanted = ReplaySettings(trace=trace_file(tmp_path, text), cache_mib=1, policy="aged")
    replayed = measured(quick(data, replay=wanted, lanes=(4,), repeat=1)).replay
    assert replayed is not None
    (figures,) = replayed.rows
    assert (figures.hit_rate, figures.gib_per_s, figures.tokens_per_s) == (1.0, None, None)


# --- the command ------------------------------------------------------------------------------------


def test_command_prints_the_table_the_peak_and_the_verdict(
    data: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "result.json"
    words = ["-m", data, "--lanes", "0,1,4", "--slice-kb", "64", "--scatter", "1,3", "--seconds", "0.1"]
    assert cli.main([*words, "--json", str(path)]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    lines = out.splitlines()
    assert lines[0].startswith(f"model  {data} (")
    assert (
        lines[2] == "read size 64 KiB x scatter 1,3, 0.1 s per row in 3 interleaved samples, compute load 0"
    )
    assert any(line.startswith("peak ") and line.endswith(" lanes") for line in lines)
    assert any("scatter      64 KiB in 3 pieces" in line for line in lines)
    assert any("tok/s bound  none" in line for line in lines)
    written = json.loads(path.read_text())
    jsonschema.validate(written, SCHEMA)
    assert written["command"].startswith("bmoe-iobench -m ")
    assert [r["lanes"] for r in written["rows"]] == [1, 4, 1, 4]


def test_json_on_standard_output_is_all_there_is_on_it(data: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["-m", data, "--lanes", "2", "--slice-kb", "64", "--seconds", "0.05", "--repeat", "1"]
    assert cli.main([*words, "--json", "-", "--no-keep"]) == 0
    out, err = capsys.readouterr()
    jsonschema.validate(json.loads(out), SCHEMA)
    assert "peak " in err
    assert recall(data) is None


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        ([], 2, "missing option '-m'"),
        (["-m", "FILE", "--lanes", "none"], 2, "is not a whole number"),
        (["-m", "FILE", "--lanes", "0"], 2, "holds no number from 1"),
        (["-m", "FILE", "--lanes", "99999"], 2, "is not a whole number from 0 to 4096"),
        (["-m", "FILE", "--scatter", "0"], 2, "a read has at least one piece"),
        (["-m", "FILE", "--slice-kb", "4096"], 2, "too few for reads"),
        (["-m", "FILE", "--seconds", "0"], 2, "--seconds"),
        (["-m", "FILE", "--seconds", "nan"], 2, "--seconds nan"),
        (["-m", "FILE", "--engine-pattern"], 2, "no GGUF model with experts"),
        (["-m", "FILE", "--backend", "fast"], 2, "--backend"),
        (["-m", "FILE", "--policy", "lru"], 2, "--policy has no meaning without --replay"),
        (["-m", "FILE", "--replay", "T", "--scatter", "3"], 2, "--scatter has no meaning with --replay"),
        (["-m", "FILE", "--replay", "/nowhere/t"], 1, "/nowhere/t: cannot be read"),
        (["-m", "FILE", "--replay", "FILE"], 1, "is not a route trace"),
        (["-m", "/nowhere/at/all"], 1, "no such file"),
        (["-m", "/dev/zero"], 1, "a character device"),
        (["-m", "FILE", "--json", "/nowhere/r.json"], 1, "cannot be written"),
        (["-m", "FILE", "--plot", "p.gif"], 2, "must end in .png or .svg"),
        (["-m", "FILE", "--plot", "/nowhere/p.png"], 1, "does not exist"),
    ],
)
def test_what_cannot_be_done_is_one_line(
    data: str, capsys: pytest.CaptureFixture[str], words: list[str], code: int, says: str
) -> None:
    assert cli.main([data if word == "FILE" else word for word in words]) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert says in err
    assert err.startswith("bmoe-iobench: error: ")
    assert err.count("\n") == 1


def test_unknown_policy_lists_the_known_ones(
    tmp_path: Path, data: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["-m", data, "--replay", trace_file(tmp_path), "--policy", "best"]) == 2
    assert "'best' is not one of aged, lru" in capsys.readouterr().err


def test_replay_prints_time_per_token(tmp_path: Path, data: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["-m", data, "--replay", trace_file(tmp_path), "--cache-mb", "0", "--tokens", "1"]) == 0
    out = capsys.readouterr().out
    assert "laid over a file that is another model" in out
    assert "ms/token" in out
    assert recall(data) is None


@pytest.mark.parametrize("name", ["plot.png", "plot.SVG"])
def test_plot_is_drawn(data: str, tmp_path: Path, name: str) -> None:
    pytest.importorskip("matplotlib")
    words = ["-m", data, "--lanes", "1,4", "--slice-kb", "64,128", "--seconds", "0.05"]
    assert cli.main([*words, "--repeat", "1", "--plot", str(tmp_path / name)]) == 0
    assert (tmp_path / name).read_bytes()[:5] in {b"\x89PNG\r", b"<?xml"}


def test_plot_without_matplotlib_says_what_to_install(
    data: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert cli.main(["-m", data, "--plot", "p.png"]) == 1
    assert 'pip install "bmoe[plot]"' in capsys.readouterr().err


def test_benchmark_loads_no_llama_cpp(tmp_path: Path) -> None:
    """Not even for the expert pattern and a replay."""
    code = (
        "import sys; from bmoe.cli.iobench import main\n"
        "common = ['-m', sys.argv[1], '--lanes', '2', '--no-keep', '--repeat', '1']\n"
        "assert main([*common, '--seconds', '0.05', '--engine-pattern']) == 0\n"
        "assert main([*common, '--replay', sys.argv[2], '--cache-mb', '0']) == 0\n"
        "wrong = [m for m in sys.modules if 'llama' in m or m in {'bmoe.gguf_file', 'bmoe.runtime'}]\n"
        "assert not wrong, wrong\n"
        "assert not [line for line in open('/proc/self/maps') if 'llama' in line or 'libggml' in line]\n"
    )
    ran = subprocess.run(
        [sys.executable, "-W", "error", "-c", code, tiny_moe(), trace_file(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr


# --- mounts -----------------------------------------------------------------------------------------

MOUNTINFO = r"""21 1 254:1 / / rw,relatime shared:1 - ext4 /dev/vda1 rw
22 21 0:5 / /dev/shm rw - tmpfs tmpfs rw
23 21 8:17 / /mnt/two\040words ro,noatime - xfs /dev/sdb1 ro
24 21 8:33 / /mnt rw - ext4 /dev/sdc1 rw
25 24 0:44 / /mnt rw - overlay overlay rw
broken line
"""


@pytest.mark.parametrize(
    ("path", "source", "read_only"),
    [
        ("/nowhere/model", "/dev/vda1", False),
        ("/mnt/two words/model", "/dev/sdb1", True),
        ("/mnt/two wordsmith", "overlay", False),  # the later of two mounts at one point
        ("/mnt", "overlay", False),
    ],
)
def test_mount_is_the_longest_that_leads_to_the_path(
    tmp_path: Path, path: str, source: str, read_only: bool
) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/mountinfo").write_text(MOUNTINFO)
    mount = mount_of(path, str(tmp_path))
    assert mount is not None
    assert (mount.source, mount.read_only) == (source, read_only)


def test_drive_of_a_partition_is_its_disk(tmp_path: Path) -> None:
    disk = tmp_path / "sys/devices/sdb"
    (disk / "sdb1").mkdir(parents=True)
    (disk / "queue").mkdir()
    (disk / "queue/rotational").write_text("1\n")
    (disk / "queue/logical_block_size").write_text("4096\n")
    (tmp_path / "sys/dev/block").mkdir(parents=True)
    (tmp_path / "sys/dev/block/8:17").symlink_to(disk / "sdb1")
    mount = Mount(mount_point="/", file_system="xfs", source="/dev/sdb1", device="8:17", read_only=False)
    drive = drive_of(mount, str(tmp_path))
    assert drive is not None
    assert (drive.rotational, drive.logical_block_bytes, drive.model) == (True, 4096, None)
    assert drive_of(dataclasses.replace(mount, device="0:5"), str(tmp_path)) is None
    assert mount_of("/", str(tmp_path)) is None


def test_flag_texts_are_for_people() -> None:
    (flag,) = flags([row(1, 9000)], FACTS, memory_mib_per_s=10_000, dropped=0.0)
    assert isinstance(flag, Flag)
    assert "a cache below the file system" in flag.text
