"""Render the report as one HTML file, which loads nothing from elsewhere.

Everything that comes from data is shown as text: `_visible` spells out characters that hide or reorder text, then Jinja
escapes the expression. Only the style sheets, the scripts and the plots go into the page unescaped.
"""

import hashlib
import math
from base64 import b64encode
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from storage.visible import visible
from tasks.audit.conversations import StoredConversation
from tasks.audit.report import wording
from tasks.audit.report.drawing import for_page
from tasks.audit.report.plots import plots
from tasks.audit.results import AuditResult, SetNumbers

if TYPE_CHECKING:
    from jinja2 import Environment

Conversations = Mapping[tuple[str, str], StoredConversation]

TEMPLATES = Path(__file__).parent / "templates"
_STYLES = ("missing.min.css", "style.css")
_SCRIPTS = ("sortable.min.js", "report.js")

_MOST = 500  # characters of an expression that is not a text of a conversation
_CONVERSATIONS = 600_000  # characters of all conversations together, approximately
_TEXT = (600, 6000)  # the least and the most characters of one text of a conversation
_END = 0.25  # share of a shortened text that is taken from its end, where answers are


def render(result: AuditResult, conversations: Conversations, reader_command: str) -> str:
    """Render the page.

    Args:
        result: the result of the audit.
        conversations: the conversations of the examples, by data set and id of the case.
        reader_command: the command that shows all cases.
    """
    scripts = [(TEMPLATES / name).read_text(encoding="utf-8") for name in _SCRIPTS]
    most = _most_characters(result, conversations)
    environment = _environment()
    environment.filters["text"] = lambda text: _escaped(_shorten(text, most))
    return environment.get_template("report.html").render(
        result=result,
        conversations=conversations,
        reader_command=reader_command,
        styles=[_as_is((TEMPLATES / name).read_text(encoding="utf-8")) for name in _STYLES],
        scripts=[_as_is(script) for script in scripts],
        policy=_policy(scripts),
        plots=[(plot, for_page(plot.svg)) for plot in plots(result.sets, result.histograms)],
        columns=_columns(result.sets),
        tools=_tools(result.sets),
        places={each.version: f"set-{number}" for number, each in enumerate(result.sets)},
        words=wording,
    )


def _environment() -> "Environment":
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_visible,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["key"] = _key
    return environment


def _visible(value: Any) -> Any:
    """Make the value of an expression visible before Jinja escapes it; markup stays unchanged."""
    return visible(value, _MOST) if type(value) is str else value


def _as_is(text: str) -> str:
    from markupsafe import Markup

    return Markup(text)


def _escaped(text: str) -> str:
    from markupsafe import escape

    return escape(text)


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
    number: Callable[[SetNumbers], float | None]
    text: Callable[[float | None], str]


def _columns(sets: list[SetNumbers]) -> list[_Column]:
    turns = max((len(each.success) for each in sets), default=0)
    by_turn = [_Column(f"turn {turn + 1} right", _success(turn), wording.share) for turn in range(turns)]
    names = dict.fromkeys(name for each in sets for name in each.rewards)
    rewards = [_Column(name, _reward(name), wording.decimal) for name in names]
    tools = [column for column in _attribute_columns(_TOOLS) if any(column.number(each) is not None for each in sets)]
    return [*_attribute_columns(_SIZES), *by_turn, *rewards, *tools, *_attribute_columns(_REST)]


def _tools(sets: list[SetNumbers]) -> dict[str, Counter[str]]:
    """Return the number of calls of each tool by status, over all data sets, the most frequent tool first."""
    tools: dict[str, Counter[str]] = {}
    for name, by_status in [item for each in sets for item in each.calls.items()]:
        tools.setdefault(name, Counter()).update(by_status)
    return dict(sorted(tools.items(), key=lambda item: -item[1].total()))


def _success(turn: int) -> Callable[[SetNumbers], float | None]:
    return lambda each: each.success[turn] if turn < len(each.success) else None


def _reward(name: str) -> Callable[[SetNumbers], float | None]:
    return lambda each: each.rewards.get(name)


def _attribute_columns(columns: tuple[tuple[str, str, Callable[[float | None], str]], ...]) -> list[_Column]:
    return [_Column(title, _attribute(name), text) for title, name, text in columns]


def _attribute(name: str) -> Callable[[SetNumbers], float | None]:
    def number(each: SetNumbers) -> float | None:
        value: float | None = getattr(each, name)
        return value

    return number


_SIZES = (
    ("iteration", "iteration", wording.decimal),
    ("trajectories", "trajectories", wording.decimal),
    ("turns", "turns", wording.decimal),
    ("tokens", "tokens", wording.decimal),
)
_TOOLS = (
    ("episodes with calls", "with_calls", wording.share),
    ("failed calls", "failed_calls", wording.share),
    ("episodes with branches", "branched", wording.share),
)
_REST = (
    ("any turn right", "any_turn", wording.share),
    ("fixed", "fixed", wording.share),
    ("broken", "broken", wording.share),
    ("tokens a turn", "answer_tokens", wording.decimal),
    ("truncated", "truncated", wording.share),
    ("failed", "failed", wording.share),
    ("unparsable", "unparsable", wording.share),
    ("groups without variance", "zero_variance", wording.share),
    ("staleness", "staleness", wording.decimal),
    ("logprob", "logprob", wording.decimal),
    ("drift", "drift", wording.decimal),
)
