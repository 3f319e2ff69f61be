"""Options that take several values between commas.

Owns what may be written there. Must not know what it means to a command.
"""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, Any, Final

import click

from bmoe.cli.options import Number

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

_UNITS: Final = {"": 1 << 20, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40}
_MOST_BYTES: Final = 1 << 50
_MOST_PERCENT: Final = 1000


class Sizes(click.ParamType):  # type: ignore[type-arg]  # generic only in the newest clicks
    """Sizes between commas: MiB without a unit, with KiB, MiB, GiB or TiB, or per cent of something.

    The value is a tuple of (bytes, None) and (None, per cent).
    """

    name = "sizes"

    def get_metavar(self, param: click.Parameter, ctx: click.Context | None = None) -> str:  # noqa: ARG002 (click's)
        """As help shows it."""
        return "SIZE[,SIZE...]"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[tuple[int | None, float | None], ...]:
        """The sizes, each once."""
        if isinstance(value, tuple):
            return value
        found: list[tuple[int | None, float | None]] = []
        for part in value.split(","):
            match = re.fullmatch(r"([0-9]{1,12}(?:\.[0-9]{1,6})?)\s*(%|[A-Za-z]*)", part.strip(), re.ASCII)
            unit = match[2].lower() if match else "?"
            if match is None or (unit != "%" and unit not in _UNITS):
                self.fail(f"{part!r} is not a size: N (MiB), or N with KiB, MiB, GiB, TiB or %", param, ctx)
            number = float(match[1])
            size = None if unit == "%" else round(number * _UNITS[unit])
            if (
                number == 0
                or (size is not None and size > _MOST_BYTES)
                or (unit == "%" and number > _MOST_PERCENT)
            ):
                self.fail(f"{part!r} is out of range", param, ctx)
            found.append((size, number if unit == "%" else None))
        return tuple(dict.fromkeys(found))


class Words(click.ParamType):  # type: ignore[type-arg]  # generic only in the newest clicks
    """Words between commas, each once; of a fixed choice, or any."""

    name = "words"

    def __init__(self, *choice: str) -> None:
        self._choice = choice

    def get_metavar(self, param: click.Parameter, ctx: click.Context | None = None) -> str:  # noqa: ARG002 (click's)
        """As help shows it."""
        return "NAME[,NAME...]"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[str, ...]:
        """The words."""
        if isinstance(value, tuple):
            return value
        words = tuple(dict.fromkeys(word.strip() for word in value.split(",") if word.strip()))
        for word in words:
            if self._choice and word not in self._choice:
                self.fail(f"{word!r} is not one of {', '.join(self._choice)}", param, ctx)
        return words


class Counts(click.ParamType):  # type: ignore[type-arg]  # generic only in the newest clicks
    """Whole numbers between commas, each once."""

    name = "counts"

    def __init__(self, low: int, high: int) -> None:
        self._number = Number(low, high)

    def get_metavar(self, param: click.Parameter, ctx: click.Context | None = None) -> str:  # noqa: ARG002 (click's)
        """As help shows it."""
        return "N[,N...]"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[int, ...]:
        """The numbers."""
        if isinstance(value, tuple):
            return value
        found = (self._number.convert(part.strip(), param, ctx) for part in value.split(","))
        return tuple(dict.fromkeys(n for n in found if n is not None))


class Rates(click.ParamType):  # type: ignore[type-arg]  # generic only in the newest clicks
    """GiB per second between commas, as bytes per second."""

    name = "rates"

    def get_metavar(self, param: click.Parameter, ctx: click.Context | None = None) -> str:  # noqa: ARG002 (click's)
        """As help shows it."""
        return "GIB_S[,GIB_S...]"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[int, ...]:
        """The rates."""
        if isinstance(value, tuple):
            return value
        found = []
        for part in value.split(","):
            try:
                rate = float(part)
            except ValueError:
                rate = math.nan
            if not 0.001 <= rate <= 1000:
                self.fail(f"{part!r} is not GiB/s from 0.001 to 1000", param, ctx)
            found.append(round(rate * (1 << 30)))
        return tuple(dict.fromkeys(found))


def bytes_of(sizes: Iterable[tuple[int | None, float | None]], whole_bytes: int) -> Iterator[int]:
    """The sizes that `Sizes` gave, with per cent of `whole_bytes`; each once."""
    seen: set[int] = set()
    for size, percent in sizes:
        value = size if size is not None else math.ceil(whole_bytes * (percent or 0) / 100)
        if value not in seen:
            seen.add(value)
            yield value
