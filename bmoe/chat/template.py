"""A model's chat template: a string from its file, rendered.

Owns compiling, rendering and what goes wrong with either, as one line. Knows no tokenizer and no session;
what bounds a hostile template is in sandbox.py.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, NoReturn

import jinja2

from bmoe.chat.messages import Message
from bmoe.chat.meter import CURRENT, Meter, TooMuch
from bmoe.chat.sandbox import Environment, check_strftime
from bmoe.io.errors import BmoeError, FormatError, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from types import TracebackType

# Published templates are at most 30,000 characters long.
_SOURCE_LIMIT_CHARS = 256 << 10
# What `continue_final` cuts at: noncharacters, which no text contains.
_MARK = "\ufdd0bmoe\ufdd1"


def _local_time() -> datetime:
    return datetime.now(UTC).astimezone()


def chat_template(
    source: str, *, bos: str, eos: str, clock: Callable[[], datetime] = _local_time
) -> ChatTemplate:
    """Compile a template.

    Args:
        source: Jinja, as model files carry it.
        bos: Spelled name of the beginning-of-sequence token; empty if there is none.
        eos: Spelled name of the end-of-sequence token; empty if there is none.
        clock: What `strftime_now` reads.

    Raises:
        FormatError: It is no template, or asks for what no template here gets; names the line.
    """
    return ChatTemplate(source, bos=bos, eos=eos, clock=clock)


def starts_with_bos(rendered: str, bos: str) -> bool:
    """Whether a prompt spells the beginning-of-sequence token itself: the tokenizer must not add another."""
    return bool(bos) and rendered.startswith(bos)


class ChatTemplate:
    """One compiled template; made by `chat_template`. Immutable, and safe to use from several threads.

    Attributes:
        source: The template's text.
        bos: Spelled name of the beginning-of-sequence token.
        eos: Spelled name of the end-of-sequence token.
    """

    def __init__(self, source: str, *, bos: str, eos: str, clock: Callable[[], datetime]) -> None:
        self.source = source
        self.bos = bos
        self.eos = eos
        self._clock = clock
        if len(source) > _SOURCE_LIMIT_CHARS:
            raise FormatError(
                "too long",
                path="chat template",
                expected=f"at most {_SOURCE_LIMIT_CHARS} characters",
                got=len(source),
            )
        environment = Environment()
        token = CURRENT.set(Meter())
        try:
            code = environment.compile(environment.bounded(source))
            self._template = jinja2.Template.from_code(environment, code, environment.make_globals(None))
        except Exception as error:  # noqa: BLE001 (whatever a stranger's file provokes is one error)
            _refuse(error)
        finally:
            CURRENT.reset(token)

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        think: bool = True,
        tools: Sequence[Mapping[str, object]] | None = None,
        continue_final: str | None = None,
        continue_reasoning: str | None = None,
    ) -> str:
        """The prompt of a conversation.

        Args:
            messages: The conversation, oldest first.
            add_generation_prompt: End with what opens the assistant's turn.
            think: Templates with a switch get it under the names in use: `enable_thinking`, `thinking`, and
                `thinking_budget` 0 where thinking is off.
            tools: Descriptions of tools, in the shape that the template expects.
            continue_final: Instead of a generation prompt, end inside an assistant's answer that begins with
                this text and is to be continued.
            continue_reasoning: The reasoning before that answer; only with `continue_final`.

        Raises:
            UsageError: The template refuses this conversation, and says why.
            FormatError: The template fails, or does more than a template may; names the line.
        """
        if continue_final is not None:
            final = Message(role="assistant", content=continue_final + _MARK, reasoning=continue_reasoning)
            rendered = self._render([*messages, final], False, think, tools)
            before, mark, _ = rendered.rpartition(_MARK)
            if not mark:
                raise UsageError("the chat template does not show the answer that is to be continued")
            return before
        return self._render(messages, add_generation_prompt, think, tools)

    def _render(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool,
        think: bool,
        tools: Sequence[Mapping[str, object]] | None,
    ) -> str:
        variables: dict[str, object] = {
            "messages": [message.as_template() for message in messages],
            "tools": None if tools is None else [dict(tool) for tool in tools],
            "add_generation_prompt": add_generation_prompt,
            "bos_token": self.bos,
            "eos_token": self.eos,
            "enable_thinking": think,
            "thinking": think,
            "strftime_now": self._strftime_now,
            "raise_exception": _raise_exception,
        }
        if not think:
            variables["thinking_budget"] = 0
        pieces: list[str] = []
        chars = 0
        token = None
        try:
            meter = Meter((variables["messages"], variables["tools"]))
            token = CURRENT.set(meter)
            for piece in self._template.generate(variables):
                chars += len(piece)
                meter.check_chars(chars)
                pieces.append(piece)
        except Exception as error:  # noqa: BLE001 (whatever a stranger's file provokes is one error)
            _refuse(error)
        finally:
            if token is not None:
                CURRENT.reset(token)
        return "".join(pieces)

    def _strftime_now(self, pattern: str) -> str:
        check_strftime(pattern)
        return self._clock().strftime(pattern)


def _raise_exception(message: object) -> NoReturn:
    """What templates call to refuse a conversation."""
    raise UsageError(f"the chat template refuses this conversation: {_shown(str(message))}")


def _shown(text: str) -> str:
    """A stranger's words, fit for one line of a terminal."""
    cut = " ".join(text[:500].split())
    return "".join(character if character.isprintable() else "�" for character in cut)


def _refuse(error: Exception) -> NoReturn:
    """One clear line for whatever went wrong."""
    if isinstance(error, BmoeError):
        raise error
    line, text = _line_of(error.__traceback__), str(error)
    if isinstance(error, jinja2.TemplateSyntaxError):
        line, text = error.lineno, error.message or ""
    if isinstance(error, TooMuch):
        text = f"refused, since it {error}"
    elif isinstance(error, RecursionError):
        text = "refused, since it nests too deeply"
    raise FormatError(
        _shown(text) or type(error).__name__,
        path="chat template",
        field=None if line is None else f"line {line}",
    ) from None


def _line_of(traceback: TracebackType | None) -> int | None:
    """The template's line in a traceback that jinja has rewritten."""
    line = None
    while traceback is not None:
        if traceback.tb_frame.f_code.co_filename == "<template>":
            line = traceback.tb_lineno
        traceback = traceback.tb_next
    return line
