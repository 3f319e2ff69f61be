"""Lines of the JSON log, schema 1 and 2, as rows.

Owns which fields become which columns, and what is wrong with a line that is none. Must not know files
or what is in the database already.

The many lines, `token` and `layer`, are read by DuckDB's own JSON parser where they have all fields of their
schema. It is fast, and strict but for this: it takes true for 1, so lines are searched for such values; a
number in quotes for the number, which is let pass; and it rounds fractions, which is done here too, since log
collectors turn whole numbers into 1.5e9. Whatever it refuses, and every other line, is judged here: that
costs time, never a line.
"""

from __future__ import annotations

import datetime as dt
import json
from typing import Any, Final, NoReturn

from bmoe.logs.tables import LAYERS, STEPS

SCHEMAS: Final = (1, 2)
ROW_EVENTS: Final = ("token", "prefill", "layer")
_MOST: Final = (1 << 63) - 1
_MOST_INDEX: Final = (1 << 31) - 1
_MOST_ID_CHARS: Final = 64

_HEAD: Final = ("schema", "seq", "mono_ns", "turn", "index", "token", "step")
_MEMORY: Final = (
    "rss_bytes", "rss_anon_bytes", "rss_file_bytes", "swap_bytes", "mem_available_bytes", "mem_free_bytes",
    "swap_free_bytes",
)  # fmt: skip
_METRICS_1: Final = (
    "tokens", "wall_ns", "stall_ns", "hook_ns", "experts_ns", "loop_ns", "overhead_ns", "cpu_ns", "lookups",
    "hits", "reads", "read_bytes", "evictions", "rereads", "minor_faults", "major_faults",
)  # fmt: skip
_METRICS: Final = (
    *_METRICS_1, "compute_ns", "speculative_bytes", "slots_used", "dropped", "submit_latency_ns",
    "read_latency_ns", "io_busy_ns", "cache_bytes",
)  # fmt: skip
_LAYER: Final = ("layer", "lookups", "hits", "read_bytes", "stall_ns", "experts_ns")
_INDEX: Final = ("schema", "seq", "turn", "index", "token", "step", "tokens", "layer")  # 32-bit columns
# A value that is no number, null, text, object or list. It begins with what RE2 can search for, which makes
# it five times as fast.
_DOUBT: Final = r'":[^0-9n"{\[]'


def _types(*names: str) -> dict[str, Any]:
    return {name: "INTEGER" if name in _INDEX else "BIGINT" for name in names}


_LAYER_STRUCT: Final = ", ".join(f"{name} {type_}" for name, type_ in _types(*_LAYER).items())
# The columns that `fast_layers_sql` and `checked_layers_sql` give.
LAYER_LINES: Final = (
    f"i INTEGER, schema INTEGER, run_id VARCHAR, turn INTEGER, step INTEGER, layers STRUCT({_LAYER_STRUCT})[]"
)


def _structure(*head: str, metrics: tuple[str, ...] = (), memory: bool = False) -> dict[str, Any]:
    """Of a line, as json_transform wants it."""
    named: dict[str, Any] = {
        "event": "VARCHAR",
        "run_id": "VARCHAR",
        **_types("schema", "seq", "mono_ns", *head),
    }
    sample = {"memory": {**_types(*_MEMORY), "dense_resident": "DOUBLE"}} if memory else {}
    if metrics:
        named["metrics"] = {**_types(*metrics), **sample}
    return named


def fast_steps_sql(lines: str, schema: int) -> str:
    """A query for rows of `steps`, with `i` and `schema` in front, out of `token` lines that are beyond doubt.

    Args:
        lines: A table (i, text) of ASCII lines.
        schema: The only one it reads.
    """
    fields: tuple[str, ...]
    if schema == 1:
        fields, structure = _METRICS_1, _structure("index", "token", metrics=_METRICS_1)
    else:
        fields, structure = _METRICS, _structure("turn", "index", "token", metrics=_METRICS, memory=True)
    turn = "0" if schema == 1 else "j.turn"
    columns = {"turn": turn, "phase": "'decode'", "step": "j.index", "token": "j.token"}
    columns |= _metric_columns("j.metrics", fields, memory=schema != 1)
    return (
        f"SELECT i, j.schema AS schema, {_step_columns(columns)} "
        f"FROM ({_strict(lines, 'token', schema, structure)}) "
        f"WHERE {turn} IS NOT NULL AND j.index IS NOT NULL AND j.metrics.tokens IS NOT NULL "
        "AND j.metrics.wall_ns IS NOT NULL"
    )


def fast_layers_sql(lines: str) -> str:
    """The same for `layer` lines: (i, schema, run_id, turn, step, layers)."""
    structure = {**_structure("turn", "step"), "layers": [_types(*_LAYER)]}
    known = " AND ".join(f"x.{name} IS NOT NULL" for name in _LAYER)
    return (
        "SELECT i, j.schema AS schema, j.run_id AS run_id, j.turn AS turn, j.step AS step, j.layers AS layers "
        f"FROM ({_strict(lines, 'layer', 2, structure)}) WHERE j.turn IS NOT NULL AND j.step IS NOT NULL "
        f"AND len(j.layers) = len(list_filter(j.layers, lambda x: {known}))"
    )


def _strict(lines: str, event: str, schema: int, structure: dict[str, Any]) -> str:
    shape = json.dumps(structure, separators=(",", ":"))
    # Materialised, or DuckDB would parse the line anew for every field that is looked at.
    return (
        f"WITH parsed AS MATERIALIZED (SELECT i, try(json_transform_strict(text, '{shape}')) AS j FROM {lines} "
        f"""WHERE contains(text, '"event":"{event}"') AND contains(text, '"schema":{schema},') """
        f"AND NOT regexp_matches(text, '{_DOUBT}')) SELECT i, j FROM parsed WHERE j.event = '{event}' "
        f"AND j.schema = {schema} AND length(j.run_id) BETWEEN 1 AND {_MOST_ID_CHARS} AND j.seq IS NOT NULL "
        "AND j.mono_ns IS NOT NULL"
    )


def checked_sql(lines: str) -> str:
    """A query that reads lines of `ROW_EVENTS` that `parse` has found good.

    Args:
        lines: A table (i, text).

    Returns:
        The query, of (i, j): the line's number and what it says, NULL if DuckDB disagrees.
    """
    metrics = _structure(metrics=_METRICS, memory=True)["metrics"]
    shape = {
        **_structure("turn", "index", "token", "step"),
        "metrics": metrics,
        "batches": [metrics],
        "layers": [_types(*_LAYER)],
    }
    return f"SELECT i, try(json_transform(text, '{json.dumps(shape)}')) AS j FROM {lines}"


def checked_steps_sql(checked: str) -> str:
    """A query as `fast_steps_sql`, of a table out of `checked_sql`."""
    turn = "coalesce(j.turn, 0)"
    token = {"turn": turn, "phase": "'decode'", "step": "j.index", "token": "j.token"}
    batch = {"turn": turn, "phase": "'prefill'", "step": "place - 1"}
    token |= _metric_columns("j.metrics", _METRICS, memory=True)
    batch |= _metric_columns("b", _METRICS, memory=True)
    return (
        f"SELECT i, j.schema AS schema, {_step_columns(token)} FROM {checked} WHERE j.event = 'token' "
        f"UNION ALL SELECT i, j.schema, {_step_columns(batch)} FROM (SELECT i, j, unnest(j.batches) AS b, "
        f"generate_subscripts(j.batches, 1) AS place FROM {checked} WHERE j.event = 'prefill')"
    )


def checked_layers_sql(checked: str) -> str:
    """A query as `fast_layers_sql`, of a table out of `checked_sql`."""
    return (
        "SELECT i, j.schema AS schema, j.run_id AS run_id, coalesce(j.turn, 0) AS turn, j.step AS step, "
        f"j.layers AS layers FROM {checked} WHERE j.event = 'layer'"
    )


def layers_sql(lines: str) -> str:
    """A query for the rows of `layers`.

    Args:
        lines: A table out of `fast_layers_sql`, or a part of it.
    """
    sources = {name: name for name in ("run_id", "turn", "step")}
    columns = ", ".join(sources.get(name, f"l.{name}") for name in LAYERS.names)
    return f"SELECT {columns} FROM (SELECT run_id, turn, step, unnest(layers) AS l FROM {lines})"


def _metric_columns(value: str, fields: tuple[str, ...], *, memory: bool) -> dict[str, str]:
    columns = {name: f"{value}.{name}" for name in fields}
    if "cache_bytes" in columns:
        columns["cache_budget_bytes"] = columns.pop("cache_bytes")
    if memory:
        columns |= {name: f"{value}.memory.{name}" for name in (*_MEMORY, "dense_resident")}
    return columns


def _step_columns(sources: dict[str, str]) -> str:
    sources = {"run_id": "j.run_id", "mono_ns": "j.mono_ns", **sources}
    return ", ".join(f"{sources.get(c.name, 'NULL')}::{c.type} AS {c.name}" for c in STEPS.columns)


def parse(text: bytes) -> dict[str, Any] | str:
    """A line's object, or what is wrong with it."""
    try:
        value = json.loads(text.decode(), object_pairs_hook=_object, parse_constant=_refuse)
    except UnicodeDecodeError:
        return "not UTF-8"
    except RecursionError:
        return "not JSON: nested too deeply"
    except json.JSONDecodeError as error:
        return f"not JSON: {error.msg} at character {error.pos}"
    except ValueError as error:
        return f"not JSON: {error}"
    return fault_of(value) or value


def fault_of(line: Any) -> str | None:
    """Why an object is no line of a log, in words; None for one that is."""
    if not isinstance(line, dict) or "event" not in line or "run_id" not in line:
        return "not a line of a run's log: it needs an event and a run_id"
    event = line["event"]
    fault = _head_fault(line) or _number_fault(line, _HEAD, "", need=("seq", "mono_ns"))
    if event == "token":
        return (
            fault
            or _number_fault(line, (), "", need=("index",))
            or _metrics_fault(line.get("metrics"), "metrics")
        )
    if event == "prefill":
        return fault or _list_fault(line, "batches", _metrics_fault)
    if event == "layer":
        return (
            fault or _number_fault(line, (), "", need=("step",)) or _list_fault(line, "layers", _layer_fault)
        )
    return fault or _time_fault(line.get("time")) or _record_fault(line, event)


def _head_fault(line: dict[str, Any]) -> str | None:
    schema, run_id = line.get("schema"), line["run_id"]
    if type(schema) is not int or schema not in SCHEMAS:
        return f"schema {json.dumps(schema)[:40]} is unknown; known are {' and '.join(map(str, SCHEMAS))}"
    if not isinstance(run_id, str) or not 0 < len(run_id) <= _MOST_ID_CHARS:
        return f"run_id is not 1 to {_MOST_ID_CHARS} characters"
    return None if isinstance(line["event"], str) else "event is no name"


def _list_fault(line: dict[str, Any], name: str, check: Any) -> str | None:
    items = line.get(name)
    if not isinstance(items, list):
        return f"{name} is no list"
    return next((fault for i, item in enumerate(items) if (fault := check(item, f"{name}[{i}]"))), None)


def _metrics_fault(value: Any, where: str) -> str | None:
    if not isinstance(value, dict):
        return f"{where} is no object"
    memory = value.get("memory")
    if memory is not None and not isinstance(memory, dict):
        return f"{where}.memory is no object"
    dense = (memory or {}).get("dense_resident")
    if dense is not None and type(dense) not in {int, float}:
        return f"{where}.memory.dense_resident is no number"
    return _number_fault(value, _METRICS, where, need=("tokens", "wall_ns")) or _number_fault(
        memory or {}, _MEMORY, f"{where}.memory"
    )


def _layer_fault(value: Any, where: str) -> str | None:
    if not isinstance(value, dict):
        return f"{where} is no object"
    return _number_fault(value, _LAYER, where, need=("layer",))


def _record_fault(line: dict[str, Any], event: str) -> str | None:
    """Of the events that `runs` is made of."""
    if event == "run_start" and any(
        not isinstance(line.get(name), dict | None)
        for name in ("effective", "requested", "machine", "versions")
    ):
        return "a part of run_start is no object"
    if event == "summary" and not isinstance(line.get("summary"), dict):
        return "summary is no object"
    code = line.get("exit_code")
    if event == "run_end" and not (type(code) is int and abs(code) <= _MOST_INDEX):
        return "exit_code is no number"
    return None


def _number_fault(
    values: dict[str, Any], names: tuple[str, ...], where: str, *, need: tuple[str, ...] = ()
) -> str | None:
    for name in (*need, *names):
        value = values.get(name)
        if value is None and name not in need:
            continue
        most = _MOST_INDEX if name in _INDEX else _MOST
        if type(value) not in {int, float} or not 0 <= float(value or 0) <= most:
            shown = f"{where}.{name}" if where else name
            return f"{shown} is {'missing' if value is None else f'no number from 0 to {most}'}"
    return None


def _time_fault(value: Any) -> str | None:
    return None if time_of(value) is not None else "time is no time"


def time_of(value: Any) -> dt.datetime | None:
    """A line's time; None for what is none."""
    try:
        time = dt.datetime.fromisoformat(value)
        return time.astimezone(dt.UTC) if time.tzinfo else None
    except (TypeError, ValueError, OverflowError):
        return None


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key is there twice")
    return found


def _refuse(word: str) -> NoReturn:
    raise ValueError(f"{word} is no number")
