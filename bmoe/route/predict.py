"""`bmoe route predict`: which of the next experts could have been known, and by what.

Owns the predictors. Each names n experts of a layer before its router has run; those that learn do so on the
first half of the decoded tokens, and all are scored on the second half. Must not know what a wrong guess
costs: that is a matter of spare bandwidth.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from bmoe.io.errors import FormatError
from bmoe.route.report import Table
from bmoe.route.trace import DECODE

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from bmoe.route.report import Value
    from bmoe.route.trace import RouteTrace

PREDICTORS: Final = {
    "previous": "the experts the layer used last, newest first",
    "hot": "the experts the layer used most in the first half",
    "cooccurrence": "by the experts of the layer before, as they went together in the first half",
}
# How many uses the layer's average weighs against what was seen with one expert of the layer before.
_PRIOR_USES: Final = 4.0


def predict(trace: RouteTrace, *, width: int | None = None) -> list[Table]:
    """Scores every predictor, over all layers and for each.

    Args:
        trace: Any; only decode counts.
        width: How many experts are named; None is top-k.

    Raises:
        FormatError: Fewer than four decoded tokens.
    """
    if not (trace.phase == DECODE).any():
        raise FormatError("has no decoded token", path=trace.path)
    trace = trace.select(phase=DECODE)
    token = np.unique(
        trace.turn.astype(np.int64) << 32 | trace.step.astype(np.int64) + 1, return_inverse=True
    )[1]
    tokens = int(token.max()) + 1
    if tokens < 4:
        raise FormatError(f"has {tokens} decoded tokens, too few to learn from half of them", path=trace.path)
    named = min(width or trace.top_k, trace.experts)
    half = tokens // 2
    layers = trace.layers.tolist()
    hits = np.zeros((len(layers), len(PREDICTORS)), dtype=np.int64)
    wanted, guessed = np.zeros(len(layers), dtype=np.int64), np.zeros(len(layers), dtype=np.int64)
    for i, used, slot, before in _layers(trace, token, tokens):
        actual = used[half:]
        scores = (_recency(used, slot)[half:], _hot(used, half), _together(used, before, half)[half:])
        for p, score in enumerate(scores):
            hits[i, p] = int((actual & _best(score, named)).sum())
        wanted[i] = int(actual.sum())
        guessed[i] = named * int(actual.any(axis=1).sum())
    rows: list[tuple[Value, ...]] = []
    for p, (name, what) in enumerate(PREDICTORS.items()):
        h = int(hits[:, p].sum())
        rows.append((name, 100 * h / max(int(wanted.sum()), 1), 100 * h / max(int(guessed.sum()), 1), what))
    with np.errstate(invalid="ignore", divide="ignore"):
        recall = 100 * hits / wanted[:, None]
        precision = 100 * hits / guessed[:, None]
    per_layer: list[tuple[Value, ...]] = [
        (la, *(float(v) for pair in zip(recall[i], precision[i], strict=True) for v in pair))
        for i, la in enumerate(layers)
    ]
    columns = [f"{name}_{figure}_pct" for name in PREDICTORS for figure in ("recall", "precision")]
    return [
        Table(
            name="predict",
            title=f"predict: {named} experts named per layer, tokens {half} to {tokens - 1} of {tokens}",
            columns={"predictor": "", "recall_pct": ".1f", "precision_pct": ".1f", "by": ""},
            rows=rows,
        ),
        Table(
            name="predict_layers",
            title="by layer",
            columns={"layer": "", **dict.fromkeys(columns, ".1f")},
            rows=per_layer,
        ),
    ]


def _layers(
    trace: RouteTrace, token: NDArray[np.int64], tokens: int
) -> Iterator[tuple[int, NDArray[np.bool_], NDArray[np.int32], NDArray[np.bool_]]]:
    """(layer index, [tokens, experts] used, its slot, [tokens, experts] used by the layer before)."""
    count = len(trace.layers)

    def uses(i: int) -> tuple[NDArray[np.bool_], NDArray[np.int32]]:
        rows = np.flatnonzero(trace.layer_index == i)
        used = np.zeros((tokens, trace.experts), dtype=np.bool_)
        slot = np.zeros((tokens, trace.experts), dtype=np.int32)
        used[token[rows], trace.expert[rows]] = True
        slot[token[rows], trace.expert[rows]] = trace.slot[rows]
        return used, slot

    last = uses(count - 1)[0]
    before = np.zeros_like(last)
    before[1:] = last[:-1]  # the first layer comes after the last one of the token before
    for i in range(count):
        used, slot = uses(i)
        yield i, used, slot, before
        before = used


def _recency(used: NDArray[np.bool_], slot: NDArray[np.int32]) -> NDArray[np.float64]:
    """Score by the last token that used it; among one token's, by rank."""
    at = np.arange(1, len(used) + 1)[:, None]
    key = np.where(used, at - slot / (int(slot.max()) + 1), 0.0)
    latest = np.zeros_like(key)
    latest[1:] = np.maximum.accumulate(key, axis=0)[:-1]
    return latest


def _hot(used: NDArray[np.bool_], half: int) -> NDArray[np.float64]:
    count: NDArray[np.float64] = used[:half].sum(axis=0, dtype=np.float64)
    return np.broadcast_to(count, (len(used) - half, len(count)))


def _together(used: NDArray[np.bool_], before: NDArray[np.bool_], half: int) -> NDArray[np.float64]:
    """Expected uses given each expert of the layer before, summed."""
    a, b = before[:half].astype(np.float64), used[:half].astype(np.float64)
    share = b.mean(axis=0)
    given = (a.T @ b + _PRIOR_USES * share) / (a.sum(axis=0)[:, None] + _PRIOR_USES)
    score: NDArray[np.float64] = before.astype(np.float64) @ given
    return score


def _best(score: NDArray[np.float64], named: int) -> NDArray[np.bool_]:
    """The `named` highest scores of each row, the lower expert first among equals; none that score 0."""
    chosen = np.argsort(-score, axis=1, kind="stable")[:, :named]
    found = np.zeros(score.shape, dtype=np.bool_)
    np.put_along_axis(found, chosen, values=True, axis=1)
    return found & (score > 0)
