"""Render the report as one HTML file, which loads nothing from elsewhere.

Everything that comes from data is shown as text: `environment` spells out characters that hide or reorder text, then
Jinja escapes the expression. Only the style sheets, the scripts and the plots go into the page unescaped.
"""

import hashlib
import math
from base64 import b64encode
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from storage.visible import visible
from tasks.audit.database import StoredConversation
from tasks.audit.report import wording
from tasks.audit.report.plots import Values, by_turn, for_page, plots, rewards
from tasks.audit.results import AuditResult, SetNumbers

Conversations = Mapping[tuple[str, str], StoredConversation]

TEMPLATES = Path(__file__).parent / "templates"
STYLES = ("missing.min.css", "style.css")
_SCRIPTS = ("sortable.min.js", "report.js")

_MOST = 500  # characters of an expression that is not a text of a conversation
_CONVERSATIONS = 600_000  # characters of all conversations together, approximately
_TEXT = (600, 6000)  # the least and the most characters of one text of a conversation
_END = 0.25  # share of a shortened text that is taken from its end, where answers are


def environment(folder: Path, most: int | None = None) -> Environment:
    """Open templates that make the values of expressions visible, cut after `most` characters, and escape them."""

    def finalize(value: Any) -> Any:
        return visible(value, most) if type(value) is str else value  # markup stays unchanged

    return Environment(
        loader=FileSystemLoader(folder),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=finalize,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def render(result: AuditResult, conversations: Conversations, reader_command: str) -> str:
    """Render the page.

    Args:
        result: the result of the audit.
        conversations: the conversations of the examples, by data set and id of the case.
        reader_command: the command that shows all cases.
    """
    scripts = [(TEMPLATES / name).read_text(encoding="utf-8") for name in _SCRIPTS]
    most = _most_characters(result, conversations)
    templates = environment(TEMPLATES, _MOST)
    templates.filters |= {"key": _key, "text": lambda text: escape(_shorten(str(text), most))}
    return templates.get_template("report.html").render(
        result=result,
        conversations=conversations,
        reader_command=reader_command,
        styles=[Markup((TEMPLATES / name).read_text(encoding="utf-8")) for name in STYLES],
        scripts=[Markup(script) for script in scripts],
        policy=_policy(scripts),
        plots=[(plot, for_page(plot.svg)) for plot in plots(result.sets, result.histograms)],
        columns=_columns(result.sets),
        tools=_tools(result.sets),
        places={each.version: f"set-{number}" for number, each in enumerate(result.sets)},
        words=wording,
    )


def _policy(scripts: list[str]) -> str:
    """Return a content security policy that allows no loading, and no script except `scripts`."""
    hashes = " ".join(f"'sha256-{b64encode(hashlib.sha256(text.encode()).digest()).decode()}'" for text in scripts)
    return (
        f"default-src 'none'; style-src 'unsafe-inline'; img-src data:; script-src {hashes}; "
        "base-uri 'none'; form-action 'none'"
    )


def _key(value: float | None) -> str:
    """Return the sort key of a cell; missing values get an empty key, which comes last."""
    return "" if value is None or math.isnan(value) else str(value).replace("inf", "Infinity")


def _most_characters(result: AuditResult, conversations: Conversations) -> int:
    """Return the most characters of each text, so that the page stays small with any number of conversations."""
    cases = [(case.data_set, case.id) for check in result.checks for case in check.examples]
    shown = [conversations[case] for case in cases if case in conversations]
    texts = sum(1 + sum(1 + 2 * len(turn.calls) for turn in conversation.turns) for conversation in shown)
    least, most = _TEXT
    return max(least, min(most, _CONVERSATIONS // max(texts, 1)))


def _shorten(text: str, most: int) -> str:
    """Return beginning and end of a text that is too long."""
    if len(text) <= most:
        return visible(text)
    end = int(most * _END)
    return f"{visible(text[:-end], most - end)}, then:\n{visible(text[-end:])}"


@dataclass(frozen=True, slots=True)
class _Column:
    """A column of the table of data sets."""

    title: str
    values: Values  # one for each data set
    text: Callable[[float | None], str]


def _columns(sets: Sequence[SetNumbers]) -> list[_Column]:
    sizes = {name: name for name in ("iteration", "trajectories", "turns", "tokens")}
    tools = _named(sets, wording.share, _TOOLS)
    return [
        *_named(sets, wording.decimal, sizes),
        *(_Column(f"{title} right", values, wording.share) for title, values in by_turn(sets).items()),
        *(_Column(title, values, wording.decimal) for title, values in rewards(sets).items()),
        *(column for column in tools if any(value is not None for value in column.values)),
        *_named(sets, wording.share, {"any turn right": "any_turn", "fixed": "fixed", "broken": "broken"}),
        *_named(sets, wording.decimal, {"tokens a turn": "answer_tokens"}),
        *_named(sets, wording.share, _FAILURES),
        *_named(sets, wording.decimal, {name: name for name in ("staleness", "logprob", "drift")}),
    ]


_TOOLS = {
    "episodes with calls": "with_calls",
    "failed calls": "failed_calls",
    "episodes with branches": "branched",
}
_FAILURES = {
    **{name: name for name in ("truncated", "failed", "unparsable")},
    "groups without variance": "zero_variance",
}


def _named(
    sets: Sequence[SetNumbers], text: Callable[[float | None], str], attributes: Mapping[str, str]
) -> list[_Column]:
    """Return the columns of attributes of the data sets, by title."""
    return [_Column(title, [getattr(each, name) for each in sets], text) for title, name in attributes.items()]


def _tools(sets: Sequence[SetNumbers]) -> dict[str, Counter[str]]:
    """Return the number of calls of each tool by status, over all data sets, the most frequent tool first."""
    tools: dict[str, Counter[str]] = {}
    for name, by_status in [item for each in sets for item in each.calls.items()]:
        tools.setdefault(name, Counter()).update(by_status)
    return dict(sorted(tools.items(), key=lambda item: -item[1].total()))
