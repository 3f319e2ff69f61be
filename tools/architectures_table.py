"""Writes docs/architectures.md from the gates of tests/test_architectures.py, which it runs.

    python -m bmoe.tools.architectures_table

A row says what the gate has seen: identical logits at both batch widths, with experts read from the file,
and how many matmuls were served. The exit code is pytest's; a gate that fails is in the table all the same.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
import tempfile
from typing import Any, Final

_GATE: Final = "test_an_architecture_streams_exactly"
_DOCUMENT: Final = os.path.join("docs", "architectures.md")

_HEAD: Final = """# Architectures

Made by `python -m bmoe.tools.architectures_table`; do not edit.

bmoe keeps no list of architectures: what llama.cpp computes as an expert matmul over
`blk.N.ffn_(gate|up|down|gate_up)_exps.weight` is streamed, and the rest is llama.cpp's. Each row is a small
random model (`bmoe synth random --arch NAME`) held to `bmoe verify`: every logit of a prompt of
{prompt} tokens and {predicted} tokens after it, resident and streaming, with a tenth of the experts cached,
in batches of 1 and of up to 64 tokens. {count} architectures pass with llama-cpp-python {version}.

| architecture | weights | MoE layers | experts | what it has | batch 1 | batch 64 | matmuls served |
|---|---|---|---|---|---|---|---|
"""

_WHAT: Final = {
    "afmoe": "gated attention, sliding window, selection bias, shared expert",
    "arctic": "a dense feed-forward beside the experts, `ffn_norm_exps`, which is no expert",
    "bailingmoe": "shared expert",
    "bailingmoe2": "fused query, key, value, selection bias, shared expert",
    "dbrx": "layer norms, clamped attention",
    "deepseek": "shared expert",
    "deepseek2": "latent attention, group routing, selection bias, shared expert, a leading dense layer",
    "dots1": "selection bias, shared expert",
    "ernie4_5-moe": "selection bias, shared expert",
    "exaone-moe": "sliding window, selection bias, shared expert",
    "gemma4": "gate and up in one matrix, scales per expert, dense beside experts, sliding window",
    "glm4moe": "biases, selection bias, shared expert, a leading dense layer, a prediction block (ignored)",
    "gpt-oss": "biases of experts (ADD_ID), attention sinks, sliding window",
    "granitehybrid": "Mamba 2 layers between attention",
    "granitemoe": "scaled residuals",
    "grok": "a dense feed-forward beside the experts, soft caps",
    "grovemoe": "a second, smaller set of experts (not streamed, loaded as dense)",
    "hunyuan-moe": "shared expert",
    "jamba": "Mamba layers, experts in every second layer",
    "lfm2moe": "short convolutions between attention, a leading dense layer, selection bias",
    "llama": "Mixtral's layout",
    "llama4": "router weights before the experts, experts in every second layer, shared expert",
    "mellum": "sliding window",
    "mimo2": "attention sinks, sliding window, selection bias",
    "minimax-m2": "norms over all heads, selection bias",
    "nemotron_h_moe": "experts without gate, layers of one kind each, Mamba 2, shared expert",
    "olmoe": "norms over all heads",
    "phimoe": "biases everywhere",
    "qwen2moe": "biases, gated shared expert",
    "qwen35moe": "delta-net layers, gated shared expert, a prediction block (ignored)",
    "qwen3moe": "the plain case",
    "qwen3next": "delta-net layers, gated shared expert",
    "smallthinker": "ReLU experts, sigmoid router",
}

_TAIL: Final = """
## Without a gate

| architecture | why |
|---|---|
| nomic-bert-moe | an encoder: it makes no text |
| llada-moe, rnd1 | diffusion models: they do not decode from left to right |
| dflash, eagle3, gemma4-assistant | drafts for another model's tokens, not models of their own |
| all others with experts | no random model is written yet; llama.cpp builds their experts with the same \
function (`build_moe_ffn`) as those above |

`bmoe verify -m MODEL` is the same gate on a real file, whatever its architecture.

## What is not streamed

Expert tensors of other names (grovemoe's `_chexps`, LoRA adapters) are loaded with the dense weights.
Prediction blocks (`nextn_predict_layers`) are neither loaded nor streamed.
"""


def main() -> int:
    """Runs the gates and writes the document."""
    with tempfile.TemporaryDirectory(prefix="bmoe-gates-") as folder:
        records = os.path.join(folder, "gates.jsonl")
        command = [sys.executable, "-m", "pytest", "-q", "tests/test_architectures.py", "-k", _GATE]
        code = subprocess.run(command, env={**os.environ, "BMOE_GATES": records}, check=False).returncode
        with open(records, encoding="utf-8") as file:
            results = [json.loads(line) for line in file]
    gates: dict[str, dict[int, dict[str, Any]]] = {}
    for result in results:
        gates.setdefault(result["architecture"], {})[result["ubatch"]] = result
    passed = sum(all(one["identical"] for one in gate.values()) for gate in gates.values())
    head = _HEAD.format(
        prompt=results[0]["prompt_tokens"],
        predicted=results[0]["tokens"],
        count=passed,
        version=importlib.metadata.version("llama-cpp-python"),
    )
    rows = [_row(name, gates[name]) for name in sorted(gates)]
    with open(_DOCUMENT, "w", encoding="utf-8") as file:
        file.write(head + "\n".join(rows) + "\n" + _TAIL)
    print(f"{passed} of {len(gates)} pass; {_DOCUMENT} written", file=sys.stderr)
    return code


def _row(name: str, gate: dict[int, dict[str, Any]]) -> str:
    last = gate[64]
    verdicts = ["identical" if gate[ubatch]["identical"] else "DIFFERENT" for ubatch in (1, 64)]
    served = sum(one["nodes"] for one in gate.values())
    cells = [name, last["quant"], last["moe_layers"], f"top {last['top_k']} of {last['experts']}"]
    return f"| {' | '.join(map(str, [*cells, _WHAT.get(name, ''), *verdicts, served]))} |"


if __name__ == "__main__":
    sys.exit(main())
