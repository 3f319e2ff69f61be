"""Comparisons that others can repeat: sides of a matrix, interleaved, each run in a process of its own.

`sides` says what is compared, `runner` in which order and what is repeated, `child` is one run, `state` what
the machine was like, `report` and `plots` what came out. Nothing is imported here: `launch` and `child` start
for every run.
"""

from __future__ import annotations

__all__: list[str] = []
