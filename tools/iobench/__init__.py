"""`bmoe-iobench`: what a drive gives to reads as the engine makes them.

`run` measures, `tables` and `plots` show, `remember` keeps, `recall` finds again. Random reads go through
`bmoe.io`'s own backends. Knows neither llama.cpp nor its bindings: GGUF headers are read by bmoe.synth.
"""

from __future__ import annotations

from bmoe.tools.iobench.drives import drive_key, recall, remember
from bmoe.tools.iobench.result import Result
from bmoe.tools.iobench.run import run
from bmoe.tools.iobench.settings import ReplaySettings, Settings

__all__ = ["ReplaySettings", "Result", "Settings", "drive_key", "recall", "remember", "run"]
