"""The report as one HTML file, which asks nobody for anything.

Whatever comes from data is shown as text: Jinja escapes every expression, after `_shown` has spelled out what would
hide or reorder it. Only the stylesheet, the scripts and the plots go into the page as they are.
"""

import hashlib
import math
from base64 import b64encode
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from storage.visible import visible
from tasks.audit.conversations import Conversation
from tasks.audit.report import wording
from tasks.audit.report.plots import plots
from tasks.audit.results import AuditResult, SetNumbers

if TYPE_CHECKING:
    from jinja2 import Environment

Conversations = Mapping[tuple[str, str], Conversation]

TEMPLATES = Path(__file__).parent / "templates"
_SCRIPTS = ("sortable.min.js", "report.js")

_MOST = 500  # characters of anything but what was said
_SPOKEN = 600_000  # characters of all conversations together, about
_TEXT = (600, 6000)  # least and most characters of one text
_END = 0.25  # of a text that is cut, what is shown of its end: answers stand there


def render(result: AuditResult, conversations: Conversations, reader_command: str) -> str:
    """The page.

    Args:
        result: of the audit.
        conversations: those of the examples, by data set and id of the case.
        reader_command: what to type to see all cases.
    """
    scripts = [(TEMPLATES / name).read_text(encoding="utf-8") for name in _SCRIPTS]
    sizes = _sizes(result, conversations)
    environment = _environment()
    environment.filters["text"] = lambda text: _escaped(_cut(text, sizes))
    return environment.get_template("report.html").render(
        result=result,
        conversations=conversations,
        reader_command=reader_command,
        style=_as_is((TEMPLATES / "style.css").read_text(encoding="utf-8")),
        scripts=[_as_is(script) for script in scripts],
        policy=_policy(scripts),
        plots=[(plot, _as_is(plot.svg)) for plot in plots(result.sets, result.histograms)],
        columns=_columns(result.sets),
        places={each.version: f"set-{number}" for number, each in enumerate(result.sets)},
        words=wording,
    )


def _environment() -> "Environment":
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_shown,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["key"] = _key
    return environment


def _shown(value: Any) -> Any:
    """What every expression of the template goes through before it is escaped; markup is left alone."""
    return visible(value, _MOST) if type(value) is str else value


def _as_is(text: str) -> str:
    from markupsafe import Markup

    return Markup(text)


def _escaped(text: str) -> str:
    from markupsafe import escape

    return escape(text)


def _policy(scripts: list[str]) -> str:
    """Nothing is loaded, and no script runs but these."""
    hashes = " ".join(f"'sha256-{b64encode(hashlib.sha256(text.encode()).digest()).decode()}'" for text in scripts)
    return (
        f"default-src 'none'; style-src 'unsafe-inline'; img-src data:; script-src {hashes}; "
        "base-uri 'none'; form-action 'none'"
    )


def _key(value: float | None) -> str:
    """What a cell is sorted by; empty, which comes last, for what is missing."""
    return "" if value is None or math.isnan(value) else str(value).replace("inf", "Infinity")


def _sizes(result: AuditResult, conversations: Conversations) -> int:
    """Characters that each text may have, so that the page stays small however many there are."""
    cases = [(case.data_set, case.id) for check in result.checks for case in check.examples]
    shown = [conversations[case] for case in cases if case in conversations]
    texts = sum(1 + len(conversation.turns) for conversation in shown)
    least, most = _TEXT
    return max(least, min(most, _SPOKEN // max(texts, 1)))


def _cut(text: str, most: int) -> str:
    """Beginning and end of a text that is too long."""
    if len(text) <= most:
        return visible(text)
    end = int(most * _END)
    return f"{visible(text[:-end], most - end)}, then:\n{visible(text[-end:])}"


@dataclass(frozen=True, slots=True)
class _Column:
    """Of the table of data sets."""

    title: str
    number: Callable[[SetNumbers], float | None]
    text: Callable[[float | None], str]


def _columns(sets: list[SetNumbers]) -> list[_Column]:
    turns = max((len(each.success) for each in sets), default=0)
    by_turn = [_Column(f"turn {turn + 1} right", _success(turn), wording.share) for turn in range(turns)]
    return [*_counts(_SIZES), *by_turn, *_counts(_REST)]


def _success(turn: int) -> Callable[[SetNumbers], float | None]:
    return lambda each: each.success[turn] if turn < len(each.success) else None


def _counts(columns: tuple[tuple[str, str, Callable[[float | None], str]], ...]) -> list[_Column]:
    return [_Column(title, _named(name), text) for title, name, text in columns]


def _named(name: str) -> Callable[[SetNumbers], float | None]:
    def number(each: SetNumbers) -> float | None:
        found: float | None = getattr(each, name)
        return found

    return number


_SIZES = (
    ("iteration", "iteration", wording.decimal),
    ("trajectories", "trajectories", wording.decimal),
    ("turns", "turns", wording.decimal),
    ("tokens", "tokens", wording.decimal),
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
