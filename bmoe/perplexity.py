"""Perplexity of a text, and how far a lossy lever takes a model from itself.

It owns the measure: every token of the text is computed as in decode (one by one, where the levers act), or
in batches, and its negative log-likelihood taken. Beside a plain run, agreement of the likeliest token and
the mean Kullback-Leibler divergence say what perplexity hides. It must not know how figures are shown.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from bmoe.io.errors import UsageError
from bmoe.meter import Meter
from bmoe.runtime import AbortedBatch
from bmoe.session import Session

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from bmoe.config import SessionConfig
    from bmoe.records import EffectiveConfig, StepMetrics

# What is kept of a plain run's distribution to compare with: enough for the divergence of natural text.
_KEPT = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class Perplexity:
    """One run over the text.

    Attributes:
        label: What was changed; "plain" for nothing.
        tokens: Tokens predicted.
        perplexity: exp of the mean negative log-likelihood.
        error: One standard error of it, from the spread over tokens (not independent: a lower bound).
        agreement: Share of tokens whose likeliest is the plain run's; None for that run itself.
        divergence: Mean Kullback-Leibler divergence from the plain run over its likeliest tokens, in nats.
        tokens_per_s: Of computing.
        read_bytes_per_token: None resident.
        hit_rate: Of lookups; None resident.
        dropped_share: Of the router's choices; None unless dropping is on.
        effective: What ran.
    """

    label: str
    tokens: int
    perplexity: float
    error: float
    agreement: float | None
    divergence: float | None
    tokens_per_s: float
    read_bytes_per_token: float | None
    hit_rate: float | None
    dropped_share: float | None
    effective: EffectiveConfig


@dataclass(slots=True)
class _Scores:
    """What one run says about each predicted token."""

    nll: list[float] = dataclasses.field(default_factory=list)
    likeliest: list[int] = dataclasses.field(default_factory=list)
    # Of the plain run: its most likely tokens and their log probabilities.
    ids: list[NDArray[np.int64]] = dataclasses.field(default_factory=list)
    log_p: list[NDArray[np.float64]] = dataclasses.field(default_factory=list)
    divergence: list[float] = dataclasses.field(default_factory=list)


def _note(scores: _Scores, plain: _Scores | None, logits: NDArray[np.float32], target: int) -> None:
    x = logits.astype(np.float64)
    top = float(x.max())
    log_sum = top + math.log(float(np.exp(x - top).sum()))
    index = len(scores.nll)
    scores.nll.append(log_sum - float(x[target]))
    scores.likeliest.append(int(np.argmax(logits)))
    if plain is None:
        kept = np.argpartition(x, -_KEPT)[-_KEPT:] if len(x) > _KEPT else np.arange(len(x))
        scores.ids.append(kept)
        scores.log_p.append(x[kept] - log_sum)
    else:
        log_p = plain.log_p[index]
        here = x[plain.ids[index]] - log_sum
        scores.divergence.append(float((np.exp(log_p) * (log_p - here)).sum()))


async def measure(
    config: SessionConfig,
    text: str,
    *,
    levers: Sequence[tuple[str, dict[str, Any]]] = (),
    most_tokens: int | None = None,
    batched: bool = False,
    on_effective: Callable[[str, EffectiveConfig], None] = lambda _, __: None,
    on_warning: Callable[[str], None] = lambda _: None,
    on_progress: Callable[[str, int, int], None] = lambda _, __, ___: None,
) -> list[Perplexity]:
    """Perplexity of `text`, plain and with each lever, on one model.

    Args:
        config: The plain run. Its context is the window: the text is cut into pieces of that many tokens.
        text: At least two tokens.
        levers: (label, changes to the configuration).
        most_tokens: Cut the text; None takes all.
        batched: Compute each window in batches, as a prompt: quicker, but levers of decode do not act.
        on_effective: Called with (label, what runs) for each run, before anything is computed.
        on_warning: Called with what the user should know.
        on_progress: Called on the decode thread with (label, tokens done, tokens in all).

    Raises:
        UsageError: The text is too short.
        BmoeError: As `Session.open` and `Session.generate`.
    """
    results: list[Perplexity] = []
    plain: _Scores | None = None
    for label, changes in [("plain", {}), *levers]:
        async with await Session.open(
            dataclasses.replace(config, **changes),
            on_effective=partial(on_effective, label),
            on_warning=on_warning,
        ) as session:
            tokens = session.model.tokenize(text)[:most_tokens]
            width = session.context.batch_tokens if batched else 1
            run = partial(_run, session, tokens, plain, width, partial(on_progress, label))
            scores, steps = await session.on_decode_thread(run)
            results.append(_summed_up(label, scores, plain, steps, session))
        plain = plain or scores
    return results


def _run(
    session: Session,
    tokens: Sequence[int],
    plain: _Scores | None,
    width: int,
    on_progress: Callable[[int, int], None],
) -> tuple[_Scores, list[StepMetrics]]:
    context = session.context
    if len(tokens) < 2:
        raise UsageError("the text is too short: perplexity needs at least two tokens")
    scores, steps, meter = _Scores(), [], Meter(session)
    window = context.context_tokens
    for start in range(0, len(tokens) - 1, window):
        context.clear()
        piece = tokens[start : start + window + 1]
        for first in range(0, len(piece) - 1, width):
            if session.is_cancelled:
                raise AbortedBatch
            batch = piece[first : min(first + width, len(piece) - 1)]
            meter.begin()
            context.decode(batch, logits="all", prefill=width > 1)
            steps.append(meter.end(len(batch)))
            for row in range(len(batch)):
                _note(scores, plain, context.logits(row), piece[first + row + 1])
            on_progress(len(scores.nll), len(tokens) - 1)
    return scores, steps


def _summed_up(
    label: str, scores: _Scores, plain: _Scores | None, steps: Sequence[StepMetrics], session: Session
) -> Perplexity:
    nll = np.array(scores.nll)
    perplexity = float(np.exp(nll.mean()))
    tokens = sum(m.tokens for m in steps)
    lookups, hits = sum(m.lookups or 0 for m in steps), sum(m.hits or 0 for m in steps)
    streaming = session.streaming
    dropped = routed = None
    if streaming and session.config.drop_cold_experts > 0:
        counters = streaming.engine.statistics()
        dropped, routed = counters.dropped, counters.routed
    agreement = divergence = None
    if plain is not None:
        agreement = float(np.mean(np.equal(scores.likeliest, plain.likeliest)))
        divergence = float(np.mean(scores.divergence))
    return Perplexity(
        label=label,
        tokens=len(nll),
        perplexity=perplexity,
        error=perplexity * float(nll.std(ddof=1) / math.sqrt(len(nll))) if len(nll) > 1 else math.nan,
        agreement=agreement,
        divergence=divergence,
        tokens_per_s=tokens / (sum(m.wall_ns for m in steps) / 1e9),
        read_bytes_per_token=sum(m.read_bytes or 0 for m in steps) / tokens if streaming else None,
        hit_rate=hits / lookups if lookups else None,
        dropped_share=dropped / routed if dropped is not None and routed else None,
        effective=session.effective,
    )
