"""Random weights as the bytes of any block type, at the speed of a random number generator.

Nothing is quantised. Every type of ggml packs a row into blocks of scales and small integers, and
almost any bit pattern is a valid small integer; so a tensor starts as uniform random bytes and only
the scales are overwritten, such that the values they describe have mean zero and the standard
deviation asked for:

- types without a minimum get scales of random sign, because their integers are off centre by a half
  (0 to 15 less 8), and a mean that every weight shares is amplified from layer to layer;
- types with a minimum get the one that centres their range exactly (7.5 scales for 0 to 15).

The bytes come from PCG64, whose raw stream numpy guarantees, seeded by the model's seed and the
tensor's name; scales are looked up in tables made by correctly rounded arithmetic. So a seed gives the
same bytes on every machine, tensors do not depend on each other, and no page of 4 KiB occurs twice.
Measured: 0.5 (F16) to 2.5 GB/s on one core, in a few tens of MiB.

Knows types and statistics, no tensor's purpose and no file.
"""

from __future__ import annotations

import hashlib
import math
from typing import TYPE_CHECKING, Final

import numpy as np
from gguf.constants import GGML_QUANT_SIZES
from gguf.constants import GGMLQuantizationType as Type

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from numpy.typing import NDArray

    Bytes = NDArray[np.uint8]

CHUNK_BYTES: Final = 4 << 20


def _off_centre_rms(levels: int) -> float:
    """The rms of an integer evenly over [-levels/2, levels/2): off centre by a half."""
    return math.sqrt((levels * levels + 2) / 12)


# Types that need nothing but their scale "d", a half float: its offset in the block, and the rms of what
# it multiplies over random bytes: analytic where the integers are evenly spaced, else the average over
# the type's code book.
_SCALE_ONLY: Final[dict[Type, tuple[int, float]]] = {
    Type.Q4_0: (0, _off_centre_rms(16)),
    Type.Q5_0: (0, _off_centre_rms(32)),
    Type.Q8_0: (0, _off_centre_rms(256)),
    Type.Q3_K: (108, _off_centre_rms(64) * _off_centre_rms(8)),
    Type.Q6_K: (208, _off_centre_rms(256) * _off_centre_rms(64)),
    Type.IQ4_NL: (0, 67.4),
    Type.IQ4_XS: (0, 67.4 * _off_centre_rms(64)),
    Type.IQ3_S: (0, 140.2),
    Type.IQ3_XXS: (0, 142.5),
    Type.IQ2_S: (0, 56.4),
    Type.IQ2_XS: (0, 55.9),
    Type.IQ2_XXS: (0, 53.3),
    Type.IQ1_S: (0, 7.19),
    Type.TQ2_0: (64, _off_centre_rms(4)),
    Type.TQ1_0: (52, 0.817),
}

# Types of the form scale · q - minimum, with q in range(levels): the offset of the two half floats, the
# levels, the sign in which the minimum is stored, and the rms of the sub-scale that multiplies both.
_SCALE_AND_MINIMUM: Final[dict[Type, tuple[int, int, int, float]]] = {
    Type.Q4_1: (0, 16, +1, 1.0),
    Type.Q5_1: (0, 32, +1, 1.0),
    Type.Q2_K: (80, 4, -1, math.sqrt(sum(i * i for i in range(16)) / 16)),
    Type.Q4_K: (0, 16, -1, math.sqrt(sum(i * i for i in range(64)) / 64)),
    Type.Q5_K: (0, 32, -1, math.sqrt(sum(i * i for i in range(64)) / 64)),
}

_FLOATS: Final = (Type.F32, Type.F16, Type.BF16)

RANDOM_TYPES: Final = (*_FLOATS, *_SCALE_ONLY, *_SCALE_AND_MINIMUM, Type.MXFP4)
"""The types that `random_chunks` can make."""


def random_chunks(
    kind: Type, values: int, *, deviation: float, mean: float = 0.0, seed: int, name: str
) -> Iterator[memoryview]:
    """The bytes of `values` random weights.

    Args:
        kind: One of `RANDOM_TYPES`.
        values: How many; whole blocks of `kind`.
        deviation: The standard deviation of the weights.
        mean: Their mean, zero but for the float types.
        seed: The model's seed, not negative.
        name: The tensor's; another name gives other bytes.

    Yields:
        Pieces of at most 4 MiB.
    """
    block_values, block_bytes = GGML_QUANT_SIZES[kind]
    digest = hashlib.sha256(name.encode()).digest()
    source = np.random.PCG64([seed, int.from_bytes(digest[:16], "little")])
    if kind in _FLOATS:
        for count in _portions(values, CHUNK_BYTES // 4):
            yield _floats(_raw(source, 4 * count), kind, deviation, mean).data.cast("B")
        return
    if mean:
        raise RuntimeError(f"{kind.name} weights are centred on zero, not on {mean}")
    finish = _finisher(kind, deviation)
    # Eight blocks are whole 64-bit words of the generator, whatever the size of one.
    for count in _portions(values // block_values, CHUNK_BYTES // block_bytes // 8 * 8):
        blocks = _raw(source, count * block_bytes).reshape(count, block_bytes)
        finish(blocks)
        yield blocks.data.cast("B")


def _portions(total: int, most: int) -> Iterator[int]:
    for start in range(0, total, most):
        yield min(most, total - start)


def _raw(source: np.random.PCG64, size_bytes: int) -> Bytes:
    words = source.random_raw(-(-size_bytes // 8))
    return words.astype("<u8", copy=False).view(np.uint8)[:size_bytes]


def _floats(raw: Bytes, kind: Type, deviation: float, mean: float) -> NDArray[np.generic]:
    """Evenly distributed floats; exact arithmetic but for one rounding per operation."""
    bits = raw.view("<u4")
    np.right_shift(bits, 9, out=bits)
    np.bitwise_or(bits, 0x40000000, out=bits)  # an exponent that makes them floats in [2, 4)
    floats = bits.view("<f4")
    floats -= np.float32(3)
    floats *= np.float32(deviation * math.sqrt(3))
    floats += np.float32(mean)
    if kind is Type.F16:
        return floats.astype("<f2")
    if kind is Type.BF16:
        return bits.view("<u2")[1::2].copy()  # the upper half of each float
    return floats


def _finisher(kind: Type, deviation: float) -> Callable[[Bytes], None]:
    """What turns random blocks of `kind` into weights of that deviation, in place."""
    if kind in _SCALE_ONLY:
        at, rms = _SCALE_ONLY[kind]
        signed = _half_bytes(np.concatenate([_magnitudes(deviation / rms), -_magnitudes(deviation / rms)]))

        def set_scale(blocks: Bytes) -> None:
            blocks[:, at : at + 2] = signed[blocks[:, at]]

        return set_scale
    if kind in _SCALE_AND_MINIMUM:
        at, levels, sign, subscale_rms = _SCALE_AND_MINIMUM[kind]
        rms = subscale_rms * math.sqrt((levels * levels - 1) / 12)
        scales = np.tile(_magnitudes(deviation / rms), 2)
        minima = scales.astype(np.float64) * (-sign * (levels - 1) / 2)
        pairs = np.hstack([_half_bytes(scales), _half_bytes(minima)])

        def set_pair(blocks: Bytes) -> None:
            blocks[:, at : at + 4] = pairs[blocks[:, at]]
            if kind in (Type.Q4_K, Type.Q5_K):
                _equate_six_bit_subscales(blocks[:, 4:16])
            elif kind is Type.Q2_K:
                blocks[:, :16] = (blocks[:, :16] & 15) * 17  # scale and minimum share a byte

        return set_pair
    exponents = _exponents(deviation / 5.852)  # the rms of MXFP4's sixteen values

    def set_exponent(blocks: Bytes) -> None:
        blocks[:, 0] = exponents[blocks[:, 0]]

    return set_exponent


def _equate_six_bit_subscales(packed: Bytes) -> None:
    """Makes the eight minima of a Q4_K or Q5_K block equal to its eight scales.

    Bytes 0 to 3 hold scales 0 to 3 and, in the two upper bits, the top of scales 4 to 7; bytes 4 to 7
    the same for the minima; bytes 8 to 11 the low nibbles of scales (below) and minima 4 to 7 (above).
    """
    packed[:, 4:8] = packed[:, 0:4]
    packed[:, 8:12] = (packed[:, 8:12] & 15) * 17


def _magnitudes(middle: float) -> NDArray[np.float16]:
    """128 half floats, evenly from 0.75 to 1.25 of `middle`, scaled to have it as their rms."""
    steps = [0.75 + 0.5 * i / 127 for i in range(128)]
    rms = math.sqrt(sum(step * step for step in steps) / len(steps))
    return np.array([middle / rms * step for step in steps]).astype(np.float16)


def _half_bytes(values: NDArray[np.floating]) -> Bytes:
    """[n] numbers as [n, 2] bytes of half floats."""
    return values.astype("<f2").view(np.uint8).reshape(len(values), 2)


def _exponents(scale: float) -> Bytes:
    """256 E8M0 codes of the two powers of two around `scale`, in the proportion that has its rms.

    ggml reads code e as 2 to the power of e - 128, half of the standard's, as its values are doubled.
    """
    mantissa, exponent = math.frexp(scale)  # scale = mantissa · 2**exponent, mantissa in [0.5, 1)
    ratio = 2 * mantissa
    upper = round((ratio * ratio - 1) / 3 * 256)
    low = exponent - 1 + 128
    return np.array([low + 1] * upper + [low] * (256 - upper), dtype=np.uint8)
