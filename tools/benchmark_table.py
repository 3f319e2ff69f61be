"""Makes the tables of docs/benchmarks.md: one `bmoe bench` per section, and predictions for larger models.

    python -m tools.benchmark_table --models DIR --trace qwen.route.csv [--go-trace gptoss.route.csv]
        --out DIR [--minutes 60] [--only NAME]

Models are those of `python -m tools.models`; sections of models that are not there are left out. Every
section keeps its record in OUT/NAME.json and goes on from it, so an interrupted run is simply started again;
what is done costs nothing. When the minutes are used up, no further section is begun. OUT/benchmarks.md has
all tables with their commands, ready for the docs, and OUT/NAME.svg the pictures.
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from bmoe.route.reading import read_trace

if TYPE_CHECKING:
    from collections.abc import Sequence

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True, kw_only=True)
class Section:
    """One benchmark.

    Attributes:
        name: Of its files.
        title: In the docs.
        model: File in the models' folder.
        words: Options of `bmoe bench`.
        replayed: Routes as the trace did, with as many experts; the models with random weights.
        go: The trace is the one of gpt-oss, where there is one.
    """

    name: str
    title: str
    model: str
    words: str
    replayed: bool = True
    go: bool = False


_Q3S, _SM, _GO, _Q3 = "q3s.gguf", "smol-moe.gguf", "gpt-oss-6.gguf", "q3.gguf"
_SWEEP = "--sides overlap,resident,resident-norepack --caches 5%,10%,25%,50%,100% -n 64 --validate-simulation"
_LEVERS = " ".join(
    f"--lever {lever}"
    for lever in (
        "prefetch=1",
        "predict-prefetch",
        "drop-cold-experts=0.9",
        "expert-substitute=0.1",
        "route-ahead=1",
        "dense-weights=repack",
    )
)
SECTIONS = (
    Section(name="q3s-cache", title="Q3S: cache", model=_Q3S, words=_SWEEP),
    Section(name="sm-cache", title="SM: cache", model=_SM, words=_SWEEP, replayed=False),
    Section(
        name="q3s-policies",
        title="Q3S: overlap against serial, policies",
        model=_Q3S,
        words="--sides overlap,serial --caches 10% --policies recurring,aged,lru -n 64",
    ),
    Section(
        name="q3s-backends",
        title="Q3S: backends",
        model=_Q3S,
        words="--sides overlap --caches 10% --backends uring,threads -n 64",
    ),
    Section(
        name="q3s-threads",
        title="Q3S: threads",
        model=_Q3S,
        words="--sides overlap,resident-norepack --caches 25% -t 1,2 -n 64",
    ),
    Section(
        name="q3s-prefill",
        title="Q3S: prefill",
        model=_Q3S,
        words="--sides overlap,resident-norepack --caches 25% --prompt-tokens 32,512,2048 -n 16",
    ),
    Section(
        name="q3s-caps",
        title="Q3S: memory caps of 0.3, 0.5, 0.75 and 1.0 times the model",
        model=_Q3S,
        words="--sides resident-capped --mem-cap 30%,50%,75%,100% --caches 10%,25%,40% -n 32",
    ),
    Section(
        name="q3s-drive",
        title="Q3S: drive speed, throttled",
        model=_Q3S,
        words="--sides overlap --caches 10%,25% --throttle 0.25,0.5,1 -n 24 --validate-simulation",
    ),
    Section(
        name="q3s-topk",
        title="Q3S: experts per token",
        model=_Q3S,
        words="--sides overlap,resident-norepack --caches 10% --top-ks 2,4,8 -n 64 --validate-simulation",
        replayed=False,
    ),
    Section(
        name="q3s-levers",
        title="Q3S: levers, its own routing",
        model=_Q3S,
        words=f"--sides overlap --caches 25% -n 64 {_LEVERS}",
        replayed=False,
    ),
    Section(
        name="sm-levers",
        title="SM: levers",
        model=_SM,
        words=f"--sides overlap --caches 25% -n 64 {_LEVERS}",
        replayed=False,
    ),
    Section(
        name="go-cache",
        title="GO: cache",
        model=_GO,
        words="--sides overlap,resident-norepack --caches 5%,10%,25% -n 32 --validate-simulation",
        go=True,
    ),
    Section(
        name="q3-cache",
        title="Q3: cache",
        model=_Q3,
        words="--sides overlap --caches 5%,10%,25% -n 32 --validate-simulation",
    ),
)
# Times as large as Qwen3-30B-A3B with the same routing: 17 GB, 120 GB, 1 TB.
_SCALES = (1, 7, 60)
_COMMON = "--rounds 3 --repeats 1 --settle 5"


def bench_words(section: Section, options: argparse.Namespace) -> list[str]:
    """The command of a section."""
    words = ["bench", "-m", str(options.models / section.model), *shlex.split(section.words)]
    words += shlex.split(_COMMON)
    trace = options.go_trace if section.go else options.trace
    if section.replayed and trace is not None:
        words += ["--replay-routing", str(trace), "--top-ks", str(read_trace(str(trace)).top_k)]
    words += ["--force-tokens", str(ROOT / "docs" / "architecture.md")]
    return words


def run_section(section: Section, options: argparse.Namespace) -> tuple[str, int]:
    """One section; returns its text for the docs and the exit code."""
    words = bench_words(section, options)
    table = options.out / f"{section.name}.md"
    extra = ["--json", str(options.out / f"{section.name}.json"), "--markdown", str(table)]
    if options.plots:
        extra += ["--plot", str(options.out / f"{section.name}.svg")]
    done = subprocess.run(
        [sys.executable, "-m", "bmoe", *words, *extra],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.DEVNULL,
        stderr=None,
        check=False,
    )
    lines = [f"### {section.title}", "", "```", _shown(words), "```", ""]
    if table.exists():
        lines.append(_without_folders(table.read_text(encoding="utf-8"), options))
    else:
        lines.append(f"Not measured: exit code {done.returncode}, see the messages.")
    if options.plots and (options.out / f"{section.name}.svg").exists():
        lines += ["", f"![{section.title}]({section.name}.svg)"]
    return "\n".join(lines), done.returncode


def _shown(words: Sequence[str]) -> str:
    """A command as others would type it."""
    return shlex.join(["bmoe", *(Path(word).name if os.sep in word else word for word in words)])


def _without_folders(text: str, options: argparse.Namespace) -> str:
    """What a command wrote, the traces by their names alone."""
    for trace in filter(None, (options.trace, options.go_trace)):
        text = text.replace(str(trace), trace.name)
    return text.rstrip()


def predictions(options: argparse.Namespace) -> str:
    """Simulated speeds of Qwen3-30B's routing for other drives, machines and sizes."""
    lines = ["### Predicted, by simulation", ""]
    for scale in _SCALES:
        words = ["plan", "--simulate", str(options.trace), "--scale", str(scale)]
        words += ["--cache", "5%,10%,25%", "--cores", "4,8,16,32"]
        done = subprocess.run(
            [sys.executable, "-m", "bmoe", *words],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            check=False,
        )
        lines += [
            "```",
            f"$ {_shown(words)}",
            _without_folders(done.stdout or done.stderr, options),
            "```",
            "",
        ]
    return "\n".join(lines)


def main() -> int:
    """Runs all sections; exit 1 when one failed or time ran out before the last."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", type=Path, default=Path("models"))
    parser.add_argument("--trace", type=Path, required=True, help="a recorded route trace of Qwen3-30B-A3B")
    parser.add_argument("--go-trace", type=Path, help="one of gpt-oss-120b, for GO")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--only", action="append", metavar="NAME", help=", ".join(s.name for s in SECTIONS))
    parser.add_argument("--no-plots", dest="plots", action="store_false")
    options = parser.parse_args()
    options.models, options.trace, options.out = (
        path.resolve() for path in (options.models, options.trace, options.out)
    )
    if options.go_trace is not None:
        options.go_trace = options.go_trace.resolve()
    known = {section.name for section in SECTIONS}
    if unknown := [name for name in options.only or () if name not in known]:
        parser.error(f"no section {unknown[0]!r}; there are {', '.join(sorted(known))}")
    for trace in (options.trace, options.go_trace):
        if trace is not None and not trace.is_file():
            parser.error(f"{trace}: no such file")
    options.out.mkdir(parents=True, exist_ok=True)
    wanted = [s for s in SECTIONS if not options.only or s.name in options.only]
    sections = [s for s in wanted if (options.models / s.model).is_file()]
    started, texts, worst = time.monotonic(), [], 0
    for section in sections:
        spent = (time.monotonic() - started) / 60
        if spent > options.minutes:
            print(f"{section.name}: no time left; start again to go on", file=sys.stderr)
            worst = 1
            continue
        print(f"{section.name} ({spent:.0f} of {options.minutes:.0f} minutes)", file=sys.stderr, flush=True)
        text, code = run_section(section, options)
        texts.append(text)
        worst = max(worst, min(code, 1))
        if code == 128 + 2:
            return code
    texts.append(predictions(options))
    (options.out / "benchmarks.md").write_text("\n\n".join(texts) + "\n", encoding="utf-8")
    for section in wanted:
        if section not in sections:
            print(f"{section.name}: left out, there is no {section.model}", file=sys.stderr)
    return worst


if __name__ == "__main__":
    sys.exit(main())
