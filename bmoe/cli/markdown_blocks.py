"""Markdown cut into blocks while it is being written, so that each can be laid out once, for good.

Owns where a block ends: a paragraph, a heading, one item of a list, a table, one line of code. Must not know
how blocks look. Nothing that a later character changes is ever given as finished, within what people write:
links whose target comes later, and lists that a later blank line makes loose, are laid out as if it did not.
"""

from __future__ import annotations

import re
import textwrap
from dataclasses import dataclass
from typing import Final, Literal

_FENCE: Final = re.compile(r"^([ \t]*)(`{3,}|~{3,})[ \t]*([^`]*?)[ \t]*$")
_HEADING: Final = re.compile(r"^ {0,3}#{1,6}([ \t]|$)")
_ITEM: Final = re.compile(r"^([ \t]*)([-*+]|\d{1,9}[.)])([ \t]|$)")
# Code is coloured knowing this many lines before it.
_CODE_CONTEXT_LINES: Final = 80


@dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    """A piece that is laid out for itself.

    Attributes:
        kind: "text" is Markdown; "fence" a line that begins or ends code; "code" the last line of `source`,
            the others only being there to be coloured by.
        source: Without a line break at its end.
        language: Of code, as the fence names it.
        gap: Whether an empty row comes before it.
    """

    kind: Literal["text", "fence", "code"]
    source: str
    language: str = ""
    gap: bool = False


class MarkdownBlocks:
    """Takes text as it is made and gives blocks as they end."""

    def __init__(self) -> None:
        self._partial = ""
        self._lines: list[str] = []
        self._blank = False
        self._gap = False
        self._fence: re.Match[str] | None = None
        self._code: list[str] = []
        self._done: list[Block] = []

    def feed(self, text: str) -> list[Block]:
        """Blocks that end in this text."""
        *ended, self._partial = (self._partial + text).split("\n")
        for line in ended:
            self._line(line)
        return self._take()

    def unfinished(self) -> Block | None:
        """What there is of the block that has not ended."""
        if self._fence is not None:
            return self._code_block(self._partial) if self._partial else None
        if self._partial.lstrip().startswith(("```", "~~~")):
            return Block(kind="fence", source=self._partial.strip(), gap=self._gap or self._blank)
        if self._partial.strip() and self._lines and self._ends_before(self._partial):
            # The line in the making already is another block; the one before is shown with it.
            return self._text([*self._lines, *([""] if self._blank else []), self._partial])
        lines = [*self._lines, *([self._partial] if self._partial.strip() else [])]
        return self._text(lines) if lines else None

    def close(self) -> list[Block]:
        """The last blocks."""
        if self._partial:
            self._line(self._partial)
            self._partial = ""
        self._flush()
        return self._take()

    def _take(self) -> list[Block]:
        done, self._done = self._done, []
        return done

    def _line(self, line: str) -> None:
        if self._fence is not None:
            self._line_of_code(line, self._fence)
        elif not line.strip():
            self._blank = True
            if not (self._lines and _ITEM.match(self._lines[0])):  # an item may go on after it
                self._flush()
                self._gap, self._blank = True, False
        elif fence := _FENCE.match(line):
            self._flush()
            self._done.append(Block(kind="fence", source=line.strip(), gap=self._gap_before()))
            self._fence, self._code = fence, []
        else:
            if self._lines and self._ends_before(line):
                self._flush()
            elif self._blank and self._lines:
                self._lines.append("")
            self._blank = False
            self._lines.append(line)
            if _HEADING.match(line):
                self._flush()

    def _ends_before(self, line: str) -> bool:
        """Whether a line begins another block than the one that is being made."""
        first = _ITEM.match(self._lines[0])
        item = _ITEM.match(line)
        if first is None:
            return item is not None or bool(_HEADING.match(line))
        if item is not None:
            return len(item[1]) <= len(first[1]) + 1
        indented = line[:2].isspace()
        return bool(_HEADING.match(line)) or (self._blank and not indented)

    def _line_of_code(self, line: str, fence: re.Match[str]) -> None:
        mark = line.strip()
        if len(mark) >= len(fence[2]) and not mark.strip(fence[2][0]):
            self._done.append(Block(kind="fence", source=mark))
            self._fence = None
            return
        self._done.append(self._code_block(line))
        self._code = [*self._code, self._outdented(line)][-_CODE_CONTEXT_LINES:]

    def _code_block(self, line: str) -> Block:
        language = self._fence[3].split(" ")[0] if self._fence else ""
        return Block(kind="code", source="\n".join((*self._code, self._outdented(line))), language=language)

    def _outdented(self, line: str) -> str:
        indent = self._fence[1] if self._fence else ""
        return line.removeprefix(indent)

    def _flush(self) -> None:
        if self._lines:
            self._done.append(self._text(self._lines))
            self._lines = []
            self._gap = self._blank
        self._blank = False

    def _text(self, lines: list[str]) -> Block:
        # Blocks that continue an item after code are indented: Markdown would take that for code.
        return Block(kind="text", source=textwrap.dedent("\n".join(lines)), gap=self._gap)

    def _gap_before(self) -> bool:
        gap, self._gap = self._gap, False
        return gap
