"""Runs of small models that several tests share: cache sizes in words, resident references, streams."""

from __future__ import annotations

import asyncio
import functools
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeVar

from bmoe.config import GenerateRequest, SessionConfig
from bmoe.gguf_file import read_gguf
from bmoe.io.files import DirectFile
from bmoe.model import ModelLayout, lay_out
from bmoe.pipeline.slots import slot_bytes_for, total_slot_bytes
from bmoe.session import Session
from bmoe.verify import LogitsTrace, trace

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from bmoe.io.backend import ReadBackend
    from bmoe.records import TokenEvent

_T = TypeVar("_T")

# A hang becomes an error that names a slice; far longer than any wait of a healthy run.
WATCHDOG_S = 20.0


@functools.cache
def layout_of(path: str) -> ModelLayout:
    return lay_out(read_gguf(path))


@functools.cache
def _block_bytes(path: str) -> int:
    with DirectFile.open(path) as file:
        return file.block_bytes


def cache_of_slots(path: str, slots: int) -> int:
    """Bytes for exactly `slots` slots of a model whose slices all have one size."""
    (slice_bytes,) = {t.slice_bytes for t in layout_of(path).tensors}
    return slots * slot_bytes_for(slice_bytes, _block_bytes(path))


def cache_of_part(path: str, fraction: float) -> int:
    """Bytes for this fraction of all experts, at least the least that works."""
    tensors = layout_of(path).tensors
    everything = total_slot_bytes(tensors, _block_bytes(path))
    sizes = [t.slice_bytes for t in tensors for _ in range(t.experts)]
    return max(int(everything * fraction), -(-everything // min(map(sizes.count, set(sizes)))))


def cache_of_layer(path: str) -> int:
    """Bytes for what one token routes over in the largest layer."""
    layout = layout_of(path)
    per_layer = [0] * len(layout.layer_numbers)
    for t in layout.tensors:
        per_layer[t.layer] += layout.top_k * slot_bytes_for(t.slice_bytes, _block_bytes(path))
    return max(per_layer)


def config(path: str, **changes: Any) -> SessionConfig:
    """A small streaming session: 256 cells, batches of 64, one thread, a tenth of the experts cached."""
    plain: dict[str, Any] = {
        "model_path": path,
        "threads": 1,
        "context_tokens": 256,
        "ubatch_tokens": 64,
        "mode": "stream",
        "cache_bytes": cache_of_part(path, 0.1),
        "watchdog_s": WATCHDOG_S,
    }
    return SessionConfig(**(plain | changes))


async def generated(
    session: Session,
    prompt: str,
    n_predict: int,
    *,
    on_token: Callable[[TokenEvent], None] = lambda _: None,
    into: list[int] | None = None,
    **callbacks: Any,
) -> list[int]:
    """All tokens of one generation; those seen before an error are in `into`."""
    tokens = [] if into is None else into
    request = GenerateRequest(prompt=prompt, n_predict=n_predict, ignore_eog=True)
    async for event in session.generate(request, **callbacks):
        tokens.append(event.token)
        on_token(event)
    return tokens


def run(scenario: Coroutine[Any, Any, _T]) -> _T:
    return asyncio.run(scenario)


@functools.cache
def expected(
    path: str,
    prompt: str,
    n_predict: int,
    *,
    threads: int = 1,
    ubatch_tokens: int = 64,
    context_tokens: int = 256,
) -> LogitsTrace:
    """The resident run, repacking off."""
    plain = SessionConfig(
        model_path=path,
        mode="resident",
        repack=False,
        threads=threads,
        ubatch_tokens=ubatch_tokens,
        context_tokens=context_tokens,
    )

    async def scenario() -> LogitsTrace:
        async with await Session.open(plain) as session:
            return await trace(session, GenerateRequest(prompt=prompt, n_predict=n_predict))

    # In a thread of its own: a scenario that is running may ask, and has the loop here.
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(run, scenario()).result()


def streamed(
    wanted: SessionConfig,
    prompt: str,
    n_predict: int,
    *,
    wrap_backend: Callable[[ReadBackend], ReadBackend] | None = None,
    prepare: Callable[[Session], None] = lambda _: None,
) -> LogitsTrace:
    """A streaming run; `prepare` gets the open session before it computes anything."""

    async def scenario() -> LogitsTrace:
        async with await Session.open(wanted, wrap_backend=wrap_backend) as session:
            prepare(session)
            return await trace(session, GenerateRequest(prompt=prompt, n_predict=n_predict))

    return run(scenario())


def assert_same_as_resident(wanted: SessionConfig, prompt: str, n_predict: int, **how: Any) -> None:
    """Every logit and every token of a streaming run is the resident run's."""
    got = streamed(wanted, prompt, n_predict, **how)
    want = expected(
        wanted.model_path,
        prompt,
        n_predict,
        threads=wanted.threads,
        ubatch_tokens=wanted.ubatch_tokens,
        context_tokens=wanted.context_tokens,
    )
    pairs = zip(got.positions, want.positions, strict=True)
    differ = [position for position, (a, b) in enumerate(pairs) if a != b]
    assert (differ, got.tokens, got.digest) == ([], want.tokens, want.digest)
