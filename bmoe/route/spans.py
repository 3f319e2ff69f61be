"""Spans as people type them: `10:20`, `3`, `1,4:8`, `:5`, `20:`.

Owns the grammar. Half-open and strict: what is not a span is an error, never a guess. Must not know what is
selected by them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from bmoe.io.errors import UsageError

if TYPE_CHECKING:
    from numpy.typing import NDArray

_PART: Final = re.compile(r"([0-9]{1,9})|([0-9]{1,9})?:([0-9]{1,9})?", re.ASCII)
_END: Final = 1 << 31


@dataclass(frozen=True, kw_only=True, slots=True)
class Spans:
    """A set of whole numbers.

    Attributes:
        text: As it was typed.
        ranges: Half-open (first, end) pairs, in the order typed.
    """

    text: str
    ranges: tuple[tuple[int, int], ...]

    def contains(self, values: NDArray[np.integer]) -> NDArray[np.bool_]:
        """Which of the values are in one of the ranges."""
        inside = np.zeros(values.shape, dtype=np.bool_)
        for first, end in self.ranges:
            inside |= (values >= first) & (values < end)
        return inside


def parse_spans(text: str) -> Spans:
    """Reads comma-separated numbers and half-open ranges.

    Raises:
        UsageError: Anything else, and ranges that hold nothing.
    """
    ranges = []
    for part in text.split(","):
        found = _PART.fullmatch(part)
        if found is None or part == ":":
            raise UsageError(
                f"span {part!r} is not N, FIRST:END, FIRST: or :END (whole numbers, END excluded)"
            )
        if found[1] is not None:
            first, end = int(found[1]), int(found[1]) + 1
        else:
            first, end = int(found[2] or 0), int(found[3]) if found[3] else _END
        if first >= end:
            raise UsageError(f"span {part!r} holds nothing: END is excluded and must be above FIRST")
        ranges.append((first, end))
    return Spans(text=text, ranges=tuple(ranges))
