"""One message of a conversation.

Owns the roles, the validation and the spelling that templates read. Knows neither templates nor files.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from bmoe.io.errors import UsageError

Role = Literal["system", "developer", "user", "assistant", "tool"]
_DEPTH_LIMIT = 48
ROLES: tuple[str, ...] = get_args(Role)


@dataclass(frozen=True, kw_only=True, slots=True)
class Message:
    """What one side said.

    Args:
        role: `system`, `developer`, `user`, `assistant` or `tool`.
        content: The text; empty is allowed (an assistant that only called a tool).
        reasoning: What the assistant thought before `content`; only its own messages have it.
        tool_calls: Calls that the assistant made, in the shape the template expects, passed through as is.
        name: Who speaks, or which tool answers, for templates that show it.
        tool_call_id: Which call a `tool` message answers.

    Raises:
        UsageError: An unknown role, a value of the wrong type, or reasoning of someone else.
    """

    role: str
    content: str
    reasoning: str | None = None
    tool_calls: tuple[Mapping[str, object], ...] = ()
    name: str | None = None
    tool_call_id: str | None = None

    def __post_init__(self) -> None:
        """Refuse what no template could render."""
        if self.role not in ROLES:
            raise UsageError(f"a message has role {self.role!r}, expected one of {', '.join(ROLES)}")
        for field in ("content", "reasoning", "name", "tool_call_id"):
            value: object = getattr(self, field)
            if not isinstance(value, str) and (field == "content" or value is not None):
                raise UsageError(f"the {field} of a message has type {type(value).__name__}, expected text")
        if self.role != "assistant" and (self.reasoning is not None or self.tool_calls):
            kind = "tool calls" if self.reasoning is None else "reasoning"
            raise UsageError(f"a message of role {self.role} carries {kind}; only the assistant's do")
        if not all(isinstance(call, Mapping) for call in self.tool_calls):
            raise UsageError("a tool call of a message is not a mapping")
        _plain(self.tool_calls)

    def as_template(self) -> dict[str, object]:
        """The mapping that templates read; absent fields are absent keys.

        Reasoning appears under both names in use: `reasoning_content` (Qwen, DeepSeek, GLM) and `thinking`
        (gpt-oss).
        """
        message: dict[str, object] = {"role": self.role, "content": self.content}
        if self.reasoning is not None:
            message |= {"reasoning_content": self.reasoning, "thinking": self.reasoning}
        if self.tool_calls:
            message["tool_calls"] = [_plain(call) for call in self.tool_calls]
        if self.name is not None:
            message["name"] = self.name
        if self.tool_call_id is not None:
            message["tool_call_id"] = self.tool_call_id
        return message


def _plain(value: object, depth: int = 0) -> object:
    """The same value in the types that JSON and templates know."""
    if depth > _DEPTH_LIMIT:
        raise UsageError("a tool call of a message nests its values too deeply")
    if isinstance(value, Mapping):
        return {str(key): _plain(inner, depth + 1) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner, depth + 1) for inner in value]
    return value
