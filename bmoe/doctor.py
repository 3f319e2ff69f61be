"""What this machine gives to bmoe, checked one thing at a time, each with its cure.

Owns the checks and their wording. Must not know how they are shown. A check never raises: what cannot be
found out is said, and nothing here needs liburing or llama-cpp-python to be importable. llama.cpp is
loaded in a process of its own, because a library built for another CPU ends the process that loads it.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import json
import os
import platform
import re
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from typing import Any, Final, Literal

from bmoe import __version__
from bmoe.io import (
    AnonymousMemory,
    DirectFile,
    cgroup_memory,
    machine_memory,
    memlock_limit_bytes,
    open_backend,
)
from bmoe.io.errors import BackendError, BmoeError
from bmoe.io.mounts import drive_of, mount_of

Status = Literal["ok", "warn", "fail"]

_MIB: Final = 1 << 20
_LOW_MEMORY_BYTES: Final = 2 << 30
_REGISTERED_MIB: Final = 64  # a chunk of the engine's cache, what it registers at a time
_CAP_IPC_LOCK: Final = 14
_PROBE_S: Final = 120
_NETWORK: Final = frozenset({"nfs", "nfs4", "cifs", "smb3", "9p", "ceph", "fuse.sshfs"})
_REPORT: Final = "please report this line"
_X86: Final = ("avx", "avx2", "fma", "f16c", "avx512f", "avx512_vnni", "avx_vnni", "amx_int8")
_ARM: Final = ("asimd", "asimddp", "i8mm", "sve", "sve2")


@dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    """One line of the report.

    Attributes:
        name: What was checked, in a word or two.
        status: `fail` is what bmoe cannot do without; `warn` costs speed or says that it is unknown.
        text: What was found.
        cure: What helps; None where nothing needs to.
    """

    name: str
    status: Status
    text: str
    cure: str | None = None


def examine(path: str) -> list[Check]:
    """All checks, in the order of the report.

    Args:
        path: A model, or the folder where models are.
    """
    checks: list[Check] = []
    for name, check in (
        ("bmoe", _versions),
        ("kernel", _kernel),
        ("cpu", _cpu),
        ("memory", _memory),
        ("cgroup", _cgroup),
        ("io_uring", lambda: asyncio.run(_uring())),
        ("memlock", _memlock),
        ("huge pages", _huge_pages),
        ("path", lambda: _path(path)),
        ("llama.cpp", _llama),
    ):
        try:
            checks += check()
        except Exception as error:  # noqa: BLE001 (a report with a gap is better than none)
            text = f"could not be checked: {type(error).__name__}: {error}"
            checks.append(Check(name=name, status="warn", text=text, cure=_REPORT))
    return checks


def _versions() -> list[Check]:
    text = f"{__version__}, Python {platform.python_version()} at {sys.executable}"
    checks = [Check(name="bmoe", status="ok", text=text)]
    pins = _pins()
    for package in ("llama-cpp-python", "liburing"):
        try:
            version = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            # Whether it can do without is the business of the checks that use it.
            wanted = f"{package}=={pins[package]}" if package in pins else package
            checks.append(
                Check(name=package, status="warn", text="not installed", cure=f"pip install {wanted}")
            )
            continue
        if version == pins.get(package, version):
            checks.append(Check(name=package, status="ok", text=version))
        else:
            cure = f"pip install {package}=={pins[package]}"
            text = f"{version}, while this bmoe is made for {pins[package]}"
            checks.append(Check(name=package, status="warn", text=text, cure=cure))
    return checks


def _pins() -> dict[str, str]:
    """The exact versions that bmoe asks for, by package; empty when it is not installed itself."""
    try:
        lines = importlib.metadata.requires("bmoe") or []
    except importlib.metadata.PackageNotFoundError:
        return {}
    found = (re.match(r"([\w.-]+)==([\w.]+)(?:\s*;(.*))?$", line) for line in lines)
    return {match[1]: match[2] for match in found if match is not None and "extra" not in (match[3] or "")}


def _kernel() -> list[Check]:
    text = f"{platform.system()} {platform.release()}, {platform.machine()}"
    match = re.match(r"(\d+)\.(\d+)", platform.release())
    if match is None or platform.system() != "Linux":
        return [Check(name="kernel", status="fail", text=text, cure="bmoe needs Linux")]
    if (int(match[1]), int(match[2])) < (6, 15):
        cure = "Linux 6.15 or newer reads into registered buffers with less CPU time"
        return [Check(name="kernel", status="warn", text=text, cure=cure)]
    return [Check(name="kernel", status="ok", text=text)]


def _cpu() -> list[Check]:
    info = _text("/proc/cpuinfo") or ""
    model = _field(info, "model name") or _field(info, "CPU part") or "unknown"
    flags = (_field(info, "flags") or _field(info, "Features") or "").split()
    known = [flag for flag in (*_X86, *_ARM) if flag in flags]
    text = (
        f"{model}, {len(os.sched_getaffinity(0))} usable of {os.cpu_count()} CPUs, {' '.join(known) or '-'}"
    )
    if platform.machine() == "x86_64" and flags and "avx2" not in flags:
        cure = "decoding will be slow; in a virtual machine, let it see the host's CPU"
        return [Check(name="cpu", status="warn", text=f"{text}: no AVX2", cure=cure)]
    return [Check(name="cpu", status="ok", text=text)]


def _memory() -> list[Check]:
    memory = machine_memory()
    if memory.total_bytes is None or memory.available_bytes is None:
        return [Check(name="memory", status="warn", text="/proc/meminfo cannot be read", cure="mount /proc")]
    text = f"{_size(memory.available_bytes)} available of {_size(memory.total_bytes)}"
    if memory.swap_free_bytes is not None:
        text += f", swap free {_size(memory.swap_free_bytes)}"
    low = memory.available_bytes < _LOW_MEMORY_BYTES
    cure = "end other programs: dense weights, context and cache have to fit" if low else None
    return [Check(name="memory", status="warn" if low else "ok", text=text, cure=cure)]


def _cgroup() -> list[Check]:
    group = cgroup_memory()
    if group is None:
        return [Check(name="cgroup", status="ok", text="no memory limit")]
    text = f"v{group.version}, {group.path}: {_size(group.room_bytes)} left of {_size(group.limit_bytes)}"
    low = group.room_bytes < _LOW_MEMORY_BYTES
    cure = "raise the limit (docker run --memory, systemd MemoryMax=), or take a small --cache-mb"
    return [
        Check(name="cgroup", status="warn" if low else "ok", text=text, cure=cure if low else None),
    ]


async def _uring() -> list[Check]:
    """Whether a ring can be had, and whether it takes a chunk of the cache as a registered buffer."""
    try:
        backend = open_backend("uring", 64)
    except BackendError as error:
        text = f"{error.message}; reads go through threads"
        return [
            Check(name="io_uring", status="warn", text=text, cure=error.hint),
            Check(name="registered", status="warn", text="no io_uring, no registered buffers"),
        ]
    checks = [Check(name="io_uring", status="ok", text="works")]
    memory = AnonymousMemory(_REGISTERED_MIB * _MIB)
    try:
        memory.touch(0, memory.size_bytes)
        backend.add_buffer(memory.view)
        reason = backend.unregistered_reason
    finally:
        await backend.aclose()
        memory.close()
    if reason is None:
        text = f"work, {_REGISTERED_MIB} MiB at a time"
        checks.append(Check(name="registered", status="ok", text=text))
    else:
        cure = _MEMLOCK_CURE if "MEMLOCK" in reason else "reads work without, with more CPU time"
        checks.append(Check(name="registered", status="warn", text=reason, cure=cure))
    return checks


_MEMLOCK_CURE: Final = (
    "raise it above --cache-mb: memlock in /etc/security/limits.conf, LimitMEMLOCK= in a systemd unit, "
    "--ulimit memlock=-1 for docker"
)


def _memlock() -> list[Check]:
    limit = memlock_limit_bytes()
    if limit is None:
        return [Check(name="memlock", status="ok", text="no limit: any cache can be registered")]
    capabilities = _field(_text("/proc/self/status") or "", "CapEff")
    if capabilities is not None and int(capabilities, 16) >> _CAP_IPC_LOCK & 1:
        text = f"{_size(limit)}, which does not bind us (CAP_IPC_LOCK): any cache can be registered"
        return [Check(name="memlock", status="ok", text=text)]
    chunks = limit // (_REGISTERED_MIB * _MIB)
    fits = f"{chunks * _REGISTERED_MIB} MiB of cache" if chunks else "no part of a cache"
    text = f"{_size(limit)}: {fits} can be registered, the rest is read unregistered"
    return [Check(name="memlock", status="warn", text=text, cure=_MEMLOCK_CURE)]


def _huge_pages() -> list[Check]:
    setting = _text("/sys/kernel/mm/transparent_hugepage/enabled")
    match = None if setting is None else re.search(r"\[(\w+)\]", setting)
    if match is None:
        cure = "a kernel with transparent huge pages spends less CPU time per read"
        return [Check(name="huge pages", status="warn", text="not in this kernel", cure=cure)]
    if match[1] == "never":
        cure = "as root: echo madvise > /sys/kernel/mm/transparent_hugepage/enabled"
        return [Check(name="huge pages", status="warn", text="never", cure=cure)]
    return [Check(name="huge pages", status="ok", text=match[1])]


def _path(path: str) -> list[Check]:
    if not os.path.exists(path):
        return [Check(name="path", status="fail", text=f"{path} does not exist", cure="check the path")]
    mount = mount_of(path)
    checks: list[Check] = []
    if mount is None:
        cure = "mount /proc"
        checks.append(Check(name="path", status="warn", text=f"{path}: its mount is unknown", cure=cure))
    else:
        drive = drive_of(mount)
        text = f"{path}: {mount.file_system} on {mount.source} at {mount.mount_point}"
        text += ", read-only" if mount.read_only else ""
        text += f", {drive.model}" if drive is not None and drive.model is not None else ""
        if mount.file_system in _NETWORK:
            cure = "copy the model to a local SSD"
            checks.append(Check(name="path", status="warn", text=f"{text}: over the network", cure=cure))
        elif drive is not None and drive.rotational:
            # Virtual drives say so of whatever is behind them.
            cure = "if it is a disk that turns, copy the model to an SSD; bmoe-iobench tells"
            checks.append(Check(name="path", status="warn", text=f"{text}: says it rotates", cure=cure))
        else:
            checks.append(Check(name="path", status="ok", text=text))
    checks.append(_direct(path))
    checks.append(_measured(path))
    return checks


def _direct(path: str) -> Check:
    """Whether files there can be read past the page cache: by the file itself, or one of our own."""
    if not os.path.isdir(path):
        return _probe_direct(path)
    try:
        # It has no name, or loses it at once.
        with tempfile.TemporaryFile(dir=path) as file:
            file.write(os.urandom(_MIB))
            file.flush()
            os.fsync(file.fileno())
            return _probe_direct(f"/proc/self/fd/{file.fileno()}", told_as=path)
    except OSError as error:
        largest = _largest_file(path)
        if largest is not None:
            return _probe_direct(largest)
        text = f"{path} takes no trial file ({error.strerror}) and holds none to read"
        return Check(name="O_DIRECT", status="warn", text=text, cure="bmoe doctor MODEL")


def _probe_direct(path: str, *, told_as: str | None = None) -> Check:
    try:
        with DirectFile.open(path) as file:
            if file.direct:
                block, align = file.block_bytes, file.memory_align_bytes
                text = f"works, blocks of {block} bytes, memory aligned to {align}"
                return Check(name="O_DIRECT", status="ok", text=text)
            text = f"not at {told_as or path}: {file.fallback_reason}"
            cure = "reads go through the page cache, which competes for memory; another file system helps"
            return Check(name="O_DIRECT", status="warn", text=text, cure=cure)
    except BmoeError as error:
        return Check(name="O_DIRECT", status="fail", text=error.message, cure=error.hint or "check the file")


def _largest_file(folder: str) -> str | None:
    sizes: list[tuple[int, str]] = []
    try:
        with os.scandir(folder) as entries:
            sizes = [
                (e.stat().st_size, e.path) for e in entries if e.is_file() and os.access(e.path, os.R_OK)
            ]
    except OSError:
        return None
    return max(sizes, default=(0, None))[1]


def _measured(path: str) -> Check:
    from bmoe.tools.iobench.drives import recall  # noqa: PLC0415 (what fails here is one line of the report)

    record = recall(path)
    if record is None:
        cure = "bmoe-iobench -m MODEL tells what it can serve"
        return Check(name="drive", status="ok", text="never measured", cure=cure)
    text = f"{record['mib_per_s']:.0f} MiB/s at {record.get('queue_depth')} reads in flight, measured "
    return Check(name="drive", status="ok", text=text + str(record.get("created_utc")))


# Says how far it came after each step, so that a step that kills it is known.
_LLAMA_PROBE: Final = """
import json
def say(**facts): print("bmoe-probe " + json.dumps(facts), flush=True)
from bmoe.io.errors import BmoeError
try:
    say(step="load")
    from bmoe.llama_library import llama
    say(system=llama().llama_print_system_info().decode())
    say(step="hook")
    from bmoe.pipeline import native
    say(step="seam")
    native.bind_ggml()
    say(step="done")
except BmoeError as error:
    say(error=error.message, hint=error.hint)
except Exception as error:
    say(error=f"{type(error).__name__}: {error}", hint=None)
"""
_STEPS: Final = {
    "load": ("llama.cpp", "pip install --force-reinstall --no-binary llama-cpp-python llama-cpp-python"),
    "hook": ("hook", "reinstall bmoe: its native library is missing or not for this machine"),
    "seam": ("seam", "install the llama-cpp-python version that bmoe pins"),
}


def _llama() -> list[Check]:
    """Whether llama.cpp loads, our native library too, and both agree about ggml's layout."""
    facts, ended = _run_probe()
    step = facts.get("step", "load")
    system = facts.get("system")
    checks: list[Check] = []
    if isinstance(system, str):
        features = [name for name, value in re.findall(r"(\w+) = (\d+)", system) if value != "0"]
        checks.append(Check(name="llama.cpp", status="ok", text=f"loads; built with {' '.join(features)}"))
    if step == "done":
        checks.append(Check(name="seam", status="ok", text="ggml has the layout that bmoe was built for"))
        return checks
    name, cure = _STEPS[step]
    text = str(facts["error"]) if "error" in facts else ended
    checks.append(Check(name=name, status="fail", text=text, cure=facts.get("hint") or cure))
    return checks


def _run_probe() -> tuple[dict[str, Any], str]:
    """What the probe said, and how it ended."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    try:
        ran = subprocess.run(  # noqa: S603 (our own interpreter and text)
            [sys.executable, "-c", _LLAMA_PROBE],
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_PROBE_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return {}, f"loading did not end within {_PROBE_S} s"
    except OSError as error:
        return {}, f"no process could be started: {error.strerror}"
    facts: dict[str, Any] = {}
    for line in ran.stdout.decode("utf-8", "replace").splitlines():
        if line.startswith("bmoe-probe "):
            facts.update(json.loads(line.removeprefix("bmoe-probe ")))
    if ran.returncode < 0:
        number = -ran.returncode
        why = " (built for another CPU?)" if number == signal.SIGILL else ""
        return facts, f"loading ends in {signal.Signals(number).name}{why}"
    last = ran.stderr.decode("utf-8", "replace").strip().rpartition("\n")[2]
    return facts, f"loading ended early: {last or f'exit code {ran.returncode}'}"


def _size(size_bytes: int) -> str:
    return f"{size_bytes / 2**30:.1f} GiB" if size_bytes >= 1 << 30 else f"{size_bytes / _MIB:.4g} MiB"


def _field(text: str, name: str) -> str | None:
    """The first `name : value` line's value."""
    match = re.search(rf"^{re.escape(name)}\s*:\s*(.*)$", text, re.MULTILINE)
    return match[1].strip() if match else None


def _text(path: str) -> str | None:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            text: str = file.read()
    except OSError:
        return None
    return text
