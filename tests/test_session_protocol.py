"""`bmoe session`: every line against its schema, who is served when, and that garbage changes nothing."""

from __future__ import annotations

import functools
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bmoe.chat.messages import Message
from bmoe.cli import session_server
from bmoe.cli.session_server import serve
from bmoe.config import GenerateRequest, Sampling, SessionConfig
from bmoe.io.errors import FormatError, ReadError, UsageError
from bmoe.line_protocol import LineProtocol
from bmoe.protocol import Cancel, Close, Defaults, Generate, JsonLines, ProtocolError, SetBudget, parse_line
from bmoe.records import CacheResize
from tests.fakes import MIB, RESIDENT
from tests.models import tiny_moe
from tests.session_fake import CHAT, WAIT, ScriptedSession, Thought

if TYPE_CHECKING:
    from collections.abc import Iterator

    from bmoe.protocol import Wire

ROOT = Path(__file__).parent.parent
CONFIG = SessionConfig(model_path="m.gguf")
HI = b'{"cmd":"generate","id":1,"messages":[{"role":"user","content":"Hi"}]}'
CLOSE = b'{"cmd":"close"}'


@functools.cache
def validator(what: str) -> jsonschema.Draft202012Validator:
    schema = json.loads((ROOT / "docs/schema/session.v1.schema.json").read_text())
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator({**schema, "anyOf": [{"$ref": f"#/$defs/{what}"}]})


class Talk:
    """A server in this thread, and what it answers.

    Attributes:
        code: What `serve` returned.
        raw: Everything it wrote.
    """

    def __init__(self) -> None:
        self.in_read, self.in_write = os.pipe()
        self.out_read, self.out_write = os.pipe()
        self.code: int | None = None
        self.raw = b""
        self.may_read = threading.Event()
        self.may_read.set()

    def say(self, *lines: bytes) -> None:
        os.write(self.in_write, b"".join(line + b"\n" for line in lines))

    def end(self) -> None:
        os.close(self.in_write)
        self.in_write = -1

    def serve(
        self, fake: ScriptedSession, wire: Wire | None = None, *, log: str | None = None, quiet: bool = True
    ) -> list[dict[str, Any]]:
        """Runs the server until it ends; the answers, each one valid."""
        reader = threading.Thread(target=self._read)
        reader.start()
        try:
            self.code = serve(
                CONFIG,
                wire or JsonLines(Defaults()),
                quiet=quiet,
                log_target=log,
                argv=["session", "-m", "m.gguf"],
                opener=fake.open,
                in_fd=self.in_read,
                out_fd=self.out_write,
            )
        finally:
            os.close(self.out_write)
            self.out_write = -1
            reader.join()
        if wire is not None:
            return []
        assert self.raw.isascii()
        answers = [json.loads(line) for line in self.raw.splitlines()]
        for answer in answers:
            validator("answer").validate(answer)
        return answers

    def _read(self) -> None:
        self.may_read.wait()
        while chunk := os.read(self.out_read, 1 << 16):
            self.raw += chunk

    def close(self) -> None:
        for fd in (self.in_read, self.in_write, self.out_read, self.out_write):
            if fd >= 0:
                os.close(fd)


@pytest.fixture
def talk() -> Iterator[Talk]:
    """A server that has not begun."""
    talk = Talk()
    yield talk
    talk.close()


def named(answers: list[dict[str, Any]], *events: str) -> list[dict[str, Any]]:
    return [answer for answer in answers if answer["event"] in events]


# --- what is served ---------------------------------------------------------------------------------------


def test_a_generation_from_ready_to_closed(talk: Talk) -> None:
    talk.say(HI, CLOSE)
    answers = talk.serve(ScriptedSession([Thought("Hm."), "Hé", "", "llo"]))
    assert talk.code == 0
    assert [a["event"] for a in answers] == [
        *("loading", "ready", "begin", "prefill", "delta", "delta", "delta", "done", "closed")
    ]
    assert answers[1]["effective"]["model_name"] == "Some Model"
    lines = talk.raw.decode().splitlines()
    assert lines[0] == '{"event":"loading","done_bytes":1048576,"total_bytes":2097152}'
    assert lines[2:7] == [
        '{"event":"begin","id":1}',
        '{"event":"prefill","id":1,"done_tokens":12,"total_tokens":12}',
        '{"event":"delta","id":1,"index":0,"text":"","reasoning":"Hm."}',
        '{"event":"delta","id":1,"index":1,"text":"H\\u00e9","reasoning":""}',
        '{"event":"delta","id":1,"index":3,"text":"llo","reasoning":""}',
    ]
    done = answers[7]
    assert (done["end"], done["text"], done["reasoning"]) == ("eog", "Héllo", "Hm.")
    assert done["summary"]["decode_tokens_per_s"] == 20.0
    assert lines[8] == '{"event":"closed","reason":"close"}'


def test_requests_are_served_in_order_and_the_end_of_the_input_waits_for_them(talk: Talk) -> None:
    talk.say(HI, HI.replace(b'"id":1', b'"id":"two","continue":true'))
    talk.end()
    fake = ScriptedSession(["a"], ["b"])
    answers = talk.serve(fake)
    assert [(a["id"], a["text"]) for a in named(answers, "done")] == [(1, "a"), ("two", "b")]
    assert answers[-1] == {"event": "closed", "reason": "end"}
    assert [m.content for m in fake.conversation] == ["Hi", "a", "Hi", "b"]
    assert fake.closed == 1


def test_with_metrics_every_token_comes_with_its_figures(talk: Talk) -> None:
    talk.say(HI[:-1] + b',"metrics":true}', CLOSE)
    deltas = named(talk.serve(ScriptedSession(["a", ""])), "delta")
    assert [(d["index"], d["token"], d["metrics"]["read_bytes"]) for d in deltas] == [
        (0, 100, 60 * MIB),
        (1, 101, 60 * MIB),
    ]


def test_every_field_of_a_request_arrives() -> None:
    line = {
        "cmd": "generate",
        "id": "x",
        "messages": [
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": "b", "reasoning": "c", "tool_calls": [{"name": "f"}]},
        ],
        "continue": True,
        "n_predict": 7,
        "think": False,
        "sampling": {"temperature": 0.5, "top_k": 3, "seed": 9, "json_schema": {"type": "object"}},
        "stop": ["\n\n"],
        "context_shift": True,
    }
    validator("request").validate(line)
    defaults = Defaults(n_predict=3, sampling=Sampling(top_p=0.5, grammar="root ::= [a]"))
    command = parse_line(json.dumps(line).encode(), defaults)
    assert command == Generate(
        id="x",
        metrics=False,
        request=GenerateRequest(
            messages=(
                Message(role="user", content="a"),
                Message(role="assistant", content="b", reasoning="c", tool_calls=({"name": "f"},)),
            ),
            continue_conversation=True,
            n_predict=7,
            think=False,
            sampling=Sampling(temperature=0.5, top_k=3, top_p=0.5, seed=9, json_schema='{"type": "object"}'),
            stop=("\n\n",),
            context_shift=True,
        ),
    )


def test_what_a_request_leaves_out_is_as_on_the_command_line() -> None:
    defaults = Defaults(n_predict=3, think=False, sampling=Sampling(temperature=1))
    command = parse_line(b'{"cmd":"generate","id":1,"prompt":"p"}', defaults)
    assert isinstance(command, Generate)
    assert command.request == GenerateRequest(
        prompt="p", n_predict=3, think=False, sampling=Sampling(temperature=1)
    )


# --- cancel, budget, stats --------------------------------------------------------------------------------


@pytest.mark.parametrize("cancel", [b'{"cmd":"cancel"}', b'{"cmd":"cancel","id":1}'])
def test_cancel_acts_while_generating_and_leaves_the_conversation(talk: Talk, cancel: bytes) -> None:
    talk.say(HI)
    fake = ScriptedSession(["a", lambda _: talk.say(cancel, CLOSE), WAIT])
    answers = talk.serve(fake)
    (done,) = named(answers, "done")
    assert (done["id"], done["end"], done["text"]) == (1, "cancelled", "a")
    assert fake.conversation == ()


def test_cancel_takes_one_request_out_of_the_queue(talk: Talk) -> None:
    talk.say(*(HI.replace(b'"id":1', b'"id":%d' % n) for n in (1, 2, 3)))
    cancels = (b'{"cmd":"cancel","id":2}', b'{"cmd":"cancel","id":1}', CLOSE)
    answers = talk.serve(ScriptedSession([lambda _: talk.say(*cancels), WAIT], ["a"]))
    done = [(a["id"], a["end"], a["summary"] is None) for a in named(answers, "done")]
    assert done == [(2, "cancelled", True), (1, "cancelled", False), (3, "eog", False)]
    assert [a["id"] for a in named(answers, "begin")] == [1, 3]


def test_cancel_without_an_id_takes_all(talk: Talk) -> None:
    talk.say(HI, HI.replace(b'"id":1', b'"id":2'))
    fake = ScriptedSession([lambda _: talk.say(b'{"cmd":"cancel"}', CLOSE), WAIT])
    assert {(a["id"], a["end"]) for a in named(talk.serve(fake), "done")} == {
        (1, "cancelled"),
        (2, "cancelled"),
    }


def test_what_is_not_in_flight_can_be_cancelled_in_vain(talk: Talk) -> None:
    talk.say(b'{"cmd":"cancel","id":9}', b'{"cmd":"cancel"}', CLOSE)
    assert [a["event"] for a in talk.serve(ScriptedSession())] == ["loading", "ready", "closed"]


def test_an_id_that_is_in_flight_is_refused(talk: Talk) -> None:
    talk.say(HI, HI)
    ask = (HI, b'{"cmd":"stats","id":1}', b'{"cmd":"cancel"}', CLOSE)
    answers = talk.serve(ScriptedSession(["a", lambda _: talk.say(*ask), WAIT]))
    assert len(named(answers, "done")) == 1
    errors = named(answers, "error")
    assert [(e["id"], e["kind"], e["fatal"]) for e in errors] == [(1, "request", False)] * 3
    assert errors[0]["message"] == "id 1 is in flight"


def test_the_budget_changes_while_generating(talk: Talk) -> None:
    talk.say(HI)
    ask = (b'{"cmd":"set_budget","id":"b","cache_mb":64}', b'{"cmd":"set_budget","id":"c","cache_mb":99999}')
    fake = ScriptedSession(["a", lambda _: talk.say(*ask, b'{"cmd":"cancel"}', CLOSE), WAIT])
    answers = talk.serve(fake)
    assert [(a["id"], a["cache_bytes"]) for a in named(answers, "budget")] == [
        ("b", 64 * MIB),
        ("c", 3840 * MIB),
    ]


def test_without_a_cache_its_budget_is_a_usage_error(talk: Talk) -> None:
    talk.say(b'{"cmd":"set_budget","id":5,"cache_mb":64}', b'{"cmd":"stats","id":6}', CLOSE)
    answers = talk.serve(ScriptedSession(effective=RESIDENT))
    (error,) = named(answers, "error")
    assert (error["id"], error["kind"], error["fatal"]) == (5, "usage", False)
    assert named(answers, "stats")[0]["cache"] is None


def test_stats_are_answered_at_once(talk: Talk) -> None:
    talk.say(HI, HI.replace(b'"id":1', b'"id":2'))
    ask = b'{"cmd":"stats","id":"s"}'
    fake = ScriptedSession(["a", lambda _: talk.say(ask, b'{"cmd":"cancel"}', CLOSE), WAIT])
    (stats,) = named(talk.serve(fake), "stats")
    assert (stats["generating"], stats["queued"], stats["messages"], stats["last"]) == (1, 1, 0, None)
    assert stats["cache"]["slots_total"] == 600


# --- errors and ends --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "kind"),
    [(UsageError("the prompt is empty"), "usage"), (ReadError("came short", path="m.gguf"), "read")],
)
def test_a_request_that_fails_is_answered_and_the_next_one_served(
    talk: Talk, error: Exception, kind: str
) -> None:
    talk.say(HI, HI.replace(b'"id":1', b'"id":2'), CLOSE)
    answers = talk.serve(ScriptedSession([error], ["fine"]))
    (failed,) = named(answers, "error")
    assert (failed["id"], failed["kind"], failed["fatal"]) == (1, kind, False)
    assert str(error) == failed["message"]
    assert [(a["id"], a["text"]) for a in named(answers, "done")] == [(2, "fine")]


def test_the_log_has_every_turn_in_order(
    talk: Talk, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fake = ScriptedSession(["a", "b"], [ReadError("came short", path="m.gguf")])
    talk.say(HI, HI.replace(b'"id":1', b'"id":2'), CLOSE)
    opener = fake.open

    async def opening(*args: Any, **more: Any) -> ScriptedSession:
        session = await opener(*args, **more)
        session.on_warning("memory is short")
        session.on_resize(CacheResize(from_bytes=500 * MIB, cache_bytes=300 * MIB, reason="room is short"))
        return session

    fake.open = opening  # type: ignore[method-assign]  # for the test
    log = tmp_path / "s.jsonl"
    talk.serve(fake, log=str(log), quiet=False)
    events = [json.loads(line) for line in log.read_text().splitlines()]
    schema = jsonschema.Draft202012Validator(
        json.loads((ROOT / "docs/schema/run-log.v2.schema.json").read_text())
    )
    for event in events:
        schema.validate(event)
    names = [event["event"] for event in events]
    assert names[0] == "run_start"
    assert names[-1] == "run_end"
    assert names.count("token") == 2
    assert [e["turn"] for e in events if e["event"] == "prefill"] == [0, 1]
    assert {"load", "warning", "cache_resize", "summary", "error"} <= set(names)
    said = capsys.readouterr().err
    assert "warning: memory is short\n" in said
    assert "cache: 300 MiB, was 500 MiB: room is short\n" in said


def test_a_bug_is_fatal_and_not_hidden(talk: Talk) -> None:
    talk.say(HI)
    with pytest.raises(ZeroDivisionError):
        talk.serve(ScriptedSession([ZeroDivisionError("oops")]))
    last = json.loads(talk.raw.splitlines()[-1])
    validator("answer").validate(last)
    assert (last["id"], last["fatal"], last["message"]) == (1, True, "ZeroDivisionError: oops")


def test_a_model_that_does_not_open_is_a_fatal_error(talk: Talk) -> None:
    talk.say(HI)
    with pytest.raises(FormatError):
        talk.serve(ScriptedSession(opening=FormatError("is no GGUF file", path="m.gguf")))
    last = json.loads(talk.raw.splitlines()[-1])
    validator("answer").validate(last)
    assert (last["id"], last["fatal"], last["kind"]) == (None, True, "format")


def test_after_close_nothing_new_is_taken_but_cancel_works(talk: Talk) -> None:
    talk.say(HI, CLOSE, HI.replace(b'"id":1', b'"id":2'))
    fake = ScriptedSession([lambda _: talk.say(b'{"cmd":"cancel"}'), WAIT])
    answers = talk.serve(fake)
    assert [(a["id"], a["message"]) for a in named(answers, "error")] == [(2, "the session is closing")]
    assert [a["end"] for a in named(answers, "done")] == ["cancelled"]


def test_too_many_queued_requests_are_refused(talk: Talk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_server, "_MOST_QUEUED", 2)
    talk.say(HI)
    more = [HI.replace(b'"id":1', b'"id":%d' % n) for n in (2, 3, 4)]
    answers = talk.serve(ScriptedSession([lambda _: talk.say(*more, b'{"cmd":"cancel"}', CLOSE), WAIT]))
    assert [(a["id"], a["kind"]) for a in named(answers, "error")] == [(4, "usage")]


def test_a_reader_that_is_gone_ends_the_session(talk: Talk) -> None:
    talk.say(HI)
    gone = [talk.out_read]

    def leave(_: object) -> None:
        os.close(gone.pop())

    read, write = os.pipe()
    os.dup2(read, talk.out_read)
    os.close(read)
    os.close(talk.out_write)
    talk.out_write = write
    fake = ScriptedSession(["a", leave, "b", WAIT])
    talk._read = lambda: None  # type: ignore[method-assign]  # nobody reads
    with pytest.raises(BrokenPipeError):
        talk.serve(fake)
    talk.out_read = -1
    assert fake.conversation == ()
    assert fake.closed == 1


def test_a_reader_that_pauses_does_not_stop_the_generation(talk: Talk) -> None:
    talk.say(HI, CLOSE)
    talk.may_read.clear()
    flood = ["x" * 1000] * 500  # far beyond what a pipe holds
    answers = talk.serve(ScriptedSession([*flood, lambda _: talk.may_read.set()]))
    assert named(answers, "done")[0]["text"] == "x" * 500_000
    assert len(named(answers, "delta")) == 500


def test_a_signal_ends_in_order(talk: Talk) -> None:
    talk.say(HI)
    fake = ScriptedSession(["a", lambda _: os.kill(os.getpid(), signal.SIGTERM), WAIT])
    answers = talk.serve(fake)
    assert talk.code == 143
    assert answers[-2]["end"] == "cancelled"
    assert answers[-1] == {"event": "closed", "reason": "signal"}
    assert fake.closed == 1


# --- garbage ----------------------------------------------------------------------------------------------

GARBAGE: list[tuple[bytes, str, str]] = [
    (b"nonsense", "json", "not JSON"),
    (b"[1]", "json", "a list, expected an object"),
    (b"3", "json", "a number, expected an object"),
    (b"{", "json", "not JSON"),
    (b'{"cmd":"close"} x', "json", "not JSON"),
    (b'{"cmd":"stats","id":NaN}', "json", "NaN is no number"),
    (b'{"cmd":"stats","id":1e999}', "json", "too large a number"),
    (b'{"cmd":"stats","id":' + b"9" * 5000 + b"}", "json", "not JSON"),
    (b'{"cmd":"stats","cmd":"close"}', "json", 'the key "cmd" appears twice'),
    (b'{"cmd":"stats","id":"\\ud800"}', "json", "half a surrogate pair"),
    (b'{"cmd":"stats","id":"\xff"}', "json", "not UTF-8 at byte 21"),
    (b'{"cmd":' + b"[" * 100_000, "json", "nests its values too deeply"),
    (b'{"cmd":' + b"[" * 65 + b"]" * 65 + b"}", "json", "nests its values too deeply"),
    (b"{}", "request", "there is no cmd"),
    (b'{"cmd":7}', "request", "cmd is 7, expected one of generate, cancel"),
    (b'{"cmd":"genrate","id":1}', "request", 'cmd is "genrate", expected one of'),
    (b'{"cmd":"generate","prompt":"x"}', "request", "the request has no id"),
    (b'{"cmd":"stats","id":true}', "request", "id is true, expected a whole number"),
    (b'{"cmd":"stats","id":1.5}', "request", "id is 1.5"),
    (b'{"cmd":"stats","id":9007199254740992}', "request", "2^53"),
    (b'{"cmd":"stats","id":1,"x":2}', "request", 'stats has no field "x"; there are cmd, id'),
    (b'{"cmd":"close","id":1}', "request", 'close has no field "id"'),
    (b'{"cmd":"set_budget","id":1,"cache_mb":0}', "request", "cache_mb is 0, expected a whole number from 1"),
    (b'{"cmd":"set_budget","id":1,"cache_mb":"8"}', "request", 'cache_mb is "8"'),
    (b'{"cmd":"generate","id":1}', "request", "either a prompt or messages"),
    (b'{"cmd":"generate","id":1,"prompt":"x","messages":[]}', "request", "either a prompt or messages"),
    (b'{"cmd":"generate","id":1,"messages":[]}', "request", "at least one message"),
    (b'{"cmd":"generate","id":1,"messages":[{"role":"user"}]}', "request", "messages[0] has no content"),
    (b'{"cmd":"generate","id":1,"messages":[{"role":"robot","content":""}]}', "usage", "'robot'"),
    (b'{"cmd":"generate","id":1,"prompt":"x","n_predict":-1}', "request", "n_predict is -1"),
    (b'{"cmd":"generate","id":1,"prompt":"x","think":1}', "request", "think is 1, expected true or false"),
    (b'{"cmd":"generate","id":1,"prompt":"x","stop":[""]}', "request", "an empty text"),
    (b'{"cmd":"generate","id":1,"prompt":"x","sampling":{"temp":1}}', "request", 'no field "temp"'),
    (b'{"cmd":"generate","id":1,"prompt":"x","sampling":{"top_p":2}}', "usage", "top_p is 2.0"),
    (
        b'{"cmd":"generate","id":1,"prompt":"x","sampling":{"grammar":"a","json_schema":"b"}}',
        "usage",
        "exclude each other",
    ),
]


@pytest.mark.parametrize(("line", "kind", "words"), GARBAGE)
def test_a_garbage_line_is_refused_in_words(line: bytes, kind: str, words: str) -> None:
    with pytest.raises(ProtocolError) as raised:
        parse_line(line, Defaults())
    assert raised.value.kind == kind
    assert words in raised.value.message
    assert len(raised.value.message) < 300
    assert "\n" not in raised.value.message


def test_garbage_lines_get_one_error_each_and_change_nothing(talk: Talk) -> None:
    soup = [line for line, _, _ in GARBAGE if len(line) < 6000]
    talk.say(HI, *soup, b"", b"  \r", CLOSE)
    fake = ScriptedSession(["a"])
    answers = talk.serve(fake)
    assert [(e["kind"], e["fatal"]) for e in named(answers, "error")] == [
        (kind, False) for line, kind, _ in GARBAGE if len(line) < 6000
    ]
    assert [a["text"] for a in named(answers, "done")] == ["a"]
    assert len(fake.requests) == 1


def test_a_line_that_is_too_long_is_skipped(talk: Talk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_server, "MOST_LINE_BYTES", 200)
    talk.say(b"x" * 201, b"y" * 40_000, HI, b" " * (200 - len(CLOSE)) + CLOSE)
    answers = talk.serve(ScriptedSession(["a"]))
    assert [e["message"] for e in named(answers, "error")] == ["the line is longer than 200 bytes"] * 2
    assert named(answers, "done")[0]["text"] == "a"
    assert answers[-1]["reason"] == "close"


SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 1 << 33),
    st.floats(-2, 2).filter(lambda x: not x.is_integer()),
    st.sampled_from(["", "user", "assistant", "root ::= [a]", "\ud800", "é"]),
)
MESSAGES = st.lists(
    st.dictionaries(
        st.sampled_from(["role", "content", "reasoning", "tool_calls", "name", "other"]),
        SCALARS | st.just([{"f": 1}]),
    ),
    max_size=2,
)
VALUES = st.one_of(
    SCALARS,
    MESSAGES,
    st.just([{"role": "user", "content": "x"}]),
    st.lists(SCALARS, max_size=2),
    st.dictionaries(
        st.sampled_from(["temperature", "top_k", "seed", "grammar", "json_schema", "other"]), SCALARS
    ),
)
FIELDS = (
    *("id", "prompt", "messages", "continue", "n_predict", "think", "sampling", "stop"),
    *("context_shift", "metrics", "cache_mb", "other"),
)
REQUESTS = st.builds(
    lambda cmd, fields: {"cmd": cmd, **fields},
    st.sampled_from(["generate", "cancel", "set_budget", "stats", "close", "other"]),
    st.dictionaries(st.sampled_from(FIELDS), VALUES, max_size=5),
)


@settings(max_examples=400, deadline=None)
@given(REQUESTS)
def test_what_is_taken_is_what_the_schema_allows(request: dict[str, Any]) -> None:
    valid = validator("request").is_valid(request)
    try:
        parse_line(json.dumps(request).encode(), Defaults())
    except ProtocolError as error:
        if error.kind == "request":
            assert not valid
    else:
        assert valid


@settings(max_examples=400, deadline=None)
@given(
    st.one_of(
        st.binary(max_size=200),
        st.text(max_size=100).map(lambda text: text.encode("utf-8", "surrogatepass")),
        st.builds(
            lambda line, at, byte: line[:at] + bytes((byte,)) + line[at + 1 :],
            st.sampled_from([HI, CLOSE, *(line for line, _, _ in GARBAGE if len(line) < 200)]),
            st.integers(0, 80),
            st.integers(0, 255),
        ),
    )
)
def test_any_line_is_a_command_or_one_error(line: bytes) -> None:
    for wire in (JsonLines(Defaults()), LineProtocol(Defaults())):
        try:
            command = wire.parse(line)
        except ProtocolError as error:
            answer = wire.error(error.request_id, kind=error.kind, message=error.message, fatal=False)
            assert answer.count("\n") == 1
            answer.encode()
        else:
            assert command is None or isinstance(command, Generate | Cancel | Close | SetBudget) or command.id


# --- the reference's lines --------------------------------------------------------------------------------


def lines_of(talk: Talk, fake: ScriptedSession, *, raw: bool = False, n_predict: int | None = 8) -> list[str]:
    talk.serve(fake, LineProtocol(Defaults(n_predict=n_predict), raw=raw))
    return talk.raw.decode().splitlines()


def test_the_line_protocol_to_the_last_digit(talk: Talk) -> None:
    talk.say(b'{"cmd":"generate","id":3,"prompt":"Hi"}', b'{"cmd":"close"}')
    fake = ScriptedSession([Thought('"\t\x01'), "né\u2028"])
    load = 'BMOE_LOAD {"mb":60.00,"ms":25.0}'
    figures = (
        '"steps":8,"wall_ms":50.0,"io_ms":25.0,"compute_ms":37.9,"mgmt_ms":0.1,"stall_ms":12.0,'
        '"read_mb":60.00,"cache_hit_pct":75.0,"majflt":0,"cpu_ms":80.0,"dense_resident_frac":-1.000'
    )
    lines_of(talk, fake)
    assert talk.raw.decode().split("\n")[:-1] == [  # U+2028 ends no line here
        'BMOE_READY {"load_s":0.310,"arch":"qwen3moe","n_ctx":2048,"think_ctl":"template","n_expert_used":8}',
        'BMOE_BEGIN {"id":3}',
        load,
        f'BMOE_PROGRESS {{"step":1,{figures},"delta_reasoning":"\\"\\t\\u0001","delta_text":""}}',
        load,
        f'BMOE_PROGRESS {{"step":2,{figures},"delta_reasoning":"","delta_text":"né\u2028"}}',
        (
            'BMOE_DONE {"id":3,"cancelled":false,"tokens":2,"tok_s":10.000,"prefill_s":0.600,'
            '"prefill_tps":20.00,"load_s":0.310,"cache_hit_pct":75.0,"n_prompt":12,"n_past":14,'
            '"compute_s_tok":0.0379,"io_s_tok":0.0250,"cache_resident_mib":250,"cache_budget_mib":500,'
            '"read_mib":120.0,"stall_s_tok":0.0120,"mgmt_s_tok":0.0001,"majflt_tok":0.00,"cpu_s_tok":0.0800,'
            '"token_demand_mib":240.0,"mtp_drafted":0,"mtp_accepted":0,"mtp_decodes":0,'
            '"mtp_draft_s_tok":0.0000,"drafted_steps":0,"loop_overhead_s_tok":0.0004,'
            '"reasoning":"\\"\\t\\u0001","text":"né\u2028"}'
        ),
    ]
    assert fake.requests[0].messages == (Message(role="user", content="Hi"),)


def test_the_line_protocol_ignores_what_the_reference_ignores(talk: Talk) -> None:
    talk.say(b"nonsense", b"{}", b'{"cmd":"other"}', b'{"cmd":"stats","id":1}', b'{"cmd":"close"}')
    assert len(lines_of(talk, ScriptedSession())) == 1


@pytest.mark.parametrize(
    ("request_line", "answer"),
    [
        (b'{"cmd":"generate","id":2}', 'BMOE_ERROR {"id":2,"fatal":false,"msg":"empty prompt'),
        (b'{"cmd":"generate","prompt":5}', 'BMOE_ERROR {"id":0,"fatal":false,"msg":"prompt is 5'),
        (
            b'{"cmd":"generate","prompt":"x","n_predict":-1}',
            'BMOE_ERROR {"id":0,"fatal":false,"msg":"n_predict is -1',
        ),
    ],
)
def test_errors_of_the_line_protocol(talk: Talk, request_line: bytes, answer: str) -> None:
    talk.say(request_line, b'{"cmd":"close"}')
    lines = lines_of(talk, ScriptedSession())
    assert len(lines) == 2
    assert lines[1].startswith(answer)


def test_the_line_protocol_continues_and_takes_raw_prompts(talk: Talk) -> None:
    talk.say(b'{"cmd":"generate","prompt":"\\u00e9","clear_kv":false,"think":false,"n_predict":2}')
    talk.end()
    fake = ScriptedSession(["a"])
    lines_of(talk, fake, raw=True)
    assert fake.requests == [
        GenerateRequest(prompt="é", continue_conversation=True, think=False, n_predict=2)
    ]


def test_the_line_protocol_cancels_and_says_what_never_began(talk: Talk) -> None:
    talk.say(b'{"cmd":"generate","id":1,"prompt":"x"}', b'{"cmd":"generate","id":2,"prompt":"x"}')
    fake = ScriptedSession(["a", lambda _: talk.say(b'{"cmd":"cancel"}', b'{"cmd":"close"}'), WAIT])
    done = [line for line in lines_of(talk, fake) if line.startswith("BMOE_DONE")]
    assert [(json.loads(d[10:])["id"], json.loads(d[10:])["cancelled"]) for d in done] == [
        (2, True),
        (1, True),
    ]
    assert json.loads(done[0][10:])["tokens"] == 0


def test_a_resident_model_has_the_references_sentinels(talk: Talk) -> None:
    talk.say(b'{"cmd":"generate","prompt":"x"}', b'{"cmd":"close"}')
    lines = lines_of(talk, ScriptedSession(["a"], effective=RESIDENT), n_predict=None)
    assert json.loads(lines[-1][10:])["cache_hit_pct"] == -1
    assert json.loads(lines[-1][10:])["token_demand_mib"] == 0
    progress = next(line for line in lines if line.startswith("BMOE_PROGRESS"))
    assert json.loads(progress[14:])["steps"] == CHAT.context_tokens


# --- for real ---------------------------------------------------------------------------------------------


def bmoe(*words: str, lines: bytes) -> subprocess.CompletedProcess[bytes]:
    command = [sys.executable, "-m", "bmoe", "session", *words]
    return subprocess.run(command, cwd=ROOT, input=lines, capture_output=True, timeout=100, check=False)


def test_a_real_model_is_served() -> None:
    model = tiny_moe()
    ask = {"cmd": "generate", "id": "a", "prompt": "Hello", "n_predict": 4}
    lines = [ask, {**ask, "id": "b"}, {**ask, "id": "c", "n_predict": 1 << 20}, {"cmd": "stats", "id": 1}]
    lines.append({"cmd": "set_budget", "id": 2, "cache_mb": 2})
    outcome = bmoe(
        *("-m", model, "-t", "1", "-c", "64", "--cache-mb", "4", "--quiet"),
        lines=b"".join(json.dumps(line).encode() + b"\n" for line in lines),
    )
    assert (outcome.returncode, outcome.stderr) == (0, b"")
    answers = [json.loads(line) for line in outcome.stdout.splitlines()]
    for answer in answers:
        validator("answer").validate(answer)
    first, second = named(answers, "done")
    assert (first["text"], first["end"]) == (second["text"], "length")
    assert [(e["id"], e["kind"]) for e in named(answers, "error")] == [("c", "usage")]
    assert answers[-1]["event"] == "closed"


def test_options_that_go_together_and_files_that_are_not_there() -> None:
    outcome = bmoe("-m", "nowhere.gguf", "--raw", lines=b"")
    assert (outcome.returncode, outcome.stdout) == (2, b"")
    outcome = bmoe("-m", "nowhere.gguf", lines=b"")
    assert outcome.returncode == 1
    assert json.loads(outcome.stdout)["fatal"] is True
    assert outcome.stderr.count(b"\n") == 1
