"""The tables of the log database: columns, types and what each holds.

Owns the format, its version, and the field dictionary of docs/logs.md. Must not know where rows come from.

Unmeasured is NULL, never 0. A column is added, never renamed: queries outlive the version they were
written for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

VERSION: Final = 1


class Column(NamedTuple):
    """One column; `meaning` is its line in the field dictionary."""

    name: str
    type: str
    meaning: str


class Table(NamedTuple):
    """One table; `key` says which rows are the same."""

    name: str
    meaning: str
    key: tuple[str, ...]
    columns: tuple[Column, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """Of the columns, in order."""
        return tuple(column.name for column in self.columns)

    def ddl(self) -> str:
        """The statement that creates it where there is none."""
        columns = ", ".join(f'"{column.name}" {column.type}' for column in self.columns)
        return f"CREATE TABLE IF NOT EXISTS {self.name} ({columns})"


def _columns(*lines: tuple[str, str, str]) -> tuple[Column, ...]:
    return tuple(Column(*line) for line in lines)


def _same(type_: str, lines: Sequence[tuple[str, str]]) -> tuple[Column, ...]:
    return tuple(Column(name, type_, meaning) for name, meaning in lines)


RUNS: Final = Table(
    "runs",
    "a run: one `run_id` of a JSON log, or one session of a CSV",
    ("run_id",),
    _columns(
        ("run_id", "VARCHAR PRIMARY KEY", "the log's; of a CSV a digest of its preamble and first row"),
        ("source", "VARCHAR", "`bmoe-json`, `bmoe-csv` (the reference's v2) or `csv-v1`"),
        ("file", "VARCHAR", "where it was seen first"),
        ("schema", "INTEGER", "version of the lines"),
        ("started_at", "TIMESTAMPTZ", "time of `run_start`"),
        ("model_name", "VARCHAR", "`general.name`"),
        ("model_path", "VARCHAR", "as given"),
        ("architecture", "VARCHAR", "`general.architecture`"),
        ("mode", "VARCHAR", "`streaming` or `resident`"),
        ("io_backend", "VARCHAR", "`uring` or `threads`"),
        ("policy", "VARCHAR", "of the cache"),
        ("cache_bytes", "BIGINT", "budget at the start"),
        ("threads", "INTEGER", "compute threads"),
        ("context_tokens", "INTEGER", "KV cells"),
        ("ubatch_tokens", "INTEGER", "most tokens computed at once"),
        ("overlap", "BOOLEAN", "experts computed as they arrive"),
        ("traced", "BOOLEAN", "whether tracing slowed it; how is in `config`"),
        ("config", "JSON", "`effective` of `run_start`, or the CSV preamble's key=value pairs"),
        ("requested", "JSON", "`requested` of `run_start`"),
        ("machine", "JSON", "where it ran"),
        ("versions", "JSON", "of Python and packages"),
        ("prompt_sha256", "VARCHAR", "digest of the prompt"),
        ("exit_code", "INTEGER", "of `run_end`"),
        ("complete", "BOOLEAN", "`run_end` was seen; of a CSV, a summary after the last row"),
        ("n_tokens", "INTEGER", "decode rows in `steps`"),
        ("decode_ns", "BIGINT", "their `wall_ns` summed up"),
        ("decode_tokens_per_s", "DOUBLE", "the one over the other"),
        ("summary", "JSON", "the last turn's, as logged"),
    ),
)

STEPS: Final = Table(
    "steps",
    "one llama_decode: a generated token, or a batch of the prompt",
    ("run_id", "turn", "phase", "step"),
    (
        *_columns(
            ("run_id", "VARCHAR", "of `runs`"),
            ("turn", "INTEGER", "generation in the run, from 0"),
            ("phase", "VARCHAR", "`prefill` or `decode`"),
            ("step", "INTEGER", "index in its phase and turn, from 0"),
            ("token", "INTEGER", "id of the generated token"),
            ("tokens", "INTEGER", "tokens computed"),
        ),
        *_same(
            "BIGINT",
            (
                ("wall_ns", "llama_decode; `stall_ns + hook_ns + compute_ns`"),
                ("compute_ns", "what remains of it"),
                ("stall_ns", "compute threads blocked on reads, summed over threads, divided by threads"),
                ("hook_ns", "announcing the routing, on the critical path; of a CSV `mgmt_ms`"),
                ("experts_ns", "in expert matmuls, waiting included"),
                ("loop_ns", "event loop busy with streaming"),
                ("overhead_ns", "between the previous llama_decode and this one"),
                ("cpu_ns", "CPU time of the process"),
                ("lookups", "distinct experts looked up"),
                ("hits", "of those, found in the cache"),
                ("reads", "reads started"),
                ("read_bytes", "of their aligned windows"),
                ("speculative_bytes", "of those, read before they were asked for"),
                ("evictions", "slices given up"),
                ("rereads", "reads of slices that had been read before"),
                ("slots_used", "at the end"),
                ("dropped", "experts left out by dropping"),
                ("minor_faults", "page faults served without reading"),
                ("major_faults", "page faults that had to read"),
                ("submit_latency_ns", "mean, routing known to first reads handed over"),
                ("read_latency_ns", "mean, read handed over to done"),
                ("io_busy_ns", "with at least one read in flight"),
                ("io_ns", "CSV `io_ms`: in read calls, summed over lanes; may exceed `wall_ns`"),
                ("rss_bytes", "resident memory of the process; memory is sampled now and then"),
                ("rss_anon_bytes", "of that, anonymous"),
                ("rss_file_bytes", "of that, of files"),
                ("swap_bytes", "of the process, swapped out"),
                ("mem_available_bytes", "MemAvailable of the machine"),
                ("mem_free_bytes", "MemFree of the machine"),
                ("swap_free_bytes", "SwapFree of the machine"),
                ("cache_budget_bytes", "of the expert cache, at the end"),
            ),
        ),
        *_columns(
            ("cache_hit_ratio_cumulative", "DOUBLE", "CSV `cache_hit_pct` / 100: since the session opened"),
            ("dense_resident", "DOUBLE", "share of the other weights found in memory"),
            ("mono_ns", "BIGINT", "CLOCK_MONOTONIC of the line"),
        ),
    ),
)

LAYERS: Final = Table(
    "layers",
    "one layer of one decode step, where the run logged layers",
    ("run_id", "turn", "step", "layer"),
    (
        *_columns(
            ("run_id", "VARCHAR", "of `runs`"),
            ("turn", "INTEGER", "of `steps`"),
            ("step", "INTEGER", "of `steps`, phase `decode`"),
            ("layer", "INTEGER", "the file's `blk.N`"),
        ),
        *_same(
            "BIGINT",
            (
                ("lookups", "distinct experts looked up"),
                ("hits", "of those, found in the cache"),
                ("read_bytes", "of slices asked for"),
                ("stall_ns", "waiting for them, per thread"),
                ("experts_ns", "in the layer's expert matmuls, waiting included"),
            ),
        ),
    ),
)

EVENTS: Final = Table(
    "events",
    "every other line, whole",
    ("run_id", "seq"),
    _columns(
        ("run_id", "VARCHAR", "of `runs`"),
        ("seq", "INTEGER", "number of the line in its run; of a CSV's summaries the turn"),
        ("event", "VARCHAR", "its name; what a CSV calls `# summary` is `summary`"),
        ("time", "TIMESTAMPTZ", "wall time"),
        ("mono_ns", "BIGINT", "CLOCK_MONOTONIC"),
        ("body", "JSON", "the line"),
    ),
)

REJECTS: Final = Table(
    "rejects",
    "a line that is none of the above, and why",
    ("file", "line", "byte_offset", "text"),
    _columns(
        ("file", "VARCHAR", "where it is"),
        ("line", "BIGINT", "from 1"),
        ("byte_offset", "BIGINT", "where it begins, in the unpacked file"),
        ("reason", "VARCHAR", "what is wrong"),
        ("text", "VARCHAR", "its first 500 characters"),
    ),
)

FILES: Final = Table(
    "files",
    "how far each file was read, so that it is continued there",
    ("file",),
    _columns(
        ("file", "VARCHAR PRIMARY KEY", "absolute, links resolved"),
        ("packing", "VARCHAR", "`plain`, `gzip` or `zstd`"),
        ("inode", "BIGINT", "when it was read last"),
        ("size_bytes", "BIGINT", "likewise; -1 if it was not read to its end"),
        ("mtime_ns", "BIGINT", "likewise"),
        ("head_digest", "VARCHAR", "of its first bytes, which tells whether it is still the same file"),
        ("head_bytes", "BIGINT", "how many"),
        ("bytes_done", "BIGINT", "read, in whole lines; unpacked"),
        ("lines_done", "BIGINT", "in those"),
        ("duplicates", "BIGINT", "of those, lines that were in the database already"),
        ("rejected", "BIGINT", "of those, in `rejects`"),
        ("finished", "BOOLEAN", "nothing was left, not even the beginning of a line"),
        ("state", "JSON", "what a CSV's further rows belong to"),
    ),
)

TABLES: Final = (RUNS, STEPS, LAYERS, EVENTS, REJECTS, FILES)


def statements() -> list[str]:
    """What makes an empty database one of ours."""
    return [
        *(table.ddl() for table in TABLES),
        "CREATE TABLE IF NOT EXISTS format (version INTEGER)",
        f"INSERT INTO format SELECT {VERSION} WHERE NOT EXISTS (FROM format)",
    ]


def dictionary() -> str:
    """The field dictionary, as Markdown."""
    parts = []
    for table in TABLES:
        rows = (
            f"| `{c.name}` | {c.type.removesuffix(' PRIMARY KEY')} | {c.meaning} |" for c in table.columns
        )
        key = ", ".join(f"`{name}`" for name in table.key)
        parts.append(
            f"### `{table.name}`: {table.meaning}\n\nKey: {key}.\n\n| column | type | what |\n|---|---|---|\n"
            + "\n".join(rows)
        )
    return "\n\n".join(parts) + "\n"
