"""Route traces: which experts a recorded run asked for, layer by layer.

Owns the reading of format version 1. A trace comes from another program and maybe another machine: every
line is checked, and what is wrong is one FormatError with file and line. Must not know caches or reads.
"""

from __future__ import annotations

import os
import re
import stat
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from bmoe.io.errors import FileError, FormatError

if TYPE_CHECKING:
    from collections.abc import Iterator

_FIRST_LINE: Final = "# route_trace v1"
_MODEL: Final = re.compile(r"# model=(.*) arch=(\S+) n_layer=(\d+) n_expert=(\d+) n_expert_used=(\d+)")
_LAYER: Final = re.compile(r"# layer=(\d+) expert_bytes=(\d+)(?: dense_bytes=\d+)?")
_NEEDED: Final = ("turn", "phase", "step", "layer", "expert")
_NUMBER: Final = re.compile(r"-?[0-9]{1,9}")
_MAX_LINE_CHARS: Final = 1 << 12
_MAX_LAYERS: Final = 1024
_MAX_EXPERTS: Final = 4096
_MAX_EXPERT_BYTES: Final = 1 << 30
_DECODE: Final = 1


@dataclass(frozen=True, slots=True)
class Routing:
    """One layer's turn in one pass through the model.

    Attributes:
        decode: In the decoding of a token, not in prefill.
        new_pass: The first of its pass: llama.cpp begins another batch.
        layer: As the trace numbers them.
        experts: Routed to, each once, in the order of first use.
    """

    decode: bool
    new_pass: bool
    layer: int
    experts: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class RouteTrace:
    """A recorded run.

    Attributes:
        path: The file.
        model: The model's name, without its folder.
        experts: Per layer.
        top_k: Experts used per token and layer.
        expert_bytes: Of an expert of each layer that has any, by layer.
        routings: In the order they happened.
        tokens: Decoded.
    """

    path: str
    model: str
    experts: int
    top_k: int
    expert_bytes: dict[int, int]
    routings: tuple[Routing, ...]
    tokens: int


def read_trace(path: str, *, max_tokens: int | None = None) -> RouteTrace:
    """Reads a trace.

    Args:
        path: The file.
        max_tokens: Leave out what comes after so many decoded tokens.

    Raises:
        FormatError: It is no such trace, or broken; names the line.
        FileError: It cannot be read.
    """
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise FileError("is not a regular file", path=path)
        with open(path, encoding="utf-8", errors="replace") as file:
            lines = iter(lambda: file.readline(_MAX_LINE_CHARS), "")
            return _Parser(path, lines, max_tokens).trace()
    except OSError as error:
        raise FileError("cannot be read", path=path, got=error.strerror) from error
    except ValueError as error:  # a NUL in the path
        raise FileError("is not a path", path=repr(path), got=error) from error


class _Parser:
    def __init__(self, path: str, lines: Iterator[str], max_tokens: int | None) -> None:
        self._path = path
        self._lines = lines
        self._max_tokens = max_tokens
        self._number = 0
        self._model: re.Match[str] | None = None
        self._expert_bytes: dict[int, int] = {}
        self._columns: list[int] = []
        self._width = 0
        self._routings: list[Routing] = []
        self._passes_decoded = 0
        self._begins_pass = True  # the next routing does

    def trace(self) -> RouteTrace:
        if self._next() != _FIRST_LINE:
            raise self._wrong("is not a route trace", expected=_FIRST_LINE)
        self._preamble()
        assert self._model is not None
        self._rows()
        if not self._passes_decoded:
            raise FormatError("the trace holds no decoded token", path=self._path)
        return RouteTrace(
            path=self._path,
            model=os.path.basename(self._model[1]),
            experts=int(self._model[4]),
            top_k=int(self._model[5]),
            expert_bytes=self._expert_bytes,
            routings=tuple(self._routings),
            tokens=self._passes_decoded,
        )

    def _preamble(self) -> None:
        while (line := self._next()) is not None and line.startswith("#"):
            if line.startswith("# model="):
                self._model = _MODEL.fullmatch(line)
                if self._model is None or any(len(number) > 6 for number in self._model.groups()[2:]):
                    raise self._wrong("the model line cannot be read")
                _, _, layers, experts, used = self._model.groups()
                if not 0 < int(layers) <= _MAX_LAYERS or not 0 < int(used) <= int(experts) <= _MAX_EXPERTS:
                    raise self._wrong("these numbers cannot be a model's")
            elif line.startswith("# layer="):
                self._layer_line(line)
        if self._model is None:
            raise self._wrong("there is no model line before the table")
        names = [] if line is None else line.split(",")
        missing = [name for name in _NEEDED if name not in names]
        if missing:
            raise self._wrong("the table lacks columns", expected=", ".join(missing))
        self._columns = [names.index(name) for name in _NEEDED]
        self._width = len(names)

    def _layer_line(self, line: str) -> None:
        match = _LAYER.fullmatch(line)
        if match is None or len(match[1]) > 6 or len(match[2]) > 12:
            raise self._wrong("the layer line cannot be read")
        layer, size = int(match[1]), int(match[2])
        if self._model is None or layer >= int(self._model[3]):
            raise self._wrong("the model has no such layer", got=layer)
        if size > _MAX_EXPERT_BYTES:
            raise self._wrong("an expert that large cannot be", got=size)
        if size:  # a dense layer has none
            self._expert_bytes[layer] = size

    def _rows(self) -> None:
        assert self._model is not None
        experts_in_model = int(self._model[4])
        previous: tuple[int, int, int, int] | None = None
        experts: dict[int, None] = {}
        while (line := self._next()) is not None:
            if not line or line.startswith("#"):
                continue
            turn, phase, step, layer, expert = self._row(line)
            if layer not in self._expert_bytes:
                raise self._wrong("the header gives no expert_bytes for that layer", got=layer)
            if not 0 <= expert < experts_in_model:
                raise self._wrong("the model has no such expert", got=expert)
            # Prefill lists a layer's tokens together: one batch, whatever their steps.
            key = (turn, phase, step if phase == _DECODE else 0, layer)
            if key != previous:
                if previous is not None and not self._close(previous, experts, key):
                    return
                previous, experts = key, {}
            experts[expert] = None
        if previous is not None:
            self._close(previous, experts, None)

    def _close(
        self, key: tuple[int, int, int, int], experts: dict[int, None], following: tuple[int, ...] | None
    ) -> bool:
        """Keeps a finished routing; False when enough tokens are read."""
        decode = key[1] == _DECODE
        new_pass = self._begins_pass
        if new_pass and decode:
            self._passes_decoded += 1
        self._routings.append(Routing(decode, new_pass, key[3], tuple(experts)))
        self._begins_pass = following is None or following[:3] != key[:3] or following[3] <= key[3]
        enough = self._passes_decoded == self._max_tokens and self._begins_pass
        return not (enough and decode)

    def _row(self, line: str) -> list[int]:
        cells = line.split(",")
        if len(cells) != self._width:
            raise self._wrong("the row has another width", expected=f"{self._width} cells", got=len(cells))
        values = []
        for name, column in zip(_NEEDED, self._columns, strict=True):
            if not _NUMBER.fullmatch(cells[column]):
                raise self._wrong(f"{name} is not a whole number", got=repr(cells[column][:40]))
            values.append(int(cells[column]))
        if values[1] not in {0, _DECODE}:
            raise self._wrong("the phase is unknown", expected="0 (prefill) or 1 (decode)", got=values[1])
        return values

    def _next(self) -> str | None:
        """The next line without its end; None after the last."""
        line = next(self._lines, None)
        if line is None:
            return None
        self._number += 1
        if len(line) == _MAX_LINE_CHARS:
            raise self._wrong("the line is too long", expected=f"less than {_MAX_LINE_CHARS} characters")
        return line.rstrip("\r\n")

    def _wrong(self, message: str, *, expected: object = None, got: object = None) -> FormatError:
        return FormatError(message, path=f"{self._path}:{self._number}", expected=expected, got=got)
