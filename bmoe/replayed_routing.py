"""A recorded trace as the routing of another model: for benchmarks with models of random weights.

It owns how a trace's rows become a table by position. What is generated with it is no text: every output
says so.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from bmoe.io.errors import FormatError
from bmoe.route.reading import read_trace
from bmoe.route.trace import DECODE

if TYPE_CHECKING:
    from numpy.typing import NDArray


def replay_table(path: str, *, layers: int) -> NDArray[np.int32]:
    """[steps, layers, top-k] experts of the trace's decode steps in order; -1 where it has none.

    Args:
        path: A route trace.
        layers: Layers with experts of the model; the trace's first ones are taken.

    Raises:
        FileError, FormatError: It cannot be read, or has no decode steps, or fewer layers.
    """
    trace = read_trace(path)
    if len(trace.layers) < layers:
        raise FormatError(
            "has too few layers for this model",
            path=path,
            expected=f"{layers} or more",
            got=len(trace.layers),
        )
    keep = (trace.phase == DECODE) & (trace.layer_index < layers) & (trace.slot < trace.top_k)
    if not keep.any():
        raise FormatError("has no decode steps", path=path)
    # Steps count within a turn: a step is a (turn, step), in order of appearance.
    key = trace.turn[keep].astype(np.int64) << 32 | trace.step[keep].astype(np.int64)
    _, first, inverse = np.unique(key, return_index=True, return_inverse=True)
    order = np.empty(len(first), dtype=np.int64)
    order[np.argsort(first)] = np.arange(len(first))
    table = np.full((len(first), layers, trace.top_k), -1, dtype=np.int32)
    table[order[inverse], trace.layer_index[keep], trace.slot[keep]] = trace.expert[keep]
    return table
