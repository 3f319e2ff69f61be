"""What an output parser takes and gives.

Owns the two shapes only. Knows no tags, no channels, no templates.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Delta:
    """What one feed added. Once emitted, nothing moves from one side to the other.

    Args:
        text: Added to the answer.
        reasoning: Added to the reasoning.
    """

    text: str = ""
    reasoning: str = ""


class OutputParser(Protocol):
    """Splits a growing output into answer and reasoning; one instance per generation."""

    def feed(self, text: str, *, control: bool) -> Delta:
        """Take the next piece.

        Args:
            text: Complete characters, any number of them.
            control: This is one control token of the vocabulary and `text` its spelled name. One that is no
                tag of the model's style is dropped.
        """
        ...

    def finish(self) -> Delta:
        """The output ended: what was held back comes out in the state it was held in."""
        ...
