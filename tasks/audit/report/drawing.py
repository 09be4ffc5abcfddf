"""From matplotlib to SVG that stands in a page: in the page's colours, with text as text, and ids of its own."""

import io
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree as Tree

from storage.visible import visible

if TYPE_CHECKING:
    from matplotlib.axes import Axes

INK = "#010101"
SERIES = ("#010201", "#010301", "#010401", "#010501", "#010601")
"""Stand-ins, for which the page has a light and a dark colour each."""
_COLOURS = {INK: "currentColor"} | {colour: f"var(--series-{n})" for n, colour in enumerate(SERIES, 1)}

_ALONE = ("#2f81d0", "#d2691e", "#1a9270", "#a95fb0", "#8f8420")
"""Of the series where there is no page to say so."""

WIDTH = 5.0  # inches of 72 units each
_FONT = "system-ui, sans-serif"
_NAMESPACE = re.compile(r"^\{[^}]*\}")
_REFERENCE = re.compile(r"^#(.+)|url\(#([^)]+)\)")
_LONG_NUMBER = re.compile(r"(\d+\.\d\d)\d+")
_GEOMETRY = ("d", "x", "y", "width", "height", "transform")


def label(text: str, most: int = 24) -> str:
    """Text of unknown origin for a plot: on one line, cut to `most` characters, with nothing that XML cannot hold."""
    shown = visible(text)
    shown = shown if len(shown) <= most else f"{shown[: most - 1]}\u2026"
    return "".join(each if each.isprintable() else "\ufffd" for each in shown)


def draw(name: str, height: float, title: str, description: str, paint: Callable[["Axes"], None]) -> str:
    """One plot as an SVG element.

    Args:
        name: unique in the page; ids begin with it.
        height: inches.
        title: said by screen readers.
        description: what can be seen, in words.
        paint: draws on the empty axes, in the colours `INK` and `SERIES`.
    """
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    drawn = io.BytesIO()
    with _style(name):
        figure = Figure(figsize=(WIDTH, height), layout="constrained")
        FigureCanvasSVG(figure)
        paint(figure.subplots())
        figure.savefig(drawn, format="svg", metadata={"Date": None})
    return _inline(name, title, description, drawn.getvalue())


def standalone(svg: str) -> str:
    """An element of `draw` as a picture of its own, in colours that can be seen on light and on dark."""
    colours = "".join(f"--series-{n}:{colour};" for n, colour in enumerate(_ALONE, 1))
    opening = f'<svg xmlns="http://www.w3.org/2000/svg" style="color:#808080;{colours}" '
    return svg.replace("<svg ", opening, 1)


@contextmanager
def _style(name: str) -> Iterator[None]:
    """Matplotlib's own defaults, whatever the user's are, with ours on top."""
    import matplotlib

    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(_SETTINGS | {"svg.hashsalt": name})
        yield


_SETTINGS: dict[Any, Any] = {
    "svg.fonttype": "none",
    "text.parse_math": False,  # data may hold dollars
    "font.size": 11,
    "text.color": INK,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "axes.facecolor": "none",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": INK,
    "grid.alpha": 0.15,
    "xtick.color": INK,
    "ytick.color": INK,
    "figure.facecolor": "none",
    "legend.frameon": False,
    "legend.handlelength": 2.8,
    "lines.linewidth": 1.6,
    "lines.markersize": 4.5,
}


def _inline(name: str, title: str, description: str, drawn: bytes) -> str:
    root = Tree.fromstring(drawn)
    for parent in list(root.iter()):
        for child in list(parent):
            if _NAMESPACE.sub("", child.tag) in ("metadata", "style"):  # that style would hold for the whole page
                parent.remove(child)
    elements = list(root.iter())
    used = {found for element in elements for found in _references(element)}
    for element in elements:
        _adapt(element, name, used)
    root.attrib = {"viewBox": root.attrib["viewBox"], "role": "img", "aria-label": f"{title}. {description}"}
    root.attrib |= {"stroke-linejoin": "round", "stroke-linecap": "butt"}
    for place, (tag, text) in enumerate((("title", title), ("desc", description))):
        told = Tree.Element(tag)
        told.text = text
        root.insert(place, told)
    return Tree.tostring(root, encoding="unicode")


def _references(element: Tree.Element) -> list[str]:
    found = (_REFERENCE.search(value) for value in element.attrib.values())
    return [match[1] or match[2] for match in found if match]


def _adapt(element: Tree.Element, name: str, used: Sequence[str] | set[str]) -> None:
    """Names without namespaces, ids only where something refers to them, short numbers, colours of the page."""
    element.tag = _NAMESPACE.sub("", element.tag)
    attributes = {_NAMESPACE.sub("", key): value for key, value in element.attrib.items()}
    if attributes.get("id") in used:
        attributes["id"] = f"{name}-{attributes['id']}"
    else:
        attributes.pop("id", None)
    element.attrib = {key: _adapted(key, value, name) for key, value in attributes.items()}


def _adapted(key: str, value: str, name: str) -> str:
    if key == "href":
        return value.replace("#", f"#{name}-", 1)
    if key in _GEOMETRY:
        return _LONG_NUMBER.sub(r"\1", " ".join(value.split()))
    value = re.sub(r"url\(#", f"url(#{name}-", value)
    if key == "style":
        value = re.sub(r"'DejaVu Sans'.*?(?=;|$)", _FONT, value)
    for stand_in, colour in _COLOURS.items():
        value = value.replace(stand_in, colour)
    return value
