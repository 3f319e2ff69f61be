"""Settings for all tests, before any library is loaded."""

from __future__ import annotations

import os

# Compute threads sleep in llama.cpp's barriers instead of spinning: tests run more threads than there are
# idle cores, and spinning then costs a scheduler tick per barrier (a run of 0.05 s takes 5 s).
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
