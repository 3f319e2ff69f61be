"""Perplexity: the same as by hand, the same however it is computed, and honest about levers."""

from __future__ import annotations

import json
import math
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from bmoe.cli import main
from bmoe.io.errors import UsageError
from bmoe.perplexity import measure
from bmoe.session import Session
from tests.models import tiny_moe
from tests.runs import config, run

if TYPE_CHECKING:
    from pathlib import Path

TEXT = "Perplexity is what is left of a surprise when it is spread over all words of a text."


def by_hand(wanted: Any) -> float:
    async def scenario() -> float:
        async with await Session.open(wanted) as session:

            def nll() -> float:
                tokens = session.model.tokenize(TEXT)
                total = 0.0
                for token, target in pairwise(tokens):
                    session.context.decode((token,))
                    x = session.context.logits(-1).astype(np.float64)
                    total -= math.log(np.exp(x[target] - x.max()) / np.exp(x - x.max()).sum())
                return total / (len(tokens) - 1)

            return math.exp(await session.on_decode_thread(nll))

    return run(scenario())


def test_perplexity_is_what_it_is_by_hand() -> None:
    wanted = config(tiny_moe())
    (plain,) = run(measure(wanted, TEXT))
    assert plain.perplexity == pytest.approx(by_hand(wanted), rel=1e-12)
    assert plain.tokens == len(TEXT)  # a token per byte, and one before them
    assert plain.agreement is None
    assert plain.read_bytes_per_token is not None


def test_a_lossless_lever_changes_nothing_and_a_lossy_one_is_told_apart() -> None:
    wanted = config(tiny_moe(layers=4, experts=32), cache_bytes=2 << 20)
    levers: list[tuple[str, dict[str, Any]]] = [
        ("prefetch", {"prefetch_layers": 1}),
        ("drop", {"drop_cold_experts": 1.0}),
    ]
    plain, prefetch, drop = run(measure(wanted, TEXT, levers=levers))
    assert prefetch.perplexity == plain.perplexity
    assert prefetch.agreement == 1.0
    assert prefetch.divergence == pytest.approx(0, abs=1e-12)
    assert drop.perplexity != plain.perplexity
    assert drop.divergence is not None
    assert drop.divergence > 0
    assert drop.dropped_share
    assert drop.effective.lossy is not None
    assert (drop.read_bytes_per_token or 0) < (plain.read_bytes_per_token or 0)


def test_batches_and_single_tokens_agree() -> None:
    wanted = config(tiny_moe(quant="F32"))
    (single,) = run(measure(wanted, TEXT))
    (batched,) = run(measure(wanted, TEXT, batched=True))
    assert batched.perplexity == pytest.approx(single.perplexity, rel=1e-3)


def test_a_text_longer_than_the_context_is_cut_into_windows() -> None:
    (result,) = run(measure(config(tiny_moe(), context_tokens=256), TEXT * 5, most_tokens=300))
    assert result.tokens == 299


def test_a_text_of_one_token_is_refused() -> None:
    with pytest.raises(UsageError, match="too short"):
        run(measure(config(tiny_moe()), ""))


def test_the_command_prints_a_row_per_lever(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = tmp_path / "text.txt"
    text.write_text(TEXT)
    words = ["ppl", "-m", tiny_moe(), "-f", str(text), "-t", "1", "-c", "256", "--cache-mb", "2"]
    assert main([*words, "--lever", "drop-cold-experts=0.5,drop-no-renorm", "--json"]) == 0
    out, err = capsys.readouterr()
    plain, drop = json.loads(out)
    assert (plain["label"], drop["label"]) == ("plain", "drop-cold-experts=0.5,drop-no-renorm")
    assert "not renormalised" in drop["effective"]["lossy"]
    assert "plain: mode: streaming" in err
    assert main([*words, "--lever", "policy=lru", "--quiet"]) == 0
    assert "policy=l" in capsys.readouterr().out


@pytest.mark.parametrize(
    "lever", ["nonsense=1", "drop-cold-experts=x", "drop-cold-experts=2", "drop-no-renorm=1"]
)
def test_levers_that_are_none_are_refused(
    lever: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "text.txt"
    text.write_text(TEXT)
    assert main(["ppl", "-m", tiny_moe(), "-f", str(text), "--lever", lever]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1
