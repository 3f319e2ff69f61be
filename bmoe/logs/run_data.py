"""One run out of the database, as arrays: what reports and comparisons compute with.

Owns which run a word means and how its rows become arrays. Must not know how they came into the database,
nor what is made of them.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Protocol

import numpy as np

from bmoe.io.errors import BmoeError, UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import pyarrow as pa
    from numpy.typing import NDArray

    Series = NDArray[np.float64]

_FIGURES: Final = (
    "turn", "step", "token", "tokens", "wall_ns", "compute_ns", "stall_ns", "hook_ns", "experts_ns",
    "loop_ns", "overhead_ns", "cpu_ns", "lookups", "hits", "reads", "read_bytes", "evictions", "rereads",
    "slots_used",
    "minor_faults", "major_faults", "submit_latency_ns", "read_latency_ns", "io_busy_ns", "rss_bytes",
    "rss_anon_bytes", "rss_file_bytes", "swap_bytes", "mem_available_bytes", "cache_budget_bytes",
    "cache_hit_ratio_cumulative",
)  # fmt: skip
_RUN: Final = (
    "run_id", "source", "file", "model_name", "model_path", "architecture", "mode", "io_backend", "policy",
    "cache_bytes", "threads", "context_tokens", "ubatch_tokens", "overlap", "traced", "prompt_sha256",
    "exit_code", "complete",
)  # fmt: skip
_OBJECTS: Final = ("config", "machine", "versions", "summary")
_FEWEST_PREFIX: Final = 3


class Database(Protocol):
    """What is needed of `bmoe.logs.LogStore`."""

    def sql(self, query: str, params: Sequence[Any] | None = None) -> pa.Table:
        """The rows of a query."""
        ...


class Steps:
    """The steps of one phase in order.

    Args:
        table: Rows of the database's `steps`.
    """

    def __init__(self, table: pa.Table) -> None:
        self.count: int = table.num_rows
        self._columns = {name: _floats(table, name) for name in _FIGURES}

    def __getitem__(self, name: str) -> Series:
        """[count] a figure; NaN is unmeasured."""
        return self._columns[name]

    def measured(self, name: str) -> bool:
        """Whether any step has the figure."""
        return bool(np.isfinite(self[name]).any())

    def whole(self, name: str) -> bool:
        """Whether there are steps and all have the figure."""
        return self.count > 0 and bool(np.isfinite(self[name]).all())

    def total(self, name: str) -> float | None:
        """The sum over all steps; None unless all have it."""
        return float(self[name].sum()) if self.whole(name) else None

    def mean(self, name: str) -> float | None:
        """Over the steps that have it; None without any."""
        return float(np.nanmean(self[name])) if self.measured(name) else None


@dataclass(frozen=True, kw_only=True)
class LayerGrid:
    """What every decoded token did in every layer.

    Attributes:
        layers: [layers] the file's numbers, ascending.
        figures: Name to [layers, tokens]; NaN where there is no row.
    """

    layers: NDArray[np.int64]
    figures: Mapping[str, Series]


@dataclass(frozen=True, kw_only=True)
class Run:
    """A run with its measurements.

    Attributes:
        facts: The database's row of it; None is unknown.
        started_at: ISO 8601 in UTC, or None.
        config, machine, versions, summary: As logged; empty when unknown.
        decode, prefill: Its steps.
        layers: None without layer events.
        events: How many there are of each.
        load_ns: Opening the model; None unknown.
    """

    facts: Mapping[str, Any]
    started_at: str | None
    config: Mapping[str, Any]
    machine: Mapping[str, Any]
    versions: Mapping[str, Any]
    summary: Mapping[str, Any]
    decode: Steps
    prefill: Steps
    layers: LayerGrid | None
    events: Mapping[str, int]
    load_ns: int | None

    @property
    def run_id(self) -> str:
        """What the database knows it by."""
        return str(self.facts["run_id"])

    @property
    def model(self) -> str:
        """Its name, else its file's, else "unknown model"."""
        path = str(self.facts["model_path"] or "").rstrip("/").rpartition("/")[2]
        return str(self.facts["model_name"] or path or "unknown model")


def find_run(database: Database, word: str) -> str:
    """The id of the run that a word means.

    Args:
        database: Where it is looked for.
        word: A run id, the beginning of one and no other, `last`, or `last~N` for the N-th before it.

    Raises:
        UsageError: None, or more than one.
    """
    if word == "last" or word.startswith("last~"):
        back = word.removeprefix("last").removeprefix("~") or "0"
        if not (back.isascii() and back.isdigit() and len(back) < 10):
            raise UsageError(f"{word!r} is not last or last~N")
        rows = database.sql(
            "SELECT run_id FROM runs ORDER BY started_at DESC NULLS LAST, run_id LIMIT 1 OFFSET ?",
            [int(back)],
        ).to_pylist()
        if not rows:
            [[count]] = _rows(database, "SELECT count(*) FROM runs")
            raise UsageError(f"there is no run {word}: the database has {count}", hint="see `bmoe logs runs`")
        return str(rows[0]["run_id"])
    if _rows(database, "SELECT 1 FROM runs WHERE run_id = ?", [word]):
        return word
    found = _rows(
        database,
        "SELECT run_id FROM runs WHERE starts_with(run_id, ?) ORDER BY run_id LIMIT 4",
        [word],
    )
    if not found or len(word) < _FEWEST_PREFIX:
        raise UsageError(
            f"there is no run {word!r}",
            hint="name an id of `bmoe logs runs`, three or more characters it begins with, last, or last~N",
        )
    if len(found) > 1:
        some = ", ".join(str(row[0]) for row in found[:3]) + (", …" if len(found) > 3 else "")
        raise UsageError(f"{word!r} begins more than one run: {some}")
    return str(found[0][0])


def load_run(database: Database, run_id: str) -> Run:
    """Everything about one run.

    Raises:
        BmoeError: There is no such run.
    """
    columns = ", ".join(
        (*_RUN, "epoch_us(started_at) AS started_us", *(f"{c}::VARCHAR AS {c}" for c in _OBJECTS))
    )
    rows = database.sql(f"SELECT {columns} FROM runs WHERE run_id = ?", [run_id]).to_pylist()  # noqa: S608 (constants)
    if not rows:
        raise BmoeError(f"run {run_id} is not in the database")
    row = rows[0]
    objects = {name: _object(row.pop(name)) for name in _OBJECTS}
    started_us = row.pop("started_us")
    decode = _steps(database, run_id, "decode")
    return Run(
        facts=row,
        started_at=None if started_us is None else _iso(started_us),
        decode=decode,
        prefill=_steps(database, run_id, "prefill"),
        layers=_layers(database, run_id, decode),
        events={
            str(event): int(count)
            for event, count in _rows(
                database,
                "SELECT event, count(*) FROM events WHERE run_id = ? GROUP BY event ORDER BY min(seq)",
                [run_id],
            )
        },
        load_ns=_load_ns(database, run_id),
        **objects,
    )


def _rows(database: Database, query: str, params: Sequence[Any] | None = None) -> list[tuple[Any, ...]]:
    return [tuple(row.values()) for row in database.sql(query, params).to_pylist()]


def _steps(database: Database, run_id: str, phase: str) -> Steps:
    return Steps(
        database.sql(
            f"SELECT {_doubles(_FIGURES)} FROM steps "  # noqa: S608 (constants)
            "WHERE run_id = ? AND phase = ? ORDER BY steps.turn, steps.step",
            [run_id, phase],
        )
    )


def _layers(database: Database, run_id: str, decode: Steps) -> LayerGrid | None:
    names = ("lookups", "hits", "read_bytes", "stall_ns")
    table = database.sql(
        f"SELECT {_doubles(('turn', 'step', 'layer', *names))} FROM layers WHERE run_id = ?",  # noqa: S608 (constants)
        [run_id],
    )
    if not table.num_rows or not decode.count:
        return None
    place = {
        key: i for i, key in enumerate(zip(decode["turn"].tolist(), decode["step"].tolist(), strict=True))
    }
    turns, steps = _floats(table, "turn").tolist(), _floats(table, "step").tolist()
    token = np.array([place.get(key, -1) for key in zip(turns, steps, strict=True)])
    layers, row = np.unique(_floats(table, "layer"), return_inverse=True)
    known = token >= 0
    figures = {}
    for name in names:
        grid = np.full((len(layers), decode.count), np.nan)
        grid[row.reshape(-1)[known], token[known]] = _floats(table, name)[known]
        figures[name] = grid
    return LayerGrid(layers=layers.astype(np.int64), figures=figures)


def _load_ns(database: Database, run_id: str) -> int | None:
    for (body,) in _rows(
        database,
        "SELECT body::VARCHAR FROM events WHERE run_id = ? AND event = 'load' ORDER BY seq",
        [run_id],
    ):
        report = _object(body).get("report")
        if isinstance(report, dict) and isinstance(report.get("wall_ns"), int):
            return int(report["wall_ns"])
    return None


def _object(text: str | None) -> dict[str, Any]:
    value = json.loads(text) if text else {}
    return value if isinstance(value, dict) else {}


def _floats(table: pa.Table, name: str) -> Series:
    values = np.array(table.column(name).to_numpy(), dtype=np.float64)
    values[~np.isfinite(values)] = np.nan  # nothing sensible can be made of an infinity
    return values


def _doubles(names: Sequence[str]) -> str:
    """Columns to select: nothing here needs more than a double's 53 bits, and all fit into it."""
    return ", ".join(f"{name}::DOUBLE AS {name}" for name in names)


def _iso(microseconds: int) -> str:
    return str(np.datetime64(microseconds, "us").astype("datetime64[s]")) + "Z"
