"""The think tags in use, as data.

Owns the table and the question which of them a template declares. Knows nothing of streams.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TagPair:
    """How one family of models brackets its reasoning.

    Args:
        opens: What stands before the reasoning.
        closes: What stands after it.
        declared_by: Strings of which a template contains one if its model uses this pair.
    """

    opens: str
    closes: str
    declared_by: tuple[str, ...]


def _pair(opens: str, closes: str, *declared_by: str) -> TagPair:
    return TagPair(opens, closes, declared_by or (opens, closes))


TAG_PAIRS: tuple[TagPair, ...] = (
    _pair("<think>", "</think>"),  # DeepSeek R1, Qwen3, QwQ, GLM 4.5, LFM2.5, Kimi K2, MiniMax, Nemotron, ...
    _pair("<thinking>", "</thinking>"),
    _pair("<thought>", "</thought>"),  # EXAONE Deep
    _pair("<reasoning>", "</reasoning>"),
    _pair("<seed:think>", "</seed:think>"),  # Seed-OSS
    _pair("<longcat_think>", "</longcat_think>"),
    _pair("[THINK]", "[/THINK]"),  # Magistral
    _pair("<|START_THINKING|>", "<|END_THINKING|>"),  # Command A Reasoning
    _pair("<|inner_prefix|>", "<|inner_suffix|>"),  # Apertus
    _pair("◁think▷", "◁/think▷"),  # Kimi-VL
    # Gemma 4: one control token opens any channel, another closes it; only the thought channel is reasoning.
    _pair("<|channel>thought", "<channel|>", "<|channel>"),
    # Granite 3.2 and 3.3 spell it in words, and only when asked to think.
    _pair("Here is my thought process:", "Here is my response:"),
)


def declared_pairs(source: str) -> tuple[TagPair, ...]:
    """The pairs whose marks a template's source contains, in the order of the table."""
    return tuple(pair for pair in TAG_PAIRS if any(mark in source for mark in pair.declared_by))
