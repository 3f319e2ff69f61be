"""The JSON log of a run: what its lines are, and how they reach a file whole.

Owns the format, whose normative description is docs/schema/run-log.v2.schema.json: JSON Lines, one object
per event, `schema` being the version. Must not know how a run is made or shown.

Lines are ASCII: the other line separators of Unicode, which some readers split at, are always escaped.
A line is one unbuffered append, so that a run that is killed leaves whole lines, and so that runs may
share a file.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import importlib.metadata
import math
import os
import platform
import stat
import time
import uuid
from typing import TYPE_CHECKING, Any, Final

from bmoe.io.errors import BmoeError, FileError, ReadError, UsageError
from bmoe.io.memory_figures import machine_memory
from bmoe.io.whole_file import is_same_file

if TYPE_CHECKING:
    from collections.abc import Iterable, MutableMapping, Sequence

    from bmoe.config import GenerateRequest, Sampling, SessionConfig
    from bmoe.records import CacheResize, EffectiveConfig, LoadReport, RunSummary, StepMetrics, TokenEvent

SCHEMA_VERSION: Final = 2
_PACKAGES: Final = ("llama-cpp-python", "liburing", "numpy", "uvloop", "structlog")


class RunLog:
    """The log of one run. Methods are events; each writes one line before it returns.

    Made by `open_run_log`. Without a destination every method is free and does nothing. After a failed
    write the log is silent, so that the failure itself is reported once, by who was writing.

    Raises:
        FileError: Any event: the line could not be written.
        BrokenPipeError: Any event: the reader of the pipe is gone.
    """

    def __init__(self, sink: _LineSink | None) -> None:
        self.run_id = uuid.uuid4().hex
        self._sink = sink
        self._seq = 0
        self._early: list[tuple[str, dict[str, object]]] | None = []
        self._log: Any = None if sink is None else _structlog(sink, self._finish_event)

    @property
    def fd(self) -> int | None:
        """The file descriptor lines go to, for waiting until it takes more; None without a destination."""
        return None if self._sink is None or self._sink.broken else self._sink.fd

    def run_start(
        self,
        *,
        requested: SessionConfig,
        effective: EffectiveConfig | None,
        request: GenerateRequest | None,
        prompt: str,
        argv: Sequence[str],
    ) -> None:
        """The run, the machine and the versions; the first event.

        Args:
            requested: The configuration that was asked for.
            effective: The configuration that runs; None when the model did not open.
            request: The generation; None when it was never made.
            prompt: Only its size and digest are logged.
            argv: The command line, prompt removed.
        """
        if self._log is None:
            return
        raw = prompt.encode("utf-8", "replace")
        generation = None
        if request is not None:
            generation = {
                "n_predict": request.n_predict,
                "forced_tokens": len(request.forced),
                "ignore_eog": request.ignore_eog,
                "chat": bool(request.messages),
                "think": request.think,
                "context_shift": request.context_shift,
                "stop_strings": len(request.stop),
                "sampling": _sampling(request.sampling),
            }
        self._event(
            "run_start",
            argv=list(argv),
            requested=requested,
            effective=effective,
            prompt={"bytes": len(raw), "sha256": hashlib.sha256(raw).hexdigest()},
            request=generation,
            machine=machine(),
            versions=versions(),
        )
        self._write_early()

    def load(self, report: LoadReport) -> None:
        """The model is open."""
        self._event("load", report=report)

    def prefill(self, batches: Sequence[StepMetrics], *, turn: int = 0) -> None:
        """The prompt is computed, or as much of it as will be."""
        if self._log is not None:
            self._event(
                "prefill", turn=turn, batches=[_step(batch) for batch in batches], total=_total(batches)
            )

    def token(self, token: TokenEvent, *, turn: int = 0) -> None:
        """A token was generated. Its layers, when there are any, are a line of their own."""
        if self._log is None:
            return
        self._event(
            "token",
            turn=turn,
            index=token.index,
            token=token.token,
            text=token.text,
            reasoning=token.reasoning,
            metrics=_step(token.metrics),
        )
        if token.metrics.layers is not None:
            self._event("layer", turn=turn, step=token.index, layers=list(token.metrics.layers))

    def cache_resize(self, resize: CacheResize) -> None:
        """The expert cache has another budget. What comes before `run_start` is written after it."""
        self._event_or_later(
            "cache_resize",
            from_bytes=resize.from_bytes,
            cache_bytes=resize.cache_bytes,
            reason=resize.reason,
        )

    def warning(self, message: str) -> None:
        """The user was told something. What comes before `run_start` is written after it."""
        self._event_or_later("warning", message=message)

    def summary(self, summary: RunSummary) -> None:
        """The generation ended, in whatever way."""
        self._event(
            "summary",
            turn=summary.turn,
            summary=summary,
            prefill_tokens_per_s=summary.prefill_tokens_per_s,
            decode_tokens_per_s=summary.decode_tokens_per_s,
        )

    def error(self, error: BaseException) -> None:
        """What ended the run early; of a read that failed, where that was too."""
        if isinstance(error, ReadError):
            self._event(
                "io_error",
                message=error.message,
                path=error.path,
                offset_bytes=error.offset_bytes,
                slice_name=error.slice_name,
            )
        self._event("error", type=type(error).__name__, message=str(error))

    def run_end(self, exit_code: int) -> None:
        """The last event."""
        self._write_early()
        self._event("run_end", exit_code=exit_code)

    def close(self) -> None:
        """Closes the file. Idempotent."""
        if self._sink is not None:
            self._write_early()
            self._sink.close()

    def _write_early(self) -> None:
        early, self._early = self._early, None
        for event, fields in early or ():
            self._event(event, **fields)

    def _event_or_later(self, event: str, /, **fields: object) -> None:
        if self._early is None:
            self._event(event, **fields)
        else:
            self._early.append((event, fields))

    def _event(self, event: str, /, **fields: object) -> None:
        if self._log is not None:
            self._log.event(event, **fields)

    def _finish_event(self, _: object, __: str, fields: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
        """A structlog processor: what every event has, in front, so that people can read the lines too."""
        head = {
            "schema": SCHEMA_VERSION,
            "event": fields.pop("event"),
            "run_id": self.run_id,
            "seq": self._seq,
            "mono_ns": time.monotonic_ns(),
            "time": fields.pop("time"),
        }
        self._seq += 1
        return {**head, **{name: _json_value(value) for name, value in fields.items()}}


def open_run_log(target: str | None, *, model_path: str = "") -> RunLog:
    """The log for a target; nothing is written yet.

    Args:
        target: A path, which is appended to; "-" for standard output; None for no log.
        model_path: What the log must not be.

    Raises:
        FileError: The file cannot be opened for writing.
        UsageError: It is the model.
    """
    if target is None:
        return RunLog(None)
    if target == "-":
        return RunLog(_LineSink(1, "standard output", close=False))
    try:
        if is_same_file(target, model_path):
            raise UsageError(f"{target} is the model: the log would be written into it")
        broken_line = _ends_within_a_line(target)
        fd = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
        if broken_line:
            os.write(fd, b"\n")
    except (OSError, ValueError) as error:
        raise _cannot(target, "opened", error) from None
    return RunLog(_LineSink(fd, target, close=True))


def _ends_within_a_line(path: str) -> bool:
    """Whether a writer was killed in the middle of a line, which must not swallow the next one's first."""
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            return False
        with open(path, "rb") as file:
            file.seek(-1, os.SEEK_END)
            return file.read(1) != b"\n"
    except OSError:  # no file, an empty one, or one that may only be written
        return False


def without_prompt(argv: Iterable[str]) -> list[str]:
    """A command line with the texts given to -p, --prompt and --system left out."""
    shown: list[str] = []
    is_text = False
    for word in argv:
        if is_text:
            shown.append("<prompt>")
            is_text = False
        elif word.startswith(("--prompt=", "--system=")):
            shown.append(f"{word.partition('=')[0]}=<prompt>")
        elif word.startswith("-p") and word != "-p":
            shown.append("-p<prompt>")
        else:
            shown.append(word)
            is_text = word in {"-p", "--prompt", "--system"}
    return shown


def machine() -> dict[str, object]:
    """Where the run took place. Unknown is None."""
    return {
        "kernel": platform.release(),
        "architecture": platform.machine(),
        "cpu": _cpu_model(),
        "cpus": os.cpu_count(),
        "usable_cpus": len(os.sched_getaffinity(0)),
        "memory_bytes": machine_memory().total_bytes,
    }


def versions() -> dict[str, str | None]:
    """Of Python and of the packages that a result may depend on; None where not installed."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = None
    return found


class _LineSink:
    """Appends lines to a file descriptor: the logger that structlog wraps."""

    def __init__(self, fd: int, name: str, *, close: bool) -> None:
        self.fd = fd
        self.broken = False
        self._name = name
        self._close = close

    def event(self, line: str) -> None:
        """Writes one line."""
        if self.broken:
            return
        rest = memoryview(line.encode("ascii") + b"\n")
        try:
            while rest:
                rest = rest[os.write(self.fd, rest) :]
        except BrokenPipeError:
            self.broken = True
            raise
        except OSError as error:
            self.broken = True
            raise _cannot(self._name, "written", error) from None

    def close(self) -> None:
        if self._close:
            self._close = False
            self.broken = True
            os.close(self.fd)


def _cannot(name: str, done: str, error: Exception) -> BmoeError:
    reason = error.strerror if isinstance(error, OSError) else str(error)
    return FileError(f"the log cannot be {done}: {reason}", path=name)


def _structlog(sink: _LineSink, finish: Any) -> Any:
    import structlog  # noqa: PLC0415 (only a run with a log needs it)

    class EventLogger(structlog.BoundLoggerBase):
        def event(self, event: str, /, **fields: object) -> None:
            self._proxy_to_logger("event", event, **fields)

    return structlog.wrap_logger(
        sink,
        wrapper_class=EventLogger,
        processors=[
            structlog.processors.TimeStamper(fmt="iso", utc=True, key="time"),
            finish,
            structlog.processors.JSONRenderer(allow_nan=False, separators=(",", ":")),
        ],
    ).bind()


@functools.cache
def _field_names(record_type: type) -> tuple[str, ...]:
    return tuple(field.name for field in dataclasses.fields(record_type))


def _json_value(value: object) -> object:
    """What JSON can hold: records as objects, numbers finite, text without lone surrogates."""
    if isinstance(value, str):
        # File names that are no UTF-8 hold lone surrogates, which strict JSON readers refuse.
        return value if value.isascii() else value.encode("utf-8", "replace").decode()
    if value is None or isinstance(value, int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _json_value(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_json_value(item) for item in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {name: _json_value(getattr(value, name)) for name in _field_names(type(value))}
    raise TypeError(f"a {type(value).__name__} has no place in the log")


def _step(metrics: StepMetrics) -> dict[str, object]:
    """A step without its layers, which are lines of their own."""
    return {name: getattr(metrics, name) for name in _step_names()}


@functools.cache
def _step_names() -> tuple[str, ...]:
    from bmoe.records import StepMetrics  # noqa: PLC0415 (records are for type checking everywhere else)

    return tuple(name for name in _field_names(StepMetrics) if name != "layers")


_LAST: Final = {"slots_used", "cache_bytes"}
_MEAN: Final = {"submit_latency_ns", "read_latency_ns"}


def _total(batches: Sequence[StepMetrics]) -> dict[str, int | None]:
    """The batches' sums; of states the last, of latencies the mean. None is what no batch has."""
    total: dict[str, int | None] = {}
    for name in _step_names():
        if name == "memory":
            continue
        measured = [value for batch in batches if (value := getattr(batch, name)) is not None]
        if not measured:
            total[name] = None
        elif name in _LAST:
            total[name] = measured[-1]
        else:
            total[name] = sum(measured) // (len(measured) if name in _MEAN else 1)
    return total


def _sampling(sampling: Sampling) -> dict[str, object]:
    """What is asked for; of a grammar only that there is one."""
    values: dict[str, object] = dataclasses.asdict(sampling)
    return values | {name: values[name] is not None for name in ("grammar", "json_schema")}


def _cpu_model() -> str | None:
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as lines:
            for line in lines:
                name, _, value = line.partition(":")
                if name.strip() == "model name":
                    return value.strip()
    except OSError:
        pass
    return None
