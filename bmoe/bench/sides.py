"""What is compared: a side is one way to run a model, a matrix is the sides of a benchmark in order.

Owns names, what each built-in side means, and which references the bounds need. Must not know how a side is
run, nor in what state the machine is.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal

from bmoe.io.errors import UsageError
from bmoe.policies import DEFAULT_POLICY

if TYPE_CHECKING:
    from collections.abc import Sequence

MIB: Final = 1 << 20
Kind = Literal["drive", "stream", "resident", "external"]
PageCache = Literal["any", "warm", "dropped"]

STREAMING: Final = ("overlap", "serial")
RESIDENT: Final = ("resident", "resident-norepack", "resident-dropped", "resident-capped")
BUILT_IN: Final = (*STREAMING, *RESIDENT)
# A capped resident model reads itself again for every token: a few take as long as all of another side.
CAPPED_TOKENS: Final = 6
CAPPED_PROMPT_TOKENS: Final = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Side:
    """One way to run a model.

    Attributes:
        name: In tables; unique within a matrix.
        kind: `drive` measures the drive as the engine reads; the others generate.
        model: The file.
        threads: Compute threads.
        prompt_tokens: Length of the prompt.
        tokens: Tokens fed after it; 1 where only the prompt counts.
        counts: What the side is for.
        cache_bytes: Streaming: memory for experts; None holds all of them.
        overlap, policy, backend, n_expert_used, replay_routing: As in SessionConfig.
        lever: Streaming: what is changed of the configuration, as typed; None for nothing.
        changes: The same by field of SessionConfig.
        repack: Resident: llama.cpp's repacked weights.
        page_cache: What of the file has to be in the page cache when the run begins.
        warm_up: Decode as many tokens before those that are measured, so that the cache is in steady state.
        cap_bytes: Memory that the process may use, page cache included; None for no limit.
        drive_bytes_per_s: What it may read per second; None for no limit.
        command, pattern: External: what is run, and the pattern that finds tokens per second in its output.
        reference: Needed by the bounds, not a row of its own: the drive, or all experts cached.
    """

    name: str
    kind: Kind
    model: str
    threads: int
    prompt_tokens: int
    tokens: int
    counts: Literal["decode", "prefill"] = "decode"
    cache_bytes: int | None = None
    overlap: bool = True
    policy: str = DEFAULT_POLICY
    backend: Literal["auto", "uring", "threads"] = "auto"
    n_expert_used: int | None = None
    replay_routing: str | None = None
    lever: str | None = None
    changes: dict[str, Any] = dataclasses.field(default_factory=dict)
    repack: bool = False
    page_cache: PageCache = "any"
    warm_up: bool = True
    cap_bytes: int | None = None
    drive_bytes_per_s: int | None = None
    command: str | None = None
    pattern: str | None = None
    reference: bool = False

    @property
    def key(self) -> str:
        """Equal for sides that are run alike, whatever they are called."""
        facts = dataclasses.asdict(self)
        for name in ("name", "reference"):
            del facts[name]
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]

    def as_json(self) -> dict[str, Any]:
        """The record."""
        return {**dataclasses.asdict(self), "key": self.key}


@dataclass(frozen=True, kw_only=True, slots=True)
class External:
    """Another engine.

    Attributes:
        name: In tables.
        command: Words with {model}, {prompt}, {n} and {threads} in them; no shell sees them.
        pattern: Regular expression whose first group is tokens per second, or with groups `decode` and
            `prefill`.
    """

    name: str
    command: str
    pattern: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Matrix:
    """What is asked for; `sides` makes it a list.

    Attributes:
        model: The file.
        names: Of `BUILT_IN`.
        caches_bytes, policies, threads, backends, top_ks: Streaming sides are made for all combinations;
            resident ones for `threads` and `top_ks`.
        prompt_tokens: The first goes with decoding, each of the others makes prefill rows.
        tokens: Decoded.
        cap_bytes: Memory limits, for `resident-capped` and a streaming side beside each.
        drive_bytes_per_s: Limits of the drive, for streaming sides; empty for none.
        levers: Changes for streaming sides, beside those without, as typed and by field.
        externals: Other engines.
        replay_routing: As in SessionConfig.
        everything_fits: Whether all experts can be cached at once, as the bounds want it.
        moe: Whether the model has experts.
    """

    model: str
    names: tuple[str, ...]
    caches_bytes: tuple[int, ...]
    threads: tuple[int, ...]
    tokens: int
    prompt_tokens: tuple[int, ...] = (32,)
    policies: tuple[str, ...] = (DEFAULT_POLICY,)
    backends: tuple[Literal["auto", "uring", "threads"], ...] = ("auto",)
    top_ks: tuple[int | None, ...] = (None,)
    cap_bytes: tuple[int, ...] = ()
    drive_bytes_per_s: tuple[int, ...] = ()
    levers: tuple[tuple[str, dict[str, Any]], ...] = ()
    externals: tuple[External, ...] = ()
    replay_routing: str | None = None
    everything_fits: bool = True
    moe: bool = True

    def __post_init__(self) -> None:
        for name in self.names:
            if name not in BUILT_IN:
                raise UsageError(f"side {name!r} is not one of {', '.join(BUILT_IN)}")
        if not self.names and not self.externals:
            raise UsageError("nothing to compare: no side was given")
        if "resident-capped" in self.names and not self.cap_bytes:
            raise UsageError("the side resident-capped needs --mem-cap")
        if not self.moe and any(name in STREAMING for name in self.names):
            raise UsageError(f"{self.model} has no experts to stream", hint="--sides resident")

    def sides(self) -> list[Side]:
        """All sides: first the references, then rows in the order of names."""
        rows: list[Side] = []
        for name in self.names:
            rows += self._streaming(name) if name in STREAMING else self._resident(name)
        rows += [self._external(external) for external in self.externals]
        rows += self._prefill(rows)
        sides = [*self._references(rows), *rows]
        seen: dict[str, Side] = {}
        for side in sides:
            if seen.setdefault(side.name, side) is not side:
                raise UsageError(f"two sides are called {side.name!r}")
        return sides

    def _side(self, name: str, kind: Kind, threads: int, **changes: Any) -> Side:
        plain: dict[str, Any] = {
            "name": name,
            "kind": kind,
            "model": self.model,
            "threads": threads,
            "prompt_tokens": self.prompt_tokens[0],
            "tokens": self.tokens,
        }
        return Side(**(plain | changes))

    def _streaming(self, name: str) -> list[Side]:
        rows = []
        for cache, policy, backend, threads, top_k, rate, (lever, changes) in itertools.product(
            self.caches_bytes,
            self.policies,
            self.backends,
            self.threads,
            self.top_ks,
            self.drive_bytes_per_s or (None,),
            ((None, {}), *self.levers),
        ):
            words = [name, f"cache {_mib(cache)}"]
            words += [policy] if len(self.policies) > 1 else []
            words += [f"{backend} backend"] if len(self.backends) > 1 else []
            words += self._common_words(threads, top_k)
            words += [f"drive at {rate / (1 << 30):.2f} GiB/s"] if rate else []
            words += [lever] if lever is not None else []
            rows.append(
                self._side(
                    ", ".join(words),
                    "stream",
                    threads,
                    cache_bytes=cache,
                    overlap=name == "overlap",
                    policy=policy,
                    backend=backend,
                    n_expert_used=top_k,
                    drive_bytes_per_s=rate,
                    replay_routing=self.replay_routing,
                    lever=lever,
                    changes=changes,
                )
            )
        return rows

    def _resident(self, name: str) -> list[Side]:
        rows = []
        for threads, top_k in itertools.product(self.threads, self.top_ks):
            words = [name, *self._common_words(threads, top_k)]
            how: dict[str, Any] = {"repack": name == "resident", "page_cache": "warm", "n_expert_used": top_k}
            if name == "resident-dropped":
                how |= {"page_cache": "dropped", "warm_up": False}
            if name != "resident-capped":
                rows.append(self._side(", ".join(words), "resident", threads, **how))
                continue
            for cap in self.cap_bytes:
                # Pages that another process has read are not charged to the group: the cap were none.
                limits: dict[str, Any] = {"page_cache": "dropped", "cap_bytes": cap}
                few: dict[str, Any] = {
                    "tokens": min(CAPPED_TOKENS, self.tokens),
                    "prompt_tokens": min(CAPPED_PROMPT_TOKENS, self.prompt_tokens[0]),
                    "warm_up": False,
                }
                label = ", ".join([name, f"{_mib(cap)} cap", *words[1:]])
                rows.append(self._side(label, "resident", threads, **(how | limits | few)))
                for cache in self._caches_under(cap) if self.moe else ():
                    streamed = ", ".join(
                        ["overlap-capped", f"{_mib(cap)} cap", f"cache {_mib(cache)}", *words[1:]]
                    )
                    more = {
                        "cache_bytes": cache,
                        "n_expert_used": top_k,
                        "replay_routing": self.replay_routing,
                    }
                    rows.append(self._side(streamed, "stream", threads, **(limits | more)))
        return rows

    def _caches_under(self, cap_bytes: int) -> tuple[int, ...]:
        """The largest cache that leaves room for all else, or nothing."""
        return tuple(sorted(c for c in self.caches_bytes if c <= cap_bytes // 2)[-1:])

    def _common_words(self, threads: int, top_k: int | None) -> list[str]:
        words = [f"{threads} thread{'s' if threads != 1 else ''}"] if len(self.threads) > 1 else []
        return words + ([f"top {top_k}"] if top_k is not None else [])

    def _external(self, external: External) -> Side:
        return self._side(
            external.name, "external", self.threads[-1], command=external.command, pattern=external.pattern
        )

    def _prefill(self, rows: Sequence[Side]) -> list[Side]:
        """The same sides with longer prompts and nothing after them; from a cold expert cache."""
        return [
            dataclasses.replace(
                side,
                name=f"prefill {length}, {side.name}",
                prompt_tokens=length,
                tokens=1,
                counts="prefill",
                warm_up=False,
            )
            for length in self.prompt_tokens[1:]
            for side in rows
            if side.kind != "external" and side.cap_bytes is None
        ]

    def _references(self, rows: Sequence[Side]) -> list[Side]:
        """The drive once for each of its limits, and everything cached for each number of threads."""
        streamed = [side for side in rows if side.kind == "stream" and side.counts == "decode"]
        found: dict[str, Side] = {}
        for side in streamed:
            drive = drive_of(side)
            found.setdefault(drive.name, drive)
        if self.everything_fits:
            for side in streamed:
                cached = all_cached(side)
                found.setdefault(cached.name, cached)
        return list(found.values())


def drive_of(side: Side) -> Side:
    """The side that measures the drive as this one sees it."""
    rate = side.drive_bytes_per_s
    name = "drive" if rate is None else f"drive at {rate / (1 << 30):.2f} GiB/s"
    return Side(
        name=f"{name}, threads backend" if side.backend == "threads" else name,
        kind="drive",
        model=side.model,
        threads=1,
        prompt_tokens=0,
        tokens=0,
        backend=side.backend if side.backend == "threads" else "auto",
        drive_bytes_per_s=rate,
        reference=True,
    )


def all_cached(side: Side) -> Side:
    """This side with every expert cached and no lever: what computing takes."""
    words = ["everything cached", f"{side.threads} thread{'s' if side.threads != 1 else ''}"]
    words += [] if side.n_expert_used is None else [f"top {side.n_expert_used}"]
    return dataclasses.replace(
        side,
        name=", ".join(words),
        cache_bytes=None,
        overlap=True,
        policy=DEFAULT_POLICY,
        lever=None,
        changes={},
        backend="auto",
        cap_bytes=None,
        drive_bytes_per_s=None,
        page_cache="any",
        warm_up=True,
        reference=True,
    )


def _mib(size_bytes: int) -> str:
    value = size_bytes / MIB
    return f"{value:.0f} MiB" if value >= 10 or value == int(value) else f"{value:.2f} MiB"
