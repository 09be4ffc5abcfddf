"""A checked problem set, the rows it dropped, and its fingerprint."""

import dataclasses
import hashlib
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from storage.records import Problem

REPORTED = 5  # bad rows that an error message spells out


class ProblemError(ValueError):
    """A problem set cannot be used; the message names the source, what is wrong and the remedy."""


class RowError(ValueError):
    """One row cannot be used; sources yield it in place of a row, and `collect` turns it into a `BadRow`."""


@dataclass(frozen=True, slots=True)
class BadRow:
    """A dropped row.

    Example: BadRow(line=12, reason="column 'answer' is blank")
    """

    line: int  # from 1: line of a JSONL file, row of a Parquet file or hub data set
    reason: str


@dataclass(frozen=True, slots=True)
class ProblemSet:
    """What a source gave: the usable problems, with unique ids, and the rows that were dropped."""

    problems: list[Problem]  # 1 or more
    bad: list[BadRow]


Row = dict[str, Any]
"""One row of a source: column -> value."""


def collect(
    rows: Iterable[tuple[int, Row | RowError]],
    to_problem: Callable[[Row, int], Problem],
    name: str,
    max_bad_share: float,
) -> ProblemSet:
    """Problems of numbered rows, in order; unusable rows and repeated ids are dropped and listed.

    Raises:
        ProblemError: no rows, none usable, or a larger share than `max_bad_share` (0 to 1) is bad.
    """
    lines: dict[str, int] = {}
    problems: list[Problem] = []
    bad: list[BadRow] = []
    for line, row in rows:
        try:
            problem = _convert(row, line, to_problem, lines)
        except RowError as error:
            bad.append(BadRow(line, str(error)))
        else:
            lines[problem.problem_id] = line
            problems.append(problem)
    _check(len(problems), bad, name, max_bad_share)
    return ProblemSet(problems, bad)


def fingerprint(problems: Iterable[Problem]) -> str:
    """16 hexadecimal digits that name the content of a problem set.

    The start of the sha256 over one line of canonical JSON for each problem. The order of the
    problems counts, because it decides what an iteration draws; the order of the keys in
    `metadata` does not.
    """
    digest = hashlib.sha256()
    for problem in problems:
        row = dataclasses.asdict(problem) | {"metadata": json.loads(problem.metadata)}
        digest.update(json.dumps(row, sort_keys=True, separators=(",", ":")).encode() + b"\n")
    return digest.hexdigest()[:16]


def _convert(
    row: Row | RowError, line: int, to_problem: Callable[[Row, int], Problem], lines: dict[str, int]
) -> Problem:
    """The row's problem; `lines` holds the line of every id so far."""
    if isinstance(row, RowError):
        raise row
    problem = to_problem(row, line)
    if problem.problem_id in lines:
        raise RowError(f"id {problem.problem_id!r} is already on line {lines[problem.problem_id]}")
    return problem


def _check(good: int, bad: list[BadRow], name: str, max_bad_share: float) -> None:
    if not good and not bad:
        raise ProblemError(f"{name} holds no rows: check that it is the right one and complete")
    if good and len(bad) <= max_bad_share * (good + len(bad)):
        return
    shown = "".join(f"\n  line {row.line}: {row.reason}" for row in bad[:REPORTED])
    more = f"\n  and {len(bad) - REPORTED} more" if len(bad) > REPORTED else ""
    raise ProblemError(
        f"{name}: {len(bad)} of {good + len(bad)} rows are bad (problems.max_bad_share={max_bad_share}): "
        f"mend them, or check that preset or fields fit the columns{shown}{more}"
    )
