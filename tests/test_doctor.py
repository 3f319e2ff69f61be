"""`bmoe doctor`: every finding has its line, every trouble its cure, and nothing is a traceback."""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import jsonschema
import pytest

from bmoe import doctor
from bmoe.cli import main
from bmoe.io import CgroupMemory, MachineMemory
from bmoe.io.mounts import Drive, Mount

if TYPE_CHECKING:
    from collections.abc import Callable

    from bmoe.doctor import Check

SCHEMA = json.loads((Path(__file__).parent.parent / "docs/schema/doctor.v1.schema.json").read_text())
GIB = 1 << 30


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def no_llama(monkeypatch: pytest.MonkeyPatch) -> None:
    """Spares the tests of other lines half a second of loading it."""
    monkeypatch.setattr(doctor, "_run_probe", lambda: ({"step": "done", "system": "AVX2 = 1 | FMA = 0"}, ""))


def by_name(checks: list[Check]) -> dict[str, Check]:
    return {check.name: check for check in checks}


def test_this_machine_has_a_line_for_everything(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", str(tmp_path), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    jsonschema.validate(report, SCHEMA)
    names = [check["name"] for check in report["checks"]]
    assert names == [
        *("bmoe", "llama-cpp-python", "liburing", "kernel", "cpu", "memory", "cgroup", "io_uring"),
        *("registered", "memlock", "huge pages", "path", "O_DIRECT", "drive", "llama.cpp", "seam"),
    ]
    seam = report["checks"][-1]
    assert (seam["status"], seam["text"]) == ("ok", "ggml has the layout that bmoe was built for")


@pytest.mark.usefixtures("no_llama")
def test_lines_begin_with_the_status_and_cures_follow(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    missing = tmp_path / "missing\nand hostile"
    assert main(["doctor", str(missing)]) == 1
    out, err = capsys.readouterr()
    assert err == ""
    lines = out.splitlines()
    assert {line.split()[0] for line in lines} <= {"ok", "warn", "fail", "->"}
    (at,) = [n for n, line in enumerate(lines) if line.startswith("fail")]
    assert "does not exist" in lines[at]
    assert lines[at + 1].strip() == "-> check the path"


@pytest.mark.usefixtures("no_llama")
def test_every_trouble_has_a_cure(tmp_path: Path) -> None:
    assert all(check.cure for check in doctor.examine(str(tmp_path)) if check.status == "fail")


@pytest.mark.parametrize(
    ("stubs", "check", "name", "status", "says"),
    [
        ({"platform.release": lambda: "6.1.0-13"}, "_kernel", "kernel", "warn", "6.15 or newer"),
        ({"platform.release": lambda: "5.15"}, "_kernel", "kernel", "warn", "6.15 or newer"),
        ({"platform.release": lambda: "6.15.2"}, "_kernel", "kernel", "ok", ""),
        ({"platform.release": lambda: "odd"}, "_kernel", "kernel", "fail", "needs Linux"),
        (
            {"machine_memory": lambda: MachineMemory(
                total_bytes=4 * GIB, available_bytes=GIB, free_bytes=0, swap_free_bytes=None
            )},
            "_memory", "memory", "warn", "end other programs",
        ),
        (
            {"machine_memory": lambda: MachineMemory(
                total_bytes=None, available_bytes=None, free_bytes=None, swap_free_bytes=None
            )},
            "_memory", "memory", "warn", "mount /proc",
        ),
        ({"cgroup_memory": lambda: None}, "_cgroup", "cgroup", "ok", ""),
        (
            {"cgroup_memory": lambda: CgroupMemory(
                version=2, path="/g", limit_bytes=GIB, used_bytes=GIB // 2, reclaimable_bytes=0
            )},
            "_cgroup", "cgroup", "warn", "raise the limit",
        ),
        ({"memlock_limit_bytes": lambda: None}, "_memlock", "memlock", "ok", ""),
        (
            {"memlock_limit_bytes": lambda: 8 << 20, "_text": lambda path: "CapEff:\t0000000000000000\n"},  # noqa: ARG005 (any file)
            "_memlock", "memlock", "warn", "LimitMEMLOCK=",
        ),
        (
            {"memlock_limit_bytes": lambda: 8 << 20, "_text": lambda path: "CapEff:\t000001ffffffffff\n"},  # noqa: ARG005 (any file)
            "_memlock", "memlock", "ok", "",
        ),
        (
            {"_text": lambda path: "always madvise [never]\n"},  # noqa: ARG005 (any file)
            "_huge_pages", "huge pages", "warn", "echo madvise",
        ),
        ({"_text": lambda path: "[always] madvise never\n"}, "_huge_pages", "huge pages", "ok", ""),  # noqa: ARG005 (any file)
        ({"_text": lambda path: None}, "_huge_pages", "huge pages", "warn", "transparent huge pages"),  # noqa: ARG005 (any file)
    ],
)  # fmt: skip
def test_findings_are_judged(
    monkeypatch: pytest.MonkeyPatch,
    *,
    stubs: dict[str, Callable[..., object]],
    check: str,
    name: str,
    status: str,
    says: str,
) -> None:
    for target, value in stubs.items():
        monkeypatch.setattr(f"bmoe.doctor.{target}", value)
    found = by_name(getattr(doctor, check)())[name]
    assert found.status == status
    assert says in (found.cure or "")


@pytest.mark.parametrize(
    ("file_system", "rotational", "status", "says"),
    [("nfs4", None, "warn", "local SSD"), ("ext4", True, "warn", "bmoe-iobench"), ("xfs", False, "ok", "")],
)
def test_kinds_of_drives_are_judged(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    file_system: str,
    rotational: bool | None,
    status: str,
    says: str,
) -> None:
    mount = Mount(mount_point="/", file_system=file_system, source="d", device="8:1", read_only=True)
    drive = None if rotational is None else Drive(rotational=rotational, logical_block_bytes=512, model="M")
    monkeypatch.setattr(doctor, "mount_of", lambda path: mount)  # noqa: ARG005 (any path)
    monkeypatch.setattr(doctor, "drive_of", lambda mount: drive)  # noqa: ARG005 (any mount)
    found = by_name(doctor._path(str(tmp_path)))["path"]
    assert (found.status, "read-only" in found.text) == (status, True)
    assert says in (found.cure or "")


def test_io_uring_that_is_missing_is_told_with_the_cure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "bmoe.io.uring", None)
    checks = by_name([check for check in doctor.examine("/") if check.name in {"io_uring", "registered"}])
    assert checks["io_uring"].status == checks["registered"].status == "warn"
    assert "python-liburing does not load" in checks["io_uring"].text
    assert "pip install liburing" in (checks["io_uring"].cure or "")


@pytest.mark.parametrize(
    "kind", ["file", "folder", "folder of others", "empty file", "empty folder of others"]
)
def test_direct_reads_are_tried_where_the_models_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    path = tmp_path / "it"
    if "folder" in kind:
        path.mkdir()
        if kind == "folder of others":
            (path / "model").write_bytes(os.urandom(1 << 20))
        if "others" in kind:

            def refuse(**_: object) -> None:
                raise PermissionError(13, "Permission denied")

            monkeypatch.setattr("bmoe.doctor.tempfile.TemporaryFile", refuse)
    else:
        path.write_bytes(b"" if "empty" in kind else os.urandom(1 << 20))
    found = doctor._direct(str(path))
    if kind == "empty file":
        assert (found.status, "is empty" in found.text) == ("fail", True)
    elif kind == "empty folder of others":
        assert (found.status, found.cure) == ("warn", "bmoe doctor MODEL")
    else:
        assert found.status in {"ok", "warn"}
        assert "blocks of" in found.text or "not at" in found.text
    if "folder" in kind:
        assert [p.name for p in path.iterdir()] == (["model"] if kind == "folder of others" else [])


def test_measured_drive_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "bmoe-iobench" in (doctor._measured(str(tmp_path)).cure or "")
    record = {"mib_per_s": 2345.6, "queue_depth": 8, "created_utc": "2026-01-01T00:00:00+00:00"}
    monkeypatch.setattr("bmoe.tools.iobench.drives.recall", lambda path: record)  # noqa: ARG005 (any path)
    assert doctor._measured("x").text.startswith("2346 MiB/s at 8 reads in flight, measured 2026-01-01")


def test_check_that_breaks_is_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> list[Check]:
        raise KeyError("odd")

    monkeypatch.setattr(doctor, "_cpu", broken)
    monkeypatch.setattr(doctor, "_llama", list)
    cpu = by_name(doctor.examine("/"))["cpu"]
    assert (cpu.status, cpu.text) == ("warn", "could not be checked: KeyError: 'odd'")


# --- llama.cpp ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("package", "source", "says", "cure"),
    [
        ("llama_cpp", "raise ImportError('no such thing')", "cannot be loaded: no such thing", "pip install"),
        ("llama_cpp", "raise RuntimeError('libllama.so\\nis gone')", "is gone", "pip install"),
        ("llama_cpp", "import os; os.kill(os.getpid(), 4)", "SIGILL (built for another CPU?)", "--no-binary"),
        ("llama_cpp", "import os; os._exit(7)", "loading ended early: exit code 7", "--no-binary"),
        ("llama_cpp", "x = 1", "llama_cpp.llama_cpp", "pip install"),
    ],
)
def test_llama_cpp_that_does_not_load_is_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, package: str, source: str, says: str, cure: str
) -> None:
    (tmp_path / package).mkdir()
    (tmp_path / package / "__init__.py").write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))
    (found,) = doctor._llama()
    assert (found.name, found.status) == ("llama.cpp", "fail")
    assert says in found.text
    assert cure in (found.cure or "")


@pytest.mark.parametrize(("step", "name"), [("hook", "hook"), ("seam", "seam"), ("load", "llama.cpp")])
def test_step_that_fails_is_named(monkeypatch: pytest.MonkeyPatch, step: str, name: str) -> None:
    facts = {"step": step, "error": "it is not there", "hint": None}
    monkeypatch.setattr(doctor, "_run_probe", lambda: (facts, "exit code 0"))
    (found,) = doctor._llama()
    assert (found.name, found.status, found.text) == (name, "fail", "it is not there")
    assert found.cure


def test_report_needs_neither_liburing_nor_llama_cpp(tmp_path: Path) -> None:
    for package in ("liburing", "llama_cpp"):
        (tmp_path / f"{package}.py").write_text("raise ImportError('hidden')")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *filter(None, sys.path)])}
    ran = subprocess.run(
        [sys.executable, "-W", "error", "-m", "bmoe", "doctor", str(tmp_path)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (ran.returncode, ran.stderr) == (1, "")
    lines = [line.split() for line in ran.stdout.splitlines()]
    statuses = {words[1]: words[0] for words in lines if words[0] != "->"}
    assert statuses["io_uring"] == "warn"
    assert statuses["llama.cpp"] == "fail"
    assert statuses["kernel"] in {"ok", "warn"}


@pytest.mark.parametrize(("installed", "status"), [("0.3.36", "ok"), ("0.3.35", "warn"), (None, "warn")])
def test_versions_are_compared_with_what_bmoe_pins(
    monkeypatch: pytest.MonkeyPatch, installed: str | None, status: str
) -> None:
    def version(package: str) -> str:
        if package == "llama-cpp-python" and installed is not None:
            return installed
        raise importlib.metadata.PackageNotFoundError(package)

    lines = ["llama-cpp-python==0.3.36", "numpy>=1.26", 'liburing==1; extra == "x"']
    monkeypatch.setattr("bmoe.doctor.importlib.metadata.version", version)
    monkeypatch.setattr("bmoe.doctor.importlib.metadata.requires", lambda package: lines)  # noqa: ARG005 (only ours)
    found = by_name(doctor._versions())
    assert found["llama-cpp-python"].status == status
    assert (found["llama-cpp-python"].cure or "pip install llama-cpp-python==0.3.36") == (
        "pip install llama-cpp-python==0.3.36"
    )
    assert found["liburing"].cure == "pip install liburing"
