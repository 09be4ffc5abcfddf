"""The plots of the report: numbers of the data sets over iterations, and histograms of lengths, rates and staleness.

They are SVG pictures of matplotlib, in colours that fit light and dark pages, with text as text.
"""

import base64
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING

from storage.version_names import EvaluationVersion, select
from storage.visible import visible
from tasks.audit.report.wording import decimal, plain, share
from tasks.audit.results import AuditResult, Histogram, SetNumbers

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Values = list[float | None]

_HEIGHT = 3.0
_MARKERS = "os^DvPX"
_STYLES = ("-", "--", "-.", ":")
_MOST_MARKERS = 30  # on a line
_MOST_LEVEL_NAMES = 3  # names of runs that fit below the axis without rotation
_MOST_NAMES = 8  # names of runs that fit below the axis
_MOST_CHARACTERS = 60  # of a title


@dataclass(frozen=True, slots=True)
class Plot:
    """A plot; `svg` is an SVG document, and `description` says in words what it shows."""

    title: str
    about: str
    description: str
    svg: str


@dataclass(frozen=True, slots=True)
class _Kind:
    """The description of a plot over the data sets."""

    title: str
    about: str
    series: Callable[[Sequence[SetNumbers]], dict[str, Values]]  # by name, a value for each data set
    shares: bool = True  # the values are shares
    whole: bool = False  # the axis goes from 0 to 100 %
    from_zero: bool = True  # the axis begins at 0

    def form(self, value: float) -> str:
        """Write a value of this plot."""
        return share(value) if self.shares else decimal(value)


def plots(sets: Sequence[SetNumbers], histograms: Sequence[Histogram]) -> list[Plot]:
    """Return all plots for which there are data."""
    drawn = [_over_sets(f"plot-{number}", kind, sets) for number, kind in enumerate(_KINDS)]
    drawn += [_histogram(f"histogram-{number}", each) for number, each in enumerate(histograms)]
    return [plot for plot in drawn if plot]


def by_turn(sets: Sequence[SetNumbers]) -> dict[str, Values]:
    """Return the share of right turns for each turn number."""
    turns = max((len(each.success) for each in sets), default=0)
    return {
        f"turn {turn + 1}": [each.success[turn] if turn < len(each.success) else None for each in sets]
        for turn in range(turns)
    }


def rewards(sets: Sequence[SetNumbers]) -> dict[str, Values]:
    """Return the means of the reward and of its parts, by name."""
    names = dict.fromkeys(name for each in sets for name in each.rewards)
    return {name: [each.rewards.get(name) for each in sets] for name in names}


def _success(sets: Sequence[SetNumbers]) -> dict[str, Values]:
    turns = by_turn(sets)
    return turns if len(turns) < 2 else turns | {"any turn": [each.any_turn for each in sets]}


def _attributes(*names: str, **titled: str) -> Callable[[Sequence[SetNumbers]], dict[str, Values]]:
    titles = {name: name for name in names} | {title.replace("_", " "): name for title, name in titled.items()}
    return lambda sets: {title: [getattr(each, name) for each in sets] for title, name in titles.items()}


_KINDS = (
    _Kind("Success by turn", "Share of the turns with that number that were right.", _success, whole=True),
    _Kind("Length of an answer", "Mean tokens of a turn.", _attributes(tokens="answer_tokens"), shares=False),
    _Kind(
        "Truncated, failed, unparsable",
        "Share of the episodes that were cut or failed, and of the turns without an answer.",
        _attributes("truncated", "failed", "unparsable"),
    ),
    _Kind(
        "Groups without variance",
        "Share of the groups in which all episodes earned the same: the policy learns nothing from them.",
        _attributes(groups="zero_variance"),
        whole=True,
    ),
    _Kind(
        "Fixed and broken answers",
        "Share of the wrong turns that were followed by a right one, and of the right ones by a wrong one.",
        _attributes("fixed", "broken"),
        whole=True,
    ),
    _Kind("Staleness", "Mean over the sampled tokens, in policy versions.", _attributes("staleness"), False),
    _Kind(
        "Behaviour logprob",
        "Mean over the sampled tokens, in nats; closer to 0 means more certain.",
        _attributes("logprob"),
        shares=False,
        from_zero=False,
    ),
    _Kind(
        "Drift of the logprobs",
        "Mean distance between stored and recomputed logprobs, in nats a token, for data sets that were recomputed.",
        _attributes("drift"),
        shares=False,
    ),
    _Kind("Rewards", "Mean reward of a turn, and of its named parts.", rewards, shares=False, from_zero=False),
    _Kind(
        "Tools and branches",
        "Share of the episodes that call a tool, of the calls that failed, and of the episodes with branches.",
        _attributes(with_calls="with_calls", failed_calls="failed_calls", with_branches="branched"),
        whole=True,
    ),
)


def _over_sets(name: str, kind: _Kind, sets: Sequence[SetNumbers]) -> Plot | None:
    """Draw lines over iterations, or for a single data set bars. Return None without values or for a single number."""
    series: dict[str, Values] = {}
    for title, values in kind.series(sets).items():
        finite = [value if value is not None and math.isfinite(value) else None for value in values]
        if any(value is not None for value in finite):
            series[title] = finite
    if not series or (len(sets) == 1 and len(series) == 1):
        return None
    if len(sets) == 1:
        svg = draw(name, 0.4 + 0.4 * len(series), lambda axes: _bars(axes, kind, series))
    else:
        svg = draw(name, _HEIGHT, lambda axes: _lines(axes, kind, series, sets))
    return Plot(kind.title, kind.about, "; ".join(_describe(kind, *item) for item in series.items()), svg)


def _describe(kind: _Kind, title: str, values: Values) -> str:
    """Describe a series in words."""
    known, form = [value for value in values if value is not None], kind.form
    if len(known) == 1:
        return f"{title} {form(known[0])}"
    return f"{title} from {form(known[0])} to {form(known[-1])}, between {form(min(known))} and {form(max(known))}"


def _bars(axes: "Axes", kind: _Kind, series: dict[str, Values]) -> None:
    lengths = [value for (value,) in series.values() if value is not None]
    bars = axes.barh(list(series), lengths, height=0.6, color=SERIES[0])
    axes.bar_label(bars, [kind.form(length) for length in lengths], padding=4)
    if kind.shares:
        axes.set_xlim(0, 1.2)
    else:
        axes.margins(x=0.2)
    axes.invert_yaxis()
    axes.grid(visible=False)
    axes.tick_params(left=False)
    axes.xaxis.set_visible(False)
    axes.spines["bottom"].set_visible(False)


def _lines(axes: "Axes", kind: _Kind, series: dict[str, Values], sets: Sequence[SetNumbers]) -> None:
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
                [position for position, _ in points],
                [value for _, value in points],
                color=SERIES[number % len(SERIES)],
                linestyle=_STYLES[number % len(_STYLES)],
                marker=_MARKERS[number % len(_MARKERS)],
                markevery=max(1, len(points) // _MOST_MARKERS),
                label=None if chain_number else title,
            )
    if kind.whole:
        axes.set_ylim(-0.02, 1.02)
    elif kind.from_zero:
        highest = max(value for values in series.values() for value in values if value is not None)
        axes.set_ylim(0, highest * 1.1 or (0.01 if kind.shares else 1))
    per_cent = FuncFormatter(lambda value, _: f"{100 * value:g}%")
    axes.yaxis.set_major_formatter(per_cent if kind.shares else "{x:g}")
    if len(series) > 1:
        figure = axes.get_figure(root=True)
        assert figure
        figure.legend(loc="outside upper left", ncols=3, fontsize=10, borderpad=0, columnspacing=1.2)


def _chains(sets: Sequence[SetNumbers]) -> dict[str, list[int]]:
    """Return the indices of the data sets that belong together: those of a run, or its evaluations on one set."""
    chains: dict[str, list[int]] = {}
    for index, each in enumerate(sets):
        evaluated = next(iter(select(EvaluationVersion, [each.version])), None)
        name = f"{each.run}: {evaluated.set_name or 'evaluations'}" if evaluated else each.run
        chains.setdefault(name, []).append(index)
    return chains


def _side_by_side(axes: "Axes", chains: dict[str, list[int]]) -> dict[int, float]:
    """Give each chain its own section of the x axis, with its name below; return the positions of the data sets."""
    order = [index for chain in chains.values() for index in chain]
    positions = {index: float(position) for position, index in enumerate(order)}
    middles = [(positions[chain[0]] + positions[chain[-1]]) / 2 for chain in chains.values()]
    if len(chains) <= _MOST_NAMES:
        for chain in list(chains.values())[1:]:
            axes.axvline(positions[chain[0]] - 0.5, color=INK, linewidth=0.8, alpha=0.4)
    every = -(-len(chains) // _MOST_NAMES)
    rotated = len(chains) > _MOST_LEVEL_NAMES
    axes.set_xticks(
        middles[::every],
        [label(name) for name in chains][::every],
        rotation=25 if rotated else 0,
        rotation_mode="anchor",
        ha="right" if rotated else "center",
    )
    axes.grid(visible=False, axis="x")
    return positions


def _histogram(name: str, histogram: Histogram) -> Plot | None:
    if not sum(histogram.counts):
        return None
    edges, counts = histogram.edges, histogram.counts
    highest = max(range(len(counts)), key=counts.__getitem__)
    title, unit = label(histogram.title, _MOST_CHARACTERS), label(histogram.unit, _MOST_CHARACTERS)
    description = (
        f"{sum(counts):,} values from {decimal(edges[0])} to {decimal(edges[-1])} {unit}; most, {counts[highest]:,}, "
        f"between {decimal(edges[highest])} and {decimal(edges[highest + 1])}"
    )

    def paint(axes: "Axes") -> None:
        from matplotlib.ticker import MaxNLocator

        shown = edges
        if all(edge.is_integer() for edge in edges) and edges[1] - edges[0] == 1:
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
            shown = [edge - 0.5 for edge in edges]  # each bin holds one whole number: its bar is centred on it
        axes.stairs(counts, shown, fill=True, color=SERIES[0])
        axes.set_xlabel(unit)
        axes.margins(x=1 if len(counts) == 1 else 0.05)
        axes.grid(visible=False, axis="x")
        axes.yaxis.set_major_formatter("{x:,.0f}")

    return Plot(title, f"{sum(counts):,} values over all data sets.", description, draw(name, _HEIGHT, paint))


_IN_MARKDOWN = 6  # plots


def pictures(result: AuditResult) -> str:
    """Return the first plots as images embedded in Markdown, so that nothing has to be loaded to show it."""
    drawn = plots(result.sets, result.histograms)[:_IN_MARKDOWN]
    titled = ((plain(plot.title), for_any_background(plot.svg)) for plot in drawn)
    return "\n\n".join(f"## {title}\n\n![{title}]({address})" for title, address in titled)


INK = "#010101"
SERIES = ("#010201", "#010301", "#010401", "#010501", "#010601")
"""Colours to draw in. They are replaced by the colours of the place where the picture is shown."""
_LIGHT = ("#1b1f24", "#0b5fa5", "#b84a00", "#00765a", "#8b3f8f", "#6b6100")
_DARK = ("#e7eaee", "#6cb6ff", "#ff9d5c", "#4fd0a8", "#e29be6", "#d9cb5a")
_NEUTRAL = ("#808080", "#2f81d0", "#d2691e", "#1a9270", "#a95fb0", "#8f8420")
"""Ink and series; the neutral ones are visible on light and on dark backgrounds."""

_SETTINGS = Path(__file__).parent / "templates" / "plots.mplstyle"
_WIDTH = 5.0  # inches of 72 units each
_FONT = "system-ui, sans-serif"
_TAG = re.compile(r"<[^>]*>")
_LONG_NUMBER = re.compile(r"(\d+\.\d\d)\d+")


def label(text: str, most: int = 24) -> str:
    """Prepare text of unknown origin for a plot: one line, at most `most` characters, only printable ones."""
    shown = visible(text)
    shown = shown if len(shown) <= most else f"{shown[: most - 1]}\u2026"
    return "".join(character if character.isprintable() else "\ufffd" for character in shown)


def draw(name: str, height: float, paint: Callable[["Axes"], None]) -> str:
    """Return a plot as an SVG document.

    Args:
        name: makes the picture the same each time, as its ids follow from it.
        height: in inches.
        paint: draws on the empty axes, in the colours `INK` and `SERIES`.
    """
    from matplotlib import style
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    drawn = StringIO()
    with style.context(["default", _SETTINGS, {"svg.hashsalt": name}]):  # not the user's settings
        figure = Figure(figsize=(_WIDTH, height), layout="constrained")
        FigureCanvasSVG(figure)
        paint(figure.subplots())
        figure.savefig(drawn, format="svg", metadata={"Date": None})
    picture = re.sub(r"'DejaVu Sans'[^;\"]*", _FONT, drawn.getvalue())
    for number, colour in enumerate((INK, *SERIES)):
        picture = picture.replace(colour, f"var(--c{number})")
    return _TAG.sub(lambda tag: _LONG_NUMBER.sub(r"\1", tag[0]), picture)


def for_page(svg: str) -> str:
    """Return the address of a picture of `draw` in the colours of the page, which the browser chooses."""
    return _address(svg, f"{_colours(_LIGHT)} @media (prefers-color-scheme: dark) {{{_colours(_DARK)}}}")


def for_any_background(svg: str) -> str:
    """Return the address of a picture of `draw` in neutral colours."""
    return _address(svg, _colours(_NEUTRAL))


def _colours(colours: tuple[str, ...]) -> str:
    return f":root {{{' '.join(f'--c{number}: {colour};' for number, colour in enumerate(colours))}}}"


def _address(svg: str, style: str) -> str:
    styled = svg.replace('<style type="text/css">', f'<style type="text/css">{style} ', 1)
    return f"data:image/svg+xml;base64,{base64.b64encode(styled.encode()).decode()}"
