"""A run at the least limit that `bmoe plan` calls feasible is not killed; far below, it is."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from bmoe.bench.caps import Limits, confined
from bmoe.io.errors import UsageError
from bmoe.tools.oom_sweep import Setting, run, write_prompt
from tests.test_architectures import gate_model

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["qwen3moe", "qwen3next"])
def test_the_kernel_does_not_strike_where_plan_says_feasible(tmp_path: Path, architecture: str) -> None:
    try:
        with confined(Limits(memory_bytes=1 << 30)):
            pass
    except UsageError as error:
        pytest.skip(str(error))
    setting = Setting(model=gate_model(architecture), cache_mib=2, context=1024, ubatch=256, threads=2)
    prompt = write_prompt(setting.model, 300, str(tmp_path))
    least = setting.least_feasible()
    assert not setting.feasible(least - 1)
    assert run(setting, least, prompt).how == "ran"
    assert run(setting, 40, prompt).how == "killed"
