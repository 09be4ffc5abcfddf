"""A checked problem set, its dropped rows and its fingerprint; new problems, joined sets, and old problems to replay.

Two problems are the same if their prompts, solutions and settings are the same (`key`). Their ids do not count.
"""

import dataclasses
import hashlib
import json
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, count
from pathlib import PurePosixPath
from typing import Any

from storage.records import Problem

REPORTED = 5  # bad rows that an error message lists


class ProblemError(ValueError):
    """A problem set cannot be used; the message names the source, what is wrong and the remedy."""


class NoFilesError(ProblemError):
    """A pattern matches no file. The caller may accept this, if the first problems are still to come."""


class RowError(ValueError):
    """One row cannot be used. Sources yield it in place of the row, and `collect` turns it into a `BadRow`."""


class NotNeededError(RowError):
    """A row that is as it should be, but must not be a problem. It is left out and named, and counts as no bad row."""


@dataclass(frozen=True, slots=True)
class Where:
    """The position of a row in its source."""

    line: int  # from 1: line of a JSONL file, row of a Parquet file or hub data set
    file: str = ""  # name of the file, if the source is a pattern

    def __str__(self) -> str:
        return f"line {self.line} of {self.file}" if self.file else f"line {self.line}"

    def prefixed(self, name: str) -> str:
        """Return the id `name` of a problem or, if its file is one of several, that id below the name of the file."""
        return f"{PurePosixPath(self.file).with_suffix('')}/{name}" if self.file else name


@dataclass(frozen=True, slots=True)
class BadRow:
    """A dropped row.

    Example: BadRow(Where(12), reason="column 'answer' is blank")
    """

    where: Where
    reason: str


@dataclass(frozen=True, slots=True)
class ProblemSet:
    """The usable problems of a source, with unique ids, and its dropped rows."""

    problems: list[Problem]  # 1 or more
    bad: list[BadRow]
    left_out: list[BadRow] = field(default_factory=list)  # dropped rows with which nothing is wrong


Row = dict[str, Any]
"""One row of a source: values by column."""


class PartOfRow(dict[str, Any]):
    """A row read with only some of its columns."""

    def __init__(self, values: Row, names: Sequence[str]) -> None:
        super().__init__(values)
        self.names = names
        """The names of all columns of the row."""


def collect(
    rows: Iterable[tuple[Where, Row | RowError]],
    to_problem: Callable[[Row, str], Problem],
    name: str,
    max_bad_share: float,
) -> ProblemSet:
    """Convert rows to problems, in order; drop and list unusable rows.

    A row that repeats an earlier one with its id counts once. Another row with the id of an earlier one gets its own
    number, too, such as `0~12`: ids often count within a split or a source.

    Args:
        rows: the rows of a source, with their positions.
        to_problem: converts a row, given a default id for rows without one.
        name: the source, for messages.
        max_bad_share: from 0 to 1.

    Raises:
        ProblemError: there are no rows, none is usable, or a larger fraction than `max_bad_share` is bad.
    """
    problems, seen = dict[str, Problem](), dict[tuple[str, str], Where]()
    bad, left_out = list[BadRow](), list[BadRow]()
    for where, row in rows:
        try:
            if isinstance(row, RowError):
                raise row
            # The id of a row without one is its number, which does not change when more files are added.
            problem = to_problem(row, f"{where.line:06d}")
            if (first := seen.setdefault((where.file, fingerprint([problem])), where)) != where:
                raise NotNeededError(f"it is the same as {first}")
            whole = where.prefixed(problem.problem_id)
            while whole in problems:
                whole = f"{whole}~{where.line}"
            problems[whole] = replace(problem, problem_id=whole)
        except RowError as error:
            dropped = left_out if isinstance(error, NotNeededError) else bad
            dropped.append(BadRow(where, str(error)))
    remedy = "correct them, or check that preset or fields fit the columns"
    refuse_bad_rows(name, len(problems), bad, max_bad_share, remedy)
    return ProblemSet(list(problems.values()), bad, left_out)


def refuse_bad_rows(name: str, good: int, bad: Sequence[BadRow], max_bad_share: float, remedy: str) -> None:
    """Raise ProblemError if a source has no rows, none is good, or a larger fraction than `max_bad_share` is bad."""
    total = good + len(bad)
    if not total:
        raise ProblemError(f"{name} holds no rows that can be used: check that it is the right one and complete")
    if not good or len(bad) > max_bad_share * total:
        shown = "".join(f"\n  {line}" for line in listed(bad))
        raise ProblemError(
            f"{name}: {len(bad)} of {total} rows are bad (problems.max_bad_share={max_bad_share}): {remedy}{shown}"
        )


def listed(bad: Sequence[BadRow], most: int = REPORTED) -> list[str]:
    """Return a line for each of the first bad rows, and the number of the others."""
    lines = [f"{row.where}: {row.reason}" for row in bad[:most]]
    return [*lines, f"and {len(bad) - most} more"] if len(bad) > most else lines


def fingerprint(problems: Iterable[Problem]) -> str:
    """Compute 16 hexadecimal digits that identify the content of a problem set.

    They are the start of the sha256 over one line of canonical JSON for each problem. The order of the problems counts,
    because it decides what an iteration draws. The order of the keys in `metadata` does not count.
    """
    digest = hashlib.sha256()
    for problem in problems:
        row = dataclasses.asdict(problem) | {"metadata": json.loads(problem.metadata)}
        digest.update(json.dumps(row, sort_keys=True, separators=(",", ":")).encode() + b"\n")
    return digest.hexdigest()[:16]


SEED = "seed"
"""The key of metadata with the seed of a game."""
HIDDEN_TESTS = "input_output"
"""The key of metadata with the tests of a code problem. They are a kind of solutions, and not what the problem asks."""


def setting(problem: Problem) -> str:
    """Return the metadata that make it another problem than others with its prompt, as canonical JSON; empty if none.

    A problem without solutions is often a game: its prompt tells the rules, its metadata which game it is. If there are
    solutions, only a seed counts.

    >>> setting(Problem("1", "Find the exit.", [], metadata='{"seed": 3, "size": 5}'))
    '{"seed":3,"size":5}'
    >>> setting(Problem("2", "1 + 1?", ["2"], metadata='{"level": 1}'))
    ''
    """
    metadata = json.loads(problem.metadata)
    counted = {SEED} if problem.solutions else metadata.keys() - {HIDDEN_TESTS}
    kept = {name: value for name, value in metadata.items() if name in counted}
    return json.dumps(kept, sort_keys=True, separators=(",", ":")) if kept else ""


SETTING_SQL = f"""case
    when len(solutions) > 0 and not coalesce(contains(metadata, '"{SEED}"'), false) then '{{}}'
    when contains(metadata, '"{HIDDEN_TESTS}"') then json_merge_patch(metadata, '{{"{HIDDEN_TESTS}": null}}')::varchar
    else coalesce(metadata, '{{}}') end"""
"""SQL on a row of problems or trajectories: metadata with the same setting, without hidden tests, which are long."""


def key(problem: Problem) -> str:
    """Compute 32 hexadecimal digits that identify prompt, solutions in any order, and setting.

    They are the start of the sha256 of canonical JSON. Id, source and other metadata do not count.
    """
    content = [problem.prompt, sorted(set(problem.solutions)), *filter(None, [setting(problem)])]
    return hashlib.sha256(json.dumps(content, separators=(",", ":")).encode()).hexdigest()[:32]


def new_problems(problems: Iterable[Problem], seen: Iterable[Problem]) -> list[Problem]:
    """List the `problems` that are not among `seen`, in their order; keep only the first of equal problems."""
    known, fresh = set(map(key, seen)), dict[str, Problem]()
    for problem in problems:
        fresh.setdefault(key(problem), problem)
    return [problem for content, problem in fresh.items() if content not in known]


def union(*sets: Sequence[Problem]) -> list[Problem]:
    """Join sets in order, keep only the first of equal problems, and make the ids unique.

    If an earlier problem has the same id, the later problem's id gets the first free suffix of `~2`, `~3` … A set that
    is added at the end does not change earlier ids: union(a, b, c) is union(union(a, b), c).
    """
    joined, numbers = dict[str, Problem](), dict[str, Iterator[int]]()
    for problem in new_problems(chain(*sets), []):
        unique = problem.problem_id
        if unique in joined:
            suffixes = numbers.setdefault(unique, count(2))  # continues where it stopped: an id may repeat many times
            unique = next(name for number in suffixes if (name := f"{unique}~{number}") not in joined)
        joined[unique] = replace(problem, problem_id=unique)
    return list(joined.values())


def replayed(problems: Sequence[Problem], fraction: float, old: Sequence[Problem], seed: int) -> list[Problem]:
    """Draw problems of `old` that are not in `problems`: about `fraction` of all, when joined with `problems`.

    The number is rounded to a whole number, and smaller if `old` has too few. The drawn problems keep their ids; join
    them to `problems` with `union`.

    Args:
        problems: the problems to train on, without duplicates.
        fraction: 0 <= fraction < 1.
        old: the problems to draw from.
        seed: the same seed and order of `old` give the same draw.

    """
    candidates = new_problems(old, problems)
    wanted = round(len(problems) * fraction / (1 - fraction))
    return random.Random(seed).sample(candidates, min(wanted, len(candidates)))


def not_superseded(old: Iterable[Problem], new: Iterable[Problem]) -> list[Problem]:
    """List the problems of `old` that `new` does not ask again: what is asked again has corrected solutions."""
    asked = {(problem.prompt, setting(problem)) for problem in new}
    return [problem for problem in old if (problem.prompt, setting(problem)) not in asked]
