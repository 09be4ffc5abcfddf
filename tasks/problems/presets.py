"""Convert rows of known data sets, or of the user's own columns, to `Problem`.

Each conversion takes a row and a default id (`RowPlace.number`) for rows without one. It raises `RowError` with the
reason if the row cannot be used. Solutions are kept as written; the verifier boxes them.
"""

import json
import reprlib
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

from storage.records import Problem
from storage.visible import visible
from tasks.problems.problem_set import PartOfRow, Row, RowError

_NAMED = 500
"""Largest number of characters of column names in a message."""


def gsm8k(row: Row, number: str) -> Problem:
    r"""Convert a row of GSM8K (Cobbe et al., 2021): `question`, and `answer` that ends in `#### n`.

    >>> gsm8k({"question": "500 pairs?", "answer": "2 * 500 = 1,000\n#### 1,000"}, "000007")
    Problem(problem_id='000007', prompt='500 pairs?', solutions=['1000'], source='gsm8k', metadata='{}')
    """
    _, mark, tail = _text(row, "answer").rpartition("####")
    solution = tail.strip().replace(",", "")
    if not mark or not solution:
        raise RowError(f"column 'answer' does not end in '#### n': {reprlib.repr(row['answer'])}")
    return Problem(number, _text(row, "question"), [solution], source="gsm8k")


def math(row: Row, number: str) -> Problem:
    """Convert a row of MATH (Hendrycks et al., 2021) in the columns of MATH-500.

    Columns: `problem`, `answer`, and optionally `unique_id`, `subject`, `level`. The original release has no `answer`,
    only a worked `solution`: its rows are bad rows.
    """
    metadata = {key: row[key] for key in ("level", "subject") if isinstance(row.get(key), str | int)}
    return Problem(
        problem_id=_text(row, "unique_id") if row.get("unique_id") is not None else number,
        prompt=_text(row, "problem"),
        solutions=[_text(row, "answer")],
        source="math",
        metadata=json.dumps(metadata),
    )


def areal(row: Row, number: str) -> Problem:
    """Convert a row in AReaL's form: `query_id`, `prompt`, `task` (only "math"), `solutions` (a list of strings)."""
    if _text(row, "task") != "math":
        raise RowError(f"column 'task' is {reprlib.repr(row['task'])}: only 'math' can be graded")
    if not isinstance(row.get("solutions"), list):
        raise RowError(f"column 'solutions' is not a list: {reprlib.repr(row.get('solutions'))}")
    return Problem(_text(row, "query_id"), _text(row, "prompt"), _texts(row, "solutions"), source="areal")


PRESETS: dict[str, Callable[[Row, str], Problem]] = {"gsm8k": gsm8k, "math": math, "areal": areal}
COLUMNS: dict[str, Sequence[str]] = {
    "gsm8k": ["question", "answer"],
    "math": ["problem", "answer", "unique_id", "subject", "level"],
    "areal": ["query_id", "prompt", "task", "solutions"],
}
"""The columns that each preset uses. No other columns are read from Parquet files."""


def from_fields(fields: Mapping[Literal["id", "prompt", "solutions"], str]) -> Callable[[Row, str], Problem]:
    """Make a conversion from the user's columns for `prompt`, `solutions` (one or a list) and, optionally, `id`."""

    def convert(row: Row, number: str) -> Problem:
        problem_id = _text(row, fields["id"]) if "id" in fields else number
        return Problem(problem_id, _text(row, fields["prompt"]), _texts(row, fields["solutions"]))

    return convert


def _text(row: Row, column: str) -> str:
    if column not in row:
        names = row.names if isinstance(row, PartOfRow) else row
        raise RowError(f"no column {column!r}; there are {visible(', '.join(map(str, names)), _NAMED)}")
    return _checked(row[column], column)


def _texts(row: Row, column: str) -> list[str]:
    value = row.get(column)
    if not isinstance(value, list):
        return [_text(row, column)]
    if not value:
        raise RowError(f"column {column!r} is an empty list")
    return [_checked(item, column) for item in value]


def _checked(value: object, column: str) -> str:
    """Return the value as text. Integers are accepted; other types are not, since 0.1 or true has several spellings."""
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    if not isinstance(value, str):
        raise RowError(f"column {column!r} is not text: {reprlib.repr(value)}")
    if not value.strip():
        raise RowError(f"column {column!r} is blank")
    if not value.isascii() and any("\ud800" <= character <= "\udfff" for character in value):
        shown = reprlib.repr(value)
        raise RowError(f"column {column!r} holds half a surrogate pair, which UTF-8 cannot store: {shown}")
    return value
