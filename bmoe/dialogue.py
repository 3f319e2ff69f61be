"""The conversation of a session, and how a request becomes tokens.

It owns the messages and their rendering. It must not know llama.cpp's context, nor how tokens are computed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from bmoe.chat.reasoning import OutputParser, parser_for
from bmoe.chat.template import ChatTemplate, chat_template, starts_with_bos
from bmoe.chat.thinking import ThinkControl, no_think, probe
from bmoe.io.errors import BmoeError, UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from bmoe.chat.messages import Message
    from bmoe.config import GenerateRequest
    from bmoe.runtime import Model

_TEMPLATE_KEY = "tokenizer.chat_template"


@dataclass(frozen=True, kw_only=True, slots=True)
class Prepared:
    """A request as tokens.

    Attributes:
        tokens: The whole context to be computed, what may already be there included.
        messages: The conversation with the request's messages; the answer comes after them.
        parser: Tells reasoning from answer; None for raw text.
        keep_tokens: How many of the first tokens a context shift must keep.
    """

    tokens: tuple[int, ...]
    messages: tuple[Message, ...]
    parser: OutputParser | None
    keep_tokens: int


class Dialogue:
    """What was said so far, in the model's own format.

    Args:
        model: For tokens.
        metadata: The file's, which may hold a template.

    Attributes:
        messages: System, user and assistant messages, in order.
        template: None when the model has none that works.
        problem: Why a template that is there does not work; else None.
        think_control: How reasoning can be turned off; None without a template.
        last_message: What the last generation said, also for raw prompts.
    """

    def __init__(self, model: Model, metadata: Mapping[str, object]) -> None:
        self._model = model
        self.messages: tuple[Message, ...] = ()
        self.last_message: Message | None = None
        self.template: ChatTemplate | None = None
        self.problem: str | None = None
        self.think_control: ThinkControl | None = None
        source = metadata.get(_TEMPLATE_KEY)
        if not isinstance(source, str) or not source:
            return
        try:
            template = chat_template(source, bos=model.bos_text, eos=model.eos_text)
            self.think_control = probe(template)
        except BmoeError as error:
            self.problem = str(error)
        else:
            self.template = template

    def prepare(self, request: GenerateRequest, computed: Sequence[int]) -> Prepared:
        """The tokens that a request asks to have in the context.

        Args:
            request: Raw or chat.
            computed: What is in the context.

        Raises:
            UsageError: The prompt is empty, or a conversation of messages would go on with raw text.
        """
        if request.prompt is not None:
            return self._raw(request, request.prompt, computed)
        before = self.messages if request.continue_conversation else ()
        messages = (*before, *request.messages)
        if self.template is None:
            text = "\n\n".join(m.content for m in request.messages)
            raw = self._raw(request, text, computed, messages)
            return Prepared(tokens=raw.tokens, messages=messages, parser=None, keep_tokens=raw.keep_tokens)
        prompt = self._render(self.template, messages, think=request.think)
        tokens = self._tokens(prompt)
        if not tokens:
            raise UsageError("the prompt is empty")
        return Prepared(
            tokens=tuple(tokens),
            messages=messages,
            parser=parser_for(self.template, prompt=prompt, think=request.think),
            keep_tokens=self._keep(messages, tokens),
        )

    def _raw(
        self,
        request: GenerateRequest,
        prompt: str,
        computed: Sequence[int],
        messages: tuple[Message, ...] = (),
    ) -> Prepared:
        goes_on = request.continue_conversation
        if goes_on and self.messages and not messages:
            raise UsageError("the conversation has messages: it goes on with messages, not with a raw prompt")
        past = tuple(computed) if goes_on else ()
        tokens = self._model.tokenize(prompt, add_special=not past)
        if not tokens:
            raise UsageError("the prompt is empty")
        return Prepared(tokens=(*past, *tokens), messages=messages, parser=None, keep_tokens=1)

    def _render(self, template: ChatTemplate, messages: tuple[Message, ...], *, think: bool) -> str:
        if not think and self.think_control == "prefill":
            return no_think(template, messages, control=self.think_control).prompt
        return template.render(messages, think=think)

    def _tokens(self, prompt: str) -> list[int]:
        # A template that writes the BOS itself must not get a second one.
        return self._model.tokenize(prompt, add_special=not starts_with_bos(prompt, self._model.bos_text))

    def _keep(self, messages: tuple[Message, ...], tokens: Sequence[int]) -> int:
        if messages[0].role != "system" or self.template is None:
            return 1
        try:
            system = self.template.render(messages[:1], add_generation_prompt=False)
        except BmoeError:  # templates that want a user message
            return 1
        return max(1, common_prefix(self._tokens(system), tokens))


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """How many tokens two sequences start with in common."""
    n = min(len(a), len(b))
    return next((i for i in range(n) if a[i] != b[i]), n)
