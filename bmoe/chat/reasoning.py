"""Reasoning and answer, told apart while they stream.

Owns the choice of a parser and the one for tags; the one for gpt-oss's channels is in harmony.py. Knows no
tokenizer: the caller says which pieces are control tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from bmoe.chat.deltas import Delta, OutputParser
from bmoe.chat.harmony import HarmonyParser, is_harmony
from bmoe.chat.tags import declared_pairs

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bmoe.chat.tags import TagPair
    from bmoe.chat.template import ChatTemplate

__all__ = ["Delta", "OutputParser", "PlainParser", "TagParser", "parser_for"]


def parser_for(template: ChatTemplate | None, *, prompt: str, think: bool) -> OutputParser:
    """The parser of what a model says after a prompt.

    Args:
        template: The model's template, which declares its style; None for raw prompts.
        prompt: The whole rendered prompt: its end says whether reasoning is already open.
        think: Whether thinking was asked for. An open reasoning counts all the same: a template that always
            opens one does so without asking.
    """
    del think  # the prompt's end already says what thinking on or off made of it
    if template is None:
        return PlainParser()
    if is_harmony(template.source):
        return HarmonyParser(prompt)
    pairs = declared_pairs(template.source)
    return TagParser(pairs, prompt=prompt) if pairs else PlainParser()


class PlainParser:
    """All is answer; control tokens are dropped."""

    def feed(self, text: str, *, control: bool) -> Delta:
        """See `OutputParser`."""
        return Delta() if control else Delta(text)

    def finish(self) -> Delta:
        """See `OutputParser`; nothing was held back."""
        return Delta()


class TagParser:
    """Reasoning between an opening and a closing tag.

    An opening tag counts where an answer could begin: at the start of the output and after closed reasoning.
    Later in the answer, spelled text is text (a model may talk about tags); only a control token, which
    nobody spells by accident, opens reasoning there. Missing the closing tag, all is reasoning. White space
    around the tags belongs to them.

    Memory is one tag's length besides the white space before an answer; time is linear in what is fed.

    Args:
        pairs: The tags to know, at least one.
        prompt: What the output continues: ending in an opening tag, it starts in reasoning.
    """

    def __init__(self, pairs: Sequence[TagPair], *, prompt: str = "") -> None:
        self._pairs = tuple(pairs)
        tail = prompt.rstrip()
        # The pair that is open, or None outside reasoning.
        self._open = next((pair for pair in self._pairs if tail.endswith(pair.opens)), None)
        # Whether only white space was seen since the last tag (or the start).
        self._fresh = True
        # White space before an answer is shown only if no tag preceded it and none follows it.
        self._strip = any(tail.endswith(pair.closes) for pair in self._pairs)
        self._space: list[str] = []
        # What may yet become a tag; its first characters may come from a control token, which is never shown.
        self._held = ""
        self._held_control_chars = 0
        self._text: list[str] = []
        self._reasoning: list[str] = []

    def feed(self, text: str, *, control: bool) -> Delta:
        """See `OutputParser`."""
        if control:
            self._take_control(text)
        else:
            self._take(text)
        return self._delta()

    def finish(self) -> Delta:
        """See `OutputParser`."""
        self._release()
        if self._open is None and not self._strip:
            self._text.extend(self._space)
        self._space.clear()
        return self._delta()

    def _delta(self) -> Delta:
        delta = Delta("".join(self._text), "".join(self._reasoning))
        self._text.clear()
        self._reasoning.clear()
        return delta

    def _take_control(self, name: str) -> None:
        if self._open is not None:
            if self._open.closes.startswith(name):
                self._hold_control(name)
            return
        if any(pair.opens.startswith(name) for pair in self._pairs):
            self._hold_control(name)

    def _hold_control(self, name: str) -> None:
        """A control token begins a tag (most are all of it): what was held before it cannot."""
        self._release()
        self._held_control_chars = len(name)
        self._take(name)

    def _release(self) -> None:
        """What was held is no tag."""
        held, self._held = self._held[self._held_control_chars :], ""
        self._held_control_chars = 0
        self._emit(held)

    def _emit(self, text: str) -> None:
        """Text in the current state, for good."""
        if self._fresh:
            stripped = text.lstrip()
            if self._open is None and not self._strip:
                self._space.append(text[: len(text) - len(stripped)])
            if not stripped:
                return
            self._fresh = False
            self._text.extend(self._space)
            self._space.clear()
            text = stripped
        (self._text if self._open is None else self._reasoning).append(text)

    def _take(self, text: str) -> None:
        """Everything up to what may yet become a tag comes out; a tag switches the state."""
        rest = self._held + text
        self._held = ""
        while rest:
            if self._open is not None:
                rest = self._in_reasoning(rest, self._open)
            elif self._fresh or self._held_control_chars:
                rest = self._before_answer(rest)
            else:
                self._emit(rest)
                return

    def _in_reasoning(self, rest: str, pair: TagPair) -> str:
        """Reasoning up to the closing tag; returns what follows it, or nothing."""
        if self._fresh and not self._held_control_chars:
            # Models repeat an opening tag that the prompt already gave.
            body = rest.lstrip()
            if body.startswith(pair.opens):
                return body[len(pair.opens) :]
            if body and pair.opens.startswith(body):
                self._held = body
                return ""
        before, tag, after = rest.partition(pair.closes)
        if tag:
            self._held_control_chars = 0
            self._emit(before)
            self._switch(None)
            return after
        kept = _tag_start(rest, pair.closes)
        if not kept and self._held_control_chars:
            self._held = rest
            self._release()
            return ""
        self._emit(rest[: len(rest) - kept])
        self._held = rest[len(rest) - kept :]
        return ""

    def _before_answer(self, rest: str) -> str:
        """White space, then a tag or the answer; returns what follows a tag, or nothing."""
        body = rest.lstrip()
        if not self._held_control_chars:
            self._emit(rest[: len(rest) - len(body)])
        for pair in self._pairs:
            if body.startswith(pair.opens):
                self._held_control_chars = 0
                self._switch(pair)
                return body[len(pair.opens) :]
        self._held = body
        if not any(pair.opens.startswith(body) for pair in self._pairs):
            self._release()
        return ""

    def _switch(self, pair: TagPair | None) -> None:
        self._open = pair
        self._fresh = True
        self._strip = True
        self._space.clear()


def _tag_start(text: str, tag: str) -> int:
    """How many of the last characters of `text` may be the start of `tag`."""
    for size in range(min(len(tag) - 1, len(text)), 0, -1):
        if text.endswith(tag[:size]):
            return size
    return 0
