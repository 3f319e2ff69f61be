"""The tokenizer part of a model's metadata: taken from another model, or one that spells bytes.

Knows the `tokenizer.*` keys and nothing else of a model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from gguf.constants import TokenType

from bmoe.io.errors import FormatError
from bmoe.synth import metadata
from bmoe.synth.reader import read_model

if TYPE_CHECKING:
    from bmoe.gguf_values import MetadataValue

_TOKENS: Final = "tokenizer.ggml.tokens"


@dataclass(frozen=True, kw_only=True, slots=True)
class Tokenizer:
    """Metadata and what the rest of the model has to know of it.

    Attributes:
        metadata: The `tokenizer.*` keys.
        vocabulary: Tokens, which is the number of embedding rows.
    """

    metadata: dict[str, MetadataValue]
    vocabulary: int


def byte_tokenizer() -> Tokenizer:
    """A SentencePiece-style vocabulary of 259: unknown, begin, end, and one token per byte.

    With no piece longer than a byte, every text becomes its UTF-8 bytes plus 3, and back. The space is a
    piece of its own, because llama.cpp turns it into U+2581 first and would spell that in three bytes.
    """
    tokens = ["<unk>", "<s>", "</s>"] + [f"<0x{byte:02X}>" for byte in range(256)]
    types = [TokenType.UNKNOWN, TokenType.CONTROL, TokenType.CONTROL] + 256 * [TokenType.BYTE]
    tokens[3 + ord(" ")], types[3 + ord(" ")] = "\u2581", TokenType.NORMAL
    values = {
        "tokenizer.ggml.model": metadata.text("llama"),
        "tokenizer.ggml.pre": metadata.text("default"),
        _TOKENS: metadata.texts(tokens),
        "tokenizer.ggml.scores": metadata.f32s([0.0] * len(tokens)),
        "tokenizer.ggml.token_type": metadata.i32s(types),
        "tokenizer.ggml.unknown_token_id": metadata.u32(0),
        "tokenizer.ggml.bos_token_id": metadata.u32(1),
        "tokenizer.ggml.eos_token_id": metadata.u32(2),
        "tokenizer.ggml.add_bos_token": metadata.boolean(True),
        "tokenizer.ggml.add_eos_token": metadata.boolean(False),
        "tokenizer.ggml.add_space_prefix": metadata.boolean(False),
    }
    return Tokenizer(metadata=values, vocabulary=len(tokens))


def tokenizer_of(path: str) -> Tokenizer:
    """The tokenizer of the GGUF file `path`, chat template included.

    Raises:
        FormatError: It is no GGUF file, or has no vocabulary.
        FileError: It cannot be read.
    """
    model = read_model(path)
    tokens = model.metadata.get(_TOKENS)
    count = None if tokens is None else tokens.array_length()
    if not count:
        raise FormatError("has no vocabulary to take", path=path, field=_TOKENS)
    values = {key: value for key, value in model.metadata.items() if key.startswith("tokenizer.")}
    return Tokenizer(metadata=values, vocabulary=count)
