"""What a visitor looks for: from the address to a filter."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, get_args
from urllib.parse import urlencode

from storage.records import Status, VerdictName

LONGEST_TEXT = 1000
VERDICTS = {
    **{name: name for name in get_args(VerdictName)},
    "unscored": "no score",
    "disagree": "score and environment differ",
}
STATUSES = {name: name for name in get_args(Status)}
PLACES = {"anywhere": "anywhere", "prompt": "in the prompt", "answers": "in an answer", "feedback": "in feedback"}
TURNS = {"any": "any turn", "first": "the first turn", "last": "the last turn"}
"""Beside these, numbers from 1 on."""
ORDERS = {
    "stored": "by data set",
    "longest": "most tokens first",
    "shortest": "fewest tokens first",
    "slowest": "slowest first",
    "best": "best reward first",
    "worst": "worst reward first",
}

NAMES = {
    "text": "Text",
    "inside": "Looked for",
    "verdict": "Verdict",
    "turn": "In",
    "status": "Status",
    "problem": "Problem id",
    "least": "Reward from",
    "most": "Reward up to",
    "turns": "Number of turns",
    "data_set": "Data set, or a part",
    "begin": "Iteration from",
    "end": "Iteration up to",
    "check": "Check",
    "order": "Order",
    "page": "Page",
}
"""What people call the parameters."""
MORE = ("least", "most", "turns", "data_set", "begin", "end", "check", "order")
"""Parameters that the form shows when one of them is set, or asked for."""


@dataclass(frozen=True, slots=True)
class Filter:
    r"""What a visitor looks for; the names are those in the address.

    `turn` says where verdict and reward are looked for: one turn has to fulfil both.

    Example: Filter(turn="first", verdict="wrong", text="\\boxed")
    """

    text: str = ""  # as it stands, whatever the case of its letters
    inside: str = "anywhere"  # where the text is
    verdict: str = ""
    turn: str = "any"
    least: float | None = None  # reward
    most: float | None = None
    status: str = ""
    turns: int | None = None  # how many there are
    problem: str = ""  # id
    data_set: str = ""  # a part of its version
    begin: int | None = None  # first iteration
    end: int | None = None  # last iteration
    check: str = ""  # name, of an audit that found something
    order: str = "stored"

    def chosen(self) -> dict[str, Any]:
        """What is set, by its name in the address."""
        mine = {each.name: getattr(self, each.name) for each in fields(self)}
        return {name: value for name, value in mine.items() if value != getattr(_ALL, name)}

    def address(self, **more: str | int) -> str:
        """As the query of an address, with other parameters."""
        return urlencode({**self.chosen(), **more})


_ALL = Filter()


def parse(given: Mapping[str, str]) -> tuple[Filter, dict[str, str]]:
    """The filter in an address, and by name what is wrong with it; what is wrong is left out of the filter."""
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
        raise ValueError(f"it has {len(text):,} characters: look for {LONGEST_TEXT:,} or fewer")
    return text


def _stripped(text: str) -> str:
    return _text(text.strip())


def _whole(text: str) -> int:
    if not (text.strip().isascii() and text.strip().isdigit() and len(text.strip()) < 10):
        raise ValueError(f"{text[:40]!r} is no whole number: give one from 0 on")
    return int(text)


def _real(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise ValueError(f"{text[:40]!r} is no number: give one such as 0.5")
    return value


def _turn(text: str) -> str:
    if text in TURNS or (text.isascii() and text.isdigit() and int(text[:9]) > 0):
        return text[:9]
    raise ValueError(f"{text[:40]!r} is no turn: choose {', '.join(TURNS)}, or a number from 1 on")


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
    "problem": _text,
    "data_set": _stripped,
    "begin": _whole,
    "end": _whole,
    "check": _stripped,
    "order": _one_of(ORDERS),
}
