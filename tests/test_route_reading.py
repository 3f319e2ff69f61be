"""Route traces from files: what is accepted, what is said of odd ones, and where an error lies."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from bmoe.io.errors import FileError, FormatError, UsageError
from bmoe.route import RouteTrace, read_trace, reading
from bmoe.route.spans import parse_spans
from tests.route_oracle import HEADER, RECORDED, Cell, text_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    Read = Callable[[str | bytes], RouteTrace]

SIZES = {0: 100, 1: 200}
CELLS = [Cell(step=s, layer=la, experts=(s % 8, 7 - s % 8)) for s in range(3) for la in (0, 1)]
GOOD = text_of(CELLS, SIZES)
PREAMBLE = GOOD[: GOOD.index("turn,")]
ROW = "0,1,3,0,0,5,0.25,1,0,0"


@pytest.fixture
def read(tmp_path: Path) -> Read:
    def read(text: str | bytes) -> RouteTrace:
        path = tmp_path / "t.csv"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return read_trace(str(path))

    return read


def test_a_trace_is_read_whole(read: Read) -> None:
    trace = read(GOOD)
    assert (trace.rows, trace.top_k, trace.experts) == (12, 2, 8)
    assert trace.layers.tolist() == [0, 1]
    assert trace.expert[:4].tolist() == [0, 7, 0, 7]
    assert trace.expert_bytes_of == SIZES
    assert trace.dense_bytes_of == {0: 1000, 1: 2000}
    assert trace.cycle_bytes == 600
    assert trace.facts["model"] == "m.gguf"
    assert trace.notes == ()


def test_remarks_blank_lines_and_a_second_header_are_passed_over(read: Read) -> None:
    middle = f"# a remark\n\n{HEADER}\n#\n"
    assert read(PREAMBLE + middle + HEADER + f"\n{ROW}\n{middle}{ROW}\n").rows == 2


def test_columns_are_taken_by_name(read: Read) -> None:
    """The reference only appends columns; ours may come in any order, and unknown ones are said."""
    trace = read(f"{PREAMBLE}expert,layer,turn,phase,step,slot,mood\n5,1,0,1,9,0,7\n")
    assert (trace.expert.tolist(), trace.layer.tolist(), trace.step.tolist()) == ([5], [1], [9])
    assert trace.weight is None
    assert trace.residency is None
    assert trace.notes == ("unknown columns are ignored: mood",)


def test_a_model_path_may_hold_blanks(read: Read) -> None:
    assert read(text_of(CELLS, SIZES, model="/a b/my model.gguf")).facts["model"] == "/a b/my model.gguf"


def test_windows_line_ends_are_line_ends(read: Read) -> None:
    assert read(GOOD.replace("\n", "\r\n")).rows == 12


def test_a_file_cut_in_a_line_loses_that_line_and_says_so(read: Read) -> None:
    trace = read(GOOD[:-4])
    assert trace.rows == 11
    assert trace.notes == ("line 17 has no end, so the file was cut there: it is left out",)


def test_a_missing_preamble_is_said_and_sizes_come_from_the_rows(read: Read) -> None:
    trace = read(GOOD[GOOD.index("turn,") :])
    assert trace.notes == (
        "there is no `# route_trace` preamble: the model is not known",
        "expert sizes of 2 layers are taken from the rows that read them",
    )
    assert trace.expert_bytes_of == SIZES
    assert (trace.experts, trace.top_k) == (8, 2)


def test_rows_alone_are_enough(read: Read) -> None:
    trace = read(f"{ROW}\n0,1,3,0,1,6,nan,0,77,0\n")
    assert trace.rows == 2
    assert "there is no line of column names: v1's order is assumed" in trace.notes
    assert trace.sizes().tolist() == [77]
    with pytest.raises(FormatError, match="the size of an expert is not known for layer 0"):
        read(f"{ROW}\n").sizes()


def test_weights_that_are_no_numbers_are_unknown(read: Read) -> None:
    rows = [ROW.replace("0.25", w).replace("0,1,3,0,0", f"0,1,3,0,{i}") for i, w in
            enumerate(["nan", "-nan", "NaN", "-nan(ind)", "inf", "-Infinity", "1e300", "1e-3"])]  # fmt: skip
    trace = read(PREAMBLE + HEADER + "\n" + "\n".join(rows) + "\n")
    assert trace.weight is not None
    assert np.isnan(trace.weight).tolist() == [True] * 7 + [False]
    assert trace.notes == ("3 weights are infinite: they count as unknown", "4 weights are unknown (nan)")


def test_turns_and_unknown_positions_are_kept(read: Read) -> None:
    trace = read(PREAMBLE + HEADER + "\n0,0,-1,0,0,5,0.2,1,0,0\n1,1,8,1,0,5,0.2,1,0,0\n")
    assert trace.turn.tolist() == [0, 1]
    assert trace.step.tolist() == [-1, 8]
    assert trace.notes == ("1 rows have no position (step -1)",)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ("0,1,x,0,0,5,0.25,1,0,0", ":5, step: is not a whole number from -1 to 2147483647; got 'x'"),
        ("0,1,3,0,0,8,0.25,1,0,0", ":5, expert: is not a whole number from 0 to 7; got '8'"),
        ("0,1,3,2,0,5,0.25,1,0,0", ":5, layer: is not a whole number from 0 to 1; got '2'"),
        ("0,1,3,0,0,99999999999999999999999,0.25,1,0,0", ":5, expert: is not a whole number"),
        ("0,2,3,0,0,5,0.25,1,0,0", ":5, phase: is not a whole number from 0 to 1; got '2'"),
        ("0,1,3,0,0,5,0.25,3,0,0", ":5, residency: is not a whole number from 0 to 2; got '3'"),
        ("0,1,3,0,0,5,,1,0,0", ":5, weight: is not a number or nan; got ''"),
        ("0,1,3,0,0,5,1_0,1,0,0", ":5, weight: is not a number or nan; got '1_0'"),
        ("0,1,3,0,0,5,1-0,1,0,0", ":5, weight: is not a number or nan; got '1-0'"),
        ("0,1,3,0,0,5,nanny,1,0,0", ":5, weight: is not a number or nan; got 'nanny'"),
        ("0,1,3,0,0,5.0,0.25,1,0,0", ":5, expert: is not a whole number from 0 to 7; got '5.0'"),
        ("0,1,3,0,0, 5,0.25,1,0,0", ":5, expert: is not a whole number from 0 to 7; got ' 5'"),
        ("0,1,3e0,0,0,5,0.25,1,0,0", ":5, step: is not a whole number"),
        ("0,1,3,0,0,5,0.25,1,0", ":5: a row has the wrong number of fields; expected 10, got 9: '0,1,3"),
        ("0,1,3,0,0,5,0.25,1,0,0,9", ":5: a row has the wrong number of fields; expected 10, got 11"),
        ("\x00\x1b[2J", ":5: a row has the wrong number of fields"),
    ],
)
def test_a_wrong_row_is_named_with_file_and_line(read: Read, bad: str, message: str) -> None:
    text = "# route_trace v1\n# n_layer=2 n_expert=8\n" + HEADER + f"\n{ROW}\n{bad}\n{ROW}\n"
    with pytest.raises(FormatError) as error:
        read(text)
    assert f"t.csv{message}" in str(error.value)
    assert str(error.value).isprintable()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "t.csv: holds no routing"),
        (PREAMBLE, "t.csv: holds no routing"),
        (PREAMBLE + HEADER + "\n", "t.csv: holds no routing"),
        ("hello\n", "t.csv:1: is not a route trace: neither preamble, nor column names, nor a row"),
        ("no line end", "t.csv:1: is not a route trace: it has no complete line"),
        ("# bmoe_metrics v1\n", "t.csv:1: is a bmoe_metrics file, not a route trace"),
        ("turn,phase,step,layer,slot\n", "t.csv:1: the column 'expert' is missing"),
        ("turn,turn,phase,step,layer,slot,expert\n", "t.csv:1: a column is named twice"),
        ("# layer=x expert_bytes=1\n", "t.csv:1, layer: is not a whole number up to 9999; got 'x'"),
        ("# layer=0 expert_bytes=-1\n", "t.csv:1, expert_bytes: is not a whole number"),
        ("# n_expert=9999999999\n", "t.csv:1, n_expert: is not a whole number up to 1000000"),
        ("# layer=0 expert_bytes=1\n# layer=0 expert_bytes=2\n", "t.csv:2, expert_bytes: layer 0 is said"),
        ("# n_expert=8\n# n_expert=9\n", "t.csv:2, n_expert: is said twice, differently"),
        ("x" * 200_000, "t.csv:1: is not a route trace: the line is too long"),
        ("0,1,3,0,0,5,0.2,0,7,0\n0,1,4,0,0,5,0.2,0,8,0\n", "reads of experts of layer 0 differ in size"),
    ],
)
def test_what_is_no_trace_is_refused_in_one_line(read: Read, text: str, message: str) -> None:
    with pytest.raises(FormatError) as error:
        read(text)
    assert message in str(error.value)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileError, match=r"none\.csv: cannot be read: No such file"):
        read_trace(str(tmp_path / "none.csv"))
    with pytest.raises(FileError, match="cannot be read: Is a directory"):
        read_trace(str(tmp_path))


def test_pieces_are_joined_wherever_they_are_cut(read: Read, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = read(GOOD)
    for size in (1, 7, 64, 333):
        monkeypatch.setattr(reading, "_PIECE_BYTES", size)
        pieces = read(GOOD)
        assert pieces.expert.tolist() == whole.expert.tolist()
        with pytest.raises(FormatError, match=r"t.csv:18, expert: is not a whole number"):
            read(GOOD + "0,1,3,0,0,z,0.25,1,0,0\n")


ODD = " 1|1.0|nan|-nan(ind)|inf|1e3|+2|-|0x1|1e|.5|5.|--1|2147483648|999999999999999999999|#|é|\x00"
FIELDS = st.sampled_from(["0", "1", "7", "-1", "12", "", *ODD.split("|")])


@settings(deadline=None, derandomize=True, max_examples=200)
@given(rows=st.lists(st.lists(FIELDS, min_size=8, max_size=11).map(",".join), min_size=1, max_size=4))
@example(rows=["0,1,1,0,0,1,nan,1,12,0"])
@example(rows=["0,1,1,0,0,1,.5,1,12,0", "# n_expert=3", "0,1,1,0,0,1,5.,1,12,0", ""])
def test_the_fast_way_accepts_exactly_what_the_slow_way_accepts(rows: list[str]) -> None:
    """Whatever is in a piece, converting it whole gives the rows that line by line gives, or nothing."""
    layout = reading._Layout(tuple(HEADER.split(",")), 6)
    text = ("\n".join(rows) + "\n").encode()
    reader = reading._Reader("t")
    reader._layout = layout
    try:
        slow = reader._line_by_line(text)
    except FormatError:
        slow = None
    fast = reading._convert(text, layout)
    if fast is not None and reader._within_limits(fast):
        assert slow is not None
        np.testing.assert_array_equal(fast, slow)


@settings(deadline=None, derandomize=True, max_examples=60)
@given(
    cells=st.lists(
        st.builds(
            Cell,
            step=st.integers(0, 2**31 - 1),
            layer=st.integers(0, 1),
            phase=st.integers(0, 1),
            turn=st.integers(0, 3),
            experts=st.lists(st.integers(0, 7), min_size=1, max_size=3).map(tuple),
        ),
        min_size=1,
        max_size=12,
    )
)
def test_what_is_written_is_what_is_read(cells: list[Cell], tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.getbasetemp() / "roundtrip.csv"
    path.write_text(text_of(cells, SIZES))
    trace = read_trace(str(path))
    wanted = [(c.turn, c.phase, c.step, c.layer, k, e) for c in cells for k, e in enumerate(c.experts)]
    columns = (trace.turn, trace.phase, trace.step, trace.layer, trace.slot, trace.expert)
    assert list(zip(*(column.tolist() for column in columns), strict=True)) == wanted


def test_the_columns_are_the_references_in_its_order() -> None:
    """Engine notes 5.6: what a trace of ours must have, to be read by its scripts too."""
    contract = "turn,phase,step,layer,slot,expert,weight,residency,expert_bytes,dropped"
    assert ",".join(reading._COLUMNS) == contract == HEADER


@pytest.mark.skipif(not RECORDED.exists(), reason="the recorded traces are not here")
@pytest.mark.parametrize(
    ("name", "decode", "prefill", "cycle_mib"),
    [("qwen", 36_864, 7_902, 785), ("gemma", 23_040, 5_220, 676), ("gptoss", 4_608, 5_952, 908)],
)
def test_the_recorded_traces_are_what_their_readme_says(
    name: str, decode: int, prefill: int, cycle_mib: int
) -> None:
    trace = read_trace(str(RECORDED / f"{name}.route.csv"))
    assert int((trace.phase == 1).sum()) == decode
    assert int((trace.phase == 0).sum()) == prefill
    assert round(trace.cycle_bytes / (1 << 20)) == cycle_mib
    assert trace.notes == ()


@pytest.mark.parametrize(
    ("text", "inside"),
    [("3", [3]), ("2:4", [2, 3]), (":2", [0, 1]), ("7:", [7, 8, 9]), ("1,4:6,9", [1, 4, 5, 9])],
)
def test_spans_are_half_open(text: str, inside: list[int]) -> None:
    values = np.arange(10)
    assert values[parse_spans(text).contains(values)].tolist() == inside


@pytest.mark.parametrize(
    "text", ["", ":", "x", "3:3", "5:2", "1,,2", "-1", "1:2:3", "1.5", "١", "1 2", "9" * 10]
)
def test_what_is_no_span_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="span"):
        parse_spans(text)


def test_a_selection_that_holds_nothing_is_refused(read: Read) -> None:
    trace = read(GOOD)
    assert trace.select(layers=parse_spans("1"), steps=parse_spans("1:")).rows == 4
    with pytest.raises(UsageError, match="no routing is in prefill, steps 1:"):
        trace.select(phase=0, steps=parse_spans("1:"))
