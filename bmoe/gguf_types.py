"""The tensor types of ggml: numbers, names and how values are packed.

Written out so that a header can be read without llama.cpp; a test compares the table with the loaded
ggml. Knows nothing of files.
"""

from __future__ import annotations

from typing import Final, NamedTuple


class GgmlType(NamedTuple):
    """A type of tensor values.

    Attributes:
        code: Its number in files.
        name: As ggml writes it.
        block_values: Values in a block; a row is whole blocks.
        block_bytes: Bytes of a block.
    """

    code: int
    name: str
    block_values: int
    block_bytes: int


GGML_TYPES: Final = {
    code: GgmlType(code, name, block_values, block_bytes)
    for code, name, block_values, block_bytes in (
        (0, "f32", 1, 4),
        (1, "f16", 1, 2),
        (2, "q4_0", 32, 18),
        (3, "q4_1", 32, 20),
        (6, "q5_0", 32, 22),
        (7, "q5_1", 32, 24),
        (8, "q8_0", 32, 34),
        (9, "q8_1", 32, 36),
        (10, "q2_K", 256, 84),
        (11, "q3_K", 256, 110),
        (12, "q4_K", 256, 144),
        (13, "q5_K", 256, 176),
        (14, "q6_K", 256, 210),
        (15, "q8_K", 256, 292),
        (16, "iq2_xxs", 256, 66),
        (17, "iq2_xs", 256, 74),
        (18, "iq3_xxs", 256, 98),
        (19, "iq1_s", 256, 50),
        (20, "iq4_nl", 32, 18),
        (21, "iq3_s", 256, 110),
        (22, "iq2_s", 256, 82),
        (23, "iq4_xs", 256, 136),
        (24, "i8", 1, 1),
        (25, "i16", 1, 2),
        (26, "i32", 1, 4),
        (27, "i64", 1, 8),
        (28, "f64", 1, 8),
        (29, "iq1_m", 256, 56),
        (30, "bf16", 1, 2),
        (34, "tq1_0", 256, 54),
        (35, "tq2_0", 256, 66),
        (39, "mxfp4", 32, 17),
        (40, "nvfp4", 64, 36),
        (41, "q1_0", 128, 18),
        (42, "q2_0", 64, 18),
    )
}
"""By number. Numbers that ggml has given up are absent."""

NO_WEIGHTS: Final = frozenset({"q8_1", "q8_K", "i8", "i16", "i32", "i64", "f64"})
"""Types that ggml cannot multiply a matrix of; it ends the process when it is asked to."""


def packed_bytes(kind: GgmlType, shape: tuple[int, ...]) -> int:
    """The size of a tensor whose rows, `shape[0]` values each, are whole blocks of `kind`."""
    values = 1
    for extent in shape:
        values *= extent
    return values // kind.block_values * kind.block_bytes
