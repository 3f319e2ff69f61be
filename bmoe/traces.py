"""Recordings of a run beside its figures: routing, reads, node times, in the reference engine's formats.

It owns the files and their columns (docs/formats.md). It must not know how anything is measured. Rows are
taken from the native side after each llama_decode and written at once, on the decode thread.
"""

from __future__ import annotations

import csv
import ctypes
import os
import re
from typing import IO, TYPE_CHECKING

import numpy as np

from bmoe.io.errors import BmoeError, FileError, UsageError
from bmoe.io.whole_file import is_same_file
from bmoe.llama_library import ggml_base
from bmoe.pipeline.native import TRACE_LAYERS, TRACE_NODES

if TYPE_CHECKING:
    from bmoe.config import SessionConfig
    from bmoe.streaming import StreamingEngine

_BLOCK = re.compile(r"^blk\.(\d+)\.")
_ROUTE_COLUMNS = "turn,phase,step,layer,slot,expert,weight,residency,expert_bytes,dropped"
_NODE_COLUMNS = "turn,phase,step,seq,layer,op,name,wall_ns,majflt"
_READ_COLUMNS = "turn,phase,step,layer,expert,proj,lane,spec,offset,req_bytes,read_bytes,latency_ns"


class Traces:
    """The trace files of one session.

    Args:
        config: Which ones, and where.
        streaming: What is traced. Set up before the first batch.

    Raises:
        FileError: A file cannot be written.
        UsageError: One is the model, or two are the same.
    """

    def __init__(self, config: SessionConfig, streaming: StreamingEngine) -> None:
        self._streaming = streaming
        self._layer_numbers = np.array(streaming.layout.layer_numbers, dtype=np.int32)
        self._files: list[IO[str]] = []
        self._routes = self._nodes = self._reads = None
        nodes = config.compute_trace or config.compute_trace_layers
        paths = [p for p in (config.route_trace, nodes, config.io_trace) if p]
        for i, path in enumerate(paths):
            same = [p for p in (*streaming.layout.facts.paths, *paths[:i]) if _same(p, path)]
            if same:
                raise UsageError(f"{path} is {same[0]}: the trace would be written into it")
        try:
            if config.route_trace:
                self._routes = self._open(config.route_trace)
                self._routes.write(self._route_preamble())
                streaming.engine.record_routes()
            if nodes:
                self._nodes = self._open(nodes)
                self._nodes.write(f"# compute_trace v1\n{self._static_line(config)}\n{_NODE_COLUMNS}\n")
                streaming.engine.trace_nodes(TRACE_NODES if config.compute_trace else TRACE_LAYERS)
                self._op_name = ggml_base().ggml_op_name
                self._op_name.restype = ctypes.c_char_p
            if config.io_trace:
                self._reads = self._open(config.io_trace)
                self._reads.write(f"# io_trace v1\n{self._static_line(config)}\n{_READ_COLUMNS}\n")
                streaming.streamer.record_reads()
        except BaseException:
            self.close()
            raise

    def _open(self, path: str) -> IO[str]:
        try:
            file = open(path, "w", encoding="utf-8", errors="replace", newline="")  # noqa: SIM115 (closed by `close`)
        except (OSError, ValueError) as error:
            raise _cannot(path, error) from None
        self._files.append(file)
        return file

    # --- preambles ------------------------------------------------------------------------------------

    def _route_preamble(self) -> str:
        layout = self._streaming.layout
        facts = layout.facts
        experts: dict[int, int] = {}
        for t in layout.tensors:
            number = layout.layer_numbers[t.layer]
            experts[number] = experts.get(number, 0) + t.slice_bytes
        streamed = {t.name for t in layout.tensors}
        dense: dict[int, int] = {}
        for tensor in facts.tensors:
            block = _BLOCK.match(tensor.name)
            if block and tensor.name not in streamed:
                dense[int(block[1])] = dense.get(int(block[1]), 0) + tensor.size_bytes
        layers = facts.arch_int("block_count")
        lines = [
            "# route_trace v1",
            (
                f"# model={_word(facts.paths[0])} arch={_word(facts.architecture)} n_layer={layers} "
                f"n_expert={layout.experts} n_expert_used={layout.top_k}"
            ),
            *(
                f"# layer={i} expert_bytes={experts.get(i, 0)} dense_bytes={dense.get(i, 0)}"
                for i in range(layers)
            ),
            _ROUTE_COLUMNS,
        ]
        return "\n".join(lines) + "\n"

    def _static_line(self, config: SessionConfig) -> str:
        s = self._streaming
        facts = s.layout.facts
        direct = all(f.direct for f in s.files)
        return (
            f"# model={_word(facts.paths[0])} arch={_word(facts.architecture)} "
            f"n_layer={facts.arch_int('block_count')} n_threads={config.threads} "
            f"io_threads={s.backend.queue_depth} o_direct={int(direct)} overlap={int(config.overlap)}"
        )

    # --- rows -----------------------------------------------------------------------------------------

    def after_batch(self, *, turn: int, phase: int, position: int, tokens: int) -> None:
        """Writes what the last llama_decode recorded.

        Args:
            turn: Of the session, from 0.
            phase: 0 prefill, 1 decode.
            position: Tokens in the context now.
            tokens: Of the batch.

        Raises:
            FileError: The disk is full, or the like.
        """
        try:
            if self._routes is not None:
                self._write_routes(self._routes, turn, phase, position, tokens)
            if self._nodes is not None:
                self._write_nodes(self._nodes, turn, phase, position - 1)
            if self._reads is not None:
                self._write_reads(self._reads, turn, phase, position - 1)
            for file in self._files:
                file.flush()
        except OSError as error:
            raise _cannot("the trace", error) from None

    def _write_routes(self, file: IO[str], turn: int, phase: int, position: int, tokens: int) -> None:
        rows = self._streaming.engine.routes()
        # Of a prompt the last layer sees only the tokens whose logits are wanted: the last one.
        steps = np.where(
            rows["n_tokens"] == tokens,
            position - tokens + rows["token"],
            np.where(rows["n_tokens"] == 1, position - 1, -1),
        )
        file.writelines(
            f"{turn},{phase},{step},{layer},{slot},{expert},{weight:.6g},{residency},{read_bytes},{dropped}\n"
            for step, layer, slot, expert, weight, residency, read_bytes, dropped in zip(
                steps.tolist(),
                self._layer_numbers[rows["layer"]].tolist(),
                rows["slot"].tolist(),
                rows["expert"].tolist(),
                rows["weight"].tolist(),
                rows["residency"].tolist(),
                rows["read_bytes"].tolist(),
                rows["dropped"].tolist(),
                strict=True,
            )
        )

    def _write_nodes(self, file: IO[str], turn: int, phase: int, step: int) -> None:
        writer = csv.writer(file, lineterminator="\n")
        for seq, row in enumerate(self._streaming.engine.node_rows()):
            op, name, layer = int(row["op"]), row["name"].decode("utf-8", "replace"), int(row["layer"])
            if op < 0:
                op_name = "LAYER"
                name = f"blk.{layer}" if name == "blk" else name
            else:
                op_name = self._op_name(op).decode()
                if op_name == "CUSTOM":  # what the hook has put in the place of
                    op_name = "MUL_MAT_ID"
            writer.writerow(
                (turn, phase, step, seq, layer, op_name, name, int(row["wall_ns"]), int(row["major_faults"]))
            )

    def _write_reads(self, file: IO[str], turn: int, phase: int, step: int) -> None:
        engine, layout = self._streaming.engine, self._streaming.layout
        for slice_id, unasked, read_bytes, latency_ns in self._streaming.streamer.take_read_records():
            index = engine.tensor_of_slice(slice_id)
            tensor, expert = engine.tensors[index], slice_id - engine.first_slice[index]
            file.write(
                f"{turn},{phase},{step},{layout.layer_numbers[tensor.layer]},{expert},{tensor.rank},0,"
                f"{int(unasked)},{tensor.file_offset + expert * tensor.slice_bytes},{tensor.slice_bytes},"
                f"{read_bytes},{latency_ns}\n"
            )

    def close(self) -> None:
        """Closes the files. Idempotent."""
        files, self._files = self._files, []
        for file in files:
            try:
                file.close()
            except OSError as error:
                raise _cannot(file.name, error) from None


def _word(text: str) -> str:
    """As one word of a `key=value` line."""
    return re.sub(r"\s", "_", text)


def _same(a: str, b: str) -> bool:
    return is_same_file(a, b) or os.path.abspath(a) == os.path.abspath(b)  # neither may exist yet


def _cannot(path: str, error: Exception) -> BmoeError:
    reason = error.strerror if isinstance(error, OSError) else str(error)
    return FileError(f"the trace cannot be written: {reason}", path=path)
