"""From tokens to the text that is shown: whole characters, reasoning apart, nothing past a stop string.

It owns what is held back and until when. It must not know where tokens come from.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from bmoe.runtime import TextDecoder

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bmoe.chat.reasoning import OutputParser
    from bmoe.runtime import Model


@dataclass(frozen=True, slots=True)
class Piece:
    """What became certain: more answer, more reasoning, and whether a stop string has ended the answer."""

    text: str
    reasoning: str
    stopped: bool


class StopStrings:
    """Lets text through up to the first stop string; holds back what may be the start of one.

    Args:
        stops: None of them empty.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""

    def feed(self, text: str, *, final: bool) -> tuple[str, bool]:
        """(what may be shown, whether a stop string was met, before which it ends)."""
        if not self._stops:
            return text, False
        self._held += text
        found = [at for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if found:
            shown, self._held = self._held[: min(found)], ""
            return shown, True
        keep = 0 if final else max(self._overlap(stop) for stop in self._stops)
        cut = len(self._held) - keep
        shown, self._held = self._held[:cut], self._held[cut:]
        return shown, False

    def _overlap(self, stop: str) -> int:
        """Length of the longest end of what is held that begins `stop`."""
        held = self._held
        longest = min(len(stop) - 1, len(held))
        return next((n for n in range(longest, 0, -1) if held.endswith(stop[:n])), 0)


class Answer:
    """One answer, token by token.

    Args:
        model: For the tokens' bytes.
        parser: Tells reasoning from answer; None for raw text.
        stops: Stop strings; they apply to the answer, not to the reasoning.

    Attributes:
        text, reasoning: Everything so far.
    """

    def __init__(self, model: Model, parser: OutputParser | None, stops: Sequence[str]) -> None:
        self._model = model
        self._parser = parser
        self._decoder = TextDecoder()
        self._stops = StopStrings(stops)
        self._texts: list[str] = []
        self._reasonings: list[str] = []

    @property
    def text(self) -> str:
        """The answer so far."""
        return "".join(self._texts)

    @property
    def reasoning(self) -> str:
        """The reasoning so far."""
        return "".join(self._reasonings)

    def feed(self, token: int, *, final: bool) -> Piece:
        """What becomes certain with `token`; with `final`, everything that was held back."""
        text, reasoning = self._split(token)
        if final:
            rest = self._decoder.feed(b"", final=True)
            if self._parser is None:
                text += rest
            else:
                for delta in (self._parser.feed(rest, control=False), self._parser.finish()):
                    text += delta.text
                    reasoning += delta.reasoning
        text, stopped = self._stops.feed(text, final=final)
        self._texts.append(text)
        self._reasonings.append(reasoning)
        return Piece(text, reasoning, stopped)

    def _split(self, token: int) -> tuple[str, str]:
        if self._parser is None:
            return self._decoder.feed(self._model.piece(token)), ""
        control = self._model.is_control(token)
        piece = self._model.piece(token, special=True)
        if not control:
            delta = self._parser.feed(self._decoder.feed(piece), control=False)
            return delta.text, delta.reasoning
        # A control token's name is for the parser alone: it may be the tag that opens or ends a part. A
        # character that was begun before it ends here.
        before = self._parser.feed(self._decoder.feed(b"", final=True), control=False)
        delta = self._parser.feed(piece.decode("utf-8", "replace"), control=True)
        return before.text + delta.text, before.reasoning + delta.reasoning
