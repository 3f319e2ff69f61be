"""A route trace in memory: which experts each token was routed to, layer by layer, as columns.

Owns the columns, the facts of the preamble and selection by phase, turn, layer and step. Must not know the
file format (reading.py), nor what is asked of a trace.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Final

import numpy as np

from bmoe.io.errors import FormatError, UsageError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from bmoe.route.spans import Spans

PREFILL: Final = 0
DECODE: Final = 1
MISS: Final = 0
HIT: Final = 1
PREFETCHED: Final = 2


@dataclass(frozen=True, kw_only=True)
class RouteTrace:
    """Rows in the order they were recorded; one row is one (token, layer, slot).

    Attributes:
        path: The file.
        facts: The preamble's `key=value` pairs about the model, as text; n_* are whole numbers.
        expert_bytes_of: Layer to bytes of one expert; layers of unknown size are missing.
        dense_bytes_of: Layer to bytes that are not streamed; may be empty.
        notes: What was odd about the file and how it was handled, one sentence each.
        turn, phase, step, layer, slot, expert: [rows] int32. Step is the absolute position, -1 if unknown.
        weight: [rows] float32, the router's, NaN if unknown; None without that column.
        residency: [rows] int8, MISS, HIT or PREFETCHED before the layer was loaded; None without it.
        read_bytes: [rows] int64, cost of the read this row caused; None without it.
        dropped: [rows] bool, whether dropping took this routing away; None without it.
    """

    path: str
    facts: dict[str, str]
    expert_bytes_of: dict[int, int]
    dense_bytes_of: dict[int, int]
    notes: tuple[str, ...]
    turn: NDArray[np.int32]
    phase: NDArray[np.int32]
    step: NDArray[np.int32]
    layer: NDArray[np.int32]
    slot: NDArray[np.int32]
    expert: NDArray[np.int32]
    weight: NDArray[np.float32] | None = None
    residency: NDArray[np.int8] | None = None
    read_bytes: NDArray[np.int64] | None = None
    dropped: NDArray[np.bool_] | None = None
    selection: str = field(default="all rows")

    @property
    def rows(self) -> int:
        """How many routings there are."""
        return len(self.expert)

    @cached_property
    def top_k(self) -> int:
        """Experts per token and layer: the preamble's, else the most seen in one."""
        return int(self.facts.get("n_expert_used", 0)) or int(self.slot.max()) + 1

    @cached_property
    def experts(self) -> int:
        """Experts per layer: the preamble's, else one more than the highest id seen."""
        return int(self.facts.get("n_expert", 0)) or int(self.expert.max()) + 1

    @cached_property
    def layers(self) -> NDArray[np.int32]:
        """Layers that route, ascending."""
        return np.flatnonzero(np.bincount(self.layer)).astype(np.int32)

    @cached_property
    def layer_index(self) -> NDArray[np.int32]:
        """[rows] position of each row's layer in `layers`."""
        return np.searchsorted(self.layers, self.layer).astype(np.int32)

    @cached_property
    def cell(self) -> NDArray[np.int64]:
        """[rows] number of the (turn, phase, step, layer) a row belongs to, in order of appearance."""
        new = np.ones(self.rows, dtype=np.bool_)
        new[1:] = _changed(self.turn, self.phase, self.step, self.layer)
        # A row of the same cell may only come with a higher slot: rows of step -1 follow one another.
        new[1:] |= self.slot[1:] <= self.slot[:-1]
        return np.cumsum(new) - 1

    @cached_property
    def cell_start(self) -> NDArray[np.int64]:
        """[cells] first row of each."""
        return np.flatnonzero(np.diff(self.cell, prepend=-1)).astype(np.int64)

    def sizes(self) -> NDArray[np.int64]:
        """[layers] bytes of one expert.

        Raises:
            FormatError: The trace does not tell for every layer.
        """
        missing = [int(la) for la in self.layers if int(la) not in self.expert_bytes_of]
        if missing:
            raise FormatError(
                f"the size of an expert is not known for layer {missing[0]}"
                + (f" and {len(missing) - 1} more" if missing[1:] else ""),
                path=self.path,
                hint="the preamble's `# layer=N expert_bytes=…` lines say it",
            )
        return np.array([self.expert_bytes_of[int(la)] for la in self.layers], dtype=np.int64)

    @property
    def cycle_bytes(self) -> int:
        """What one token touches: top-k experts of every layer. See `sizes` for errors."""
        return int(self.sizes().sum()) * min(self.top_k, self.experts)

    def select(
        self,
        *,
        phase: int | None = None,
        turn: Spans | None = None,
        layers: Spans | None = None,
        steps: Spans | None = None,
    ) -> RouteTrace:
        """The rows that all filters let through.

        Raises:
            UsageError: None do.
        """
        keep = np.ones(self.rows, dtype=np.bool_)
        words = []
        if phase is not None:
            keep &= self.phase == phase
            words.append(("prefill", "decode")[phase])
        for name, spans, column in (
            ("turn", turn, self.turn),
            ("layers", layers, self.layer),
            ("steps", steps, self.step),
        ):
            if spans is not None:
                keep &= spans.contains(column)
                words.append(f"{name} {spans.text}")
        if not words or keep.all():
            return replace(self, selection=", ".join(words)) if words else self
        if not keep.any():
            raise UsageError(f"{self.path}: no routing is in {', '.join(words)}")
        return replace(
            self,
            selection=", ".join(words),
            turn=self.turn[keep],
            phase=self.phase[keep],
            step=self.step[keep],
            layer=self.layer[keep],
            slot=self.slot[keep],
            expert=self.expert[keep],
            weight=None if self.weight is None else self.weight[keep],
            residency=None if self.residency is None else self.residency[keep],
            read_bytes=None if self.read_bytes is None else self.read_bytes[keep],
            dropped=None if self.dropped is None else self.dropped[keep],
        )


def _changed(*columns: NDArray[np.int32]) -> NDArray[np.bool_]:
    """[rows - 1] whether any column differs from the row before."""
    different = np.zeros(len(columns[0]) - 1, dtype=np.bool_)
    for column in columns:
        different |= column[1:] != column[:-1]
    return different
