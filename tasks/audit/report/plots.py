"""The plots of the report: numbers of the data sets over iterations, and histograms of lengths, rates and staleness.

They are SVG pictures of matplotlib on white, which fits light and dark pages, with text as text.
"""

import base64
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from io import StringIO
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from storage.grouping import grouped
from storage.version_names import EvaluationVersion, select
from storage.visible import visible
from tasks.audit.results import AuditResult, Histogram, SetNumbers

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Values = list[float | None]

_SIZE = (5.0, 3.0)  # inches of 72 units each
_STYLES = ("-", "--", "-.", ":")
_MOST_NAMES = 8  # names of runs that fit below the axis
_SETTINGS = Path(__file__).parent / "templates" / "plots.mplstyle"


@dataclass(frozen=True, slots=True)
class Plot:
    """A plot; `image` is the address of a picture that has all its data in itself."""

    title: str
    about: str
    image: str


@dataclass(frozen=True, slots=True)
class Kind:
    """The description of a plot over the data sets, whose series are columns of the table of data sets, too."""

    title: str
    about: str
    series: Callable[[Sequence[SetNumbers]], dict[str, Values]]  # by name, a value for each data set
    shares: bool = True  # the values are shares, and the axis goes from 0 to 100 %

    def known(self, sets: Sequence[SetNumbers]) -> dict[str, Values]:
        """Return the series in which any data set has a value."""
        return {name: values for name, values in self.series(sets).items() if values.count(None) < len(values)}


def plots(sets: Sequence[SetNumbers], histograms: Sequence[Histogram]) -> list[Plot]:
    """Return all plots for which there are data; lines need two data sets."""
    drawn = [_over_sets(f"plot-{number}", kind, sets) for number, kind in enumerate(KINDS) if len(sets) > 1]
    drawn += [_histogram(f"histogram-{number}", each) for number, each in enumerate(histograms) if sum(each.counts)]
    return [plot for plot in drawn if plot]


def _success(sets: Sequence[SetNumbers]) -> dict[str, Values]:
    of_turns = zip_longest(*(each.success for each in sets))
    rates: dict[str, Values] = {f"turn {turn} right": [*shares] for turn, shares in enumerate(of_turns, 1)}
    return rates if len(rates) < 2 else rates | {"any turn right": [each.any_turn for each in sets]}


def _rewards(sets: Sequence[SetNumbers]) -> dict[str, Values]:
    """Return the means of the reward and of its parts, by name."""
    names = dict.fromkeys(name for each in sets for name in each.rewards)
    return {name: [each.rewards.get(name) for each in sets] for name in names}


_TITLES = {
    **{"answer_tokens": "tokens a turn", "zero_variance": "groups without variance", "failed_calls": "failed calls"},
    **{"with_calls": "episodes with calls", "branched": "episodes with branches"},
}
"""Titles of attributes of a data set; all others are their own."""


def _read(*names: str) -> Callable[[Sequence[SetNumbers]], dict[str, Values]]:
    """Return a function that reads attributes of the data sets."""
    return lambda sets: {_TITLES.get(name, name): [getattr(each, name) for each in sets] for name in names}


KINDS = (
    Kind("Success by turn", "Share of the turns with that number that were right.", _success),
    Kind("Rewards", "Mean return of an episode, reward of a turn, and named parts of it.", _rewards, shares=False),
    Kind("Fixed and broken", "Share of wrong turns before a right one, and vice versa.", _read("fixed", "broken")),
    Kind("Length of an answer", "Mean tokens of a turn.", _read("answer_tokens"), shares=False),
    Kind("Ends of episodes", "Share of episodes that were cut or failed.", _read("truncated", "failed")),
    Kind("No answer", "Share of the turns in which no answer was found.", _read("unparsable")),
    Kind("Groups without variance", "Share of groups that teach nothing.", _read("zero_variance")),
    Kind("Staleness", "Mean over the sampled tokens, in policy versions.", _read("staleness"), shares=False),
    Kind("Behaviour logprob", "Mean over the sampled tokens, in nats.", _read("logprob"), shares=False),
    Kind("Drift of the logprobs", "Mean distance to recomputed ones, in nats.", _read("drift"), shares=False),
    Kind("Tools", "Share of episodes with calls, and of failed calls.", _read("with_calls", "failed_calls")),
    Kind("Branches", "Share of episodes with branches.", _read("branched")),
)


def _over_sets(name: str, kind: Kind, sets: Sequence[SetNumbers]) -> Plot | None:
    """Draw lines over iterations. Return None without values."""
    series = kind.known(sets)
    return Plot(kind.title, kind.about, _draw(name, lambda axes: _lines(axes, kind, series, sets))) if series else None


def _lines(axes: "Axes", kind: Kind, series: dict[str, Values], sets: Sequence[SetNumbers]) -> None:
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    chains = _chains(sets)
    if len(chains) == 1:
        positions = {index: float(each.iteration) for index, each in enumerate(sets)}
        evaluations = all(EvaluationVersion.is_place(each.version) for each in sets)
        axes.set_xlabel("policy version" if evaluations else "iteration")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    else:
        positions = _side_by_side(axes, chains)
    for number, (title, values) in enumerate(series.items()):
        for chain_number, chain in enumerate(chains.values()):
            points = [(positions[index], value) for index in chain if (value := values[index]) is not None]
            axes.plot(
                *np.array(points, float).reshape(-1, 2).T,
                color=f"C{number}",
                linestyle=_STYLES[number % len(_STYLES)],
                marker=".",
                label=None if chain_number else title,
            )
    if kind.shares:
        axes.set_ylim(-0.02, 1.02)
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:g}%"))
    if len(series) > 1:
        figure = axes.get_figure(root=True)
        assert figure
        figure.legend(loc="outside upper left", ncols=3, fontsize=10, borderpad=0, columnspacing=1.2)


def _chains(sets: Sequence[SetNumbers]) -> dict[str, list[int]]:
    """Return the indices of the data sets that belong together: those of a run, or its evaluations on one set."""

    def name(each: SetNumbers) -> str:
        evaluated = next(iter(select(EvaluationVersion, [each.version])), None)
        return f"{each.run}: {evaluated.set_name or 'evaluations'}" if evaluated else each.run

    return grouped((name(each), index) for index, each in enumerate(sets))


def _side_by_side(axes: "Axes", chains: dict[str, list[int]]) -> dict[int, float]:
    """Give each chain its own section of the x axis, with its name below; return the positions of the data sets."""
    positions = {index: float(at) for at, index in enumerate(index for chain in chains.values() for index in chain)}
    every = -(-len(chains) // _MOST_NAMES)
    named = list(chains.items())[::every]
    middles = [(positions[chain[0]] + positions[chain[-1]]) / 2 for _, chain in named]
    axes.set_xticks(middles, [label(name) for name, _ in named], rotation=25, rotation_mode="anchor", ha="right")
    axes.grid(visible=False, axis="x")
    return positions


def _histogram(name: str, histogram: Histogram) -> Plot:
    edges, counts = histogram.edges, histogram.counts

    def paint(axes: "Axes") -> None:
        shown = edges
        if all(edge.is_integer() for edge in edges) and edges[1] - edges[0] == 1:
            shown = [edge - 0.5 for edge in edges]  # each bin holds one whole number: its bar is centred on it
        axes.stairs(counts, shown, fill=True)
        axes.set_xlabel(label(histogram.unit, 60))
        axes.grid(visible=False, axis="x")
        axes.yaxis.set_major_formatter("{x:,.0f}")

    return Plot(label(histogram.title, 60), f"{sum(counts):,} values over all data sets.", _draw(name, paint))


_IN_MARKDOWN = 6  # plots


def pictures(result: AuditResult) -> str:
    """Return the first plots as images embedded in Markdown, so that nothing has to be loaded to show it."""
    drawn = plots(result.sets, result.histograms)[:_IN_MARKDOWN]
    return "\n\n".join(f"## {plot.title}\n\n![{plot.title}]({plot.image})" for plot in drawn)


def label(text: str, most: int = 24) -> str:
    """Prepare text of unknown origin for a plot: one line, at most `most` characters, only printable ones."""
    shown = visible(text)
    shown = shown if len(shown) <= most else f"{shown[: most - 1]}\u2026"
    return "".join(character if character.isprintable() else "\ufffd" for character in shown)


def _draw(name: str, paint: Callable[["Axes"], None]) -> str:
    """Return the address of a picture.

    Args:
        name: makes the picture the same each time, as its ids follow from it.
        paint: draws on the empty axes.
    """
    from matplotlib import style
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    drawn = StringIO()
    with style.context(["default", _SETTINGS, {"svg.hashsalt": name}]):  # not the user's settings
        figure = Figure(figsize=_SIZE, layout="constrained")
        FigureCanvasSVG(figure)
        paint(figure.subplots())
        figure.savefig(drawn, format="svg", metadata={"Date": None})
    picture = re.sub(r"'DejaVu Sans'[^;\"]*", "system-ui, sans-serif", drawn.getvalue())
    return f"data:image/svg+xml;base64,{base64.b64encode(picture.encode()).decode()}"
