"""Read the reader's data: lists of trajectories that match a filter, and single trajectories with their tokens.

Example: the address "/?turn=first&verdict=wrong&page=2" gives Filter(turn="first", verdict="wrong"); its second page of
results is shown. A parameter that cannot be parsed is left out, and the page says what is wrong with it.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields
from functools import lru_cache
from pathlib import Path
from typing import Any, get_args
from urllib.parse import urlencode

import numpy as np
import numpy.typing as npt
import pyarrow.parquet as pq

from storage.records import CallStatus, Status, Trajectory, VerdictName, to_trajectory
from storage.versions.datasets import check_schema
from tasks.audit.database import AuditDatabase

LONGEST_TEXT = 1000
_LONGEST_ID = 1000
_TABLES = Path(__file__).parent / "listing.sql"
_CACHED_LISTS = 4  # results of filters, 8 bytes for each trajectory

Rows = npt.NDArray[np.int64]
NOTHING: Rows = np.zeros(0, np.int64)

Choices = Mapping[str, tuple[str, str]]
"""What a parameter may be: by its value the label, and an SQL condition on a row of `listing` or of `turns`."""

_FOUND = "contains(lower({}), lower(?))"
PLACES: Choices = {
    "anywhere": ("all texts", ""),
    "prompt": ("the prompt", f"prompt in (select number from prompts where {_FOUND.format('text')})"),
    "answers": ("answers", f"row in (select row from turns where {_FOUND.format('text')})"),
    "feedback": ("feedback", f"row in (select row from turns where {_FOUND.format('feedback')})"),
}
VERDICTS: Choices = {
    **{name: (name, f"coalesce(verdict, environment_verdict) = '{name}'") for name in get_args(VerdictName)},
    "unscored": ("no score", "verdict is null"),
    "disagree": ("score and environment differ", "verdict <> environment_verdict and verdict <> 'none'"),
}
TURNS: Choices = {
    "any": ("any turn", "true"),
    "first": ("the first turn", "turn = 0"),
    "last": ("the last turn", '"last"'),
}
"""Other values are turn numbers, from 1 on."""
STATUSES: Choices = {name: (name, f"status = '{name}'") for name in get_args(Status)}
CALLS: Choices = {
    "some": ("some", "calls > 0"),
    "none": ("none", "calls = 0"),
    **{
        name: (f"one that is {name}", f"row in (select row from calls where status = '{name}')")
        for name in get_args(CallStatus)
    },
}
ORDERS: Choices = {
    "stored": ("by data set", "place"),
    "longest": ("most tokens first", "tokens desc, place"),
    "shortest": ("fewest tokens first", "tokens, place"),
    "slowest": ("slowest first", "latency desc nulls last, place"),
    "best": ("best reward first", "reward desc nulls last, place"),
    "worst": ("worst reward first", "reward nulls last, place"),
    "calls": ("most calls of tools first", "calls desc, place"),
}


def _text(text: str) -> str:
    if len(text) > LONGEST_TEXT:
        raise ValueError(f"it has {len(text):,} characters: give at most {LONGEST_TEXT:,}")
    return text


def _stripped(text: str) -> str:
    return _text(text.strip())


def _whole(text: str) -> int:
    digits = text.strip()
    if digits.isascii() and digits.isdigit() and len(digits) < 10:
        return int(digits)
    raise ValueError(f"{text[:40]!r} is not a whole number: give one from 0 on")


def _real(text: str) -> float:
    with suppress(ValueError):
        if math.isfinite(value := float(text)):
            return value
    raise ValueError(f"{text[:40]!r} is not a number: give one such as 0.5")


def _turn(text: str) -> str:
    if text in TURNS or (text.isascii() and text.isdigit() and int(text[:9]) > 0):
        return text[:9]
    raise ValueError(f"{text[:40]!r} is not a turn: choose {', '.join(TURNS)}, or a number from 1 on")


def _one_of(choices: Choices) -> Callable[[str], str]:
    def read(text: str) -> str:
        if text not in choices:
            raise ValueError(f"{text[:40]!r} is not known: choose {', '.join(choices)}")
        return text

    return read


def _parameter(label: str, read: Callable[[str], object], default: str | None = "", condition: str = "") -> Any:
    """Declare a parameter: its label, how its text is read, and an SQL condition on `listing` if that is simple."""
    return field(default=default, metadata={"label": label, "read": read, "condition": condition})


_IN_SETS = "data_set in (select data_set from data_sets where contains(lower(version), lower(?)))"


@dataclass(frozen=True, slots=True)
class Filter:
    r"""The conditions for trajectories; field names are the names of the parameters in the address.

    `turn` says in which turns verdict and reward are searched; one turn has to fulfil both conditions. `text` is
    literal, in upper or lower case. `check` is the name of an audit check that has cases.

    Example: Filter(turn="first", verdict="wrong", text="\\boxed")
    """

    text: str = _parameter("Text", _text)
    inside: str = _parameter("Search in", _one_of(PLACES), "anywhere")
    verdict: str = _parameter("Verdict", _one_of(VERDICTS))
    turn: str = _parameter("Turn", _turn, "any")
    least: float | None = _parameter("Reward from", _real, None)
    most: float | None = _parameter("Reward up to", _real, None)
    status: str = _parameter("Status", _one_of(STATUSES), condition="status = ?")
    turns: int | None = _parameter("Number of turns", _whole, None, "turns = ?")
    calls: str = _parameter("Calls of tools", _one_of(CALLS))
    problem: str = _parameter("Problem id", _text, condition="trim(problem_id) = trim(?)")
    data_set: str = _parameter("Data set, or a part", _stripped, condition=_IN_SETS)
    begin: int | None = _parameter("Iteration from", _whole, None, "iteration >= ?")
    end: int | None = _parameter("Iteration up to", _whole, None, "iteration <= ?")
    check: str = _parameter("Check", _stripped)
    order: str = _parameter("Order", _one_of(ORDERS), "stored")

    def chosen(self) -> dict[str, Any]:
        """Return the fields that differ from the defaults, by name."""
        values = ((each, getattr(self, each.name)) for each in fields(self))
        return {each.name: value for each, value in values if value != each.default}

    def address(self, **more: str | int) -> str:
        """Return the query of an address with this filter and the parameters `more`."""
        return urlencode({**self.chosen(), **more})


LABELS = {**{each.name: each.metadata["label"] for each in fields(Filter)}, "page": "Page"}
"""The labels of the parameters."""


def parse(given: Mapping[str, str]) -> tuple[Filter, dict[str, str]]:
    """Return the filter in an address, and for each wrong parameter the error; the filter leaves it out."""
    values: dict[str, Any] = {}
    wrong: dict[str, str] = {}
    for each in fields(Filter):
        text = given.get(each.name, "")
        if text.strip():
            try:
                values[each.name] = each.metadata["read"](text)
            except ValueError as error:
                wrong[each.name] = str(error)
    return Filter(**values), wrong


def _where(wanted: Filter) -> tuple[str, list[Any]]:
    """Return the filter as a condition on the table `listing`, and its parameters."""
    conditions: list[tuple[str, list[Any]]] = [
        (each.metadata["condition"], [value])
        for each in fields(wanted)
        if each.metadata["condition"] and (value := getattr(wanted, each.name)) not in (None, "")
    ]
    if wanted.calls:
        conditions.append((CALLS[wanted.calls][1], []))
    if wanted.text:
        places = [place for _, place in PLACES.values() if place and PLACES[wanted.inside][1] in ("", place)]
        conditions.append((" or ".join(places), [wanted.text] * len(places)))
    if wanted.check:
        conditions.append((" or ".join(_OF_CHECK), [wanted.check] * len(_OF_CHECK)))
    on_turn = [VERDICTS[wanted.verdict][1]] if wanted.verdict else []
    bounds = [(sign, value) for sign, value in ((">=", wanted.least), ("<=", wanted.most)) if value is not None]
    on_turn += [f"coalesce(scored_reward, reward) {sign} ?" for sign, _ in bounds]
    if on_turn:  # one turn has to fulfil all conditions
        on_turn.append(TURNS[wanted.turn][1] if wanted.turn in TURNS else f"turn = {int(wanted.turn) - 1}")
        one_turn = f"row in (select row from turns where {' and '.join(on_turn)})"
        conditions.append((one_turn, [value for _, value in bounds]))
    condition = " and ".join(["true", *(f"({condition})" for condition, _ in conditions)])
    return condition, [value for _, values in conditions for value in values]


_OF_CHECK = [
    f"""row in (select l.row from listing l join data_sets d using (data_set) join cases c on c.id = {name}
    where c.check_name = ? and c.unit in {units} and c.data_set in ('', d.version))"""
    for name, units in (
        ("l.trajectory_id", "('trajectory', 'turn', 'call')"),
        ("l.problem_id", "('group', 'problem')"),
        ("d.version", "('data set')"),
    )
]
"""Conditions: a case of the check for the trajectory, for its group or problem, or for its data set."""


@dataclass(frozen=True, slots=True)
class ListItem:
    """A line of the list."""

    row: int
    trajectory_id: str
    doubled: bool  # another row has the same id
    version: str
    iteration: int
    problem_id: str
    sample: int
    status: str
    turns: int
    calls: int
    tokens: int  # sampled
    reward: float | None  # of its best turn: from the score, or from the environment without a score
    verdicts: list[str] | None  # of its turns, from the same source
    answer: str | None  # the beginning of the last turn

    def address(self, wanted: Filter | None = None, **more: str | int) -> str:
        """Return the query of an address for this trajectory and the list in which it was found.

        It has the id, which stays valid after a restart. If the id is not unique, or empty or too long for an address,
        it has the row number.
        """
        fits = 0 < len(self.trajectory_id) < _LONGEST_ID
        names: dict[str, str | int] = {"id": self.trajectory_id} if fits else {}
        if self.doubled or not fits:
            names["row"] = self.row
        return urlencode({**names, **(wanted.chosen() if wanted else {}), **more})


class Library:
    """The lists and trajectories of one database; creates its tables `listing` and `prompts`.

    Args:
        database: the tables of the data sets.
        cases: Parquet file with an audit's cases; None without an audit.
    """

    def __init__(self, database: AuditDatabase, cases: Path | None = None) -> None:
        self.database = database
        database.connection.execute(_TABLES.read_text(encoding="utf-8"))
        if cases:
            columns = "check_name, unit, id, data_set, detail"
            database.all(f"insert into cases select {columns} from read_parquet(?)", str(cases))
        self._files = dict(database.all("select file, filename from trajectories_files"))
        self.find = lru_cache(_CACHED_LISTS)(self._find)
        self.calls = database.count("calls")
        self.most_turns = int(database.number("select max(turns) from episodes"))

    def _find(self, wanted: Filter) -> Rows:
        """Return the row numbers of all trajectories that match `wanted`, in its order."""
        condition, parameters = _where(wanted)
        query = f"select row from listing where {condition} order by {ORDERS[wanted.order][1]}"
        return self.database.integers(query, *parameters)

    def count(self, wanted: Filter) -> int:
        """Count the trajectories that match `wanted`, without caching them."""
        condition, parameters = _where(wanted)
        return int(self.database.number(f"select count(*) from listing where {condition}", *parameters))

    def entries(self, rows: Sequence[int]) -> list[ListItem]:
        """Return the lines of the list for `rows`, in the same order."""
        found = self.database.all(
            """select row, trajectory_id, doubled, version, l.iteration, problem_id, sample, status, turns, calls,
            tokens, reward, verdicts, answer
            from listing l join data_sets using (data_set) where list_contains(?, row)""",
            list(rows),
        )
        by_row = {columns[0]: ListItem(*columns) for columns in found}
        return [by_row[row] for row in rows if row in by_row]

    def rows_with_id(self, trajectory_id: str) -> list[int]:
        """Return the row numbers of the trajectories with this id: normally one, but none or several are possible."""
        return self._rows("trajectory_id = ?", trajectory_id)

    def group(self, data_set: str, problem_id: str) -> list[int]:
        """Return the row numbers of a group's episodes, by sample."""
        in_set = "data_set in (select data_set from data_sets where version = ?)"
        return self._rows(f"{in_set} and problem_id = ?", data_set, problem_id)

    def _rows(self, condition: str, *parameters: str) -> list[int]:
        found: list[int] = self.database.integers(
            f"select row from listing where {condition} order by place", *parameters
        ).tolist()
        return found

    def trajectories(self, rows: Sequence[int]) -> list[Trajectory]:
        """Read whole trajectories with their tokens, in the order of `rows`.

        Raises:
            StorageError, OSError, ArrowException: a file is missing or damaged since the reader started.
        """
        found: dict[int, Trajectory] = {}
        for file in dict.fromkeys(row >> 32 for row in rows):
            of_file, path = [row for row in rows if row >> 32 == file], Path(self._files[file])
            with pq.ParquetFile(path, page_checksum_verification=True) as opened:
                check_schema(opened.schema_arrow, path)
                chosen = opened.read().take([row & 0xFFFFFFFF for row in of_file]).to_pylist()
            found |= zip(of_file, map(to_trajectory, chosen), strict=True)
        return [found[row] for row in rows]
