"""A report or a comparison as one HTML file that needs nothing else and asks no network.

Owns what goes into the file. page.html shows it, with plotly.js for the plots: the whole library, because no
package installs less of it, but compressed, 2 MB, and unpacked by the browser. Must not trust names: they
come from logs, reach the page as JSON with every `<` escaped, and are only ever shown as text; none reaches
plotly, which would take some of their characters for markup.
"""

from __future__ import annotations

import base64
import dataclasses
import functools
import gzip
import html
import json
import os
from importlib import resources
from typing import TYPE_CHECKING, Any

from bmoe.io.errors import BmoeError, FileError
from bmoe.logs import words
from bmoe.logs.figures import comparison_plots, report_plots

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bmoe.logs.compare import Comparison
    from bmoe.logs.figures import Plot
    from bmoe.logs.report import RunReport
    from bmoe.logs.run_data import Run


def report_page(run: Run, found: RunReport) -> str:
    """The page about one run.

    Raises:
        BmoeError: plotly is not installed.
    """
    return _page(
        title=f"{run.model} – {run.run_id}",
        heading=run.model,
        about=[words.about_run(run)],
        notes=[anomaly.text for anomaly in found.anomalies],
        tiles=words.tiles(found),
        tables=[*words.report_tables(found), *words.run_tables(run)],
        plots=report_plots(run),
    )


def comparison_page(runs: Sequence[Run], found: Comparison) -> str:
    """The page about several.

    Raises:
        BmoeError: plotly is not installed.
    """
    return _page(
        title=f"comparison of {len(runs)} runs",
        heading="; ".join(pair.headline for pair in found.pairs),
        about=words.lettered(runs),
        notes=found.notes,
        tiles=[],
        tables=words.comparison_tables(found),
        plots=comparison_plots(runs, found),
    )


def write_page(path: str, page: str) -> None:
    """Writes a page, replacing a file only when the whole of it is written.

    Raises:
        FileError: It cannot be written.
    """
    part = f"{path}.part"
    try:
        if os.path.exists(path) and not os.path.isfile(path):  # a pipe, a device: nothing to replace
            part = path
        with open(part, "w", encoding="utf-8") as file:
            file.write(page)
        if part != path:
            os.replace(part, path)
    except OSError as error:
        raise FileError(f"the report cannot be written: {error.strerror}", path=path) from None


def _page(
    *,
    title: str,
    heading: str,
    about: Sequence[str],
    notes: Sequence[str],
    tiles: Sequence[words.Tile],
    tables: Sequence[words.Table],
    plots: Sequence[Plot],
) -> str:
    payload = {
        "heading": heading,
        "about": about,
        "notes": notes,
        "tiles": [dataclasses.asdict(tile) for tile in tiles],
        "tables": [dataclasses.asdict(table) for table in tables],
        "plots": [dataclasses.asdict(plot) for plot in plots],
    }
    data = json.dumps(payload, allow_nan=False, separators=(",", ":"))
    # In a script element `<` could end it; JSON may write it as an escape wherever it can occur.
    data = data.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
    parts: dict[str, Any] = {"title": html.escape(title), "library": _library(), "data": data}
    page = resources.files("bmoe.logs").joinpath("page.html").read_text(encoding="utf-8")
    made = []
    for name, part in parts.items():
        before, _, page = page.partition(f"{{{{{name}}}}}")
        made += [before, part]
    return "".join((*made, page))


@functools.cache
def _library() -> str:
    """plotly.js, as gzip in base64."""
    try:
        from plotly.offline import get_plotlyjs  # noqa: PLC0415 (an extra)
    except ImportError:
        raise BmoeError("HTML reports need plotly", hint="pip install 'bmoe[logs]'") from None
    return base64.b64encode(gzip.compress(get_plotlyjs().encode(), mtime=0)).decode("ascii")
