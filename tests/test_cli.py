"""The command line over a session that follows a script: what is printed where, logged, and returned."""

from __future__ import annotations

import asyncio
import http.client
import io
import json
import os
import socket
import subprocess
import sys
import tomllib
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import bmoe
from bmoe.cli import _COMMANDS, _bmoe, decode_run, main
from bmoe.cli.progress import ProgressDisplay, StatusLine
from bmoe.io.errors import FormatError, ReadError
from bmoe.policies import POLICIES
from bmoe.present import mode_line, summary_lines
from bmoe.records import CacheResize
from bmoe.verify import VerifyReport
from tests.fakes import EFFECTIVE, LOAD, MIB, RESIDENT, SUMMARY, FakeSession, Thought, interrupt_self
from tests.test_telemetry import lines

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from bmoe.config import GenerateRequest, SessionConfig

ROOT = Path(__file__).parent.parent
DECODE = ("decode", "-m", "m.gguf", "-p", "Hi")


class Outcome:
    """One run of the command line.

    Attributes:
        code: Its exit code.
        out, err: What it printed.
    """

    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err

    @property
    def error(self) -> str:
        """The error, which must be one line, the last, and no traceback."""
        assert "Traceback" not in self.err
        assert self.err.count("bmoe: error: ") == 1
        last = self.err.splitlines()[-1]
        assert last.startswith("bmoe: error: ")
        return last.removeprefix("bmoe: error: ")


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str]) -> Callable[..., Outcome]:
    """Runs `bmoe` with words."""

    def run(*words: str) -> Outcome:
        code = main(words)
        return Outcome(code, *capfd.readouterr())

    return run


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch) -> Callable[[FakeSession], FakeSession]:
    """Puts a fake in the place of the session."""

    def use(session: FakeSession) -> FakeSession:
        monkeypatch.setattr(decode_run, "Session", session)
        return session

    return use


@pytest.fixture
def fake(use: Callable[[FakeSession], FakeSession]) -> FakeSession:
    """A session that says two tokens."""
    return use(FakeSession())


def process(name: str, *words: str, **options: Any) -> subprocess.Popen[bytes]:
    """`bmoe` in a process of its own, over one of `tests.fakes.SESSIONS`."""
    command = [sys.executable, "-m", "tests.fakes", name, *words]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options)


# --- the group --------------------------------------------------------------------------------------------


def test_the_version_is_that_of_the_package(run: Callable[..., Outcome]) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert bmoe.__version__ == project["version"]
    outcome = run("--version")
    assert (outcome.code, outcome.out) == (0, f"bmoe {bmoe.__version__}\n")


@pytest.mark.parametrize("words", [["--help"], ["decode", "--help"], ["verify", "-h"], ["synth", "--help"]])
def test_help_is_a_success_on_standard_output(run: Callable[..., Outcome], words: Sequence[str]) -> None:
    outcome = run(*words)
    assert (outcome.code, outcome.err) == (0, "")
    assert outcome.out.startswith("Usage: bmoe")


def test_help_lists_each_command_in_the_commands_own_words(run: Callable[..., Outcome]) -> None:
    ctx = _bmoe.make_context("bmoe", ["decode"])
    for name, entry in _COMMANDS.items():
        command = _bmoe.get_command(ctx, name)
        assert command is not None
        assert command.get_short_help_str(200) == entry.short_help
    assert run("--help").out.count("Generate text from a prompt.") == 1


def test_without_a_command_help_goes_to_standard_error(run: Callable[..., Outcome]) -> None:
    outcome = run()
    assert (outcome.code, outcome.out) == (2, "")
    assert outcome.err.startswith("Usage: bmoe")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["decdoe"], "no such command 'decdoe'; did you mean decode? (see bmoe --help)"),
        (["xyz"], "no such command 'xyz'; there are bench, "),
        (["decode"], "missing option '-m' / '--model' (see bmoe decode --help)"),
        ([*DECODE, "--overlapp"], "--overlap"),
        ([*DECODE, "-t", "two"], "'two' is not a whole number from 1 to 512"),
        ([*DECODE, "-t", "0"], "'0' is not a whole number from 1 to 512"),
        ([*DECODE, "-n", "1_0"], "'1_0' is not max or a whole number"),
        ([*DECODE, "-n", "-1"], "'-1' is not max or a whole number"),
        ([*DECODE, "-n", "٣"], "is not max or a whole number"),
        ([*DECODE, "-n", "9" * 5000], "is not max or a whole number"),
        ([*DECODE, "--cache-mb", "1.5"], "'1.5' is not auto or a whole number from 1 to"),
        ([*DECODE, "--cache-mb", ""], "'' is not auto or a whole number"),
        ([*DECODE, "--policy", "best"], "cache policy 'best' is not one of aged, lru"),
        ([*DECODE, "--io-backend", "aio"], "'aio' is not one of 'auto', 'uring', 'threads'"),
        ([*DECODE, "-c", "256", "--ubatch", "512"], "--ubatch 512 is above --ctx-size 256"),
        ([*DECODE, "--no-repack"], "--no-repack goes with --resident"),
        (
            [*DECODE, "--resident", "--no-overlap", "--policy", "lru"],
            "--overlap/--no-overlap, --policy: no effect",
        ),
        ([*DECODE, "--cache-mb", "5", "--cache-floor-mb", "5"], "--cache-floor-mb goes with --cache-mb auto"),
        ([*DECODE[:3]], "no prompt: give one of -p TEXT, -f FILE, or - for standard input"),
        ([*DECODE, "-"], "more than one prompt: give one of"),
        ([*DECODE, "-f", "x"], "more than one prompt: give one of"),
        ([*DECODE, "more"], "unexpected argument 'more': a prompt is given with -p TEXT, -f FILE or -"),
        ([*DECODE[:3], "-p", ""], "the prompt is empty"),
        ([*DECODE[:3], "-p", "\udcff"], "the prompt given with -p is not UTF-8"),
        ([*DECODE, "--force-tokens", os.devnull], f"--force-tokens {os.devnull}: the text is empty"),
        ([*DECODE, "--system", "x"], "--system goes with --chat"),
        ([*DECODE, "--hide-reasoning"], "--hide-reasoning goes with --chat"),
        ([*DECODE, "--no-think"], "--no-think goes with --chat"),
        ([*DECODE, "--stop", ""], "--stop: the text is empty"),
        ([*DECODE, "--log-layers"], "--log-layers goes with --log-json"),
        ([*DECODE, "--csv", "-"], "--csv needs a file"),
        ([*DECODE, "--csv", "a", "--io-trace", "./a"], "--csv and --io-trace are the same file"),
        ([*DECODE, "--log-json", "a", "--csv", "a"], "--log-json and --csv are the same file"),
        ([*DECODE, "--resident", "--io-trace", "a"], "traces are of streaming"),
        ([*DECODE, "--compute-trace", "a", "--compute-trace-layers", "b"], "either by node or by layer"),
        ([*DECODE, "--progress", "--quiet"], "--progress and --quiet exclude each other"),
        ([*DECODE, "--metrics-port", "65536"], "'65536' is not a whole number from 0 to 65535"),
        ([*DECODE, "--drop-cold-experts", "nan"], "'nan' is not a number from 0 to 1"),
        ([*DECODE, "--drop-cold-experts", "1e-1"], "'1e-1' is not a number from 0 to 1"),
        ([*DECODE, "--drop-cold-experts", "1.5"], "'1.5' is not a number from 0 to 1"),
        ([*DECODE, "--expert-substitute", "-1"], "'-1' is not a number from 0 to 100"),
        (
            [*DECODE, "--drop-no-renorm", "--drop-in-prefill"],
            "--drop-no-renorm, --drop-in-prefill: no effect",
        ),
        ([*DECODE, "--deterministic-cache"], "--deterministic-cache: no effect without --drop-cold-experts"),
        ([*DECODE, "--prefetch", "1", "--predict-prefetch"], "prefetch and predict-prefetch exclude"),
        ([*DECODE, "--route-ahead", "1", "--predict-log"], "route-ahead excludes prefetch"),
        ([*DECODE, "--route-ahead", "9"], "'9' is not a whole number from 0 to 8"),
        ([*DECODE, "--resident", "--warm", "auto"], "--warm: no effect with --resident"),
        ([*DECODE, "--cache-mb", "5", "--cache-ceil-mb", "5"], "--cache-ceil-mb goes with --cache-mb auto"),
        (
            [*DECODE, "--dense-weights", "gpu"],
            "'gpu' is not one of 'anon', 'mmap', 'warm', 'locked', 'repack'",
        ),
        (["verify", "-m", "m.gguf", "--resident"], "no such option '--resident'"),
    ],
)
def test_a_wrong_request_is_one_line_and_code_2(
    run: Callable[..., Outcome], fake: FakeSession, words: Sequence[str], message: str
) -> None:
    outcome = run(*words)
    assert message in outcome.error
    assert (outcome.code, outcome.out, outcome.err.count("\n")) == (2, "", 1)
    assert fake.config is None


def test_the_policies_that_help_names_are_those_that_exist(run: Callable[..., Outcome]) -> None:
    assert " or ".join(sorted(POLICIES)) in run("decode", "--help").out


@pytest.mark.parametrize("code", ["import bmoe.cli", "from bmoe.cli import main; main(['--help'])"])
def test_the_command_line_imports_nothing_heavy_before_a_command_needs_it(code: str) -> None:
    heavy = "{'llama_cpp', 'numpy', 'uvloop', 'structlog', 'rich', 'liburing', 'gguf', 'asyncio'}"
    check = f"import sys; {code}; print('found', {heavy} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", check], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "found set()"


# --- decode: configuration and prompts --------------------------------------------------------------------


def test_the_defaults_stream_with_everything_on(run: Callable[..., Outcome], fake: FakeSession) -> None:
    assert run(*DECODE).code == 0
    config, request = fake.config, fake.request
    assert config is not None
    assert request is not None
    assert (config.model_path, config.mode, config.overlap, config.direct) == ("m.gguf", "auto", True, True)
    assert (config.cache_bytes, config.policy, config.io_backend) == (None, "recurring", "auto")
    assert (config.context_tokens, config.ubatch_tokens) == (2048, 512)
    assert config.threads == len(os.sched_getaffinity(0))
    assert (request.prompt, request.n_predict, request.forced, request.ignore_eog) == ("Hi", 128, (), False)
    assert fake.closed


def test_every_option_reaches_the_configuration(
    run: Callable[..., Outcome], fake: FakeSession, tmp_path: Path
) -> None:
    (tmp_path / "forced").write_bytes(b"ab\r\n")
    words = (
        "-n 7 -t 3 -c 300 --no-overlap --cache-mb 500 --policy lru --io-backend threads --queue-depth 9 "
        f"--no-odirect --ignore-eog --force-tokens {tmp_path / 'forced'}"
    )
    assert run(*DECODE, *words.split()).code == 0
    config, request = fake.config, fake.request
    assert config is not None
    assert request is not None
    assert (config.threads, config.context_tokens, config.ubatch_tokens) == (3, 300, 300)
    assert (config.overlap, config.cache_bytes, config.policy) == (False, 500 * MIB, "lru")
    assert (config.io_backend, config.queue_depth, config.direct) == ("threads", 9, False)
    assert (request.n_predict, request.forced, request.ignore_eog) == (7, (97, 98, 13, 10), True)


def test_every_lever_reaches_the_configuration(run: Callable[..., Outcome], fake: FakeSession) -> None:
    words = (
        "--cache-ceil-mb 900 --give-back --warm auto --dense-weights locked --drop-cold-experts .75 "
        "--drop-no-renorm --drop-in-prefill --deterministic-cache --expert-substitute 0.1 --route-ahead 2 "
        "--replay-routing trace.csv --route-trace r --io-trace i --compute-trace-layers c"
    )
    assert run(*DECODE, *words.split()).code == 0
    c = fake.config
    assert c is not None
    assert (c.cache_ceil_bytes, c.give_back, c.warm, c.dense_weights) == (900 * MIB, True, "auto", "locked")
    assert (c.drop_cold_experts, c.drop_renormalise, c.drop_in_prefill) == (0.75, False, True)
    assert (c.deterministic_cache, c.expert_substitute, c.route_ahead) == (True, 0.1, 2)
    assert (c.replay_routing, c.route_trace, c.io_trace) == ("trace.csv", "r", "i")
    assert (c.compute_trace, c.compute_trace_layers, c.layer_metrics) == (None, "c", False)
    assert run(*DECODE, "--prefetch", "2", "--compute-trace", "c").code == 0
    assert (fake.config.prefetch_layers, fake.config.compute_trace) == (2, "c")  # type: ignore[union-attr]  # it ran
    assert run(*DECODE, "--predict-prefetch", "--predict-log").code == 0


def test_as_many_tokens_as_the_context_holds(run: Callable[..., Outcome], fake: FakeSession) -> None:
    assert run(*DECODE, "-n", "max", "--stop", "a", "--stop", "b", "--context-shift").code == 0
    assert fake.request is not None
    assert (fake.request.n_predict, fake.request.stop) == (None, ("a", "b"))
    assert fake.request.context_shift


@pytest.mark.parametrize(
    ("words", "repack"), [(["--resident"], True), (["--resident", "--no-repack"], False)]
)
def test_resident_is_plain_llama_cpp(
    run: Callable[..., Outcome], fake: FakeSession, words: Sequence[str], repack: bool
) -> None:
    assert run(*DECODE, *words).code == 0
    assert fake.config is not None
    assert (fake.config.mode, fake.config.repack) == ("resident", repack)


@pytest.mark.parametrize("words", [["-"], ["-f", "-"]])
def test_a_prompt_from_standard_input_is_taken_as_it_is(
    run: Callable[..., Outcome], fake: FakeSession, monkeypatch: pytest.MonkeyPatch, words: Sequence[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b" A\r\n \xc3\xa9\n")))
    assert run(*DECODE[:3], *words).code == 0
    assert fake.request is not None
    assert fake.request.prompt == " A\r\n é\n"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "prompt: cannot be read: No such file or directory"),
        (b"ab\xffc", "prompt at byte 2: is not UTF-8; got byte 0xff"),
    ],
)
def test_a_bad_prompt_file_is_one_line_and_code_1(
    run: Callable[..., Outcome], fake: FakeSession, tmp_path: Path, content: bytes | None, message: str
) -> None:
    path = tmp_path / "prompt"
    if content is not None:
        path.write_bytes(content)
    outcome = run(*DECODE[:3], "-f", str(path))
    assert outcome.error == str(tmp_path / message)
    assert outcome.code == 1
    assert fake.config is None


def test_an_endless_prompt_file_is_refused(
    run: Callable[..., Outcome], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bmoe.cli.options._MOST_PROMPT_BYTES", MIB)
    assert run(*DECODE[:3], "-f", "/dev/zero").error == "/dev/zero: is larger than 1 MiB"


# --- decode: output ---------------------------------------------------------------------------------------


def test_text_goes_to_standard_output_and_the_rest_to_standard_error_in_order(
    run: Callable[..., Outcome], fake: FakeSession
) -> None:
    outcome = run(*DECODE)
    assert outcome.code == 0
    assert outcome.out == "Hello, world\n"
    expected = [mode_line(EFFECTIVE), *summary_lines(replace(SUMMARY, tokens=2), LOAD)]
    assert outcome.err.splitlines() == expected
    assert fake.closed


def test_text_that_ends_its_line_gets_no_other(
    run: Callable[..., Outcome], use: Callable[[FakeSession], FakeSession]
) -> None:
    use(FakeSession(["日本", "", "\n"]))
    assert run(*DECODE).out == "日本\n"
    use(FakeSession([]))
    assert run(*DECODE).out == ""


def test_warnings_follow_the_mode_line(
    run: Callable[..., Outcome], use: Callable[[FakeSession], FakeSession]
) -> None:
    use(FakeSession(effective=replace(EFFECTIVE, cache_bytes=MIB)))
    first, second, *_ = run(*DECODE).err.splitlines()
    assert first.startswith("mode: streaming")
    assert second.startswith("warning: the cache of 1.0 MiB")


def test_quiet_leaves_the_text(run: Callable[..., Outcome], fake: FakeSession) -> None:
    outcome = run(*DECODE, "--quiet")
    assert (outcome.code, outcome.out, outcome.err) == (0, "Hello, world\n", "")
    assert fake.closed


def test_a_dense_model_says_that_it_runs_resident(
    run: Callable[..., Outcome], use: Callable[[FakeSession], FakeSession]
) -> None:
    use(FakeSession(effective=replace(RESIDENT, mode_reason="the model has no experts")))
    assert run(*DECODE).err.startswith("mode: resident (the model has no experts);")


def test_a_failed_open_is_one_line(
    run: Callable[..., Outcome], use: Callable[[FakeSession], FakeSession], tmp_path: Path
) -> None:
    use(FakeSession(opening=[FormatError("no GGUF", path="m\x1b.gguf", offset_bytes=0)]))
    outcome = run(*DECODE, "--log-json", str(tmp_path / "log"))
    assert (outcome.code, outcome.out, outcome.error) == (1, "", "m\\x1b.gguf at byte 0: no GGUF")
    start, error, end = lines(tmp_path / "log")
    assert (start["event"], start["effective"]) == ("run_start", None)
    assert (error["event"], error["type"]) == ("error", "FormatError")
    assert end["exit_code"] == 1


def test_a_failed_read_ends_the_text_the_summary_and_the_run(
    run: Callable[..., Outcome], use: Callable[[FakeSession], FakeSession], tmp_path: Path
) -> None:
    session = use(
        FakeSession(["He", ReadError("came short", path="m.gguf", offset_bytes=8, expected=9, got=1)])
    )
    outcome = run(*DECODE, "--log-json", str(tmp_path / "log"))
    assert (outcome.code, outcome.out) == (1, "He\n")
    assert outcome.error == "m.gguf at byte 8: came short; expected 9, got 1"
    assert "decode:  1 token in 0.20 s, 5.00 tok/s, stopped by an error" in outcome.err
    assert session.closed
    events = [(line["event"], line.get("summary", {}).get("end")) for line in lines(tmp_path / "log")]
    assert events == [
        ("run_start", None),
        ("load", None),
        ("prefill", None),
        ("token", None),
        ("summary", "error"),
        ("io_error", None),
        ("error", None),
        ("run_end", None),
    ]


def test_a_bug_is_a_traceback_and_a_request_to_report_it(
    run: Callable[..., Outcome], use: Callable[[FakeSession], FakeSession], tmp_path: Path
) -> None:
    session = use(FakeSession(["He", RuntimeError("impossible")]))
    outcome = run(*DECODE, "--log-json", str(tmp_path / "log"))
    assert outcome.code == 1
    assert "RuntimeError: impossible" in outcome.err
    assert outcome.err.endswith("bmoe: error: this is a bug in bmoe: please report it with the lines above\n")
    assert session.closed
    assert [line["event"] for line in lines(tmp_path / "log")][-2:] == ["error", "run_end"]


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (MemoryError(), "out of memory"),
        (PermissionError(13, "Permission denied", "/x"), "/x: Permission denied"),
    ],
)
def test_faults_of_the_world_are_no_bugs(
    run: Callable[..., Outcome],
    use: Callable[[FakeSession], FakeSession],
    error: BaseException,
    message: str,
) -> None:
    use(FakeSession(opening=[error]))
    outcome = run(*DECODE)
    assert (outcome.code, outcome.error) == (1, message)


# --- decode: chat -----------------------------------------------------------------------------------------

TALKING = replace(EFFECTIVE, chat_template=True, think_control="template")
THINKING = (Thought("Hm\x1b,"), Thought(" yes."), "Hello", "!")


def test_a_chat_is_messages_in_the_models_template(
    run: Callable[..., Outcome], use: Callable[[FakeSession], FakeSession]
) -> None:
    session = use(FakeSession(effective=TALKING))
    outcome = run(*DECODE, "--chat", "--system", "Be brief.")
    assert session.request is not None
    assert session.request.prompt is None
    assert [(m.role, m.content) for m in session.request.messages] == [
        ("system", "Be brief."),
        ("user", "Hi"),
    ]
    line = "chat: the model's own template; reasoning as the model likes"
    assert outcome.err.splitlines()[1] == line


def test_reasoning_never_mixes_into_the_answer(
    run: Callable[..., Outcome], use: Callable[[FakeSession], FakeSession]
) -> None:
    use(FakeSession(THINKING, effective=TALKING))
    outcome = run(*DECODE, "--chat")
    assert outcome.out == "Hello!\n"
    assert "\nHm\\x1b, yes.\nprefill: " in outcome.err
    hidden = run(*DECODE, "--chat", "--hide-reasoning")
    assert (hidden.out, "yes" in hidden.err) == ("Hello!\n", False)


def test_how_reasoning_is_turned_off_is_said(
    run: Callable[..., Outcome], use: Callable[[FakeSession], FakeSession]
) -> None:
    session = use(FakeSession(effective=replace(TALKING, think_control="prefill")))
    assert (
        "reasoning off, by beginning the answer for the model\n" in run(*DECODE, "--chat", "--no-think").err
    )
    assert session.request is not None
    assert not session.request.think
    use(FakeSession(effective=replace(EFFECTIVE, chat_template_problem="no such filter")))
    assert "chat: the model has no template that works (no such filter):" in run(*DECODE, "--chat").err


# --- decode: figures beside the text -----------------------------------------------------------------------


@pytest.mark.usefixtures("fake")
def test_csv_and_log_have_the_same_tokens(run: Callable[..., Outcome], tmp_path: Path) -> None:
    files = ("--csv", str(tmp_path / "m.csv"), "--log-json", str(tmp_path / "log"))
    assert run(*DECODE, *files).code == 0
    rows = [line for line in (tmp_path / "m.csv").read_text().splitlines() if line[0] != "#"]
    assert [row.partition(",")[0] for row in rows] == ["step", "1", "2"]
    assert sum(line["event"] == "token" for line in lines(tmp_path / "log")) == 2


def test_a_csv_that_cannot_be_opened_is_reported_before_the_model_loads(
    run: Callable[..., Outcome], fake: FakeSession, tmp_path: Path
) -> None:
    outcome = run(*DECODE, "--csv", str(tmp_path))
    assert outcome.error == f"{tmp_path}: the figures cannot be written: Is a directory"
    assert fake.config is None


def test_warnings_and_resizes_on_the_way_are_in_the_log(
    run: Callable[..., Outcome], use: Callable[[FakeSession], FakeSession], tmp_path: Path
) -> None:
    def meanwhile() -> None:
        assert session.on_resize is not None
        assert session.on_warning is not None
        session.on_resize(CacheResize(from_bytes=9, cache_bytes=8, reason="asked"))
        session.on_warning("memory is short")

    session = use(FakeSession(["a", meanwhile, "b"], effective=replace(EFFECTIVE, cache_bytes=MIB)))
    outcome = run(*DECODE, "--log-json", str(tmp_path / "log"))
    assert "\nwarning: memory is short\n" in outcome.err
    found = lines(tmp_path / "log")
    names = "run_start load warning prefill token cache_resize warning token summary run_end"
    assert [line["event"] for line in found] == names.split()
    assert found[5]["cache_bytes"] == 8
    assert found[6]["message"] == "warning: memory is short"


def test_live_figures_are_served_while_it_runs(
    run: Callable[..., Outcome], use: Callable[[FakeSession], FakeSession], capfd: pytest.CaptureFixture[str]
) -> None:
    served: list[str] = []

    def look() -> None:
        mode, where = capfd.readouterr().err.splitlines()[:2]
        assert mode.startswith("mode: ")
        port = int(where.removeprefix("metrics: http://127.0.0.1:").removesuffix("/metrics"))
        with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=10)) as connection:
            connection.request("GET", "/metrics")
            served.append(connection.getresponse().read().decode())

    use(FakeSession(["a", "b", look]))
    assert run(*DECODE, "--metrics-port", "0").code == 0
    assert '\nbmoe_tokens_total{phase="decode"} 2.0\n' in served[0]


def test_a_taken_port_is_reported_before_the_model_loads(
    run: Callable[..., Outcome], fake: FakeSession
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        outcome = run(*DECODE, "--metrics-port", str(port))
    assert outcome.error.startswith(f"port {port} of 127.0.0.1 is in use")
    assert (outcome.code, fake.config) == (2, None)


# --- decode: the log --------------------------------------------------------------------------------------


@pytest.mark.usefixtures("fake")
def test_the_log_tells_the_whole_run(run: Callable[..., Outcome], tmp_path: Path) -> None:
    outcome = run(*DECODE, "--log-json", str(tmp_path / "log"))
    assert outcome.out == "Hello, world\n"
    found = lines(tmp_path / "log")
    names = [line["event"] for line in found]
    assert names == ["run_start", "load", "prefill", "token", "token", "summary", "run_end"]
    assert found[0]["argv"] == [
        "decode",
        "-m",
        "m.gguf",
        "-p",
        "<prompt>",
        "--log-json",
        str(tmp_path / "log"),
    ]
    assert [line["text"] for line in found if line["event"] == "token"] == ["Hello", ", world"]
    assert found[-1]["exit_code"] == 0


def test_a_log_on_standard_output_takes_the_place_of_the_text(
    run: Callable[..., Outcome], fake: FakeSession
) -> None:
    outcome = run(*DECODE, "--log-json", "-")
    events = [json.loads(line) for line in outcome.out.splitlines()]
    assert [line["text"] for line in events if line["event"] == "token"] == ["Hello", ", world"]
    assert outcome.err.startswith("mode: ")
    assert fake.closed


def test_a_log_that_cannot_be_opened_is_reported_before_the_model_loads(
    run: Callable[..., Outcome], fake: FakeSession, tmp_path: Path
) -> None:
    outcome = run(*DECODE, "--log-json", str(tmp_path))
    assert outcome.error == f"{tmp_path}: the log cannot be opened: Is a directory"
    assert fake.config is None


def test_a_log_that_cannot_be_written_ends_the_run(run: Callable[..., Outcome], fake: FakeSession) -> None:
    outcome = run(*DECODE, "--log-json", "/dev/full")
    assert (outcome.code, outcome.out) == (1, "")
    assert outcome.error == "/dev/full: the log cannot be written: No space left on device"
    assert fake.closed


# --- decode: signals --------------------------------------------------------------------------------------


def test_ctrl_c_while_decoding_ends_with_130_and_the_summary(
    run: Callable[..., Outcome], use: Callable[[FakeSession], FakeSession], tmp_path: Path
) -> None:
    session = use(FakeSession(["Hello", interrupt_self, "wait", "never"]))
    outcome = run(*DECODE, "--log-json", str(tmp_path / "log"))
    assert (outcome.code, outcome.out) == (130, "Hello\n")
    assert "decode:  1 token in 0.20 s, 5.00 tok/s, cancelled\n" in outcome.err
    assert "error" not in outcome.err
    assert session.closed
    found = lines(tmp_path / "log")
    assert [line["event"] for line in found][-2:] == ["summary", "run_end"]
    assert found[-1]["exit_code"] == 130


def test_ctrl_c_in_the_prompt_says_what_was_done(
    run: Callable[..., Outcome], use: Callable[[FakeSession], FakeSession]
) -> None:
    use(FakeSession([interrupt_self, "wait"]))
    outcome = run(*DECODE)
    assert (outcome.code, outcome.out) == (130, "")
    assert "prefill: 12 tokens in 0.60 s, 20.0 tok/s, 700 MiB read, cancelled\n" in outcome.err


def test_ctrl_c_while_loading_says_how_far_it_came(
    run: Callable[..., Outcome], use: Callable[[FakeSession], FakeSession], tmp_path: Path
) -> None:
    use(FakeSession(opening=[interrupt_self, lambda: asyncio.sleep(60)]))
    outcome = run(*DECODE, "--log-json", str(tmp_path / "log"))
    assert (outcome.code, outcome.out) == (130, "")
    assert "\nstopped while loading: 40 of 160 MiB read in " in outcome.err
    assert outcome.err.count("\n") == 2
    assert [line["event"] for line in lines(tmp_path / "log")] == ["run_start", "run_end"]


def test_sigterm_ends_with_143() -> None:
    done = process("terminated", *DECODE)
    out, err = done.communicate()
    assert (done.returncode, out) == (143, b"Hello\n")
    assert b"cancelled" in err


def test_work_that_cannot_be_interrupted_is_left_behind_and_the_log_ends(tmp_path: Path) -> None:
    done = process("stuck", *DECODE, "--log-json", str(tmp_path / "log"))
    _, err = done.communicate()
    assert done.returncode == 130
    assert (
        err.partition(b"\n")[2]
        == b"still loading\nbmoe: left without waiting for work that cannot be interrupted\n"
    )
    found = lines(tmp_path / "log")
    assert [line["event"] for line in found] == ["run_start", "run_end"]
    assert found[-1]["exit_code"] == 130


def test_the_second_ctrl_c_does_not_wait() -> None:
    done = process("interrupted-twice", *DECODE)
    _, err = done.communicate()
    assert done.returncode == 130
    assert b"left without waiting" not in err


def test_a_reader_that_goes_away_ends_the_run_quietly(tmp_path: Path) -> None:
    done = process("endless", *DECODE, "--quiet", "--log-json", str(tmp_path / "log"))
    assert done.stdout is not None
    assert done.stderr is not None
    done.stdout.read(10)
    done.stdout.close()
    assert (done.stderr.read(), done.wait()) == (b"", 141)
    done.stderr.close()
    assert lines(tmp_path / "log")[-1]["exit_code"] == 141


def test_ctrl_c_gets_through_while_the_reader_of_the_text_pauses() -> None:
    done = process("endless", *DECODE, "--quiet")
    assert done.stdout is not None
    done.stdout.read(1)  # it is at it now; from here on the pipe fills up
    done.send_signal(2)
    code = done.wait()
    done.communicate()
    assert code == 130


# --- progress ---------------------------------------------------------------------------------------------


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def progress(stream: io.StringIO, times: Sequence[float]) -> str:
    """Everything shown when told of a quarter at each of the times, then closed."""
    clock = iter([0.0, *times])
    display = ProgressDisplay(
        "loading", lambda done, total: f"{done} of {total} MiB", stream, clock=lambda: next(clock)
    )
    for _ in times:
        display.update(40, 160)
    display.close()
    display.update(40, 160)
    return stream.getvalue()


def test_progress_without_a_terminal_is_a_line_every_few_seconds() -> None:
    line = "loading: 40 of 160 MiB (25 %)\n"
    assert progress(io.StringIO(), [0.1, 2.9]) == ""
    assert progress(io.StringIO(), [0.1, 3.0, 3.1, 5.9, 6.0]) == 2 * line


def test_progress_on_a_terminal_is_a_bar_that_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "80")
    assert progress(_Terminal(), [0.1, 0.2]) == ""
    shown = progress(_Terminal(), [0.1, 0.4, 0.45, 0.6])
    assert "loading" in shown
    assert "40 of 160 MiB" in shown
    assert "\x1b[?25h" in shown  # the cursor is back
    assert shown.rpartition("\x1b[2K")[2] == ""  # and the last thing was to erase the line


def test_progress_on_a_terminal_that_can_do_nothing_is_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    assert progress(_Terminal(), [0.4]) == "loading: 40 of 160 MiB (25 %)\n"


def status(stream: io.StringIO, times: Sequence[float], *, below_text: bool) -> str:
    """Everything that a status line shows when told at each of the times, then closed."""
    clock = iter([0.0, *times])
    line = StatusLine(stream, below_text=below_text, clock=lambda: next(clock))
    line.open()
    for i in range(len(times)):
        line.update(lambda i=i: f"token {i} " + "x" * 99)  # type: ignore[misc]  # a default binds i
    line.close()
    line.close()
    line.update(str)
    return stream.getvalue()


@pytest.fixture
def window(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "get_terminal_size", lambda _: os.terminal_size((20, 10)))
    monkeypatch.setattr(_Terminal, "fileno", lambda _: 2)


@pytest.mark.usefixtures("window")
def test_the_status_line_is_redrawn_in_place_and_leaves_nothing() -> None:
    shown = status(_Terminal(), [0.1, 0.4, 0.45, 0.7], below_text=False)
    assert shown == "\r\x1b[2Ktoken 1 xxxxxxxxxxx\r\x1b[2Ktoken 3 xxxxxxxxxxx\r\x1b[2K"
    assert status(_Terminal(), [0.1], below_text=False) == ""


@pytest.mark.usefixtures("window")
def test_under_text_of_the_same_terminal_it_has_the_last_row_until_closed() -> None:
    shown = status(_Terminal(), [0.4], below_text=True)
    assert shown == (
        "\n\x1b[1A\x1b7\x1b[1;9r\x1b8"
        "\x1b7\x1b[10;1H\x1b[2Ktoken 0 xxxxxxxxxxx\x1b8"
        "\x1b7\x1b[r\x1b[10;1H\x1b[2K\x1b8"
    )


def test_without_a_terminal_the_status_is_a_line_every_few_seconds() -> None:
    shown = status(io.StringIO(), [0.4, 3.1, 4.0, 6.2], below_text=False)
    assert shown.splitlines() == ["token 1 " + "x" * 99, "token 3 " + "x" * 99]
    assert status(io.StringIO(), [3.1], below_text=True) == ""


# --- verify -----------------------------------------------------------------------------------------------

IDENTICAL = VerifyReport(
    identical=True,
    digest="ab" * 32,
    resident_digest="ab" * 32,
    prompt_tokens=90,
    tokens=32,
    first_difference=None,
    effective=EFFECTIVE,
    resident_effective=RESIDENT,
)


@pytest.mark.parametrize(
    ("report", "code", "verdict"),
    [
        (IDENTICAL, 0, f"identical  sha256 {'ab' * 32}  (90 prompt + 32 tokens)\n"),
        (
            replace(IDENTICAL, identical=False, digest="cd" * 32, first_difference=7),
            1,
            f"different from position 7: resident {'ab' * 32} streaming {'cd' * 32}\n",
        ),
    ],
)
def test_verify_prints_the_verdict(
    run: Callable[..., Outcome],
    monkeypatch: pytest.MonkeyPatch,
    report: VerifyReport,
    code: int,
    verdict: str,
) -> None:
    asked: list[tuple[SessionConfig, GenerateRequest]] = []

    async def verify(
        config: SessionConfig, request: GenerateRequest, *, on_stage: Callable[[str], None]
    ) -> VerifyReport:
        asked.append((config, request))
        on_stage("streaming run")
        return report

    monkeypatch.setattr("bmoe.verify.verify", verify)
    outcome = run("verify", "-m", "m.gguf", "--cache-mb", "10", "--no-overlap")
    assert (outcome.code, outcome.out) == (code, verdict)
    assert outcome.err.splitlines() == ["verify: streaming run", mode_line(EFFECTIVE)]
    [(config, request)] = asked
    assert (config.cache_bytes, config.overlap) == (10 * MIB, False)
    assert (len(request.prompt or "") > 200, request.n_predict) == (True, 32)


def test_ctrl_c_ends_verify(run: Callable[..., Outcome], monkeypatch: pytest.MonkeyPatch) -> None:
    async def verify(*_: object, **__: object) -> VerifyReport:
        interrupt_self()
        await asyncio.sleep(60)
        raise AssertionError

    monkeypatch.setattr("bmoe.verify.verify", verify)
    outcome = run("verify", "-m", "m.gguf")
    assert (outcome.code, outcome.out, outcome.err) == (130, "", "")
