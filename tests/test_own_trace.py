"""A trace of this engine, recorded from the model that talks: two turns, a cache of 250 MiB."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pytest

from bmoe.route.reading import read_trace
from bmoe.route.trace import DECODE, PREFILL

TRACE = Path(__file__).parent / "data" / "route-smollm2-16x.csv"
COLUMNS = [
    "turn",
    "phase",
    "step",
    "layer",
    "slot",
    "expert",
    "weight",
    "residency",
    "expert_bytes",
    "dropped",
]


def test_the_preamble_and_the_columns_are_the_reference_engines() -> None:
    lines = TRACE.read_text().splitlines()
    assert lines[0] == "# route_trace v1"
    assert lines[1] == "# model=smol-moe.gguf arch=llama n_layer=30 n_expert=16 n_expert_used=4"
    assert lines[2:32] == [f"# layer={i} expert_bytes=1658880 dense_bytes=594432" for i in range(30)]
    assert lines[32].split(",") == COLUMNS
    # What scripts of the reference do: DictReader over what is no comment, numbers by name.
    rows = list(csv.DictReader(line for line in lines if not line.startswith("#")))
    assert {row["dropped"] for row in rows} == {"0"}
    assert all(0 <= int(row["expert"]) < 16 and 0 <= int(row["slot"]) < 4 for row in rows)


def test_every_token_of_both_turns_is_there_with_its_weights() -> None:
    trace = read_trace(str(TRACE))
    assert trace.notes == ()
    assert trace.weight is not None
    for turn, prompt, decoded in ((0, 42, 7), (1, 15, 7)):
        for phase, tokens in ((PREFILL, prompt), (DECODE, decoded)):
            part = (trace.turn == turn) & (trace.phase == phase)
            steps = np.unique(trace.step[part])
            assert len(steps) == tokens
            assert len(steps) == steps[-1] - steps[0] + 1
            # The last layer computes only what is looked at: of a prompt, its last token.
            last = part & (trace.layer == 29)
            assert last.sum() == 4 * (1 if phase == PREFILL else tokens)
            assert part.sum() - last.sum() == 4 * 29 * tokens
    sums = np.add.reduceat(trace.weight.astype(np.float64), trace.cell_start)
    assert sums == pytest.approx(np.ones_like(sums), abs=1e-4)


def test_a_read_is_counted_once_where_an_expert_was_missing() -> None:
    trace = read_trace(str(TRACE))
    assert trace.residency is not None
    assert trace.read_bytes is not None
    decode = trace.phase == DECODE
    assert set(trace.read_bytes[decode & (trace.residency == 0)].tolist()) <= {552960, 1105920, 1658880}
    assert not trace.read_bytes[trace.residency != 0].any()
    # What the engine itself counted in the second turn: 840 lookups, 464 hits.
    second = decode & (trace.turn == 1)
    assert second.sum() == 840
    assert (trace.residency[second] != 0).sum() == 464
