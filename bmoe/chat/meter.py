"""What one render of a template may still do.

Owns the budget and the weight of values: a value counts as if its shared parts were copies, so that whatever
C code does with it later (printing, comparing, hashing) costs no more than was paid. Deterministic: units,
not seconds. Knows of jinja only its one mutable value.
"""

from __future__ import annotations

from collections.abc import ItemsView, KeysView, ValuesView
from contextvars import ContextVar
from itertools import chain
from typing import TYPE_CHECKING

from jinja2.utils import Namespace

if TYPE_CHECKING:
    from collections.abc import Iterable

# One unit is about one small operation, or this many characters copied.
CHARS_PER_UNIT = 64
_BUDGET_UNITS = 1_000_000
# A million tokens is about this long.
_TEXT_LIMIT_CHARS = 4 << 20
_DEPTH_LIMIT = 64
_INT_LIMIT_BITS = 8192


class TooMuch(Exception):  # noqa: N818 (names the finding, as jinja's own control flow does)
    """A template wants more than its budget; the message says of what."""


class Meter:
    """What one render may still do.

    Args:
        values: What the caller hands in: walked once and never again, since templates cannot change it.

    Attributes:
        units: What was charged so far.
        text_limit_chars: The longest text there may be.
    """

    def __init__(self, values: Iterable[object] = ()) -> None:
        # Weights of the containers handed in, by identity: the caller keeps them alive while it renders.
        self._known: dict[int, int] = {}
        self.units = 0
        self._emitted_chars = 0
        weight = sum(self._learn(value) for value in values)
        self._budget_units = _BUDGET_UNITS + 32 * weight
        self.text_limit_chars = _TEXT_LIMIT_CHARS + 4 * CHARS_PER_UNIT * weight

    def _learn(self, value: object) -> int:
        """The weight of a value from outside, noted for every container in it."""
        if not isinstance(value, list | tuple | dict):
            return 1 + len(value) // CHARS_PER_UNIT if isinstance(value, str) else 1
        inner = value if not isinstance(value, dict) else chain(value, value.values())
        weight = 1 + sum(self._learn(item) for item in inner)
        self._known[id(value)] = weight
        return weight

    def charge(self, units: int) -> None:
        """Take units off the budget.

        Raises:
            TooMuch: They are not there.
        """
        self.units += units
        if self.units > self._budget_units:
            raise TooMuch("does too much work")

    def check_chars(self, chars: int) -> None:
        """Refuse a text of that length.

        Raises:
            TooMuch: It is longer than a prompt can be.
        """
        if chars > self.text_limit_chars:
            raise TooMuch("builds a text that is too long")

    def emit(self, chars: int) -> None:
        """Count output, also that which is captured by blocks and macros first."""
        self._emitted_chars += chars
        self.charge(chars // CHARS_PER_UNIT)
        if self._emitted_chars > 4 * self.text_limit_chars:
            raise TooMuch("writes too much text")

    def weigh(self, value: object) -> None:
        """Charge a value with everything in it, shared parts as often as they appear."""
        if isinstance(value, str):
            self.check_chars(len(value))
            self.charge(1 + len(value) // CHARS_PER_UNIT)
            return
        stack: list[tuple[object, int]] = [(value, 0)]
        while stack:
            value, depth = stack.pop()
            known = self._known.get(id(value))
            if known is not None:
                self.charge(known)
                continue
            self.charge(1)
            if depth > _DEPTH_LIMIT:
                raise TooMuch("nests its values too deeply")
            if isinstance(value, str):
                self.weigh(value)
            elif isinstance(value, int):
                if value.bit_length() > _INT_LIMIT_BITS:
                    raise TooMuch("computes a number that is too long")
            else:
                self._push(value, depth + 1, stack)

    def _push(self, value: object, depth: int, stack: list[tuple[object, int]]) -> None:
        if isinstance(value, Namespace):
            # The only value that templates change in place; its own attribute lookup hides the mapping.
            value = object.__getattribute__(value, "_Namespace__attrs")
        if isinstance(value, dict):
            self.charge(2 * len(value))
            stack.extend((inner, depth) for inner in chain(value, value.values()))
        elif isinstance(value, list | tuple | set | frozenset | KeysView | ValuesView | ItemsView):
            self.charge(len(value))
            stack.extend((inner, depth) for inner in value)


CURRENT: ContextVar[Meter] = ContextVar("bmoe.chat.meter")
