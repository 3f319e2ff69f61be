"""Hostile and odd model files: one clear line, never a crash.

The header's syntax is also tested through `bmoe synth` (test_synth.py); here it is what decode is given.
"""

from __future__ import annotations

import ctypes
import functools
import os
import random
import socket
import struct
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bmoe.gguf_file import read_gguf
from bmoe.gguf_types import GGML_TYPES
from bmoe.io.errors import BmoeError
from bmoe.llama_library import ggml_base
from bmoe.model import lay_out
from bmoe.session import Session
from bmoe.synth import random_model, tiny_shape
from bmoe.tools.fuzz_gguf import Header, Worker, bases, mutated
from tests.models import model_folder, tiny_moe
from tests.runs import assert_same_as_resident, config, generated, run
from tests.test_architectures import gate_model

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

HUGE = 1 << 60
ARCH = "qwen3moe"


@functools.cache
def base() -> Header:
    return Header(tiny_moe("Q8_0", layers=2, experts=4, top_k=2, embedding=64, expert_width=32))


def refused(path: str | Path) -> str:
    """The one line that says why."""
    with pytest.raises(BmoeError) as caught:
        lay_out(read_gguf(str(path)))
    line = str(caught.value)
    assert "\n" not in line
    assert str(path) in line
    return line


def write(path: Path, header: bytes, size_bytes: int | None = None) -> Path:
    path.write_bytes(header)
    os.truncate(path, max(base().size_bytes if size_bytes is None else size_bytes, len(header)))
    return path


def with_key(name: str, kind: int, payload: bytes | None) -> bytes:
    """The header with another value for a key, or without it."""
    header = base().copy()
    header.keys = [key for key in header.keys if key[0] != name]
    if payload is not None:
        header.keys.append((name, kind, payload))
    return header.encode()


def without_tensor(architecture: str, name: str) -> bytes:
    header = Header(gate_model(architecture))
    header.tensors = [tensor for tensor in header.tensors if tensor[0] != name]
    return header.encode()


def with_key_twice(name: str) -> bytes:
    header = base().copy()
    header.keys += [key for key in header.keys if key[0] == name]
    return header.encode()


def u32(value: int) -> bytes:
    return struct.pack("<I", value)


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def with_tensor(index: int, *, name: str | None = None, shape: tuple[int, ...] = (), kind: int = -1) -> bytes:
    header = base().copy()
    old_name, old_shape, old_kind = header.tensors[index]
    header.tensors[index] = (
        old_name if name is None else name,
        shape or old_shape,
        old_kind if kind < 0 else kind,
    )
    return header.encode()


def expert_tensor() -> int:
    return next(i for i, t in enumerate(base().tensors) if t[0] == "blk.1.ffn_up_exps.weight")


def offset_of_last_tensor(value: int) -> bytes:
    """The header with another offset in its table's last entry."""
    header = base().copy()
    raw = header.encode()
    name, shape, kind = header.tensors[-1]
    entry = text(name) + struct.pack(f"<I{len(shape)}QI", len(shape), *shape, kind)
    at = raw.index(entry) + len(entry)
    return raw[:at] + struct.pack("<Q", value) + raw[at + 8 :]


HEADERS: dict[str, tuple[Callable[[], bytes], str]] = {
    "another magic": (lambda: b"GGML" + base().encode()[4:], "is not a GGUF file"),
    "version 1": (lambda: b"GGUF" + u32(1) + base().encode()[8:], "version not supported"),
    "version 4": (lambda: b"GGUF" + u32(4) + base().encode()[8:], "version not supported"),
    "big-endian": (lambda: b"GGUF" + struct.pack(">I", 3) + base().encode()[8:], "big-endian"),
    "2^60 tensors": (lambda: b"GGUF" + struct.pack("<IQQ", 3, HUGE, 1) + bytes(99), "a count exceeds"),
    "2^60 keys": (lambda: b"GGUF" + struct.pack("<IQQ", 3, 0, HUGE) + bytes(99), "a count exceeds"),
    "a string of 2^60": (
        lambda: b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, HUGE) + bytes(99),
        "the file ends early",
    ),
    "an array of 2^60": (lambda: with_key("a", 9, struct.pack("<IQ", 4, HUGE)), "a count exceeds"),
    "2^60 strings": (lambda: with_key("a", 9, struct.pack("<IQ", 8, HUGE)), "a count exceeds"),
    "an array of arrays": (lambda: with_key("a", 9, struct.pack("<IQ", 9, 1)), "arrays of arrays"),
    "alignment 0": (lambda: with_key("general.alignment", 4, u32(0)), "is no alignment"),
    "alignment 3": (lambda: with_key("general.alignment", 4, u32(3)), "is no alignment"),
    "alignment 2^31": (lambda: with_key("general.alignment", 4, u32(1 << 31)), "is no alignment"),
    "alignment as text": (lambda: with_key("general.alignment", 8, text("32")), "is no alignment"),
    "a dimension of 0": (lambda: with_tensor(0, shape=(64, 0)), "a dimension is zero"),
    "a product past 64 bits": (
        lambda: with_tensor(0, shape=(1 << 40, 1 << 40)),
        "reaches past the end of the file",
    ),
    "a tensor past the end": (lambda: offset_of_last_tensor(1 << 40), "reaches past the end of the file"),
    "tensors that overlap": (lambda: offset_of_last_tensor(0), "does not follow the tensor before it"),
    "a name twice": (lambda: with_tensor(1, name=base().tensors[0][0]), "two tensors of one name"),
    "no name": (lambda: with_tensor(1, name=""), "a name is empty"),
    "a zero byte in a name": (lambda: with_tensor(1, name="a\0b"), "control characters"),
    "a terminal's escape in a name": (lambda: with_tensor(1, name="\x1b[2J"), "control characters"),
    "a key twice": (lambda: with_key_twice(f"{ARCH}.block_count"), "the key occurs twice"),
    "an unknown type": (lambda: with_tensor(0, kind=4), "type not known"),
    "text for expert_count": (lambda: with_key(f"{ARCH}.expert_count", 8, text("4")), "is not an integer"),
    "a float for expert_count": (
        lambda: with_key(f"{ARCH}.expert_count", 6, struct.pack("<f", 4)),
        "is not an integer",
    ),
    "a negative expert_count": (
        lambda: with_key(f"{ARCH}.expert_count", 5, struct.pack("<i", -4)),
        "is not an integer",
    ),
    "2^32 - 1 experts": (lambda: with_key(f"{ARCH}.expert_count", 4, u32(2**32 - 1)), "from 0 to 1024"),
    "another expert_count": (
        lambda: with_key(f"{ARCH}.expert_count", 4, u32(5)),
        "expected 5 experts, got 4",
    ),
    "no expert used": (lambda: with_key(f"{ARCH}.expert_used_count", 4, u32(0)), "from 1 to 4; got 0"),
    "too many used": (lambda: with_key(f"{ARCH}.expert_used_count", 4, u32(5)), "from 1 to 4; got 5"),
    "used not said": (lambda: with_key(f"{ARCH}.expert_used_count", 4, None), "is missing beside 4 experts"),
    "count not said": (lambda: with_key(f"{ARCH}.expert_count", 4, None), "from 0 to 0; got 2"),
    "groups that do not divide": (
        lambda: with_key(f"{ARCH}.expert_group_count", 4, u32(3)),
        "does not divide 4 experts",
    ),
    "no layers": (lambda: with_key(f"{ARCH}.block_count", 4, u32(0)), "from 1 to 512"),
    "more prediction blocks than blocks": (
        lambda: with_key(f"{ARCH}.nextn_predict_layers", 4, u32(3)),
        "from 0 to 2",
    ),
    "no heads": (lambda: with_key(f"{ARCH}.attention.head_count", 4, None), "divided by"),
    "an interval of 0": (lambda: with_key(f"{ARCH}.full_attention_interval", 4, u32(0)), "from 1 to"),
    "heads of a million": (
        lambda: with_key(f"{ARCH}.attention.key_length", 4, u32(1 << 20)),
        "from 1 to 8192",
    ),
    "an unknown scaling": (lambda: with_key(f"{ARCH}.rope.scaling.type", 8, text("x")), "is not one of none"),
    "no vocabulary": (lambda: with_key("tokenizer.ggml.model", 8, text("none")), "has no vocabulary"),
    "a long architecture": (lambda: with_key("general.architecture", 8, text("x" * 200)), "is no name"),
    "another number of experts in one tensor": (
        lambda: with_tensor(expert_tensor(), shape=(64, 32, 3)),
        "expected 4 experts, got 3",
    ),
    "experts of integers": (lambda: with_tensor(expert_tensor(), kind=24), "weights cannot be of type i8"),
    "a matrix of doubles": (lambda: with_tensor(0, kind=28), "weights cannot be of type f64"),
    "a recurrent layer without its gate": (
        lambda: without_tensor("qwen3next", "blk.0.attn_gate.weight"),
        "blk.0.attn_gate.weight: is missing",
    ),
    "a layer without down": (
        lambda: with_tensor(expert_tensor() + 1, name="blk.1.x"),
        "blk.1.ffn_down_exps.weight: is missing beside",
    ),
}


@pytest.mark.parametrize("case", HEADERS)
def test_a_hostile_header_is_one_line(case: str, tmp_path: Path) -> None:
    make, complaint = HEADERS[case]
    assert complaint in refused(write(tmp_path / "m.gguf", make(), 16 << 20))


def test_a_model_cut_anywhere_is_one_line(tmp_path: Path) -> None:
    """At the end of every section and entry, and at random points."""
    source = Path(tiny_moe("Q8_0", layers=2, experts=4, top_k=2, embedding=64, expert_width=32))
    content = source.read_bytes()
    header = base()
    ends = [4, 8, 16, 24]
    for name, kind, payload in header.keys:
        ends.append(ends[-1] + len(text(name)) + len(u32(kind)) + len(payload))
    for name, shape, _ in header.tensors:
        ends.append(ends[-1] + len(text(name)) + 4 + 8 * len(shape) + 4 + 8)
    ends += [tensor.offset_bytes for tensor in read_gguf(str(source)).tensors]
    dice = random.Random(4)  # noqa: S311 (no secret)
    ends += [dice.randrange(1, len(content) - 33) for _ in range(60)]
    cut = tmp_path / "cut.gguf"
    for size in sorted({*ends, *(end + 1 for end in ends), len(content) - 33}):
        cut.write_bytes(content[:size])
        refused(cut)


def test_a_header_of_more_than_any_model_has_is_refused(tmp_path: Path) -> None:
    header = b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + text("k") + u32(9)
    path = tmp_path / "m.gguf"
    for element, count, complaint in (
        (8, 1 << 23, "a count exceeds"),
        (0, 1 << 28, "the header is too large"),
    ):
        write(path, header + struct.pack("<IQ", element, count), 1 << 29)
        assert complaint in refused(path)


# Not files, or not readable ones.


def test_what_is_no_file_is_one_line(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "empty").touch()
    os.symlink(tmp_path / "loop", tmp_path / "loop")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "socket"))
    for name, complaint in (
        ("", "a directory"),
        ("fifo", "a FIFO"),
        ("socket", "a socket"),
        ("empty", "is empty"),
        ("missing", "no such file"),
        ("loop", "cannot be opened"),
    ):
        assert complaint in refused(tmp_path / name if name else tmp_path)
    assert "a character device" in refused("/dev/zero")


def test_a_file_without_permission_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(b"GGUF")
    path.chmod(0)
    if os.access(path, os.R_OK):  # root reads everything: the kernel's refusal is played

        def refuse(*_: object, **__: object) -> int:
            raise PermissionError(13, "Permission denied")

        monkeypatch.setattr(os, "open", refuse)
    assert "is not readable" in refused(path)


# Commands.


# `python -m bmoe`, which says its own peak at the end: what a parent learns includes the parent's.
_COMMAND = (
    "import atexit, pathlib, runpy\n"
    "status = pathlib.Path('/proc/self/status').read_text\n"
    "atexit.register(lambda: print(status().split('VmHWM:')[1].split()[0]))\n"
    "runpy.run_module('bmoe', run_name='__main__')"
)


def decode(path: Path) -> tuple[int, str, int]:
    """Exit code, standard error and peak memory in MiB (0 when it ended at once) of a command."""
    words = ["decode", "-m", str(path), "-p", "a", "-n", "1", "--cache-mb", "1"]
    ended = subprocess.run(
        [sys.executable, "-c", _COMMAND, *words], capture_output=True, text=True, check=False
    )
    peak_kib = int(ended.stdout.split()[-1]) if ended.stdout.strip() else 0
    return ended.returncode, ended.stderr, peak_kib // 1024


@pytest.mark.parametrize(
    "case", ["another magic", "a string of 2^60", "no expert used", "a tensor past the end"]
)
def test_the_command_ends_with_one_line_and_code_1(case: str, tmp_path: Path) -> None:
    code, words, peak_mib = decode(write(tmp_path / "m.gguf", HEADERS[case][0](), 1 << 20))
    assert code == 1
    assert words.startswith("bmoe: error: ")
    assert words.count("\n") == 1
    assert 0 < peak_mib < 200


def test_an_assertion_of_llama_cpp_is_one_line(tmp_path: Path) -> None:
    """What no check foresees: norms in BF16 load, and computing with them is asserted against."""
    header = base().copy()
    index = next(i for i, t in enumerate(header.tensors) if t[0] == "blk.0.ffn_norm.weight")
    name, shape, _ = header.tensors[index]
    header.tensors[index] = (name, shape, 30)
    code, words, _ = decode(write(tmp_path / "m.gguf", header.encode(), header.size_bytes))
    assert code == 1
    assert words.splitlines()[-1].startswith("bmoe: error: llama.cpp gave up")
    assert "Traceback" not in words


def test_a_fault_in_native_code_is_one_line() -> None:
    program = (
        "import os, signal; from bmoe.cli.interrupts import run_async\n"
        "async def main(_): os.kill(os.getpid(), signal.SIGSEGV); return 0\n"
        "run_async(main)"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr.count("\n")) == (1, 1)
    assert ended.stderr.startswith("bmoe: error: native code crashed")


# Weights that are no numbers, and files that change.


def test_weights_that_are_not_finite_stream_as_they_are(tmp_path: Path) -> None:
    """Routers and experts of NaN and infinities: no crash, and the same logits to the last bit."""
    path = tmp_path / "m.gguf"
    path.write_bytes(Path(tiny_moe("F32", layers=2, experts=4, top_k=2)).read_bytes())
    tensors = {t.name: t for t in read_gguf(str(path)).tensors}
    with open(path, "r+b") as file:
        for name, value in (
            ("blk.1.ffn_gate_inp.weight", float("nan")),
            ("blk.0.ffn_up_exps.weight", float("inf")),
            ("blk.1.ffn_down_exps.weight", float("-inf")),
        ):
            file.seek(tensors[name].offset_bytes)
            file.write(struct.pack("<f", value) * (tensors[name].size_bytes // 8))
    assert_same_as_resident(config(str(path)), "no numbers", 3)


def test_a_file_replaced_while_running_changes_nothing(tmp_path: Path) -> None:
    """The session keeps the file that it opened."""
    path, other = tmp_path / "m.gguf", tmp_path / "other.gguf"
    source = Path(tiny_moe("Q4_K", layers=2))
    path.write_bytes(source.read_bytes())
    other.write_bytes(bytes(source.stat().st_size))

    async def scenario() -> None:
        async with await Session.open(config(str(path))) as session:
            before = await generated(session, "the same", 6)
            os.replace(other, path)
            assert await generated(session, "the same", 6) == before

    run(scenario())
    assert "is not a GGUF file" in refused(path)


def test_a_file_cut_while_running_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    random_model(str(path), shape=tiny_shape(), quantisation="Q8_0")
    program = (
        "import asyncio, os, sys\n"
        "from bmoe.io.errors import BmoeError\n"
        "from tests.runs import config, generated\n"
        "from bmoe.session import Session\n"
        "async def main():\n"
        "    async with await Session.open(config(sys.argv[1])) as session:\n"
        "        os.truncate(sys.argv[1], os.path.getsize(sys.argv[1]) // 3)\n"
        "        await generated(session, 'cut', 4)\n"
        "try:\n"
        "    asyncio.run(main())\n"
        "except BmoeError as error:\n"
        "    print(type(error).__name__, error)\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program, str(path)], capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.startswith("ReadError ")
    assert ended.stdout.count("\n") == 1


# The table of types, and the fuzzer.


def test_the_types_are_those_of_the_loaded_ggml() -> None:
    ggml = ggml_base()
    ggml.ggml_type_name.restype = ctypes.c_char_p
    ggml.ggml_blck_size.restype = ctypes.c_int64
    ggml.ggml_type_size.restype = ctypes.c_size_t
    count = max(GGML_TYPES) + 1
    found = {
        code: (code, ggml.ggml_type_name(code).decode(), ggml.ggml_blck_size(code), ggml.ggml_type_size(code))
        for code in range(count)
        if ggml.ggml_blck_size(code)
    }
    assert found == {code: tuple(kind) for code, kind in GGML_TYPES.items()}


FUZZED = ("deepseek2", "gpt-oss", "llama", "qwen35moe")


@pytest.fixture(scope="module")
def headers() -> dict[str, Header]:
    folder = os.path.join(model_folder(), "fuzz")
    os.makedirs(folder, exist_ok=True)
    return {name: Header(path) for name, path in bases(folder, FUZZED).items()}


class _Workers:
    """A worker, and another when it has ended."""

    def __init__(self) -> None:
        self._worker = Worker(deep=True)

    def judge(self, path: str) -> str:
        verdict = self._worker.judge(path)
        if verdict.startswith(("gave-up", "died")):
            self.close()
            self._worker = Worker(deep=True)
        return verdict

    def close(self) -> None:
        self._worker.close()


@pytest.fixture(scope="module")
def workers() -> Iterator[_Workers]:
    made = _Workers()
    yield made
    made.close()


@settings(max_examples=120, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(name=st.sampled_from(FUZZED), seed=st.integers(0, 2**32 - 1))
def test_what_the_check_accepts_does_not_crash_llama_cpp(
    headers: dict[str, Header], workers: _Workers, name: str, seed: int
) -> None:
    """The long run is `python -m bmoe.tools.fuzz_gguf`."""
    raw = mutated(headers[name], random.Random(seed))  # noqa: S311 (no secret)
    path = os.path.join(model_folder(), "fuzzed.gguf")
    with open(path, "wb") as file:
        file.write(raw)
        file.truncate(max(headers[name].size_bytes, len(raw)))
    verdict = workers.judge(path)
    assert not verdict.startswith("died"), verdict
