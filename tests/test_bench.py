"""`bmoe bench`: order, repetition, ratios, bounds, limits, and the record of a real benchmark."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import math
import os
import signal
import subprocess
import sys
import types
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bmoe.bench import benchmark
from bmoe.bench.bounds import bounds, burst_s, passing_bursts
from bmoe.bench.caps import Limits, confined
from bmoe.bench.execute import Execution, Executor
from bmoe.bench.external import find_rates, parse_externals, words_of
from bmoe.bench.process import run_process
from bmoe.bench.ratios import paired_ratio, spread
from bmoe.bench.report import make_ratios, make_rows
from bmoe.bench.runner import Plan, Runner, reference_by_round
from bmoe.bench.sides import External, Matrix, Side
from bmoe.bench.state import CpuTimes, EntryState, compared_flags, entry_flags, run_flags
from bmoe.cli import main
from bmoe.cli.bench import bench
from bmoe.io.errors import UsageError
from bmoe.tools import benchmark_table, models
from tests.models import tiny_moe

if TYPE_CHECKING:
    from collections.abc import Callable

ROOT = Path(__file__).parent.parent
SCHEMA = json.loads((ROOT / "docs/schema/bench.v2.schema.json").read_text())
QUIET = EntryState(
    cached_share=1.0,
    available_bytes=1 << 30,
    load_average=0.1,
    others_cpus=0.0,
    clock_mhz=3000.0,
    work_us=500.0,
)
BUSY = dataclasses.replace(QUIET, others_cpus=0.7)


def side(name: str, **changes: Any) -> Side:
    plain: dict[str, Any] = {"kind": "stream", "model": "m", "threads": 2, "prompt_tokens": 8, "tokens": 4}
    # Sides are told apart by what they do, not by name.
    return Side(name=name, **{**plain, "cache_bytes": sum(name.encode()), **changes})


class FakeMachine:
    """Entry states from a list, the last one again and again."""

    def __init__(self, *entries: EntryState) -> None:
        self.entries = list(entries) or [QUIET]

    def entry(self, paths: object) -> EntryState:  # noqa: ARG002 (the protocol's)
        return self.entries.pop(0) if len(self.entries) > 1 else self.entries[0]

    def cpu_times(self) -> CpuTimes:
        return CpuTimes(busy_s=0.0, steal_s=0.0)

    def clock_mhz(self) -> float | None:
        return 3000.0


class FakeExecutor:
    """Runs nothing; remembers what it was asked for."""

    def __init__(self, figures: Callable[[Side, int], dict[str, Any] | None]) -> None:
        self.figures = figures
        self.done: list[str] = []

    def prepare(self, side: Side) -> None:
        pass

    def execute(self, side: Side) -> Execution:
        figures = self.figures(side, len(self.done))
        self.done.append(side.name)
        return Execution(figures=figures, error=None if figures else "no luck", cpu_s=1.0, wall_s=1.0)


def rate(_: Side, number: int) -> dict[str, Any]:
    return {"decode_tok_per_s": 10.0 + number}


def plan(*sides: Side, rounds: int = 3, repeats: int = 2, settle_s: float = 0) -> Plan:
    return Plan(sides=sides, rounds=rounds, repeats=repeats, settle_s=settle_s, paths=(), model_bytes=1)


# --- order and repetition --------------------------------------------------------------------------------


def test_sides_take_turns_round_by_round() -> None:
    executor = FakeExecutor(rate)
    runs = Runner(plan(side("a"), side("b"), side("c"), rounds=3), executor, FakeMachine()).run()
    assert executor.done == ["a", "b", "c"] * 3
    assert [run["round"] for run in runs] == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert all(run["kept"] and not run["flags"] for run in runs)


def test_a_contaminated_run_is_repeated_in_its_place() -> None:
    executor = FakeExecutor(rate)
    runs = Runner(plan(side("a"), side("b"), rounds=1), executor, FakeMachine(QUIET, BUSY, QUIET)).run()
    assert executor.done == ["a", "b", "b"]
    assert [(r["side"], r["attempt"], r["kept"], r["flags"]) for r in runs] == [
        ("a", 0, True, []),
        ("b", 0, False, ["other load before"]),
        ("b", 1, True, []),
    ]


def test_repetition_has_a_limit_and_keeps_the_least_contaminated_with_its_flags() -> None:
    slow_too = dataclasses.replace(BUSY, work_us=900.0)
    executor = FakeExecutor(rate)
    runs = Runner(plan(side("a"), rounds=1), executor, FakeMachine(BUSY, slow_too, BUSY)).run()
    assert executor.done == ["a"] * 3
    assert [len(run["flags"]) for run in runs] == [1, 2, 1]
    assert [run["kept"] for run in runs] == [True, False, False]


def test_a_busy_machine_is_waited_for() -> None:
    pauses: list[float] = []
    machine = FakeMachine(BUSY, BUSY, QUIET)
    Runner(plan(side("a"), rounds=1, settle_s=10), FakeExecutor(rate), machine, pause=pauses.append).run()
    assert len(pauses) == 2
    Runner(
        plan(side("a"), rounds=1, settle_s=3), FakeExecutor(rate), FakeMachine(BUSY), pause=pauses.append
    ).run()
    assert len(pauses) == 2 + 3 * 3


def test_a_side_that_fails_is_not_run_in_later_rounds() -> None:
    executor = FakeExecutor(lambda side, _: None if side.name == "b" else {"decode_tok_per_s": 1.0})
    runs = Runner(plan(side("a"), side("b"), rounds=3), executor, FakeMachine()).run()
    assert executor.done == ["a", "b", "a", "a"]
    row = make_rows([side("b")], runs)[0]
    assert row["error"] == "no luck"
    assert row["figures"]["decode_tok_per_s"] is None


def test_what_an_earlier_benchmark_measured_is_not_run_again() -> None:
    sides = (side("a"), side("b"))
    saved: list[int] = []
    first = Runner(plan(*sides, rounds=2), FakeExecutor(rate), FakeMachine()).run()[:3]
    executor = FakeExecutor(rate)
    runs = Runner(
        plan(*sides, rounds=2), executor, FakeMachine(), runs=first, on_saved=lambda r: saved.append(len(r))
    ).run()
    assert executor.done == ["b"]
    assert [(run["side"], run["round"]) for run in runs] == [("a", 0), ("b", 0), ("a", 1), ("b", 1)]
    assert saved == [4, 4]


def test_a_round_that_later_ones_show_to_be_slow_is_flagged_in_the_end() -> None:
    def figures(_: Side, number: int) -> dict[str, Any]:
        return {"decode_tok_per_s": 1.0, "compute_ms_per_token": (30.0, 20.0, 20.0)[number]}

    runs = Runner(plan(side("a"), rounds=3), FakeExecutor(figures), FakeMachine()).run()
    assert [run["flags"] for run in runs] == [["compute rose"], [], []]


def test_a_drive_that_slowed_down_is_flagged_and_the_nearest_clean_round_taken() -> None:
    def figures(_: Side, number: int) -> dict[str, Any]:
        return {"drive_gib_per_s": (2.0, 1.5, 1.9)[number]}

    drive = dataclasses.replace(side("a"), kind="drive")
    runs = Runner(plan(drive, rounds=3, repeats=0), FakeExecutor(figures), FakeMachine()).run()
    assert [run["flags"] for run in runs] == [[], ["drive slowed"], []]
    assert reference_by_round(runs, drive.key, [1])[1] == {"drive_gib_per_s": 2.0}


# --- flags -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wants", "state", "expected"),
    [
        ("any", {}, []),
        ("any", {"cached_share": 0.0}, []),
        ("warm", {}, []),
        ("warm", {"cached_share": 0.5}, ["not in the page cache"]),
        ("warm", {"cached_share": 0.1, "available_bytes": 100}, []),  # it cannot be: that is the point
        ("warm", {"cached_share": None}, []),
        ("dropped", {"cached_share": 0.01}, []),
        ("dropped", {"cached_share": 0.3}, ["still in the page cache"]),
        ("any", {"work_us": 600.0}, ["slow CPU"]),
        ("any", {"others_cpus": 0.2}, ["other load before"]),
    ],
)
def test_the_entry_state_is_held_to_what_the_side_needs(
    wants: Any, state: dict[str, Any], expected: list[str]
) -> None:
    entry = dataclasses.replace(QUIET, **state)
    assert entry_flags(side("a", page_cache=wants), entry, 1000, 500.0) == expected


def test_what_went_on_during_a_run_is_flagged() -> None:
    clean: dict[str, Any] = {"others_cpus": 0.05, "steal_share": 0.01, "clocks_mhz": (3000.0, 2990.0)}
    assert run_flags(side("a"), {}, [], **clean) == []
    assert run_flags(side("a"), {}, [], **{**clean, "others_cpus": 0.5}) == ["other load"]
    assert run_flags(side("a"), {}, [], **{**clean, "steal_share": 0.2}) == ["stolen time"]
    assert run_flags(side("a"), {}, [], **{**clean, "clocks_mhz": (3000.0, 2000.0)}) == ["clock fell"]
    assert run_flags(side("a"), {}, [], **{**clean, "clocks_mhz": (None, None)}) == []


def test_page_faults_that_jump_are_flagged_where_none_are_expected() -> None:
    usual = [{"major_faults_per_token": 2.0}, {"major_faults_per_token": 3.0}]
    assert compared_flags(side("a"), {"major_faults_per_token": 20.0}, usual) == []
    assert compared_flags(side("a"), {"major_faults_per_token": 26.0}, usual) == ["page faults jumped"]
    cold = side("a", page_cache="dropped")
    assert compared_flags(cold, {"major_faults_per_token": 900.0}, usual) == []


# --- arithmetic ------------------------------------------------------------------------------------------


def test_the_interval_of_two_rounds_is_that_of_all_four_draws() -> None:
    # Ratios 1 and 4: means of the draws are 1, 2, 2, 4; the middle 95 % of their logarithms.
    ratio = paired_ratio({0: 3.0, 1: 8.0}, {0: 3.0, 1: 2.0})
    assert ratio is not None
    assert ratio.ratio == pytest.approx(2.0)
    assert math.log2(ratio.low) == pytest.approx(0.075)  # numpy's percentile between 0 and 1, at 0.025 * 3
    assert math.log2(ratio.high) == pytest.approx(2 - 0.075)
    assert ratio.rounds == 2


def test_ratios_take_pairs_only() -> None:
    ratio = paired_ratio({0: 6.0, 2: 5.0, 3: 1.0}, {0: 3.0, 1: 9.0, 3: 0.0})
    assert ratio is not None
    assert [ratio.ratio, ratio.low, ratio.high] == pytest.approx([2.0] * 3)
    assert ratio.rounds == 1
    assert paired_ratio({0: 1.0}, {1: 1.0}) is None


@given(st.lists(st.tuples(st.floats(0.1, 100), st.floats(0.1, 100)), min_size=1, max_size=8))
def test_the_interval_holds_the_ratio_and_lies_within_the_range(pairs: list[tuple[float, float]]) -> None:
    over, under = dict(enumerate(a for a, _ in pairs)), dict(enumerate(b for _, b in pairs))
    ratio = paired_ratio(over, under)
    assert ratio is not None
    each = [a / b for a, b in pairs]
    slack = 1 + 1e-9
    assert min(each) / slack <= ratio.low <= ratio.high <= max(each) * slack
    if len(pairs) <= 5:
        assert ratio.low / slack <= ratio.ratio <= ratio.high * slack
    assert ratio == paired_ratio(over, under)  # no chance is left in it


def test_spread_is_median_and_range() -> None:
    found = spread([3.0, 1.0, 2.0, 10.0])
    assert found is not None
    assert (found.median, found.low, found.high, found.rounds) == (2.5, 1.0, 10.0, 4)
    assert spread([]) is None


DRIVE = {
    "read_bytes": 1 << 20,
    "drive_gib_per_s": 1.0,  # a slice of 1 MiB takes 1/1024 s
    "burst_s": {"1": 0.002, "2": 0.003, "4": 0.005},
}
CACHED = {"decode_tok_per_s": 50.0, "experts_s_per_token": 0.008, "layers": 4}


def test_bounds_are_those_computed_by_hand() -> None:
    # Two tokens of four layers: two layers ask for 4 slices, one for 1; D is 12 ms, E 2 ms per layer.
    row = {"tokens": 2, "layer_reads": {"4": 2, "1": 1}}
    found = bounds(row, CACHED, DRIVE)
    assert found is not None
    rest = 0.012 + 5 * 0.002 / 2
    assert 1 / found.layered == pytest.approx(rest + (2 * 4 / 1024 + 0.002) / 2)
    assert 1 / found.at_depth == pytest.approx(rest + (2 * 0.005 + 0.002) / 2)
    assert 1 / found.ideal == pytest.approx(0.020)  # 9 slices take less than computing does
    assert bounds({"tokens": 2}, CACHED, DRIVE) is None


def test_a_run_without_misses_is_bound_by_computing_alone() -> None:
    found = bounds({"tokens": 3, "layer_reads": {}}, CACHED, DRIVE)
    assert found is not None
    assert [found.layered, found.at_depth, found.ideal] == pytest.approx([50.0] * 3)


def test_a_limit_that_averages_bounds_all_bytes_together_and_no_layer() -> None:
    # The limit lets bursts of up to 4 slices pass in a tenth of their time; 8 wait for it.
    limited = {
        "read_bytes": 1 << 20,
        "drive_gib_per_s": 10 / 1024,  # 0.1 s a slice
        "burst_s": {"1": 0.01, "4": 0.04, "8": 0.8},
        "limited": True,
    }
    assert passing_bursts(limited) == {"1": 0.01, "4": 0.04}
    row = {"tokens": 2, "layer_reads": {"4": 2, "1": 1}}
    found = bounds(row, CACHED, limited)
    assert found is not None
    assert [1 / found.layered, 1 / found.at_depth, 1 / found.ideal] == pytest.approx([9 * 0.1 / 2] * 3)
    few = bounds({"tokens": 200, "layer_reads": {"4": 1}}, CACHED, limited)
    assert few is not None
    assert 1 / few.layered == pytest.approx(0.012 + (200 * 4 - 1) * 0.002 / 200 + 0.04 / 200)


def test_bursts_are_interpolated_and_go_on_in_proportion() -> None:
    assert burst_s(DRIVE, 2) == 0.003
    assert burst_s(DRIVE, 3) == pytest.approx(0.004)
    assert burst_s(DRIVE, 8) == pytest.approx(0.010)


def test_rows_take_bounds_round_by_round_and_ratios_pairs() -> None:
    drive_of_sides = Matrix(
        model="m", names=("overlap", "resident-norepack"), caches_bytes=(1 << 20,), threads=(2,), tokens=4
    ).sides()

    def figures(one: Side, number: int) -> dict[str, Any]:
        if one.kind == "drive":
            return {**DRIVE, "drive_cpu_us_per_mib": 1.0, "burst_cpu_us_per_mib": 2.0, "depth": 32}
        round_number = number // 4
        if one.reference:
            return dict(CACHED)
        own = {"decode_tok_per_s": 20.0 + round_number, "tokens": 2, "layer_reads": {"4": 2, "1": 1}}
        return own if one.kind == "stream" else {"decode_tok_per_s": 40.0}

    runs = Runner(plan(*drive_of_sides, rounds=3), FakeExecutor(figures), FakeMachine()).run()
    rows = {row["side"]: row for row in make_rows(drive_of_sides, runs)}
    streamed = rows["overlap, cache 1 MiB"]
    assert streamed["figures"]["decode_tok_per_s"] == {"median": 21.0, "low": 20.0, "high": 22.0, "rounds": 3}
    share = streamed["share_of_bound"]["layered"]["median"]
    assert share == pytest.approx(21.0 / streamed["bounds"]["layered"]["median"])
    assert streamed["compute_from"] == "everything cached"
    (ratio,) = [r for r in make_ratios(drive_of_sides, runs, "resident-norepack") if "overlap" in r["side"]]
    assert ratio["ratio"] == pytest.approx((20 * 21 * 22) ** (1 / 3) / 40)


def test_a_disturbed_reference_gives_way_to_the_nearest_clean_one() -> None:
    def figures(_: Side, number: int) -> dict[str, Any]:
        return {"n": number}

    runs = Runner(plan(side("a"), rounds=4), FakeExecutor(figures), FakeMachine()).run()
    runs[1]["flags"] = ["other load"]
    found = reference_by_round(runs, side("a").key, range(4))
    assert [found[n]["n"] for n in range(4)] == [0, 0, 2, 3]
    for run in runs:
        run["flags"] = ["other load"]
    assert [f["n"] for f in reference_by_round(runs, side("a").key, range(4)).values()] == [0, 1, 2, 3]
    assert reference_by_round(runs, "other", range(4)) == {}


# --- the matrix ------------------------------------------------------------------------------------------


def test_a_matrix_is_all_combinations_and_their_references() -> None:
    names = [
        s.name
        for s in Matrix(
            model="m",
            names=("overlap", "resident", "resident-capped"),
            caches_bytes=(1 << 20, 64 << 20),
            threads=(1, 2),
            tokens=64,
            prompt_tokens=(32, 512),
            cap_bytes=(16 << 20,),
        ).sides()
    ]
    assert names[:3] == ["drive", "everything cached, 1 thread", "everything cached, 2 threads"]
    assert [n for n in names if n.startswith("overlap,")] == [
        "overlap, cache 1 MiB, 1 thread",
        "overlap, cache 1 MiB, 2 threads",
        "overlap, cache 64 MiB, 1 thread",
        "overlap, cache 64 MiB, 2 threads",
    ]
    # Under a cap of 16 MiB only the small cache has room.
    assert [n for n in names if n.startswith("overlap-capped")] == [
        "overlap-capped, 16 MiB cap, cache 1 MiB, 1 thread",
        "overlap-capped, 16 MiB cap, cache 1 MiB, 2 threads",
    ]
    assert sum(n.startswith("prefill 512, ") for n in names) == 6
    assert len(set(names)) == len(names)


def test_capped_resident_sides_start_without_page_cache_and_stay_short() -> None:
    matrix = Matrix(
        model="m", names=("resident-capped",), caches_bytes=(1,), threads=(1,), tokens=64, cap_bytes=(8,)
    )
    capped = next(s for s in matrix.sides() if s.kind == "resident")
    assert (capped.page_cache, capped.tokens, capped.prompt_tokens, capped.warm_up) == (
        "dropped",
        6,
        4,
        False,
    )
    assert capped.cap_bytes == 8


def test_keys_tell_what_is_run_and_not_what_it_is_called() -> None:
    one = side("a")
    assert one.key == dataclasses.replace(one, name="b", reference=True).key
    assert one.key != dataclasses.replace(one, threads=3).key


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"names": ("warp",)}, "'warp' is not one of overlap, serial"),
        ({"names": ()}, "nothing to compare"),
        ({"names": ("resident-capped",)}, "needs --mem-cap"),
        ({"moe": False}, "no experts to stream"),
        ({"externals": (External(name="overlap, cache 1 MiB", command="x", pattern="(x)"),)}, "two sides"),
    ],
)
def test_a_matrix_that_makes_no_sense_is_refused(changes: dict[str, Any], word: str) -> None:
    plain: dict[str, Any] = {
        "model": "m",
        "names": ("overlap",),
        "caches_bytes": (1 << 20,),
        "threads": (1,),
        "tokens": 4,
    }
    with pytest.raises(UsageError, match=word):
        Matrix(**{**plain, **changes}).sides()


# --- other engines ---------------------------------------------------------------------------------------


def test_the_last_match_of_a_pattern_counts() -> None:
    output = "warm-up: 3.5 tokens per second\neval: 12.25 tokens per second\n"
    assert find_rates(r"([\d.]+) tokens per second", output) == {"decode_tok_per_s": 12.25}
    named = r"prompt (?P<prefill>[\d.]+) eval (?P<decode>[\d.]+)"
    assert find_rates(named, "prompt 99.5 eval 7") == {"decode_tok_per_s": 7.0, "prefill_tok_per_s": 99.5}
    assert find_rates(r"(\d+) tok", "nothing") == {}
    assert find_rates(r"(\w+) tok", "many tok") == {}


def test_places_are_filled_without_a_shell() -> None:
    values = {"model": "my model.gguf", "prompt": "$(rm) {n}", "n": "8", "threads": "2"}
    assert words_of("llama-cli -m {model} -p {prompt} -n {n} --t={threads} 'a b'", values) == [
        "llama-cli", "-m", "my model.gguf", "-p", "$(rm) {n}", "-n", "8", "--t=2", "a b",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("commands", "patterns", "word"),
    [
        (("x",), ("(y)",), "expected NAME=COMMAND"),
        (("=run",), ("(y)",), "expected NAME=COMMAND"),
        (("a=run",), (), "expected one pattern"),
        (("a=run",), ("(",), "no regular expression"),
        (("a=run",), ("y",), "has no group"),
        (("a=run {speed}",), ("(y)",), r"\{speed\} is not one of"),
        (("a=run 'x",), ("(y)",), "quotation"),
        ((), ("(y)",), "goes with --external"),
    ],
)
def test_an_external_engine_that_cannot_be_run_is_refused(
    commands: tuple[str, ...], patterns: tuple[str, ...], word: str
) -> None:
    with pytest.raises(UsageError, match=word):
        parse_externals(commands, patterns)


# --- limits ----------------------------------------------------------------------------------------------


@pytest.fixture
def fake_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with cgroup v1 for memory, whose groups come with their files, as the kernel makes them."""
    top = tmp_path / "sys/fs/cgroup/memory"
    top.mkdir(parents=True)
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("4:memory:/here\n")
    (tmp_path / "proc/self/mountinfo").write_text(
        "30 20 0:1 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
    )
    make, remove = os.mkdir, os.rmdir

    def mkdir(path: str) -> None:
        make(path)
        for name in ("memory.limit_in_bytes", "memory.memsw.limit_in_bytes"):
            (Path(path) / name).write_text("")

    def rmdir(path: str) -> None:
        for file in Path(path).iterdir():
            file.unlink()
        remove(path)

    monkeypatch.setattr(
        "bmoe.bench.caps.os", types.SimpleNamespace(**vars(os) | {"mkdir": mkdir, "rmdir": rmdir})
    )
    return tmp_path


def test_a_group_is_made_with_its_limit_and_removed_whatever_happens(fake_groups: Path) -> None:
    group = fake_groups / f"sys/fs/cgroup/memory/bmoe-bench-{os.getpid()}-memory"
    interrupted = contextlib.suppress(KeyboardInterrupt)
    with interrupted, confined(Limits(memory_bytes=1500), root=str(fake_groups)) as confinement:
        assert confinement.how == "cgroup v1"
        assert confinement.joins == (str(group / "cgroup.procs"),)
        assert (group / "memory.limit_in_bytes").read_text() == "1500"
        assert (group / "memory.memsw.limit_in_bytes").read_text() == "1500"
        raise KeyboardInterrupt
    assert not group.exists()


def test_groups_of_benchmarks_that_are_no_more_are_swept(fake_groups: Path) -> None:
    top = fake_groups / "sys/fs/cgroup/memory"
    for name in ("bmoe-bench-999999999-memory", f"bmoe-bench-{os.getppid()}-memory", "other-1-memory"):
        (top / name).mkdir()
    with confined(Limits(memory_bytes=1), root=str(fake_groups)):
        pass
    assert sorted(p.name for p in top.iterdir()) == [f"bmoe-bench-{os.getppid()}-memory", "other-1-memory"]


def test_a_cap_without_rights_is_refused_with_the_reasons(tmp_path: Path) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("")
    (tmp_path / "proc/self/mountinfo").write_text("")
    with (
        pytest.raises(
            UsageError, match=r"--mem-cap: no way to limit a process here: no memory control group"
        ),
        confined(Limits(memory_bytes=1), root=str(tmp_path)),
    ):
        pass
    with (
        pytest.raises(UsageError, match=r"--throttle: .*no block device is behind"),
        confined(Limits(drive_bytes_per_s=1, path=str(tmp_path)), root=str(tmp_path)),
    ):
        pass


def test_an_interrupted_benchmark_leaves_neither_process_nor_group(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    say = f"f = open({str(fifo)!r}, 'w'); print(os.getpid(), file=f, flush=True)"
    inner = f"import os, time; {say}; time.sleep(99)"
    outer = f"""
import signal, sys
from bmoe.bench.caps import Limits, confined
from bmoe.bench.process import run_process
from bmoe.io.errors import UsageError
signal.signal(signal.SIGINT, signal.default_int_handler)
try:
    with confined(Limits(memory_bytes=1 << 30)) as confinement:
        print(*confinement.joins, flush=True)
        run_process([sys.executable, "-c", {inner!r}], confinement=confinement, timeout_s=99)
except UsageError:
    print("refused", flush=True)
except KeyboardInterrupt:
    sys.exit(130)
"""
    process = subprocess.Popen(
        [sys.executable, "-c", outer],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert process.stdout is not None
    said = process.stdout.readline().strip()
    if said == "refused" or not said:
        process.wait()
        process.stdout.close()
        pytest.skip("control groups cannot be made here")
    with fifo.open() as file:
        pid = int(file.readline())
    assert str(pid) in Path(said).read_text()
    process.send_signal(signal.SIGINT)
    assert process.wait(30) == 130
    process.stdout.close()
    assert not Path(said).parent.exists()
    assert not os.path.exists(f"/proc/{pid}")


def test_a_process_that_takes_too_long_is_ended() -> None:
    with confined(Limits()) as free:
        done = run_process(["sleep", "99"], confinement=free, timeout_s=0.2)
        assert done.timed_out
        assert done.code == -signal.SIGKILL
        there = run_process(
            ["sh", "-c", "cat; echo no >&2; exit 3"], confinement=free, timeout_s=30, stdin="in"
        )
    assert (there.code, there.output, there.errors, there.timed_out) == (3, "in", "no\n", False)


def test_a_command_that_is_not_there_is_an_error_of_its_side() -> None:
    executor = Executor(paths=(__file__,), text="text")
    lost = side("x", kind="external", command="no-such-program {n}", pattern="(x)", cache_bytes=None)
    assert executor.execute(lost).error == "no-such-program: No such file or directory"
    deaf = dataclasses.replace(lost, command="echo {n}")
    assert executor.execute(deaf).error == "'(x)' finds no number in what it wrote"
    found = dataclasses.replace(lost, command="echo {n}", pattern="(.)")
    assert (executor.execute(found).figures or {})["decode_tok_per_s"] == 4.0


# --- the command -----------------------------------------------------------------------------------------


@pytest.fixture
def short_drive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(benchmark, "Executor", functools.partial(Executor, drive_seconds=0.05))


@pytest.mark.slow
@pytest.mark.usefixtures("short_drive")
def test_a_benchmark_from_end_to_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    record_path, tables, plot = tmp_path / "b.json", tmp_path / "b.md", tmp_path / "b.svg"
    model = tiny_moe("Q4_K", layers=2, experts=8, top_k=2)
    words = ["bench", "-m", model, "--sides", "overlap,resident-norepack", "--caches", "30%", "-n", "4"]
    words += ["-t", "1", "--rounds", "1", "--repeats", "0", "--settle", "0", "--validate-simulation"]
    words += ["--external", "echo=echo {n} tokens at 12.5 tok/s", "--external-pattern", r"([\d.]+) tok/s"]
    words += ["--json", str(record_path), "--markdown", str(tables), "--plot", str(plot)]
    assert main(words) == 0
    text = capsys.readouterr().out
    record = json.loads(record_path.read_text())
    jsonschema.validate(record, SCHEMA)
    rows = {row["side"]: row for row in record["rows"]}
    streamed = next(row for name, row in rows.items() if name.startswith("overlap"))
    for figure in (
        "decode_tok_per_s", "prefill_tok_per_s", "ttft_s", "load_s", "mib_per_token", "gib_per_s", "hit_rate",
        "cpu_s_per_token",
    ):  # fmt: skip
        assert streamed["figures"][figure]["median"] > 0, figure
    assert all(streamed["bounds"][name]["median"] > 0 for name in ("layered", "at_depth", "ideal"))
    assert rows["resident-norepack"]["figures"]["mib_per_token"] is None
    assert rows["echo"]["figures"]["decode_tok_per_s"]["median"] == 12.5
    assert record["baseline"] == "resident-norepack"
    assert {r["side"] for r in record["ratios"]} == {*rows} - {"drive", "resident-norepack"}
    (simulated,) = record["simulation"]
    # Sixteen lookups are too few for more: it replaces experts where the engine replaces slices.
    assert abs(simulated["predicted_hit_rate"] - simulated["measured_hit_rate"]) <= 0.5
    assert simulated["predicted_tok_per_s"] > 0
    assert tables.read_text() == text
    assert "| echo | 12.5 (12.5 to 12.5)" in text
    assert plot.read_bytes().startswith(b"<?xml")

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("it was measured already")

    monkeypatch.setattr("bmoe.bench.execute.run_process", refuse)
    assert main(words) == 0  # goes on from the record: nothing is left to do
    capsys.readouterr()
    words[words.index("-m") + 1] = tiny_moe("Q4_K")
    assert main(words) == 2
    assert "was measured with another model" in capsys.readouterr().err


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b"\xff",
        b'{"schema": 1, "tool": "bmoe bench"}',
        b'{"schema": 2, "tool": "bmoe bench"}',
    ],
)
def test_a_file_that_is_no_record_is_not_gone_on_from(
    content: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "b.json"
    path.write_bytes(content)
    assert main(["bench", "-m", tiny_moe("Q4_K"), "--json", str(path)]) == 1
    assert len(capsys.readouterr().err.splitlines()) == 1
    assert path.read_bytes() == content


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["-m", "{model}", "--sides", "fast"], "side 'fast' is not one of"),
        (["-m", "{model}", "--caches", "10x"], "'10x' is not a size"),
        (["-m", "{model}", "--caches", "0"], "out of range"),
        (["-m", "{model}", "--policies", "magic"], "magic"),
        (["-m", "{model}", "--backends", "tape"], "'tape' is not one of auto, uring, threads"),
        (["-m", "{model}", "--threads-list", "0"], "from 1 to 512"),
        (["-m", "{model}", "--throttle", "nan"], "is not GiB/s"),
        (["-m", "{model}", "--mem-cap", "1,x"], "'x' is not a size"),
        (["-m", "{model}", "--sides", "resident-capped"], "needs --mem-cap"),
        (["-m", "{model}", "--external", "x=y"], "expected one pattern"),
        (["-m", "{model}", "--baseline", "me"], "--baseline 'me' is not one of"),
        (["-m", "{model}", "--plot", "x.jpg"], ".png or .svg"),
        (["-m", "{model}", "--replay-routing", "{model}"], "route trace"),
        (["-m", "{model}", "--force-tokens", "/nowhere"], "/nowhere"),
        (["-m", "{model}", "--json", "/nowhere/x.json"], "/nowhere/x.json"),
        (["-m", "/nowhere"], "/nowhere"),
        ([], "missing option"),
    ],
)
def test_bad_input_is_one_line(words: list[str], error: str, capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["bench", *(word.format(model=tiny_moe("Q4_K")) for word in words)])
    captured = capsys.readouterr()
    assert code in {1, 2}
    assert captured.out == ""
    assert len(captured.err.splitlines()) == 1
    assert error in captured.err


def test_the_list_says_what_would_be_run(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["bench", "-m", tiny_moe("Q4_K"), "--list", "-t", "1", "--caches", "1,2GiB", "--sides", "overlap"]
    assert main(words) == 0
    assert capsys.readouterr().out.splitlines() == [
        "drive",
        "everything cached, 1 thread",
        "overlap, cache 1 MiB",
        "overlap, cache 2048 MiB",
    ]


@pytest.mark.parametrize("section", benchmark_table.SECTIONS, ids=lambda s: s.name)
def test_every_section_of_the_table_is_a_command_that_exists(section: benchmark_table.Section) -> None:
    trace = Path(__file__).parent / "data/route-smollm2-16x.csv"
    options = type("Options", (), {"models": Path("models"), "trace": trace, "go_trace": trace})
    words = benchmark_table.bench_words(section, options)  # type: ignore[arg-type]  # as argparse makes it
    assert words[0] == "bench"
    with bench.make_context("bench", words[1:]) as ctx:
        assert ctx.params["rounds"] >= 3


def test_the_standard_models_have_the_sizes_that_the_docs_say(tmp_path: Path) -> None:
    source = tiny_moe("Q4_K")  # its vocabulary of 259 instead of SmolLM2's
    assert models.planned_bytes(models.SET["q3s"], source) == pytest.approx(4.2e9, rel=0.05)
    assert models.planned_bytes(models.SET["q3"], source) == pytest.approx(16.9e9, rel=0.05)
    assert models.planned_bytes(models.SET["go"], source) == pytest.approx(10.3e9, rel=0.05)
    other = tmp_path / "q3s.gguf"
    other.write_bytes(b"GGUF")
    with pytest.raises(Exception, match="is another model; expected 4332090176, got 4"):
        models.write("q3s", tmp_path, source)
