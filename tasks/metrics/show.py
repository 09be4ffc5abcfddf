"""A run's numbers for people: the line about an iteration, tables, plots, and the alarm about what is paid."""

import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import IO, TYPE_CHECKING

from rich.table import Table

from storage.commands.program import table
from storage.visible import visible
from tasks.metrics.rows import TIMES, Row, by_iteration, earned, numbers_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MAIN = (
    "reward/mean",
    "success/turn_1",
    "success/any_turn",
    "length/mean",
    "faults/policy",
    "faults/set-up",
    "policy/entropy",
    "policy/kl",
    "policy/clip_fraction",
    "grad_norm",
    "staleness/mean",
    "tokens/per_second",
    "time/rollout",
    "time/train",
    "time/rest",
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


def draw_estimates(
    axes: "Axes", estimates: Mapping[int, Mapping[str, float]], line: str, color: str, label: str
) -> None:
    """Draw estimates (value, low, high) by their position on the horizontal axis."""
    if estimates:
        values = list(estimates.values())
        heights = [each["value"] for each in values]
        spread = [[each["value"] - each["low"] for each in values], [each["high"] - each["value"] for each in values]]
        axes.errorbar(list(estimates), heights, yerr=spread, fmt=line, color=color, capsize=3, label=label)


_RECENT = 10
"""Iterations from whose median duration the time left is expected."""

_PARTS = (
    ("reward", "reward/mean", "+.3f"),
    ("return", "return/mean", "+.3f"),
    ("first", "success/turn_1", ".3f"),
    ("any", "success/any_turn", ".3f"),
    ("length", "length/mean", ".1f"),
    ("calls", "calls/mean", ".2f"),
    ("entropy", "policy/entropy", ".3f"),
    ("kl", "policy/kl", ".1e"),
    ("clip", "policy/clip_fraction", ".1%"),
    ("grad", "grad_norm", ".3g"),
    ("stale", "staleness/mean", ".1f"),
)


def iteration_line(row: Row, total: int, left_s: float | None) -> str:
    """Describe an iteration by its merged row; numbers that it lacks are left out, and calls if there were none.

    Args:
        row: see `by_iteration`.
        total: iterations of the run.
        left_s: expected seconds until its end; None: not known.

    >>> row = {"iteration": 11, "reward/mean": 0.231, "success/turn_1": 0.486, "policy/kl": 0.00014, "calls/mean": 0}
    >>> iteration_line(row | {"time/rollout": 1.02, "time/score": 0.1, "time/train": 0.31, "time/rest": 0.07}, 100, 132)
    'iter 12/100  reward +0.231  first 0.486  kl 1.4e-04  1.0+0.1+0.3 s  rest 0.07 s  left 2:12'
    """
    parts = [f"iter {row['iteration'] + 1}/{total}", *(f"{label} {value}" for label, value in cells(row).items())]
    parts.append("+".join(f"{row[name]:.1f}" for name in TIMES if name in row) + " s")
    if "time/rest" in row:
        parts.append(f"rest {row['time/rest']:.2f} s")
    if "tokens/per_second" in row:
        parts.append(f"{row['tokens/per_second']:,.0f} tok/s")
    if left_s is not None:
        parts.append(f"left {duration(left_s)}")
    return "  ".join(parts)


def cells(row: Row) -> dict[str, str]:
    """Format the main numbers of an iteration by label, without calls and returns that say nothing.

    Of a mixture also the success of each member's episodes, in any turn, and its share of the gradient.

    >>> cells({"calls/mean": 0, "source/game/success/any_turn": 0.5, "source/game/gradient_share": 0.48})
    {'game': '0.500', 'game gradient': '0.480'}
    """
    shown = {label: f"{row[name]:{form}}" for label, name, form in _PARTS if name in row}
    if not row.get("calls/mean"):
        shown.pop("calls", None)
    if row.get("return/mean") == row.get("success/any_turn"):
        shown.pop("return", None)
    ends = re.compile(r"source/(.*?)(?:/success/any_turn|/(gradient)_share)")
    found = {name: match for name in row if (match := ends.fullmatch(name))}
    return shown | {" ".join(filter(None, match.groups())): f"{row[name]:.3f}" for name, match in found.items()}


def seconds_left(begun: datetime, rows: Sequence[Row], iterations: int) -> float | None:
    """Expect how long `iterations` will take, from the durations of the newest ones that one flow run has done.

    Args:
        begun: when the flow run began; what is older does not count, so that no night in which a run stood still does.
        rows: merged rows of iterations.
        iterations: how many are left.
    """
    ended = [datetime.fromisoformat(row["at"]) for row in rows if row["stage"] == "train"]
    times = [begun, *(at for at in ended if at > begun)]
    durations = [(after - before).total_seconds() for before, after in pairwise(times)]
    return median(durations[-_RECENT:]) * iterations if durations else None


def duration(seconds: float) -> str:
    """Format seconds as minutes or hours.

    >>> duration(132), duration(7384)
    ('2:12', '2:03:04')
    """
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


_OF_TREND, _LEAST = 12, 8
"""Number of newest iterations that are looked at, and least number of them."""
_LEVEL = 0.01
"""Both trends have a smaller p value (Kendall's tau)."""


def paid_for_something_else(rows: Sequence[Row]) -> str:
    """Return the alarm that the newest of some merged rows raises, or an empty text.

    The return is that of the scores, success that of any turn while playing. Where success is what is paid, both rise
    and fall together.
    """
    recent = [row for row in rows if "return/mean" in row and "success/any_turn" in row][-_OF_TREND:]
    returns, successes = ([row[name] for row in recent] for name in ("return/mean", "success/any_turn"))
    if len(recent) < _LEAST or returns[-1] <= returns[0] or successes[-1] >= successes[0]:
        return ""
    from scipy.stats import kendalltau  # takes a second to import

    rise, fall = (kendalltau(range(len(recent)), values) for values in (returns, successes))
    if not (rise.statistic > 0 > fall.statistic and max(rise.pvalue, fall.pvalue) < _LEVEL):
        return ""
    return (
        f"the return rises ({returns[0]:.3f} -> {returns[-1]:.3f}) while success falls ({successes[0]:.3f} -> "
        f"{successes[-1]:.3f}). What pays besides right answers? See tasks/score/paid.md"
    )
