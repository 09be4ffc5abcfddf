"""Draw matplotlib figures as SVG pictures, in colours that fit light and dark pages, with text as text."""

import base64
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from io import StringIO
from typing import TYPE_CHECKING, Any

from storage.visible import visible

if TYPE_CHECKING:
    from matplotlib.axes import Axes

INK = "#010101"
SERIES = ("#010201", "#010301", "#010401", "#010501", "#010601")
"""Colours to draw in. They are replaced by the colours of the place where the picture is shown."""
_LIGHT = ("#1b1f24", "#0b5fa5", "#b84a00", "#00765a", "#8b3f8f", "#6b6100")
_DARK = ("#e7eaee", "#6cb6ff", "#ff9d5c", "#4fd0a8", "#e29be6", "#d9cb5a")
_NEUTRAL = ("#808080", "#2f81d0", "#d2691e", "#1a9270", "#a95fb0", "#8f8420")
"""Ink and series; the neutral ones are visible on light and on dark backgrounds."""

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
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    drawn = StringIO()
    with _style(name):
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
    dark = f"@media (prefers-color-scheme: dark) {{{_colours(_DARK)}}}"
    return _address(svg, f"{_colours(_LIGHT)} {dark}")


def for_any_background(svg: str) -> str:
    """Return the address of a picture of `draw` in neutral colours."""
    return _address(svg, _colours(_NEUTRAL))


def _colours(colours: tuple[str, ...]) -> str:
    return f":root {{{' '.join(f'--c{number}: {colour};' for number, colour in enumerate(colours))}}}"


def _address(svg: str, style: str) -> str:
    styled = svg.replace('<style type="text/css">', f'<style type="text/css">{style} ', 1)
    return f"data:image/svg+xml;base64,{base64.b64encode(styled.encode()).decode()}"


@contextmanager
def _style(name: str) -> Iterator[None]:
    """Use matplotlib's defaults and `_SETTINGS` instead of the user's settings."""
    import matplotlib

    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update({**_SETTINGS, "svg.hashsalt": name})
        yield


_SETTINGS: Mapping[Any, Any] = {
    "svg.fonttype": "none",
    "text.parse_math": False,  # data may contain dollar signs
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
