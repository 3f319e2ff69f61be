"""Traces of a small model, as files: the reference engine's columns, figures that agree with the run's."""

from __future__ import annotations

import csv
import re
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from bmoe.config import GenerateRequest, SessionConfig
from bmoe.io.errors import FileError, UsageError
from bmoe.route.reading import read_trace
from bmoe.route.trace import DECODE, PREFILL
from bmoe.session import Session
from tests.models import tiny_moe
from tests.runs import config, layout_of, run

if TYPE_CHECKING:
    from pathlib import Path

    from bmoe.records import RunSummary, StepMetrics

LAYERS, EXPERTS, TOP_K, PROMPT, MADE, BATCH = 3, 16, 4, "How much wood would a woodchuck", 6, 20
PROMPT_TOKENS = len(PROMPT) + 1  # a byte each, and the one that begins a text
STATIC = "model=\\S+ arch=qwen3moe n_layer=3 n_threads=1 io_threads=[0-9]+ o_direct=[01] overlap=1"


def model() -> str:
    return tiny_moe("Q4_K", layers=LAYERS, experts=EXPERTS, top_k=TOP_K)


@dataclass(frozen=True, kw_only=True)
class Recorded:
    """Two generations with everything recorded."""

    folder: Path
    prefill: list[list[StepMetrics]]
    decode: list[list[StepMetrics]]
    summaries: list[RunSummary]
    traced: str | None

    def lines(self, name: str) -> list[str]:
        return (self.folder / name).read_text().splitlines()

    def rows(self, name: str) -> list[dict[str, str]]:
        """As scripts of the reference read it."""
        return list(csv.DictReader(line for line in self.lines(name) if not line.startswith("#")))


def record(folder: Path, **changes: Any) -> Recorded:
    wanted = config(
        model(),
        route_trace=str(folder / "route"),
        io_trace=str(folder / "io"),
        ubatch_tokens=BATCH,
        **changes,
    )

    async def scenario() -> Recorded:
        prefill, decode, summaries = [], [], []
        async with await Session.open(wanted) as session:
            for _ in range(2):
                request = GenerateRequest(prompt=PROMPT, n_predict=MADE, ignore_eog=True)
                decode.append([event.metrics async for event in session.generate(request)])
                prefill.append(list(session.prefill_metrics))
                assert session.summary is not None
                summaries.append(session.summary)
            return Recorded(
                folder=folder,
                prefill=prefill,
                decode=decode,
                summaries=summaries,
                traced=session.effective.traced,
            )

    return run(scenario())


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    folder = tmp_path_factory.mktemp("traces")
    return record(folder, compute_trace=str(folder / "nodes"))


def test_the_run_says_that_it_is_traced(recorded: Recorded) -> None:
    assert recorded.traced == "compute trace by node, route trace, read trace"


# --- routing ----------------------------------------------------------------------------------------------


def test_the_route_trace_begins_as_the_references_does(recorded: Recorded) -> None:
    first, facts, *layers, columns = recorded.lines("route")[: 3 + LAYERS]
    assert first == "# route_trace v1"
    assert re.fullmatch(rf"# model=\S+ arch=qwen3moe n_layer={LAYERS} n_expert=16 n_expert_used=4", facts)
    layout = layout_of(model())
    sizes = Counter[int]()
    for tensor in layout.tensors:
        sizes[tensor.layer] += tensor.slice_bytes
    assert [line.split()[1:3] for line in layers] == [
        [f"layer={i}", f"expert_bytes={sizes[i]}"] for i in range(LAYERS)
    ]
    assert columns == "turn,phase,step,layer,slot,expert,weight,residency,expert_bytes,dropped"


def test_every_position_has_its_rows_once(recorded: Recorded) -> None:
    trace = read_trace(str(recorded.folder / "route"))
    assert trace.notes == ()
    for turn in range(2):
        for phase, positions in (
            (PREFILL, range(PROMPT_TOKENS)),
            (DECODE, range(PROMPT_TOKENS, PROMPT_TOKENS + MADE)),
        ):
            part = (trace.turn == turn) & (trace.phase == phase)
            for layer in range(LAYERS):
                at = trace.step[part & (trace.layer == layer)]
                # Nobody asks for logits within a prompt, so the last layer computes its last token alone.
                alone = phase == PREFILL and layer == LAYERS - 1
                expected = positions[-1:] if alone else positions
                assert Counter(at.tolist()) == dict.fromkeys(expected, TOP_K)


def test_slots_are_in_rank_order_and_weights_are_shares(recorded: Recorded) -> None:
    trace = read_trace(str(recorded.folder / "route"))
    assert trace.weight is not None
    weights = trace.weight.astype(np.float64).reshape(-1, TOP_K)
    assert (trace.slot.reshape(-1, TOP_K) == np.arange(TOP_K)).all()
    assert (np.diff(weights, axis=1) <= 0).all()
    assert weights.sum(axis=1) == pytest.approx(np.ones(len(weights)), abs=1e-4)


def test_residency_and_costs_are_the_counters_hits_and_bytes(recorded: Recorded) -> None:
    rows = recorded.rows("route")
    for turn, steps in enumerate(recorded.decode):
        decode = [r for r in rows if (r["turn"], r["phase"]) == (str(turn), "1")]
        assert len(decode) == sum(m.lookups or 0 for m in steps)
        assert sum(r["residency"] != "0" for r in decode) == sum(m.hits or 0 for m in steps)
    for r in rows:
        assert (r["residency"] == "0") or (r["expert_bytes"] == "0")
    # An expert that several tokens of a batch miss is read once.
    costs = Counter(
        (r["turn"], int(r["step"]) // BATCH, r["layer"], r["expert"])
        for r in rows
        if r["phase"] == "0" and r["expert_bytes"] != "0"
    )
    assert set(costs.values()) == {1}
    assert {r["dropped"] for r in rows} == {"0"}


def test_what_was_dropped_is_marked(tmp_path: Path) -> None:
    lossy = record(tmp_path, drop_cold_experts=1.0)
    dropped = [r for r in lossy.rows("route") if r["dropped"] == "1"]
    assert len(dropped) == sum(s.dropped or 0 for s in lossy.summaries) > 0
    # The bytes are what reading it would have cost, which is what dropping is judged by.
    assert {(r["phase"], r["residency"]) for r in dropped} == {("1", "0")}
    assert any(int(r["expert_bytes"]) for r in dropped)
    assert all(float(r["weight"]) < 1 / TOP_K for r in dropped)


# --- reads ------------------------------------------------------------------------------------------------


def test_the_read_trace_has_every_read_with_its_place(recorded: Recorded) -> None:
    first, static, columns = recorded.lines("io")[:3]
    assert first == "# io_trace v1"
    assert re.fullmatch(f"# {STATIC}", static)
    assert columns == "turn,phase,step,layer,expert,proj,lane,spec,offset,req_bytes,read_bytes,latency_ns"
    rows = recorded.rows("io")
    tensors = {(t.layer, t.rank): t for t in layout_of(model()).tensors}
    for r in rows:
        tensor = tensors[int(r["layer"]), int(r["proj"])]
        assert int(r["req_bytes"]) == tensor.slice_bytes <= int(r["read_bytes"])
        assert int(r["offset"]) == tensor.file_offset + int(r["expert"]) * tensor.slice_bytes
        assert int(r["latency_ns"]) > 0
        assert (r["lane"], r["spec"]) == ("0", "0")
    for turn in range(2):
        for phase, steps in (("0", recorded.prefill[turn]), ("1", recorded.decode[turn])):
            part = [r for r in rows if (r["turn"], r["phase"]) == (str(turn), phase)]
            assert len(part) == sum(m.reads or 0 for m in steps)
            assert sum(int(r["read_bytes"]) for r in part) == sum(m.read_bytes or 0 for m in steps)


# --- node times -------------------------------------------------------------------------------------------


def test_the_node_trace_has_the_time_of_every_node(recorded: Recorded) -> None:
    first, static, columns = recorded.lines("nodes")[:3]
    assert first == "# compute_trace v1"
    assert re.fullmatch(f"# {STATIC}", static)
    assert columns == "turn,phase,step,seq,layer,op,name,wall_ns,majflt"
    rows = [r for r in recorded.rows("nodes") if r["phase"] == "1"]
    by_step: dict[tuple[str, str], list[dict[str, str]]] = {}
    for r in rows:
        by_step.setdefault((r["turn"], r["step"]), []).append(r)
    assert len(by_step) == 2 * MADE
    walls = [m.wall_ns for steps in recorded.decode for m in steps]
    for wall_ns, nodes in zip(walls, by_step.values(), strict=True):
        assert [int(r["seq"]) for r in nodes] == list(range(len(nodes)))
        assert sum(r["op"] == "MUL_MAT_ID" for r in nodes) == 3 * LAYERS
        assert {int(r["layer"]) for r in nodes} >= set(range(LAYERS))
        assert 0 < sum(int(r["wall_ns"]) for r in nodes) <= wall_ns


def test_the_layer_trace_has_a_row_set_for_every_layer(tmp_path: Path) -> None:
    found = record(tmp_path, compute_trace_layers=str(tmp_path / "nodes"))
    assert found.traced == "compute trace by layer, route trace, read trace"
    rows = [r for r in found.rows("nodes") if r["op"] == "LAYER" and r["phase"] == "1"]
    names = {r["name"] for r in rows}
    assert names == {"pre", "post", *(f"blk.{i}" for i in range(LAYERS))}
    assert {r["name"]: r["layer"] for r in rows} == {
        name: name[4:] if name.startswith("blk.") else "-1" for name in names
    }


# --- files that cannot be ---------------------------------------------------------------------------------


async def _open(wanted: SessionConfig) -> None:
    async with await Session.open(wanted):
        pass


def test_a_trace_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(FileError, match="the trace cannot be written: Is a directory"):
        run(_open(config(model(), io_trace=str(tmp_path))))


def test_a_trace_does_not_overwrite_the_model_or_another(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="the trace would be written into it"):
        run(_open(config(model(), route_trace=model())))
    both = str(tmp_path / "both")
    with pytest.raises(UsageError, match="the trace would be written into it"):
        run(_open(config(model(), route_trace=both, io_trace=both)))
