"""Blocks of an answer as rows of a terminal.

Owns how Markdown, code and reasoning look. Must not know when anything is shown. Rows hold text and colours,
and no other control sequences: links are written out.
"""

from __future__ import annotations

import io
import re
from typing import TYPE_CHECKING, Final

from markdown_it import MarkdownIt
from rich.console import Console
from rich.markdown import Heading, Markdown
from rich.syntax import Syntax
from rich.text import Text
from rich.theme import Theme

if TYPE_CHECKING:
    from rich.console import ConsoleOptions, RenderableType, RenderResult

    from bmoe.cli.markdown_blocks import Block

_CODE_THEME: Final = "ansi_dark"  # the terminal's own colours
_PADDING: Final = re.compile(r"(\x1b\[[0-9;]*m|[ ])+$")
_THEME: Final = Theme({"markdown.code": "cyan", "markdown.link_url": "underline blue"})
# HTML is what a model writes about, not what it writes in: without this, tags would vanish.
_PARSER: Final = MarkdownIt().enable(["strikethrough", "table"]).disable(["html_block", "html_inline"])


class _Heading(Heading):
    """Bold, on the left, unframed."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        self.text.justify = "left"
        self.text.stylize("bold underline" if self.tag == "h1" else "bold")
        yield self.text


class _Markdown(Markdown):
    elements = {**Markdown.elements, "heading_open": _Heading}  # noqa: RUF012 (rich's)


class RowMaker:
    """Makes rows of a given width."""

    def __init__(self) -> None:
        self._file = io.StringIO()
        self._console = Console(
            file=self._file,
            force_terminal=True,
            highlight=False,
            markup=False,
            emoji=False,
            theme=_THEME,
        )

    def block(self, block: Block, width: int) -> list[str]:
        """A block's rows, without its gap."""
        if block.kind == "text":
            markdown = _Markdown("", code_theme=_CODE_THEME, hyperlinks=False)
            markdown.parsed = _PARSER.parse(_with_breaks(block.source))
            return self._rows(markdown, width)
        if block.kind == "fence":
            return self.plain(block.source, width, style="dim")
        syntax = Syntax("", block.language or "text", theme=_CODE_THEME, background_color="default")
        lines = syntax.highlight(block.source).split("\n", allow_blank=True)
        # pygments ends every text with a line break of its own
        number = block.source.count("\n")
        return self._rows(lines[number] if number < len(lines) else Text(), width)

    def plain(self, line: str, width: int, *, style: str = "") -> list[str]:
        """A line of text, folded."""
        return self._rows(Text(line, style=style), width)

    def _rows(self, renderable: RenderableType, width: int) -> list[str]:
        self._console.width = width
        self._file.seek(0)
        self._file.truncate()
        self._console.print(renderable, overflow="fold")
        rows = [_trimmed(row) for row in self._file.getvalue().split("\n")]
        while len(rows) > 1 and not rows[-1]:
            rows.pop()
        while len(rows) > 1 and not rows[0]:
            rows.pop(0)
        return rows


def _trimmed(row: str) -> str:
    """A row without the white space that pads it, styled or not."""
    text = _PADDING.sub("", row)
    return f"{text}\x1b[0m" if "\x1b" in text else text


def _with_breaks(source: str) -> str:
    """Keeps line breaks within a paragraph, which Markdown would make spaces: poems, addresses."""
    if "|" in source:  # a table's rows are no lines of a paragraph
        return source
    return source.replace("\n", "  \n")
