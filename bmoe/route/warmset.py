"""`bmoe route warmset`: the experts worth having before the first token.

Owns the order (uses per byte, summed over traces that each count the same) and the file. Must not load
anything: a warm start reads the file.

The file is one JSON object, docs/schema/warmset.v1.schema.json.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from bmoe.io.errors import FileError, FormatError
from bmoe.route.trace import DECODE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bmoe.route.trace import RouteTrace

SCHEMA: Final = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class WarmSet:
    """Experts in the order of their worth.

    Attributes:
        model, architecture: Of the traces; None if they do not tell or differ in name.
        budget_bytes: What was allowed.
        size_bytes: What the experts take.
        layers, experts: Of the model: highest layer that routes plus one, experts per layer.
        covered: Share of the traces' decoded routings that go to these experts, 0 to 1.
        chosen: (layer, expert), the most worth first.
    """

    model: str | None
    architecture: str | None
    budget_bytes: int
    size_bytes: int
    layers: int
    experts: int
    covered: float
    chosen: tuple[tuple[int, int], ...]


def warm_set(traces: Sequence[RouteTrace], *, budget_bytes: int) -> WarmSet:
    """Chooses experts.

    Args:
        traces: One or more of the same model.
        budget_bytes: Most bytes they may take.

    Raises:
        FormatError: A trace does not tell sizes, decodes nothing, or is of another model.
    """
    first = traces[0]
    experts = max(trace.experts for trace in traces)
    share: dict[int, float] = {}
    size_of: dict[int, int] = {}
    for trace in traces:
        trace.sizes()
        for layer in trace.layers.tolist():
            size = trace.expert_bytes_of[layer]
            if size_of.setdefault(layer, size) != size:
                raise FormatError(
                    f"is of another model than {first.path}: experts of layer {layer} differ in size",
                    path=trace.path,
                    expected=f"{size_of[layer]} bytes",
                    got=f"{size}",
                )
        if trace.facts.get("arch") != first.facts.get("arch"):
            raise FormatError(f"is of another architecture than {first.path}", path=trace.path)
        decode = trace.phase == DECODE
        if not decode.any():
            raise FormatError("has no decoded token", path=trace.path)
        keys, uses = np.unique(
            trace.layer[decode].astype(np.int64) * experts + trace.expert[decode], return_counts=True
        )
        for key, n in zip(keys.tolist(), (uses / uses.sum() / len(traces)).tolist(), strict=True):
            share[key] = share.get(key, 0.0) + n
    order = sorted(share, key=lambda key: (-share[key] / size_of[key // experts], key))
    chosen, used, covered = [], 0, 0.0
    for key in order:
        size = size_of[key // experts]
        if used + size <= budget_bytes:
            chosen.append((key // experts, key % experts))
            used += size
            covered += share[key]
    models = {trace.facts.get("model", "").rpartition("/")[2] for trace in traces}
    return WarmSet(
        model=(models.pop() or None) if len(models) == 1 else None,
        architecture=first.facts.get("arch"),
        budget_bytes=budget_bytes,
        size_bytes=used,
        layers=max(size_of) + 1,
        experts=experts,
        covered=covered,
        chosen=tuple(chosen),
    )


def as_json(warm: WarmSet) -> str:
    """The file's content."""
    record = {
        "schema": SCHEMA,
        "kind": "bmoe warmset",
        "model": warm.model,
        "architecture": warm.architecture,
        "layers": warm.layers,
        "experts_per_layer": warm.experts,
        "budget_bytes": warm.budget_bytes,
        "size_bytes": warm.size_bytes,
        "covered": round(warm.covered, 6),
        "experts": [list(pair) for pair in warm.chosen],
    }
    return json.dumps(record, separators=(",", ":")) + "\n"


def write_whole(path: str, content: str) -> None:
    """Writes a file that is either the new one or the old one, never a part.

    Raises:
        FileError: It cannot be written.
    """
    part = f"{path}.part-{os.getpid()}"
    try:
        with open(part, "w", encoding="utf-8") as file:
            file.write(content)
        os.replace(part, path)
    except OSError as error:
        if os.path.lexists(part):
            os.unlink(part)
        raise FileError(f"cannot be written: {error.strerror}", path=path) from None
