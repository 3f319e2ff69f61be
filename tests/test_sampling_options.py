"""The options that say how tokens are chosen."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click
import pytest

from bmoe.cli import run_command
from bmoe.cli.sampling_options import sampling, sampling_options
from bmoe.config import Sampling

if TYPE_CHECKING:
    from pathlib import Path

_made: list[Sampling] = []


@click.command()
@sampling_options
@click.pass_context
def _sample(ctx: click.Context, /, **_: Any) -> None:
    _made[:] = [sampling(ctx)]


def made(*words: str) -> Sampling:
    assert run_command(_sample, "t", words) == 0
    return _made[0]


def test_without_options_the_defaults_are_those_of_the_configuration() -> None:
    assert made() == Sampling()


def test_every_option_arrives(tmp_path: Path) -> None:
    (tmp_path / "g").write_text("root ::= [a]")
    words = "--temp .5 --top-k 3 --top-p 1 --min-p 0.05 --repeat-penalty 1.1 --repeat-last-n -1"
    more = f"--frequency-penalty -.5 --presence-penalty 2. --seed 7 --grammar {tmp_path}/g"
    assert made(*words.split(), *more.split()) == Sampling(
        temperature=0.5,
        top_k=3,
        top_p=1,
        min_p=0.05,
        repeat_penalty=1.1,
        repeat_last_n=-1,
        frequency_penalty=-0.5,
        presence_penalty=2,
        seed=7,
        grammar="root ::= [a]",
    )


def test_a_schema_is_text_or_a_file(tmp_path: Path) -> None:
    (tmp_path / "s").write_text('{"type": "object"}')
    assert made("--json-schema", ' {"a": 1}').json_schema == ' {"a": 1}'
    assert made("--json-schema", str(tmp_path / "s")).json_schema == '{"type": "object"}'


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--temp", "nan"], "'nan' is not a number from 0 to 100"),
        (["--temp", "inf"], "'inf' is not a number"),
        (["--temp", "1e3"], "'1e3' is not a number"),
        (["--temp", "1_0"], "'1_0' is not a number"),
        (["--temp", "-1"], "'-1' is not a number from 0 to 100"),
        (["--temp", "1", "--top-p", "0"], "'0' is not a number above 0 to 1"),
        (["--temp", "1", "--top-k", "x"], "'x' is not a whole number"),
        (["--repeat-last-n", "-2"], "'-2' is not"),
        (["--seed", "4294967295"], "'4294967295' is not a whole number from 0 to 4294967294"),
        (["--top-k", "3", "--min-p", "0"], "--top-k, --min-p: no effect without --temp above 0"),
        (["--grammar", "a", "--json-schema", "{}"], "--grammar and --json-schema exclude each other"),
        (["--json-schema", "{x"], "--json-schema is not JSON"),
        (["--json-schema", '{"a":' * 100_000], "nested too deeply"),
        (["--grammar", "/dev/null"], "--grammar /dev/null: the file is empty"),
        (["--grammar", "-"], "cannot be read: No such file or directory"),
    ],
)
def test_what_is_wrong_is_one_line(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(_sample, "t", words) in {1, 2}
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
