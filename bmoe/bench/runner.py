"""The order of runs: sides interleaved round by round, contaminated runs repeated.

Owns rounds, repetition and resumption. Must not know how a side is run, what a flag means, nor what is made
of the figures.

A contaminated run is repeated at once, in its place: its round's other runs are near in time, so pairs stay
pairs. When repeating does not help, the attempt with the fewest flags is kept, with its flags; the others are
in the record too. A side that fails is not run again in later rounds.
"""

from __future__ import annotations

import dataclasses
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Protocol

from bmoe.bench.state import OTHERS_LIMIT, compared_flags, entry_flags, run_flags

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from bmoe.bench.execute import Execution
    from bmoe.bench.sides import Side
    from bmoe.bench.state import EntryState, StateReader

    Run = dict[str, Any]

_SETTLE_PAUSE_S: Final = 1.0


class SideExecutor(Protocol):
    """See `bmoe.bench.execute.Executor`."""

    def prepare(self, side: Side) -> None:
        """The page cache."""

    def execute(self, side: Side) -> Execution:
        """One run."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """What to run.

    Attributes:
        sides: In order.
        rounds: Of all sides.
        repeats: Most repetitions of one contaminated run.
        settle_s: How long to wait for a quiet machine before a run.
        paths: The model's files.
        model_bytes: Their sum.
    """

    sides: tuple[Side, ...]
    rounds: int
    repeats: int
    settle_s: float
    paths: tuple[str, ...]
    model_bytes: int


class Runner:
    """Runs a plan.

    Args:
        plan: What.
        executor: How.
        state: The machine.
        runs: Of an earlier, interrupted benchmark; what they hold is not run again. New runs are added.
        on_run: Called before each attempt with round, side and attempt, all from 0.
        on_saved: Called after each run.
        pause: Waits; tests do not.
    """

    def __init__(
        self,
        plan: Plan,
        executor: SideExecutor,
        state: StateReader,
        *,
        runs: list[Run] | None = None,
        on_run: Callable[[int, Side, int], None] = lambda *_: None,
        on_saved: Callable[[list[Run]], None] = lambda _: None,
        pause: Callable[[float], None] = time.sleep,
    ) -> None:
        self._plan = plan
        self._executor = executor
        self._state = state
        self.runs: list[Run] = [] if runs is None else runs
        self._on_run = on_run
        self._on_saved = on_saved
        self._pause = pause
        works = [run["entry"]["work_us"] for run in self.runs]
        self._best_work_us: float | None = min(works, default=None)

    def run(self) -> list[Run]:
        """All rounds; returns every attempt, in order, `kept` or not."""
        done = {(run["key"], run["round"]) for run in self.runs if run["kept"]}
        failed = {run["key"] for run in self.runs if run["kept"] and run["error"] is not None}
        for round_number in range(self._plan.rounds):
            for side in self._plan.sides:
                if (side.key, round_number) in done or side.key in failed:
                    continue
                kept = self._until_clean(side, round_number)
                if kept["error"] is not None:
                    failed.add(side.key)
                self._on_saved(self.runs)
        self._look_back()
        self._on_saved(self.runs)
        return self.runs

    def _until_clean(self, side: Side, round_number: int) -> Run:
        attempts: list[Run] = []
        for attempt in range(self._plan.repeats + 1):
            self._on_run(round_number, side, attempt)
            attempts.append(self._once(side, round_number, attempt))
            if attempts[-1]["error"] is not None or not attempts[-1]["flags"]:
                break
        kept = min(attempts, key=_contamination)
        kept["kept"] = True
        self.runs += attempts
        return kept

    def _once(self, side: Side, round_number: int, attempt: int) -> Run:
        self._executor.prepare(side)
        entry = self._settled()
        flags = entry_flags(side, entry, self._plan.model_bytes, self._best_work_us)
        self._best_work_us = min(self._best_work_us or entry.work_us, entry.work_us)
        before = self._state.cpu_times()
        execution = self._executor.execute(side)
        after = self._state.cpu_times()
        wall_s = max(execution.wall_s, 1e-3)
        others = max(0.0, (after.busy_s - before.busy_s - execution.cpu_s) / wall_s)
        steal = max(0.0, (after.steal_s - before.steal_s) / wall_s)
        clock = self._state.clock_mhz()
        if execution.figures is not None:
            flags += run_flags(
                side,
                execution.figures,
                [run["figures"] for run in self._of(side)],
                others_cpus=others,
                steal_share=steal,
                clocks_mhz=(entry.clock_mhz, clock),
            )
        return {
            "side": side.name,
            "key": side.key,
            "round": round_number,
            "attempt": attempt,
            "kept": False,
            "flags": flags,
            "entry": dataclasses.asdict(entry),
            "during": {"others_cpus": others, "steal_share": steal, "clock_mhz": clock},
            "wall_s": execution.wall_s,
            "cpu_s": execution.cpu_s,
            "figures": execution.figures,
            "error": execution.error,
        }

    def _settled(self) -> EntryState:
        """The state once the machine is quiet, or when waiting has no end."""
        waited = 0.0
        entry = self._state.entry(self._plan.paths)
        while entry.others_cpus > OTHERS_LIMIT and waited < self._plan.settle_s:
            self._pause(_SETTLE_PAUSE_S)
            waited += _SETTLE_PAUSE_S
            entry = self._state.entry(self._plan.paths)
        return entry

    def _of(self, side: Side) -> list[Run]:
        return [r for r in self.runs if r["key"] == side.key and r["kept"] and r["figures"] is not None]

    def _look_back(self) -> None:
        """What only later rounds can tell of earlier ones."""
        for side in self._plan.sides:
            mine = self._of(side)
            for run in mine:
                others = [other["figures"] for other in mine if other is not run]
                run["flags"] += [
                    f for f in compared_flags(side, run["figures"], others) if f not in run["flags"]
                ]


def _contamination(run: Run) -> tuple[bool, int, float]:
    return run["error"] is not None, len(run["flags"]), run["during"]["others_cpus"]


def reference_by_round(runs: Sequence[Run], key: str, rounds: Iterable[int]) -> dict[int, dict[str, Any]]:
    """Figures of a reference for each of these rounds: of that round, or of the nearest clean one.

    A disturbed reference would make every side of its round look better than it could be.
    """
    there = kept_by_round(runs, key)
    clean = [number for number, run in there.items() if not run["flags"]]
    found = {}
    for number in rounds:
        usable = clean or list(there)
        if usable:
            nearest = min(usable, key=lambda other: (abs(other - number), other))
            found[number] = there[nearest]["figures"]
    return found


def kept_by_round(runs: Sequence[Run], key: str) -> dict[int, Run]:
    """The runs of one side that count."""
    return {
        run["round"]: run for run in runs if run["key"] == key and run["kept"] and run["figures"] is not None
    }
