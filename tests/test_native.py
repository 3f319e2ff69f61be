"""The native library: what it assumes of ggml's layout, what Python assumes of its own, and the handle."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from bmoe.llama_library import llama
from bmoe.pipeline import native
from bmoe.pipeline.native import Engine, Segment, StreamedTensor, TensorDesc, bind_ggml, function_address, lib

if TYPE_CHECKING:
    from collections.abc import Iterator

NATIVE = Path(__file__).resolve().parent.parent / "pipeline" / "native"


def compiler() -> str:
    for name in (os.environ.get("CC", ""), "cc", "gcc", "clang"):
        if name and (path := shutil.which(name)):
            return path
    pytest.skip("no C compiler is installed")


def llama_headers() -> Path:
    spec = importlib.util.find_spec("llama_cpp")
    assert spec is not None
    assert spec.origin is not None
    folder = Path(spec.origin).parent.parent / "include"
    if not (folder / "ggml-cpu.h").exists():
        pytest.skip(f"llama-cpp-python brought no headers to {folder}")
    return folder


def build(source: str, folder: Path, *includes: Path, run: bool) -> str:
    """Compiles (and runs) a C program; its output."""
    path = folder / "program.c"
    path.write_text(source)
    program = folder / "program"
    flags = [f"-I{include}" for include in includes]
    made = subprocess.run(
        [compiler(), "-std=gnu11", *flags, *(() if run else ("-c",)), str(path), "-o", str(program)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert made.returncode == 0, made.stderr
    return subprocess.run([str(program)], capture_output=True, text=True, check=True).stdout if run else ""


STRUCTS = {
    ("gg_tensor", "ggml_tensor"): (
        "type buffer ne nb op op_params flags src view_src view_offs data name extra padding"
    ),
    ("gg_type_traits_cpu", "ggml_type_traits_cpu"): "from_float vec_dot vec_dot_type nrows",
    ("gg_init_params", "ggml_init_params"): "mem_size mem_buffer no_alloc",
    ("gg_cplan", "ggml_cplan"): (
        "work_size work_data n_threads threadpool abort_callback abort_callback_data use_ref"
    ),
}
CONSTANTS = {
    "GG_MAX_DIMS": "GGML_MAX_DIMS",
    "GG_MAX_SRC": "GGML_MAX_SRC",
    "GG_MAX_NAME": "GGML_MAX_NAME",
    "GG_OP_PARAM_WORDS * sizeof(int32_t)": "GGML_MAX_OP_PARAMS",
    "GG_TYPE_F32": "GGML_TYPE_F32",
    "GG_TYPE_I32": "GGML_TYPE_I32",
    "GG_N_TASKS_MAX": "GGML_N_TASKS_MAX",
}


def assertions() -> Iterator[str]:
    for (ours, theirs), fields in STRUCTS.items():
        yield f'_Static_assert(sizeof(struct {ours}) == sizeof(struct {theirs}), "size of {theirs}");'
        for field in fields.split():
            yield (
                f"_Static_assert(offsetof(struct {ours}, {field}) == offsetof(struct {theirs}, {field}) &&"
                f" sizeof(((struct {ours} *)0)->{field}) == sizeof(((struct {theirs} *)0)->{field}),"
                f' "{theirs}.{field}");'
            )
    for ours, theirs in CONSTANTS.items():
        yield f'_Static_assert((long)({ours}) == (long)({theirs}), "{theirs}");'


def test_the_layouts_declared_are_those_of_the_installed_headers(tmp_path: Path) -> None:
    headers = llama_headers()
    source = '#include <stddef.h>\n#include "ggml.h"\n#include "ggml-cpu.h"\n#include "ggml_abi.h"\n'
    build(source + "\n".join(assertions()), tmp_path, headers, NATIVE, run=False)


def test_a_layout_that_differs_is_noticed(tmp_path: Path) -> None:
    headers = llama_headers()
    changed = (
        (NATIVE / "ggml_abi.h").read_text().replace("    int32_t flags;\n", "    int32_t flags, more;\n")
    )
    (tmp_path / "ggml_abi.h").write_text(changed)
    source = '#include <stddef.h>\n#include "ggml.h"\n#include "ggml-cpu.h"\n#include "ggml_abi.h"\n'
    with pytest.raises(AssertionError, match=r"ggml_tensor\.src"):
        build(source + "\n".join(assertions()), tmp_path, tmp_path, headers, run=False)


@pytest.mark.parametrize(
    ("mirror", "struct"),
    [(TensorDesc, "bm_tensor_desc"), (Segment, "bm_segment"), (native._Counters, "bm_counters")],
)
def test_the_structs_that_python_fills_are_the_headers(
    mirror: type[ctypes.Structure], struct: str, tmp_path: Path
) -> None:
    fields = [name for name, *_ in mirror._fields_]
    lines = [
        f'printf("{name} %zu %zu\\n", offsetof(struct {struct}, {name}),'
        f" sizeof(((struct {struct} *)0)->{name}));"
        for name in fields
    ]
    source = (
        '#include <stddef.h>\n#include <stdio.h>\n#include "hook.h"\n'
        f'int main(void) {{ {" ".join(lines)} printf("size %zu 0\\n", sizeof(struct {struct})); }}'
    )
    told = [line.split() for line in build(source, tmp_path, NATIVE, run=True).splitlines()]
    ours = [[name, str(getattr(mirror, name).offset), str(getattr(mirror, name).size)] for name in fields]
    assert told == [*ours, ["size", str(ctypes.sizeof(mirror)), "0"]]


def test_the_states_and_reasons_are_the_headers(tmp_path: Path) -> None:
    ours = {
        "BM_ABSENT": native.ABSENT,
        "BM_WANTED": native.WANTED,
        "BM_READING": native.READING,
        "BM_READY": native.READY,
        "BM_PIN": 1 << native.PIN_SHIFT,
        "BM_RUN": native.RUN,
        "BM_STOP_CANCEL": native.STOP_CANCEL,
        "BM_STOP_IO": native.STOP_IO,
        "BM_STOP_STALL": native.STOP_STALL,
        "BM_STOP_FAULT": native.STOP_FAULT,
    }
    source = "\n".join(f'_Static_assert({name} == {value}, "{name}");' for name, value in ours.items())
    build('#include "hook.h"\n' + source, tmp_path, NATIVE, run=False)


def test_the_loaded_ggml_passes_its_check() -> None:
    llama()
    bind_ggml()
    bind_ggml()


def test_the_callbacks_have_addresses() -> None:
    names = ("bm_eval", "bm_abort", "bm_flag_abort")
    assert len({function_address(name) for name in names}) == len(names)


def tensors(experts: tuple[int, ...] = (3, 2)) -> list[StreamedTensor]:
    found = []
    for layer, count in enumerate(experts):
        for rank, part in enumerate(("gate_up", "down")):
            found.append(
                StreamedTensor(
                    name=f"blk.{layer}.ffn_{part}_exps.weight",
                    layer=layer,
                    rank=rank,
                    ggml_type=0,
                    experts=count,
                    ne0=8,
                    ne1=8,
                    slice_bytes=256,
                    file=0,
                    file_offset=0,
                )
            )
    return found


@pytest.fixture
def event_fd() -> Iterator[int]:
    fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
    yield fd
    os.close(fd)


def test_slices_count_by_tensor_and_entries_by_layer(event_fd: int) -> None:
    engine = Engine(tensors(), slots=5, event_fd=event_fd)
    assert engine.first_slice == [0, 3, 6, 8]
    assert engine.first_entry == [0, 3]
    assert (engine.slices, engine.entries) == (10, 5)
    assert engine.present.tolist() == [0] * 5
    assert engine.slot_slice.tolist() == [-1] * 5
    assert engine.slice_name(4) == "blk.0.ffn_down_exps.weight[1]"
    assert engine.slice_name(9) == "blk.1.ffn_down_exps.weight[1]"
    assert engine.slice_name(-1) == engine.slice_name(10) == "no particular slice"
    assert engine.stop_reason() == (native.RUN, -1)
    assert set(engine.statistics().__getstate__()) == {0}  # type: ignore[call-overload]  # slots: a list of values
    engine.close()
    engine.close()


def test_tensors_of_a_layer_have_the_same_experts(event_fd: int) -> None:
    wrong = tensors((3, 3))
    with pytest.raises(ValueError, match=r"blk\.1\.ffn_down_exps\.weight: 2 experts, its layer has 3"):
        Engine([*wrong[:3], tensors((3, 2))[3], wrong[2]], slots=1, event_fd=event_fd)


def announce(engine: Engine, tensor: int, experts: list[int]) -> None:
    array = (ctypes.c_int32 * len(experts))(*experts)
    lib.bm_test_announce(engine.handle, tensor, array, len(experts))


def test_lookups_are_counted_and_stamped_once_per_layer(event_fd: int) -> None:
    engine = Engine(tensors(), slots=5, event_fd=event_fd)
    lib.bm_begin_batch(engine.handle, 0, 1, 1)
    lib.bm_begin_batch(engine.handle, 0, 1, 1)
    announce(engine, 0, [2, 0])
    announce(engine, 1, [2, 0])
    counted = engine.statistics()
    assert (counted.lookups, counted.hits, counted.posted, counted.reposted) == (2, 0, 4, 0)
    assert engine.last_use.tolist() == [2, 0, 2, 0, 0]
    assert lib.bm_current_layer(engine.handle) == 0
    assert counted.announced_at_ns == engine.announced_at_ns > 0
    engine.close()


def test_an_experts_use_count_halves_in_a_half_life(event_fd: int) -> None:
    engine = Engine(tensors(), slots=1, event_fd=event_fd, half_life_batches=4.0)
    announce(engine, 0, [0])
    for _ in range(4):
        lib.bm_begin_batch(engine.handle, 0, 1, 1)
    announce(engine, 0, [1])
    old, new, never = engine.frequency.tolist()[:3]
    assert old == pytest.approx(new / 2)
    assert never == 0.0
    engine.close()


def test_use_counts_stay_finite_and_comparable_for_ever(event_fd: int) -> None:
    engine = Engine(tensors(), slots=1, event_fd=event_fd, half_life_batches=1.0)
    for batch in range(3000):  # the weight of a use passes 2 to the 3000th
        lib.bm_begin_batch(engine.handle, 0, 1, 1)
        announce(engine, 0, [batch % 2])
        lib.bm_reset(engine.handle)
    older, newer = engine.frequency.tolist()[:2]
    assert older == pytest.approx(newer / 2)
    assert 0 < newer < 1e300
    engine.close()


def test_a_stop_keeps_its_first_reason_until_the_reset(event_fd: int) -> None:
    engine = Engine(tensors(), slots=1, event_fd=event_fd)
    lib.bm_stop(engine.handle, native.STOP_IO)
    lib.bm_stop(engine.handle, native.STOP_CANCEL)
    assert engine.stop_reason() == (native.STOP_IO, -1)
    lib.bm_reset(engine.handle)
    assert engine.stop_reason() == (native.RUN, -1)
    engine.close()
