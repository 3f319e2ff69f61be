"""Reports and comparisons: their figures against hand-computed ones, their intervals against known truths."""

from __future__ import annotations

import dataclasses
import json
import math
import re
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from bmoe.cli import main
from bmoe.io.errors import BmoeError, UsageError
from bmoe.logs import figures, html_report, words
from bmoe.logs.anomalies import find_anomalies
from bmoe.logs.bootstrap import LEAST_STEPS, Side, block_length, intervals
from bmoe.logs.compare import compare, pair_up
from bmoe.logs.report import as_record, report, window
from bmoe.logs.run_data import Run, find_run
from tests.logs_data import MIB, MS, SyntheticRun, database, loaded, noisy

if TYPE_CHECKING:
    from collections.abc import Callable

HOSTILE = "</script><script>alert(1)</script><!--\"'&{{data}}{{library}}\u2028<b>x</b>.gguf"
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
RECORDED = Path(__file__).resolve().parents[2] / "shared/data/token-metrics"
PNG = b"\x89PNG\r\n\x1a\n"


def run_of(**figures: Any) -> Run:
    [run] = loaded(SyntheticRun(**{"run_id": "a" * 32, "tokens": 128, **figures}))
    return run


def pair_of(base: dict[str, Any], other: dict[str, Any]) -> list[Run]:
    plain = {"tokens": 256}
    return loaded(
        SyntheticRun(**{**plain, "run_id": "a" * 32, **base}),
        SyntheticRun(**{**plain, "run_id": "b" * 32, **other}),
    )


def kinds(run: Run) -> list[str]:
    return [anomaly.kind for anomaly in find_anomalies(run)]


# --- one run ---


def test_speed_is_tokens_over_time_and_its_spread_that_of_the_tokens() -> None:
    """Walls of 10, 20, 30 and 40 ms: rates of 100, 50, 33.3 and 25 tok/s."""
    run = run_of(tokens=4, compute_ns=[8 * MS, 18 * MS, 28 * MS, 38 * MS], stall_ns=1 * MS, hook_ns=1 * MS)
    speed = report(run).speed
    assert speed.tokens == 4
    assert speed.wall_ns == 100 * MS
    assert speed.mean == pytest.approx(40)
    assert speed.mean_with_overhead == pytest.approx(4 / 0.103), "the first token has no overhead"
    assert speed.median == pytest.approx((50 + 1000 / 30) / 2)
    assert speed.p5 == pytest.approx(25 + 0.15 * (1000 / 30 - 25))
    assert speed.p95 == pytest.approx(50 + 0.85 * 50)
    assert report(run).warm_up is None


def test_time_parts_add_up_to_the_whole() -> None:
    run = run_of(compute_ns=30 * MS, stall_ns=15 * MS, hook_ns=4 * MS, overhead_ns=1 * MS, tokens=101)
    found = report(run)
    assert {part.name: part.ns_per_token for part in found.time} == pytest.approx(
        {"stall": 15 * MS, "hook": 4 * MS, "compute": 30 * MS, "overhead": 100 / 101 * MS}
    )
    assert sum(part.share for part in found.time) == pytest.approx(1)
    assert {b.name: b.of_wall for b in found.beside} == pytest.approx(
        {"experts": 0.5, "loop": 0.05, "io": 0.25, "cpu": 150 / 49}
    )


def test_what_parts_leave_of_the_whole_is_said() -> None:
    run = run_of(tokens=20)
    run.decode["compute_ns"][:] -= 5 * MS
    assert {part.name for part in report(run).time} == {"stall", "hook", "compute", "unaccounted", "overhead"}


def test_unmeasured_figures_are_none_and_not_zero() -> None:
    run = run_of(tokens=20)
    for name in ("lookups", "read_bytes", "stall_ns", "overhead_ns", "cpu_ns"):
        run.decode[name][:] = np.nan
    run.decode["major_faults"][3] = np.nan
    found = report(run)
    assert found.cache.hit_rate is None
    assert found.cache.read_bytes is None
    assert found.cache.major_faults is None, "a sum over some tokens is none over all"
    assert found.speed.mean_with_overhead is None
    assert "cpu" not in {b.name for b in found.beside}
    assert all(w.hit_rate is None and w.stall_share is None for w in found.windows)


def test_hits_over_time_are_those_of_each_window() -> None:
    run = run_of(tokens=64, hits=[0] * 32 + [90] * 32, lookups=[50] * 32 + [100] * 32)
    found = report(run)
    assert found.cache.hit_rate == pytest.approx(0.6)
    assert [(w.first, w.end, w.hit_rate) for w in found.windows] == [
        (i, i + 2, 0.0 if i < 32 else 0.9) for i in range(0, 64, 2)
    ]
    assert window(run.decode, 30, 34).hit_rate == pytest.approx(180 / 300)


def test_warm_up_sets_the_first_tokens_against_the_second_half() -> None:
    run = run_of(tokens=200, compute_ns=[90 * MS] * 50 + [40 * MS] * 150, stall_ns=8 * MS, hook_ns=2 * MS)
    warm = report(run).warm_up
    assert warm is not None
    assert (warm.first.first, warm.first.end) == (0, 32)
    assert warm.first.tokens_per_s == pytest.approx(10)
    assert (warm.steady.first, warm.steady.end) == (100, 200)
    assert warm.steady.tokens_per_s == pytest.approx(20)
    # 16 tokens of which k take 100 ms: (100 k + 50 (16 - k)) / 16 <= 55 from k = 1 on.
    assert warm.warm_after == 49


def test_memory_has_its_course_prompt_included() -> None:
    memory = {m.name: m for m in report(run_of(tokens=100)).memory}
    assert set(memory) == {"rss", "rss_anon", "rss_file", "mem_available", "cache_budget"}
    assert memory["rss"].samples == 13
    assert memory["rss"].first_bytes == 2000 * MIB
    assert memory["rss"].last_bytes == memory["rss"].most_bytes == 2024 * MIB
    assert memory["mem_available"].least_bytes == 3976 * MIB


def test_the_prompt_is_for_itself() -> None:
    found = report(run_of(tokens=10)).prefill
    assert found is not None
    assert (found.tokens, found.batches, found.wall_ns, found.read_bytes) == (16, 1, 800 * MS, 300 * MIB)
    assert found.tokens_per_s == pytest.approx(20)
    assert report(run_of(tokens=10)).load_ns == 1500 * MS


def test_a_run_without_tokens_is_refused_in_a_line() -> None:
    with pytest.raises(BmoeError, match=r"no decoded tokens: nothing to report; its log is incomplete$"):
        report(run_of(tokens=0, exit_code=None))


# --- signs ---


def test_a_plain_run_has_no_anomalies() -> None:
    assert kinds(run_of(tokens=400, compute_ns=noisy(5, 400, 40 * MS))) == []


@pytest.mark.parametrize(
    ("figures", "kind", "text"),
    [
        ({"exit_code": None}, "incomplete", "the log ends before the run did"),
        ({"exit_code": 130}, "failed", "exit code 130"),
        ({"config": {"traced": "every node"}}, "traced", "every node"),
        ({"config": {"lossy": "top-k 4 of 8"}}, "lossy", "top-k 4 of 8"),
        ({"config": {"io_fallback_reason": "no io_uring"}}, "fallback", "no io_uring"),
        ({"cache_budget_bytes": 200 * MIB}, "cache_below_cycle", "200 MiB, was smaller than"),
        ({"cache_budget_bytes": [512 * MIB] * 64 + [300 * MIB] * 64}, "cache_shrunk", "512 MiB to 300 MiB"),
        ({"swap_bytes": [100 * MIB] * 64 + [40 * MIB] * 64}, "swap", "60 MiB came back or was given up"),
        ({"major_faults": 20}, "steady_faults", "waited for 20 or more pages"),
        ({"compute_ns": [40 * MS] * 127 + [900 * MS]}, "slow_tokens", "1 token took more than 5 times"),
    ],
)  # fmt: skip
def test_a_sign_is_seen(figures: dict[str, Any], kind: str, text: str) -> None:
    found = find_anomalies(run_of(**figures))
    assert [a.kind for a in found] == [kind]
    assert text in found[0].text


def test_fault_bursts_are_located() -> None:
    faults = [2] * 128
    faults[40:43] = [500, 3, 700]
    faults[90] = 100
    [burst] = find_anomalies(run_of(major_faults=faults))
    assert burst.kind == "fault_bursts"
    assert burst.spans == ((40, 43), (90, 91))
    assert "2 bursts of page faults over 3 tokens, 1300 faults" in burst.text
    assert "the largest at tokens 40 to 42 with 1203" in burst.text


def rising(tokens: int, by: float, seed: int = 3) -> Any:
    """Compute that rises by this share from the middle on."""
    rng = np.random.default_rng(seed)
    level = np.where(np.arange(tokens) < tokens * 5 // 8, 1.0, 1.0 + by)
    return (40 * MS * level * np.exp(0.05 * rng.normal(size=tokens))).astype(np.int64)


def test_a_falling_clock_is_told_from_other_load_by_cpu_time() -> None:
    compute = rising(400, 0.25)
    [clock] = find_anomalies(run_of(tokens=400, compute_ns=compute, cpu_ns=compute * 4))
    [load] = find_anomalies(run_of(tokens=400, compute_ns=compute))
    assert clock.kind == load.kind == "falling_clock"
    assert "CPU time rose with it" in clock.text
    assert "other programs" in load.text
    assert kinds(run_of(tokens=400, compute_ns=rising(400, 0.0))) == []


def test_more_reads_are_no_falling_clock() -> None:
    """Compute that rises with reads, as memory is written to, is explained by them."""
    rng = np.random.default_rng(8)
    reads = (np.where(np.arange(400) < 250, 20, 60) * MIB * np.exp(0.3 * rng.normal(size=400))).astype(
        np.int64
    )
    compute = 40 * MS + reads * (10 * MS) // (20 * MIB)
    assert kinds(run_of(tokens=400, compute_ns=compute, read_bytes=reads)) == []


def test_missing_tokens_are_counted() -> None:
    run = run_of(tokens=50)
    run.decode["step"][30:] += 2
    assert [a.text for a in find_anomalies(run)] == ["2 decoded tokens are not in the log"]


# --- intervals ---


def correlated(rng: np.random.Generator, tokens: int, rho: float) -> Any:
    """[tokens] first-order autoregression of variance 1."""
    powers = rho ** np.arange(60)
    return np.convolve(rng.normal(size=tokens + 59), powers, mode="valid") * math.sqrt(1 - rho * rho)


@pytest.mark.parametrize(("tokens", "rho"), [(256, 0.0), (256, 0.5)])
def test_equal_runs_differ_in_about_one_of_twenty(tokens: int, rho: float) -> None:
    """200 pairs of runs that warm up alike; 4 to 18 are two standard errors about ten."""
    rng = np.random.default_rng(2024)
    ones, warm = np.ones(tokens), 1 + 2 * np.exp(-np.arange(tokens) / 20)
    false = 0
    for _ in range(200):
        a, b = (1e8 * warm * np.exp(0.2 * correlated(rng, tokens, rho)) for _ in range(2))
        [found] = intervals(Side(top=ones, bottom=a), Side(top=ones, bottom=b), ratio=True)
        false += found.excludes(1.0)
    assert 3 <= false <= 18


def test_an_interval_is_the_same_every_time_and_holds_its_estimate() -> None:
    rng = np.random.default_rng(1)
    a, b = (Side(top=np.ones(200), bottom=rng.gamma(9, size=200)) for _ in range(2))
    [first], [again] = (intervals(a, b, ratio=True) for _ in range(2))
    assert first == again
    assert first.low is not None
    assert first.high is not None
    assert first.low < first.estimate < first.high
    narrow, wide = intervals(a, b, ratio=True, levels=(0.95, 0.995))
    assert narrow == first
    assert wide.low is not None
    assert wide.low < first.low


def test_correlated_tokens_are_drawn_in_longer_blocks() -> None:
    rng = np.random.default_rng(4)
    assert block_length(rng.normal(size=512)) == 12, "the least"
    assert 24 <= block_length(correlated(rng, 512, 0.8)) <= 85
    assert block_length(np.full(512, 0.1)) == 12


def test_few_tokens_have_no_interval() -> None:
    side = Side(top=np.ones(LEAST_STEPS - 1), bottom=np.ones(LEAST_STEPS - 1))
    [found] = intervals(side, side, ratio=True)
    assert (found.estimate, found.low, found.high) == (1.0, None, None)


# --- several runs ---


def slowed(by: float) -> list[Run]:
    """Two runs of 500 equal tokens, of which one takes longer; both vary."""
    return pair_of(
        {"tokens": 500, "compute_ns": noisy(1, 500, 40 * MS)},
        {"tokens": 500, "compute_ns": (noisy(2, 500, 40 * MS) * (1 + by)).astype(np.int64)},
    )


def test_a_slowdown_of_five_percent_in_500_tokens_is_found() -> None:
    found = compare(slowed(50 * 0.05 / 40))  # of compute, which is 40 of 50 ms
    speed = found.pairs[0].differences[0]
    assert speed.shown
    assert speed.estimate == pytest.approx(1 / 1.05, abs=0.03)
    assert re.match(r"B against A: \d\.\d % slower \(95 %: ", found.pairs[0].headline)


def test_equal_runs_show_no_difference() -> None:
    found = compare(slowed(0))
    assert found.pairs[0].pairing.paired
    assert "no difference shown" in found.pairs[0].headline
    assert {d.verdict for d in found.pairs[0].differences} == {"no difference shown"}
    assert {d.shown for d in found.pairs[0].differences} == {False}


def test_figures_are_compared_over_the_paired_tokens() -> None:
    found = compare(
        pair_of(
            {"hits": 60, "read_bytes": 10 * MIB}, {"hits": 75, "read_bytes": 30 * MIB, "stall_ns": 9 * MS}
        )
    )
    by_name = {d.figure: d for d in found.pairs[0].differences}
    assert (by_name["hit rate"].base, by_name["hit rate"].other) == (60, 75)
    assert by_name["hit rate"].verdict == "15 points higher (95 %: 15 to 15)"
    assert by_name["read"].estimate == pytest.approx(3)
    assert by_name["read"].verdict == "200.0 % more (95 %: 200.0 to 200.0 %)"
    assert by_name["stall"].verdict == "1 ms/token more (95 %: 1 to 1)"
    assert by_name["speed"].estimate == pytest.approx(50 / 51)


def test_a_figure_only_one_run_has_is_not_compared() -> None:
    runs = pair_of({}, {})
    runs[1].decode["cpu_ns"][7] = np.nan
    assert "cpu" not in {d.figure for d in compare(runs).pairs[0].differences}


def test_settings_that_differ_come_first_and_flat() -> None:
    runs = pair_of(
        {"config": {"policy": "lru", "deep": {"a": [1, 2], "b": 1}}},
        {"config": {"deep": {"a": [1, 3], "b": 1}, "cache_arithmetic": "words"}, "machine": {"cpus": 16}},
    )
    assert {s.name: s.values for s in compare(runs).settings} == {
        "config.policy": ("lru", "aged"),
        "config.deep.a": ([1, 2], [1, 3]),
        "machine.cpus": (8, 16),
    }
    same = words.comparison_tables(compare(pair_of({}, {})))[0]
    assert same.rows[0][0] == "nothing that the logs tell"


@pytest.mark.parametrize(
    ("other", "paired", "tokens", "reason"),
    [
        ({}, True, 256, None),
        ({"token_ids": [*range(1000, 1200), *range(56)]}, True, 200, None),
        ({"token_ids": [*range(1000, 1100), *range(156)]}, False, 256, "the texts part after 100 tokens"),
        ({"prompt": "another"}, False, 256, "the prompts differ"),
        ({"config": {"model_name": "Other"}}, False, 256, "the models differ"),
        ({"tokens": 150}, True, 150, None),
    ],
)
def test_tokens_are_paired_only_where_they_agree(
    other: dict[str, Any], paired: bool, tokens: int, reason: str | None
) -> None:
    a, b = pair_of({}, other)
    found = pair_up(a, b)
    assert (found.paired, found.tokens, found.reason) == (paired, tokens, reason)
    assert found.base_left_out == 256 - tokens
    assert found.other_left_out == b.decode.count - tokens


def test_first_tokens_can_be_left_out() -> None:
    runs = pair_of(
        {"compute_ns": [400 * MS] * 50 + [40 * MS] * 206}, {"compute_ns": [900 * MS] * 50 + [40 * MS] * 206}
    )
    assert compare(runs).pairs[0].differences[0].estimate == pytest.approx(30.8 / 55.8, abs=1e-3)
    skipped = compare(runs, skip_tokens=50)
    assert skipped.pairs[0].pairing.tokens == 206
    assert skipped.pairs[0].differences[0].verdict == "no difference shown"
    with pytest.raises(BmoeError, match="no decoded tokens after 256 left out"):
        compare(runs, skip_tokens=256)


def test_many_comparisons_are_said_to_be_many() -> None:
    base = SyntheticRun(run_id="a" * 32, tokens=256, compute_ns=noisy(1, 256, 40 * MS))
    others = [
        dataclasses.replace(base, run_id=c * 32, compute_ns=noisy(ord(c), 256, 40 * MS)) for c in "bcdef"
    ]
    found = compare(loaded(base, *others))
    assert [r["letter"] for r in found.runs] == list("ABCDEF")
    assert any(
        re.match(r"\d\d intervals at 95 %: about \d\.\d would show a difference by chance", n)
        for n in found.notes
    )
    assert any("not from run to run" in note for note in found.notes)
    for pair in found.pairs:
        assert all(d.shown for d in pair.differences if d.corrected)


def test_traced_and_incomplete_runs_are_named_in_a_comparison() -> None:
    notes = compare(pair_of({"config": {"traced": "layers"}}, {"exit_code": None})).notes
    assert any(n.startswith("A was traced") for n in notes)
    assert any(n.startswith("B's log ends before") for n in notes)


def test_a_run_is_not_compared_with_itself() -> None:
    [run] = loaded(SyntheticRun(run_id="a" * 32, tokens=40))
    with pytest.raises(UsageError, match="was given twice"):
        compare([run, run])


def test_records_are_json_without_infinities() -> None:
    runs = pair_of({"tokens": 5, "lookups": 0, "hits": 0, "exit_code": None}, {"tokens": 5})
    for record in (as_record(report(runs[0])), dataclasses.asdict(compare(runs))):
        json.dumps(record, allow_nan=False)


# --- which run ---


def test_a_run_is_found_by_what_names_it_alone() -> None:
    ids = ["ab" + "0" * 30, "abc" + "0" * 29, "def" + "0" * 29]
    runs = [
        SyntheticRun(run_id=i, tokens=4, started=f"2026-11-30T1{n}:00:00.000000Z") for n, i in enumerate(ids)
    ]
    with database(*runs) as store:
        assert find_run(store, "def") == find_run(store, "last") == ids[2]
        assert find_run(store, "last~2") == ids[0]
        assert find_run(store, "abc") == ids[1]
        for word, message in (
            ("abd", "there is no run 'abd'"),
            ("d", "there is no run 'd'"),
            ("last~3", r"there is no run last~3: the database has 3"),
            ("last~x", r"'last~x' is not last or last~N"),
            ("'; DROP TABLE runs; --", "there is no run"),
        ):
            with pytest.raises(UsageError, match=message):
                find_run(store, word)
    twins = [dataclasses.replace(run, run_id="abc" + f"{n}" * 29) for n, run in enumerate(runs)]
    with (
        database(*twins) as store,
        pytest.raises(UsageError, match="'abc' begins more than one run: abc0000"),
    ):
        find_run(store, "abc")


# --- the command line ---


@pytest.fixture
def logs(tmp_path: Path) -> Callable[..., str]:
    def write(name: str, *runs: SyntheticRun) -> str:
        path = tmp_path / name
        path.write_text("".join(f"{line}\n" for run in runs for line in run.lines()), encoding="utf-8")
        return str(path)

    return write


def test_a_file_is_reported_on_without_a_database(
    logs: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    path = logs("a.jsonl", SyntheticRun(run_id="a" * 32, tokens=128, swap_bytes=5 * MIB))
    assert main(["logs", "report", path]) == 0
    text = capsys.readouterr().out
    assert re.search(r"mean, tokens over time +20\.00 tok/s", text)
    assert re.search(r"compute +40\.00 ms +78\.\d %", text)
    assert "note: up to 5.0 MiB of the process was in swap" in text
    assert main(["logs", "report", path, "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["speed"]["mean"] == pytest.approx(20)
    assert record["run"]["run_id"] == "a" * 32
    assert main(["logs", "show", path]) == 0
    assert re.search(
        r"config.*\n.*\npolicy", capsys.readouterr().out.replace("configuration", "config"), re.DOTALL
    )


def test_runs_are_compared_on_the_command_line(
    logs: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    a = logs("a.jsonl", SyntheticRun(run_id="a" * 32, tokens=64))
    b = logs("b.jsonl", SyntheticRun(run_id="b" * 32, tokens=64, compute_ns=50 * MS, config={"threads": 2}))
    assert main(["logs", "compare", a, b]) == 0
    text = capsys.readouterr().out
    assert "B against A: 16.7 % slower (95 %: 16.7 to 16.7 %), 16.7 against 20 tok/s" in text
    assert re.search(r"config\.threads +4 +2", text)
    assert text.index("set differently") < text.index("the same tokens, paired")
    assert main(["logs", "compare", a, b, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["pairs"][0]["pairing"]["paired"] is True


def test_bad_input_is_one_line(
    logs: Callable[..., str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    two = logs("two.jsonl", *(SyntheticRun(run_id=c * 32, tokens=4) for c in "ab"))
    empty = logs("empty.jsonl", SyntheticRun(run_id="c" * 32, tokens=0))
    nothing = logs("nothing.jsonl")
    here = str(tmp_path / "none.duckdb")
    for argv, code, message in (
        (["report", two], 2, "holds 2 runs"),
        (["report", empty], 1, "no decoded tokens"),
        (["report", nothing], 1, "holds no run"),
        (["report", str(tmp_path / "absent.jsonl")], 2, "there is no such log file"),
        (["report", "last", "--db", here], 1, "there is no database of logs"),
        (["compare", empty], 2, "2 to 26 runs"),
        (["compare", empty, empty, "--skip", "x"], 2, "'x' is not a whole number"),
        (["report"], 2, "missing argument"),
    ):
        assert main(["logs", *argv]) == code, argv
        shown = capsys.readouterr()
        assert shown.out == ""
        assert shown.err.count("\n") == 1, shown.err
        assert message in shown.err


def test_a_report_does_not_replace_its_log(
    logs: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    path = logs("a.jsonl", SyntheticRun(run_id="a" * 32, tokens=20))
    before = Path(path).read_bytes()
    assert main(["logs", "report", path, "--html", path]) == 2
    assert "would replace it" in capsys.readouterr().err
    assert Path(path).read_bytes() == before
    assert main(["logs", "report", path, "--html", f"{path}/no/page.html"]) == 1
    assert capsys.readouterr().err.count("\n") == 1


def test_names_reach_a_terminal_harmless(
    logs: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    evil = "m\x1b[31m\nodel"
    path = logs(
        "a.jsonl", SyntheticRun(run_id="a" * 32, tokens=20, config={"model_name": evil, "policy": evil})
    )
    for command in ("show", "report"):
        assert main(["logs", command, path]) == 0
        assert "\x1b" not in capsys.readouterr().out


def test_pictures_are_written(logs: Callable[..., str], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    a = logs("a.jsonl", SyntheticRun(run_id="a" * 32, tokens=40, layers=3))
    b = logs("b.jsonl", SyntheticRun(run_id="b" * 32, tokens=30))
    assert main(["logs", "report", a, "--json", "--png", str(tmp_path / "one")]) == 0
    assert main(["logs", "compare", a, b, "--json", "--png", str(tmp_path / "two")]) == 0
    one, two = ({p.stem for p in (tmp_path / d).iterdir()} for d in ("one", "two"))
    assert one == {"speed", "time", "hits", "reads", "memory", "latency", "layer_misses", "layer_stall"}
    assert two == {"intervals_b", "speeds", "hits", "reads"}
    assert all(p.read_bytes().startswith(PNG) for p in (tmp_path / "one").iterdir())


# --- the page ---


def data_of(page: str) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert found is not None
    data: dict[str, Any] = json.loads(found[1])
    return data


@pytest.fixture
def hostile() -> list[Run]:
    config = {"model_name": HOSTILE, "policy": HOSTILE, HOSTILE: HOSTILE, "traced": HOSTILE}
    return pair_of(
        {"config": config, "layers": 4, "compute_ns": noisy(1, 256, 40 * MS)},
        {"config": {**config, HOSTILE: "other"}, "compute_ns": noisy(2, 256, 44 * MS), "exit_code": None},
    )


@pytest.fixture
def pages(hostile: list[Run]) -> list[str]:
    pytest.importorskip("plotly")
    return [
        html_report.report_page(hostile[0], report(hostile[0])),
        html_report.comparison_page(hostile, compare(hostile)),
    ]


def test_a_hostile_name_stays_a_name(pages: list[str]) -> None:
    for page in pages:
        assert page.count("<script") == 3
        assert "alert(1)</script>" not in page
        assert len(re.findall(r"<title>[^<]*</title>", page)) == 1
        assert HOSTILE in json.dumps(data_of(page)["tables"], ensure_ascii=False).replace('\\"', '"')
        assert "alert" not in json.dumps(data_of(page)["plots"]), "plotly reads markup in its texts"
        assert len(page) < 2_500_000


def test_the_page_may_not_ask_any_network(pages: list[str]) -> None:
    for page in pages:
        assert re.search(r"http-equiv=\"Content-Security-Policy\" content=\"default-src 'none';", page)
        assert not re.search(r"(?:src|href|action)=\"(?!data:)", page)
        assert not re.search(r"https?://", page), "the library is compressed"
        assert "sendChartToCloud" not in page
        assert "modeBarButtons: [[" in page, "only the buttons named here"


def test_tiles_say_the_right_numbers() -> None:
    run = run_of(tokens=100, compute_ns=40 * MS, stall_ns=8 * MS, hook_ns=2 * MS)
    tiles = {tile.label: (tile.value, tile.meaning) for tile in words.tiles(report(run))}
    assert tiles == {
        "speed": ("20.00 tok/s", "100 tokens in 5.0 s"),
        "median": ("20.00 tok/s", "p5 20.00, p95 20.00"),
        "hits": ("80.0 %", "of the experts looked up"),
        "read": ("20.0 MiB", "per token"),
        "stall": ("15.7 %", "8.00 ms per token"),
        "memory": ("2024 MiB", "resident at most"),
        "prompt": ("20.00 tok/s", "16 tokens in 0.8 s"),
        "load": ("1.5 s", "until ready"),
    }


def test_long_runs_are_thinned_out() -> None:
    run = run_of(tokens=9001, layers=1)
    plots = {plot.name: plot for plot in figures.report_plots(run)}
    assert all(len(curve.x) <= 4000 for plot in plots.values() for curve in plot.curves)
    assert len(plots["layer_stall"].grid[0]) == 240
    assert plots["time"].curves[0].y == pytest.approx([40.0] * len(plots["time"].curves[0].y))


# Somebody at the keyboard: zooms into the plot of all tokens, shows all again, and opens its table.
USER = """<script>
(async () => {
  while (!document.body.dataset.ready) await new Promise(done => setTimeout(done, 50));
  const plot = document.querySelector("#plot-speed, #plot-speeds"), seen = [];
  const look = () => seen.push(plot._fullLayout.xaxis.range.map(Math.round).join(" to "));
  look();
  for (const key of ["+", "ArrowRight", "0"]) {
    plot.dispatchEvent(new KeyboardEvent("keydown", { key }));
    await new Promise(done => setTimeout(done, 50));
    look();
  }
  const more = plot.parentElement.querySelector("details"); more.open = true;
  await new Promise(done => setTimeout(done, 50));
  document.body.dataset.ranges = seen.join("; ");
  document.body.dataset.rows = more.querySelectorAll("tbody tr").length;
})();
</script>"""


def browse(path: Path, *options: str, fragment: str = "") -> subprocess.CompletedProcess[str]:
    assert CHROMIUM is not None
    command = [
        CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={path.parent / 'profile'}",
        "--virtual-time-budget=10000", "--enable-logging=stderr", *options, f"file://{path}#{fragment}",
    ]  # fmt: skip
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="no chromium here")
def test_a_browser_shows_the_pages_without_errors(pages: list[str], tmp_path: Path) -> None:
    for page, theme, plots in ((pages[0], "dark", 8), (pages[1], "light", 4)):
        path = tmp_path / "page.html"
        path.write_text(page.replace("</body>", f"{USER}</body>"), encoding="utf-8")
        done = browse(path, "--dump-dom", fragment=f"theme={theme}")
        body = re.search(r"<body[^>]*>", done.stdout)
        assert body is not None
        for state in ('data-errors="0"', 'data-refused="0"', 'data-requests="0"', 'data-ready="1"'):
            assert state in body[0], (state, body[0])
        assert "CONSOLE" not in done.stderr
        assert f'data-theme="{theme}"' in done.stdout
        assert done.stdout.count('class="main-svg"') >= plots
        assert (
            len(re.findall(r'<div class="plot[^>]* tabindex="0"[^>]* role="application"', done.stdout))
            == plots
        )
        assert 'data-ranges="0 to 255; 26 to 230; 46 to 250; 0 to 255"' in body[0], body[0]
        assert re.search(r'data-rows="1[0-9]{2}"', body[0]), body[0]
        for tile in data_of(page)["tiles"]:
            assert f"<b>{tile['value']}</b>" in done.stdout
        for table in data_of(page)["tables"]:
            assert f"<h2>{table['title']}</h2>" in done.stdout
        assert "<b>x</b>" not in re.sub(r"<script.*?</script>", "", done.stdout, flags=re.DOTALL)


@pytest.mark.skipif(not RECORDED.exists(), reason="no recorded metrics here")
@pytest.mark.parametrize(
    ("name", "mean", "hits", "read_mib"),
    [
        ("qwen_k6", 4.168, 0.800, 35205.0),
        ("pc-D-t8", 6.143, 0.893, 11426.4),
        ("pc-I-c5000-overlap", 5.137, 0.835, 20555.8),
    ],
)
def test_recorded_runs_give_what_their_summaries_state(
    name: str, mean: float, hits: float, read_mib: float, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["logs", "report", str(RECORDED / f"{name}.csv"), "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["speed"]["tokens"] == 256
    assert record["speed"]["mean"] == pytest.approx(mean, abs=6e-4)
    assert record["cache"]["cumulative_hit_rate"] == pytest.approx(hits, abs=6e-4)
    assert record["cache"]["read_bytes"] * 256 / MIB == pytest.approx(read_mib, abs=0.06)


@pytest.mark.skipif(not RECORDED.exists(), reason="no recorded metrics here")
def test_recorded_runs_are_compared_unpaired(capsys: pytest.CaptureFixture[str]) -> None:
    files = [str(RECORDED / f"{name}.csv") for name in ("pc-D-t8", "pc-I-c5000-overlap")]
    assert main(["logs", "compare", *files, "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["pairs"][0]["pairing"]["paired"] is False
    assert record["pairs"][0]["differences"][0]["estimate"] == pytest.approx(5.137 / 6.143, abs=1e-3)
    assert {s["name"] for s in record["settings"]} >= {"config.threads", "config.overlap"}
