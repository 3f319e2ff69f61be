"""Identity: the same prompt resident and streaming, compared to the last bit of every logit.

It owns the comparison. The resident side is llama.cpp without repacking, since repacked weights round
differently (docs/seam.md), or with that of dense weights only where the streaming
side has it too; all else that could change a result is the same on both sides.
"""

from __future__ import annotations

import dataclasses
import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bmoe.generation import checked_prompt
from bmoe.present import one_line
from bmoe.session import Session

if TYPE_CHECKING:
    from collections.abc import Callable

    from bmoe.config import GenerateRequest, SessionConfig
    from bmoe.io.backend import ReadBackend
    from bmoe.records import EffectiveConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class VerifyReport:
    """Outcome of a comparison.

    Attributes:
        identical: Every logit of every position and every token agree.
        digest: SHA-256 over all logits of the streaming run, position by position.
        resident_digest: The same of the resident run.
        prompt_tokens, tokens: Positions compared.
        first_difference: Position of the first logits that differ, or None.
        effective: Of the streaming run.
        resident_effective: Of the resident run.
    """

    identical: bool
    digest: str
    resident_digest: str
    prompt_tokens: int
    tokens: int
    first_difference: int | None
    effective: EffectiveConfig
    resident_effective: EffectiveConfig


@dataclass(frozen=True, slots=True)
class LogitsTrace:
    """What one run computed: a digest per position, the tokens chosen, a digest over everything."""

    positions: tuple[bytes, ...]
    tokens: tuple[int, ...]
    prompt_tokens: int
    digest: str


async def trace(session: Session, request: GenerateRequest) -> LogitsTrace:
    """Computes the prompt in batches with logits for every position, then greedy tokens one by one.

    Raises:
        BmoeError: As `Session.generate`.
    """
    n_predict = request.n_predict or 0

    def run() -> LogitsTrace:
        context = session.context
        prompt = checked_prompt(session.dialogue.prepare(request, ()).tokens, context, n_predict)
        context.clear()
        everything = hashlib.sha256()
        positions: list[bytes] = []
        tokens: list[int] = []

        def record(rows: int) -> None:
            for row in range(rows):
                raw = context.logits(row).tobytes()
                everything.update(raw)
                positions.append(hashlib.sha256(raw).digest())

        for start in range(0, len(prompt), context.batch_tokens):
            batch = prompt[start : start + context.batch_tokens]
            context.decode(batch, logits="all", prefill=True)
            record(len(batch))
        if session.streaming:
            session.streaming.check_seam()
        for _ in range(n_predict):
            tokens.append(context.greedy())
            context.decode(tokens[-1:])
            record(1)
        return LogitsTrace(tuple(positions), tuple(tokens), len(prompt), everything.hexdigest())

    return await session.on_decode_thread(run)


async def verify(
    config: SessionConfig,
    request: GenerateRequest,
    *,
    on_stage: Callable[[str], None] | None = None,
    wrap_backend: Callable[[ReadBackend], ReadBackend] | None = None,
) -> VerifyReport:
    """Runs a prompt resident and streaming and compares.

    Args:
        config: Of the streaming run; the resident one takes model, threads, context and ubatch from it.
        request: Prompt and number of greedy tokens.
        on_stage: Told what is going on.
        wrap_backend: Tests inject faults and delays into the streaming run here.

    Raises:
        UsageError: The model has no experts.
        BmoeError: As `Session.open` and `Session.generate`.
    """
    say = on_stage or (lambda _: None)
    repacked = "dense weights repacked" if config.dense_weights == "repack" else "repacking off"
    say(f"resident run ({repacked})")
    plain = dataclasses.replace(config, mode="resident", repack=False)
    async with await Session.open(plain) as session:
        expected = await trace(session, request)
        resident_effective = session.effective
    say("streaming run")
    async with await Session.open(
        dataclasses.replace(config, mode="stream"),
        wrap_backend=wrap_backend,
        on_warning=lambda text: say(one_line(f"warning: {text}")),
    ) as session:
        got = await trace(session, request)
        effective = session.effective
    pairs = zip(expected.positions, got.positions, strict=True)
    first = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
    return VerifyReport(
        identical=first is None and expected.tokens == got.tokens,
        digest=got.digest,
        resident_digest=expected.digest,
        prompt_tokens=got.prompt_tokens,
        tokens=len(got.tokens),
        first_difference=first,
        effective=effective,
        resident_effective=resident_effective,
    )
