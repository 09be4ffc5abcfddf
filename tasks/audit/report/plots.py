"""The plots of the report: how the data sets of a run follow each other, and how lengths and rates are spread."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from storage.version_names import EvaluationVersion, select
from tasks.audit.report.drawing import INK, SERIES, draw, label
from tasks.audit.report.wording import decimal, share
from tasks.audit.results import Histogram, SetNumbers

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Values = list[float | None]

_HEIGHT = 3.0
_MARKERS = "os^DvPX"
_STYLES = ("-", "--", "-.", ":")
_MARKED = 30  # points of a line
_LEVEL = 3  # names of runs that fit beside each other
_NAMED = 8  # names that fit at all
_TITLE = 60  # characters


@dataclass(frozen=True, slots=True)
class Plot:
    """A figure of the page; `svg` is an element, safe to stand in HTML."""

    title: str
    about: str
    svg: str


@dataclass(frozen=True, slots=True)
class _Kind:
    """What a plot over the data sets shows."""

    title: str
    about: str
    series: Callable[[Sequence[SetNumbers]], dict[str, Values]]  # by name, a value for each data set
    shares: bool = True
    whole: bool = False  # the axis goes from 0 to 100 %
    from_zero: bool = True


def plots(sets: Sequence[SetNumbers], histograms: Sequence[Histogram]) -> list[Plot]:
    """All plots for which there are data."""
    drawn = [_over_sets(f"plot-{number}", kind, sets) for number, kind in enumerate(_KINDS)]
    drawn += [_histogram(f"histogram-{number}", each) for number, each in enumerate(histograms)]
    return [plot for plot in drawn if plot]


def _success(sets: Sequence[SetNumbers]) -> dict[str, Values]:
    turns = max((len(each.success) for each in sets), default=0)
    by_turn: dict[str, Values] = {
        f"turn {turn + 1}": [each.success[turn] if turn < len(each.success) else None for each in sets]
        for turn in range(turns)
    }
    return by_turn if turns < 2 else by_turn | {"any turn": [each.any_turn for each in sets]}


def _of(**names: str) -> Callable[[Sequence[SetNumbers]], dict[str, Values]]:
    return lambda sets: {
        title.replace("_", " "): [getattr(each, name) for each in sets] for title, name in names.items()
    }


_KINDS = (
    _Kind("Success by turn", "Share of the turns with that number that were right.", _success, whole=True),
    _Kind("Length of an answer", "Mean tokens of a turn.", _of(tokens="answer_tokens"), shares=False),
    _Kind(
        "Truncated, failed, unparsable",
        "Share of the episodes that were cut or failed, and of the turns without an answer.",
        _of(truncated="truncated", failed="failed", unparsable="unparsable"),
    ),
    _Kind(
        "Groups without variance",
        "Share of the groups in which all episodes earned the same: nothing is learned from them.",
        _of(groups="zero_variance"),
        whole=True,
    ),
    _Kind(
        "Fixed and broken answers",
        "Share of the wrong turns that were followed by a right one, and of the right ones by a wrong one.",
        _of(fixed="fixed", broken="broken"),
        whole=True,
    ),
    _Kind("Staleness", "Mean over the sampled tokens, in versions of the policy.", _of(staleness="staleness"), False),
    _Kind(
        "Behaviour logprob",
        "Mean of a sampled token, in nats: nearer to 0 is surer.",
        _of(logprob="logprob"),
        shares=False,
        from_zero=False,
    ),
    _Kind(
        "Drift of the logprobs",
        "Mean distance of stored logprobs to recomputed ones, in nats a token, where looked at.",
        _of(drift="drift"),
        shares=False,
    ),
)


def _over_sets(name: str, kind: _Kind, sets: Sequence[SetNumbers]) -> Plot | None:
    """Lines over iterations. Of one data set bars of its shares; a number alone needs no picture."""
    series = {
        title: values
        for title, values in (
            (title, [_finite(each) for each in values]) for title, values in kind.series(sets).items()
        )
        if any(each is not None for each in values)
    }
    if not series or (len(sets) == 1 and len(series) == 1):
        return None
    told = share if kind.shares else decimal
    description = "; ".join(_told(title, values, told) for title, values in series.items())
    if len(sets) == 1:
        svg = draw(name, 0.4 + 0.4 * len(series), kind.title, description, lambda axes: _bars(axes, series))
    else:
        svg = draw(name, _HEIGHT, kind.title, description, lambda axes: _lines(axes, kind, series, sets))
    return Plot(kind.title, kind.about, svg)


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _told(title: str, values: Values, told: Callable[[float | None], str]) -> str:
    """A series in words."""
    known = [value for value in values if value is not None]
    if len(known) == 1:
        return f"{title} {told(known[0])}"
    return f"{title} from {told(known[0])} to {told(known[-1])}, between {told(min(known))} and {told(max(known))}"


def _bars(axes: "Axes", series: dict[str, Values]) -> None:
    lengths = [value for (value,) in series.values() if value is not None]
    bars = axes.barh(list(series), lengths, height=0.6, color=SERIES[0])
    axes.bar_label(bars, [share(length) for length in lengths], padding=4)
    axes.set_xlim(0, 1.2)
    axes.invert_yaxis()
    axes.grid(visible=False)
    axes.tick_params(left=False)
    axes.xaxis.set_visible(False)
    axes.spines["bottom"].set_visible(False)


def _lines(axes: "Axes", kind: _Kind, series: dict[str, Values], sets: Sequence[SetNumbers]) -> None:
    chains = _chains(sets)
    places = _iterations(axes, sets) if len(chains) == 1 else _side_by_side(axes, chains)
    for number, (title, values) in enumerate(series.items()):
        for place, chain in enumerate(chains.values()):
            points = [(places[index], value) for index in chain if (value := values[index]) is not None]
            _line(axes, number, points, None if place else title)
    _value_axis(axes, kind, [value for values in series.values() for value in values if value is not None])
    if len(series) > 1:
        figure = axes.get_figure(root=True)
        assert figure
        figure.legend(loc="outside upper left", ncols=3, fontsize=10, borderpad=0, columnspacing=1.2)


def _line(axes: "Axes", number: int, points: Sequence[tuple[float, float]], title: str | None) -> None:
    axes.plot(
        [place for place, _ in points],
        [value for _, value in points],
        color=SERIES[number % len(SERIES)],
        linestyle=_STYLES[number % len(_STYLES)],
        marker=_MARKERS[number % len(_MARKERS)],
        markevery=max(1, len(points) // _MARKED),
        label=title,
    )


def _chains(sets: Sequence[SetNumbers]) -> dict[str, list[int]]:
    """Positions of the data sets that follow each other: of a run, or of its evaluations on one set."""
    found: dict[str, list[int]] = {}
    for index, each in enumerate(sets):
        evaluated = next(iter(select(EvaluationVersion, [each.version])), None)
        name = f"{each.run}: {evaluated.set_name or 'evaluations'}" if evaluated else each.run
        found.setdefault(name, []).append(index)
    return found


def _iterations(axes: "Axes", sets: Sequence[SetNumbers]) -> dict[int, float]:
    from matplotlib.ticker import MaxNLocator

    evaluations = all(EvaluationVersion.is_place(each.version) for each in sets)
    axes.set_xlabel("policy version" if evaluations else "iteration")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    return {index: float(each.iteration) for index, each in enumerate(sets)}


def _side_by_side(axes: "Axes", chains: dict[str, list[int]]) -> dict[int, float]:
    """Each chain in a stretch of its own, with its name below."""
    order = [index for chain in chains.values() for index in chain]
    places = {index: float(place) for place, index in enumerate(order)}
    middles = [(places[chain[0]] + places[chain[-1]]) / 2 for chain in chains.values()]
    if len(chains) <= _NAMED:
        for chain in list(chains.values())[1:]:
            axes.axvline(places[chain[0]] - 0.5, color=INK, linewidth=0.8, alpha=0.4)
    every = -(-len(chains) // _NAMED)
    turned = len(chains) > _LEVEL
    axes.set_xticks(
        middles[::every],
        [label(name) for name in chains][::every],
        rotation=25 if turned else 0,
        rotation_mode="anchor",
        ha="right" if turned else "center",
    )
    axes.grid(visible=False, axis="x")
    return places


def _value_axis(axes: "Axes", kind: _Kind, values: Sequence[float]) -> None:
    from matplotlib.ticker import FuncFormatter

    if kind.whole:
        axes.set_ylim(-0.02, 1.02)
    elif kind.from_zero:
        axes.set_ylim(0, max(values) * 1.1 or (0.01 if kind.shares else 1))
    form = (lambda value, _: f"{100 * value:g}%") if kind.shares else (lambda value, _: f"{value:g}")
    axes.yaxis.set_major_formatter(FuncFormatter(form))


def _histogram(name: str, histogram: Histogram) -> Plot | None:
    if not sum(histogram.counts):
        return None
    edges, counts = histogram.edges, histogram.counts
    highest = max(range(len(counts)), key=counts.__getitem__)
    title, unit = label(histogram.title, _TITLE), label(histogram.unit, _TITLE)
    description = (
        f"{sum(counts):,} values from {decimal(edges[0])} to {decimal(edges[-1])} {unit}; most, {counts[highest]:,}, "
        f"between {decimal(edges[highest])} and {decimal(edges[highest + 1])}"
    )

    def paint(axes: "Axes") -> None:
        axes.stairs(counts, _around_values(axes, edges), fill=True, color=SERIES[0])
        axes.set_xlabel(unit)
        axes.margins(x=1 if len(counts) == 1 else 0.05)
        axes.grid(visible=False, axis="x")
        axes.yaxis.set_major_formatter("{x:,.0f}")

    return Plot(title, f"{sum(counts):,} values over all data sets.", draw(name, _HEIGHT, title, description, paint))


def _around_values(axes: "Axes", edges: list[float]) -> list[float]:
    """Where each bin holds one whole number, a bar stands around it."""
    from matplotlib.ticker import MaxNLocator

    if all(edge.is_integer() for edge in edges) and edges[1] - edges[0] == 1:
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        return [edge - 0.5 for edge in edges]
    return edges
