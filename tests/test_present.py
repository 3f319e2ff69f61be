"""Records in words, compared with the words themselves."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

import pytest

from bmoe.present import (
    _ENDS,
    chat_line,
    live_line,
    mib,
    mode_line,
    one_line,
    stopped_loading,
    summary_lines,
    warnings,
)
from bmoe.records import End, LoadProgress, LoadReport
from tests.fakes import EFFECTIVE, LOAD, MIB, RESIDENT, RESIDENT_STEP, STEP, SUMMARY

MODEL = "Some Model: qwen3moe, 4000 MiB, 12 layers of 128 experts, top 8"


def test_the_mode_line_says_what_streams_and_how() -> None:
    assert mode_line(EFFECTIVE) == (
        "mode: streaming, overlap; uring at depth 32, registered buffers; O_DIRECT; "
        f"cache 500 MiB for 200 of 1536 experts; policy aged; 2 threads; {MODEL}"
    )


def test_the_mode_line_gives_the_reason_for_everything_that_is_less_than_it_could_be() -> None:
    effective = replace(
        EFFECTIVE,
        overlap=False,
        io_backend="threads",
        io_fallback_reason="io_uring is disabled here",
        registered_buffers=False,
        unregistered_reason="threads register nothing",
        direct=False,
        direct_fallback_reason="tmpfs has no O_DIRECT",
        cache_auto=True,
        cache_arithmetic="900 MiB available - 160 dense - 240 floor",
        threads=1,
    )
    assert mode_line(effective) == (
        "mode: streaming, no overlap; threads (io_uring is disabled here) at depth 32, "
        "unregistered buffers (threads register nothing); buffered reads (tmpfs has no O_DIRECT); "
        "cache 500 MiB for 200 of 1536 experts (auto: 900 MiB available - 160 dense - 240 floor); "
        f"policy aged; 1 thread; {MODEL}"
    )


def test_the_mode_line_of_a_resident_run_has_nothing_of_streaming() -> None:
    assert mode_line(RESIDENT) == f"mode: resident; repacking on; 2 threads; {MODEL}"
    dense = replace(
        RESIDENT,
        mode_reason="the model has no experts",
        model_name=None,
        moe_layers=0,
        experts=0,
        top_k=0,
        repack=False,
    )
    assert mode_line(dense) == (
        "mode: resident (the model has no experts); repacking off; 2 threads; "
        "some/model.gguf: qwen3moe, 4000 MiB"
    )


def test_a_hostile_model_name_cannot_drive_the_terminal() -> None:
    line = mode_line(replace(EFFECTIVE, model_name="a\x1b[2Jb\nc\u202ed\x9b1m"))
    assert "a\\x1b[2Jb c\\u202ed\\x9b1m: qwen3moe" in line


def test_one_line_keeps_the_letters_of_all_scripts() -> None:
    assert one_line("  日本語\tnaïve\r\n µ ") == "日本語 naïve µ"


@pytest.mark.parametrize(
    ("size", "words"),
    [(0, "0 MiB"), (1, "0.0 MiB"), (MIB * 3 // 2, "1.5 MiB"), (10 * MIB, "10 MiB"), (10**12, "953674 MiB")],
)
def test_sizes_are_in_mib(size: int, words: str) -> None:
    assert mib(size) == words


def test_a_cache_below_one_token_is_warned_of_with_the_number() -> None:
    [warning] = warnings(replace(EFFECTIVE, cache_bytes=100 * MIB))
    assert warning == (
        "warning: the cache of 100 MiB is below one token's experts, 240 MiB: "
        "most will be read again for every token"
    )
    assert len(warnings(replace(EFFECTIVE, cache_bytes=240 * MIB - 1))) == 1
    assert warnings(replace(EFFECTIVE, cache_bytes=240 * MIB)) == []
    assert warnings(RESIDENT) == []


def test_a_mapping_that_read_the_file_is_warned_of() -> None:
    [warning] = warnings(replace(EFFECTIVE, lazy_map=False))
    assert warning.startswith("warning: llama.cpp read the whole file while mapping it")


def test_the_summary_of_a_streaming_run() -> None:
    assert summary_lines(SUMMARY, LOAD) == [
        "prefill: 12 tokens in 0.60 s, 20.0 tok/s, 700 MiB read",
        "decode:  4 tokens in 0.20 s, 20.00 tok/s",
        "cache:   75.0 % hits, 600 of 600 slots used, 288 evictions, 32 rereads",
        "reads:   60.00 MiB/token, 1.17 GiB/s delivered, stall 12.00 ms/token, submit latency p50 78 µs",
        "load:    0.31 s, 160 MiB of dense weights at 1.95 GiB/s",
    ]


def test_the_summary_of_a_resident_run_has_nothing_of_streaming() -> None:
    summary = replace(
        SUMMARY,
        end="eog",
        prefill_read_bytes=None,
        decode_read_bytes=None,
        hit_rate=None,
        stall_ns=None,
        submit_latency_ns_p50=None,
        submit_latency_ns_p99=None,
        slots_used=None,
        slots_total=None,
        evictions=None,
        rereads=None,
        reads=None,
    )
    assert summary_lines(summary, LoadReport(wall_ns=2_000_000_000, dense_ns=None, dense_bytes=None)) == [
        "prefill: 12 tokens in 0.60 s, 20.0 tok/s",
        "decode:  4 tokens in 0.20 s, 20.00 tok/s, end of generation",
        "load:    2.00 s",
    ]


def test_the_summary_of_a_run_that_was_cancelled_in_the_prompt_says_how_far_it_came() -> None:
    summary = replace(
        SUMMARY, end="cancelled", prompt_tokens=1, tokens=0, prefill_ns=0, decode_ns=0, decode_read_bytes=0
    )
    assert summary_lines(summary, LOAD)[:-1] == ["prefill: 1 token in 0.00 s, 700 MiB read, cancelled"]


def test_a_stopped_load_says_how_far_it_came() -> None:
    reached = LoadProgress(done_bytes=40 * MIB, total_bytes=160 * MIB)
    assert (
        stopped_loading(reached, wall_ns=250_000_000) == "stopped while loading: 40 of 160 MiB read in 0.25 s"
    )
    assert stopped_loading(None, wall_ns=0) == "stopped while loading: nothing read in 0.00 s"


@pytest.mark.parametrize(("end", "words"), [("stop", "stop text"), ("context", "the context is full")])
def test_every_end_has_words(end: End, words: str) -> None:
    assert summary_lines(replace(SUMMARY, end=end), LOAD)[1].endswith(f", {words}")
    assert {*get_args(End)} == {*_ENDS}


def test_a_run_that_is_not_like_others_says_so_in_the_mode_line() -> None:
    line = mode_line(replace(EFFECTIVE, traced="read trace", lossy="top 4 instead of 8", give_back=True))
    assert "; gives memory back; " in line
    assert line.endswith("; traced, so slower than otherwise: read trace; LOSSY: top 4 instead of 8")


def test_the_live_line_is_about_the_last_tokens() -> None:
    step = replace(STEP, wall_ns=40_000_000, stall_ns=10_000_000, overhead_ns=10_000_000)
    assert live_line(57, [step, replace(step, hits=96, read_bytes=0)]) == (
        "decode: 57 tokens, 20.00 tok/s, 88 % hits, 30.0 MiB/token, stall 25 %"
    )
    assert live_line(1, [replace(RESIDENT_STEP, overhead_ns=None)]) == "decode: 1 token, 20.00 tok/s"


def test_the_chat_line_says_how_reasoning_is_turned_off() -> None:
    talking = replace(EFFECTIVE, chat_template=True, think_control="template")
    assert chat_line(talking, think=True) == "chat: the model's own template; reasoning as the model likes"
    assert chat_line(talking, think=False).endswith("reasoning off, by the template's switch")
    never = replace(talking, think_control="none")
    assert chat_line(never, think=False).endswith("reasoning off, which this model does not offer")
    assert chat_line(EFFECTIVE, think=True).startswith("chat: the model has no template that works: ")
