"""Parse the query parameters of an address into a filter for trajectories.

Example: the address "/?turn=first&verdict=wrong&page=2" gives Filter(turn="first", verdict="wrong"); its second page of
results is shown. A parameter that cannot be parsed is left out, and the page says what is wrong with it.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, get_args
from urllib.parse import urlencode

from storage.records import CallStatus, Status, VerdictName

LONGEST_TEXT = 1000
VERDICTS = {
    **{name: name for name in get_args(VerdictName)},
    "unscored": "no score",
    "disagree": "score and environment differ",
}
STATUSES = {name: name for name in get_args(Status)}
PLACES = {"anywhere": "all texts", "prompt": "the prompt", "answers": "answers", "feedback": "feedback"}
CALLS = {
    "some": "some",
    "none": "none",
    **{name: f"one that is {name}" for name in get_args(CallStatus)},
}
TURNS = {"any": "any turn", "first": "the first turn", "last": "the last turn"}
"""Other values are turn numbers, from 1 on."""
ORDERS = {
    "stored": "by data set",
    "longest": "most tokens first",
    "shortest": "fewest tokens first",
    "slowest": "slowest first",
    "best": "best reward first",
    "worst": "worst reward first",
    "calls": "most calls of tools first",
}

NAMES = {
    "text": "Text",
    "inside": "Search in",
    "verdict": "Verdict",
    "turn": "Turn",
    "status": "Status",
    "problem": "Problem id",
    "least": "Reward from",
    "most": "Reward up to",
    "turns": "Number of turns",
    "calls": "Calls of tools",
    "data_set": "Data set, or a part",
    "begin": "Iteration from",
    "end": "Iteration up to",
    "check": "Check",
    "order": "Order",
    "page": "Page",
}
"""The labels of the parameters."""
MORE = ("least", "most", "turns", "calls", "data_set", "begin", "end", "check", "order")
"""Parameters in the second part of the form, which is open if one of them is set."""


@dataclass(frozen=True, slots=True)
class Filter:
    r"""The conditions for trajectories; field names are the names of the parameters in the address.

    `turn` says in which turns verdict and reward are searched; one turn has to fulfil both conditions.

    Example: Filter(turn="first", verdict="wrong", text="\\boxed")
    """

    text: str = ""  # literal, in upper or lower case
    inside: str = "anywhere"  # where to search the text
    verdict: str = ""
    turn: str = "any"
    least: float | None = None  # reward
    most: float | None = None
    status: str = ""
    turns: int | None = None  # number of turns
    calls: str = ""  # whether there are calls of tools, and what became of one
    problem: str = ""  # id
    data_set: str = ""  # a part of its version
    begin: int | None = None  # first iteration
    end: int | None = None  # last iteration
    check: str = ""  # name of an audit check that has cases
    order: str = "stored"

    def chosen(self) -> dict[str, Any]:
        """Return the fields that differ from the defaults, by name."""
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        return {name: value for name, value in values.items() if value != getattr(_ALL, name)}

    def address(self, **more: str | int) -> str:
        """Return the query of an address with this filter and the parameters `more`."""
        return urlencode({**self.chosen(), **more})


_ALL = Filter()


def parse(given: Mapping[str, str]) -> tuple[Filter, dict[str, str]]:
    """Return the filter in an address, and for each wrong parameter the error; the filter leaves it out."""
    values: dict[str, Any] = {}
    wrong: dict[str, str] = {}
    for name, read in _READERS.items():
        text = given.get(name, "")
        if text.strip():
            try:
                values[name] = read(text)
            except ValueError as error:
                wrong[name] = str(error)
    return Filter(**values), wrong


def _text(text: str) -> str:
    if len(text) > LONGEST_TEXT:
        raise ValueError(f"it has {len(text):,} characters: give at most {LONGEST_TEXT:,}")
    return text


def _stripped(text: str) -> str:
    return _text(text.strip())


def _whole(text: str) -> int:
    if not (text.strip().isascii() and text.strip().isdigit() and len(text.strip()) < 10):
        raise ValueError(f"{text[:40]!r} is not a whole number: give one from 0 on")
    return int(text)


def _real(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise ValueError(f"{text[:40]!r} is not a number: give one such as 0.5")
    return value


def _turn(text: str) -> str:
    if text in TURNS or (text.isascii() and text.isdigit() and int(text[:9]) > 0):
        return text[:9]
    raise ValueError(f"{text[:40]!r} is not a turn: choose {', '.join(TURNS)}, or a number from 1 on")


def _one_of(names: Mapping[str, object]) -> Callable[[str], str]:
    def read(text: str) -> str:
        if text not in names:
            raise ValueError(f"{text[:40]!r} is not known: choose {', '.join(names)}")
        return text

    return read


_READERS: dict[str, Callable[[str], Any]] = {
    "text": _text,
    "inside": _one_of(PLACES),
    "verdict": _one_of(VERDICTS),
    "turn": _turn,
    "least": _real,
    "most": _real,
    "status": _one_of(STATUSES),
    "turns": _whole,
    "calls": _one_of(CALLS),
    "problem": _text,
    "data_set": _stripped,
    "begin": _whole,
    "end": _whole,
    "check": _stripped,
    "order": _one_of(ORDERS),
}
