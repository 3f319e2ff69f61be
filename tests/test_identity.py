"""Streaming computes what plain llama.cpp computes, to the last bit of every logit."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from bmoe.config import GenerateRequest
from bmoe.io.testing import FaultyBackend
from bmoe.session import Session
from bmoe.synth import QUANTISATIONS
from bmoe.verify import trace, verify
from tests.models import tiny_moe
from tests.runs import (
    cache_of_layer,
    cache_of_part,
    cache_of_slots,
    config,
    expected,
    layout_of,
    run,
)

if TYPE_CHECKING:
    from bmoe.config import SessionConfig
    from bmoe.io.backend import OnComplete, ReadBackend, Target
    from bmoe.verify import VerifyReport

REQUIRED_QUANTISATIONS = ("F32", "F16", "Q8_0", "Q4_0", "Q4_K", "Q6_K", "Q4_K_M")
PROMPT = "Streaming must not change a bit."
LONG_PROMPT = "".join(chr(32 + i * 7919 % 95) for i in range(599))


def report(wanted: SessionConfig, prompt: str = PROMPT, n_predict: int = 6) -> VerifyReport:
    return run(verify(wanted, GenerateRequest(prompt=prompt, n_predict=n_predict)))


def assert_verified(wanted: SessionConfig, prompt: str = PROMPT, n_predict: int = 6) -> None:
    got = report(wanted, prompt, n_predict)
    assert got.identical, f"position {got.first_difference} differs"
    assert got.digest == got.resident_digest
    assert (got.prompt_tokens, got.tokens) == (1 + len(prompt), n_predict)  # one token in front of the bytes


def test_the_matrix_names_every_quantisation_that_can_be_made() -> None:
    assert set(REQUIRED_QUANTISATIONS) <= set(QUANTISATIONS)


@pytest.mark.parametrize("cache", ["layer", 0.1, 0.5, 1.0])
@pytest.mark.parametrize("quant", REQUIRED_QUANTISATIONS)
def test_every_quantisation_is_identical_at_every_cache_size(quant: str, cache: str | float) -> None:
    path = tiny_moe(quant)
    size = cache_of_part(path, cache) if isinstance(cache, float) else cache_of_layer(path)
    assert_verified(config(path, cache_bytes=size, threads=2))


@pytest.mark.parametrize("backend", ["uring", "threads"])
@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("threads", [1, 2, 4])
def test_threads_overlap_backend_and_page_cache_change_nothing(
    threads: int, overlap: bool, direct: bool, backend: str
) -> None:
    wanted = config(
        tiny_moe("Q4_K_M"), threads=threads, overlap=overlap, direct=direct, io_backend=backend, queue_depth=4
    )
    assert_verified(wanted)


@pytest.mark.parametrize("policy", ["aged", "lru", "recurring"])
def test_both_policies_are_identical(policy: str) -> None:
    assert_verified(config(tiny_moe("Q4_K"), policy=policy), n_predict=24)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ubatch", "quant"),
    [(1, "Q4_K_M"), (7, "Q4_K_M"), (64, "Q4_K_M"), (512, "Q4_K_M"), (64, "F16"), (512, "F16")],
)
def test_a_prompt_of_600_tokens_is_identical_at_every_batch_width(ubatch: int, quant: str) -> None:
    """With 600 tokens, 16 experts and top-4, experts of a batch of 64 have 5 to 30 rows; of 512, over 100."""
    threads = 1 if ubatch == 1 else 2  # 600 graphs of one token: nothing to share
    wanted = config(tiny_moe(quant), threads=threads, ubatch_tokens=ubatch, context_tokens=640)
    assert_verified(wanted, LONG_PROMPT, 3)


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("slots", [1, 3])
def test_a_wide_batch_fits_through_a_slot_or_three(slots: int, overlap: bool) -> None:
    """Prefill routes to all 16 experts of three matmuls; the batch has one slot."""
    path = tiny_moe("Q8_0", layers=2)
    wanted = config(path, threads=2, cache_bytes=cache_of_slots(path, slots), overlap=overlap)
    assert_verified(wanted, LONG_PROMPT[:64], 4)


@pytest.mark.parametrize("rows", [7, 8, 9])
@pytest.mark.parametrize("quant", ["Q4_K", "Q6_K", "Q4_K_M"])
@pytest.mark.parametrize("threads", [1, 2])
def test_rows_around_the_stock_kernels_switch_are_identical(threads: int, quant: str, rows: int) -> None:
    """Every token goes to every expert, so an expert has as many rows as the batch has tokens."""
    path = tiny_moe(quant, experts=4, top_k=4)
    wanted = config(path, threads=threads, ubatch_tokens=rows)
    assert_verified(wanted, LONG_PROMPT[: 2 * rows - 1], 2)


@pytest.mark.parametrize("quant", ["F32", "F16", "Q8_0", "Q4_0"])
def test_widths_that_are_no_multiple_of_a_piece_are_identical(quant: str) -> None:
    """Pieces are multiples of 64 weight rows; here experts have 96 and 160."""
    path = tiny_moe(quant, layers=2, embedding=160, experts=4, top_k=3, expert_width=96)
    for threads in (1, 3):
        assert_verified(config(path, threads=threads), LONG_PROMPT[:40], 4)


def test_one_expert_per_token_is_identical() -> None:
    path = tiny_moe("Q4_K", top_k=1)
    for slots in (1, 2):
        assert_verified(config(path, cache_bytes=cache_of_slots(path, slots)))


def test_more_experts_than_a_byte_counts_are_identical() -> None:
    path = tiny_moe("Q8_0", layers=2, experts=300, top_k=2, expert_width=32, embedding=64)
    assert_verified(config(path, threads=2), LONG_PROMPT[:100], 4)


@pytest.mark.parametrize("dense_layers", [0, 1, 2])
@pytest.mark.parametrize("quant", ["Q4_K", "F32"])
def test_fused_projections_and_leading_dense_layers_are_identical(quant: str, dense_layers: int) -> None:
    """gemma4: gate and up in one tensor, a dense feed-forward beside the experts, a sliding window."""
    path = tiny_moe(quant, arch="gemma4", layers=4, dense_layers=dense_layers)
    wanted = config(path, threads=2, context_tokens=640)
    assert_verified(wanted, LONG_PROMPT[:300] if quant == "Q4_K" else PROMPT, 6)


@pytest.mark.parametrize("cache", [0.1, 1.0])
def test_the_llama_architecture_is_identical(cache: float) -> None:
    path = tiny_moe("Q4_K_M", arch="llama")
    assert_verified(config(path, cache_bytes=cache_of_part(path, cache)))


@pytest.mark.parametrize("cache", [0.1, 0.5, 1.0])
def test_a_second_generation_finds_a_warm_cache_and_says_the_same(cache: float) -> None:
    path = tiny_moe("Q4_K_M")
    want = expected(path, PROMPT, 12)
    other = expected(path, LONG_PROMPT[:50], 3)

    async def scenario() -> None:
        async with await Session.open(config(path, cache_bytes=cache_of_part(path, cache))) as session:
            assert session.streaming is not None
            request = GenerateRequest(prompt=PROMPT, n_predict=12)
            assert await trace(session, request) == want
            assert await trace(session, GenerateRequest(prompt=LONG_PROMPT[:50], n_predict=3)) == other
            before = session.streaming.streamer.statistics().reads
            assert await trace(session, request) == want
            warm_reads = session.streaming.streamer.statistics().reads - before
            assert warm_reads == 0 if cache == 1.0 else warm_reads > 0

    run(scenario())


def test_generations_of_two_open_sessions_alternate() -> None:
    paths = [tiny_moe("Q4_K"), tiny_moe("F16", layers=2)]
    want = [expected(path, PROMPT, 3) for path in paths]

    async def scenario() -> None:
        first, second = [await Session.open(config(path)) for path in paths]
        async with first, second:
            for session, one in [(first, want[0]), (second, want[1])] * 2:
                assert await trace(session, GenerateRequest(prompt=PROMPT, n_predict=3)) == one

    run(scenario())


def test_two_sessions_compute_at_the_same_time() -> None:
    paths = [tiny_moe("Q4_K"), tiny_moe("F16", layers=2)]
    want = [expected(path, LONG_PROMPT[:60], 10) for path in paths]

    async def scenario() -> None:
        first, second = [await Session.open(config(path)) for path in paths]
        async with first, second:
            request = GenerateRequest(prompt=LONG_PROMPT[:60], n_predict=10)
            assert list(await asyncio.gather(trace(first, request), trace(second, request))) == want

    run(scenario())


# The tests above can fail: each of these spoils one read and must be caught.


class _Spoiled(FaultyBackend):
    """Reads one slice from another place (`shift_bytes`), or not at all (None)."""

    def __init__(self, inner: ReadBackend, index: int, shift_bytes: int | None) -> None:
        super().__init__(inner, {})
        self._left = index
        self._shift_bytes = shift_bytes
        self._loop: asyncio.AbstractEventLoop | None = None

    def start(self, loop: asyncio.AbstractEventLoop, on_complete: OnComplete) -> None:
        self._loop = loop
        super().start(loop, on_complete)

    def read(self, file_id: int, offset_bytes: int, target: Target, tag: int) -> None:
        self._left -= 1
        if self._left != -1:
            super().read(file_id, offset_bytes, target, tag)
        elif self._shift_bytes is not None:
            super().read(file_id, offset_bytes + self._shift_bytes, target, tag)
        else:
            assert self._loop is not None
            self._loop.call_soon(self._deliver, [tag], [target.view.nbytes])


@pytest.mark.parametrize(
    "shift_bytes", [None, 4096, -4096, 36864], ids=["unread", "late", "early", "neighbour"]
)
@pytest.mark.parametrize("index", [4, 30])
def test_a_slice_from_the_wrong_place_is_noticed(index: int, shift_bytes: int | None) -> None:
    """Every expert is used by every token; a slice is 36,864 bytes long."""
    path = tiny_moe("Q4_K", experts=4, top_k=4)
    assert {t.slice_bytes for t in layout_of(path).tensors} == {36864}
    request = GenerateRequest(prompt=PROMPT, n_predict=4)
    got = run(verify(config(path), request, wrap_backend=lambda b: _Spoiled(b, index, shift_bytes)))
    assert not got.identical
    assert got.digest != got.resident_digest
    assert got.first_difference == 0
