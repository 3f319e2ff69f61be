"""gpt-oss's harmony format: messages in channels.

    <|start|>assistant<|channel|>analysis<|message|>...<|end|>
    <|start|>assistant<|channel|>final<|message|>...<|return|>

Owns which channel is what: `analysis` is reasoning; `final`, an absent channel and a `commentary` preamble
are answer; a message addressed to a tool (`to=functions.x`) is a call, not an answer, and is kept out of
both. Several messages on one side are separated by an empty line. Knows no tokenizer.

A state machine of our own: the maintained parser takes token ids of one fixed vocabulary, which it downloads
(docs/dependencies.md).
"""

from __future__ import annotations

import re
from typing import Literal

from bmoe.chat.deltas import Delta

_START = "<|start|>"
_CHANNEL = "<|channel|>"
_CONSTRAIN = "<|constrain|>"
_MESSAGE = "<|message|>"
_ENDS = ("<|end|>", "<|return|>", "<|call|>")
_TAGS = (_START, _CHANNEL, _CONSTRAIN, _MESSAGE, *_ENDS)
_SPLIT = re.compile("(" + "|".join(map(re.escape, _TAGS)) + ")")
# A header is a role, a channel and a recipient; longer than this it is an answer that lacks its header.
_LONGEST_HEADER_CHARS = 256
_SEPARATOR = "\n\n"

_Sink = Literal["text", "reasoning", "call"]


def is_harmony(source: str) -> bool:
    """Whether a template declares the harmony format."""
    return _CHANNEL in source and _MESSAGE in source


def opens_final(prompt: str) -> bool:
    """Whether a prompt ends where the text of the final channel begins."""
    return prompt.endswith(f"{_CHANNEL}final{_MESSAGE}")


class HarmonyParser:
    """The channels of one output.

    Tags count as control tokens; spelled in ordinary text they count only as long as no control token was
    seen (a vocabulary that marks none), so an answer may talk about them. What breaks the format loses
    nothing: a message without channel is answer, and so is text that never becomes a message.

    Args:
        prompt: What the output continues: its last, unfinished message sets the state.
    """

    def __init__(self, prompt: str = "") -> None:
        # Where the content of the current message goes; None in a header and between messages.
        self._sink: _Sink | None = None
        self._header = ""
        # What stood before the channel tag of the current header: role and recipient; None before that tag.
        self._before_channel: str | None = None
        self._role_is_due = False
        self._held = ""
        self._saw_control = False
        self._out: dict[_Sink, list[str]] = {"text": [], "reasoning": [], "call": []}
        # Sides that have text already, and whether the current message must be set apart from it.
        self._used: set[_Sink] = set()
        self._separate = False
        start = prompt.rfind(_START)
        if start >= 0:
            self._take(prompt[start:])
            self._release()
            # What the prompt holds was said before: only the state counts.
            self._delta()
            self._used.clear()
            if self._before_channel is None:
                self._header, self._role_is_due = "", False

    def feed(self, text: str, *, control: bool) -> Delta:
        """See `OutputParser`."""
        if control:
            self._saw_control = True
            self._release()
            self._tag(text)
        else:
            self._take(text)
        return self._delta()

    def finish(self) -> Delta:
        """See `OutputParser`."""
        self._release()
        if self._sink is None and self._before_channel is None and not self._role_is_due:
            self._header_was_answer()
        return self._delta()

    def _delta(self) -> Delta:
        delta = Delta("".join(self._out["text"]), "".join(self._out["reasoning"]))
        for pieces in self._out.values():
            pieces.clear()
        return delta

    def _take(self, text: str) -> None:
        if self._saw_control:
            self._plain(text)
            return
        pieces = _SPLIT.split(self._held + text)
        self._held = ""
        for plain, tag in zip(pieces[:-1:2], pieces[1::2], strict=True):
            self._plain(plain)
            self._tag(tag)
        rest = pieces[-1]
        # All tags begin with "<", none contains a second one.
        start = rest.rfind("<", max(0, len(rest) - len(_CONSTRAIN)))
        if start >= 0 and any(tag.startswith(rest[start:]) for tag in _TAGS):
            rest, self._held = rest[:start], rest[start:]
        self._plain(rest)

    def _release(self) -> None:
        held, self._held = self._held, ""
        self._plain(held)

    def _plain(self, text: str) -> None:
        """Ordinary text: content, or part of a header."""
        if not text:
            return
        if self._sink is None:
            self._header += text
            if len(self._header) > _LONGEST_HEADER_CHARS:
                self._header_was_answer()
            return
        if self._separate:
            self._out[self._sink].append(_SEPARATOR)
            self._separate = False
        self._used.add(self._sink)
        self._out[self._sink].append(text)

    def _header_was_answer(self) -> None:
        """Text without a message around it: shown, unless it is the beginning of a header after all."""
        text, self._header = self._header, ""
        if not text.lstrip().startswith(("to=", "assistant")) or len(text) > _LONGEST_HEADER_CHARS:
            self._open("text")
            self._plain(text)

    def _tag(self, tag: str) -> None:
        if tag == _START or tag in _ENDS:
            self._sink, self._header, self._before_channel = None, "", None
            self._role_is_due = tag == _START
        elif tag == _CHANNEL:
            # Also where a message lacks its end or its start.
            self._before_channel = "" if self._sink is not None else self._header
            self._sink, self._header = None, ""
        elif tag == _MESSAGE and self._sink is None:
            self._open(self._addressee())
        elif tag == _CONSTRAIN and self._sink is None:
            self._header += " "

    def _addressee(self) -> _Sink:
        """The side that a header names: `role [to=tool]`, the channel tag, `channel [to=tool] [type]`."""
        channel = self._header.split(maxsplit=1)
        if "to=" in (self._before_channel or "") or "to=" in self._header:
            return "call"
        if self._before_channel is not None and channel[:1] == ["analysis"]:
            return "reasoning"
        return "text"

    def _open(self, sink: _Sink) -> None:
        self._sink = sink
        self._separate = sink in self._used
