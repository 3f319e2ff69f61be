"""`bmoe chat` on a real terminal, whose screen is looked at, and over pipes."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import select
import signal
import stat
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pyte
import pytest

from bmoe.cli.answer_view import AnswerFigures, AnswerView
from bmoe.cli.chat_commands import COMMANDS, help_lines, parse_command
from bmoe.cli.live_area import LiveArea
from bmoe.cli.markdown_blocks import MarkdownBlocks
from bmoe.cli.markdown_rows import RowMaker
from bmoe.cli.terminal_text import terminal_text
from bmoe.io.errors import UsageError
from bmoe.records import PrefillProgress, TokenEvent
from tests.fakes import RESIDENT_STEP, STEP
from tests.models import speaking_moe
from tests.session_fake import MARKDOWN

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ROOT = Path(__file__).parent.parent
CTRL_C, CTRL_D, ENTER, TAB = "\x03", "\x04", "\r", "\t"
PATIENCE_S = 20.0


class Terminal:
    """A program on a terminal of its own.

    Attributes:
        screen: What it shows; `history.top` is what has scrolled away.
        raw: Every byte it wrote.
    """

    def __init__(self, command: list[str], *, columns: int = 80, rows: int = 24, **variables: str) -> None:
        self.screen = pyte.HistoryScreen(columns, rows, history=10_000, ratio=0.5)
        self._stream = pyte.ByteStream(self.screen)
        self.raw = b""
        self._fd, inner = pty.openpty()
        # The program asks where the cursor is.
        self.screen.write_process_input = lambda data: self.type(data)  # type: ignore[method-assign]  # noqa: PLW0108  # pyte's way; its parameter has this name
        self._set_size(columns, rows)
        environment = {**os.environ, "TERM": "xterm-256color", **variables}
        environment.pop("NO_COLOR", None)
        self.process = subprocess.Popen(
            ["setsid", "--ctty", *command],  # Ctrl-C is a signal only from a terminal that is in control
            cwd=ROOT,
            env=environment,
            stdin=inner,
            stdout=inner,
            stderr=inner,
        )
        os.close(inner)

    def _set_size(self, columns: int, rows: int) -> None:
        fcntl.ioctl(self._fd, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def resize(self, columns: int, rows: int) -> None:
        self._set_size(columns, rows)
        self.screen.resize(rows, columns)

    def type(self, text: str) -> None:
        os.write(self._fd, text.encode())

    def wait_for(self, text: str | Callable[[], bool]) -> None:
        """Until the screen shows a text, or something holds of it."""
        end = time.monotonic() + PATIENCE_S
        while not (text() if callable(text) else text in self.text):
            left = end - time.monotonic()
            ready = left > 0 and select.select([self._fd], [], [], left)[0]
            assert ready, f"{text!r} did not come:\n{self.text}"
            self._read()

    def wait(self) -> int:
        """The exit code, after all output."""
        while True:
            assert select.select([self._fd], [], [], PATIENCE_S)[0], f"it does not end:\n{self.text}"
            if not self._read():
                return self.process.wait(PATIENCE_S)

    def _read(self) -> bool:
        try:
            chunk = os.read(self._fd, 1 << 16)
        except OSError:  # the other end is closed
            return False
        self.raw += chunk
        self._stream.feed(chunk)
        return bool(chunk)

    @property
    def text(self) -> str:
        return "\n".join(row.rstrip() for row in self.screen.display).rstrip()

    @property
    def everything(self) -> list[str]:
        """What has scrolled away, then the screen."""
        away = [
            "".join(row[column].data for column in range(self.screen.columns)).rstrip()
            for row in self.screen.history.top
        ]
        return away + self.text.split("\n")

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._fd)


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[Callable[..., Terminal]]:
    """Starts `bmoe chat` over one of `tests.session_fake.SESSIONS`."""
    opened: list[Terminal] = []

    def start(name: str, *words: str, **options: int | str) -> Terminal:
        command = [sys.executable, "-m", "tests.session_fake", name, "chat", "-m", "m.gguf", *words]
        options.setdefault("XDG_STATE_HOME", str(tmp_path / "state"))
        opened.append(Terminal(command, **options))  # type: ignore[arg-type]  # sizes and variables
        return opened[-1]

    yield start
    for one in opened:
        one.close()


# --- on a terminal ----------------------------------------------------------------------------------------


def test_an_answer_is_rendered_below_its_dimmed_reasoning(terminal: Callable[..., Terminal]) -> None:
    t = terminal("chat", rows=40)
    t.wait_for("\n>")
    t.type(f"Hello{ENTER}")
    t.wait_for("The end.")
    t.wait_for("of 2048")
    rows = t.text.split("\n")
    assert rows[:2] == [
        "Some Model · streaming · cache 500 MiB for 200 of 1536 experts · context 2048 ·",
        "/help",
    ]
    start = rows.index("> Hello")
    assert rows[start + 1 : start + 4] == ["Let me think.", "", "Fruits"]
    tokens = 2 + -(-len(MARKDOWN) // 3)
    figures = f"19.8 tok/s · 75 % hits · 60.0 MiB/token · cache 100 % full · context {12 + tokens} of 2048"
    assert [r for r in rows[start + 4 :] if r][:13] == [
        "Some bold words and code, a <div> tag.",
        " 1 Apples",
        " 2 Pears",
        "```python",
        "def add(a, b):",
        "    return a + b",
        "```",
        " name   taste",
        " ────────────",
        " lemon  sour",
        "The end.",
        ">",
        figures,
    ]
    assert b"\x1b[2mLet me think." in t.raw
    bold = next(y for y, row in enumerate(t.screen.display) if row.startswith("Some bold"))
    assert t.screen.buffer[bold][5].bold
    assert not t.screen.buffer[bold][0].bold
    t.type(CTRL_D)
    assert t.wait() == 0


def test_the_model_cannot_steer_the_terminal(terminal: Callable[..., Terminal]) -> None:
    t = terminal("chat")
    t.wait_for("\n>")
    t.type(f"one{ENTER}")
    t.wait_for("The end.")
    t.type(f"two{ENTER}")
    t.wait_for("over")
    assert "evil ␛[31m␇bell�2J �over" in t.text
    t.type(f"/quit{ENTER}")
    assert t.wait() == 0
    for evil in (b"\x1b[31mbell", b"\x07", b"\xc2\x9b", "\u202e".encode()):
        assert evil not in t.raw


def test_ctrl_c_stops_the_answer_and_the_turn_is_forgotten(
    terminal: Callable[..., Terminal], tmp_path: Path
) -> None:
    t = terminal("chat")
    t.wait_for("\n>")
    for n in (1, 2):
        t.type(f"turn {n}{ENTER}")
        t.wait_for("The end." if n == 1 else "over")
        t.wait_for("context")
    t.type(f"turn 3{ENTER}")
    t.wait_for("begun")
    t.type(CTRL_C)
    t.wait_for("stopped; the model forgets this turn")
    t.type(CTRL_C)
    t.wait_for("/quit or Ctrl-D leaves")
    t.type(f"turn 4{ENTER}")
    t.wait_for("again")
    path = tmp_path / "c.json"
    t.type(f"/save {path}{ENTER}")
    t.wait_for("saved in")
    t.type(CTRL_D)
    assert t.wait() == 0
    said = [m["content"] for m in json.loads(path.read_text())["messages"] if m["role"] == "user"]
    assert said == ["turn 1", "turn 2", "turn 4"]


def test_a_signal_from_elsewhere_at_the_prompt_only_gives_the_hint(terminal: Callable[..., Terminal]) -> None:
    t = terminal("chat")
    t.wait_for("\n>")
    t.type("half")
    t.wait_for("> half")
    os.kill(t.process.pid, signal.SIGINT)
    t.wait_for("/quit or Ctrl-D leaves")
    t.type(CTRL_D)
    assert t.wait() == 0


@pytest.mark.parametrize("when", ["at the prompt", "while answering"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_termination_leaves_the_terminal_as_it_was(
    terminal: Callable[..., Terminal], when: str, number: signal.Signals
) -> None:
    t = terminal("waits")
    before = termios.tcgetattr(t._fd)
    t.wait_for("\n>")
    if when == "while answering":
        t.type(f"Hi{ENTER}")
        t.wait_for("reading the prompt: 12 of 12 tokens")
    os.kill(t.process.pid, number)
    assert t.wait() == 128 + number
    assert termios.tcgetattr(t._fd)[:4] == before[:4]
    assert not t.screen.cursor.hidden
    assert "Traceback" not in t.text


def test_commands_are_completed_and_near_misses_hinted_at(terminal: Callable[..., Terminal]) -> None:
    t = terminal("chat")
    t.wait_for("\n>")
    t.type("/st")
    t.wait_for("Show figures of the last answer")
    t.type(f"{TAB}{ENTER}")
    t.wait_for("mode: streaming")
    t.type(f"/sistem x{ENTER}")
    t.wait_for("did you mean /system?")
    t.type(f"/help{ENTER}")
    for line in help_lines():
        t.wait_for(line)


def test_several_lines_are_one_message(terminal: Callable[..., Terminal], tmp_path: Path) -> None:
    t = terminal("raw")
    t.wait_for("\n>")
    t.type(f"one\\{ENTER}two\x1b{ENTER}three{ENTER}")
    t.wait_for("\nraw")
    t.type(f"/save {tmp_path}/c.json{ENTER}")
    t.wait_for("saved in")
    messages = json.loads((tmp_path / "c.json").read_text())["messages"]
    assert messages[0]["content"] == "one\ntwo\nthree"


def test_what_is_typed_during_an_answer_is_kept_unseen_for_the_next_prompt(
    terminal: Callable[..., Terminal],
) -> None:
    t = terminal("waits")
    t.wait_for("\n>")
    t.type(f"Hi{ENTER}")
    t.wait_for("reading the prompt: 12 of 12 tokens")
    t.type("/he")
    os.kill(t.process.pid, signal.SIGINT)  # the key would also empty the line
    t.wait_for("stopped")
    t.wait_for("> /he")
    assert t.raw.count(b"/he") <= 3


def test_a_long_answer_scrolls_without_repeating_anything(terminal: Callable[..., Terminal]) -> None:
    t = terminal("long", rows=12, columns=60)
    t.wait_for("\n>")
    t.type(f"Hi{ENTER}")
    t.wait_for(lambda: "paragraph 29" in t.text and "MiB/token" in t.text and "\n>" in t.text)
    shown = [row for row in t.everything if row.startswith("paragraph")]
    assert [row.split()[1] for row in shown] == [str(n) for n in range(30)]
    assert sum(row.count("word") for row in t.everything) == 30 * 40


def test_a_block_that_is_taller_than_the_screen_appears_once(terminal: Callable[..., Terminal]) -> None:
    t = terminal("item", rows=10)
    t.wait_for("\n>")
    t.type(f"Hi{ENTER}")
    t.wait_for(lambda: "line 59" in t.text and "\n>" in t.text)
    assert [row for row in t.everything if row.startswith("line")] == [f"line {n}" for n in range(60)]


def test_without_markdown_answers_are_as_they_were_written(terminal: Callable[..., Terminal]) -> None:
    t = terminal("chat", "--no-markdown", rows=50)
    t.wait_for("\n>")
    t.type(f"Hi{ENTER}")
    t.wait_for("The *end*.")
    assert "Some **bold** words" in t.text
    assert "| lemon | sour |" in t.text


def test_the_history_is_kept_for_its_owner_only(terminal: Callable[..., Terminal], tmp_path: Path) -> None:
    for n in range(2):
        t = terminal("raw")
        t.wait_for("\n>")
        if n == 0:
            t.type(f"remember me{ENTER}")
            t.wait_for("\nraw")
        else:
            t.type("\x1b[A")
            t.wait_for("> remember me")
            t.type(CTRL_C)
        t.type(CTRL_D)
        assert t.wait() == 0
    path = tmp_path / "state/bmoe/chat-history"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


def test_a_history_that_cannot_be_kept_is_no_error(terminal: Callable[..., Terminal], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    t = terminal("raw", XDG_STATE_HOME=str(tmp_path / "file"))
    t.wait_for("\n>")
    t.type(f"Hi{ENTER}")
    t.wait_for("\nraw")
    t.type(CTRL_D)
    assert t.wait() == 0


def test_a_refusal_is_shown_and_the_chat_goes_on(terminal: Callable[..., Terminal]) -> None:
    t = terminal("full")
    t.wait_for("\n>")
    for text in ("one", "error: 9 prompt tokens do not fit a context of 8 (use -c 9 or more)", "three"):
        t.type(f"Hi{ENTER}")
        t.wait_for(text)
    t.type(CTRL_D)
    assert t.wait() == 0


def test_a_resident_model_has_no_cache_figures(terminal: Callable[..., Terminal]) -> None:
    t = terminal("resident")
    t.wait_for("Some Model · resident · context 2048 · /help")
    t.type(f"Hi{ENTER}")
    t.wait_for("plain")
    t.wait_for("context")
    assert "hits" not in t.text.split("plain")[1]


# --- over pipes -------------------------------------------------------------------------------------------


def piped(
    name: str, lines: str | bytes, *words: str, cwd: Path | None = None
) -> subprocess.CompletedProcess[str]:
    raw = lines.encode() if isinstance(lines, str) else lines
    command = [sys.executable, "-m", "tests.session_fake", name, "chat", "-m", "m.gguf", *words]
    done = subprocess.run(
        command,
        cwd=cwd or ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        input=raw,
        capture_output=True,
        timeout=60,
        check=False,
    )
    return subprocess.CompletedProcess(command, done.returncode, done.stdout.decode(), done.stderr.decode())


def test_over_a_pipe_lines_are_messages_and_answers_plain_text() -> None:
    done = piped("chat", "Hi\n\nTwo \\\nlines\n")
    assert done.returncode == 0
    assert done.stdout == f"{MARKDOWN}\nevil ␛[31m␇bell�2J �over\n"
    assert done.stderr.splitlines() == [
        "Some Model · streaming · cache 500 MiB for 200 of 1536 experts · context 2048 · /help"
    ]
    assert piped("raw", "Hi", "--quiet").stderr == ""


def test_over_a_pipe_the_first_error_ends_with_its_exit_code() -> None:
    done = piped("full", "a\nb\nc\n", "--quiet")
    assert (done.returncode, done.stdout) == (2, "one\n")
    assert done.stderr == "bmoe: error: 9 prompt tokens do not fit a context of 8 (use -c 9 or more)\n"
    assert piped("full", "/nonsense\n", "--quiet").returncode == 2
    assert piped("full", b"\xff\n", "--quiet").returncode == 1
    assert piped("full", "/quit\nb\n").stdout == ""


def test_over_a_pipe_commands_work_and_files_are_kept_up_to_date(tmp_path: Path) -> None:
    path = tmp_path / "c.json"
    done = piped("resident", f"/system Be brief.\nHi\n//etc is a folder\n/save {path}\n/system\n", "--quiet")
    assert (done.returncode, done.stdout) == (0, "plain\nplain\nBe brief.\n")
    kept = json.loads(path.read_text())
    assert kept["system"] == "Be brief."
    assert [m["content"] for m in kept["messages"]] == ["Hi", "plain", "/etc is a folder", "plain"]
    assert piped("resident", "More\n", "--resume", str(path), "--quiet").returncode == 0
    kept = json.loads(path.read_text())
    assert (kept["system"], len(kept["messages"])) == ("Be brief.", 6)
    # a new conversation does not replace the one that was resumed
    assert piped("resident", "/new\nOther\n", "--resume", str(path), "--quiet").returncode == 0
    assert json.loads(path.read_text()) == kept


def test_saving_over_something_else_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "precious"
    path.write_text("data")
    done = piped("resident", f"Hi\n/save {path}\n", "--quiet")
    assert done.returncode == 2
    assert "is there and is no conversation" in done.stderr
    assert path.read_text() == "data"


def test_a_model_without_template_says_so_and_takes_no_saved_conversation(tmp_path: Path) -> None:
    path = tmp_path / "c.json"
    done = piped("raw", f"Hi\n/save {path}\n/load {path}\n")
    assert done.returncode == 2
    assert "the model has no chat template; messages are raw prompts" in done.stderr
    assert "without a chat template a saved conversation cannot go on" in done.stderr


def test_reasoning_that_cannot_be_turned_off_is_a_usage_error() -> None:
    for words, lines in ((["--no-think"], ""), ([], "/think off\n")):
        done = piped("always-thinks", lines, "--quiet", *words)
        assert (done.returncode, done.stdout) == (2, "")
        assert "no way to turn reasoning off" in done.stderr
    assert piped("chat", "/think off\n/think\n", "--quiet").stdout == "reasoning is off\n" * 2


def test_a_reader_that_has_enough_ends_the_chat_quietly() -> None:
    command = [sys.executable, "-m", "tests.session_fake", "flood", "chat", "-m", "m.gguf", "--quiet"]
    with subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdin
        assert process.stdout
        assert process.stderr
        process.stdin.write(b"Hi\n")
        process.stdin.flush()
        assert process.stdout.read(10) == b"x" * 10
        process.stdout.close()
        assert process.wait(60) == 141
        assert process.stderr.read() == b""


def test_the_log_has_all_turns(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    assert piped("resident", "a\nb\n", "--log-json", str(path)).returncode == 0
    events = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(e["event"], e.get("turn")) for e in events] == [
        ("run_start", None),
        ("load", None),
        *((event, turn) for turn in (0, 1) for event in ("prefill", "token", "summary")),
        ("run_end", None),
    ]
    refused = piped("resident", "", "--log-json", "-")
    assert refused.returncode == 2


@pytest.mark.slow
def test_a_real_model_converses() -> None:
    command = [sys.executable, "-m", "bmoe", "chat", "-m", speaking_moe(), "-t", "1", "-n", "4", "-c", "256"]
    done = subprocess.run(
        [*command, "--system", "Be brief.", "--cache-mb", "200"],
        cwd=ROOT,
        input=b"What is the capital of France?\nAnd of Italy?\n/stats\n",
        capture_output=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert b"\x1b" not in done.stdout
    lines = done.stdout.decode().splitlines()
    assert any("decode:" in line and " 4 tokens" in line for line in lines)


# --- its parts --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "parsed"),
    [
        ("Hello", None),
        ("//etc", None),
        ("/usr\nand so on", None),
        ("/new", ("new", "")),
        ("/exit", ("quit", "")),
        ("/system  Be brief. ", ("system", "Be brief.")),
        ("/think off", ("think", "off")),
    ],
)
def test_what_a_line_means(line: str, parsed: tuple[str, str] | None) -> None:
    assert parse_command(line) == parsed


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("/stat", "did you mean /stats"),
        ("/xyzzy", "/help lists them"),
        ("/new now", "/new takes nothing"),
        ("/save", "/save needs a file"),
        ("/think maybe", "on or off"),
        ("/", "there is no command /"),
    ],
)
def test_a_command_that_is_none_says_what_is_near(line: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        parse_command(line)


def test_help_names_every_command() -> None:
    assert [line.split()[0] for line in help_lines()][: len(COMMANDS)] == [f"/{name}" for name in COMMANDS]


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
def test_blocks_do_not_depend_on_how_the_text_arrives(size: int) -> None:
    text = MARKDOWN + "\n\n- a\n  - b\n\n  more of a\n- c\nd\n\n~~~\n```\n~~~\n| a |\n# H\nend"
    blocks = MarkdownBlocks()
    found = []
    for start in range(0, len(text), size):
        found += blocks.feed(text[start : start + size])
        blocks.unfinished()
    found += blocks.close()
    assert blocks.unfinished() is None
    assert [b.source.rsplit("\n", 1)[-1] if b.kind == "code" else b.source for b in found] == [
        *("# Fruits", "Some **bold** words and `code`, a <div> tag.", "1. Apples", "2. Pears", "```python"),
        *("def add(a, b):", "    return a + b", "```", "| name | taste |\n|---|---|\n| lemon | sour |"),
        *("The *end*.", "- a\n  - b\n\n  more of a", "- c\nd", "~~~", "```", "~~~", "| a |", "# H", "end"),
    ]
    assert [b.gap for b in found][:9] == [False, True, True, False, True, False, False, False, True]


def test_terminal_text_keeps_text_and_takes_what_steers() -> None:
    assert terminal_text("a\tb\nc é 日本 👩‍👩‍👧") == "a\tb\nc é 日本 👩‍👩‍👧"
    every = "".join(map(chr, range(0x100))) + "\u2028\u202a\u2067\ud800"
    shown = terminal_text(every)
    assert all(c.isprintable() or c in "\t\n\xa0\xad" for c in shown)
    shown.encode()


class Emulator:
    """A terminal that `LiveArea` writes to through a pipe."""

    def __init__(self, columns: int, rows: int) -> None:
        self.size = (columns, rows)
        self.screen = pyte.HistoryScreen(columns, rows, history=1000, ratio=0.5)
        self._stream = pyte.ByteStream(self.screen)
        self._read_fd, self.fd = os.pipe()
        self.written = b""

    def rows(self) -> list[str]:
        self.written = os.read(self._read_fd, 1 << 20)
        self._stream.feed(self.written)
        return [row.rstrip() for row in self.screen.display]

    def close(self) -> None:
        os.close(self._read_fd)
        os.close(self.fd)


@pytest.fixture
def emulator() -> Iterator[Emulator]:
    emulator = Emulator(20, 5)
    yield emulator
    emulator.close()


def test_a_live_area_writes_only_rows_that_differ(emulator: Emulator) -> None:
    area = LiveArea(emulator.fd, size=lambda: emulator.size)
    area.update(["one", "two", "three"])
    assert emulator.rows() == ["one", "two", "three", "", ""]
    area.update(["one", "2", "three"])
    assert emulator.rows() == ["one", "2", "three", "", ""]
    assert b"one" not in emulator.written
    assert b"three" not in emulator.written
    area.update(["one"])
    assert emulator.rows() == ["one", "", "", "", ""]
    area.update(["x"], above=["one", "two"])
    assert emulator.rows() == ["one", "two", "x", "", ""]
    area.close(["end"])
    assert emulator.rows() == ["one", "two", "end", "", ""]
    assert (emulator.screen.cursor.y, emulator.screen.cursor.x) == (3, 0)
    assert not emulator.screen.cursor.hidden


def test_a_live_area_scrolls_what_is_for_good_and_clips_what_is_not(emulator: Emulator) -> None:
    area = LiveArea(emulator.fd, size=lambda: emulator.size)
    area.update([f"live {n}" for n in range(9)])
    assert emulator.rows() == ["live 5", "live 6", "live 7", "live 8", ""]
    area.update(["status"], above=[f"row {n}" for n in range(9)])
    assert emulator.rows() == ["row 5", "row 6", "row 7", "row 8", "status"]
    assert len(emulator.screen.history.top) == 5
    emulator.size = (10, 5)
    area.update(["narrow"])
    assert emulator.rows()[-1] == "narrow"


def test_figures_below_an_answer() -> None:
    figures = AnswerFigures(slots_total=1200, context_used=10, context_tokens=100)
    assert figures.line() == ""
    figures.prompt(5)
    figures.add(STEP)
    assert figures.line() == ("19.8 tok/s · 75 % hits · 60.0 MiB/token · cache 50 % full · context 16 of 100")
    figures = AnswerFigures(slots_total=None, context_used=0, context_tokens=100)
    figures.add(RESIDENT_STEP)
    assert figures.line() == "19.8 tok/s · context 1 of 100"


def test_drawing_takes_no_more_than_its_share(emulator: Emulator) -> None:
    now = [0.0]

    def clock() -> float:
        now[0] += 0.01  # every look at the clock: drawing takes this long
        return now[0]

    area = LiveArea(emulator.fd, size=lambda: emulator.size)
    figures = AnswerFigures(slots_total=None, context_used=0, context_tokens=100)
    view = AnswerView(area, RowMaker(), markdown=True, figures=figures, clock=clock)
    view.prefill(PrefillProgress(done_tokens=1, total_tokens=2))
    assert emulator.rows()[1].startswith("reading the prompt")
    view.token(TokenEvent(index=0, token=1, text="# Hi", metrics=RESIDENT_STEP))
    wait_s = view.idle()
    assert wait_s is not None
    assert 0.05 < wait_s < 0.1  # drawing took 0.01 s
    now[0] += wait_s
    assert view.idle() is None
    assert emulator.rows()[0] == "Hi"
    view.end("note")
    assert emulator.rows()[:4] == ["Hi", "note", "", ""]
