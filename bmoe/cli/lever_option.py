"""An option that changes one thing of a configuration, for comparisons: `--lever NAME=VALUE[,NAME=VALUE]`.

Owns the levers' spelling. Must not know what is compared.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import click

if TYPE_CHECKING:
    from collections.abc import Callable

_MIB: Final = 1 << 20
LEVERS: Final[dict[str, tuple[str, Callable[[str], Any] | bool]]] = {
    "drop-cold-experts": ("drop_cold_experts", float),
    "drop-no-renorm": ("drop_renormalise", False),
    "drop-in-prefill": ("drop_in_prefill", True),
    "deterministic-cache": ("deterministic_cache", True),
    "expert-substitute": ("expert_substitute", float),
    "route-ahead": ("route_ahead", int),
    "n-expert-used": ("n_expert_used", int),
    "prefetch": ("prefetch_layers", int),
    "predict-prefetch": ("predict_prefetch", True),
    "dense-weights": ("dense_weights", str),
    "policy": ("policy", str),
    "cache-mb": ("cache_bytes", lambda text: int(text) * _MIB),
}
"""Names as in `bmoe decode`; the configuration's field, and what reads a value, or the value itself."""


class Levers(click.ParamType):  # type: ignore[type-arg]  # generic only in the newest clicks
    """One or more levers between commas. The value is (what was typed, changes to the configuration)."""

    name = "levers"

    def get_metavar(self, param: click.Parameter, ctx: click.Context | None = None) -> str:  # noqa: ARG002 (click's)
        """As help shows it."""
        return "NAME=VALUE[,…]"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[str, dict[str, Any]]:
        """The changes."""
        if isinstance(value, tuple):
            return value
        changes: dict[str, Any] = {}
        for part in value.split(","):
            name, equals, word = part.strip().partition("=")
            if name not in LEVERS:
                self.fail(f"{part!r}: {name!r} is not one of {', '.join(LEVERS)}", param, ctx)
            field, kind = LEVERS[name]
            if not callable(kind):
                if equals:
                    self.fail(f"{part!r}: {name} takes no value", param, ctx)
                changes[field] = kind
                continue
            try:
                changes[field] = kind(word)
            except ValueError:
                self.fail(f"{part!r}: {word!r} is not a value for {name}", param, ctx)
        return value, changes
