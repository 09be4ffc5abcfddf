"""Render and send pages: templates escape every text, and headers forbid the browser to run anything."""

import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from fastapi import Response
from fastapi.responses import HTMLResponse, PlainTextResponse
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from storage.visible import visible
from tasks.audit.report import wording

HERE = Path(__file__).parent / "templates"
_REPORT = Path(__file__).parent.parent / "report" / "templates"
STYLES = {
    "missing.min.css": _REPORT / "missing.min.css",
    "style.css": _REPORT / "style.css",
    "reader.css": HERE / "reader.css",
}
LINES = 50
"""Trajectories on one page of the list."""
LONGEST = 20_000
"""The most characters of one text on a page; a plain-text page shows the whole text."""

_POLICY = "default-src 'none'; base-uri 'none'; frame-ancestors 'none'; "
HEADERS = {
    "Content-Security-Policy": _POLICY + "form-action 'self'; style-src 'self'; img-src 'self' data:",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}
REPORT_POLICY = (
    _POLICY
    + "form-action 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:; sandbox allow-scripts"
)
"""The report is one file with its own style and scripts, which sort tables; the sandbox hides other pages from them."""


class PageError(Exception):
    """The requested page cannot be shown."""

    def __init__(self, status: int, title: str, says: str) -> None:
        super().__init__(says)
        self.status, self.title, self.says = status, title, says


class Pages:
    """Renders templates; all of them get the values of `always`."""

    def __init__(self, **always: Any) -> None:
        self._templates = Environment(
            loader=FileSystemLoader(HERE),
            autoescape=True,
            undefined=StrictUndefined,
            finalize=_visible,
            trim_blocks=True,
            lstrip_blocks=True,
        )
        self._templates.filters |= {
            "seen": seen,
            "line": line,
            "number": wording.decimal,
            "counted": wording.counted,
            "precise": precise,
            "moment": moment,
            "pretty": pretty,
        }
        self._templates.globals |= {"LONGEST": LONGEST, "words": wording, **always}

    def html(self, template: str, status: int = 200, **values: Any) -> Response:
        text = self._templates.get_template(template).render(values)
        return HTMLResponse(text, status, headers=HEADERS)

    def failed(self, status: int, title: str, says: str) -> Response:
        """Return a page with an error."""
        return self.html("failed.html", status, title=title, says=says)


def plain(text: str, headers: Mapping[str, str] = HEADERS) -> Response:
    """Return the whole text as a plain-text page."""
    return PlainTextResponse(visible(text), headers=dict(headers))


def _visible(value: Any) -> Any:
    """Make the value of an expression visible before Jinja escapes it; markup stays unchanged."""
    return visible(value) if type(value) is str else value


def precise(value: float | None) -> str:
    """Write a number with four digits.

    >>> precise(-1.23456)
    '-1.235'
    """
    return wording.MISSING if value is None else f"{value:.4g}"


def seen(text: str | None, most: int | None = None) -> str:
    """Make text of unknown origin visible, cut after `most` characters."""
    return visible(text or "", most)


def line(text: str | None, most: int = 100) -> str:
    r"""Return the first line that is not empty.

    >>> line("\n  first\nsecond")
    'first …'
    """
    whole = (text or "").strip()
    first = whole.partition("\n")[0]
    shown = visible(first[:most])
    return shown if len(whole) == len(first[:most]) else f"{shown} …"


def moment(seconds: float) -> str:
    """Write a time in seconds since the epoch as a date.

    >>> moment(0.0)
    '1970-01-01 00:00:00 UTC'
    """
    try:
        return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%d %H:%M:%S} UTC"
    except (OverflowError, ValueError, OSError):
        return f"{seconds} seconds"


def pretty(text: str) -> str:
    """Write a JSON object as names and values on one line; other text stays unchanged.

    >>> pretty('{"top_k": 0, "stop": "a"}'), pretty("what?")
    ('top_k=0, stop="a"', 'what?')
    """
    try:
        values = json.loads(text)
    except (ValueError, RecursionError):
        return text
    if not isinstance(values, dict):
        return text
    return ", ".join(f"{name}={json.dumps(value, ensure_ascii=False)}" for name, value in values.items())


def pager(page: int, pages: int) -> Sequence[int]:
    """Return the page numbers to link: the first, the last, and those near the current page.

    >>> pager(7, 20)
    [1, 5, 6, 7, 8, 9, 20]
    """
    near = range(max(1, page - 2), min(pages, page + 2) + 1)
    return sorted({1, *near, max(1, pages)})
