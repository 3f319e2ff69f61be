"""Compares the speed of two commits, for use before merging a change of the hot path.

    python -m tools.compare_commits OLD NEW -m MODEL [--rounds 5] [--cache-mib N] [--tokens 64]

Each commit is checked out into a worktree of its own and its native part is built there; both use this
interpreter's packages. Runs alternate (old new, new old, ...), each in a fresh process: a generation that
fills the cache, then one that counts. Reported are ratios new / old, round by round, with bootstrap
intervals: tokens per second (`wall_ns` of the steps), CPU time, and where `perf stat -e instructions:u` works
the instructions of the whole process, which no other load disturbs. The exit code is 1 when the new commit is
slower beyond doubt: the whole interval of tokens per second below 1 - --allow, or that of instructions above
1 + --allow. The last line of stdout is JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parent.parent
MIB = 1 << 20
FIGURES = ("tok_per_s", "cpu_s_per_token", "instructions")


# --- one run, in its own process: imports the commit's bmoe, and nothing of ours ----------------------------


async def run_once(job: dict[str, Any]) -> dict[str, float]:
    """Generates twice and reports the second."""
    from bmoe.config import GenerateRequest, SessionConfig
    from bmoe.session import Session

    wanted = {
        "model_path": job["model"],
        "threads": job["threads"],
        "mode": "stream" if job["cache_mib"] else "resident",
        "cache_bytes": job["cache_mib"] * MIB or None,
        "repack": False,
        "context_tokens": 2 * job["tokens"] + 256,
    }
    known = {field.name for field in dataclasses.fields(SessionConfig)}
    config = SessionConfig(**{name: value for name, value in wanted.items() if name in known})
    session = await Session.open(config)
    async with session:
        tokens = session.model.tokenize(job["text"])
        while len(tokens) < job["tokens"] + 32:
            tokens += tokens
        prompt = b"".join(map(session.model.piece, tokens[:32])).decode("utf-8", "ignore")
        forced = tuple(tokens[32 : 32 + job["tokens"]])
        request = GenerateRequest(prompt=prompt, n_predict=len(forced), forced=forced, ignore_eog=True)
        for _ in range(2):
            steps = [event.metrics async for event in session.generate(request)]
    return {
        "tok_per_s": len(steps) / (sum(m.wall_ns for m in steps) / 1e9),
        "cpu_s_per_token": sum(m.cpu_ns for m in steps) / 1e9 / len(steps),
    }


# --- two commits ------------------------------------------------------------------------------------------


@contextlib.contextmanager
def checked_out(commit: str, folder: Path) -> Iterator[Path]:
    """A worktree of a commit with its native part built; removed afterwards."""
    git = ("git", "-C", str(ROOT))
    add = [*git, "worktree", "add", "--quiet", "--detach", str(folder), commit]
    if subprocess.run(add, check=False).returncode:
        raise SystemExit(f"{commit} cannot be checked out")
    try:
        # Without the project's metadata, which old versions of setuptools cannot read: only C is built.
        (folder / "pyproject.toml").unlink(missing_ok=True)
        build = [sys.executable, "setup.py", "-q", "build_ext", "--inplace"]
        done = subprocess.run(build, cwd=folder, check=False, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"{commit} does not build:\n{done.stderr}")
        yield folder
    finally:
        subprocess.run([*git, "worktree", "remove", "--force", str(folder)], check=False)


def counts_instructions() -> bool:
    """Whether perf can count them here: most virtual machines have no such counter."""
    if shutil.which("perf") is None:
        return False
    command = ["perf", "stat", "-x,", "-e", "instructions:u", "--", "true"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.returncode == 0 and done.stderr.split(",")[0].isdigit()


def measure(folder: Path, job: dict[str, Any], *, instructions: bool) -> dict[str, float]:
    """One run of the commit in `folder`."""
    with tempfile.NamedTemporaryFile("r", suffix=".perf") as counted:
        command = [sys.executable, str(Path(__file__).resolve()), "--child"]
        if instructions:
            command = ["perf", "stat", "-x,", "-e", "instructions:u", "-o", counted.name, "--", *command]
        env = {**os.environ, "PYTHONPATH": str(folder), "OPENBLAS_NUM_THREADS": "1"}
        # From the commit's own folder: this file's folder would be first on the path, and has no bmoe.
        done = subprocess.run(
            command, input=json.dumps(job), capture_output=True, text=True, check=False, cwd=folder, env=env
        )
        if done.returncode:
            raise SystemExit(f"{folder.name}: exit {done.returncode}\n{done.stderr}")
        figures: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
        if instructions:
            lines = [line for line in counted.read().splitlines() if "instructions" in line]
            figures["instructions"] = float(lines[0].split(",")[0])
    return figures


def main() -> int:
    """Compares; see the module's docstring for the exit code."""
    if "--child" in sys.argv:
        import uvloop

        print(json.dumps(uvloop.run(run_once(json.load(sys.stdin)))))
        return 0
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("old")
    parser.add_argument("new")
    parser.add_argument("-m", "--model", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--cache-mib", type=int, default=1000, help="0 runs resident")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--text", type=Path, default=ROOT / "docs" / "architecture.md")
    parser.add_argument("--allow", type=float, default=0.02, help="how much slower is no regression")
    options = parser.parse_args()
    job = {
        "model": str(options.model.resolve()),
        "threads": options.threads,
        "cache_mib": options.cache_mib,
        "tokens": options.tokens,
        "text": options.text.read_text(encoding="utf-8")[:100_000],
    }
    instructions = counts_instructions()
    results: dict[str, list[dict[str, float]]] = {"old": [], "new": []}
    with tempfile.TemporaryDirectory(prefix="bmoe-commits-") as folder, contextlib.ExitStack() as stack:
        trees = {
            name: stack.enter_context(checked_out(commit, Path(folder) / name))
            for name, commit in (("old", options.old), ("new", options.new))
        }
        for number in range(options.rounds):
            for name in ("old", "new") if number % 2 == 0 else ("new", "old"):
                print(f"round {number + 1} of {options.rounds}: {name}", file=sys.stderr, flush=True)
                results[name].append(measure(trees[name], job, instructions=instructions))
    return report(options, results, instructions=instructions)


def report(
    options: argparse.Namespace, results: dict[str, list[dict[str, float]]], *, instructions: bool
) -> int:
    """Prints ratios and JSON; returns the exit code."""
    from bmoe.bench.ratios import paired_ratio

    ratios = {}
    for figure in FIGURES if instructions else FIGURES[:2]:
        new, old = (
            {n: run[figure] for n, run in enumerate(results[name]) if figure in run}
            for name in ("new", "old")
        )
        ratio = paired_ratio(new, old)
        assert ratio is not None
        ratios[figure] = dataclasses.asdict(ratio)
        print(f"{figure:16} {ratio.ratio:.4f} ({ratio.low:.4f} to {ratio.high:.4f})")
    if not instructions:
        print("instructions     not counted here")
    slower = ratios["tok_per_s"]["high"] < 1 - options.allow
    slower = slower or (instructions and ratios["instructions"]["low"] > 1 + options.allow)
    print("slower" if slower else "not slower beyond doubt")
    print(json.dumps({"old": options.old, "new": options.new, "ratios": ratios, "runs": results}))
    return int(slower)


if __name__ == "__main__":
    sys.exit(main())
