"""`bmoe route` from its command line: forms, schemas, exit codes, one line per error."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import TYPE_CHECKING

import jsonschema
import pytest

from bmoe.cli import main
from tests.route_oracle import MIB, Cell, text_of
from tests.test_cli import Outcome

if TYPE_CHECKING:
    from collections.abc import Callable

SCHEMAS = Path(__file__).parent.parent / "docs" / "schema"
CELLS = [
    *[Cell(step=s, layer=la, experts=(s, 7), phase=0) for la in (0, 1) for s in range(3)],
    *[
        Cell(step=3 + s, layer=la, experts=(s % 3, 4 + s % 4), residency=(int(s > 2), 0))
        for s in range(8)
        for la in (0, 1)
    ],
]


@pytest.fixture
def path(tmp_path: Path) -> str:
    target = tmp_path / "t.route.csv"
    target.write_text(text_of(CELLS, {0: MIB, 1: MIB}))
    return str(target)


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str]) -> Callable[..., Outcome]:
    def run(*words: str) -> Outcome:
        code = main(("route", *words))
        return Outcome(code, *capfd.readouterr())

    return run


def valid(text: str, schema: str) -> dict[str, object]:
    record: dict[str, object] = json.loads(text)
    definition = json.loads((SCHEMAS / schema).read_text())
    jsonschema.Draft202012Validator.check_schema(definition)
    jsonschema.Draft202012Validator(definition).validate(record)
    return record


@pytest.mark.parametrize(
    "words",
    [
        ("analyze", "--view", "all"),
        ("analyze", "--phase", "prefill", "--layers", "1", "--steps", "0:2"),
        ("replay", "--budgets", "2,4:12:4", "--bandwidth", "100", "--compute-ms", "10", "--validate", "4"),
        ("drop",),
        ("predict", "--at", "3"),
    ],
)
def test_reports_come_as_text_json_and_csv(
    run: Callable[..., Outcome], path: str, words: tuple[str, ...]
) -> None:
    text = run(*words, path)
    assert (text.code, text.err) == (0, "")
    assert text.out.startswith(f"{path}: m.gguf, ")
    record = valid(run(*words, path, "--json").out, "route.v1.schema.json")
    assert record["tool"] == f"bmoe route {words[0]}"
    tables = run(*words, path, "--csv").out.split("\n\n")
    first = [line for line in tables[0].splitlines() if not line.startswith("#")]
    widths = {len(row) for row in csv.reader(io.StringIO("\n".join(first)))}
    assert len(widths) == 1
    assert len(tables) == len(record["tables"])  # type: ignore[arg-type]  # the schema says an array


def test_replay_is_csv_with_the_references_columns_first(run: Callable[..., Outcome], path: str) -> None:
    lines = run("replay", path, "--csv", "--budgets", "4", "--policies", "lru,belady").out.splitlines()
    assert lines[0].startswith("budget_mib,policy,hit_pct_cum,hit_pct_decode,read_mib")
    assert [line.split(",")[:2] for line in lines[1:]] == [["4", "lru"], ["4", "belady"]]


def test_several_traces_are_replayed_one_after_the_other(run: Callable[..., Outcome], path: str) -> None:
    outcome = run("replay", path, path, "--budgets", "4", "--policies", "lru")
    assert outcome.out.count("decode hits in % by budget in MiB") == 2


def test_what_was_odd_goes_to_standard_error(run: Callable[..., Outcome], path: str) -> None:
    with open(path, "a", encoding="utf-8") as file:
        file.write("0,1,9")
    outcome = run("analyze", path, "--view", "sanity", "--json")
    assert outcome.code == 0
    assert outcome.err == "note: line 50 has no end, so the file was cut there: it is left out\n"
    assert valid(outcome.out, "route.v1.schema.json")["notes"]


def test_a_warm_set_is_written(run: Callable[..., Outcome], path: str, tmp_path: Path) -> None:
    target = tmp_path / "warm.json"
    outcome = run("warmset", path, "--budget", "4", "-o", str(target))
    assert (outcome.code, outcome.out) == (
        0,
        f"{target}: 4 experts, 4.0 MiB, 37.5 % of the traces' decoded routings\n",
    )
    assert valid(target.read_text(), "warmset.v1.schema.json")["size_bytes"] == 4 * MIB


def test_a_page_is_written(run: Callable[..., Outcome], path: str, tmp_path: Path) -> None:
    target = tmp_path / "t.html"
    outcome = run("html", path, "-o", str(target))
    assert outcome.code == 0
    assert outcome.out == f"{target}: 0.0 MiB, 44 routings\n"
    assert target.read_text().startswith("<!doctype html>")


def test_pictures_are_written_or_the_cure_is_named(
    run: Callable[..., Outcome], path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    outcome = run("analyze", path, "--plot", str(tmp_path / "p"))
    assert outcome.code == 0
    names = sorted(p.name for p in (tmp_path / "p").iterdir())
    assert names == ["coverage.png", "misses.png", "overlap.png", "reuse.png", "workset.png"]
    assert all((tmp_path / "p" / name).read_bytes()[:4] == b"\x89PNG" for name in names)
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    assert (
        run("analyze", path, "--plot", str(tmp_path / "q")).error
        == "pictures need matplotlib (pip install 'bmoe[plot]')"
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("analyze", "{}", "--steps", "5:3"), "span '5:3' holds nothing"),
        (("analyze", "{}", "--layers", "x"), "span 'x' is not"),
        (("analyze", "{}", "--steps", "900:"), "no routing is in decode, steps 900:"),
        (("analyze", "{}", "--view", "hotter"), "view 'hotter' is not one of"),
        (("analyze", "{}", "--json", "--csv"), "--json and --csv exclude each other"),
        (("analyze", "{}", "--max-steps", "0"), "is not a whole number from 1"),
        (("replay", "{}", "--budgets", "1:2"), "'1:2' is not N or FIRST:LAST:STEP"),
        (("replay", "{}", "--budgets", "1:99999:1"), "with at most 1000 steps"),
        (("replay", "{}", "--budgets", "0"), "'0' is not a whole number from 1"),
        (("replay", "{}", "--policies", "fifo"), "policy 'fifo' is not one of belady"),
        (("replay", "{}", "--bandwidth", "100"), "--bandwidth and --compute-ms go together"),
        (("replay", "{}", "--bandwidth", "nan", "--compute-ms", "1"), "'nan' is not a positive number"),
        (("replay", "{}", "{}", "--json"), "--json takes one trace"),
        (("replay",), "missing argument 'TRACE...'"),
        (("drop", "{}", "--fraction", "-1"), "'-1' is not a positive number"),
        (("warmset", "{}", "-o", "x"), "missing option '--budget'"),
    ],
)
def test_a_wrong_request_is_one_line_and_exit_2(
    run: Callable[..., Outcome], path: str, words: tuple[str, ...], message: str
) -> None:
    outcome = run(*(word.format(path) for word in words))
    assert outcome.code == 2
    assert message in outcome.error
    assert outcome.out == ""


@pytest.mark.parametrize("command", ["analyze", "replay", "drop", "predict"])
def test_a_broken_trace_is_one_line_and_exit_1(
    run: Callable[..., Outcome], tmp_path: Path, command: str
) -> None:
    bad = tmp_path / "bad\nname.csv"
    bad.write_text("# route_trace v1\nturn,phase,step,layer,slot,expert\n0,1,0,0,0,zebra\n")
    outcome = run(command, str(bad))
    assert outcome.code == 1
    assert ":3, expert: is not a whole number from 0 to 999999; got 'zebra'" in outcome.error


def test_a_replay_without_sizes_says_what_is_missing(run: Callable[..., Outcome], tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("turn,phase,step,layer,slot,expert\n0,1,0,0,0,1\n")
    outcome = run("replay", str(tmp_path / "t.csv"))
    assert outcome.code == 1
    assert "the size of an expert is not known for layer 0" in outcome.error


def test_a_prompt_alone_can_be_looked_at(run: Callable[..., Outcome], tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text(text_of(CELLS[:6], {0: MIB, 1: MIB}))
    for command in (("analyze", "--view", "all"), ("replay", "--budgets", "4"), ("drop",)):
        assert run(*command, str(tmp_path / "t.csv")).code == 0
    assert run("html", str(tmp_path / "t.csv"), "-o", str(tmp_path / "t.html")).code == 0
    assert "has no decoded token" in run("predict", str(tmp_path / "t.csv")).error
