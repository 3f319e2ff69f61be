"""What llama.cpp demands of a model and checks by ending the process.

It says most errors in words, but some it asserts; those are asked here first. Each rule names what it
guards against in llama.cpp 0.3.36. Keys that are missing are left to llama.cpp, which says so. Must not
know how headers are read, nor streaming.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final, NoReturn, TypedDict

from bmoe.gguf_types import NO_WEIGHTS
from bmoe.io.errors import FormatError

if TYPE_CHECKING:
    from bmoe.gguf_file import GgufFacts

_TENSOR_ALIGNMENT: Final = 32  # of a buffer made from a mapping
_MAX_ARCHITECTURE: Final = 64
_MAX_LAYERS: Final = 512
_MAX_EXPERTS: Final = 1024
_MAX_HEAD_DIM: Final = 8192
_OF_EXPERTS: Final = re.compile(r"^blk\.(\d+)\.(ffn_gate_inp|ffn_(?:gate|up|down|gate_up)_exps)\.weight$")
_INDEX_TABLES: Final = "ffn_gate_tid2eid.weight"
_ROPE_SCALINGS: Final = ("none", "linear", "yarn", "longrope")
_NO_VOCABULARY: Final = ("none", "no_vocab")
# Integers that llama.cpp divides by.
_DIVISORS: Final = (
    "full_attention_interval",
    "ssm.time_step_rank",
    "interleave_moe_layer_step",
)


# Found by the fuzzer: what is optional for the loader and used by the graph all the same.
_NOT_ZERO: Final = {
    "afmoe": ("attention.sliding_window",),
    "mellum": ("attention.sliding_window",),
    "phimoe": ("rope.dimension_count",),
}
_NEEDED: Final = {"afmoe": ("attention.sliding_window",), "mellum": ("attention.sliding_window",)}
_CONVOLUTION = re.compile(r"^(blk\.\d+\.)ssm_conv1d\.weight$")
_WITH_CONVOLUTION: Final = {
    "granitehybrid": (("ssm_conv1d.bias",),),
    "nemotron_h": (("ssm_conv1d.bias",),),
    "nemotron_h_moe": (("ssm_conv1d.bias",),),
    "qwen35": (("attn_qkv.weight",), ("attn_gate.weight",)),
    "qwen35moe": (("attn_qkv.weight",), ("attn_gate.weight",)),
    "qwen3next": (("attn_qkv.weight", "ssm_in.weight"), ("attn_gate.weight", "ssm_in.weight")),
}


class _Where(TypedDict):
    path: str
    offset_bytes: int
    field: str


def check_rules(facts: GgufFacts) -> None:
    """Refuses a model that would end the process.

    Raises:
        FormatError: Naming the key or tensor.
    """
    if len(facts.architecture) > _MAX_ARCHITECTURE:
        _refuse(
            facts, "general.architecture", "is no name that llama.cpp knows", f"{facts.architecture[:32]}…"
        )
    _check_tensors(facts)
    tokenizer = facts.metadata.get("tokenizer.ggml.model")
    if tokenizer in _NO_VOCABULARY:
        _refuse(facts, "tokenizer.ggml.model", "has no vocabulary to read prompts with", tokenizer)
    rule = _Rules(facts)
    layers = rule.integer("block_count", 1, _MAX_LAYERS)
    rule.integer("nextn_predict_layers", 0, _MAX_LAYERS if layers is None else layers)
    for key in (*_DIVISORS, *_NOT_ZERO.get(facts.architecture, ())):
        rule.integer(key, 1, 2**31 - 1)
    rule.choice("rope.scaling.type", _ROPE_SCALINGS)
    for key in ("attention.key_length", "attention.value_length"):
        rule.integer(key, 1, _MAX_HEAD_DIM)  # else gigabytes of cache for a few tokens
    if layers is not None:
        for key in _NEEDED.get(facts.architecture, ()):
            if rule.name(key) not in facts.metadata:
                _refuse(facts, rule.name(key), "is missing", None)
        _check_experts(rule)
        _check_expert_layers(facts)
    _check_convolutions(facts)


def _check_tensors(facts: GgufFacts) -> None:
    for tensor in facts.tensors:
        where: _Where = {
            "path": facts.paths[tensor.file],
            "offset_bytes": tensor.offset_bytes,
            "field": tensor.name,
        }
        if tensor.offset_bytes % _TENSOR_ALIGNMENT:
            raise FormatError(f"llama.cpp needs tensors at multiples of {_TENSOR_ALIGNMENT} bytes", **where)
        # A null function of the type is called. Tables of indices are looked up, never multiplied.
        if tensor.type_name in NO_WEIGHTS and not tensor.name.endswith(_INDEX_TABLES):
            raise FormatError(f"weights cannot be of type {tensor.type_name}", **where)


def _check_convolutions(facts: GgufFacts) -> None:
    """A recurrent layer has what its convolution is used with."""
    needs = _WITH_CONVOLUTION.get(facts.architecture, ())
    names = {tensor.name for tensor in facts.tensors}
    for match in filter(None, map(_CONVOLUTION.match, names)):
        for alternatives in needs:
            if not any(match[1] + name in names for name in alternatives):
                _refuse(facts, match[1] + alternatives[0], "is missing", None)


def _check_experts(rule: _Rules) -> None:
    experts = rule.integer("expert_count", 0, _MAX_EXPERTS)
    if not experts:
        rule.integer("expert_used_count", 0, 0)
        rule.integer("expert_group_count", 0, 0)
        return
    if rule.name("expert_used_count") not in rule.facts.metadata:
        _refuse(rule.facts, rule.name("expert_used_count"), f"is missing beside {experts} experts", None)
    if not rule.facts.arch_int("attention.head_count"):
        _refuse(rule.facts, rule.name("attention.head_count"), "is missing or 0, and divided by", None)
    rule.integer("expert_used_count", 0 if rule.is_array("expert_used_count") else 1, experts)
    groups = rule.integer("expert_group_count", 0, experts - 1)
    if groups is not None and groups > 1:
        if experts % groups:
            _refuse(rule.facts, rule.name("expert_group_count"), f"does not divide {experts} experts", groups)
        rule.integer("expert_group_used_count", 1, groups - 1)


def _check_expert_layers(facts: GgufFacts) -> None:
    """A layer has all of its expert tensors or none: some architectures ask for one and use the others."""
    found: dict[str, set[str]] = {}
    for tensor in facts.tensors:
        if match := _OF_EXPERTS.match(tensor.name):
            found.setdefault(match[1], set()).add(match[2])
    for layer, names in found.items():
        if names == {"ffn_gate_inp"}:
            continue
        for one, other in (
            ("ffn_gate_inp",) * 2,
            ("ffn_down_exps",) * 2,
            ("ffn_up_exps", "ffn_gate_up_exps"),
        ):
            if not names & {one, other}:
                _refuse(facts, f"blk.{layer}.{one}.weight", f"is missing beside {min(names)}.weight", None)


class _Rules:
    """Checks of `<architecture>.<key>`; a key that is missing passes."""

    def __init__(self, facts: GgufFacts) -> None:
        self.facts = facts

    def name(self, key: str) -> str:
        return f"{self.facts.architecture}.{key}"

    def is_array(self, key: str) -> bool:
        return isinstance(self.facts.metadata.get(self.name(key)), tuple)

    def integer(self, key: str, low: int, high: int) -> int | None:
        """The value, or the largest of one per layer, all within the limits."""
        full = self.name(key)
        if full not in self.facts.metadata:
            return None
        value = self.facts.metadata[full]
        values = value if isinstance(value, tuple) else (value,)
        for one in values:
            if not isinstance(one, int) or isinstance(one, bool) or not low <= one <= high:
                _refuse(self.facts, full, f"is not an integer from {low} to {high}", value)
        return max((v for v in values if isinstance(v, int)), default=None)

    def choice(self, key: str, values: tuple[str, ...]) -> None:
        full = self.name(key)
        value = self.facts.metadata.get(full)
        if full in self.facts.metadata and value not in values:
            _refuse(self.facts, full, f"is not one of {', '.join(values)}", value)


def _refuse(facts: GgufFacts, key: str, message: str, got: object) -> NoReturn:
    raise FormatError(message, path=facts.paths[0], field=key, got=got)


def can_be_multiplied(type_name: str) -> bool:
    """Whether ggml has a matrix product for weights of this type."""
    return type_name not in NO_WEIGHTS
