"""`bmoe inspect`: one screen about a model file.

Owns the layout. Must not know how figures come about: that is bmoe.inspect.
"""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING, Any, Final

import click

if TYPE_CHECKING:
    from rich.table import Table

    from bmoe.inspect import LayerGroup, ModelSummary

_SCHEMA: Final = 1


@click.command(short_help="Show what a model file is.")
@click.argument("model")
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead of tables.")
def inspect(model: str, *, as_json: bool) -> int:
    """Show what MODEL is: shape, experts, types and bytes, without loading it.

    MODEL is a GGUF file, or the first shard.
    """
    from bmoe.inspect import inspect_model  # noqa: PLC0415 (keeps `--help` fast)

    summary = inspect_model(model)
    if as_json:
        click.echo(json.dumps(_record(summary), indent=1))
        return 0
    from bmoe.cli.tables import pairs, show  # noqa: PLC0415 (imports rich)

    show(pairs(_rows(summary)), *([_layers(summary)] if summary.groups else []))
    return 0


def _record(summary: ModelSummary) -> dict[str, Any]:
    return {"schema": _SCHEMA, "tool": "bmoe inspect", **dataclasses.asdict(summary)}


def _rows(s: ModelSummary) -> list[tuple[str, str]]:
    from bmoe.cli.tables import size  # noqa: PLC0415 (keeps `--help` fast)

    files = f" in {len(s.paths)} shards" if len(s.paths) > 1 else ""
    dense = s.layers - s.moe_layers
    rows = [
        ("file", s.paths[0]),
        ("name", s.name or "none"),
        ("architecture", s.architecture or "none"),
        ("size", size(s.file_bytes) + files),
        ("layers", f"{s.layers}: {s.moe_layers} with experts, {dense} dense"),
    ]
    if s.prediction_layers:
        rows.append(("prediction", f"{s.prediction_layers} blocks, {size(s.ignored_bytes)}, ignored"))
    if s.experts:
        rows += [
            ("experts", f"{s.experts} per layer, top {s.top_k}, {s.shared_experts} shared"),
            ("expert bytes", size(s.expert_bytes)),
        ]
    rows.append(("dense bytes", size(s.dense_bytes)))
    if s.mapped_bytes:
        rows.append(("mapped bytes", f"{size(s.mapped_bytes)}, read row by row"))
    if s.experts:
        rows += [
            ("token cycle", f"{size(s.cycle_bytes)} of experts for one token"),
            ("worst read", f"{size(s.worst_read_bytes)} for one token, in blocks of 4 KiB"),
        ]
    return [
        *rows,
        ("context", "unknown" if s.context_tokens is None else f"{s.context_tokens} tokens"),
        ("vocabulary", "unknown" if s.vocabulary is None else f"{s.vocabulary} tokens"),
        ("chat template", "yes" if s.chat_template else "no"),
    ]


def _layers(s: ModelSummary) -> Table:
    from bmoe.cli.tables import columns  # noqa: PLC0415 (imports rich)

    rows = [_group(group, index) for group in s.groups for index in range(len(group.projections))]
    return columns(("layers", "projection", "type", "bytes per expert", "expert in all"), rows)


def _group(group: LayerGroup, index: int) -> tuple[str, ...]:
    from bmoe.inspect import ranges  # noqa: PLC0415 (keeps `--help` fast)

    projection = group.projections[index]
    first = index == 0
    return (
        ranges(group.layers) if first else "",
        projection.name,
        projection.type_name,
        f"{projection.slice_bytes:,}",
        f"{group.expert_bytes:,}" if first else "",
    )
