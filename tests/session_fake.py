"""A session that converses by a script, with the real one's conduct: conversation, cancel, errors.

`python -m tests.session_fake NAME ARGUMENT…` is the command line over the session of that name in `SESSIONS`,
for tests that need a terminal or a process of their own.
"""

from __future__ import annotations

import asyncio
import dataclasses
import sys
from typing import TYPE_CHECKING, Any

from bmoe.chat.messages import Message
from bmoe.io.errors import Cancelled, UsageError
from bmoe.records import CacheState, LoadProgress, PrefillProgress, TokenEvent
from tests.fakes import EFFECTIVE, LOAD, MIB, RESIDENT, STEP, SUMMARY

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Sequence

    from bmoe.config import GenerateRequest, SessionConfig
    from bmoe.records import CacheResize, EffectiveConfig, LoadReport, RunSummary, StepMetrics

CHAT = dataclasses.replace(EFFECTIVE, chat_template=True, think_control="template")

WAIT = object()
"""In a script: wait for `cancel`."""


@dataclasses.dataclass(frozen=True)
class Thought:
    """In a script: a token of reasoning."""

    text: str


class ScriptedSession:
    """Stands where `Session` stands: `open` gives this very object.

    Args:
        turns: What each generation does, in order, the last one again and again: yields a text or a
            `Thought` as a token, raises an error, calls a function with the session, or does `WAIT`.
        effective: What runs.
        opening: An error that `open` raises, or a function it awaits.
    """

    def __init__(
        self,
        *turns: Sequence[object],
        effective: EffectiveConfig = CHAT,
        opening: BaseException | Callable[[], Any] | None = None,
    ) -> None:
        self.effective = effective
        self.load_report: LoadReport = LOAD
        self.summary: RunSummary | None = None
        self.prefill_metrics: list[StepMetrics] = []
        self.conversation: tuple[Message, ...] = ()
        self.last_message: Message | None = None
        self.requests: list[GenerateRequest] = []
        self.closed = 0
        self.on_warning: Callable[[str], None] = lambda _: None
        self.on_resize: Callable[[CacheResize], None] = lambda _: None
        self.cache_bytes = 500 * MIB
        self._turns = turns or (("Hello", ", ", "world"),)
        self._opening = opening
        self._busy = False
        self._cancelled = False
        self._wake: asyncio.Event
        self._loop: asyncio.AbstractEventLoop

    async def open(
        self,
        config: SessionConfig,
        *,
        on_effective: Callable[[EffectiveConfig], None] | None = None,
        on_progress: Callable[[LoadProgress], None] | None = None,
        on_warning: Callable[[str], None] | None = None,
        on_resize: Callable[[CacheResize], None] | None = None,
    ) -> ScriptedSession:
        del config
        self.on_resize = on_resize or self.on_resize
        self._loop, self._wake = asyncio.get_running_loop(), asyncio.Event()
        self.on_warning = on_warning or self.on_warning
        if on_effective is not None:
            on_effective(self.effective)
        if on_progress is not None:
            on_progress(LoadProgress(done_bytes=MIB, total_bytes=2 * MIB))
        if isinstance(self._opening, BaseException):
            raise self._opening
        if self._opening is not None:
            await self._opening()
        return self

    async def generate(
        self, request: GenerateRequest, *, on_prefill: Callable[[PrefillProgress], None] | None = None
    ) -> AsyncGenerator[TokenEvent, None]:
        assert not self._busy
        self._busy, self._cancelled = True, False
        self._wake.clear()
        self.requests.append(request)
        turn = self._turns[min(len(self.requests), len(self._turns)) - 1]
        text = reasoning = ""
        made = 0
        end: Any = "error"
        try:
            self.prefill_metrics[:] = [dataclasses.replace(STEP, tokens=12, overhead_ns=None)]
            if on_prefill is not None:
                on_prefill(PrefillProgress(done_tokens=12, total_tokens=12))
            for step in turn:
                if step is WAIT:
                    await self._wake.wait()
                elif isinstance(step, BaseException):
                    raise step
                elif callable(step):
                    step(self)
                if self._cancelled:
                    end = "cancelled"
                    raise Cancelled("cancelled")
                if isinstance(step, str | Thought):
                    thought = step.text if isinstance(step, Thought) else ""
                    said = step if isinstance(step, str) else ""
                    text, reasoning = text + said, reasoning + thought
                    yield TokenEvent(index=made, token=100 + made, text=said, reasoning=thought, metrics=STEP)
                    made += 1
                    await asyncio.sleep(0)
            end = "eog"
            self.last_message = Message(role="assistant", content=text, reasoning=reasoning or None)
            if request.messages:
                before = self.conversation if request.continue_conversation else ()
                self.conversation = (*before, *request.messages, self.last_message)
        finally:
            self._busy = False
            self.summary = dataclasses.replace(
                SUMMARY, end=end, tokens=made, turn=len(self.requests) - 1, context_tokens_used=12 + made
            )

    def cancel(self) -> None:
        if self._busy:
            self._cancelled = True
            self._loop.call_soon_threadsafe(self._wake.set)

    def set_conversation(self, messages: Sequence[Message]) -> None:
        self.conversation = tuple(messages)

    def cache_state(self) -> CacheState | None:
        if self.effective.mode == "resident":
            return None
        return CacheState(
            cache_bytes=self.cache_bytes,
            slots_used=300,
            slots_ready=600,
            slots_total=600,
            lookups=96,
            hits=72,
        )

    async def set_cache_bytes(self, cache_bytes: int) -> int:
        if self.effective.mode == "resident":
            raise UsageError("the model is resident: there is no expert cache")
        self.cache_bytes = min(cache_bytes, 3840 * MIB)
        return self.cache_bytes

    async def aclose(self) -> None:
        self.closed += 1


MARKDOWN = """# Fruits

Some **bold** words and `code`, a <div> tag.

1. Apples
2. Pears

```python
def add(a, b):
    return a + b
```

| name | taste |
|---|---|
| lemon | sour |

The *end*."""


def _pieces(text: str) -> list[str]:
    return [text[i : i + 3] for i in range(0, len(text), 3)]


SESSIONS = {
    "chat": ScriptedSession(
        [Thought("Let me "), Thought("think.\n"), *_pieces(MARKDOWN)],
        ["evil \x1b[31m", "\x07bell\x9b2J", " \u202eover"],
        ["begun", WAIT],
        ["again"],
    ),
    "long": ScriptedSession(_pieces("\n\n".join(f"paragraph {i} " + "word " * 40 for i in range(30)))),
    "item": ScriptedSession(_pieces("".join(f"line {i}\n" for i in range(60)))),
    "waits": ScriptedSession([WAIT]),
    "raw": ScriptedSession(["raw"], effective=dataclasses.replace(CHAT, chat_template=False)),
    "always-thinks": ScriptedSession(["x"], effective=dataclasses.replace(CHAT, think_control="none")),
    "full": ScriptedSession(
        ["one"], [UsageError("9 prompt tokens do not fit a context of 8", hint="use -c 9 or more")], ["three"]
    ),
    "flood": ScriptedSession(["x" * 1000] * 2000),
    "resident": ScriptedSession(["plain"], effective=dataclasses.replace(RESIDENT, chat_template=True)),
}


if __name__ == "__main__":
    import bmoe.session
    from bmoe.cli import main

    vars(bmoe.session)["Session"] = SESSIONS[sys.argv[1]]
    sys.exit(main(sys.argv[2:]))
