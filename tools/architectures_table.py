"""Writes docs/architectures.md from the gates of tests/test_architectures.py, which it runs.

    python -m bmoe.tools.architectures_table

A row says what the gate has seen: identical logits at both batch widths, experts read from the file, and how many matmuls were served. The
exit code is 1 if a gate fails; the table then says so.
"""

from __future__ import annotations

import os
import sys
from typing import Final

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
    import importlib.metadata

    from tests.test_architectures import GATES, PROMPT, gate, gate_model

    rows = []
    passed = 0
    for name, about in GATES.items():
        path = gate_model(name)
        verdicts, nodes = [], 0
        report = None
        for ubatch in (1, 64):
            report, seen = gate(path, ubatch_tokens=ubatch)
            good = report.identical and seen.nodes > 0 and seen.reads > 0 and seen.finite and seen.varied
            verdicts.append("identical" if good else "DIFFERENT")
            nodes += seen.nodes
        assert report is not None
        e = report.effective
        passed += verdicts == ["identical", "identical"]
        rows.append(
            f"| {name} | {about.quant} | {e.moe_layers} | top {e.top_k} of {e.experts} | "
            f"{_WHAT.get(name, '')} | {' | '.join(verdicts)} | {nodes} |"
        )
        print(rows[-1])
    head = _HEAD.format(
        prompt=len(PROMPT) + 1,
        predicted=3,
        count=passed,
        version=importlib.metadata.version("llama-cpp-python"),
    )
    with open(_DOCUMENT, "w", encoding="utf-8") as file:
        file.write(head + "\n".join(rows) + "\n" + _TAIL)
    print(f"{passed} of {len(GATES)} pass; {_DOCUMENT} written", file=sys.stderr)
    return 0 if passed == len(GATES) else 1


if __name__ == "__main__":
    sys.exit(main())
