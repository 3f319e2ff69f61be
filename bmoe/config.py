"""What a session is asked for, validated once.

It owns names, defaults and ranges. It must not know what is effective in the end: that is reported by
`records.EffectiveConfig` after opening.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Literal

from bmoe.chat.messages import Message  # noqa: TC001 (the records are read at run time too)
from bmoe.io.errors import UsageError
from bmoe.policies import DEFAULT_POLICY, half_life_batches, policy_named

Mode = Literal["auto", "stream", "resident"]
IoBackend = Literal["auto", "uring", "threads"]
DenseMode = Literal["anon", "mmap", "warm", "locked", "repack"]

MIB = 1 << 20


def default_threads() -> int:
    """CPUs that this process may use."""
    return len(os.sched_getaffinity(0))


@dataclass(frozen=True, kw_only=True, slots=True)
class SessionConfig:
    """Fixed for the life of a session.

    Attributes:
        model_path: A GGUF file, or the first shard of a split set.
        threads: Compute threads.
        context_tokens: KV cells.
        ubatch_tokens: Widest graph computed at once; prompts are cut to it.
        mode: "auto" streams when the model has experts; "resident" is plain llama.cpp mmap; "stream" refuses
            a dense model.
        overlap: Compute experts as they arrive; False waits for all of a layer's reads first.
        cache_bytes: Memory for expert slots; None sizes it from what is available.
        cache_floor_bytes: With automatic sizing, memory to leave free; None chooses.
        cache_ceil_bytes: With automatic sizing, the most to take; None is all there is.
        give_back: Let the cache shrink, and grow again, as other programs need memory.
        dense_weights: Where the weights that are no experts are kept (docs/memory.md).
        warm: Experts to preload: a file, "auto" for what the last run with this model kept, or None.
        policy: Name of the cache policy.
        io_backend: "auto" prefers io_uring.
        queue_depth: Most reads in the kernel at one time; None keeps about 4 MiB in flight: enough for the
            drive, few enough that the slices needed first arrive first.
        direct: Read with O_DIRECT where the file allows it.
        repack: Resident only: llama.cpp's repacked weights (its default). Streaming never repacks.
        watchdog_s: A wait for one slice that lasts longer ends the run.
        half_life_tokens: Ageing of use counts; None is what the policy was tuned with.
        n_expert_used: Experts per token instead of the file's number; another number changes the output.
        route_trace: File for every routing decision. Costs a little; such runs are marked.
        io_trace: File for every read. As above.
        compute_trace: File for the time of every graph node: cuts the graph, slow.
        compute_trace_layers: File for the time of every layer, instead.
        layer_metrics: Count by layer too (`StepMetrics.layers`).
        drop_cold_experts: Lossy: leave out an expert that is not in memory when its weight is below this
            share of an equal part, 1 / top-k. 0 is off.
        drop_renormalise: Give the weight of what was dropped to what was kept.
        drop_in_prefill: Drop in the prompt too.
        deterministic_cache: Drop by an imagined cache that depends on the tokens alone, so that the same
            request gives the same text.
        expert_substitute: Lossy: prefer experts in memory by this much of the range of a token's router
            scores. 0 is off.
        replay_routing: Lossy: a recorded route trace whose experts replace the router's choice
            (benchmarks with models of random weights).
        prefetch_layers: Read ahead, for this many layers, what the previous token used there.
        predict_prefetch: Read ahead what the next layers' routers say of this layer's input, while the
            drive has time to spare.
        predict_log: Measure how well routing can be predicted.
        route_ahead: Lossy: take the routing of a layer from the input of the one this many layers before.
    """

    model_path: str
    threads: int = field(default_factory=default_threads)
    context_tokens: int = 2048
    ubatch_tokens: int = 512
    mode: Mode = "auto"
    overlap: bool = True
    cache_bytes: int | None = None
    cache_floor_bytes: int | None = None
    policy: str = DEFAULT_POLICY
    io_backend: IoBackend = "auto"
    queue_depth: int | None = None
    direct: bool = True
    repack: bool = True
    watchdog_s: float = 30.0
    half_life_tokens: float | None = None
    n_expert_used: int | None = None
    cache_ceil_bytes: int | None = None
    give_back: bool = False
    dense_weights: DenseMode = "anon"
    warm: str | None = None
    route_trace: str | None = None
    io_trace: str | None = None
    compute_trace: str | None = None
    compute_trace_layers: str | None = None
    layer_metrics: bool = False
    drop_cold_experts: float = 0.0
    drop_renormalise: bool = True
    drop_in_prefill: bool = False
    deterministic_cache: bool = False
    expert_substitute: float = 0.0
    replay_routing: str | None = None
    prefetch_layers: int = 0
    predict_prefetch: bool = False
    predict_log: bool = False
    route_ahead: int = 0

    def __post_init__(self) -> None:
        for name, value, low, high in (
            ("threads", self.threads, 1, 512),
            ("context_tokens", self.context_tokens, 1, 1 << 24),
            ("ubatch_tokens", self.ubatch_tokens, 1, 1 << 16),
            ("queue_depth", self.queue_depth, 1, 4096),
            ("n_expert_used", self.n_expert_used, 1, 1 << 16),
            ("drop_cold_experts", self.drop_cold_experts, 0, 1),
            ("expert_substitute", self.expert_substitute, 0, 100),
            ("prefetch_layers", self.prefetch_layers, 0, 8),
            ("route_ahead", self.route_ahead, 0, 8),
        ):
            if value is not None and not low <= value <= high:
                raise UsageError(f"{name} is {value}, expected {low} to {high}")
        self._check_choices()
        self._check_levers()
        policy_named(self.policy)

    @property
    def half_life_batches(self) -> float:
        """The ageing that is in effect."""
        return self.half_life_tokens or half_life_batches(self.policy)

    def _check_choices(self) -> None:
        if not self.model_path:
            raise UsageError("no model was given")
        if self.mode not in {"auto", "stream", "resident"}:
            raise UsageError(f"mode {self.mode!r} is not one of auto, stream, resident")
        if self.cache_bytes is not None and self.cache_bytes <= 0:
            raise UsageError(f"the expert cache is {self.cache_bytes} bytes, expected more than 0")
        if not 0 < self.watchdog_s <= 1e9:
            raise UsageError(f"watchdog_s is {self.watchdog_s}, expected up to 1e9 seconds")
        if self.half_life_tokens is not None and not 0.01 <= self.half_life_tokens <= 1e9:
            raise UsageError(f"half_life_tokens is {self.half_life_tokens}, expected 0.01 to 1e9")

    def _check_levers(self) -> None:
        if self.mode == "resident" and self.dense_weights not in {"anon", "repack"}:
            raise UsageError(f"dense_weights {self.dense_weights} has no effect on a resident model")
        if self.prefetch_layers and self.predict_prefetch:
            raise UsageError("prefetch and predict-prefetch exclude each other: both read ahead")
        if self.route_ahead and (self.prefetch_layers or self.predict_prefetch or self.predict_log):
            raise UsageError("route-ahead excludes prefetch, predict-prefetch and predict-log")
        if self.compute_trace and self.compute_trace_layers:
            raise UsageError("a compute trace is either by node or by layer")
        if self.dense_weights not in {"anon", "mmap", "warm", "locked", "repack"}:
            raise UsageError(
                f"dense_weights {self.dense_weights!r} is not one of anon, mmap, warm, locked, repack"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampling:
    """How the next token is chosen, by llama.cpp's samplers in this order.

    Attributes:
        temperature: 0 takes the likeliest token, the first of equals, and only penalties and grammar apply.
        top_k: Keep this many likeliest; 0 keeps all.
        top_p: Keep the likeliest that make up this probability; 1 keeps all.
        min_p: Keep those at least this likely relative to the likeliest; 0 keeps all.
        repeat_penalty: Divides the logits of tokens seen in the last `repeat_last_n`; 1 is off.
        repeat_last_n: How far back penalties look, in tokens; -1 is the whole context.
        frequency_penalty, presence_penalty: Subtracted per occurrence, and once; 0 is off.
        seed: Same seed, same text; None draws one, which `RunSummary.seed` tells.
        grammar: GBNF that the answer must follow, or None.
        json_schema: JSON Schema, as text, that the answer must follow, or None.
    """

    temperature: float = 0.0
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.0
    repeat_penalty: float = 1.0
    repeat_last_n: int = 64
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    seed: int | None = None
    grammar: str | None = None
    json_schema: str | None = None

    def __post_init__(self) -> None:
        for name, value, low, high in (
            ("temperature", self.temperature, 0, 100),
            ("top_k", self.top_k, 0, 1 << 24),
            ("top_p", self.top_p, 0, 1),
            ("min_p", self.min_p, 0, 1),
            ("repeat_penalty", self.repeat_penalty, 0.01, 100),
            ("repeat_last_n", self.repeat_last_n, -1, 1 << 24),
            ("frequency_penalty", self.frequency_penalty, -100, 100),
            ("presence_penalty", self.presence_penalty, -100, 100),
            ("seed", 0 if self.seed is None else self.seed, 0, (1 << 32) - 2),
        ):
            if not low <= value <= high:
                raise UsageError(f"{name} is {value}, expected {low} to {high}")
        if self.top_p == 0:
            raise UsageError("top_p is 0, expected above 0")
        if self.grammar is not None and self.json_schema is not None:
            raise UsageError("a grammar and a JSON schema exclude each other")

    @property
    def is_plain_greedy(self) -> bool:
        """Whether the token is simply the one with the largest logit."""
        return (
            self.temperature == 0
            and self.repeat_penalty == 1
            and not self.frequency_penalty
            and not self.presence_penalty
            and self.grammar is None
            and self.json_schema is None
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerateRequest:
    """One generation. Either `prompt` or `messages`.

    Attributes:
        prompt: Raw text. Special tokens written out in it are recognised.
        messages: New messages of a conversation, rendered with the model's own template after those that
            the session has kept, when continuing.
        continue_conversation: Go on from what the session has: messages after its conversation, a prompt
            right after its last token. Otherwise start afresh.
        n_predict: Most tokens to generate; None is as many as the context holds.
        think: Let a reasoning model reason. False needs a template that offers it
            (`EffectiveConfig.think_control`).
        sampling: How tokens are chosen.
        stop: Texts that end the answer when they appear in it; they are not part of it.
        context_shift: When the context is full, forget the older half of what follows the prompt's first
            tokens instead of ending, where the model allows it.
        forced: Token ids to feed instead of the model's own choices (benchmarks: real text makes routing
            vary). The run ends when they end.
        ignore_eog: Go on past the end-of-generation token.
    """

    prompt: str | None = None
    messages: tuple[Message, ...] = ()
    continue_conversation: bool = False
    n_predict: int | None = 128
    think: bool = True
    sampling: Sampling = Sampling()
    stop: tuple[str, ...] = ()
    context_shift: bool = False
    forced: tuple[int, ...] = ()
    ignore_eog: bool = False

    def __post_init__(self) -> None:
        if self.n_predict is not None and self.n_predict < 0:
            raise UsageError(f"n_predict is {self.n_predict}, expected 0 or more")
        if (self.prompt is None) == (not self.messages):
            raise UsageError("a generation needs either a prompt or messages")
        if not all(self.stop):
            raise UsageError("a stop string is empty")
