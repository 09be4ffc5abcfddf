"""A checked problem set, its dropped rows, and its fingerprint."""

import dataclasses
import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from storage.records import Problem

_COLUMNS = [field.name for field in dataclasses.fields(Problem)]
REPORTED = 5  # bad rows that an error message lists


class ProblemError(ValueError):
    """A problem set cannot be used; the message names the source, what is wrong and the remedy."""


class NoFilesError(ProblemError):
    """A pattern matches no file. The caller may accept this, if the first problems are still to come."""


class RowError(ValueError):
    """One row cannot be used. Sources yield it in place of the row, and `collect` turns it into a `BadRow`."""


class NoSolutionError(RowError):
    """A row has only placeholders where its solutions should be. Data sets have many, so they are no bad rows."""


@dataclass(frozen=True, slots=True)
class RowPlace:
    """The place of a row in its source."""

    line: int  # from 1: line of a JSONL file, row of a Parquet file or hub data set
    file: str = ""  # name of the file, if the source is a pattern

    def __str__(self) -> str:
        return f"line {self.line} of {self.file}" if self.file else f"line {self.line}"

    @property
    def number(self) -> str:
        """The id of a problem whose row has no id. It does not change when more files are added.

        >>> RowPlace(7).number, RowPlace(7, "2026-11-20.jsonl").number
        ('000007', '2026-11-20/000007')
        """
        return f"{self.stem}/{self.line:06d}" if self.file else f"{self.line:06d}"

    @property
    def stem(self) -> str:
        """The prefix of the ids of one of several files."""
        return str(PurePosixPath(self.file).with_suffix(""))


@dataclass(frozen=True, slots=True)
class BadRow:
    """A dropped row.

    Example: BadRow(line=12, reason="column 'answer' is blank")
    """

    line: int  # as in `RowPlace`
    reason: str
    file: str = ""
    counted: bool = True  # in the share of bad rows; not if the row has no solution but a placeholder

    @property
    def place(self) -> str:
        """The place as text, such as "line 12", or "line 12 of 2026-11-20.jsonl" if the source is a pattern."""
        return str(RowPlace(self.line, self.file))


@dataclass(frozen=True, slots=True)
class ProblemSet:
    """The usable problems of a source, with unique ids, and its dropped rows."""

    problems: list[Problem]  # 1 or more
    bad: list[BadRow]


Row = dict[str, Any]
"""One row of a source: values by column."""


class PartOfRow(dict[str, Any]):
    """A row read with only some of its columns."""

    def __init__(self, values: Row, names: Sequence[str]) -> None:
        super().__init__(values)
        self.names = names
        """The names of all columns of the row."""


def collect(
    rows: Iterable[tuple[RowPlace, Row | RowError]],
    to_problem: Callable[[Row, str], Problem],
    name: str,
    max_bad_share: float,
) -> ProblemSet:
    """Convert rows to problems, in order; drop and list unusable rows and rows with a repeated id.

    Args:
        rows: the rows of a source, with their places.
        to_problem: converts a row, given a default id for rows without one.
        name: the source, for messages.
        max_bad_share: from 0 to 1.

    Raises:
        ProblemError: there are no rows, none is usable, or a larger share than `max_bad_share` is bad.
    """
    places: dict[str, RowPlace] = {}
    problems: list[Problem] = []
    bad: list[BadRow] = []
    for place, row in rows:
        try:
            problem = _convert(row, place, to_problem, places)
        except RowError as error:
            counted = not isinstance(error, NoSolutionError)
            bad.append(BadRow(place.line, str(error), place.file, counted))
        else:
            places[problem.problem_id] = place
            problems.append(problem)
    _check(len(problems), bad, name, max_bad_share)
    return ProblemSet(problems, bad)


def fingerprint(problems: Iterable[Problem]) -> str:
    """Compute 16 hexadecimal digits that identify the content of a problem set.

    They are the start of the sha256 over one line of canonical JSON for each problem. The order of the problems counts,
    because it decides what an iteration draws. The order of the keys in `metadata` does not count.
    """
    digest = hashlib.sha256()
    for problem in problems:
        row = {name: getattr(problem, name) for name in _COLUMNS} | {"metadata": json.loads(problem.metadata)}
        digest.update(json.dumps(row, sort_keys=True, separators=(",", ":")).encode() + b"\n")
    return digest.hexdigest()[:16]


def _convert(
    row: Row | RowError, place: RowPlace, to_problem: Callable[[Row, str], Problem], places: dict[str, RowPlace]
) -> Problem:
    """Convert one row. `places` holds the places of the ids so far."""
    if isinstance(row, RowError):
        raise row
    problem = to_problem(row, place.number)
    if place.file and problem.problem_id != place.number:
        problem = dataclasses.replace(problem, problem_id=f"{place.stem}/{problem.problem_id}")
    if problem.problem_id in places:
        raise RowError(f"id {problem.problem_id!r} is already on {places[problem.problem_id]}")
    return problem


def _check(good: int, bad: list[BadRow], name: str, max_bad_share: float) -> None:
    if not good and not bad:
        raise ProblemError(f"{name} holds no rows: check that it is the right one and complete")
    counted = [row for row in bad if row.counted]
    if good and len(counted) <= max_bad_share * (good + len(counted)):
        return
    bad = counted or bad
    shown = "".join(f"\n  {row.place}: {row.reason}" for row in bad[:REPORTED])
    more = f"\n  and {len(bad) - REPORTED} more" if len(bad) > REPORTED else ""
    raise ProblemError(
        f"{name}: {len(bad)} of {good + len(bad)} rows are bad (problems.max_bad_share={max_bad_share}): "
        f"correct them, or check that preset or fields fit the columns{shown}{more}"
    )
