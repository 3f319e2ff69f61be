"""Choosing the next token with llama.cpp's samplers.

It owns one generation's samplers and their state. It must not know where logits come from, nor text.
"""

from __future__ import annotations

import ctypes
import json
import secrets
from typing import TYPE_CHECKING, Any

import numpy as np

from bmoe.io.errors import UsageError
from bmoe.llama_library import llama, log_lines

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from bmoe.config import Sampling


class Sampler:
    """One generation's choice of tokens. Same logits and seed, same tokens.

    Args:
        sampling: What is asked for.
        vocab: llama.cpp's vocabulary handle.
        vocab_size: Its tokens.
        context_tokens: What `repeat_last_n` -1 stands for.

    Attributes:
        seed: What the draws start from; None when nothing is drawn.

    Raises:
        UsageError: The grammar or the JSON schema is none.
    """

    def __init__(self, sampling: Sampling, *, vocab: Any, vocab_size: int, context_tokens: int) -> None:
        self._llama = L = llama()  # noqa: N806 (llama.cpp's module)
        self._plain = sampling.is_plain_greedy
        self.seed: int | None = None
        self._samplers: list[Any] = []
        self._penalties = self._grammar = self._chain = None
        if self._plain:
            return
        # [vocab] llama_token_data: id, logit, p
        self._data = np.zeros(vocab_size, dtype=[("id", "<i4"), ("logit", "<f4"), ("p", "<f4")])
        self._ids = np.arange(vocab_size, dtype=np.int32)
        last_n = context_tokens if sampling.repeat_last_n < 0 else sampling.repeat_last_n
        self._last_n = last_n
        if last_n and (
            sampling.repeat_penalty != 1 or sampling.frequency_penalty or sampling.presence_penalty
        ):
            self._penalties = self._own(
                L.llama_sampler_init_penalties(
                    vocab_size,
                    last_n,
                    sampling.repeat_penalty,
                    sampling.frequency_penalty,
                    sampling.presence_penalty,
                )
            )
        if (grammar := _grammar_text(sampling)) is not None:
            if "\0" in grammar:
                raise UsageError("the grammar holds a zero byte")
            with log_lines() as lines:
                self._grammar = L.llama_sampler_init_grammar(vocab, grammar.encode(), b"root")
            if not self._grammar:
                why = f": {lines[0]}" if lines else ""
                raise UsageError(f"the grammar cannot be used{why}", hint="its start is the rule `root`")
            self._own(self._grammar)
        params = L.llama_sampler_chain_default_params()
        params.no_perf = True
        self._chain = self._own(L.llama_sampler_chain_init(params))
        for part in self._parts(sampling):
            L.llama_sampler_chain_add(self._chain, part)

    def _own(self, sampler: Any) -> Any:
        self._samplers.append(sampler)
        return sampler

    def _parts(self, sampling: Sampling) -> list[Any]:
        L = self._llama  # noqa: N806
        if sampling.temperature == 0:
            return [L.llama_sampler_init_greedy()]
        self.seed = secrets.randbelow((1 << 32) - 1) if sampling.seed is None else sampling.seed
        parts = []
        if sampling.top_k:
            parts.append(L.llama_sampler_init_top_k(sampling.top_k))
        if sampling.top_p < 1:
            parts.append(L.llama_sampler_init_top_p(sampling.top_p, 1))
        if sampling.min_p > 0:
            parts.append(L.llama_sampler_init_min_p(sampling.min_p, 1))
        parts.append(L.llama_sampler_init_temp(sampling.temperature))
        parts.append(L.llama_sampler_init_dist(self.seed))
        return parts

    def see(self, tokens: Sequence[int]) -> None:
        """Tokens of the prompt, for the penalties."""
        if self._penalties is not None:
            for token in tokens[-self._last_n :]:
                self._llama.llama_sampler_accept(self._penalties, token)

    def choose(self, logits: NDArray[np.float32]) -> int:
        """The next token.

        Args:
            logits: [vocab], not changed.
        """
        if self._plain:
            return int(np.argmax(logits))
        token = self._draw(logits, with_grammar=False)
        if self._grammar is not None and not self._allows(token):
            # Trying one token is quick, the whole vocabulary is not: that is for when the first is refused.
            token = self._draw(logits, with_grammar=True)
        for sampler in self._samplers:
            self._llama.llama_sampler_accept(sampler, token)
        return token

    def _draw(self, logits: NDArray[np.float32], *, with_grammar: bool) -> int:
        L, data = self._llama, self._data  # noqa: N806
        data["id"], data["logit"], data["p"] = self._ids, logits, 0
        array = self._array(data)
        if self._penalties is not None:
            L.llama_sampler_apply(self._penalties, array)
        if with_grammar:
            L.llama_sampler_apply(self._grammar, array)
        L.llama_sampler_apply(self._chain, array)
        return int(array.data[array.selected].id)

    def _allows(self, token: int) -> bool:
        one = np.array([(token, 0.0, 0.0)], dtype=self._data.dtype)
        array = self._array(one)
        self._llama.llama_sampler_apply(self._grammar, array)
        return bool(np.isfinite(one["logit"][0]))

    def _array(self, data: Any) -> Any:
        L = self._llama  # noqa: N806
        pointer = ctypes.cast(data.ctypes.data, ctypes.POINTER(L.llama_token_data))
        return L.llama_token_data_array(data=pointer, size=len(data), selected=-1, sorted=False)

    def close(self) -> None:
        """Frees llama.cpp's samplers. Idempotent."""
        samplers, self._samplers = self._samplers, []
        for sampler in samplers:
            self._llama.llama_sampler_free(sampler)


def _grammar_text(sampling: Sampling) -> str | None:
    if sampling.json_schema is None:
        return sampling.grammar
    try:
        schema = json.loads(sampling.json_schema)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"the JSON schema is no JSON: {error}") from None
    from llama_cpp.llama_grammar import json_schema_to_gbnf  # noqa: PLC0415 (slow, and rarely needed)

    try:
        return str(json_schema_to_gbnf(json.dumps(schema)))
    except Exception as error:  # noqa: BLE001 (whatever it trips over: the schema is the user's)
        raise UsageError(
            f"the JSON schema cannot be made a grammar: {type(error).__name__}: {error}"
        ) from None
