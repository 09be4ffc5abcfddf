"""Render the report as one HTML file, which loads nothing from elsewhere.

Everything that comes from data is shown as text: `environment` spells out characters that hide or reorder text, then
Jinja escapes the expression. Only the style sheets, the scripts and the plots go into the page unescaped.
"""

import hashlib
import math
from base64 import b64encode
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from storage.visible import visible
from tasks.audit.database import Conversation
from tasks.audit.report import wording
from tasks.audit.report.plots import KINDS, Values, plots
from tasks.audit.results import AuditResult, SetNumbers
from tasks.tools.interface import shorten

Conversations = Mapping[tuple[str, str], Conversation]

TEMPLATES = Path(__file__).parent / "templates"
STYLES = ("missing.min.css", "style.css")
_SCRIPTS = ("sortable.min.js", "report.js")

_MOST = 500  # characters of an expression that is not a text of a conversation
_MOST_OF_TEXT = 3000  # characters of one text of a conversation, whose middle is left out


def environment(folders: Sequence[Path], most: int | None = None) -> Environment:
    """Open templates that make the values of expressions visible, cut after `most` characters, and escape them."""

    def finalize(value: Any) -> Any:
        return visible(value, most) if type(value) is str else value  # markup stays unchanged

    return Environment(
        loader=FileSystemLoader(folders),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=finalize,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def render(result: AuditResult, conversations: Conversations, reader_command: str) -> str:
    """Render the page. Its content security policy allows no loading, and no script except the two of the page.

    Args:
        result: the result of the audit.
        conversations: the conversations of the examples, by data set and id of the case.
        reader_command: the command that shows all cases.
    """
    scripts = [(TEMPLATES / name).read_text(encoding="utf-8") for name in _SCRIPTS]
    hashes = " ".join(f"'sha256-{b64encode(hashlib.sha256(text.encode()).digest()).decode()}'" for text in scripts)
    templates = environment([TEMPLATES], _MOST)
    templates.filters |= {"key": _key, "text": lambda text: escape(visible(shorten(str(text), _MOST_OF_TEXT)))}
    return templates.get_template("report.html").render(
        result=result,
        conversations=conversations,
        reader_command=reader_command,
        styles=[Markup((TEMPLATES / name).read_text(encoding="utf-8")) for name in STYLES],
        scripts=[Markup(script) for script in scripts],
        policy=f"default-src 'none'; style-src 'unsafe-inline'; img-src data:; script-src {hashes}; "
        "base-uri 'none'; form-action 'none'",
        plots=plots(result.sets, result.histograms),
        columns=_columns(result.sets),
        tools=_tools(result.sets),
        anchors={each.version: f"set-{number}" for number, each in enumerate(result.sets)},
        words=wording,
    )


def _key(value: float | None) -> str:
    """Return the sort key of a cell; missing values get an empty key, which comes last."""
    return "" if value is None or math.isnan(value) else str(value).replace("inf", "Infinity")


_Column = tuple[str, Values, Callable[[float | None], str]]
"""A column of the table of data sets: its title, a value for each data set, and how values are written."""


def _columns(sets: Sequence[SetNumbers]) -> list[_Column]:
    names = ("iteration", "trajectories", "turns", "tokens")
    columns: list[_Column] = [(name, [getattr(each, name) for each in sets], wording.decimal) for name in names]
    for kind in KINDS:
        write = wording.share if kind.shares else wording.decimal
        columns += [(title, values, write) for title, values in kind.known(sets).items()]
    return columns


def _tools(sets: Sequence[SetNumbers]) -> dict[str, Counter[str]]:
    """Return the number of calls of each tool by status, over all data sets, the most frequent tool first."""
    tools: dict[str, Counter[str]] = {}
    for name, by_status in [item for each in sets for item in each.calls.items()]:
        tools.setdefault(name, Counter()).update(by_status)
    return dict(sorted(tools.items(), key=lambda item: -item[1].total()))
