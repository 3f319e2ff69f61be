"""One llama.cpp model and context: load, decode, sample, tokens to text and back. Synchronous.

It owns the two llama.cpp handles and how they are configured for identical results. It must not know the
event loop, reads or slots: a streaming context is one with a `Hook`, whose addresses it only passes on.
All methods are called from one thread at a time, in practice the session's decode thread.
"""

from __future__ import annotations

import codecs
import contextlib
import ctypes
import os
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from bmoe.io.errors import BmoeError, DecodeError, SeamError, UsageError
from bmoe.llama_library import ggml_base, llama, log_lines
from bmoe.pipeline.native import function_address, lib

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

_ABORTED = 2
_NO_KV_SLOT = 1
# One load at a time: what is changed for it is process-wide, and its new mappings must be told apart.
_loading = threading.RLock()


@dataclass(frozen=True, kw_only=True, slots=True)
class RuntimeConfig:
    """What fixes a context's results.

    Attributes:
        path: The model, or the first shard.
        threads: Compute threads, for decode and for batches.
        context_tokens: KV cells.
        ubatch_tokens: Widest graph; batches are cut to it.
        repack: Let llama.cpp copy weights into its repacked layouts. Never with a hook.
        plain_experts: With `repack`: all weights but the experts.
        overrides: Integer metadata that replaces the file's, by full key.
    """

    path: str
    threads: int
    context_tokens: int
    ubatch_tokens: int
    repack: bool = False
    plain_experts: bool = False
    overrides: tuple[tuple[str, int], ...] = ()


def refuse_unsafe_environment() -> None:
    """Refuses settings under which stock and streamed results could differ.

    Raises:
        UsageError: GGML_CPU_TILED_MM_FORCE is set, which changes the stock decode path.
    """
    if os.environ.get("GGML_CPU_TILED_MM_FORCE", "0") not in {"", "0"}:
        raise UsageError(
            "GGML_CPU_TILED_MM_FORCE changes how llama.cpp computes single rows, which the hook reproduces",
            hint="unset it, or use --resident",
        )


class LazyMap:
    """For the duration of a load, makes llama.cpp map the file without reading it (docs/seam.md).

    For one load at a time.
    """

    def __init__(self) -> None:
        self.active = False

    def __enter__(self) -> Self:
        # `_loading` is held: waiting for the native lock would keep the GIL, which the loader's log needs.
        self.active = bool(lib.bm_lazy_map_begin())
        return self

    def __exit__(self, *_: object) -> None:
        if self.active:
            lib.bm_lazy_map_end()


def file_mappings(path: str) -> dict[int, int]:
    """Mappings of a file in this process: address where its first byte is (or would be) to length in bytes.

    llama.cpp unmaps the header and other parts without tensors, so a mapping may lack its start.
    """
    status = os.stat(path)
    key = (f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}", str(status.st_ino))
    found: dict[int, int] = {}
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
        for line in maps:
            span, _, offset, device, inode, *_ = line.split(maxsplit=5)
            if (device, inode) == key:
                low, high = (int(x, 16) for x in span.split("-"))
                base = low - int(offset, 16)
                found[base] = max(found.get(base, 0), high - base)
    return found


class Model:
    """A loaded `llama_model` and its vocabulary.

    Args:
        config: How to load it.
        lazy: Map without reading; for streaming.
        files: The model's files, to tell where they are mapped.
        on_progress: Called with the loaded fraction; returning False stops the load.

    Attributes:
        lazy_map: Whether the file was mapped without populating it (False when the guard said no).
        new_mappings: Per file, (address of its first byte, length in bytes) of every mapping made here.

    Raises:
        BmoeError: llama.cpp does not load the file; its own words are in the message.
    """

    def __init__(
        self,
        config: RuntimeConfig,
        *,
        lazy: bool,
        files: Sequence[str] = (),
        on_progress: Callable[[float], bool] | None = None,
    ) -> None:
        L = llama()  # noqa: N806 (llama.cpp's module)
        params = L.llama_model_default_params()
        params.load_mode = L.LLAMA_LOAD_MODE_MMAP
        params.use_extra_bufts = config.repack
        params.n_gpu_layers = 0
        params.load_mtp = False
        overrides = _overrides(L, config.overrides)
        params.kv_overrides = overrides
        if config.plain_experts:
            rules = _plain_experts()
            params.tensor_buft_overrides = ctypes.addressof(rules)
        no_devices = (ctypes.c_void_p * 1)()
        params.devices = ctypes.cast(no_devices, ctypes.c_void_p)
        if on_progress is not None:
            progress = on_progress
            callback = type(params.progress_callback)(lambda fraction, _: progress(fraction))
            params.progress_callback = callback
        with log_lines() as lines, _loading:
            before = [file_mappings(path) for path in files]
            with LazyMap() if lazy else contextlib.nullcontext() as lazy_map:
                self.handle = L.llama_model_load_from_file(os.fsencode(config.path), params)
            self.lazy_map = lazy_map is not None and lazy_map.active
            self.new_mappings = [
                [m for m in file_mappings(path).items() if m[0] not in old]
                for path, old in zip(files, before, strict=True)
            ]
        if not self.handle:
            why = "; ".join(dict.fromkeys(line for line in lines if line)) or "no reason given"
            raise BmoeError(f"llama.cpp does not load {config.path}: {why}")
        self._llama = L
        self.vocab = L.llama_model_get_vocab(self.handle)
        self.vocab_size: int = L.llama_vocab_n_tokens(self.vocab)

    def tokenize(self, text: str, *, add_special: bool = True, parse_special: bool = True) -> list[int]:
        """Token ids of `text`."""
        raw = text.encode()
        size = len(raw) + 16
        while True:
            tokens = (self._llama.llama_token * size)()
            n = self._llama.llama_tokenize(
                self.vocab, raw, len(raw), tokens, size, add_special, parse_special
            )
            if n >= 0:
                return list(tokens[:n])
            size = -n

    def piece(self, token: int, *, special: bool = False) -> bytes:
        """The bytes a token stands for; of control tokens nothing, or with `special` their names."""
        size = 64
        while True:
            buffer = ctypes.create_string_buffer(size)
            n = self._llama.llama_token_to_piece(self.vocab, token, buffer, size, 0, special)
            if n >= 0:
                return buffer.raw[:n]
            size = -n

    def is_end_of_generation(self, token: int) -> bool:
        """Whether the vocabulary lists `token` as ending a generation."""
        return bool(self._llama.llama_vocab_is_eog(self.vocab, token))

    def is_control(self, token: int) -> bool:
        """Whether `token` steers (ends, roles, channels) instead of being text."""
        return bool(self._llama.llama_vocab_is_control(self.vocab, token))

    @property
    def bos_text(self) -> str:
        """The name of the token that begins a text; empty when there is none."""
        return self._name(self._llama.llama_vocab_bos(self.vocab))

    @property
    def eos_text(self) -> str:
        """The name of the token that ends a text; empty when there is none."""
        return self._name(self._llama.llama_vocab_eos(self.vocab))

    def _name(self, token: int) -> str:
        return self.piece(token, special=True).decode("utf-8", "replace") if token >= 0 else ""

    @property
    def has_recurrent_state(self) -> bool:
        """Whether some of its memory is a running state, which cannot be rolled back."""
        L = self._llama  # noqa: N806
        return bool(L.llama_model_is_recurrent(self.handle) or L.llama_model_is_hybrid(self.handle))

    def close(self) -> None:
        """Frees the model; every context of it must be gone."""
        if self.handle:
            self._llama.llama_model_free(self.handle)
            self.handle = None


def _overrides(module: Any, values: Sequence[tuple[str, int]]) -> Any:
    """[n + 1] llama_model_kv_override; the last one's empty key ends them."""
    array = (module.llama_model_kv_override * (len(values) + 1))()
    for entry, (key, value) in zip(array, values, strict=False):
        entry.tag = module.LLAMA_KV_OVERRIDE_TYPE_INT
        entry.key = key.encode()
        entry.value.val_i64 = value
    return array


class _BufferRule(ctypes.Structure):
    """`struct llama_model_tensor_buft_override`: tensors whose names match go to that buffer type."""

    _fields_ = (("pattern", ctypes.c_char_p), ("type", ctypes.c_void_p))


def _plain_experts() -> Any:
    """[2] rules that keep experts in plain memory, where `use_extra_bufts` would repack them too.

    A rule for the CPU's own buffer type would not: llama.cpp then looks for a repacked layout again. The type
    of buffers over foreign memory is another one with the same layout.
    """
    base = ggml_base()
    base.ggml_backend_cpu_buffer_from_ptr.restype = ctypes.c_void_p
    base.ggml_backend_cpu_buffer_from_ptr.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    base.ggml_backend_buffer_get_type.restype = ctypes.c_void_p
    base.ggml_backend_buffer_get_type.argtypes = (ctypes.c_void_p,)
    base.ggml_backend_buffer_free.argtypes = (ctypes.c_void_p,)
    buffer = base.ggml_backend_cpu_buffer_from_ptr(4096, 0)  # any aligned address: no byte of it is used
    rules = (_BufferRule * 2)()
    rules[0].pattern, rules[0].type = rb"exps\.weight$", base.ggml_backend_buffer_get_type(buffer)
    base.ggml_backend_buffer_free(buffer)
    return rules


class Context:
    """A `llama_context`: one sequence.

    Args:
        model: Outlives the context.
        config: The same as the model's.
        engine_handle: Native engine whose eval and abort callbacks the context gets, or None (resident).
        stop_flag: Resident: a nonzero value ends a running decode. Must outlive the context.

    Raises:
        BmoeError: llama.cpp does not make the context (memory).
    """

    def __init__(
        self,
        model: Model,
        config: RuntimeConfig,
        *,
        engine_handle: int | None,
        stop_flag: ctypes.c_int | None = None,
    ) -> None:
        L = llama()  # noqa: N806
        self._llama = L
        self._model = model
        self.batch_tokens = config.ubatch_tokens
        params = L.llama_context_default_params()
        params.n_ctx = config.context_tokens
        params.n_batch = config.ubatch_tokens
        params.n_ubatch = config.ubatch_tokens
        params.n_threads = config.threads
        params.n_threads_batch = config.threads
        params.offload_kqv = False
        params.op_offload = False
        params.no_perf = True
        if engine_handle is not None:
            params.cb_eval = L.ggml_backend_sched_eval_callback(function_address("bm_eval"))
            params.cb_eval_user_data = engine_handle
            params.abort_callback = L.ggml_abort_callback(function_address("bm_abort"))
            params.abort_callback_data = engine_handle
        elif stop_flag is not None:
            params.abort_callback = L.ggml_abort_callback(function_address("bm_flag_abort"))
            params.abort_callback_data = ctypes.addressof(stop_flag)
        with log_lines() as lines:
            self.handle = L.llama_init_from_model(model.handle, params)
        if not self.handle:
            raise BmoeError(
                f"llama.cpp makes no context of {config.context_tokens} tokens: {'; '.join(lines)}"
            )
        self.context_tokens: int = L.llama_n_ctx(self.handle)
        self._memory = L.llama_get_memory(self.handle)
        self._batch: Any = L.llama_batch_init(config.ubatch_tokens, 0, 1)
        self._engine_handle = engine_handle
        self.tokens: list[int] = []
        """What is in the context, position by position."""

    @property
    def n_past(self) -> int:
        """Tokens in the context."""
        return len(self.tokens)

    def decode(self, tokens: Sequence[int], *, logits: str = "last", prefill: bool = False) -> None:
        """Computes up to `batch_tokens` tokens after those already there.

        Args:
            tokens: The batch.
            logits: "last", "all" or "none": which rows get logits.
            prefill: Whether these are the prompt's.

        Raises:
            Aborted: The engine told the compute threads to leave; nothing of the batch is kept.
            DecodeError: llama.cpp refused or failed.
        """
        n = len(tokens)
        assert 0 < n <= self.batch_tokens
        b = self._batch
        b.n_tokens = n
        n_past = self.n_past
        for i, token in enumerate(tokens):
            b.token[i] = token
            b.pos[i] = n_past + i
            b.n_seq_id[i] = 1
            b.seq_id[i][0] = 0
            b.logits[i] = logits == "all" or (logits == "last" and i == n - 1)
        if self._engine_handle is not None:
            lib.bm_begin_batch(self._engine_handle, n_past, n, int(not prefill))
        with log_lines() as lines:
            status = self._llama.llama_decode(self.handle, b)
        if status == _ABORTED:
            raise AbortedBatch
        if status == _NO_KV_SLOT:
            raise DecodeError(
                f"the context of {self.context_tokens} tokens is full after {self.n_past}",
                hint="use a larger -c",
            )
        if status != 0:
            raise DecodeError(f"llama_decode failed with {status}: {'; '.join(lines) or 'no reason given'}")
        self.tokens.extend(tokens)

    def logits(self, row: int) -> NDArray[np.float32]:
        """[vocab] logits of batch row `row` (-1: the last that has them). Valid until the next decode."""
        pointer = self._llama.llama_get_logits_ith(self.handle, row)
        if not pointer:
            raise SeamError(f"llama.cpp has no logits for row {row}")
        return np.ctypeslib.as_array(pointer, (self._model.vocab_size,))

    def greedy(self) -> int:
        """The token with the largest logit of the last row; the first of equals."""
        return int(np.argmax(self.logits(-1)))

    def clear(self) -> None:
        """Forgets all tokens."""
        self._llama.llama_memory_clear(self._memory, True)
        self.tokens.clear()

    def truncate(self, n_past: int) -> bool:
        """Forgets tokens from position `n_past` on. False when this model's memory cannot."""
        if n_past == self.n_past:
            return True
        if n_past == 0:
            self.clear()
            return True
        if not self._llama.llama_memory_seq_rm(self._memory, 0, n_past, -1):
            return False
        del self.tokens[n_past:]
        return True

    @property
    def can_shift(self) -> bool:
        """Whether `shift` works with this model's memory."""
        return bool(self._llama.llama_memory_can_shift(self._memory))

    def shift(self, keep: int, discard: int) -> bool:
        """Forgets `discard` tokens after the first `keep`; later ones move up. False when it cannot."""
        L, memory = self._llama, self._memory  # noqa: N806
        if not self.can_shift or not L.llama_memory_seq_rm(memory, 0, keep, keep + discard):
            return False
        L.llama_memory_seq_add(memory, 0, keep + discard, -1, -discard)
        del self.tokens[keep : keep + discard]
        return True

    def close(self) -> None:
        """Frees the context."""
        if self.handle:
            self._llama.llama_batch_free(self._batch)
            self._llama.llama_free(self.handle)
            self.handle = None


class AbortedBatch(Exception):  # noqa: N818 (an internal signal; the session turns it into the reason)
    """The native side asked llama.cpp to stop in the middle of a batch."""


class TextDecoder:
    """Bytes of tokens to text: an incomplete character is held back until it is whole."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, piece: bytes, *, final: bool = False) -> str:
        """The text that is complete by now."""
        return self._decoder.decode(piece, final)
