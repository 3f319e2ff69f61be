"""One generation on the decode thread: the prompt in batches, then token by token, each measured.

It owns the loop around llama_decode and what is measured there. It must not know the event loop: events
leave through a callback, and the session decides what an error means.
"""

from __future__ import annotations

import resource
import time
from typing import TYPE_CHECKING, Literal

import numpy as np

from bmoe.io.errors import Cancelled, UsageError
from bmoe.io.memory_figures import process_memory
from bmoe.records import PrefillProgress, RunSummary, StepMetrics, TokenEvent
from bmoe.runtime import AbortedBatch, TextDecoder

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from bmoe.config import GenerateRequest
    from bmoe.runtime import Context, Model
    from bmoe.session import Session

End = Literal["length", "eog", "cancelled", "error", "forced"]
Event = TokenEvent | PrefillProgress | None
"""None is the end."""


def prompt_tokens(model: Model, context: Context, request: GenerateRequest) -> list[int]:
    """The prompt's token ids; at least one, and with room for what is to be generated.

    Raises:
        UsageError: The prompt is empty, or prompt and tokens do not fit the context.
    """
    tokens = model.tokenize(request.prompt)
    if not tokens:
        raise UsageError("the prompt is empty")
    needed = len(tokens) + request.n_predict
    if needed > context.context_tokens:
        raise UsageError(
            f"{len(tokens)} prompt tokens and {request.n_predict} to generate do not fit a context of "
            f"{context.context_tokens}",
            hint=f"use -c {needed} or more, or a smaller -n",
        )
    return tokens


class Meter:
    """Differences of all counters around one llama_decode."""

    def __init__(self, session: Session) -> None:
        self._streaming = session.streaming
        self._threads = session.effective.threads
        self._end_ns: int | None = None

    def begin(self) -> None:
        """Takes the counters before the call."""
        s = self._streaming
        self._before = (s.engine.statistics(), s.streamer.statistics()) if s else None
        self._usage = resource.getrusage(resource.RUSAGE_SELF)
        self._cpu_ns = time.process_time_ns()
        self._t0 = time.monotonic_ns()

    def end(self, tokens: int) -> StepMetrics:
        """What the call of `tokens` tokens added to them."""
        t1 = time.monotonic_ns()
        cpu_ns = time.process_time_ns() - self._cpu_ns
        usage = resource.getrusage(resource.RUSAGE_SELF)
        stall = experts = hook = loop = lookups = hits = reads = read_bytes = evictions = rereads = None
        if self._streaming and self._before:
            e0, s0 = self._before
            e1, s1 = self._streaming.engine.statistics(), self._streaming.streamer.statistics()
            stall = (e1.stall_ns - e0.stall_ns) // self._threads
            experts = e1.kernel_ns - e0.kernel_ns
            hook, loop = e1.announce_ns - e0.announce_ns, s1.loop_ns - s0.loop_ns
            lookups, hits = e1.lookups - e0.lookups, e1.hits - e0.hits
            reads, read_bytes = s1.reads - s0.reads, s1.read_bytes - s0.read_bytes
            evictions, rereads = s1.evictions - s0.evictions, s1.rereads - s0.rereads
        overhead_ns = None if self._end_ns is None else self._t0 - self._end_ns
        self._end_ns = t1
        return StepMetrics(
            tokens=tokens,
            wall_ns=t1 - self._t0,
            stall_ns=stall,
            experts_ns=experts,
            hook_ns=hook,
            loop_ns=loop,
            lookups=lookups,
            hits=hits,
            reads=reads,
            read_bytes=read_bytes,
            evictions=evictions,
            rereads=rereads,
            cpu_ns=cpu_ns,
            minor_faults=usage.ru_minflt - self._usage.ru_minflt,
            major_faults=usage.ru_majflt - self._usage.ru_majflt,
            overhead_ns=overhead_ns,
        )


def _total(values: Sequence[int | None]) -> int | None:
    return None if not values or any(v is None for v in values) else sum(v for v in values if v is not None)


class Generation:
    """One generation, on the decode thread. Called once; returns the error that ended it, if any."""

    def __init__(self, session: Session, request: GenerateRequest, post: Callable[[Event], None]) -> None:
        self._session = session
        self._request = request
        self._post = post
        self._end: End = "length"
        self._prompt_tokens = 0
        self._prefill: list[StepMetrics] = session.prefill_metrics
        self._prefill.clear()
        self._steps: list[StepMetrics] = []
        self._latency_mark = 0

    def __call__(self) -> BaseException | None:
        """Runs it; the error that ended it, or None."""
        try:
            self._generate()
        except BaseException as error:  # noqa: BLE001 (handed to the event loop's side, which raises it)
            return error
        else:
            return None
        finally:
            self._post(None)

    def _check_cancelled(self) -> None:
        if self._session.is_cancelled:
            raise AbortedBatch

    def _generate(self) -> None:
        session, request = self._session, self._request
        context, model = session.context, session.model
        tokens = prompt_tokens(model, context, request)
        context.clear()
        if session.streaming:
            session.streaming.streamer.submit_latencies_ns.clear()
            session.streaming.streamer.request_bytes.clear()
        meter = Meter(session)
        step = context.batch_tokens
        for start in range(0, len(tokens), step):
            self._check_cancelled()
            batch = tokens[start : start + step]
            meter.begin()
            context.decode(batch, logits="last" if start + step >= len(tokens) else "none")
            self._prefill.append(meter.end(len(batch)))
            self._prompt_tokens += len(batch)
            self._post(PrefillProgress(done_tokens=self._prompt_tokens, total_tokens=len(tokens)))
        if session.streaming:
            session.streaming.check_seam()
            self._latency_mark = len(session.streaming.streamer.submit_latencies_ns)
        self._decode(meter)

    def _decode(self, meter: Meter) -> None:
        context, model, request = self._session.context, self._session.model, self._request
        text = TextDecoder()
        for index in range(request.n_predict):
            self._check_cancelled()
            if request.forced:
                if index == len(request.forced):
                    self._end = "forced"
                    break
                token = request.forced[index]
            else:
                token = context.greedy()
                if not request.ignore_eog and model.is_end_of_generation(token):
                    self._end = "eog"
                    break
            meter.begin()
            context.decode((token,))
            metrics = meter.end(1)
            self._steps.append(metrics)
            last = index == request.n_predict - 1
            piece = text.feed(model.piece(token), final=last)
            self._post(TokenEvent(index=index, token=token, text=piece, metrics=metrics))

    def summary(self, error: BaseException | None) -> RunSummary:
        """What was done, whatever ended it."""
        session, steps = self._session, self._steps
        lookups, hits = _total([m.lookups for m in steps]), _total([m.hits for m in steps])
        streaming = session.streaming
        p50 = p99 = None
        if streaming and (latencies := streaming.streamer.submit_latencies_ns[self._latency_mark :]):
            p50, p99 = (int(x) for x in np.percentile(latencies, (50, 99)))
        slots = streaming.streamer.statistics() if streaming else None
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
        )
