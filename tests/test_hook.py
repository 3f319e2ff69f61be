"""The ask pass and the kernel on graphs made by hand: what is swapped, what is moved, what is refused."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from bmoe.pipeline.native import RUN, STOP_CANCEL, STOP_FAULT, StreamedTensor, lib
from tests.graphs import Graphs, blank

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from tests.graphs import Node

EXPERTS, WIDTH, UNITS, TOKENS, TOP_K = 5, 32, 96, 4, 3
SLICE_BYTES = WIDTH * UNITS * 4
GATE, UP, OTHER, DENSE = (
    256,
    256 + EXPERTS * SLICE_BYTES,
    256 + 2 * EXPERTS * SLICE_BYTES,
    256 + 3 * EXPERTS * SLICE_BYTES,
)
END = DENSE + SLICE_BYTES


def streamed(rank: int, offset: int) -> StreamedTensor:
    return StreamedTensor(
        name=f"blk.7.ffn_{('gate', 'up')[rank]}_exps.weight",
        layer=0,
        rank=rank,
        ggml_type=0,
        experts=EXPERTS,
        ne0=WIDTH,
        ne1=UNITS,
        slice_bytes=SLICE_BYTES,
        file=0,
        file_offset=offset,
    )


@pytest.fixture(params=[False, True], ids=["overlap", "serial"])
def graphs(request: pytest.FixtureRequest) -> Iterator[Graphs]:
    image = np.random.default_rng(3).standard_normal(END // 4 + 64, dtype=np.float32)
    made = Graphs([streamed(0, GATE), streamed(1, UP)], image, serial=request.param)
    yield made
    made.close()


def activations(tokens: int = TOKENS, rows: int = 1, seed: int = 1) -> NDArray[np.float32]:
    return np.random.default_rng(seed).standard_normal((tokens, rows, WIDTH), dtype=np.float32)


def routing(tokens: int = TOKENS, seed: int = 2) -> NDArray[np.int32]:
    rng = np.random.default_rng(seed)
    return np.stack([rng.permutation(EXPERTS)[:TOP_K] for _ in range(tokens)]).astype(np.int32)


def gate(graphs: Graphs) -> Node:
    return graphs.weight("blk.7.ffn_gate_exps.weight", (WIDTH, UNITS, EXPERTS), GATE)


def stock(graphs: Graphs, output: Node) -> NDArray[np.float32]:
    """What ggml itself computes, before anything is swapped."""
    graphs.compute(graphs.graph(output))
    result = graphs.values(output)
    blank(output)
    return result


@pytest.mark.parametrize("threads", [1, 2, 4])
@pytest.mark.parametrize("tokens", [1, 4, 40])
def test_a_swapped_matmul_computes_the_stock_result(graphs: Graphs, tokens: int, threads: int) -> None:
    output = graphs.mul_mat_id(
        gate(graphs), graphs.matrix(activations(tokens)), graphs.matrix(routing(tokens))
    )
    want = stock(graphs, output)
    graphs.serve()
    op = output.contents.op
    graph = graphs.graph(output)
    graphs.ask(graph)
    assert output.contents.op != op
    graphs.image[:] = np.nan  # from here on only slots have the weights
    graphs.compute(graph, threads)
    assert np.array_equal(graphs.values(output), want)
    assert graphs.engine.statistics().nodes == 1
    assert graphs.engine.stop_reason()[0] == RUN


def test_a_graph_that_is_reused_is_served_again(graphs: Graphs) -> None:
    ids = graphs.matrix(routing())
    output = graphs.mul_mat_id(gate(graphs), graphs.matrix(activations()), ids)
    want = stock(graphs, output)
    graphs.serve()
    graph = graphs.graph(output)
    for served in range(1, 4):
        graphs.ask(graph)
        graphs.compute(graph, 2)
        assert np.array_equal(graphs.values(output), want)
        assert graphs.engine.statistics().nodes == served
        blank(output)


def test_one_weight_may_be_used_twice_in_a_graph(graphs: Graphs) -> None:
    weight = gate(graphs)
    outputs = [
        graphs.mul_mat_id(weight, graphs.matrix(activations(seed=s)), graphs.matrix(routing(seed=s)))
        for s in (5, 6)
    ]
    want = [stock(graphs, output) for output in outputs]
    graphs.serve()
    graph = graphs.graph(*outputs)
    for _ in range(2):
        graphs.ask(graph)
        graphs.compute(graph, 2)
        for output, result in zip(outputs, want, strict=True):
            assert np.array_equal(graphs.values(output), result)
            blank(output)


def test_rows_of_ids_may_be_strided_and_ids_may_repeat(graphs: Graphs) -> None:
    """Top-k of a sorted row: the stride is that of all experts."""
    every = np.array([[4, 4, 1, 0, 2], [2, 3, 2, 1, 0], [0, 1, 3, 4, 2], [1, 1, 1, 0, 0]], dtype=np.int32)
    ids = graphs.view(graphs.matrix(every), TOP_K, TOKENS, EXPERTS * 4)
    output = graphs.mul_mat_id(gate(graphs), graphs.matrix(activations()), ids)
    want = stock(graphs, output)
    graphs.serve()
    graph = graphs.graph(output)
    graphs.ask(graph)
    graphs.compute(graph, 2)
    assert np.array_equal(graphs.values(output), want)


def test_a_row_of_activations_per_id_is_not_shared(graphs: Graphs) -> None:
    """As in the down projection."""
    output = graphs.mul_mat_id(gate(graphs), graphs.matrix(activations(rows=TOP_K)), graphs.matrix(routing()))
    want = stock(graphs, output)
    graphs.serve()
    graph = graphs.graph(output)
    graphs.ask(graph)
    graphs.compute(graph, 3)
    assert np.array_equal(graphs.values(output), want)


@pytest.mark.parametrize("bad", [EXPERTS, -1, 2**31 - 1])
def test_an_expert_that_does_not_exist_is_a_fault_and_the_next_graph_is_right(
    graphs: Graphs, bad: int
) -> None:
    good = graphs.mul_mat_id(gate(graphs), graphs.matrix(activations()), graphs.matrix(routing()))
    want = stock(graphs, good)
    graphs.serve()
    wrong_ids = routing()
    wrong_ids[-1, -1] = bad
    wrong = graphs.mul_mat_id(gate(graphs), graphs.matrix(activations()), graphs.matrix(wrong_ids))
    graph = graphs.graph(wrong)
    graphs.ask(graph)
    graphs.compute(graph, 2)
    assert graphs.engine.stop_reason() == (STOP_FAULT, -1)
    assert graphs.engine.fault() == f"blk.7.ffn_gate_exps.weight: the router chose expert {bad} of {EXPERTS}"
    lib.bm_reset(graphs.engine.handle)
    graph = graphs.graph(good)
    graphs.ask(graph)
    graphs.compute(graph, 2)
    assert np.array_equal(graphs.values(good), want)


def test_the_layers_order_is_the_graphs(graphs: Graphs) -> None:
    """The first matmul of the layer asks for the other's slices too; here it is `up`, not `gate`."""
    act, ids = graphs.matrix(activations(1)), graphs.matrix(np.array([[3]], dtype=np.int32))
    up = graphs.weight("blk.7.ffn_up_exps.weight", (WIDTH, UNITS, EXPERTS), UP)
    first, second = graphs.mul_mat_id(up, act, ids), graphs.mul_mat_id(gate(graphs), act, ids)
    want = [stock(graphs, first), stock(graphs, second)]
    graph = graphs.graph(first, second)
    graphs.ask(graph)  # teaches the order
    lib.bm_begin_batch(graphs.engine.handle, 0, 1, 1)
    graphs.serve()
    before = graphs.engine.statistics().lookups
    graphs.ask(graph)
    graphs.compute(graph)
    assert [np.array_equal(graphs.values(t), w) for t, w in zip((first, second), want, strict=True)] == [
        True
    ] * 2
    assert graphs.engine.statistics().lookups == before + 1  # once for the layer, at `up`
    assert graphs.engine.statistics().nodes == 2


@pytest.mark.parametrize(
    ("name", "offset", "shape"),
    [
        ("blk.7.ffn_gate_exps.weight", OTHER, (WIDTH, UNITS, EXPERTS)),  # another place of the file
        ("blk.8.ffn_gate_exps.weight", GATE, (WIDTH, UNITS, EXPERTS)),  # another name
        ("blk.7.ffn_gate_exps.weight", GATE, (WIDTH, UNITS, EXPERTS - 1)),  # another shape
    ],
)
def test_a_weight_that_is_not_ours_is_left_alone(
    graphs: Graphs, name: str, offset: int, shape: tuple[int, int, int]
) -> None:
    weight = graphs.weight(name, shape, offset)
    ids = np.minimum(routing(), shape[2] - 1).astype(np.int32)
    output = graphs.mul_mat_id(weight, graphs.matrix(activations()), graphs.matrix(ids))
    want = stock(graphs, output)
    op = output.contents.op
    graph = graphs.graph(output)
    graphs.ask(graph)
    assert output.contents.op == op
    graphs.compute(graph)
    assert np.array_equal(graphs.values(output), want)
    assert graphs.engine.statistics().nodes == 0


def test_the_same_weight_outside_this_models_file_is_left_alone(graphs: Graphs) -> None:
    """A second model, or a LoRA: the name alone means nothing."""
    weight = gate(graphs)
    elsewhere = graphs.image.copy()
    weight.contents.data = elsewhere.ctypes.data + GATE
    output = graphs.mul_mat_id(weight, graphs.matrix(activations()), graphs.matrix(routing()))
    op = output.contents.op
    graphs.ask(graphs.graph(output))
    assert output.contents.op == op
    assert weight.contents.data == elsewhere.ctypes.data + GATE


def test_dense_weights_and_their_views_move_to_their_own_memory(graphs: Graphs) -> None:
    dense = graphs.load_dense(DENSE, END)
    weight = graphs.weight("blk.7.attn.weight", (WIDTH, UNITS, 1), DENSE)
    view = graphs.view(weight, WIDTH, 10, WIDTH * 4, 3 * WIDTH * 4)
    act = graphs.matrix(activations()[:, 0, :])
    outputs = [graphs.mul_mat(weight, act), graphs.mul_mat(view, act)]
    want = [stock(graphs, output) for output in outputs]
    graph = graphs.graph(*outputs)
    graphs.ask(graph)
    assert weight.contents.data == dense.ctypes.data
    assert view.contents.data == dense.ctypes.data + 3 * WIDTH * 4
    graphs.image[:] = np.nan
    graphs.compute(graph, 2)
    for output, result in zip(outputs, want, strict=True):
        assert np.array_equal(graphs.values(output), result)
    moved = graphs.engine.statistics().rebound
    graphs.ask(graph)
    assert graphs.engine.statistics().rebound == moved


def test_a_weight_behind_a_missing_optional_source_moves_too(graphs: Graphs) -> None:
    """Flash attention without a mask has nothing in the fourth place, and its sinks in the fifth."""
    dense = graphs.load_dense(DENSE, END)
    weight = graphs.weight("blk.7.attn_sinks.weight", (WIDTH, UNITS, 1), DENSE)
    act = graphs.matrix(activations()[:, 0, :])
    output = graphs.mul_mat(graphs.weight("blk.7.attn.weight", (WIDTH, UNITS, 1), DENSE), act)
    graph = graphs.graph(output)
    output.contents.src[4] = weight
    graphs.ask(graph)
    assert weight.contents.data == dense.ctypes.data


def test_what_was_not_loaded_stays_mapped(graphs: Graphs) -> None:
    graphs.load_dense(DENSE, END - 4 * WIDTH)
    weight = graphs.weight("lazy.weight", (WIDTH, UNITS, 1), OTHER)
    output = graphs.mul_mat(weight, graphs.matrix(activations()[:, 0, :]))
    graphs.ask(graphs.graph(output))
    assert weight.contents.data == graphs.image.ctypes.data + OTHER


def test_experts_that_are_not_streamed_move_like_any_dense_weight(graphs: Graphs) -> None:
    """Such as `ffn_gate_chexps`: through the mapping they would fault in page by page."""
    dense = graphs.load_dense(OTHER, END)
    weight = graphs.weight("blk.7.ffn_gate_chexps.weight", (WIDTH, UNITS, EXPERTS), OTHER)
    output = graphs.mul_mat_id(weight, graphs.matrix(activations()), graphs.matrix(routing()))
    want = stock(graphs, output)
    graph = graphs.graph(output)
    graphs.ask(graph)
    assert weight.contents.data == dense.ctypes.data
    graphs.compute(graph)
    assert np.array_equal(graphs.values(output), want)


def test_streamed_experts_never_move_even_when_dense_memory_covers_them(graphs: Graphs) -> None:
    """Ranges of dense weights that lie close together are read with what is between them."""
    graphs.load_dense(0, END)
    weight = gate(graphs)
    output = graphs.mul_mat_id(weight, graphs.matrix(activations()), graphs.matrix(routing()))
    want = stock(graphs, output)
    graphs.serve()
    graph = graphs.graph(output)
    for _ in range(2):
        graphs.ask(graph)
        assert weight.contents.data == graphs.image.ctypes.data + GATE
        graphs.compute(graph)
        assert np.array_equal(graphs.values(output), want)
    assert graphs.engine.statistics().nodes == 2


def test_a_stopped_engine_computes_nothing_and_lets_go(graphs: Graphs) -> None:
    """Nothing was read: without the stop the kernel would wait."""
    output = graphs.mul_mat_id(gate(graphs), graphs.matrix(activations()), graphs.matrix(routing()))
    graph = graphs.graph(output)
    graphs.ask(graph)
    lib.bm_stop(graphs.engine.handle, STOP_CANCEL)
    graphs.compute(graph, 2)
    assert graphs.engine.statistics().posted == 0
    lib.bm_reset(graphs.engine.handle)
    want = stock(
        graphs, graphs.mul_mat_id(gate(graphs), graphs.matrix(activations()), graphs.matrix(routing()))
    )
    graphs.serve()
    lib.bm_begin_batch(graphs.engine.handle, 0, 1, 1)
    graphs.ask(graph)
    graphs.compute(graph, 2)
    assert np.array_equal(graphs.values(output), want)
