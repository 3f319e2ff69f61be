"""Policies by budgets over one trace, and what that means: `bmoe route replay`.

Owns which policies there are, what is counted of their hits, the bounds on speed, and the verdicts. Must not
know how a policy evicts.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Final

import numpy as np

from bmoe.io.errors import FormatError, UsageError
from bmoe.policies import POLICIES
from bmoe.route.caches import REFERENCE_POLICIES
from bmoe.route.engine_policy import EnginePolicy
from bmoe.route.trace import MISS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from bmoe.route.caches import Replay
    from bmoe.route.lookups import Lookups
    from bmoe.route.trace import RouteTrace

_MIB: Final = 1 << 20
DEFAULT_BUDGETS_MIB: Final = (250, 500, 1000, 1500, 2000, 3000, 4000, 5000, 6000)
ENGINE_PREFIX: Final = "engine:"
"""Before the name of a registered policy that the reference has too: `engine:lru` is ours."""
# Below so many points between the bound and the best that can be run, a policy is not worth a thought.
_LITTLE_POINTS: Final = 3.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Speed:
    """What is needed to turn misses into tokens per second.

    Attributes:
        bandwidth_bytes_per_s: Of the drive, at the size and depth of the engine's reads.
        compute_ns: Of one token with everything resident.
    """

    bandwidth_bytes_per_s: float
    compute_ns: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """One policy at one budget.

    Attributes:
        policy, budget_mib: Which.
        hit_pct_decode: Of decode's lookups; None without any.
        hit_pct_cum: Of all.
        read_mib: Missed in all.
        read_mib_per_token: Missed by decode per token; None without tokens.
        ideal_tokens_per_s: If reads and compute overlap perfectly within a token; None if not asked for.
        layered_tokens_per_s: If they overlap within a layer only, compute being equal in all layers.
    """

    policy: str
    budget_mib: int
    hit_pct_decode: float | None
    hit_pct_cum: float
    read_mib: float
    read_mib_per_token: float | None
    ideal_tokens_per_s: float | None
    layered_tokens_per_s: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Validation:
    """An lru replay against what the trace itself recorded.

    Attributes:
        budget_mib: Of the replay.
        recorded_pct, replayed_pct: Decode hits of lookups that have a record; prefetched counts as hit.
        equal_pct: Lookups that agree.
        lookups: How many.
    """

    budget_mib: int
    recorded_pct: float
    replayed_pct: float
    equal_pct: float
    lookups: int


def policy_names() -> tuple[str, ...]:
    """Every policy that can be replayed, in the order of tables."""
    return (*REFERENCE_POLICIES, *(_engine_name(name) for name in POLICIES))


def default_policies() -> tuple[str, ...]:
    """The reference's, and ours that it has not."""
    return tuple(name for name in policy_names() if not name.startswith(ENGINE_PREFIX))


def _engine_name(name: str) -> str:
    return ENGINE_PREFIX + name if name in REFERENCE_POLICIES else name


def replayer(name: str, lookups: Lookups) -> Replay:
    """A policy by name, prepared.

    Raises:
        UsageError: No such policy; the message lists them.
    """
    if name in REFERENCE_POLICIES:
        return REFERENCE_POLICIES[name](lookups)
    for engine_name, make in POLICIES.items():
        if name in {_engine_name(engine_name), ENGINE_PREFIX + engine_name}:
            return EnginePolicy(lookups, make)
    raise UsageError(f"policy {name!r} is not one of {', '.join(policy_names())}")


def replay(
    lookups: Lookups,
    *,
    policies: Sequence[str],
    budgets_mib: Sequence[int],
    speed: Speed | None = None,
) -> list[Outcome]:
    """Runs each policy at each budget, from an empty cache.

    Args:
        lookups: The trace's.
        policies: Names, see `policy_names`.
        budgets_mib: Sizes of the cache.
        speed: Adds predictions.

    Returns:
        One outcome per (budget, policy), in that order.

    Raises:
        UsageError: An unknown policy.
    """
    replayers = [(name, replayer(name, lookups)) for name in policies]
    size, decode = lookups.size_of[lookups.entry], lookups.in_decode
    in_decode, tokens = int(decode.sum()), lookups.tokens
    outcomes = []
    for budget in budgets_mib:
        for name, prepared in replayers:
            hit = prepared.hits(budget * _MIB)
            missed = np.where(hit, 0, size)
            ideal, layered = _bounds(lookups, missed, speed) if speed and tokens else (None, None)
            outcomes.append(
                Outcome(
                    policy=name,
                    budget_mib=budget,
                    hit_pct_decode=100 * int(hit[decode].sum()) / in_decode if in_decode else None,
                    hit_pct_cum=100 * int(hit.sum()) / len(hit),
                    read_mib=int(missed.sum()) / _MIB,
                    read_mib_per_token=int(missed[decode].sum()) / _MIB / tokens if tokens else None,
                    ideal_tokens_per_s=ideal,
                    layered_tokens_per_s=layered,
                )
            )
    return outcomes


def _bounds(look: Lookups, missed: NDArray[np.int64], speed: Speed) -> tuple[float, float]:
    """Tokens per second: perfect overlap within a token, and within a layer."""
    per_batch = np.add.reduceat(missed, look.batch_start[:-1])[look.decode] / speed.bandwidth_bytes_per_s
    of_token = np.unique(look.clock[look.decode], return_inverse=True)[1]
    compute_s = speed.compute_ns / 1e9
    read_s = np.bincount(of_token, weights=per_batch)
    ideal_s = float(np.maximum(read_s, compute_s).sum())
    of_layer_s = compute_s / look.layers
    layered_s = float(np.maximum(per_batch, of_layer_s).sum())
    return look.tokens / ideal_s, look.tokens / layered_s


def validate(trace: RouteTrace, lookups: Lookups, budget_mib: int, *, policy: str = "lru") -> Validation:
    """Compares a replay with the residency that the trace recorded.

    Raises:
        FormatError: It recorded none, or nothing of decode.
    """
    if trace.residency is None:
        raise FormatError("has no residency column to compare a replay with", path=trace.path)
    decode = lookups.in_decode
    if not decode.any():
        raise FormatError("has no decoded token to compare a replay with", path=trace.path)
    recorded = trace.residency[lookups.first_row][decode] != MISS
    replayed = replayer(policy, lookups).hits(budget_mib * _MIB)[decode]
    return Validation(
        budget_mib=budget_mib,
        recorded_pct=100 * float(recorded.mean()),
        replayed_pct=100 * float(replayed.mean()),
        equal_pct=100 * float((recorded == replayed).mean()),
        lookups=len(recorded),
    )


def verdicts(outcomes: Sequence[Outcome], *, cycle_bytes: int) -> list[str]:
    """What a table of outcomes says, one sentence each."""
    found: list[str] = []
    table: dict[str, dict[int, float]] = {}
    for outcome in outcomes:
        if outcome.hit_pct_decode is not None:
            table.setdefault(outcome.policy, {})[outcome.budget_mib] = outcome.hit_pct_decode
    budgets = sorted({o.budget_mib for o in outcomes})
    below = [b for b in budgets if b * _MIB < cycle_bytes]
    if "lru" in table and below:
        found.append(
            f"warning: {_listed(below)} MiB is below one token's experts, {cycle_bytes / _MIB:.0f} MiB: lru "
            "gives up each expert just before its next turn"
        )
    parted = [name for name in table if name in {"layer", "layerlfu"}]
    if parted and below:
        found.append(
            f"{' and '.join(parted)} keep top-k experts of every layer, so they use more than "
            f"{_listed(below)} MiB"
        )
    online = [name for name in table if name != "belady" and not (below and name in parted)]
    if online and len(budgets) > 1:
        best = {b: max(table[name][b] for name in online) for b in budgets}
        steps = [(best[b] - best[a], a, b) for a, b in pairwise(budgets)]
        gain, a, b = max(steps, key=lambda step: (step[0] / (step[2] - step[1]), -step[1]))
        if gain > 0:
            found.append(
                f"best step: from {a} to {b} MiB, {gain:+.1f} points, or {1000 * gain / (b - a):.1f} per "
                "1000 MiB"
            )
    if "belady" in table and online:
        room = {b: table["belady"][b] - max(table[name][b] for name in online) for b in budgets}
        if little := [b for b in budgets if room[b] < _LITTLE_POINTS]:
            found.append(
                f"no policy helps at {_listed(little)} MiB: belady itself gains "
                f"{max(room[b] for b in little):.1f} points at most"
            )
    return found


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))
