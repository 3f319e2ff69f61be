"""Live figures: what a scrape reads, and a port that is taken."""

from __future__ import annotations

import http.client
import socket
from contextlib import closing
from dataclasses import replace

import pytest

from bmoe.io.errors import UsageError
from bmoe.metrics_server import HOST, LiveFigures, MetricsServer
from tests.fakes import EFFECTIVE, MIB, RESIDENT, RESIDENT_STEP, STEP

pytest.importorskip("prometheus_client")


def scrape(figures: LiveFigures) -> dict[str, float]:
    """Every sample by its name and labels, as HTTP gives it."""
    with closing(MetricsServer(figures, 0)) as server:
        assert server.url == f"http://127.0.0.1:{server.port}/metrics"
        with closing(http.client.HTTPConnection(HOST, server.port, timeout=10)) as connection:
            connection.request("GET", "/metrics")
            answer = connection.getresponse()
            assert (answer.status, answer.headers.get_content_type()) == (200, "text/plain")
            text = answer.read().decode()
    lines = [line.rpartition(" ") for line in text.splitlines() if not line.startswith("#")]
    return {name: float(value) for name, _, value in lines}


def test_a_scrape_has_the_sums_of_what_was_reported() -> None:
    figures = LiveFigures("ab")
    figures.begin(replace(EFFECTIVE, lossy="experts dropped"))
    figures.prefill([STEP, STEP])
    for _ in range(3):
        figures.token(STEP)
    figures.token(replace(STEP, wall_ns=20_000_000_000))
    figures.warning()
    figures.cache_resize(300 * MIB)
    found = scrape(figures)
    assert found['bmoe_tokens_total{phase="decode"}'] == 4
    assert found['bmoe_tokens_total{phase="prefill"}'] == 2
    assert found['bmoe_read_bytes_total{phase="decode"}'] == 4 * STEP.read_bytes  # type: ignore[operator]  # measured
    assert found['bmoe_stall_seconds_total{phase="decode"}'] == pytest.approx(0.048)
    assert found["bmoe_cache_bytes"] == 300 * MIB
    assert found["bmoe_slots_used"] == 600
    assert (found["bmoe_warnings_total"], found["bmoe_cache_resizes_total"]) == (1, 1)
    edges = [found[f'bmoe_token_seconds_bucket{{le="{edge}"}}'] for edge in ("0.035", "0.05", "10.0", "+Inf")]
    assert edges == [0, 3, 3, 4]
    assert found["bmoe_token_seconds_count"] == 4
    [info] = [name for name in found if name.startswith("bmoe_run_info")]
    assert 'run_id="ab"' in info
    assert 'lossy="experts dropped"' in info
    assert not any(name.startswith("bmoe_expert_dropped") for name in found)  # it is off


def test_what_a_resident_run_does_not_measure_is_not_there() -> None:
    figures = LiveFigures("ab")
    figures.begin(RESIDENT)
    figures.token(RESIDENT_STEP)
    found = scrape(figures)
    assert 'bmoe_compute_seconds_total{phase="decode"}' in found
    assert not any("stall" in name or "hits" in name or "cache_bytes" in name for name in found)


def test_before_anything_happened_there_is_an_answer() -> None:
    assert "bmoe_run_info" in scrape(LiveFigures("ab"))


def test_a_port_that_is_taken_is_one_line() -> None:
    with socket.socket() as taken:
        taken.bind((HOST, 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(UsageError, match=f"port {port} of 127.0.0.1 is in use"):
            MetricsServer(LiveFigures("ab"), port)


def test_after_close_nobody_answers() -> None:
    server = MetricsServer(LiveFigures("ab"), 0)
    server.close()
    with pytest.raises(OSError, match="refused"):
        socket.create_connection((HOST, server.port), timeout=5)
