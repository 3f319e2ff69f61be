"""Records in words: the mode line, its warnings, the summary.

Pure functions from records to text. Must not know streams, terminals or when anything is shown.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bmoe.records import CacheResize, EffectiveConfig, LoadProgress, LoadReport, RunSummary, StepMetrics

_MIB: Final = 1 << 20
_GIB: Final = 1 << 30
_ENDS: Final = {
    "length": None,
    "eog": "end of generation",
    "stop": "stop text",
    "context": "the context is full",
    "forced": "forced tokens used up",
    "cancelled": "cancelled",
    "error": "stopped by an error",
}


def one_line(text: str) -> str:
    """The text without line breaks, and with what a terminal would obey shown as an escape.

    Names come from files and command lines, which may be hostile or broken.
    """
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in " ".join(text.split()))


def mib(size_bytes: int) -> str:
    """A size in MiB, with a decimal only where it tells something."""
    value = size_bytes / _MIB
    return f"{value:.1f} MiB" if 0 < value < 10 else f"{value:.0f} MiB"


def mode_line(effective: EffectiveConfig) -> str:
    """What really runs, in one line that begins with `mode:`."""
    e = effective
    parts = [_streaming_parts(e) if e.mode == "streaming" else _resident_parts(e)]
    parts.append(f"{e.threads} thread{'s' if e.threads != 1 else ''}")
    shape = f", {e.moe_layers} layers of {e.experts} experts, top {e.top_k}" if e.moe_layers else ""
    if e.file_top_k is not None:
        shape += f" (lossy: the file says {e.file_top_k})"
    parts.append(f"{e.model_name or e.model_path}: {e.architecture}, {mib(e.model_bytes)}{shape}")
    if e.traced is not None:
        parts.append(f"traced, so slower than otherwise: {e.traced}")
    if e.lossy is not None:
        parts.append(f"LOSSY: {e.lossy}")
    return one_line(f"mode: {'; '.join(parts)}")


def _because(reason: str | None) -> str:
    return f" ({reason})" if reason else ""


def _resident_parts(e: EffectiveConfig) -> str:
    return f"resident{_because(e.mode_reason)}; repacking {'on' if e.repack else 'off'}"


def _streaming_parts(e: EffectiveConfig) -> str:
    backend = f"{e.io_backend}{_because(e.io_fallback_reason)} at depth {e.queue_depth}"
    buffers = "registered" if e.registered_buffers else "unregistered"
    cache = f"cache {mib(e.cache_bytes or 0)} for {e.cache_experts} of {e.total_experts} experts"
    return "; ".join(
        (
            f"streaming{_because(e.mode_reason)}, {'overlap' if e.overlap else 'no overlap'}",
            f"{backend}, {buffers} buffers{_because(e.unregistered_reason)}",
            "O_DIRECT" if e.direct else f"buffered reads{_because(e.direct_fallback_reason)}",
            cache + _because(f"auto: {e.cache_arithmetic}" if e.cache_auto and e.cache_arithmetic else None),
            f"policy {e.policy}",
            *((f"dense weights {e.dense_weights}",) if e.dense_weights not in {None, "anon"} else ()),
            *(("gives memory back",) if e.give_back else ()),
        )
    )


def warnings(effective: EffectiveConfig) -> list[str]:
    """What the user should know before waiting, one line each."""
    e = effective
    if e.mode != "streaming":
        return []
    found = []
    if e.cache_bytes is not None and e.cache_bytes < e.cycle_bytes:
        found.append(
            f"the cache of {mib(e.cache_bytes)} is below one token's experts, {mib(e.cycle_bytes)}: "
            "most will be read again for every token"
        )
    if not e.lazy_map:
        found.append(
            "llama.cpp read the whole file while mapping it, because its backend registry is not one that "
            "bmoe knows: loading is slower and fills the page cache"
        )
    return [one_line(f"warning: {text}") for text in found]


def chat_line(effective: EffectiveConfig, *, think: bool) -> str:
    """How the model's own template is used, in one line that begins with `chat:`."""
    e = effective
    if not e.chat_template:
        why = _because(e.chat_template_problem)
        return one_line(f"chat: the model has no template that works{why}: the prompt is used as it is")
    how = {"template": "by the template's switch", "prefill": "by beginning the answer for the model"}
    reasoning = f"off, {how.get(e.think_control or '', 'which this model does not offer')}"
    return f"chat: the model's own template; reasoning {'as the model likes' if think else reasoning}"


def live_line(tokens: int, steps: Sequence[StepMetrics]) -> str:
    """A run that goes on, in one line.

    Args:
        tokens: Generated so far.
        steps: The last ones, over which speed and shares are taken; at least one.
    """
    n, wall_ns = len(steps), sum(m.wall_ns for m in steps)
    whole_ns = wall_ns + sum(m.overhead_ns or 0 for m in steps)
    parts = [_count(tokens, "token"), f"{n / (whole_ns / 1e9):.2f} tok/s"]
    if lookups := sum(m.lookups or 0 for m in steps):
        parts.append(f"{100 * sum(m.hits or 0 for m in steps) / lookups:.0f} % hits")
    if steps[-1].read_bytes is not None:
        parts.append(f"{sum(m.read_bytes or 0 for m in steps) / n / _MIB:.1f} MiB/token")
        parts.append(f"stall {100 * sum(m.stall_ns or 0 for m in steps) / wall_ns:.0f} %")
    return f"decode: {', '.join(parts)}"


def resize_line(resize: CacheResize) -> str:
    """The cache has another budget, and why."""
    return one_line(f"cache: {mib(resize.cache_bytes)}, was {mib(resize.from_bytes)}: {resize.reason}")


def stopped_loading(reached: LoadProgress | None, *, wall_ns: int) -> str:
    """How far a load came that was stopped."""
    how_far = f"{reached.done_bytes // _MIB} of {mib(reached.total_bytes)}" if reached else "nothing"
    return f"stopped while loading: {how_far} read in {_seconds(wall_ns)}"


def summary_lines(summary: RunSummary, load: LoadReport) -> list[str]:
    """What was done, one aspect per line, values aligned. Only what was measured and happened."""
    rows = [("prefill", _prefill(summary)), ("decode", _decode(summary))]
    if summary.tokens:
        rows += [("cache", _cache(summary)), ("reads", _reads(summary)), ("levers", _levers(summary))]
    rows.append(("load", _load(load)))
    return [f"{label + ':':<9}{text}" for label, text in rows if text]


def _seconds(wall_ns: int) -> str:
    return f"{wall_ns / 1e9:.2f} s"


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _prefill(s: RunSummary) -> str:
    parts = [f"{_count(s.prompt_tokens, 'token')} in {_seconds(s.prefill_ns)}"]
    if s.prefill_tokens_per_s is not None:
        parts.append(f"{s.prefill_tokens_per_s:.1f} tok/s")
    if s.prefill_read_bytes is not None:
        parts.append(f"{mib(s.prefill_read_bytes)} read")
    if not s.tokens and (end := _ENDS[s.end]):
        parts.append(end)
    return ", ".join(parts)


def _decode(s: RunSummary) -> str:
    if not s.tokens:
        return ""
    parts = [f"{_count(s.tokens, 'token')} in {_seconds(s.decode_ns)}"]
    if s.decode_tokens_per_s is not None:
        parts.append(f"{s.decode_tokens_per_s:.2f} tok/s")
    if s.shifts:
        parts.append(f"context shifted {_count(s.shifts, 'time')}")
    if end := _ENDS[s.end]:
        parts.append(end)
    return ", ".join(parts)


def _cache(s: RunSummary) -> str:
    parts = [] if s.hit_rate is None else [f"{100 * s.hit_rate:.1f} % hits"]
    if s.slots_used is not None and s.slots_total is not None:
        parts.append(f"{s.slots_used} of {s.slots_total} slots used")
    if s.evictions is not None and s.rereads is not None:
        parts.append(f"{_count(s.evictions, 'eviction')}, {_count(s.rereads, 'reread')}")
    return ", ".join(parts)


def _reads(s: RunSummary) -> str:
    if s.decode_read_bytes is None:
        return ""
    parts = [f"{s.decode_read_bytes / s.tokens / _MIB:.2f} MiB/token"]
    if s.decode_ns:
        parts.append(f"{s.decode_read_bytes / _GIB / (s.decode_ns / 1e9):.2f} GiB/s delivered")
    if s.stall_ns is not None:
        parts.append(f"stall {s.stall_ns / s.tokens / 1e6:.2f} ms/token")
    if s.submit_latency_ns_p50 is not None:
        parts.append(f"submit latency p50 {s.submit_latency_ns_p50 / 1e3:.0f} µs")
    return ", ".join(parts)


def _levers(s: RunSummary) -> str:
    parts = []
    if s.dropped is not None and s.routed:
        parts.append(f"{100 * s.dropped / s.routed:.1f} % of routed experts dropped")
    if s.substituted is not None:
        parts.append(f"{_count(s.substituted, 'choice')} substituted")
    if s.route_committed is not None:
        agreed = "" if s.route_agreed is None else f", {100 * s.route_agreed:.1f} % as the router's"
        parts.append(f"{_count(s.route_committed, 'layer')} routed ahead{agreed}")
    if s.speculative_bytes:
        used = "" if s.speculated_experts is None else f", {_count(s.speculated_experts, 'expert')} used"
        parts.append(f"{mib(s.speculative_bytes)} read unasked{used}")
    return ", ".join(parts)


def prediction_lines(predictions: Sequence[Sequence[Sequence[int]]], guesses: Sequence[str]) -> list[str]:
    """How often routing was guessed right.

    Args:
        predictions: [layers][guesses] of rows, slots, hits, exact rows and rows not scored.
        guesses: Their names.
    """
    lines = []
    for i, name in enumerate(guesses):
        rows, slots, hits, exact, _ = (sum(layer[i][k] for layer in predictions) for k in range(5))
        if slots:
            lines.append(
                f"{'guess:':<9}{name}: {100 * hits / slots:.1f} % of experts, "
                f"{100 * exact / rows:.1f} % of layers whole, {rows} layers scored"
            )
    return lines


def _load(load: LoadReport) -> str:
    text = _seconds(load.wall_ns)
    if load.dense_bytes and load.dense_ns:
        rate = load.dense_bytes / _GIB / (load.dense_ns / 1e9)
        text += f", {mib(load.dense_bytes)} of dense weights at {rate:.2f} GiB/s"
    return text
