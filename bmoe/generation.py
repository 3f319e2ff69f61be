"""One generation on the decode thread: the prompt in batches, then token by token, each measured.

It owns the loop around llama_decode: what is reused, computed, chosen, and when it ends. It must not know
the event loop: events leave through a callback, and the session decides what an error means.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from bmoe.answer import Answer
from bmoe.chat.messages import Message
from bmoe.dialogue import Prepared, common_prefix
from bmoe.io.errors import BmoeError, Cancelled, UsageError
from bmoe.io.memory_figures import process_memory
from bmoe.meter import Meter
from bmoe.records import PrefillProgress, RunSummary, StepMetrics, TokenEvent
from bmoe.runtime import AbortedBatch
from bmoe.sampling import Sampler

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from bmoe.config import GenerateRequest
    from bmoe.records import End
    from bmoe.runtime import Context
    from bmoe.session import Session

Event = TokenEvent | PrefillProgress | None
"""None is the end."""


def checked_prompt(tokens: Sequence[int], context: Context, n_predict: int) -> list[int]:
    """The prompt's token ids, if there is room for them and for what is to be generated.

    Raises:
        UsageError: Prompt and tokens do not fit the context; says how large a context would do.
    """
    needed = len(tokens) + n_predict
    if needed > context.context_tokens:
        raise UsageError(
            f"{len(tokens)} prompt tokens and {n_predict} to generate do not fit a context of "
            f"{context.context_tokens}",
            hint=f"use -c {needed} or more, or a smaller -n",
        )
    return list(tokens)


def _total(values: Sequence[int | None]) -> int | None:
    return None if not values or any(v is None for v in values) else sum(v for v in values if v is not None)


class Generation:
    """One generation, on the decode thread. Called once; returns the error that ended it, if any.

    Attributes:
        kept_tokens: What the context holds of before this generation; None until it has changed anything.
    """

    def __init__(
        self, session: Session, request: GenerateRequest, post: Callable[[Event], None], *, turn: int
    ) -> None:
        self._session = session
        self._request = request
        self._post = post
        self._turn = turn
        self.kept_tokens: int | None = None
        self._end: End = "length"
        self._prompt_tokens = 0
        self._reused_tokens = 0
        self._full_prefill_reason: str | None = None
        self._shifts = 0
        self._prefill: list[StepMetrics] = session.prefill_metrics
        self._prefill.clear()
        self._steps: list[StepMetrics] = []
        self._latency_mark = 0
        self._routed_mark = 0
        self._sampler: Sampler | None = None

    def __call__(self) -> BaseException | None:
        """Runs it; the error that ended it, or None."""
        try:
            self._generate()
        except BaseException as error:  # noqa: BLE001 (handed to the event loop's side, which raises it)
            return error
        else:
            return None
        finally:
            if self._sampler is not None:
                self._sampler.close()
            self._post(None)

    def _check_cancelled(self) -> None:
        if self._session.is_cancelled:
            raise AbortedBatch

    def _generate(self) -> None:
        session, request, context = self._session, self._request, self._session.context
        prepared = session.dialogue.prepare(request, context.tokens)
        n_predict = request.n_predict
        if n_predict is None or request.context_shift:
            checked_prompt(prepared.tokens, context, 1)
        else:
            checked_prompt(prepared.tokens, context, n_predict)
        if not request.think and session.dialogue.template and session.dialogue.think_control == "none":
            raise UsageError("this model's template has no way to turn reasoning off")
        self._sampler = Sampler(
            request.sampling,
            vocab=session.model.vocab,
            vocab_size=session.model.vocab_size,
            context_tokens=context.context_tokens,
        )
        self._reuse(prepared)
        self._sampler.see(prepared.tokens)
        meter = Meter(session)
        if session.streaming:
            session.streaming.streamer.submit_latencies_ns.clear()
        self._compute_prompt(prepared.tokens[self._reused_tokens :], meter)
        if session.streaming:
            session.streaming.check_seam()
            self._latency_mark = len(session.streaming.streamer.submit_latencies_ns)
            self._routed_mark = session.streaming.engine.statistics().routed
        answer = Answer(session.model, prepared.parser, request.stop)
        self._decode(prepared, meter, self._sampler, answer)
        reply = Message(role="assistant", content=answer.text, reasoning=answer.reasoning or None)
        session.dialogue.last_message = reply
        session.dialogue.messages = (*prepared.messages, reply) if prepared.messages else ()

    def _reuse(self, prepared: Prepared) -> None:
        """Leaves in the context what the prompt starts with; the last token is always computed anew."""
        context = self._session.context
        had = context.n_past
        common = 0
        if self._request.continue_conversation:
            common = min(common_prefix(context.tokens, prepared.tokens), len(prepared.tokens) - 1)
        self.kept_tokens = common
        if not context.truncate(common):
            self._full_prefill_reason = "the model's memory cannot forget a part"
            common = 0
        elif had and not common and self._request.continue_conversation:
            self._full_prefill_reason = "the prompt begins differently"
        if not common:
            context.clear()
        self.kept_tokens = self._reused_tokens = common

    def _compute_prompt(self, tokens: Sequence[int], meter: Meter) -> None:
        session, context = self._session, self._session.context
        step = context.batch_tokens
        for start in range(0, len(tokens), step):
            self._check_cancelled()
            batch = tokens[start : start + step]
            meter.begin()
            context.decode(batch, logits="last" if start + step >= len(tokens) else "none", prefill=True)
            self._prefill.append(meter.end(len(batch)))
            if session.traces:
                session.traces.after_batch(
                    turn=self._turn, phase=0, position=context.n_past, tokens=len(batch)
                )
            self._prompt_tokens += len(batch)
            self._post(PrefillProgress(done_tokens=self._prompt_tokens, total_tokens=len(tokens)))

    def _decode(self, prepared: Prepared, meter: Meter, sampler: Sampler, answer: Answer) -> None:
        session, context, request = self._session, self._session.context, self._request
        limit = request.n_predict
        if limit == 0:
            return
        index, token = 0, self._choose(0, sampler)
        while token is not None:
            self._check_cancelled()
            if context.n_past == context.context_tokens:  # without a shift, the last token ended it
                self._shift(prepared.keep_tokens)
            meter.begin()
            context.decode((token,))
            metrics = meter.end(1)
            self._steps.append(metrics)
            if session.traces:
                session.traces.after_batch(turn=self._turn, phase=1, position=context.n_past, tokens=1)
            # The next token is chosen before this one is shown: only then is it known to be the last.
            following = None if index + 1 == limit else self._choose(index + 1, sampler)
            full = context.n_past == context.context_tokens and not request.context_shift
            piece = answer.feed(token, final=following is None or full)
            if piece.stopped:
                self._end, following = "stop", None
            elif following is not None and full:
                self._end, following = "context", None
            self._post(
                TokenEvent(
                    index=index, token=token, text=piece.text, reasoning=piece.reasoning, metrics=metrics
                )
            )
            index, token = index + 1, following

    def _choose(self, index: int, sampler: Sampler) -> int | None:
        """Token number `index`, or None when there is none, `_end` being why."""
        request = self._request
        if request.forced:
            if index == len(request.forced):
                self._end = "forced"
                return None
            return request.forced[index]
        token = sampler.choose(self._session.context.logits(-1))
        if not request.ignore_eog and self._session.model.is_end_of_generation(token):
            self._end = "eog"
            return None
        return token

    def _shift(self, keep: int) -> None:
        """Makes room in a full context.

        Raises:
            UsageError: This model's memory cannot.
        """
        context = self._session.context
        keep = min(keep, context.n_past - 2)
        if not context.shift(keep, (context.n_past - keep) // 2):
            raise UsageError(
                f"the context of {context.context_tokens} tokens is full, and this model cannot shift it",
                hint=f"use -c {2 * context.context_tokens} or more",
            )
        self._shifts += 1
        # What was there before is no longer a prefix of anything.
        self.kept_tokens = min(self.kept_tokens or 0, keep)

    def summary(self, error: BaseException | None) -> RunSummary:
        """What was done, whatever ended it."""
        session, steps = self._session, self._steps
        lookups, hits = _total([m.lookups for m in steps]), _total([m.hits for m in steps])
        streaming = session.streaming
        p50 = p99 = routed = None
        if streaming and (latencies := streaming.streamer.submit_latencies_ns[self._latency_mark :]):
            p50, p99 = (int(x) for x in np.percentile(latencies, (50, 99)))
        if streaming and session.config.drop_cold_experts > 0:
            routed = streaming.engine.statistics().routed - self._routed_mark
        slots = streaming.streamer.statistics() if streaming else None
        counters = streaming.engine.statistics() if streaming else None
        config = session.config
        ahead = counters.route_committed if counters and config.route_ahead else None
        end: End = self._end
        if error is not None:
            end = "cancelled" if isinstance(error, Cancelled) else "error"
        return RunSummary(
            end=end,
            prompt_tokens=self._prompt_tokens,
            tokens=len(steps),
            prefill_ns=sum(m.wall_ns for m in self._prefill),
            decode_ns=sum(m.wall_ns for m in steps),
            prefill_read_bytes=_total([m.read_bytes for m in self._prefill]),
            decode_read_bytes=_total([m.read_bytes for m in steps]),
            hit_rate=hits / lookups if hits is not None and lookups else None,
            stall_ns=_total([m.stall_ns for m in steps]),
            hook_ns=_total([m.hook_ns for m in steps]),
            compute_ns=sum(m.compute_ns for m in steps),
            overhead_ns=sum(m.overhead_ns or 0 for m in steps),
            cpu_ns=sum(m.cpu_ns for m in steps),
            submit_latency_ns_p50=p50,
            submit_latency_ns_p99=p99,
            slots_used=slots.slots_used if slots else None,
            slots_total=slots.slots_total if slots else None,
            evictions=_total([m.evictions for m in steps]),
            rereads=_total([m.rereads for m in steps]),
            reads=_total([m.reads for m in steps]),
            peak_rss_bytes=process_memory().peak_rss_bytes,
            turn=self._turn,
            reused_tokens=self._reused_tokens,
            full_prefill_reason=self._full_prefill_reason,
            context_tokens_used=session.context.n_past,
            shifts=self._shifts,
            seed=self._sampler.seed if self._sampler else None,
            dropped=_total([m.dropped for m in steps]),
            routed=routed,
            speculative_bytes=_total([m.speculative_bytes for m in steps]),
            speculated_experts=counters.speculated if counters else None,
            substituted=counters.substituted if counters and config.expert_substitute > 0 else None,
            route_committed=ahead,
            route_agreed=counters.route_agreed / (ahead * session.effective.top_k)
            if counters and ahead
            else None,
        )

    def roll_back(self, error: BaseException) -> None:
        """Leaves the context as it was before, as far as this generation has not replaced it."""
        if self.kept_tokens is None and isinstance(error, BmoeError):
            return  # refused before anything was touched
        context = self._session.context
        if self._session.model.has_recurrent_state or not context.truncate(self.kept_tokens or 0):
            context.clear()
