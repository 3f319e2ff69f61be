"""A few rows at the bottom of a terminal that change in place, below text that scrolls away for good.

Owns the cursor and which rows are written again. Must not know what rows say.

Only rows that differ are written, in one write: nothing flickers. Rows that were given for good are never
touched again: nothing appears twice, however far it scrolls.
"""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING, Final

from rich.cells import cell_len

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_STYLE: Final = re.compile(r"\x1b\[[0-9;]*m")
_HIDE_CURSOR: Final = "\x1b[?25l"
_SHOW_CURSOR: Final = "\x1b[?25h"


class LiveArea:
    """The rows. The cursor is at the start of a row when it is made, and again after `close`.

    Args:
        fd: The terminal.
        size: Its columns and rows; tests give their own.
    """

    def __init__(self, fd: int, *, size: Callable[[], tuple[int, int]] | None = None) -> None:
        self._fd = fd
        self._size = size or (lambda: terminal_size(fd))
        self._shown: list[str] = [""]
        self._columns = self._size()[0]
        self._hidden = False

    @property
    def width(self) -> int:
        """Cells for text: one less than there are, so that no row ever wraps by itself."""
        return max(1, self._size()[0] - 1)

    @property
    def height(self) -> int:
        """How many rows may be live."""
        return max(1, self._size()[1] - 1)

    def update(self, live: Sequence[str], *, above: Sequence[str] = ()) -> None:
        """Shows rows.

        Args:
            live: Rows that may change; all but the last `height` are left out.
            above: Rows for good, which come before them.
        """
        rows = [*above, *(list(live)[-self.height :] or [""])]
        out = [] if self._hidden else [_HIDE_CURSOR]
        self._hidden = True
        columns = self._size()[0]
        old = self._shown
        if columns == self._columns:
            same = _common_prefix(old, rows)
        else:  # the terminal has wrapped what is there in its own way
            up = sum(max(1, -(-cells(row) // columns)) for row in old) - 1
            out.append(f"\r{_up(up)}\x1b[J")
            old, same, self._columns = [""], 0, columns
        if same < len(rows) or len(old) != len(rows):
            start = min(same, len(rows) - 1, len(old) - 1)
            out.append(f"\r{_up(len(old) - 1 - start)}")
            for number in range(start, len(rows)):
                if number > start:
                    out.append("\r\n")
                if number >= len(old) or rows[number] != old[number]:
                    out.append(f"\x1b[2K{rows[number]}")
            if len(rows) < len(old):
                out.append(_clear_below(rows))
        self._shown = rows[len(above) :]
        _write(self._fd, "".join(out))

    def close(self, above: Sequence[str] = ()) -> None:
        """Takes the live rows away and leaves the cursor below what stays."""
        self.update([""], above=above)
        self._hidden = False
        _write(self._fd, _SHOW_CURSOR)


def terminal_size(fd: int) -> tuple[int, int]:
    """Columns and rows; 80 and 24 where the terminal does not say."""
    try:
        columns, rows = os.get_terminal_size(fd)
    except OSError:
        columns, rows = 0, 0
    return columns or 80, rows or 24


def cells(row: str) -> int:
    """How wide a row is, styles not counted."""
    return cell_len(_STYLE.sub("", row))


def _common_prefix(a: Sequence[str], b: Sequence[str]) -> int:
    n = min(len(a), len(b))
    return next((i for i in range(n) if a[i] != b[i]), n)


def _up(rows: int) -> str:
    return f"\x1b[{rows}A" if rows else ""


def _clear_below(rows: Sequence[str]) -> str:
    """From the last row: clears all below it and comes back to its end."""
    return "\r\n\x1b[J\x1b[A\r" + (f"\x1b[{n}C" if (n := cells(rows[-1])) else "")


def _write(fd: int, text: str) -> None:
    rest = memoryview(text.encode("utf-8", "replace"))
    while rest:
        rest = rest[os.write(fd, rest) :]
