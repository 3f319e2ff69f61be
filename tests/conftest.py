"""Settings for all tests, before any library is loaded."""

from __future__ import annotations

import os
import signal
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

# Compute threads sleep in llama.cpp's barriers instead of spinning: tests run more threads than there are
# idle cores, and spinning then costs a scheduler tick per barrier (a run of 0.05 s takes 5 s).
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

# Under nohup, or in the background of a script, these are ignored, and what is started inherits that: tests
# that send them would wait for ever.
for _number in (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP):
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, signal.default_int_handler if _number == signal.SIGINT else signal.SIG_DFL)


@pytest.fixture(autouse=True, scope="session")
def _sessions_leave_the_garbage_to_python() -> Iterator[None]:
    """A session collects garbage when it opens: 30 ms among pytest's own objects, hundreds of times."""
    with pytest.MonkeyPatch.context() as patch:
        nothing = dict.fromkeys(("collect", "freeze", "unfreeze"), lambda: None)
        patch.setattr("bmoe.session.gc", SimpleNamespace(**nothing))
        yield
