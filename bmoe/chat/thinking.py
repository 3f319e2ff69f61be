"""Thinking on request: which means a template offers, and the prompt that uses it.

Owns the probe and the prefill. Decides by what the template renders, never by a model's name. Knows no parser
and no session.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from bmoe.chat.harmony import is_harmony, opens_final
from bmoe.chat.messages import Message
from bmoe.chat.tags import declared_pairs
from bmoe.io.errors import BmoeError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bmoe.chat.template import ChatTemplate

ThinkControl = Literal["template", "prefill", "none"]

_PROBE = (Message(role="user", content="Hello"),)
# Stands for the reasoning of the prefilled turn while that is looked for; noncharacters, in no text.
_MARK = "\ufdd0reasoning\ufdd1"


@dataclass(frozen=True, slots=True)
class NoThink:
    """A prompt that asks for an answer without reasoning.

    Args:
        prompt: The whole rendered prompt.
        control: What was done about thinking: `template` (its own switch, or nothing to suppress), `prefill`
            (the answer is already opened behind empty reasoning), `none` (nothing: the model will think).
    """

    prompt: str
    control: ThinkControl


def probe(template: ChatTemplate) -> ThinkControl:
    """What `--no-think` can do with this template, from renders of a conversation of one message.

    - The two values of its switch give different prompts: `template`.
    - It declares no reasoning at all: `template`, for there is nothing to suppress.
    - It shows how an answer behind no or empty reasoning begins: `prefill`.
    - Otherwise it belongs to a model that thinks as it likes: `none`.

    A template that fails on the probe counts as `template`: the conversation itself will say what is wrong.
    """
    try:
        plain = template.render(_PROBE)
        if plain != template.render(_PROBE, think=False):
            return "template"
        if not is_harmony(template.source) and not declared_pairs(template.source):
            return "template"
        prefilled = _prefilled(template, _PROBE)
    except BmoeError:
        return "template"
    return "none" if prefilled is None or prefilled == plain else "prefill"


def no_think(
    template: ChatTemplate, messages: Sequence[Message], *, control: ThinkControl | None = None
) -> NoThink:
    """The prompt for an answer without thinking, and how it was brought about.

    Args:
        template: The model's template.
        messages: The conversation, ending with what is to be answered.
        control: What `probe` said, if it was asked before.

    Raises:
        UsageError: The template refuses the conversation.
        FormatError: The template fails on it.
    """
    control = probe(template) if control is None else control
    if control == "prefill":
        prompt = _prefilled(template, messages)
        if prompt is not None:
            return NoThink(prompt, "prefill")
        control = "none"
    return NoThink(template.render(messages, think=False), control)


def no_think_prompt(
    template: ChatTemplate, messages: Sequence[Message], *, control: ThinkControl | None = None
) -> str:
    """The prompt of `no_think` alone."""
    return no_think(template, messages, control=control).prompt


def _prefilled(template: ChatTemplate, messages: Sequence[Message]) -> str | None:
    """The prompt with the answer already opened; None if the template does not show how."""
    if is_harmony(template.source):
        prompt = template.render(messages, think=False, continue_final="")
        return prompt if opens_final(prompt) else None
    prompt = template.render(messages, think=False, continue_final="", continue_reasoning=_MARK)
    before, mark, after = prompt.rpartition(_MARK)
    if not mark:
        return None
    for pair in declared_pairs(template.source):
        if before.rstrip().endswith(pair.opens) and after.strip() == pair.closes:
            return before + after
    return None
