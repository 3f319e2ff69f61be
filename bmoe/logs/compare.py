"""Runs against one another: what was set differently, then what came out differently.

Owns which figures are compared, which tokens count, and when a difference is called one. Must not know how
intervals come about (bmoe.logs.bootstrap) nor how anything is shown.

A difference is called one when its 95 % interval holds no "equal". With many intervals some do so by chance;
how many were made is said, and each that would not survive Bonferroni's correction is marked.
"""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from bmoe.io.errors import BmoeError, UsageError
from bmoe.logs.bootstrap import LEAST_STEPS, LEVEL, Interval, Side, intervals

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from bmoe.logs.run_data import Run

SCHEMA: Final = 1
_FEW_TOKENS: Final = 100
_EXPLANATIONS: Final = {"cache_arithmetic"}  # words about other keys, with figures of the moment


class _Figure(NamedTuple):
    name: str
    unit: str
    top: str | None  # None counts tokens
    bottom: str | None
    scale: float
    ratio: bool
    words: tuple[str, str]  # when it is higher, when it is lower


_MIB: Final = 1 << 20
_FIGURES: Final = (
    _Figure("speed", "tok/s", None, "wall_ns", 1e9, True, ("faster", "slower")),
    _Figure("read", "MiB/token", "read_bytes", None, 1 / _MIB, True, ("more", "less")),
    _Figure("hit rate", "%", "hits", "lookups", 100, False, ("higher", "lower")),
    _Figure("stall", "ms/token", "stall_ns", None, 1e-6, False, ("more", "less")),
    _Figure("hook", "ms/token", "hook_ns", None, 1e-6, False, ("more", "less")),
    _Figure("compute", "ms/token", "compute_ns", None, 1e-6, True, ("more", "less")),
    _Figure("cpu", "ms/token", "cpu_ns", None, 1e-6, True, ("more", "less")),
    _Figure("major faults", "1/token", "major_faults", None, 1, False, ("more", "fewer")),
)


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Something that is not the same in all runs.

    Attributes:
        name: Group and key: config.cache_bytes, machine.cpu, versions.numpy, prompt.sha256.
        values: In the order of the runs; None where a run does not have it.
    """

    name: str
    values: tuple[Any, ...]


@dataclass(frozen=True, kw_only=True)
class Pairing:
    """Which tokens were set beside each other.

    Attributes:
        paired: Whether they are the same tokens after the same prompt.
        reason: Why not, else None.
        tokens: How many, from the start.
        base_left_out, other_left_out: Tokens after those.
    """

    paired: bool
    reason: str | None
    tokens: int
    base_left_out: int
    other_left_out: int


@dataclass(frozen=True, kw_only=True)
class Difference:
    """One figure of two runs, over the tokens of the pairing.

    Attributes:
        figure, unit: What.
        base, other: Its value.
        kind: "ratio", other over base, equal at 1; or "difference", other minus base, equal at 0.
        estimate, low, high: Of the ratio or difference, at 95 %; None where it cannot be had.
        block_tokens: Tokens drawn together.
        shown: Whether the interval leaves equal out; None without an interval.
        corrected: Whether it still does at Bonferroni's level; None without an interval.
        verdict: The same in words.
    """

    figure: str
    unit: str
    base: float | None
    other: float | None
    kind: str
    estimate: float | None
    low: float | None
    high: float | None
    block_tokens: int | None
    shown: bool | None
    corrected: bool | None
    verdict: str


@dataclass(frozen=True, kw_only=True)
class Pair:
    """One run against the first.

    Attributes:
        run_id: Of the other.
        headline: The speeds in a sentence.
        pairing: Which tokens.
        differences: Of all figures that both runs have.
    """

    run_id: str
    headline: str
    pairing: Pairing
    differences: list[Difference]


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Several runs against the first.

    Attributes:
        runs: Each one's row of the database, the first being the base; letter: A, B, ….
        skipped_tokens: Left out at each run's start.
        settings: What is not the same in all.
        pairs: The others.
        notes: What the reader has to know, one sentence each.
    """

    runs: list[dict[str, Any]]
    skipped_tokens: int
    settings: list[Setting]
    pairs: list[Pair]
    notes: list[str]


def compare(runs: Sequence[Run], *, skip_tokens: int = 0) -> Comparison:
    """Compares runs with the first of them.

    Args:
        runs: At least two.
        skip_tokens: Leaves out each run's first tokens, as while a cache warms.

    Raises:
        UsageError: The same run twice, or too few or too many runs.
        BmoeError: A run without decoded tokens.
    """
    if not 2 <= len(runs) <= 26:
        raise UsageError("a comparison takes 2 to 26 runs")
    ids = [run.run_id for run in runs]
    if len(set(ids)) < len(ids):
        twice = next(i for i in ids if ids.count(i) > 1)
        raise UsageError(f"run {twice} was given twice: it would be compared with itself")
    for run in runs:
        if run.decode.count <= skip_tokens:
            left = f" after {skip_tokens} left out" if skip_tokens else ""
            raise BmoeError(f"run {run.run_id} has no decoded tokens{left}: nothing to compare")
        if not run.decode.whole("wall_ns"):
            raise BmoeError(f"run {run.run_id} lacks times of its tokens: it cannot be compared")
    base, *others = runs
    plans = [(other, pair_up(base, other, skip_tokens), _common_figures(base, other)) for other in others]
    made = sum(len(figures) for _, _, figures in plans)
    pairs = [_pair(base, plan, letter(i), skip_tokens, made) for i, plan in enumerate(plans, 1)]
    return Comparison(
        runs=[{"letter": letter(i), **run.facts, "started_at": run.started_at} for i, run in enumerate(runs)],
        skipped_tokens=skip_tokens,
        settings=settings(runs),
        pairs=pairs,
        notes=_notes(runs, pairs),
    )


def as_record(found: Comparison) -> dict[str, Any]:
    """For JSON: docs/logs-reports.md describes it."""
    return {"schema": SCHEMA, "tool": "bmoe logs compare", **dataclasses.asdict(found)}


def letter(index: int) -> str:
    """What a run is called in a comparison."""
    return chr(ord("A") + index)


def settings(runs: Sequence[Run]) -> list[Setting]:
    """What is not the same in all runs, of their effective configuration, versions, machine and prompt."""
    flat = []
    for run in runs:
        groups = {"config": run.config, "versions": run.versions, "machine": run.machine}
        values = {
            f"{group}{key}": value
            for group, tree in groups.items()
            for key, value in _flattened(tree).items()
        }
        if not run.config:  # a CSV has no such object; its columns say some of it
            for name in ("model_name", "architecture", "cache_bytes", "threads", "context_tokens", "overlap"):
                values[f"config.{name}"] = run.facts[name]
        values["prompt.sha256"] = run.facts["prompt_sha256"]
        flat.append(values)
    names = dict.fromkeys(name for values in flat for name in values)
    found = [Setting(name=name, values=tuple(values.get(name) for values in flat)) for name in names]
    return [
        setting
        for setting in found
        if setting.name.rpartition(".")[2] not in _EXPLANATIONS
        and len({json.dumps(value, sort_keys=True) for value in setting.values}) > 1
    ]


def _flattened(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Leaves by path, each path beginning with a dot; lists are leaves."""
    found: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, dict):
            found |= {f".{key}{path}": leaf for path, leaf in _flattened(value).items()}
        else:
            found[f".{key}"] = value
    return found


def pair_up(base: Run, other: Run, skip_tokens: int = 0) -> Pairing:
    """Which tokens can be compared.

    With the same prompt, tokens belong together up to the first that differs: from there on the texts do.
    Pairs are used when they are at least half of the shorter run. Otherwise tokens are set side by side by
    their place alone, which compares two texts, but at least equally warm caches.
    """
    counts = base.decode.count - skip_tokens, other.decode.count - skip_tokens
    shorter = min(counts)
    same = _same_tokens(base, other, shorter + skip_tokens) - skip_tokens
    reason = None
    if base.facts["prompt_sha256"] is None or other.facts["prompt_sha256"] is None:
        reason = "the logs do not tell the prompt"
    elif base.facts["prompt_sha256"] != other.facts["prompt_sha256"]:
        reason = "the prompts differ"
    elif base.facts["model_name"] != other.facts["model_name"]:
        reason = "the models differ"
    elif same < max(1, shorter / 2):
        reason = f"the texts part after {max(same + skip_tokens, 0)} tokens"
    tokens = shorter if reason else same
    return Pairing(
        paired=reason is None,
        reason=reason,
        tokens=tokens,
        base_left_out=counts[0] - tokens,
        other_left_out=counts[1] - tokens,
    )


def _same_tokens(base: Run, other: Run, count: int) -> int:
    """How many agree from the start, in turn, step and token."""
    agree = np.ones(count, dtype=bool)
    for name in ("turn", "step", "token"):
        agree &= base.decode[name][:count] == other.decode[name][:count]  # an unknown one agrees with none
    return count if agree.all() else int(agree.argmin())


def _common_figures(base: Run, other: Run) -> list[_Figure]:
    return [
        figure
        for figure in _FIGURES
        if all(
            run.decode.whole(column)
            for run in (base, other)
            for column in (figure.top, figure.bottom)
            if column
        )
        and any(_nonzero(run, figure) for run in (base, other))
    ]


def _nonzero(run: Run, figure: _Figure) -> bool:
    """Zero throughout is how the reference writes what it did not measure, and says nothing anyway."""
    columns = [column for column in (figure.top, figure.bottom) if column]
    return all(bool(run.decode[column].any()) for column in columns)


def _pair(
    base: Run, plan: tuple[Run, Pairing, list[_Figure]], name: str, skip_tokens: int, made: int
) -> Pair:
    other, pairing, figures = plan
    span = slice(skip_tokens, skip_tokens + pairing.tokens)
    differences = [_difference(base, other, figure, span, made) for figure in figures]
    speed = differences[0]
    headline = f"{name} against A: {speed.verdict}"
    if speed.base and speed.other:
        headline += f", {speed.other:.3g} against {speed.base:.3g} tok/s"
    return Pair(run_id=other.run_id, headline=headline, pairing=pairing, differences=differences)


def _difference(base: Run, other: Run, figure: _Figure, span: slice, made: int) -> Difference:
    sides = _side(base, figure, span), _side(other, figure, span)
    # A ratio to nothing is none.
    ratio = figure.ratio and all(side.value > 0 for side in sides)
    found, corrected = intervals(*sides, ratio=ratio, levels=(LEVEL, 1 - (1 - LEVEL) / made))
    equal, scale = (1.0, 1.0) if ratio else (0.0, figure.scale)
    known = found.low is not None
    return Difference(
        figure=figure.name,
        unit=figure.unit,
        base=_finite(sides[0].value * figure.scale),
        other=_finite(sides[1].value * figure.scale),
        kind="ratio" if ratio else "difference",
        estimate=_finite(found.estimate * scale),
        low=None if found.low is None else _finite(found.low * scale),
        high=None if found.high is None else _finite(found.high * scale),
        block_tokens=found.block_steps,
        shown=found.excludes(equal) if known else None,
        corrected=corrected.excludes(equal) if known else None,
        verdict=_verdict(figure, found, ratio),
    )


def _side(run: Run, figure: _Figure, span: slice) -> Side:
    def column(name: str | None) -> NDArray[np.float64]:
        return np.ones(span.stop - span.start) if name is None else run.decode[name][span]

    return Side(top=column(figure.top), bottom=column(figure.bottom))


def _verdict(figure: _Figure, found: Interval, ratio: bool) -> str:
    if found.low is None or found.high is None:
        return f"unknown: fewer than {LEAST_STEPS} tokens" if math.isfinite(found.estimate) else "unknown"
    if not found.excludes(1.0 if ratio else 0.0):
        return "no difference shown"
    word = figure.words[found.estimate < (1 if ratio else 0)]
    if ratio and found.estimate < 10:
        bounds = sorted(abs(100 * (bound - 1)) for bound in (found.low, found.high))
        return f"{abs(100 * (found.estimate - 1)):.1f} % {word} (95 %: {bounds[0]:.1f} to {bounds[1]:.1f} %)"
    if ratio:
        return f"{found.estimate:.3g} times {word} (95 %: {found.low:.3g} to {found.high:.3g})"
    unit = "points" if figure.unit == "%" else figure.unit
    bounds = sorted(abs(bound * figure.scale) for bound in (found.low, found.high))
    amount = abs(found.estimate * figure.scale)
    return f"{amount:.3g} {unit} {word} (95 %: {bounds[0]:.3g} to {bounds[1]:.3g})"


def _notes(runs: Sequence[Run], pairs: Sequence[Pair]) -> list[str]:
    notes = []
    for i, run in enumerate(runs):
        if run.facts["traced"]:
            notes.append(f"{letter(i)} was traced, which slows a run: its times are not the engine's")
        if run.facts["complete"] is False:
            notes.append(f"{letter(i)}'s log ends before the run did")
    for i, pair in enumerate(pairs, 1):
        p = pair.pairing
        if p.reason:
            notes.append(
                f"{letter(i)} is not paired with A, because {p.reason}: a difference may be the text's"
            )
        if p.base_left_out or p.other_left_out:
            notes.append(
                f"A and {letter(i)} are compared over their first {p.tokens} common tokens; "
                f"{p.base_left_out} of A and {p.other_left_out} of {letter(i)} after those are left out"
            )
        if p.tokens < _FEW_TOKENS:
            notes.append(
                f"{p.tokens} tokens are few: intervals may be too short where tokens depend on each other"
            )
    made = sum(d.shown is not None for pair in pairs for d in pair.differences)
    if made > 1:
        weak = sum(bool(d.shown and not d.corrected) for pair in pairs for d in pair.differences)
        marked = f"; the {weak} marked * would not hold if corrected for that" if weak else ""
        notes.append(
            f"{made} intervals at 95 %: about {made / 20:.1f} would show a difference by chance alone{marked}"
        )
    notes.append(
        "intervals hold what varies from token to token, not from run to run: repeat runs, interleaved, "
        "before believing a small difference"
    )
    return notes


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
