"""A replay, from a trace's name to the rows of its table.

Owns the order of things and the figures. Must not know how a trace is read, a cache kept or a miss read.
"""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING

from bmoe.policies import policy_named
from bmoe.tools.iobench.replay import place_experts, plan_replay
from bmoe.tools.iobench.replay_run import replay
from bmoe.tools.iobench.result import MIB, Latencies, Replay, ReplayRow
from bmoe.tools.iobench.trace import read_trace

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from bmoe.io import DirectFile
    from bmoe.tools.iobench.experts import ExpertLayout
    from bmoe.tools.iobench.measure import BackendName
    from bmoe.tools.iobench.replay import ReplayPlan
    from bmoe.tools.iobench.replay_run import ReplaySample
    from bmoe.tools.iobench.settings import Settings

    OnProgress = Callable[[int, int], None]


async def replay_rows(
    settings: Settings,
    files: Sequence[DirectFile],
    layout: ExpertLayout | None,
    backends: Sequence[BackendName],
    on_progress: OnProgress,
) -> Replay:
    """Replay the trace at every depth, interleaved.

    Args:
        settings: With something to replay.
        files: What is read.
        layout: The experts in them, if they are a model.
        backends: A row each, at every depth.
        on_progress: Told of the layers done.

    Raises:
        BmoeError: The trace, the policy or the file is not fit for it, or a read failed.
    """
    wanted = settings.replay
    assert wanted is not None
    make_policy = policy_named(wanted.policy)
    trace = read_trace(wanted.trace, max_tokens=wanted.max_tokens)
    how, entries = place_experts(trace, layout, files)
    costs = [sum(length for _, _, length in entry) for entry in entries]
    plan = plan_replay(trace, costs, wanted.cache_mib * MIB, make_policy)
    runs = [(backend, depth) for backend in backends for depth in settings.lanes]
    samples: dict[tuple[BackendName, int], list[ReplaySample]] = {key: [] for key in runs}
    total = len(plan.steps) * len(runs) * settings.repeat
    done = 0
    for _ in range(settings.repeat):
        for backend, depth in runs:
            before = done
            sample = await replay(
                files,
                entries,
                plan,
                backend=backend,
                queue_depth=depth,
                register=settings.register,
                on_step=lambda step, before=before: on_progress(before + step, total),  # type: ignore[misc]  # mypy infers no default here
            )
            samples[backend, depth].append(sample)
            done += len(plan.steps)
    cycle = sum(trace.top_k * costs[i * trace.experts] for i in range(len(trace.expert_bytes)))
    return Replay(
        trace=trace.path,
        trace_model=trace.model,
        policy=wanted.policy,
        cache_mib=wanted.cache_mib,
        cache_experts=plan.most_resident,
        cycle_mib=round(cycle / MIB, 1),
        layout=how,
        rows=[
            _replay_row(backend, depth, plan, taken, direct=all(file.direct for file in files))
            for (backend, depth), taken in samples.items()
        ],
    )


def _replay_row(
    backend: str, queue_depth: int, plan: ReplayPlan, samples: Sequence[ReplaySample], *, direct: bool
) -> ReplayRow:
    first = samples[0]
    rates = [round(s.decode_bytes * 1e9 / sum(s.token_ns) / (1 << 30), 3) for s in samples if sum(s.token_ns)]
    prefill = [s.prefill_bytes * 1e9 / s.prefill_ns / (1 << 30) for s in samples if s.prefill_ns]
    mean_ms = statistics.median(statistics.fmean(s.token_ns) / 1e6 for s in samples)
    token_us = Latencies.of_ns([ns for s in samples for ns in s.token_ns])
    return ReplayRow(
        backend=backend,
        queue_depth=queue_depth,
        tokens=plan.tokens,
        hit_rate=round(plan.hit_rate, 4),
        misses=plan.lookups - plan.hits,
        read_mib=round(first.decode_bytes / MIB, 1),
        gib_per_s=round(statistics.median(rates), 3) if rates else None,
        samples_gib_per_s=rates,
        token_us=token_us,
        mean_token_ms=round(mean_ms, 3),
        tokens_per_s=round(1e3 / mean_ms, 3) if mean_ms else None,
        prefill_read_mib=round(first.prefill_bytes / MIB, 1),
        prefill_gib_per_s=round(statistics.median(prefill), 3) if prefill else None,
        direct=direct,
        registered=all(s.registered for s in samples),
    )
