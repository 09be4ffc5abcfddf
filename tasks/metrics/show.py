"""Print, plot and overlay the metrics of runs, and what all plots of accuracy share."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING

from rich.table import Table

from storage.commands.program import table
from storage.visible import visible
from tasks.metrics.rows import Row, by_iteration, earned, numbers_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MAIN = (
    "reward/mean",
    "success/turn_1",
    "success/any_turn",
    "length/mean",
    "policy/entropy",
    "policy/kl",
    "policy/clip_fraction",
    "grad_norm",
    "staleness/mean",
    "tokens/per_second",
    "time/rollout",
    "time/train",
)
"""The metrics that are shown unless others are chosen."""
_OF_SOURCE = ("/success/turn_1", "/success/any_turn", "/environment/return", "/reward/mean", "/episodes/rejected")


def names_of(runs: Mapping[str, Sequence[Row]]) -> list[str]:
    """Return the names of all metrics of some runs."""
    return sorted({name for rows in runs.values() for row in rows for name in numbers_of(row)})


def shown(runs: Mapping[str, Sequence[Row]]) -> list[str]:
    """Return the main metrics that some runs have: those of `MAIN`, the scorers' parts, the accuracy on each set.

    Of a mixture also those of each member.
    """
    names = names_of(runs)
    ends = ("/first_turn", "/any_turn", "/return")
    accuracies = [name for name in names if name.startswith("eval/") and name.endswith(ends)]
    of_sources = [
        name for name in names if name.startswith("source/") and name.endswith((*_OF_SOURCE, "/gradient_share"))
    ]
    main = [name for name in dict.fromkeys([*MAIN[:1], *earned(names), *MAIN[1:]]) if name in names]
    return [*accuracies, *main, *of_sources]


def curve(rows: Sequence[Row], name: str) -> dict[int, float]:
    """Return a metric by iteration; one of an evaluation by policy version."""
    merged = by_iteration(rows, evaluations=name.startswith("eval/"))
    return {number: row[name] for number, row in merged.items() if name in row}


def table_of(runs: Mapping[str, Sequence[Row]], names: Sequence[str], most: int = 8) -> Table:
    """Make a table with a row for each metric and run, and a column for each of at most `most` iterations.

    These are the iterations with an evaluation or, if they are too many or too few, evenly spread ones.
    """
    curves = {(name, run): curve(rows, name) for name in names for run, rows in runs.items()}
    evaluated = {number for (name, _), points in curves.items() if name.startswith("eval/") for number in points}
    numbers = sorted({number for points in curves.values() for number in points})
    if 1 < len(evaluated) <= most:
        numbers = sorted(evaluated)
    elif len(numbers) > most:
        numbers = [numbers[round(n * (len(numbers) - 1) / (most - 1))] for n in range(most)]
    cells = [
        [name, run, *(f"{points[number]:.3g}" if number in points else "" for number in numbers)]
        for (name, run), points in curves.items()
    ]
    return table(["metric", "run", *map(str, numbers)], cells)


def plot(
    runs: Mapping[str, Sequence[Row]], names: Sequence[str], target: Path | IO[bytes], *, dark: bool = False
) -> None:
    """Plot each metric in a panel of its own, with a line for each run; evaluations have their intervals.

    Args:
        runs: the rows of each run by name.
        names: the metrics.
        target: file to write, PNG by default; a stream gets SVG with a transparent ground.
        dark: for a dark ground.
    """
    from matplotlib import style
    from matplotlib.figure import Figure

    across = min(3, len(names))
    down = -(-len(names) // across)
    with style.context("dark_background" if dark else "default"):
        figure = Figure(figsize=(4.2 * across, 2.7 * down), layout="constrained")
        for place, name in enumerate(names, 1):
            panel = figure.add_subplot(down, across, place)
            panel.set_title(visible(name), fontsize=10, parse_math=False)
            panel.grid(alpha=0.3)
            panel.locator_params(axis="x", integer=True)
            for number, (run, rows) in enumerate(runs.items()):
                points = curve(rows, name)
                if low := curve(rows, f"{name}_low"):
                    high = curve(rows, f"{name}_high")
                    estimates = {n: {"value": points[n], "low": low[n], "high": high[n]} for n in points}
                    draw_estimates(panel, estimates, "-o", f"C{number}", run)
                else:
                    panel.plot(list(points), list(points.values()), f"C{number}.-", label=run, linewidth=1.2)
        if len(runs) > 1:
            figure.axes[0].legend(fontsize=8)
        is_file = isinstance(target, Path)
        figure.savefig(target, dpi=110, format=None if is_file else "svg", transparent=not is_file)


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
