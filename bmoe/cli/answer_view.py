"""An answer on a terminal while it is made: reasoning dimmed, then the answer, then a line of figures.

Owns what of an answer is final, and when it is drawn. Must not know sessions or terminals' control sequences.
"""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING, Final

from bmoe.cli.live_area import cells
from bmoe.cli.markdown_blocks import MarkdownBlocks
from bmoe.cli.terminal_text import terminal_text

if TYPE_CHECKING:
    from collections.abc import Callable

    from bmoe.cli.live_area import LiveArea
    from bmoe.cli.markdown_blocks import Block
    from bmoe.cli.markdown_rows import RowMaker
    from bmoe.records import PrefillProgress, StepMetrics, TokenEvent

_REASONING_STYLE: Final = "dim"
_DRAW_EVERY_S: Final = 0.03
# Compute threads need the processors more: drawing gets at most a tenth of one.
_DRAW_SHARE: Final = 0.1
_DRAW_LATEST_S: Final = 0.2
_RATE_WINDOW: Final = 16
_MIB: Final = 1 << 20


class AnswerFigures:
    """The figures of the line below an answer.

    Args:
        slots_total: Expert slots under the budget; None when nothing is streamed.
        context_used: Tokens in the context before; None where that is not known.
        context_tokens: Its size.
    """

    def __init__(self, *, slots_total: int | None, context_used: int, context_tokens: int) -> None:
        self._slots_total = slots_total
        self._used = context_used
        self._size = context_tokens
        self._last: deque[StepMetrics] = deque(maxlen=_RATE_WINDOW)
        self._tokens = self._lookups = self._hits = self._read_bytes = 0
        self._streamed = False

    def prompt(self, tokens: int) -> None:
        """Tokens of the prompt that are computed."""
        self._used += tokens

    def add(self, metrics: StepMetrics) -> None:
        """One token."""
        self._last.append(metrics)
        self._tokens += 1
        self._used += 1
        if metrics.lookups is not None:
            self._streamed = True
            self._lookups += metrics.lookups
            self._hits += metrics.hits or 0
            self._read_bytes += metrics.read_bytes or 0

    def line(self) -> str:
        """In words; empty before the first token."""
        if not self._last:
            return ""
        seconds = sum(m.wall_ns + (m.overhead_ns or 0) for m in self._last) / 1e9
        parts = [f"{len(self._last) / seconds:.1f} tok/s"] if seconds else []
        if self._streamed:
            if self._lookups:
                parts.append(f"{100 * self._hits / self._lookups:.0f} % hits")
            parts.append(f"{self._read_bytes / self._tokens / _MIB:.1f} MiB/token")
            if self._slots_total and (used := self._last[-1].slots_used) is not None:
                parts.append(f"cache {min(100, 100 * used // self._slots_total)} % full")
        parts.append(f"context {self._used} of {self._size}")
        return " · ".join(parts)


class AnswerView:
    """One answer. `end` it, whatever happens.

    Args:
        area: Where it is drawn.
        maker: How it looks.
        markdown: Whether the answer is Markdown; otherwise it is shown as it is.
        figures: For the line below.
        clock: The time in seconds.
    """

    def __init__(
        self,
        area: LiveArea,
        maker: RowMaker,
        *,
        markdown: bool,
        figures: AnswerFigures,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._area = area
        self._maker = maker
        self._markdown = markdown
        self._figures = figures
        self._clock = clock
        self._next_draw = 0.0
        self._blocks = MarkdownBlocks()
        self._line = ""
        self._reasoning: str | None = None
        self._answering = False
        self._above: list[str] = []
        self._any = False
        self._changed = False
        self._status = "reading the prompt"

    def prefill(self, progress: PrefillProgress) -> None:
        """A part of the prompt is computed."""
        self._status = f"reading the prompt: {progress.done_tokens} of {progress.total_tokens} tokens"
        if progress.done_tokens == progress.total_tokens:
            self._figures.prompt(progress.total_tokens)
        self.draw()

    def token(self, event: TokenEvent) -> None:
        """A token was made."""
        self._figures.add(event.metrics)
        self._status = self._figures.line()
        if event.reasoning:
            self._reason(terminal_text(event.reasoning))
        if event.text:
            self._answer(terminal_text(event.text))
        self._changed = True
        self._draw_if_due()

    def idle(self) -> float | None:
        """Nothing else is to be done: shows what has changed, or says in how many seconds it will."""
        if not self._changed:
            return None
        self._draw_if_due()
        return max(0.001, self._next_draw - self._clock()) if self._changed else None

    def _draw_if_due(self) -> None:
        if self._clock() >= self._next_draw:
            self.draw()

    def draw(self) -> None:
        """Shows what has changed."""
        start = self._clock()
        self._changed = False
        width = self._area.width
        live = [*self._live(width)[-max(1, self._area.height - 2) :], *self._status_rows(width)]
        self._area.update(live, above=self._above)
        self._above = []
        end = self._clock()
        self._next_draw = end + max(_DRAW_EVERY_S, min(_DRAW_LATEST_S, (end - start) / _DRAW_SHARE))

    def end(self, *notes: str) -> str:
        """Everything is final; takes the line of figures away and returns it.

        Args:
            notes: Dimmed lines below the answer.
        """
        width = self._area.width
        if self._reasoning:
            self._give(self._maker.plain(self._reasoning, width, style=_REASONING_STYLE))
        for block in self._blocks.close():
            self._give_block(block, width)
        if self._line:
            self._give(self._maker.plain(self._line, width))
        for note in notes:
            self._give(self._maker.plain(terminal_text(note), width, style="dim italic"))
        self._area.close([*self._above, ""])
        self._above = []
        return self._figures.line()

    def _reason(self, text: str) -> None:
        *lines, self._reasoning = ((self._reasoning or "") + text).split("\n")
        if not self._any:  # models like to begin with line breaks
            while lines and not lines[0].strip():
                lines.pop(0)
        for line in lines:
            self._give(self._maker.plain(line, self._area.width, style=_REASONING_STYLE))

    def _answer(self, text: str) -> None:
        width = self._area.width
        if not self._answering:
            text = text.lstrip("\n")
            if not text:
                return
            self._answering = True
            if self._reasoning:
                self._give(self._maker.plain(self._reasoning, width, style=_REASONING_STYLE))
            if self._reasoning is not None and self._any:
                self._give([""])
            self._reasoning = None
        if self._markdown:
            for block in self._blocks.feed(text):
                self._give_block(block, width)
            return
        *lines, self._line = (self._line + text).split("\n")
        for line in lines:
            self._give(self._maker.plain(line, width))

    def _give_block(self, block: Block, width: int) -> None:
        if block.gap and self._any:
            self._give([""])
        self._give(self._maker.block(block, width))

    def _give(self, rows: list[str]) -> None:
        self._any = True
        self._above += rows

    def _live(self, width: int) -> list[str]:
        if self._reasoning:
            return self._maker.plain(self._reasoning, width, style=_REASONING_STYLE)
        if self._line:
            return self._maker.plain(self._line, width)
        if (block := self._blocks.unfinished()) is not None:
            return [*([""] if block.gap and self._any else []), *self._maker.block(block, width)]
        return []

    def _status_rows(self, width: int) -> list[str]:
        status = self._status
        while cells(status) > width:
            status = status[:-1]
        return ["", f"\x1b[2m{status}\x1b[0m"] if self._any or self._status else []
