"""`bmoe-iobench`: a place holder until the benchmark is built."""

from __future__ import annotations

import sys


def main() -> int:
    """Says that there is nothing yet."""
    sys.stderr.write("bmoe-iobench: not built yet\n")
    return 1


if __name__ == "__main__":
    sys.exit(main())
