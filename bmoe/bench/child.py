"""`python -m bmoe.bench.child`: one side, once. Reads the side as JSON on stdin, writes figures on stdout.

Owns what lies inside the timing window. Outside it: loading, tokenizing, and where the side says so as many
tokens before those that count, which fill the cache and touch the mapped file; what is measured is then a
part of the text that the cache has not seen. References (`resident`, everything cached) generate twice
instead and are shown at their best. Text is fed token by token instead of the model's own choices, so that
all sides compute the same and routing varies as in real use. Must not know the other sides.

    figure                window
    load_s                `Session.open`
    ttft_s                `generate` to the first token
    prefill_*             llama_decode over the prompt
    submit_us_p50         the whole generation
    all others            llama_decode over the last tokens fed
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import sys
import time
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from bmoe.records import StepMetrics
    from bmoe.session import Session

MIB: Final = 1 << 20
GIB: Final = 1 << 30
# Tokens of a prompt are not always those that its text gives again; and llama.cpp pads.
_SPARE_TOKENS: Final = 64
_OTHER_BYTES: Final = 512 * MIB  # dense weights, buffers, Python


async def run_side(side: dict[str, Any], text: str, route_trace: str | None = None) -> dict[str, Any]:
    """Opens, generates, reports.

    Args:
        side: The record of a `Side`.
        text: What prompt and fed tokens are cut from.
        route_trace: Also records every routing there; then the figures are not to be used.

    Raises:
        BmoeError: Whatever the session raises.
    """
    from bmoe.config import GenerateRequest, SessionConfig  # noqa: PLC0415 (only what is measured is imported)
    from bmoe.session import Session  # noqa: PLC0415 (same)

    streams = side["kind"] == "stream"
    fed = side["tokens"] * (2 if side["warm_up"] else 1)
    wanted = side["prompt_tokens"] + fed
    # All experts: cut to what there is.
    cache_bytes = side["cache_bytes"] if side["cache_bytes"] is not None else 1 << 50
    config = SessionConfig(
        model_path=side["model"],
        threads=side["threads"],
        context_tokens=wanted + wanted // 8 + _SPARE_TOKENS,
        mode="stream" if streams else "resident",
        overlap=side["overlap"],
        cache_bytes=cache_bytes if streams else None,
        policy=side["policy"],
        io_backend=side["backend"],
        repack=side["repack"],
        n_expert_used=side["n_expert_used"],
        replay_routing=side["replay_routing"],
        layer_metrics=streams,
        route_trace=route_trace,
    )
    async with await Session.open(dataclasses.replace(config, **side["changes"])) as session:
        tokens = session.model.tokenize(text)
        while len(tokens) < wanted:
            tokens += tokens
        prompt = b"".join(map(session.model.piece, tokens[: side["prompt_tokens"]])).decode("utf-8", "ignore")
        forced = tuple(tokens[side["prompt_tokens"] : wanted])
        request = GenerateRequest(prompt=prompt, n_predict=len(forced), forced=forced, ignore_eog=True)
        steps, figures = await _generate(session, request)
        summary = session.summary
        assert summary is not None
        figures |= {
            "load_s": session.load_report.wall_ns / 1e9,
            "prompt_tokens": summary.prompt_tokens,
            "prefill_s": summary.prefill_ns / 1e9,
            "prefill_tok_per_s": summary.prefill_tokens_per_s,
        }
        if streams:
            figures["prefill_mib"] = sum(m.read_bytes or 0 for m in session.prefill_metrics) / MIB
        # References are shown at their best: every expert there, every page of the mapped file touched. A
        # recorded routing is what the other sides compute, once.
        at_its_best = side["kind"] == "resident" or side["cache_bytes"] is None
        if side["warm_up"] and at_its_best and route_trace is None:
            steps, _ = await _generate(session, request)
        if side["counts"] == "decode" and steps:
            figures |= _decode_figures(steps[-side["tokens"] :], session)
        figures["effective"] = dataclasses.asdict(session.effective)
    return figures


def _ask_host_for_memory(side: dict[str, Any]) -> None:
    """Touches as much memory as the side will use, and frees it.

    The host of a virtual machine takes free memory back within seconds and needs a second or two per GiB to
    give it again. That would be measured as a slow prompt, or not, by what ran before.
    """
    if side["cap_bytes"] is not None or (side["kind"] == "resident" and not side["repack"]):
        return
    from bmoe.gguf_file import read_gguf  # noqa: PLC0415 (only what is measured is imported)
    from bmoe.io import available_bytes  # noqa: PLC0415 (same)
    from bmoe.io.anonymous_memory import AnonymousMemory  # noqa: PLC0415 (same)

    model_bytes = sum(read_gguf(side["model"]).sizes_bytes)
    wanted_bytes = min(side["cache_bytes"] or model_bytes, model_bytes) + _OTHER_BYTES
    free_bytes = available_bytes()
    if free_bytes is not None:
        wanted_bytes = min(wanted_bytes, free_bytes // 2)
    # In a process of its own: the peak of this one is a figure.
    if child := os.fork():
        os.waitpid(child, 0)
        return
    with contextlib.suppress(BaseException):  # then a run begins with what memory there is
        AnonymousMemory(wanted_bytes).touch(0, wanted_bytes)
    os._exit(0)


async def _generate(session: Session, request: Any) -> tuple[list[StepMetrics], dict[str, Any]]:
    steps, ttft_s, t0 = [], None, time.monotonic()
    async for event in session.generate(request):
        if ttft_s is None:
            ttft_s = time.monotonic() - t0
        steps.append(event.metrics)
    return steps, {"ttft_s": ttft_s}


def _decode_figures(steps: list[StepMetrics], session: Session) -> dict[str, Any]:
    count = len(steps)
    wall_s = sum(m.wall_ns for m in steps) / 1e9
    figures: dict[str, Any] = {
        "tokens": count,
        "decode_tok_per_s": count / wall_s,
        "cpu_s_per_token": sum(m.cpu_ns for m in steps) / 1e9 / count,
        "compute_ms_per_token": sum(m.compute_ns for m in steps) / 1e6 / count,
        "major_faults_per_token": sum(m.major_faults for m in steps) / count,
    }
    summary = session.summary
    if session.streaming is None or summary is None:
        return figures
    read_bytes, state = sum(m.read_bytes or 0 for m in steps), session.cache_state()
    return figures | {
        "mib_per_token": read_bytes / MIB / count,
        "gib_per_s": read_bytes / GIB / wall_s,
        "hit_rate": sum(m.hits or 0 for m in steps) / max(1, sum(m.lookups or 0 for m in steps)),
        "stall_ms_per_token": sum(m.stall_ns or 0 for m in steps) / 1e6 / count,
        "experts_s_per_token": sum(m.experts_ns or 0 for m in steps) / 1e9 / count,
        "submit_us_p50": None
        if summary.submit_latency_ns_p50 is None
        else summary.submit_latency_ns_p50 / 1e3,
        "layers": session.effective.moe_layers,
        "cache_full": state is not None and state.slots_ready >= state.slots_total,
        "layer_reads": _layer_reads(steps, session),
    }


def _layer_reads(steps: list[StepMetrics], session: Session) -> dict[str, int]:
    """How many (token, layer) pairs asked for how many slices of mean size."""
    assert session.streaming is not None
    tensors = session.streaming.layout.tensors
    mean_bytes = sum(t.slice_bytes * t.experts for t in tensors) / sum(t.experts for t in tensors)
    counts: dict[str, int] = {}
    for step in steps:
        for layer in step.layers or ():
            if layer.read_bytes:
                slices = str(max(1, round(layer.read_bytes / mean_bytes)))
                counts[slices] = counts.get(slices, 0) + 1
    return counts


def main() -> int:
    """Runs what stdin says; the last line of stdout is the result. Errors are one line on stderr."""
    import uvloop  # noqa: PLC0415 (same)

    from bmoe.io.errors import BmoeError  # noqa: PLC0415 (same)

    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # as the command line does
    job = json.load(sys.stdin)
    side = job["side"]
    try:
        if side["kind"] == "drive":
            from bmoe.bench.drive import measure_drive  # noqa: PLC0415 (same)

            figures = uvloop.run(measure_drive(side["model"], side["backend"], seconds=job["drive_seconds"]))
            figures["limited"] = side["drive_bytes_per_s"] is not None
        else:
            _ask_host_for_memory(side)
            figures = uvloop.run(run_side(side, job["text"], job.get("route_trace")))
    except BmoeError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    sys.stdout.write(f"{json.dumps(figures)}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
