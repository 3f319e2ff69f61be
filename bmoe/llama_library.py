"""The loaded llama.cpp: import, one copy per library, its log, ggml's base library.

It owns the process-wide state of llama.cpp (backend, log callback). It must not know models or contexts.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import threading
from typing import TYPE_CHECKING, Any

from bmoe.io.errors import SeamError

if TYPE_CHECKING:
    from collections.abc import Iterator

_lock = threading.Lock()
_sinks: list[list[str]] = []
_GGML_LOG_LEVEL_WARN = 3
_GGML_LOG_LEVEL_CONT = 5
_keep: list[object] = []


def bound_spinning() -> None:
    """Makes llama.cpp's threads sleep in a barrier after about 0.1 ms instead of spinning on.

    While one core serves reads, or belongs to another program, a spinning thread keeps the late one from
    running. Works before the first `llama` only, and not against what the user has set.
    """
    if not {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & os.environ.keys():
        os.environ["GOMP_SPINCOUNT"] = "10000"


@functools.cache
def llama() -> Any:
    """llama-cpp-python's low-level module, with the backend initialised and the log caught.

    Raises:
        SeamError: It cannot be imported, or two copies of one ggml library are mapped.
    """
    try:
        # ggml would start a debugger on itself before it ends the process.
        os.environ.setdefault("GGML_NO_BACKTRACE", "1")
        import llama_cpp.llama_cpp as module  # noqa: PLC0415 (slow, and not every command needs it)
    except (ImportError, OSError, RuntimeError) as error:
        raise SeamError(
            f"llama-cpp-python cannot be loaded: {error}", hint="pip install llama-cpp-python"
        ) from error
    callback = module.llama_log_callback(_on_log)
    _keep.append(callback)
    module.llama_log_set(callback, None)
    module.llama_backend_init()
    _check_single_copies()
    _catch_aborts()
    return module


@functools.cache
def ggml_base() -> ctypes.CDLL:
    """libggml-base as llama_cpp has loaded it, found by SONAME."""
    llama()
    return ctypes.CDLL("libggml-base.so.0", mode=os.RTLD_NOLOAD | os.RTLD_NOW)


def _catch_aborts() -> None:
    """Where llama.cpp would end the process by a signal and a trace, one line and exit code 1.

    It asserts some of what a broken file can have, and some of its functions throw through their C
    interface (a tokenizer without bytes).
    """
    lib = ctypes.CDLL("libggml-base.so.0", mode=os.RTLD_NOLOAD | os.RTLD_NOW)
    kind = ctypes.CFUNCTYPE(None, ctypes.c_char_p)

    def give_up(message: bytes) -> None:
        words = " ".join(message.decode("utf-8", "replace").split()).rsplit("/llama.cpp/", 1)[-1]
        os.write(2, f"bmoe: error: llama.cpp gave up, with this model or by a bug: {words}\n".encode())
        os._exit(1)  # it would abort on return

    callback = kind(give_up)
    _keep.append(callback)
    lib.ggml_set_abort_callback.argtypes = (kind,)
    lib.ggml_set_abort_callback.restype = ctypes.c_void_p
    lib.ggml_set_abort_callback(callback)
    uncaught = ctypes.CFUNCTYPE(None)(lambda: give_up(b"an exception that nobody catches"))
    _keep.append(uncaught)
    with contextlib.suppress(OSError, AttributeError):
        # std::set_terminate(void (*)()), under the name that every C++ compiler on Linux gives it.
        ctypes.CDLL("libstdc++.so.6", mode=os.RTLD_NOLOAD | os.RTLD_NOW)._ZSt13set_terminatePFvvE(uncaught)


@contextlib.contextmanager
def log_lines() -> Iterator[list[str]]:
    """Collects llama.cpp's warnings and errors logged inside the block."""
    lines: list[str] = []
    with _lock:
        _sinks.append(lines)
    try:
        yield lines
    finally:
        with _lock:
            _sinks[:] = [sink for sink in _sinks if sink is not lines]  # lists compare by content


def _on_log(level: int, text: bytes, _: object) -> None:
    if level < _GGML_LOG_LEVEL_WARN or level == _GGML_LOG_LEVEL_CONT:
        return
    line = text.decode("utf-8", "replace").strip()
    with _lock:
        for sink in _sinks:
            sink.append(line)


def _check_single_copies() -> None:
    """A second mapped copy of a ggml library has uninitialised tables and computes zeros without a word."""
    copies: dict[str, set[str]] = {}
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
        for line in maps:
            fields = line.split(maxsplit=5)
            name = os.path.basename(fields[5].strip()) if len(fields) > 5 else ""
            if name.startswith(("libggml", "libllama")):
                stem = name.split(".so")[0]
                copies.setdefault(stem, set()).add(f"{fields[3]}:{fields[4]}")
    for stem, files in copies.items():
        if len(files) > 1:
            raise SeamError(
                f"{len(files)} copies of {stem} are loaded in this process",
                hint="import bmoe before other programs that bring their own llama.cpp",
            )
