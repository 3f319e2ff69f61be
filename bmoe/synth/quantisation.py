"""Which block type each matrix of a random model gets, by the name of a quantisation.

A name is either a block type's, for every matrix, or a mixture's. Knows no bytes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from gguf.constants import GGML_QUANT_SIZES
from gguf.constants import GGMLQuantizationType as Type

from bmoe.io.errors import UsageError
from bmoe.synth.blocks import RANDOM_TYPES

if TYPE_CHECKING:
    from bmoe.synth.parts import TensorSpec

MIXTURE: Final = "Q4_K_M"

QUANTISATIONS: Final = (*sorted(kind.name for kind in RANDOM_TYPES), MIXTURE)
"""Every name that `block_type` knows. `Q4_K_M` is Q4_K but for the output matrix and, in every other
layer, `attn_v` and the experts' down projection, which are Q6_K: slices differ from layer to layer.
"""


def block_type(quantisation: str, tensor: TensorSpec) -> Type:
    """The type of `tensor` in a model of that quantisation.

    Raises:
        UsageError: There is no such quantisation, or the tensor's rows are no whole blocks of its type.
    """
    if quantisation not in QUANTISATIONS:
        raise UsageError(f"quantisation {quantisation}: choose from {', '.join(QUANTISATIONS)}")
    if tensor.kind != "matrix":
        return Type.F32
    kind = _mixed(tensor) if quantisation == MIXTURE else Type[quantisation]
    block_values = GGML_QUANT_SIZES[kind][0]
    if tensor.shape[0] % block_values:
        raise UsageError(
            f"tensor {tensor.name} has rows of {tensor.shape[0]} values, {kind.name} needs whole blocks of "
            f"{block_values}",
            hint="choose other widths, or a quantisation with smaller blocks such as Q8_0",
        )
    return kind


def _mixed(tensor: TensorSpec) -> Type:
    if tensor.layer is None:
        return Type.Q6_K if tensor.name == "output.weight" else Type.Q4_K
    sensitive = tensor.name.endswith(("ffn_down_exps.weight", "ffn_down.weight", "attn_v.weight"))
    return Type.Q6_K if sensitive and tensor.layer % 2 == 0 else Type.Q4_K
