"""Views, dropping, prediction, warm sets and metrics of small traces, as literal tables."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING

import numpy as np
import pytest

from bmoe.io.errors import FileError, FormatError, UsageError
from bmoe.route import Report, RouteTrace, Table, read_trace
from bmoe.route.analyze import VIEWS, ViewOptions, analyze, chosen_views
from bmoe.route.drop import drop
from bmoe.route.metrics import read_metrics
from bmoe.route.predict import predict
from bmoe.route.report import as_csv, as_json, as_text
from bmoe.route.warmset import as_json as warm_json
from bmoe.route.warmset import warm_set, write_whole
from tests.route_oracle import MIB, RECORDED, Cell, text_of

if TYPE_CHECKING:
    from pathlib import Path

    from bmoe.route.report import Value

SIZES = {0: MIB, 3: 2 * MIB}
# Layer 0 repeats one expert; layer 3 (1 and 2 are dense) never does, until step 3 brings step 0 back.
CELLS = [
    Cell(step=s, layer=layer, experts=experts, weights=(0.75, 0.25), residency=residency)
    for s, row in enumerate(
        [
            (((1, 2), (0, 0)), ((0, 1), (0, 0))),
            (((1, 3), (1, 0)), ((2, 3), (0, 0))),
            (((1, 2), (1, 2)), ((4, 5), (0, 0))),
            (((1, 3), (1, 1)), ((0, 1), (1, 0))),
        ]
    )
    for layer, (experts, residency) in zip((0, 3), row, strict=True)
]


@pytest.fixture
def trace(tmp_path: Path) -> RouteTrace:
    return written(tmp_path / "t.csv", text_of(CELLS, SIZES))


def written(path: Path, text: str) -> RouteTrace:
    path.write_text(text)
    return read_trace(str(path))


def rows(trace: RouteTrace, view: str, nth: int = 0) -> list[tuple[Value, ...]]:
    return list(VIEWS[view](trace, ViewOptions())[nth].rows)


def test_hot_ranks_experts_and_adds_up_their_use(trace: RouteTrace) -> None:
    assert rows(trace, "hot")[:3] == [(0, 1, 4, 100.0, 25.0), (0, 2, 2, 50.0, 37.5), (0, 3, 2, 50.0, 50.0)]
    assert rows(trace, "hot", 1) == [
        (1, 100 / 16, 25.0),
        (2, 200 / 16, 37.5),
        (5, 500 / 16, 75.0),
        (10, 1000 / 16, 100.0),
        (16, 100.0, 100.0),
    ]
    assert rows(trace, "hot", 2) == [(0, 3, 50.0, 75.0, 1, 3), (3, 6, 25.0, 50.0, 2, 6)]


def test_reuse_counts_steps_between_uses(trace: RouteTrace) -> None:
    assert rows(trace, "reuse") == [
        ("all", 7, 2.0, 3.0, 3, 4, 400 / 9),
        ("0", 5, 1.0, 2.0, 2, 0, 0.0),
        ("3", 2, 3.0, 3.0, 3, 4, 400 / 6),
    ]


def test_overlap_is_the_share_in_common_with_earlier_steps(trace: RouteTrace) -> None:
    (_, lag1, lag2, lag4, lag8), (_, *layer0), (_, *layer3) = rows(trace, "overlap")
    assert (lag1, lag2) == (25.0, 50.0)
    assert layer0[:2] == [50.0, 100.0]
    assert layer3[:2] == [0.0, 0.0]
    assert all(isinstance(v, float) and math.isnan(v) for v in (lag4, lag8))


def test_overlap_does_not_reach_into_another_turn(tmp_path: Path) -> None:
    cells = [Cell(step=s, layer=0, experts=(1, 2), turn=s // 2) for s in range(4)]
    [table] = VIEWS["overlap"](written(tmp_path / "t.csv", text_of(cells, {0: 1})), ViewOptions())
    assert table.rows[0][1] == 100.0
    assert math.isnan(float(str(table.rows[0][2])))


def test_workset_counts_what_the_first_steps_touch(trace: RouteTrace) -> None:
    assert rows(trace, "workset") == [(1, 4, 25.0, 6.0), (2, 7, 43.75, 11.0), (4, 9, 56.25, 15.0)]


def test_cache_shares_are_as_recorded(trace: RouteTrace) -> None:
    assert rows(trace, "cache") == [
        ("all", 16, 62.5, 31.25, 6.25),
        ("0", 8, 37.5, 50.0, 12.5),
        ("3", 8, 87.5, 12.5, 0.0),
    ]
    assert rows(trace, "cache", 1) == [(0, 8, 50.0, 50.0, 0.0), (1, 8, 75.0, 12.5, 12.5)]


def test_entropy_is_in_bits(trace: RouteTrace) -> None:
    bits = -(0.75 * math.log2(0.75) + 0.25 * math.log2(0.25))
    every, layer0, layer3 = rows(trace, "entropy")
    assert every[1:3] == pytest.approx((bits, 75.0))
    assert layer0[3] == pytest.approx(1.5)
    assert layer3[3] == pytest.approx(2.5)


def test_unknown_weights_are_left_out_of_the_entropy(tmp_path: Path) -> None:
    cells = [
        Cell(step=0, layer=0, experts=(1, 2), weights=(math.nan, 0.5)),
        Cell(step=1, layer=0, experts=(1, 2)),
    ]
    assert rows(written(tmp_path / "t.csv", text_of(cells, {0: 1})), "entropy")[0][1:3] == (1.0, 50.0)
    cells = cells[:1]
    unknown = rows(written(tmp_path / "t.csv", text_of(cells, {0: 1})), "entropy")[0][1:3]
    assert all(isinstance(v, float) and math.isnan(v) for v in unknown)


def test_bytes_are_per_layer_and_step(trace: RouteTrace) -> None:
    assert rows(trace, "bytes") == [
        ("sum", 4.25, None, None, None, 30.0),
        ("0", 0.75, 0.5, 2.0, 1.0, 10.0),
        ("3", 3.5, 4.0, 4.0, 2.0, 20.0),
    ]


def test_bytes_follow_from_residency_where_no_row_tells_them(tmp_path: Path, trace: RouteTrace) -> None:
    lines = [
        ",".join(line.split(",")[:8]) if line[0] != "#" else line
        for line in text_of(CELLS, SIZES).splitlines()
    ]
    assert rows(written(tmp_path / "u.csv", "\n".join(lines) + "\n"), "bytes") == rows(trace, "bytes")


def test_sanity_counts_what_is_odd(tmp_path: Path) -> None:
    cells = [
        Cell(step=0, layer=0, experts=(1, 2), phase=0),
        Cell(step=1, layer=0, experts=(1, 1), phase=0),
        Cell(step=1, layer=1, experts=(3, 4), phase=0, dropped=(0, 1)),
        Cell(step=2, layer=0, experts=(1, 2)),
        Cell(step=2, layer=1, experts=(1, 2, 3), weights=(0.5, 0.25, 0.5)),
    ]
    trace = written(tmp_path / "t.csv", text_of(cells, {0: 1, 1: 1}))
    facts = {str(what): value for what, value in rows(trace, "sanity")}
    assert facts["experts per cell"] == "2 in 4, 3 in 1"
    assert facts["experts twice in a cell"] == "1"
    assert facts["rows dropped"] == "1"
    assert facts["sum of a cell's weights"] == "1 to 1.25, mean 1.05"
    assert facts["steps"] == "0 to 2"
    assert rows(trace, "sanity", 1) == [("prefill", 0, 2, 1)]


def test_the_matrix_marks_what_repeats(trace: RouteTrace) -> None:
    [table] = VIEWS["matrix"](trace, ViewOptions())
    assert table.text == [
        "  step  L0    L3",
        "     0  1 2   0 1",
        "     1  1* 3  2 3",
        "     2  1* 2  4 5",
        "     3  1* 3  0 1",
    ]
    assert table.rows[2] == (0, 1, 1, 0, [1, 3], [1, 0], [0.75, 0.25], [1, 0], MIB)


@pytest.mark.parametrize(
    ("content", "first"), [("weights", "75 25"), ("mib", "2.0"), ("hit", "xx"), ("experts", "1 2")]
)
def test_the_matrix_shows_other_things_too(trace: RouteTrace, content: str, first: str) -> None:
    [table] = VIEWS["matrix"](trace, ViewOptions(content=content))
    assert table.text is not None
    assert table.text[1].split("  ")[-2].strip() == first or table.text[1].strip().startswith(f"0  {first}")


def test_the_matrix_keeps_to_its_window_and_says_so(trace: RouteTrace) -> None:
    [table] = VIEWS["matrix"](trace, ViewOptions(max_steps=2, width=14))
    assert table.text == [
        "  step  L0",
        "     0  1 2",
        "     1  1* 3",
        "  (2 more steps and 1 more layers: --max-steps, --steps, --layers)",
    ]
    assert len(table.rows) == 8


def test_views_are_chosen_by_name() -> None:
    assert chosen_views(["bytes", "hot"]) == ("hot", "bytes")
    assert chosen_views(["all"]) == tuple(VIEWS)
    assert set(chosen_views(["default", "sanity"])) > set(chosen_views(["default"]))
    with pytest.raises(UsageError, match="view 'hotter' is not one of default, all, matrix, hot"):
        chosen_views(["hotter"])


def test_views_that_lack_a_column_are_said(tmp_path: Path) -> None:
    trace = written(tmp_path / "t.csv", "turn,phase,step,layer,slot,expert\n0,1,-1,0,0,1\n0,1,-1,0,0,1\n")
    report = analyze(trace, views=tuple(VIEWS))
    assert "the trace has no column for the view cache" in report.notes
    assert json.loads(as_json(report))["trace"]["cycle_bytes"] is None
    assert as_text(report).count("nan") == 0
    assert len(rows(trace, "matrix")) == 2, "rows of unknown step are cells of their own"


# --- forms --------------------------------------------------------------------------------------------------

ODD = Report(
    tool="t",
    trace={"path": "a\x1b[2J"},
    heading="h\x1b[2J",
    tables=[
        Table(
            name="a",
            title="A",
            columns={"name": "", "x_pct": ".1f"},
            rows=[("=cmd\n", math.nan), ("b", 1.25)],
        ),
        Table(name="b", title="B", columns={"n": ""}, rows=[([1, None, 2],)]),
    ],
)


def test_text_shows_names_without_obeying_them() -> None:
    assert as_text(ODD).splitlines() == [
        "h\\x1b[2J",
        "",
        "A",
        "  name  x %",
        "  =cmd    -",
        "  b     1.2",
        "",
        "B",
        "      n",
        "  1 - 2",
    ]


def test_csv_tells_tables_apart_and_runs_no_formula() -> None:
    first, second = as_csv(ODD).split("\n\n")
    assert first == '# table=a\nname,x_pct\n"\'=cmd\n",\nb,1.25'
    assert second == "# table=b\nn\n1 - 2\n"


def test_json_has_null_for_what_is_unknown() -> None:
    assert json.loads(as_json(ODD))["tables"][0]["rows"] == [
        {"name": "=cmd\n", "x_pct": None},
        {"name": "b", "x_pct": 1.25},
    ]


# --- drop ---------------------------------------------------------------------------------------------------


def test_dropping_saves_a_read_only_if_nobody_else_wants_it(tmp_path: Path) -> None:
    """Expert 3 is cold twice in one prompt batch: light for one token, the heaviest for the other."""
    cells = [
        Cell(step=0, layer=0, experts=(1, 3), phase=0, weights=(0.9, 0.1)),
        Cell(step=1, layer=0, experts=(3, 2), phase=0, weights=(0.8, 0.2)),
        Cell(step=2, layer=0, experts=(1, 2), weights=(0.9, 0.1), residency=(1, 1)),
        Cell(step=3, layer=0, experts=(4, 5), weights=(0.8, 0.2)),
        Cell(step=4, layer=0, experts=(1, 6), weights=(math.nan, 0.1)),
    ]
    prefill, decode = drop(written(tmp_path / "t.csv", text_of(cells, {0: MIB})), fractions=(0.25, 0.5))
    assert prefill.rows[0][:3] == ("cold below 0.25/k", 12.5, 0.0)
    assert prefill.rows[0][3] == pytest.approx(5.0)
    assert prefill.rows[1][2] == pytest.approx(100 / 3)
    assert decode.rows[1][1:3] == (25.0, 25.0)
    assert decode.rows[1][3] == pytest.approx(10.0)
    assert decode.rows[1][4] == [50.0, 50.0]
    assert decode.rows[2][:2] == ("static top-1", None)
    assert decode.rows[2][3] == pytest.approx(15.0)


def test_recorded_drops_are_reported(tmp_path: Path) -> None:
    cells = [Cell(step=0, layer=0, experts=(1, 3), weights=(0.9, 0.1), dropped=(0, 1))]
    [table] = drop(written(tmp_path / "t.csv", text_of(cells, {0: MIB})))
    assert table.rows[-1][:3] == ("as recorded", None, 50.0)


def test_dropping_needs_weights(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="has no weight column"):
        drop(written(tmp_path / "t.csv", "turn,phase,step,layer,slot,expert\n0,1,0,0,0,1\n"))


@pytest.mark.skipif(not RECORDED.exists(), reason="the recorded traces are not here")
def test_the_known_figures_of_dropping_and_overlap_are_reproduced() -> None:
    """../shared/data/README.md and the engine notes 8.1, to the digit printed there."""
    trace = read_trace(str(RECORDED / "qwen.route.csv"))
    table = {row[0]: row for row in drop(trace)[1].rows}
    _, below, saved, lost, _ = table["cold below 0.75/k"]
    assert (f"{below:.2f}", f"{saved:.1f}", f"{lost:.2f}") == ("12.50", "36.8", "4.44")
    _, _, saved, lost, _ = table["static top-4"]
    assert (f"{saved:.1f}", f"{lost:.2f}") == ("42.8", "22.70")
    for name, lag1 in {"qwen": "38.0", "gemma": "35.7", "gptoss": "17.9"}.items():
        part = read_trace(str(RECORDED / f"{name}.route.csv")).select(phase=1)
        assert f"{rows(part, 'overlap')[0][1]:.1f}" == lag1


# --- predict ------------------------------------------------------------------------------------------------


def test_predictors_find_what_they_are_made_for(tmp_path: Path) -> None:
    """Layer 0 alternates between two pairs; layer 1 is decided by layer 0."""
    cells = [
        Cell(step=s, layer=la, experts=((1, 2), (3, 4))[s % 2] if la == 0 else ((5, 6), (0, 7))[s % 2])
        for s in range(20)
        for la in (0, 1)
    ]
    overall, layers = predict(written(tmp_path / "t.csv", text_of(cells, {0: 1, 1: 1})))
    assert [row[:3] for row in overall.rows] == [
        ("previous", 0.0, 0.0),
        ("hot", 50.0, 50.0),
        ("cooccurrence", 100.0, 100.0),
    ]
    assert layers.rows[1] == (1, 0.0, 0.0, 50.0, 50.0, 100.0, 100.0)
    wide, _ = predict(read_trace(str(tmp_path / "t.csv")), width=4)
    assert [row[1:3] for row in wide.rows] == [(100.0, 50.0)] * 3


def test_the_previous_token_is_what_overlap_counts(tmp_path: Path) -> None:
    generator = np.random.default_rng(3)
    cells = [
        Cell(step=s, layer=la, experts=tuple(generator.choice(8, 2, replace=False).tolist()))
        for s in range(40)
        for la in (0, 1)
    ]
    trace = written(tmp_path / "t.csv", text_of(cells, {0: 1, 1: 1}))
    overall, _ = predict(trace)
    experts = trace.expert.reshape(40, 2, 2)
    common = sum(len(set(experts[s, la]) & set(experts[s - 1, la])) for s in range(20, 40) for la in (0, 1))
    assert overall.rows[0][1] == pytest.approx(100 * common / 80)


@pytest.mark.parametrize(("tokens", "message"), [(0, "no decoded token"), (3, "3 decoded tokens, too few")])
def test_too_little_to_learn_from_is_said(tmp_path: Path, tokens: int, message: str) -> None:
    cells = [Cell(step=0, layer=0, experts=(1, 2), phase=0)]
    cells += [Cell(step=1 + s, layer=0, experts=(1, 2)) for s in range(tokens)]
    with pytest.raises(FormatError, match=message):
        predict(written(tmp_path / "t.csv", text_of(cells, {0: 1})))


# --- warm set -----------------------------------------------------------------------------------------------


def test_a_warm_set_takes_the_most_use_per_byte_that_fits(trace: RouteTrace) -> None:
    """Layer 3's experts are twice as large, so two uses there are worth one in layer 0."""
    warm = warm_set([trace], budget_bytes=5 * MIB)
    assert warm.chosen == ((0, 1), (0, 2), (0, 3), (3, 0))
    assert (warm.size_bytes, warm.layers, warm.experts) == (5 * MIB, 4, 8)
    assert warm.covered == pytest.approx(10 / 16)
    assert json.loads(warm_json(warm))["experts"] == [[0, 1], [0, 2], [0, 3], [3, 0]]
    assert warm_set([trace], budget_bytes=MIB // 2).chosen == ()


def test_traces_of_different_models_make_no_warm_set(trace: RouteTrace, tmp_path: Path) -> None:
    other = written(tmp_path / "u.csv", text_of(CELLS, {0: MIB, 3: 3 * MIB}))
    with pytest.raises(FormatError, match=r"is of another model than .*: experts of layer 3 differ in size"):
        warm_set([trace, other], budget_bytes=MIB)
    assert warm_set([trace, trace], budget_bytes=5 * MIB) == warm_set([trace], budget_bytes=5 * MIB)


def test_a_file_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    target = tmp_path / "w.json"
    write_whole(str(target), "one")
    write_whole(str(target), "two")
    assert target.read_text() == "two"
    with pytest.raises(FileError, match="cannot be written"):
        write_whole(str(tmp_path / "no" / "w.json"), "x")
    assert [p.name for p in tmp_path.iterdir()] == ["w.json"]


# --- metrics ------------------------------------------------------------------------------------------------


def test_metrics_of_the_reference_are_read_by_name(tmp_path: Path) -> None:
    path = tmp_path / "m.csv"
    path.write_text(
        '# bmoe_metrics v2\nstep,wall_ms,read_bytes,piece\n1,2.5,1048576,a\n2,,nan,"b,c"\n# summary\n3,4'
    )
    found = read_metrics(str(path))
    assert found.columns == ("step", "wall_ms", "read_mib", "piece")
    assert found.rows == [[1.0, 2.5, 1.0, None], [2.0, None, None, None]]
    assert found.notes == (f"{path}: line 6 has no end, so the file was cut there: it is left out",)


def test_metrics_of_this_engine_are_read_from_its_log(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    events = [{"event": "run_start"}] + [
        {
            "event": "token",
            "metrics": {"wall_ns": 2_000_000, "read_bytes": n * MIB, "stall_ns": None, "cpu_ns": True},
        }
        for n in (1, 2)
    ]
    path.write_text("".join(json.dumps(e) + "\n" for e in events))
    found = read_metrics(str(path))
    assert (found.columns, found.rows) == (
        ("token", "wall_ms", "read_mib"),
        [[0.0, 2.0, 1.0], [1.0, 2.0, 2.0]],
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "m.csv: is not a metrics file"),
        ("a,b\n1,2\n", "m.csv:1: is not a metrics file: no column wall_ms"),
        ("wall_ms\n", "m.csv: holds no token"),
        ("wall_ms,b\n1\n", "m.csv:2: a row has the wrong number of fields"),
        ("wall_ms\nx\n", "m.csv:2, wall_ms: is not a number; got 'x'"),
        ("{\n", "m.csv:1: is not JSON"),
        ('{"event":"token"}\n[]\n', "m.csv:2: is not a JSON object"),
        ("[" * 100_000 + "\n", "m.csv:1: is not a metrics file"),
        ("{" + '"a":[' * 100_000 + "\n", "m.csv:1: is not JSON"),
    ],
)
def test_what_is_no_metrics_file_is_refused_in_one_line(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "m.csv").write_text(text)
    with pytest.raises(FormatError) as error:
        read_metrics(str(tmp_path / "m.csv"))
    assert message in str(error.value)
