"""Mutated GGUF headers against bmoe's check and llama.cpp's loader: what the check accepts must not crash.

    python -m bmoe.tools.fuzz_gguf --cases 20000 --seed 1 --keep crashes/

A worker process takes one file after the other: bmoe's own check first, then, for what that accepts,
ggml's reader, llama.cpp's loader and a context (with --deep also one token). An assertion of llama.cpp
ends a worker with bmoe's one line and code 1, which is counted as "gave-up"; a worker that dies of anything
else, or takes too long, is a finding: its file is kept and the next worker goes on. The last line is a
JSON object with the counts; the exit code is 1 with findings. tests/test_hostile.py runs a bounded number
of the same cases.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import random
import select
import shutil
import struct
import subprocess
import sys
import tempfile
from dataclasses import replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_INTEGERS = (
    0,
    1,
    2,
    3,
    5,
    7,
    8,
    255,
    256,
    511,
    512,
    513,
    1024,
    1025,
    65535,
    1 << 20,
    2**31 - 1,
    2**31,
    2**32 - 1,
)
_FLOATS = (0.0, -1.0, 1e-30, 1e30, float("inf"), float("nan"))
_PATIENCE_S = 20.0
_TEXTS = ("", "none", "no_vocab", "llama", "gpt2", "bert", "t5", "rwkv", "yarn", "x" * 300, "%s%n", "\n")


Entry = tuple[str, tuple[int, ...], int]


class Header:
    """A header taken apart: what can be changed, and written again.

    Attributes:
        keys: (name, type tag, payload).
        tensors: (name, shape, type code); offsets follow from them.
    """

    def __init__(self, path: str) -> None:
        from bmoe.gguf_header import read_header

        header = read_header(path, arrays=True)
        self.size_bytes = header.size_bytes
        self.keys = [(name, int(v.type), v.payload) for name, v in header.metadata.items()]
        self.tensors: list[Entry] = [(t.name, t.shape, t.kind.code) for t in header.tensors]

    def copy(self) -> Header:
        """One to change."""
        other = object.__new__(Header)
        other.size_bytes = self.size_bytes
        other.keys = list(self.keys)
        other.tensors = list(self.tensors)
        return other

    def encode(self) -> bytes:
        """The header's bytes, padded to 32."""
        from bmoe.gguf_types import GGML_TYPES, packed_bytes

        parts = [b"GGUF", struct.pack("<IQQ", 3, len(self.tensors), len(self.keys))]
        for name, kind, payload in self.keys:
            parts += [_string(name), struct.pack("<I", kind), payload]
        offset = 0
        for name, shape, code in self.tensors:
            parts.append(_string(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, code, offset))
            known = GGML_TYPES.get(code)
            size = packed_bytes(known, shape) if known and shape else 0
            offset = (offset + -(-size // 32) * 32) % 2**64
        raw = b"".join(parts)
        return raw.ljust(-(-len(raw) // 32) * 32, b"\0")


def _string(text: str) -> bytes:
    raw = text.encode()
    return struct.pack("<Q", len(raw)) + raw


def mutated(base: Header, dice: random.Random) -> bytes:
    """The base's header with one to three changes."""
    header = base.copy()
    for _ in range(dice.choice((1, 1, 1, 2, 3))):
        dice.choice((_change_key, _change_key, _change_key, _drop, _change_tensor, _retype))(header, dice)
    raw = header.encode()
    if dice.random() < 0.25:
        damaged = bytearray(raw)
        for _ in range(dice.randint(1, 4)):
            damaged[dice.randrange(len(damaged))] = dice.randrange(256)
        raw = bytes(damaged)
    return raw


def _change_key(header: Header, dice: random.Random) -> None:
    """Another value of the same type; the model's own keys rather than the tokenizer's."""
    own = [i for i, (name, _, _) in enumerate(header.keys) if not name.startswith(("tokenizer.", "general."))]
    index = dice.choice(own) if own and dice.random() < 0.85 else dice.randrange(len(header.keys))
    name, kind, payload = header.keys[index]
    if kind in {4, 5}:
        old = int.from_bytes(payload, "little")
        value = dice.choice((*_INTEGERS, old + 1, max(old - 1, 0), 2 * old, old // 2)) % 2**32
        payload = struct.pack("<I", value)
    elif kind == 6:
        payload = struct.pack("<f", dice.choice(_FLOATS))
    elif kind == 7:
        payload = bytes([dice.choice((0, 1, 2, 255))])
    elif kind == 8:
        payload = _string(dice.choice(_TEXTS))
    elif kind == 9:
        payload = _change_array(payload, dice)
    header.keys[index] = (name, kind, payload)


def _change_array(payload: bytes, dice: random.Random) -> bytes:
    element, count = struct.unpack_from("<IQ", payload)
    if element in {4, 5, 6}:
        words = bytearray(payload[12:])
        if dice.random() < 0.5 and words:
            at = 4 * dice.randrange(len(words) // 4)
            words[at : at + 4] = struct.pack("<I", dice.choice(_INTEGERS))
        elif len(words) > 4:
            del words[-4 * dice.randint(1, len(words) // 4) :]
        else:
            words += bytes(4 * dice.randint(1, 600))
        return struct.pack("<IQ", element, len(words) // 4) + words
    return struct.pack("<IQ", dice.choice((0, 4, 5, 6, 7)), min(count, 64)) + bytes(256)


def _retype(header: Header, dice: random.Random) -> None:
    index = dice.randrange(len(header.keys))
    name, _, _ = header.keys[index]
    kind, payload = dice.choice(
        (
            (4, struct.pack("<I", dice.choice(_INTEGERS))),
            (5, struct.pack("<i", -1)),
            (6, struct.pack("<f", 2.0)),
            (7, b"\1"),
            (8, _string(dice.choice(_TEXTS))),
            (9, struct.pack("<IQ", 4, 4) + struct.pack("<4I", *dice.choices(_INTEGERS, k=4))),
            (10, struct.pack("<Q", 2**63)),
            (12, struct.pack("<d", 0.5)),
        )
    )
    header.keys[index] = (name, kind, payload)


def _drop(header: Header, dice: random.Random) -> None:
    if dice.random() < 0.6 and len(header.keys) > 1:
        del header.keys[dice.randrange(len(header.keys))]
    elif len(header.tensors) > 1:
        del header.tensors[dice.randrange(len(header.tensors))]


def _change_tensor(header: Header, dice: random.Random) -> None:
    if not header.tensors:
        return
    index = dice.randrange(len(header.tensors))
    name, shape, code = header.tensors[index]
    what = dice.randrange(4)
    if what == 0:
        code = dice.choice((0, 1, 8, 24, 26, 28, 30, 12, 15, 9))
    elif what == 1:
        at = dice.randrange(len(shape))
        extent = shape[at]
        other = dice.choice((1, 2, 32, 256, max(1, extent - 32), extent + 32, 2 * extent, 2**40))
        shape = (*shape[:at], other, *shape[at + 1 :])
    elif what == 2:
        shape = dice.choice((shape[::-1], (*shape, 1)[:4], shape[:1], (*shape, 2)[:4]))
    else:
        name = dice.choice(header.tensors)[0] if dice.random() < 0.3 else name + "x"
    header.tensors[index] = (name, shape, code)


def bases(folder: str, architectures: Sequence[str] = ()) -> dict[str, str]:
    """A tiny model of each of these architectures, by name; of all that can be made if none is named."""
    from bmoe.synth import random_model, tiny_shape
    from bmoe.synth.architectures import ARCHITECTURES

    found = {}
    for name in architectures or sorted(ARCHITECTURES):
        shape = replace(tiny_shape(name), layers=4, experts=4, top_k=2)
        found[name] = os.path.join(folder, f"{name}.gguf")
        random_model(found[name], shape=shape, quantisation="Q8_0")
    return found


class Worker:
    """A process that judges files, one line each way."""

    def __init__(self, deep: bool) -> None:
        command = [sys.executable, "-m", "bmoe.tools.fuzz_gguf", "--worker", *(["--deep"] if deep else [])]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    def judge(self, path: str) -> str:
        """The verdict; one that begins with "died" when there was none."""
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        try:
            process.stdin.write(path + "\n")
            process.stdin.flush()
            ready, _, _ = select.select([process.stdout], [], [], _PATIENCE_S)
            if not ready:
                return f"died of {_PATIENCE_S:g} s without a verdict"
            line = process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if line:
            return line.rstrip("\n")
        code, words = process.wait(), process.stderr.read().strip()
        if code == 1 and words.startswith("bmoe: error: llama.cpp gave up") and "\n" not in words:
            return f"gave-up {words}"
        return f"died {code}: {words[-300:]}"

    def close(self) -> None:
        """Ends it."""
        self._process.kill()
        self._process.communicate()


def work(*, deep: bool) -> None:
    """The worker's loop."""
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # it is the real one
    for line in sys.stdin:
        sys.stdout.write(judged(line.rstrip("\n"), deep=deep) + "\n")


def judged(path: str, *, deep: bool) -> str:
    """The verdict on one file, in this process: refused, not loaded, no context, failed or accepted."""
    from bmoe.gguf_file import read_gguf
    from bmoe.io.errors import BmoeError
    from bmoe.llama_library import llama
    from bmoe.model import lay_out
    from bmoe.pipeline.native import bind_ggml
    from bmoe.runtime import Context, Model, RuntimeConfig

    llama()
    bind_ggml()
    try:
        lay_out(read_gguf(path))
    except BmoeError as error:
        return f"refused {' '.join(str(error).split())}"
    config = RuntimeConfig(path=path, threads=1, context_tokens=64, ubatch_tokens=8)
    try:
        model = Model(config, lazy=True)
    except BmoeError as error:
        return f"unloaded {error}"
    try:
        context = Context(model, config, engine_handle=None)
        try:
            if deep:
                context.decode(model.tokenize("a") or [0])
        finally:
            context.close()
    except BmoeError as error:
        return f"failed {error}"
    finally:
        model.close()
    return "accepted"


def cases(count: int, seed: int, models: dict[str, str]) -> Iterator[tuple[str, bytes, int]]:
    """(architecture, header, size of the file) of each case."""
    headers = {name: Header(path) for name, path in models.items()}
    dice = random.Random(seed)  # noqa: S311 (repeatable, no secret)
    for _ in range(count):
        name = dice.choice(sorted(headers))
        raw = mutated(headers[name], dice)
        yield name, raw, headers[name].size_bytes + dice.choice((0, 4096, 1 << 20))


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the fuzzer; see the module's docstring."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--keep", metavar="DIR", help="where files that crash are kept")
    parser.add_argument("--deep", action="store_true", help="also compute one token")
    parser.add_argument("--verbose", action="store_true", help="also show where llama.cpp gave up")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.worker:
        work(deep=options.deep)
        return 0
    counts: collections.Counter[str] = collections.Counter()
    findings: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="bmoe-fuzz-") as folder:
        models = bases(folder)
        worker = Worker(options.deep)
        path = os.path.join(folder, "case.gguf")
        for number, (name, raw, size_bytes) in enumerate(cases(options.cases, options.seed, models)):
            with open(path, "wb") as file:
                file.write(raw)
                file.truncate(max(size_bytes, len(raw)))
            verdict = worker.judge(path)
            counts[verdict.split(" ", 1)[0]] += 1
            if verdict.startswith(("gave-up", "died")):
                worker.close()
                worker = Worker(options.deep)
            if options.verbose and verdict.startswith("gave-up"):
                print(f"case {number} ({name}): {verdict}", file=sys.stderr)
            if verdict.startswith("died"):
                print(f"case {number} ({name}): {verdict}", file=sys.stderr)
                findings.append({"case": number, "architecture": name, "verdict": verdict})
                if options.keep:
                    os.makedirs(options.keep, exist_ok=True)
                    shutil.copy(path, os.path.join(options.keep, f"seed{options.seed}-{number}-{name}.gguf"))
        worker.close()
    print(json.dumps({"cases": options.cases, "seed": options.seed, "counts": counts, "findings": findings}))
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
