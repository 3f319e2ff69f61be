"""The page: what is in it, that nothing in it can break out, and that a real browser shows it."""

from __future__ import annotations

import base64
import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bmoe.io.errors import UsageError
from bmoe.route import RouteTrace, read_trace, viewer
from bmoe.route.metrics import TokenMetrics
from bmoe.route.viewer import curves, render
from tests.route_oracle import MIB, RECORDED, Cell, text_of

HOSTILE = "</script><script>alert(1)</script><!--\"'&{{data}}\u2028.gguf"
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
CELLS = [
    *[Cell(step=s, layer=la, experts=(1, 2), phase=0, residency=(0, 0)) for la in (0, 1) for s in (0, 1)],
    *[
        Cell(step=2 + s, layer=la, experts=(s, 7), weights=(0.6, 0.4), residency=(0, int(s > 0)))
        for s in range(4)
        for la in (0, 1)
    ],
]
METRICS = TokenMetrics(
    path="m",
    columns=("wall_ms", HOSTILE),
    rows=[[10.0, 1.0], [30.0, None], [10.0, 2.5], [30.0, 0.0]],
    notes=(HOSTILE,),
)


@pytest.fixture
def trace(tmp_path: Path) -> RouteTrace:
    path = tmp_path / "t.csv"
    path.write_text(text_of(CELLS, {0: MIB, 1: MIB}, model=HOSTILE))
    return read_trace(str(path))


class Page(HTMLParser):
    """Elements and the text of script elements."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self._in_script = False
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._in_script = tag == "script"

    def handle_endtag(self, tag: str) -> None:  # noqa: ARG002 (the parser's)
        self._in_script = False

    def handle_data(self, data: str) -> None:
        if self._in_script:
            self.scripts.append(data)


def data_of(page: str) -> dict[str, Any]:
    data: dict[str, Any] = json.loads(Page(page).scripts[0])
    return data


def test_a_hostile_name_stays_a_name(trace: RouteTrace) -> None:
    page = render(trace, metrics=METRICS)
    assert page.count("<script") == 2
    assert "alert(1)</script>" not in page
    data = data_of(page)
    assert data["facts"]["model"] == HOSTILE
    assert data["metrics"]["columns"][1] == HOSTILE
    assert "<title>&lt;/script&gt;" not in page, "only the name after the last slash is the title"
    assert re.search(r"<title>[^<]*</title>", page)


def test_the_page_asks_nothing_of_any_network(trace: RouteTrace) -> None:
    page = Page(render(trace))
    policy = next(a["content"] for tag, a in page.tags if tag == "meta" and "http-equiv" in a)
    assert policy is not None
    assert policy.startswith("default-src 'none';")
    for tag, attributes in page.tags:
        for name in ("src", "href", "action"):
            assert (attributes.get(name) or "data:,").startswith("data:"), (tag, attributes)
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", render(trace))


def test_controls_have_names(trace: RouteTrace) -> None:
    """What the keyboard reaches is labelled: text of its own, a label around it, or an aria-label."""
    page = render(trace)
    for control in re.findall(r'<(?:select|input)[^>]* id="(\w+)"', page):
        assert re.search(rf'<label>[^<]*<(?:select|input)[^>]* id="{control}"', page), control
    assert re.search(r'id="scroll" tabindex="0" role="application" aria-label=', page)


def test_cells_are_packed_by_step_layer_and_slot(trace: RouteTrace) -> None:
    data = data_of(render(trace))
    assert data["steps"] == {
        "turn": [0] * 6, "phase": [0, 0, 1, 1, 1, 1], "step": [0, 1, 2, 3, 4, 5],
    }  # fmt: skip
    experts = np.frombuffer(base64.b64decode(data["experts"]), "<u2").reshape(6, 2, 2)
    assert experts[2:, 1].tolist() == [[0, 7], [1, 7], [2, 7], [3, 7]]
    weights = np.frombuffer(base64.b64decode(data["weights"]), "u1").reshape(6, 2, 2)
    assert weights[3, 0].tolist() == [150, 100]
    found = np.frombuffer(base64.b64decode(data["residency"]), "u1").reshape(6, 2, 2)
    assert found[:2, 0].tolist() == [[0, 0], [3, 3]], (
        "the second prompt token's misses were read for the first"
    )
    assert found[4, 1].tolist() == [0, 1]


def test_tiles_say_the_right_numbers(trace: RouteTrace) -> None:
    tiles = {tile["label"]: tile["value"] for tile in data_of(render(trace, metrics=METRICS))["tiles"]}
    assert tiles == {
        "decoded tokens": "4",
        "experts": "2 × 8",
        "decode hits": "37.5 %",
        "read per token": "2.5 MiB",
        "same as last step": "50.0 %",
        "a token's experts": "4 MiB",
        "touched": "10 MiB",
        "dense": "20 MiB",
        "speed": "50.00 tok/s",
    }


def test_rows_of_unknown_step_are_steps_of_their_own(tmp_path: Path) -> None:
    cells = [Cell(step=-1, layer=la, experts=(e,), phase=0) for la in (0, 1) for e in (1, 2)]
    (tmp_path / "t.csv").write_text(text_of(cells, {0: 1, 1: 1}))
    data = data_of(render(read_trace(str(tmp_path / "t.csv"))))
    experts = np.frombuffer(base64.b64decode(data["experts"]), "<u2")
    assert data["steps"]["step"] == [-1, -1]
    assert experts.tolist() == [1, 1, 2, 2]


def test_a_page_no_browser_could_show_is_refused(trace: RouteTrace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(viewer, "_MOST_CELL_SLOTS", 10)
    with pytest.raises(UsageError, match="6 steps by 2 layers by 2 experts are too many for a page"):
        render(trace)


def test_curves_suit_the_model(trace: RouteTrace, monkeypatch: pytest.MonkeyPatch) -> None:
    found = curves(trace)
    assert {o.policy for o in found} >= {"belady", "lru", "aged"}
    assert max(o.budget_mib for o in found) < 10
    monkeypatch.setattr(viewer, "_MANY_LOOKUPS", 1)
    assert {o.policy for o in curves(trace)} == {"belady", "lru", "lfu"}


def browse(path: Path, fragment: str = "") -> str:
    """The page's elements after its script has run in a real browser."""
    assert CHROMIUM is not None
    command = [
        CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={path.parent / 'profile'}",
        "--dump-dom", f"file://{path}#{fragment}",
    ]  # fmt: skip
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="no chromium here")
def test_a_browser_shows_it_without_errors_and_filters_work(trace: RouteTrace, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    page.write_text(render(trace, metrics=METRICS, outcomes=curves(trace)), encoding="utf-8")
    shown = browse(page)
    body = re.search(r"<body[^>]*>", shown)
    assert body is not None
    assert 'data-errors="0"' in body[0]
    assert 'data-ready="1"' in body[0]
    for value in ("37.5 %", "2.5 MiB", "50.00 tok/s"):
        assert f"<b>{value}</b>" in shown
    assert "4 steps × 2 layers" in shown
    assert "step 2, layer 0: 0 (60.0 %) miss; 7 (40.0 %) miss. Read: 2.00 MiB" in shown
    assert shown.count("<svg") == 2
    filtered = browse(page, "phase=prefill&layers=1&steps=1:2")
    assert "1 steps × 1 layers" in filtered
    assert "prompt 1, layer 1: 1 (50.0 %) miss, read for another token, as before" in filtered
    wrong = browse(page, "layers=5:2")
    assert "a span is N, FIRST:END, FIRST: or :END" in wrong
    assert 'data-errors="0"' in wrong


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="no chromium here")
def test_keys_and_scrolling_move_through_the_matrix(tmp_path: Path) -> None:
    own = read_trace(str(Path(__file__).parent / "data" / "route-smollm2-16x.csv"))
    page = tmp_path / "page.html"
    # After the page's own script: what a hand would do, and what is then to be seen.
    act = """<script>{
    const box = document.getElementById("scroll"), log = [];
    const press = key => box.dispatchEvent(new KeyboardEvent("keydown", {key, cancelable: true}));
    const say = what => log.push(what + ": " + document.getElementById("detail").textContent);
    box.focus(); log.push("focus: " + (document.activeElement === box));
    press("Home"); say("home"); press("ArrowRight"); say("right"); press("ArrowDown"); say("down");
    press("End"); say("end"); log.push("scrolled: " + (box.scrollTop > 0));
    box.scrollTop = 0; box.dispatchEvent(new Event("scroll"));
    press("PageDown"); log.push("page: " + (box.scrollTop >= 0));
    const out = document.createElement("pre"); out.id = "acted"; out.textContent = log.join("\\n");
    document.body.append(out);
    }</script>"""
    text = render(own)
    page.write_text(
        text.replace("</body>", act + "</body>") if "</body>" in text else text + act, encoding="utf-8"
    )
    shown = browse(page, "phase=all")
    found = re.search(r'<pre id="acted">(.*?)</pre>', shown, re.DOTALL)
    assert found is not None
    said = dict(line.split(": ", 1) for line in found[1].splitlines())
    assert said["focus"] == said["scrolled"] == said["page"] == "true"
    assert said["home"].startswith("prompt 0, layer 0: 10 (26.4 %) miss")
    assert said["right"].startswith("prompt 0, layer 1: 5 (26.8 %) miss")
    assert said["down"].startswith("prompt 1, layer 1: 9 (26.0 %) miss, read for another token")
    assert said["end"].startswith("step 70, turn 1, layer 1: 1 (27.2 %) hit")
    assert 'data-errors="0"' in shown


@pytest.mark.skipif(
    CHROMIUM is None or not RECORDED.exists(), reason="no chromium or no recorded traces here"
)
def test_a_recorded_trace_is_shown(tmp_path: Path) -> None:
    page = tmp_path / "qwen.html"
    page.write_text(render(read_trace(str(RECORDED / "qwen.route.csv"))), encoding="utf-8")
    shown = browse(page)
    assert 'data-errors="0"' in shown
    assert "<b>80.3 %</b>" in shown
    assert "128 steps × 48 layers" in shown
