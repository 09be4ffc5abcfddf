"""Read the columns of a row: text, numbers that stand for text, several gold answers, and columns inside of others.

Data sets have `proof` or `notfound` where an answer is missing: `is_placeholder` finds such solutions.
"""

import json
import math
import re
import reprlib
from contextlib import suppress
from decimal import Decimal
from typing import Any

from pydantic import TypeAdapter, ValidationError

from storage.visible import visible
from tasks.problems.problem_set import NotNeededError, PartOfRow, Row, RowError

_NAMED = 500
"""Largest number of characters of column names in a message."""
_ABSENT = object()
_TEXTS = TypeAdapter(list[str])


def has(row: Row, column: str) -> bool:
    """Return whether a row has a column, which may lie inside of another: `reward_model.ground_truth`."""
    return _find(row, column) is not _ABSENT


def present(row: Row, column: str) -> Any:
    """Return the value of a column; a row without it is a bad row."""
    value = _find(row, column)
    if value is _ABSENT:
        names = row.names if isinstance(row, PartOfRow) else row
        raise RowError(f"no column {column!r}; there are {visible(', '.join(map(str, names)), _NAMED)}")
    return value


def text(row: Row, column: str) -> str:
    """Return a column as text, see `as_text`."""
    return as_text(present(row, column), column)


def solutions(row: Row, column: str) -> list[str]:
    r"""Return the gold answers in a column: one, or a list of several of which any counts.

    A text that is JSON of a list of texts is such a list, too: no answer is written like that. All other text is one
    answer, whatever is in it. Placeholders are left out. Null and an empty list are no answers.

    >>> solutions({"gold": ["3", 5.0]}, "gold"), solutions({"gold": '["3", "5"]'}, "gold")
    (['3', '5'], ['3', '5'])
    >>> solutions({"gold": "[3, 5]"}, "gold")
    ['[3, 5]']

    Raises:
        NotNeededError: there is no answer but placeholders.
    """
    value = present(row, column)
    if value is None or value == []:
        return []
    items = [value]
    if isinstance(value, list):
        items = value
    elif isinstance(value, str) and value.lstrip().startswith('["'):
        with suppress(ValidationError):
            items = _TEXTS.validate_json(value)
    return golds([as_text(item, column) for item in items])


def golds(found: list[str]) -> list[str]:
    """Return the solutions that are no placeholders.

    Raises:
        NotNeededError: there is none. Data sets have many such rows, so they are no bad rows.
    """
    if not (known := [solution for solution in found if not is_placeholder(solution)]):
        raise NotNeededError(f"no answer can be right: the solution is a placeholder, {reprlib.repr(found[0])}")
    return known


def as_text(value: object, column: str) -> str:
    """Return a value as text.

    Whole numbers of any type are written without a point, as a person would write an answer. Other types are refused,
    since they have several spellings, such as 0.1 and true. A `Decimal`, from a column of decimals, has only one.

    >>> as_text(18, "gold"), as_text(18.0, "gold"), as_text(-0.0, "gold"), as_text(Decimal("2.50"), "gold")
    ('18', '18', '0', '2.50')
    """
    if isinstance(value, int | float | Decimal) and not isinstance(value, bool):
        exact = Decimal(repr(value)) if isinstance(value, float) else Decimal(value)  # 1e23 as it is written
        if not exact.is_finite() or (isinstance(value, float) and not value.is_integer()):
            raise RowError(f"column {column!r} is not text: {value!r}; write the number that is meant as text")
        return str(int(exact)) if exact == exact.to_integral_value() else f"{exact:f}"
    if not isinstance(value, str):
        raise RowError(f"column {column!r} is not text: {reprlib.repr(value)}")
    if not value.strip():
        raise RowError(f"column {column!r} is blank")
    if not value.isascii() and any("\ud800" <= character <= "\udfff" for character in value):
        shown = reprlib.repr(value)
        raise RowError(f"column {column!r} holds half a surrogate pair, which UTF-8 cannot store: {shown}")
    return value


def as_json(metadata: dict[str, Any]) -> str:
    """Write the columns that become metadata; a NaN in a column is a missing number, as in tables of pandas."""
    values = {
        name: None if isinstance(value, float) and math.isnan(value) else value for name, value in metadata.items()
    }
    try:
        return json.dumps(values, allow_nan=False)
    except (ValueError, TypeError) as error:  # NaN inside of a list, a date, bytes
        raise RowError(f"the columns of metadata cannot be written as JSON: {error}") from None


def _find(row: Row, column: str) -> Any:
    if column in row:
        return row[column]
    value: Any = row
    for name in column.split("."):
        value = value.get(name, _ABSENT) if isinstance(value, dict) else _ABSENT
    return value


_WORDS = frozenset(
    """proof|proofs|to be proved|qed|see solution|see the solution|see proof|see above|see below|see explanation
    |notfound|not found|n a|na|none|null|nil|nan|unknown|tbd|todo|no answer|not available|not applicable|not given
    |missing|omitted|answer|solution""".replace("\n    ", "").split("|")
)
_WRAPPER = re.compile(r"\\(?:boxed|fbox|text(?:bf|it|rm)?|math(?:rm|bf|it)|mbox)(?![A-Za-z])")
_AROUND = " \t\r\n$.,:;!\"'`*()[]{}<>"


def is_placeholder(solution: str) -> bool:
    r"""Return whether a solution stands for a missing one, so that nothing can be right.

    >>> [is_placeholder(text) for text in ("proof", r"\text{N/A}", "See solution.", "?", "")]
    [True, True, True, True, True]
    >>> [is_placeholder(text) for text in ("42", "No", "no solution", r"\emptyset", r"\{\}", "None of these")]
    [False, False, False, False, False, False]
    """
    if len(solution) > 200 or "\\{" in solution:
        return False
    plain = _WRAPPER.sub("", solution).strip(_AROUND).casefold()
    return not plain.strip("-\u2013\u2014_?/\u2026") or re.sub(r"[\s/_.-]+", " ", plain).strip() in _WORDS
