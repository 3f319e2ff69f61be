"""Warm starts: which experts were worth having, kept from run to run.

Owns the state file (docs/schema/warm-state.v1.schema.json), whom it belongs to, and what a warm start makes
of it or of a warm set (docs/schema/warmset.v1.schema.json). Must not know how experts are read.

Files are hostile until every value was looked at. What is kept in the cache directory is nobody's source of
truth: if it is broken or another model's, the start is cold and says so. A file that was asked for is an
error then.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import stat
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NoReturn

import numpy as np

from bmoe.io.errors import FileError, FormatError
from bmoe.io.whole_file import replace_file

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from bmoe.model import ModelLayout
    from bmoe.pipeline.slots import SlotPlan

SCHEMA: Final = 1
_STATE: Final = "bmoe warm state"
_SET: Final = "bmoe warmset"
# 1024 experts in 512 layers, seven digits each, and then some.
_MAX_FILE_BYTES: Final = 8 << 20
_WHOLE: Final = 1_000_000


@dataclass(frozen=True, kw_only=True, slots=True)
class WarmStart:
    """What to preload, and what to think of it.

    Attributes:
        entries: (layer, expert), the most worth first, as many as have room. Layers are counted as the
            engine does: those with experts, from 0.
        worth: [layers, experts] float64, share of its layer's uses that goes to an expert; rows of 0 where
            nothing is known. Experts that a layer does not have are 0.
        origin: What was read.
        note: Why the start is cold, or what is doubtful; None if nothing is.
    """

    entries: tuple[tuple[int, int], ...]
    worth: NDArray[np.float64]
    origin: str
    note: str | None = None

    def slices(self, layout: ModelLayout) -> list[int]:
        """Slice ids of `entries` as the engine numbers them, all of an expert's together."""
        first, total = [], 0
        of_layer: dict[int, list[int]] = {}
        for number, tensor in enumerate(layout.tensors):
            first.append(total)
            total += tensor.experts
            of_layer.setdefault(tensor.layer, []).append(number)
        return [first[number] + expert for layer, expert in self.entries for number in of_layer[layer]]

    def frequencies(self, layout: ModelLayout, half_life_batches: float) -> NDArray[np.float64]:
        """[entries] float64: aged use counts to begin with, by the engine's entry ids.

        Half of what they would be had the past gone on until now: what comes soon outweighs it. Without
        them a policy that counts uses would give up the preloaded experts first.
        """
        full = layout.top_k / (1.0 - 2.0 ** (-1.0 / half_life_batches))
        counts = _experts_of(layout)
        return np.concatenate([0.5 * full * row[:n] for row, n in zip(self.worth, counts, strict=True)])


def model_identity(layout: ModelLayout) -> str:
    """Hexadecimal digest that tells a model from others, wherever its files are.

    Over names, types, shapes and places of all tensors, the metadata's plain values (arrays of vocabularies
    are left out), and the files' sizes. No weight is read.
    """
    facts = layout.facts
    digest = hashlib.sha256(json.dumps(facts.sizes_bytes).encode())
    for key in sorted(facts.metadata):
        digest.update(json.dumps([key, facts.metadata[key]]).encode())
    for t in facts.tensors:
        digest.update(json.dumps([t.name, t.file, t.offset_bytes, t.ggml_type, t.ne]).encode())
    return digest.hexdigest()


def state_path(layout: ModelLayout) -> str:
    """Where a model's state is kept: `bmoe/warm/` in `$XDG_CACHE_HOME`, or in `~/.cache`."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(base):  # the specification says to ignore a relative one
        base = os.path.join(os.path.expanduser("~"), ".cache")
    return os.path.join(base, "bmoe", "warm", f"{model_identity(layout)[:32]}.json")


# --- keeping ----------------------------------------------------------------------------------------------


def save_warm_state(path: str | None, layout: ModelLayout, frequency: NDArray[np.float64]) -> str:
    """Keeps what a run has learned: half its own uses, half what the file of the same model says already.

    Args:
        path: The file; None for the one of `state_path`.
        layout: The model.
        frequency: [entries] use counts by the engine's entry ids, aged or not, in any unit.

    Returns:
        Where it was written. The file is either the new one or the old one, never a part.

    Raises:
        FileError: It cannot be written.
    """
    target = state_path(layout) if path is None else path
    learned = np.zeros((len(layout.layer_numbers), layout.experts))
    first = 0
    for row, n in zip(learned, _experts_of(layout), strict=True):
        row[:n] = np.nan_to_num(np.maximum(frequency[first : first + n], 0), posinf=0.0)
        first += n
    learned = _shares(learned)
    with contextlib.suppress(FileError):
        before = _worth_of_state(_read(target), layout, target)
        known, new = before.any(axis=1), learned.any(axis=1)
        learned[known & new] = (learned[known & new] + before[known & new]) / 2
        learned[known & ~new] = before[known & ~new]
    rows = zip(np.rint(learned * _WHOLE).astype(int).tolist(), _experts_of(layout), strict=True)
    record = {
        "schema": SCHEMA,
        "kind": _STATE,
        "model": model_identity(layout),
        "name": os.path.basename(layout.facts.paths[0]).encode("utf-8", "replace").decode("utf-8", "replace"),
        "architecture": layout.facts.architecture,
        "uses_ppm": [row[:n] for row, n in rows],
    }
    try:
        os.makedirs(os.path.dirname(os.path.abspath(target)), mode=0o700, exist_ok=True)
        replace_file(target, (json.dumps(record, separators=(",", ":")) + "\n").encode("ascii"))
    except (OSError, ValueError) as error:
        raise FileError(
            f"cannot be written: {getattr(error, 'strerror', None) or error}", path=target
        ) from None
    return target


# --- beginning with it ------------------------------------------------------------------------------------


def load_warm_entries(source: str, layout: ModelLayout, plan: SlotPlan) -> WarmStart:
    """What to preload.

    Args:
        source: "auto" for the state kept of this model, or a file: a state or a warm set.
        layout: The model.
        plan: The cache's slots; no more than fit are chosen.

    Raises:
        FileError: A file that was named cannot be read.
        FormatError: It is neither, is broken, or is another model's.
    """
    auto = source == "auto"
    kinds = (_STATE,) if auto else (_STATE, _SET)
    path = state_path(layout) if auto else source
    try:
        record = _read(path)
        kind = record.get("kind")
        if record.get("schema") != SCHEMA or kind not in kinds:
            _refuse(path, "is neither a warm state nor a warm set that this bmoe knows")
        if kind == _SET:
            return _from_set(record, layout, plan, path)
        worth = _worth_of_state(record, layout, path)
    except FileError as error:
        if not auto:
            raise
        missing = not os.path.lexists(path)
        note = "nothing is kept of this model yet" if missing else f"the start is cold: {error}"
        nothing = np.zeros((len(layout.layer_numbers), layout.experts))
        return WarmStart(entries=(), worth=nothing, origin=path, note=note)
    sizes = np.array(_bytes_of(layout))[:, None]
    order = np.argsort(-(worth / sizes), axis=None, kind="stable")
    ranked = [divmod(int(key), layout.experts) for key in order if worth.flat[key] > 0]
    return WarmStart(entries=_that_fit(ranked, layout, plan), worth=worth, origin=path)


def _from_set(record: dict[str, Any], layout: ModelLayout, plan: SlotPlan, path: str) -> WarmStart:
    """A warm set names layers by the file's `blk.N` and tells an order, but no counts: those are ranks."""
    architecture = record.get("architecture")
    if architecture is not None and architecture != layout.facts.architecture:
        _refuse(path, "is of another model", layout.facts.architecture, architecture)
    if record.get("experts_per_layer") != layout.experts:
        _refuse(path, "is of another model", f"{layout.experts} experts", record.get("experts_per_layer"))
    number_of = {number: layer for layer, number in enumerate(layout.layer_numbers)}
    counts = _experts_of(layout)
    chosen = record.get("experts")
    if not isinstance(chosen, list) or len(chosen) > sum(counts):
        _refuse(path, "lists no experts, or more than there are")
    ranked: dict[tuple[int, int], None] = {}
    worth = np.zeros((len(counts), layout.experts))
    for rank, pair in enumerate(chosen):
        if not (isinstance(pair, list) and len(pair) == 2 and all(_is_count(n) for n in pair)):
            _refuse(path, f"entry {rank} of its experts is no pair of numbers")
        layer = number_of.get(pair[0])
        if layer is None or pair[1] >= counts[layer]:
            _refuse(path, f"is of another model, which has no expert {pair[1]} in layer {pair[0]}")
        ranked[layer, pair[1]] = None
        worth[layer, pair[1]] = len(chosen) - rank
    name = os.path.basename(layout.facts.paths[0])
    model = record.get("model")
    note = f"{path} was made from traces of {model!r:.80}" if model not in (None, name) else None
    entries = _that_fit(list(ranked), layout, plan)
    return WarmStart(entries=entries, worth=_shares(worth), origin=path, note=note)


def _worth_of_state(record: dict[str, Any], layout: ModelLayout, path: str) -> NDArray[np.float64]:
    if record.get("schema") != SCHEMA or record.get("kind") != _STATE:
        _refuse(path, "is not a warm state that this bmoe knows")
    if record.get("model") != model_identity(layout):
        _refuse(path, f"is of another model: {record.get('name')!r:.80}")
    rows, counts = record.get("uses_ppm"), _experts_of(layout)
    if not isinstance(rows, list) or len(rows) != len(counts):
        _refuse(path, f"has no uses of {len(counts)} layers")
    worth = np.zeros((len(counts), layout.experts))
    for layer, (row, n) in enumerate(zip(rows, counts, strict=True)):
        good = isinstance(row, list) and len(row) == n
        if not good or not all(_is_count(use) and use <= _WHOLE for use in row):
            _refuse(path, f"layer {layer} of its uses is not {n} numbers up to {_WHOLE}")
        worth[layer, :n] = row
    return _shares(worth)


def _that_fit(
    ranked: list[tuple[int, int]], layout: ModelLayout, plan: SlotPlan
) -> tuple[tuple[int, int], ...]:
    """The longest head of which every slice has a slot; a layer that has none left is passed over."""
    left = [c.slots for c in plan.classes]
    classes: dict[int, list[int]] = {}
    for number, tensor in enumerate(layout.tensors):
        classes.setdefault(tensor.layer, []).append(plan.class_of_tensor[number])
    fit = []
    for layer, expert in ranked:
        needed = classes[layer]
        if all(left[c] >= needed.count(c) for c in needed):
            fit.append((layer, expert))
            for c in needed:
                left[c] -= 1
    return tuple(fit)


def _shares(uses: NDArray[np.float64]) -> NDArray[np.float64]:
    """Rows that sum to 1; rows of 0 stay."""
    sums = uses.sum(axis=1, keepdims=True)
    shares: NDArray[np.float64] = np.divide(uses, sums, out=np.zeros_like(uses), where=sums > 0)
    return shares


def _experts_of(layout: ModelLayout) -> list[int]:
    counts = {tensor.layer: tensor.experts for tensor in layout.tensors}
    return [counts[layer] for layer in range(len(layout.layer_numbers))]


def _bytes_of(layout: ModelLayout) -> list[int]:
    """Of one expert, by layer."""
    sizes = [0] * len(layout.layer_numbers)
    for tensor in layout.tensors:
        sizes[tensor.layer] += tensor.slice_bytes
    return sizes


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _read(path: str) -> dict[str, Any]:
    try:
        # O_NONBLOCK: opening a FIFO would wait for a writer.
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        with open(fd, "rb") as file:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                _refuse(path, "is not a regular file")
            raw = file.read(_MAX_FILE_BYTES + 1)
    except (OSError, ValueError) as error:  # a name with a null byte is a ValueError
        raise FileError(f"cannot be read: {getattr(error, 'strerror', None) or error}", path=path) from None
    if len(raw) > _MAX_FILE_BYTES:
        _refuse(path, f"is larger than {_MAX_FILE_BYTES} bytes")
    try:
        record = json.loads(raw)
    except (ValueError, RecursionError):
        _refuse(path, "is not JSON")
    if not isinstance(record, dict):
        _refuse(path, "is not a JSON object")
    return record


def _refuse(path: str, why: str, expected: object = None, got: object = None) -> NoReturn:
    shown = None if got is None else f"{got!r:.80}"
    raise FormatError(why, path=path, expected=expected, got=shown)
