"""What a session is asked for, validated once.

It owns names, defaults and ranges. It must not know what is effective in the end: that is reported by
`records.EffectiveConfig` after opening.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Literal

from bmoe.io.errors import UsageError
from bmoe.policies import policy_named

Mode = Literal["auto", "stream", "resident"]
IoBackend = Literal["auto", "uring", "threads"]

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
        policy: Name of the cache policy.
        io_backend: "auto" prefers io_uring.
        queue_depth: Most reads in the kernel at one time; None keeps about 4 MiB in flight: enough for the
            drive, few enough that the slices needed first arrive first.
        direct: Read with O_DIRECT where the file allows it.
        repack: Resident only: llama.cpp's repacked weights (its default). Streaming never repacks.
        watchdog_s: A wait for one slice that lasts longer ends the run.
        half_life_tokens: Ageing of the aged-frequency policy.
        n_expert_used: Experts per token instead of the file's number; another number changes the output.
    """

    model_path: str
    threads: int = field(default_factory=default_threads)
    context_tokens: int = 2048
    ubatch_tokens: int = 512
    mode: Mode = "auto"
    overlap: bool = True
    cache_bytes: int | None = None
    cache_floor_bytes: int | None = None
    policy: str = "aged"
    io_backend: IoBackend = "auto"
    queue_depth: int | None = None
    direct: bool = True
    repack: bool = True
    watchdog_s: float = 30.0
    half_life_tokens: float = 16.0
    n_expert_used: int | None = None

    def __post_init__(self) -> None:
        for name, value, low, high in (
            ("threads", self.threads, 1, 512),
            ("context_tokens", self.context_tokens, 1, 1 << 24),
            ("ubatch_tokens", self.ubatch_tokens, 1, 1 << 16),
            ("queue_depth", self.queue_depth, 1, 4096),
            ("n_expert_used", self.n_expert_used, 1, 1 << 16),
        ):
            if value is not None and not low <= value <= high:
                raise UsageError(f"{name} is {value}, expected {low} to {high}")
        if not self.model_path:
            raise UsageError("no model was given")
        if self.mode not in {"auto", "stream", "resident"}:
            raise UsageError(f"mode {self.mode!r} is not one of auto, stream, resident")
        if self.cache_bytes is not None and self.cache_bytes <= 0:
            raise UsageError(f"the expert cache is {self.cache_bytes} bytes, expected more than 0")
        if not 0 < self.watchdog_s <= 1e9:
            raise UsageError(f"watchdog_s is {self.watchdog_s}, expected up to 1e9 seconds")
        if not 0.01 <= self.half_life_tokens <= 1e9:
            raise UsageError(f"half_life_tokens is {self.half_life_tokens}, expected 0.01 to 1e9")
        policy_named(self.policy)


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerateRequest:
    """One generation.

    Attributes:
        prompt: Raw text. Special tokens written out in it are recognised.
        n_predict: Most tokens to generate.
        forced: Token ids to feed instead of the model's own choices (benchmarks: real text makes routing
            vary). The run ends when they end.
        ignore_eog: Go on past the end-of-generation token.
    """

    prompt: str
    n_predict: int = 128
    forced: tuple[int, ...] = ()
    ignore_eog: bool = False

    def __post_init__(self) -> None:
        if self.n_predict < 0:
            raise UsageError(f"n_predict is {self.n_predict}, expected 0 or more")
