"""At which memory limits the kernel kills a run, against what `bmoe plan` calls feasible.

For each model, cache and context: the least limit that `bmoe plan --ram` calls feasible is found by halving
(no run is needed for that), `bmoe decode` is run there and at some limits above, each in a memory control
group of its own, and then the limit below which it is killed is found by halving. One row each; a run that is
killed at a feasible limit is a bug in bmoe/budget.py, and the exit code is then 1. With an automatic cache,
whose size follows from the limit, `plan` and `decode` are both asked at every limit.

The prompt fills several of the widest batches. Needs the right to make memory groups. The last line of stdout
is JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from bmoe.bench.caps import Confinement, Limits, confined
from bmoe.config import default_threads
from bmoe.llama_library import llama as load_llama
from bmoe.pipeline.native import bind_ggml
from bmoe.plan import PlanRequest, plan_run
from bmoe.runtime import Model, RuntimeConfig

if TYPE_CHECKING:
    from collections.abc import Iterable

    from bmoe.config import DenseMode

MIB: Final = 1 << 20
ROOT: Final = Path(__file__).resolve().parent.parent
_RESOLUTION: Final = 4  # MiB
_KILLED: Final = {-9, 137}


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """A run, but for its limit."""

    model: str
    cache_mib: int | None
    context: int
    ubatch: int
    threads: int
    dense_weights: DenseMode = "anon"
    warm: bool = False

    def feasible(self, limit_mib: int) -> bool:
        """What `bmoe plan` says."""
        request = PlanRequest(
            path=self.model,
            context_tokens=self.context,
            ubatch_tokens=self.ubatch,
            threads=self.threads,
            ram_bytes=limit_mib * MIB,
            cache_bytes=None if self.cache_mib is None else self.cache_mib * MIB,
            dense_weights=self.dense_weights,
        )
        return plan_run(request).verdict != "does not fit"

    def least_feasible(self) -> int:
        """MiB; the verdict is monotone in the limit."""
        low, high = 0, 1 << 20
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if self.feasible(middle) else (middle, high)
        return high


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """How a run in a group ended: "ran", "killed", "refused" by bmoe itself (no harm), or "failed"."""

    limit_mib: int
    feasible: bool
    how: str
    peak_mib: int | None
    words: str


def run(setting: Setting, limit_mib: int, prompt: str) -> Outcome:
    """One `bmoe decode` under a limit."""
    cache = "auto" if setting.cache_mib is None else str(setting.cache_mib)
    words = [sys.executable, "-m", "bmoe", "decode", "-m", setting.model, "-f", prompt, "-n", "4"]
    words += ["-c", str(setting.context), "--ubatch", str(setting.ubatch), "--cache-mb", cache]
    words += ["--ignore-eog", "--quiet", "-t", str(setting.threads), "--dense-weights", setting.dense_weights]
    words += ["--warm", "auto"] if setting.warm else []
    with confined(Limits(memory_bytes=limit_mib * MIB)) as how:
        launch = [sys.executable, "-m", "bmoe.bench.launch", *how.joins, "--"]
        done = subprocess.run(
            [*how.prefix, *launch, *words], capture_output=True, text=True, cwd=ROOT, check=False
        )
        peak = _peak_mib(how)
    kinds = {0: "ran", 1: "refused", 2: "refused"} | dict.fromkeys(_KILLED, "killed")
    return Outcome(
        limit_mib=limit_mib,
        feasible=setting.feasible(limit_mib),
        how=kinds.get(done.returncode, "failed"),
        peak_mib=peak,
        words=(done.stderr.strip().splitlines() or [""])[-1][:200],
    )


def _peak_mib(how: Confinement) -> int | None:
    """The most that the group used, page cache included."""
    for join, name in itertools.product(how.joins, ("memory.max_usage_in_bytes", "memory.peak")):
        with contextlib.suppress(OSError, ValueError):
            return int((Path(join).parent / name).read_text(encoding="ascii")) // MIB
    return None


def sweep(setting: Setting, prompt: str) -> list[Outcome]:
    """The runs that tell: at and above the least feasible limit, and down to where it is killed."""
    least = setting.least_feasible()
    outcomes = [run(setting, least * percent // 100, prompt) for percent in (100, 104, 115, 140)]
    low, high = 16, least
    while high - low > _RESOLUTION:
        middle = (low + high) // 2
        outcomes.append(run(setting, middle, prompt))
        low, high = (middle, high) if outcomes[-1].how == "killed" else (low, middle)
    return sorted(outcomes, key=lambda o: o.limit_mib)


def write_prompt(model: str, tokens: int, folder: str) -> str:
    """A file with about as many tokens of this repository's own prose."""
    prose = "\n".join(path.read_text(encoding="utf-8") for path in sorted((ROOT / "docs").glob("*.md")))
    load_llama()
    bind_ggml()
    llama = Model(RuntimeConfig(path=model, threads=1, context_tokens=256, ubatch_tokens=64), lazy=True)
    text = b"".join(map(llama.piece, llama.tokenize(prose)[: max(1, tokens)]))
    llama.close()
    path = os.path.join(folder, f"prompt-{tokens}.txt")
    Path(path).write_text(text.decode("utf-8", "ignore"), encoding="utf-8")
    return path


def settings_of(options: argparse.Namespace) -> Iterable[Setting]:
    """The matrix."""
    matrix = itertools.product(
        options.models, options.contexts, options.threads, options.caches, options.dense_weights
    )
    for model, context, threads, cache, dense_weights in matrix:
        yield Setting(
            model=model,
            cache_mib=None if cache == "auto" else int(cache),
            context=context,
            ubatch=min(options.ubatch, context),
            threads=threads,
            dense_weights=dense_weights,
            warm=options.warm,
        )


def main() -> int:
    """Parses, sweeps, prints the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="+")
    parser.add_argument("--caches", type=lambda s: s.split(","), default=["16", "100", "auto"], help="MiB")
    parser.add_argument("--contexts", type=lambda s: [int(n) for n in s.split(",")], default=[2048])
    parser.add_argument(
        "--threads", type=lambda s: [int(n) for n in s.split(",")], default=[default_threads()]
    )
    parser.add_argument("--dense-weights", type=lambda s: s.split(","), default=["anon"], help="modes")
    parser.add_argument("--warm", action="store_true", help="with what earlier runs have learned")
    parser.add_argument("--ubatch", type=int, default=512)
    parser.add_argument("--prompt-tokens", type=int, default=700, help="at most the context")
    options = parser.parse_args()
    heads = (
        "model",
        "context",
        "threads",
        "cache, MiB",
        "dense",
        "feasible from",
        "killed up to",
        "at feasible limits",
    )
    print(f"| {' | '.join(heads)} |")
    print("|---" * len(heads) + "|")
    records, struck = [], 0
    with tempfile.TemporaryDirectory() as folder:
        for setting in settings_of(options):
            prompt = write_prompt(setting.model, min(options.prompt_tokens, setting.context - 8), folder)
            outcomes = sweep(setting, prompt)
            feasible = [o for o in outcomes if o.feasible]
            killed = [o.limit_mib for o in outcomes if o.how == "killed"]
            wrong = [o for o in feasible if o.how != "ran"]
            struck += sum(o.how in {"killed", "failed"} for o in wrong)
            cells = (
                Path(setting.model).stem,
                setting.context,
                setting.threads,
                setting.cache_mib or "auto",
                setting.dense_weights,
                min(o.limit_mib for o in feasible),
                max(killed, default="never"),
                f"{len(feasible) - len(wrong)} of {len(feasible)} ran",
            )
            print(f"| {' | '.join(map(str, cells))} |", flush=True)
            for o in wrong:
                print(f"{o.limit_mib} MiB: {o.how}: {o.words}", file=sys.stderr)
            records.append({**asdict(setting), "outcomes": [asdict(o) for o in outcomes]})
    print(json.dumps({"argv": sys.argv[1:], "struck": struck, "sweeps": records}))
    return 1 if struck else 0


if __name__ == "__main__":
    sys.exit(main())
