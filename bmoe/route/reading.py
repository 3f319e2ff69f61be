"""Route traces from files: `# route_trace v1`, a preamble, a header, one comma-separated row per routing.

Owns the format, of this engine and of the reference alike; docs/routing.md is its description. A file may be
hostile, cut or gigabytes long: it is read in pieces, every number is checked against the limits below, and
what is wrong is said with file and line. Must not know what a trace is used for.

Pieces are checked and converted as whole arrays; only one that fails there is read again line by line, which
then finds the line and the words. Both ways accept exactly the same rows (a property test compares them).
"""

from __future__ import annotations

import re
import warnings
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from bmoe.io.errors import FileError, FormatError
from bmoe.present import one_line
from bmoe.route.trace import RouteTrace

if TYPE_CHECKING:
    from numpy.typing import NDArray


class _Column(NamedTuple):
    low: int
    high: int


_INT31: Final = 2**31 - 1
_COLUMNS: Final = {
    "turn": _Column(0, _INT31),
    "phase": _Column(0, 1),
    "step": _Column(-1, _INT31),
    "layer": _Column(0, 9_999),
    "slot": _Column(0, 9_999),
    "expert": _Column(0, 999_999),
    "weight": _Column(0, 0),  # no limits: see _WEIGHT
    "residency": _Column(0, 2),
    "expert_bytes": _Column(0, 2**50),
    "dropped": _Column(0, 1),
}
_COUNTS: Final = {
    "n_layer": _COLUMNS["layer"].high + 1,
    "n_expert": _COLUMNS["expert"].high + 1,
    "n_expert_used": _COLUMNS["slot"].high + 1,
}
_REQUIRED: Final = ("turn", "phase", "step", "layer", "slot", "expert")
_WHOLE: Final = re.compile(rb"-?[0-9]{1,18}")
_WEIGHT: Final = re.compile(
    rb"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]{1,4})?|[+-]?(?:inf|infinity|nan(?:\([a-z]*\))?)",
    re.IGNORECASE,
)
_PIECE_BYTES: Final = 4 << 20
# A line is some 60 bytes; whatever has none in a piece is not a trace.
_LONGEST_LINE_BYTES: Final = 64 << 10
_DIGIT_OR_SEPARATOR: Final = np.isin(np.arange(256), np.frombuffer(b"0123456789-,\n", np.uint8))
_IN_A_WEIGHT: Final = np.isin(np.arange(256), np.frombuffer(b"0123456789-+.eE,\nnaNA", np.uint8))


class _Layout(NamedTuple):
    names: tuple[str, ...]
    weight: int | None


def read_trace(path: str) -> RouteTrace:
    """Reads a whole trace.

    Args:
        path: The file.

    Raises:
        FileError: It cannot be read.
        FormatError: It is not a route trace, or a line is wrong; the message has file and line.
    """
    reader = _Reader(path)
    try:
        with open(path, "rb", buffering=0) as file:
            while piece := file.read(_PIECE_BYTES):
                reader.feed(piece)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise FileError(f"cannot be read: {reason}", path=path) from None
    return reader.finish()


class _Reader:
    def __init__(self, path: str) -> None:
        self._path = path
        self._rest = b""
        self._line = 1  # number of the first line not yet consumed
        self._layout: _Layout | None = None
        self._guessed_layout = False
        self._facts: dict[str, str] = {}
        self._version: str | None = None
        self._bytes_of: dict[str, dict[int, int]] = {"expert_bytes": {}, "dense_bytes": {}}
        self._parts: list[dict[str, NDArray[Any]]] = []
        self._infinite = 0
        self._notes: list[str] = []

    def feed(self, piece: bytes) -> None:
        """Takes the next bytes of the file."""
        whole, newline, rest = (self._rest + piece).rpartition(b"\n")
        self._rest = rest
        if len(rest) > _LONGEST_LINE_BYTES:
            raise self._error("is not a route trace: the line is too long", line=whole.count(b"\n"))
        if newline:
            self._lines(whole + b"\n")

    def finish(self) -> RouteTrace:
        """The trace, once all bytes are fed."""
        if self._rest.strip():
            self._notes.append(f"line {self._line} has no end, so the file was cut there: it is left out")
            if self._layout is None and not self._facts and self._version is None:
                raise self._error("is not a route trace: it has no complete line")
        if not self._parts:
            raise FormatError("holds no routing", path=self._path)
        # One column at a time, so that a long trace is not in memory twice.
        names = list(self._parts[0])
        columns = {name: np.concatenate([part.pop(name) for part in self._parts]) for name in names}
        if self._version is None:
            self._notes.insert(0, "there is no `# route_trace` preamble: the model is not known")
        elif self._version != "v1":
            self._notes.insert(0, f"the format is {self._version}, not v1: columns are taken by name")
        if self._guessed_layout:
            self._notes.append("there is no line of column names: v1's order is assumed")
        if self._infinite:
            self._notes.append(f"{self._infinite} weights are infinite: they count as unknown")
        if "weight" in columns and (unknown := int(np.isnan(columns["weight"]).sum()) - self._infinite):
            self._notes.append(f"{unknown} weights are unknown (nan)")
        if unplaced := int((columns["step"] == -1).sum()):
            self._notes.append(f"{unplaced} rows have no position (step -1)")
        return RouteTrace(
            path=self._path,
            facts=self._facts,
            expert_bytes_of=self._expert_bytes(columns),
            dense_bytes_of=self._bytes_of["dense_bytes"],
            notes=tuple(self._notes),
            **{_FIELDS.get(name, name): column for name, column in columns.items()},  # type: ignore[arg-type]  # dtypes are set in _store
        )

    def _expert_bytes(self, columns: dict[str, NDArray[Any]]) -> dict[int, int]:
        """The preamble's sizes; for layers it does not tell of, what a read of theirs cost."""
        sizes = {la: n for la, n in self._bytes_of["expert_bytes"].items() if n > 0}
        layer, cost = columns["layer"], columns.get("expert_bytes")
        untold = [int(la) for la in np.unique(layer) if int(la) not in sizes]
        if not untold or cost is None:
            return sizes
        found = []
        for la in untold:
            costs = np.unique(cost[(layer == la) & (cost > 0)])
            if len(costs) > 1:
                raise FormatError(
                    f"reads of experts of layer {la} differ in size",
                    path=self._path,
                    expected=f"{costs[0]} bytes",
                    got=f"{costs[1]}",
                )
            if len(costs):
                sizes[la] = int(costs[0])
                found.append(la)
        if found:
            self._notes.append(f"expert sizes of {len(found)} layers are taken from the rows that read them")
        return sizes

    # --- lines -------------------------------------------------------------------------------------------

    def _lines(self, text: bytes) -> None:
        if b"\r" in text:
            text = text.replace(b"\r\n", b"\n")
        at = 0
        while at < len(text) and (self._layout is None or text[at] in b"#\n"):
            end = text.index(b"\n", at)
            self._line_before_rows(text[at:end].strip())
            self._line += 1
            at = end + 1
        if at == len(text):
            return
        text = text[at:]
        assert self._layout is not None
        values = _convert(text, self._layout)
        if values is None or not self._within_limits(values):
            values = self._line_by_line(text)
        self._line += text.count(b"\n")
        if len(values):
            self._store(values)

    def _line_before_rows(self, line: bytes) -> None:
        if line.startswith(b"#"):
            self._preamble(line)
        elif line:
            assert self._layout is None
            names = tuple(line.decode("ascii", "replace").split(","))
            if "expert" in names or "turn" in names:
                self._layout = self._header(names)
            else:
                self._layout = self._guess(line)
                self._guessed_layout = True
                self._store(self._line_by_line(line + b"\n"))

    def _header(self, names: tuple[str, ...]) -> _Layout:
        for name in _REQUIRED:
            if name not in names:
                raise self._error(f"the column {name!r} is missing", expected=",".join(_COLUMNS))
        known = [name for name in names if name in _COLUMNS]
        if len(set(known)) != len(known):
            raise self._error("a column is named twice")
        if other := [name for name in names if name not in _COLUMNS]:
            self._notes.append(f"unknown columns are ignored: {one_line(', '.join(other))[:200]}")
        return _Layout(names, names.index("weight") if "weight" in names else None)

    def _guess(self, line: bytes) -> _Layout:
        fields = line.count(b",") + 1
        if fields not in {len(_COLUMNS) - 1, len(_COLUMNS)} or not _WHOLE.fullmatch(line.split(b",")[0]):
            raise self._error("is not a route trace: neither preamble, nor column names, nor a row")
        names = tuple(_COLUMNS)[:fields]
        return _Layout(names, names.index("weight"))

    def _preamble(self, line: bytes) -> None:
        words = line.decode("utf-8", "replace").lstrip("#").split()
        if words[:1] == ["route_trace"]:
            self._version = one_line(" ".join(words[1:2])) or "without a version"
            return
        if words and words[0].startswith("bmoe_"):
            raise self._error(f"is a {one_line(words[0])[:40]} file, not a route trace")
        pairs = _pairs(line.decode("utf-8", "replace").lstrip("# "))
        if "layer" not in pairs:
            for name, high in _COUNTS.items():
                if name in pairs:
                    count = str(self._number(pairs[name], name, high))
                    if self._facts.setdefault(name, count) != count:
                        raise self._error(
                            "is said twice, differently: two traces in one file?",
                            field=name,
                            expected=self._facts[name],
                            got=count,
                        )
            self._facts = pairs | self._facts
            return
        layer = self._number(pairs["layer"], "layer", _COLUMNS["layer"].high)
        for name, known in self._bytes_of.items():
            if name in pairs:
                size = self._number(pairs[name], name, _COLUMNS["expert_bytes"].high)
                if known.setdefault(layer, size) != size:
                    raise self._error(
                        f"layer {layer} is said to have two sizes",
                        field=name,
                        expected=known[layer],
                        got=size,
                    )

    def _number(self, text: str, field: str, high: int) -> int:
        if not re.fullmatch("[0-9]{1,18}", text, re.ASCII) or int(text) > high:
            raise self._error(f"is not a whole number up to {high}", field=field, got=repr(text[:40]))
        return int(text)

    # --- rows --------------------------------------------------------------------------------------------

    def _within_limits(self, values: NDArray[np.float64]) -> bool:
        assert self._layout is not None
        for i, name in enumerate(self._layout.names):
            if name in _COLUMNS and i != self._layout.weight:
                low, high = self._limits(name)
                column = values[:, i]
                if column.min() < low or column.max() > high:
                    return False
        return True

    def _limits(self, name: str) -> tuple[int, int]:
        low, high = _COLUMNS[name]
        said = int(self._facts.get({"expert": "n_expert", "layer": "n_layer"}.get(name, ""), 0))
        return low, min(high, said - 1) if said else high

    def _line_by_line(self, text: bytes) -> NDArray[np.float64]:
        """The same rows, slowly, with an error that names the line, or other lines among them."""
        assert self._layout is not None
        first, rows = self._line, []
        for number, raw in enumerate(text.split(b"\n")[:-1], first):
            self._line = number
            line = raw.strip()
            if line.startswith(b"#"):
                self._preamble(line)
            elif line and line != ",".join(self._layout.names).encode():
                rows.append(self._row(line))
        self._line = first
        return np.array(rows, dtype=np.float64).reshape(len(rows), len(self._layout.names))

    def _row(self, line: bytes) -> list[float]:
        assert self._layout is not None
        fields = line.split(b",")
        if len(fields) != len(self._layout.names):
            raise self._error(
                "a row has the wrong number of fields",
                expected=len(self._layout.names),
                got=f"{len(fields)}: {_shown(line)}",
            )
        row = []
        for name, text in zip(self._layout.names, fields, strict=True):
            if name not in _COLUMNS:
                row.append(0.0)
            elif name == "weight":
                if not _WEIGHT.fullmatch(text):
                    raise self._error("is not a number or nan", field=name, got=_shown(text))
                row.append(float(text.partition(b"(")[0]))
            else:
                low, high = self._limits(name)
                if not _WHOLE.fullmatch(text) or not low <= int(text) <= high:
                    raise self._error(
                        f"is not a whole number from {low} to {high}", field=name, got=_shown(text)
                    )
                row.append(float(text))
        return row

    def _store(self, values: NDArray[np.float64]) -> None:
        assert self._layout is not None
        part: dict[str, NDArray[Any]] = {}
        for i, name in enumerate(self._layout.names):
            if name in _COLUMNS:
                with np.errstate(over="ignore"):  # a weight beyond float32 is infinite
                    part[name] = values[:, i].astype(_DTYPES.get(name, np.int32))
        if "weight" in part:
            infinite = np.isinf(part["weight"])  # also what does not fit float32
            self._infinite += int(infinite.sum())
            part["weight"][infinite] = np.nan
        self._parts.append(part)

    def _error(self, message: str, *, line: int = 0, **fields: object) -> FormatError:
        return FormatError(message, path=f"{self._path}:{self._line + line}", **fields)  # type: ignore[arg-type]  # field names of FormatError


_FIELDS: Final = {"expert_bytes": "read_bytes"}
_DTYPES: Final = {"weight": np.float32, "residency": np.int8, "expert_bytes": np.int64, "dropped": np.bool_}


def _shown(text: bytes) -> str:
    return repr(text[:60].decode("utf-8", "replace"))


def _pairs(text: str) -> dict[str, str]:
    """`key=value` words. A value may hold blanks (model paths do): it goes on up to the next key."""
    found = list(re.finditer(r"(?:^|\s)([A-Za-z_][A-Za-z0-9_]*)=", text))
    ends = [m.start() for m in found[1:]] + [len(text)]
    return {m[1]: text[m.end() : end].strip() for m, end in zip(found, ends, strict=False)}


def _convert(text: bytes, layout: _Layout) -> NDArray[np.float64] | None:  # noqa: PLR0911 (one per doubt)
    """[rows, fields] of a piece that holds nothing but well-formed rows; None if anything is odd."""
    raw = np.frombuffer(text, dtype=np.uint8)
    fields = len(layout.names)
    plain = _DIGIT_OR_SEPARATOR[raw]
    separators = np.flatnonzero((raw == ord(",")) | (raw == ord("\n")))
    if len(separators) % fields or any(name not in _COLUMNS for name in layout.names):
        return None
    ends = raw[separators].reshape(-1, fields)
    if (ends[:, :-1] != ord(",")).any() or (ends[:, -1] != ord("\n")).any():
        return None
    if separators[0] == 0 or (np.diff(separators) == 1).any():
        return None  # an empty field
    other = np.flatnonzero(~plain)
    if len(other):
        if not _IN_A_WEIGHT[raw[other]].all():
            return None
        column = np.searchsorted(separators, other) % fields
        if layout.weight is None or (column != layout.weight).any():
            return None
    with warnings.catch_warnings():
        # Text that is no number ends the conversion early, by warning or by exception.
        warnings.simplefilter("ignore", DeprecationWarning)
        try:
            flat = np.fromstring(text.replace(b"\n", b","), dtype=np.float64, sep=",")
        except ValueError:
            return None
    return flat.reshape(-1, fields) if len(flat) == len(separators) else None
