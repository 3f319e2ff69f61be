"""Text from a model made fit for a terminal.

Owns which characters a terminal must never get. Must not know how text is laid out.
"""

from __future__ import annotations

from typing import Final

# Control characters become their pictures, C1 and what reorders text (an answer must not be able to show
# other words than it holds) the replacement character. Carriage returns only ever come before line feeds.
_TABLE: Final = str.maketrans(
    {
        **{code: chr(0x2400 + code) for code in range(0x20) if code not in b"\t\n\r"},
        0x0D: None,
        0x7F: "\u2421",
        **dict.fromkeys(range(0x80, 0xA0), "\ufffd"),
        **dict.fromkeys((*range(0x202A, 0x202F), *range(0x2066, 0x206A)), "\ufffd"),
        0x2028: "\n",
        0x2029: "\n",
        **dict.fromkeys(range(0xD800, 0xE000), "\ufffd"),
    }
)


def terminal_text(text: str) -> str:
    """The text with nothing that a terminal would obey but tabs and line breaks."""
    return text.translate(_TABLE)
