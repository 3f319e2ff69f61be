"""Pictures as files: figures of matplotlib, which is optional, and what goes wrong with either.

Owns how a figure is made and saved. Must not know what is drawn.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, Final

from bmoe.io.errors import BmoeError, FileError, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

FORMATS: Final = (".png", ".svg")


def check_plot(path: str) -> None:
    """Raises before anything is measured if a plot could not be written afterwards.

    Raises:
        UsageError: Neither PNG nor SVG.
        FileError: There is no such folder.
        BmoeError: matplotlib does not load.
    """
    if os.path.splitext(path)[1].lower() not in FORMATS:
        raise UsageError(f"--plot {path}: the name must end in {' or '.join(FORMATS)}")
    folder = os.path.dirname(path) or "."
    if not os.path.isdir(folder):
        raise FileError("the folder for the plot does not exist", path=folder)
    plot_figure(1, 1)


def plot_figure(width: float, height: float) -> Any:
    """An empty figure, in inches.

    Raises:
        BmoeError: matplotlib does not load.
    """
    try:
        from matplotlib.figure import Figure  # noqa: PLC0415 (an extra, and slow)
    except ImportError as error:
        raise BmoeError(f"--plot needs matplotlib: {error}", hint='pip install "bmoe[plot]"') from error
    return Figure(figsize=(width, height), layout="constrained")


def save_plot(figure: Any, path: str) -> None:
    """Writes a plot in the format of its name.

    Raises:
        FileError: It cannot be written.
    """
    try:
        figure.savefig(path, format=os.path.splitext(path)[1][1:].lower())
    except OSError as error:
        raise FileError("the plot cannot be written", path=path, got=error.strerror) from error


def write_pictures(folder: str, drawings: Mapping[str, tuple[float, Callable[[Any], bool]]]) -> list[str]:
    """Writes each drawing as NAME.png, nine inches wide.

    Args:
        folder: Made if it does not exist.
        drawings: Name to (height in inches, what draws on axes and says whether there is anything to see).

    Returns:
        The files' paths.

    Raises:
        BmoeError: matplotlib is not installed.
        FileError: The folder cannot be written to.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: PLC0415 (an extra, and slow)
        from matplotlib.figure import Figure  # noqa: PLC0415 (same)
    except ImportError:
        raise BmoeError("pictures need matplotlib", hint="pip install 'bmoe[plot]'") from None
    written = []
    try:
        os.makedirs(folder, exist_ok=True)
        for name, (height, draw) in drawings.items():
            figure = Figure(figsize=(9, height), layout="constrained")
            FigureCanvasAgg(figure)
            if draw(figure.add_subplot()):
                path = os.path.join(folder, f"{name}.png")
                figure.savefig(path, dpi=110)
                written.append(path)
    except OSError as error:
        raise FileError(f"cannot be written: {error.strerror}", path=folder) from None
    return written
