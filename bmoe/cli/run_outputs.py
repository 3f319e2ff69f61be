"""Where the figures of a run go beside the terminal: JSON log, CSV, live metrics.

Owns that they are opened before the model, told of the same things, and closed. Must not know what is shown.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from bmoe.cli import BROKEN_PIPE_EXIT
from bmoe.io.errors import BmoeError
from bmoe.telemetry import open_run_log

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from bmoe.config import GenerateRequest, SessionConfig
    from bmoe.metrics_csv import MetricsCsv
    from bmoe.metrics_server import LiveFigures
    from bmoe.records import CacheResize, EffectiveConfig, LoadReport, RunSummary, StepMetrics, TokenEvent
    from bmoe.telemetry import RunLog


def logged(log: RunLog, body: Callable[[], int]) -> int:
    """Runs `body` and returns its exit code; the log ends with that, and with what went wrong."""
    code = 1
    try:
        code = body()
    except BrokenPipeError:
        code = BROKEN_PIPE_EXIT
        raise
    except BaseException as error:
        code = error.exit_code if isinstance(error, BmoeError) else code
        log.error(error)  # noqa: TRY400 (a RunLog is no logging.Logger)
        raise
    finally:
        log.run_end(code)
        log.close()
    return code


class RunOutputs:
    """The outputs of one run.

    Args:
        log_target: As `open_run_log` takes it.
        csv_path: For figures per token, or None.
        metrics_port: For Prometheus, or None; 0 picks a free one.
        model_path: What no file must be.

    Attributes:
        log: The log; without a target it does nothing.
        metrics_url: Where live figures are served, or None.

    Raises:
        FileError: A file cannot be opened; of every method but `close`: written.
        UsageError: A file is the model, or the port cannot be had.
    """

    def __init__(
        self,
        *,
        log_target: str | None = None,
        csv_path: str | None = None,
        metrics_port: int | None = None,
        model_path: str = "",
    ) -> None:
        self._csv: MetricsCsv | None = None
        self._live: LiveFigures | None = None
        self.metrics_url: str | None = None
        with contextlib.ExitStack() as opened:
            self.log = open_run_log(log_target, model_path=model_path)
            opened.callback(self.log.close)
            if csv_path is not None:
                from bmoe.metrics_csv import MetricsCsv  # noqa: PLC0415 (only who asks for it pays)

                self._csv = MetricsCsv(csv_path, model_path=model_path)
                opened.callback(self._csv.close)
            if metrics_port is not None:
                from bmoe.metrics_server import LiveFigures, MetricsServer  # noqa: PLC0415 (same)

                self._live = LiveFigures(self.log.run_id)
                server = MetricsServer(self._live, metrics_port)
                opened.callback(server.close)
                self.metrics_url = server.url
            self._opened = opened.pop_all()

    def load(
        self, config: SessionConfig, effective: EffectiveConfig, load: LoadReport, request: GenerateRequest
    ) -> None:
        """The model is open; the log has its start already."""
        self.log.load(load)
        if self._csv is not None:
            self._csv.begin(config, effective, load, request)
        if self._live is not None:
            self._live.begin(effective)

    def prefill(self, batches: Sequence[StepMetrics], *, turn: int = 0) -> None:
        """The prompt is computed, or as much of it as will be."""
        self.log.prefill(batches, turn=turn)
        if self._csv is not None:
            self._csv.prefill(batches)
        if self._live is not None:
            self._live.prefill(batches)

    def token(self, event: TokenEvent, *, turn: int = 0) -> None:
        """A token was generated."""
        self.log.token(event, turn=turn)
        if self._csv is not None:
            self._csv.token(event, turn=turn)
        if self._live is not None:
            self._live.token(event.metrics)

    def summary(self, summary: RunSummary) -> None:
        """The generation ended."""
        self.log.summary(summary)
        if self._csv is not None:
            self._csv.summary(summary)

    def warning(self, message: str) -> None:
        """The user was told something."""
        self.log.warning(message)
        if self._live is not None:
            self._live.warning()

    def cache_resize(self, resize: CacheResize) -> None:
        """The expert cache has another budget."""
        self.log.cache_resize(resize)
        if self._live is not None:
            self._live.cache_resize(resize.cache_bytes)

    def close(self) -> None:
        """Closes all of them. Idempotent."""
        self._opened.close()
