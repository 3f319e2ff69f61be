"""`python -m bmoe` is the command `bmoe`."""

from __future__ import annotations

import sys

from bmoe.cli import main

if __name__ == "__main__":
    sys.exit(main())
