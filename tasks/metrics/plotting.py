"""Functions for all plots of accuracy: a figure from 0 to 1 with grid and legend, and estimates with intervals."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes


@contextmanager
def plotted(path: Path, width: float, ylabel: str, title: str) -> Iterator["Axes"]:
    """Give the axes of a new figure, and save it as `path` at the end of the block."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    yield axes
    axes.set(ylabel=ylabel, ylim=(0, 1), title=title)
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right", fontsize=8)
    figure.savefig(path, dpi=150)


def draw_estimates(
    axes: "Axes", estimates: Mapping[int, Mapping[str, float]], line: str, color: str, label: str
) -> None:
    """Draw estimates (value, low, high) by their position on the horizontal axis."""
    if estimates:
        values = list(estimates.values())
        heights = [each["value"] for each in values]
        spread = [[each["value"] - each["low"] for each in values], [each["high"] - each["value"] for each in values]]
        axes.errorbar(list(estimates), heights, yerr=spread, fmt=line, color=color, capsize=3, label=label)
