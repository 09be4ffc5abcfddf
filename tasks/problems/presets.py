"""Convert rows of known data sets, or of the user's own columns, to `Problem`.

Each conversion takes a row and a default id (`RowPlace.number`) for rows without one. It raises `RowError` with the
reason if the row cannot be used. Solutions are kept as written; the verifier boxes them.
"""

import itertools
import json
import reprlib
from collections.abc import Callable, Sequence
from typing import Any

from configs.schema import Fields
from storage.records import Problem
from storage.visible import visible
from tasks.problems.placeholders import is_placeholder
from tasks.problems.problem_set import NoSolutionError, PartOfRow, Row, RowError

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
    return Problem(number, _text(row, "question"), _golds([solution]), source="gsm8k")


def math(row: Row, number: str) -> Problem:
    """Convert a row of MATH (Hendrycks et al., 2021) in the columns of MATH-500.

    Columns: `problem`, `answer`, and optionally `unique_id`, `subject`, `level`. The original release has no `answer`,
    only a worked `solution`: its rows are bad rows.
    """
    metadata = {key: row[key] for key in ("level", "subject") if isinstance(row.get(key), str | int)}
    return Problem(
        problem_id=_text(row, "unique_id") if row.get("unique_id") is not None else number,
        prompt=_text(row, "problem"),
        solutions=_golds([_text(row, "answer")]),
        source="math",
        metadata=json.dumps(metadata),
    )


def areal(row: Row, number: str) -> Problem:
    """Convert a row in AReaL's form: `query_id`, `prompt`, `task` and `solutions` (a list of strings).

    A problem of the task "code" has the source `code`, hidden tests in `input_output` (see `tasks.score.code`), which
    become metadata, and no need of solutions. All others are of the task "math".
    """
    task = _text(row, "task")
    if task not in ("math", "code"):
        raise RowError(f"column 'task' is {reprlib.repr(row['task'])}: only 'math' and 'code' can be graded")
    if not isinstance(row.get("solutions"), list) and not (task == "code" and row.get("solutions") is None):
        raise RowError(f"column 'solutions' is not a list: {reprlib.repr(row.get('solutions'))}")
    name, prompt = _text(row, "query_id"), _text(row, "prompt")
    if task == "math":
        return Problem(name, prompt, _golds(_texts(row, "solutions")), source="areal")
    solutions = _texts(row, "solutions") if row.get("solutions") else []
    return Problem(name, prompt, solutions, "code", json.dumps({"input_output": _hidden_tests(row)}))


def _hidden_tests(row: Row) -> dict[str, Any]:
    """Read the tests of a code problem.

    >>> _hidden_tests({"input_output": '{"inputs": ["1 2"], "outputs": ["3"]}'})
    {'inputs': ['1 2'], 'outputs': ['3']}
    """
    text = _text(row, "input_output")
    try:
        tests = json.loads(text)
        pairs = list(zip(tests["inputs"], tests["outputs"], strict=True))
        function = tests.get("fn_name") or ""
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise RowError(f"column 'input_output' is not JSON with as many inputs as outputs: {error!r:.200}") from None
    if not pairs or not all(isinstance(text, str) for text in (*itertools.chain(*pairs), function)):
        raise RowError(f"column 'input_output' holds no tests, or tests that are not text: {reprlib.repr(tests)}")
    return {name: tests[name] for name in ("fn_name", "inputs", "outputs") if tests.get(name)}


def verifiers(row: Row, number: str) -> Problem:
    """Convert a row of the data set of an environment of the package verifiers: `load_environment(…).get_dataset()`.

    Columns: `example_id`, `prompt` (a text or messages), and optionally `answer` and `info`. The metadata keep all of
    them as `row`, for the agent `verifiers`.
    """
    prompt, answer = _present(row, "prompt"), row.get("answer")
    try:
        texts = [prompt] if isinstance(prompt, str) else [message["content"] for message in prompt]
        shown = "\n\n".join(texts)
    except (TypeError, KeyError):
        raise RowError(f"column 'prompt' has no messages of text: {reprlib.repr(prompt)}") from None
    return Problem(
        problem_id=str(_present(row, "example_id")),
        prompt=_checked(shown, "prompt"),
        solutions=[answer] if isinstance(answer, str) and answer.strip() else [],
        source="verifiers",
        metadata=_json({"row": {name: row[name] for name in COLUMNS["verifiers"] if name in row}}),
    )


PRESETS: dict[str, Callable[[Row, str], Problem]] = {
    "gsm8k": gsm8k,
    "math": math,
    "areal": areal,
    "verifiers": verifiers,
}
COLUMNS: dict[str, Sequence[str]] = {
    "gsm8k": ["question", "answer"],
    "math": ["problem", "answer", "unique_id", "subject", "level"],
    "areal": ["query_id", "prompt", "task", "solutions", "input_output"],
    "verifiers": ["example_id", "prompt", "answer", "info"],
}
"""The columns that each preset uses. No other columns are read from Parquet files."""


def from_fields(fields: Fields) -> Callable[[Row, str], Problem]:
    """Make a conversion from the user's columns.

    They are those of `prompt`, `solutions` (one or a list) and, optionally, `id`, `source` and `metadata` (any number).
    """
    columns = {name: column for name, column in fields.items() if isinstance(column, str)}
    kept = columns_of({"metadata": fields.get("metadata", [])})

    def convert(row: Row, number: str) -> Problem:
        return Problem(
            problem_id=_text(row, columns["id"]) if "id" in columns else number,
            prompt=_text(row, columns["prompt"]),
            solutions=_golds(_texts(row, columns["solutions"])),
            source=_text(row, columns["source"]) if "source" in columns else "",
            metadata=_json({column: _present(row, column) for column in kept}),
        )

    return convert


def columns_of(fields: Fields) -> list[str]:
    """Return the columns that a mapping names."""
    return [column for named in fields.values() for column in ([named] if isinstance(named, str) else named)]


def _json(metadata: dict[str, Any]) -> str:
    try:
        return json.dumps(metadata, allow_nan=False)
    except (ValueError, TypeError) as error:  # NaN, a date, bytes
        raise RowError(f"the columns of metadata cannot be written as JSON: {error}") from None


def _text(row: Row, column: str) -> str:
    return _checked(_present(row, column), column)


def _present(row: Row, column: str) -> Any:
    if column not in row:
        names = row.names if isinstance(row, PartOfRow) else row
        raise RowError(f"no column {column!r}; there are {visible(', '.join(map(str, names)), _NAMED)}")
    return row[column]


def _texts(row: Row, column: str) -> list[str]:
    value = row.get(column)
    if not isinstance(value, list):
        return [_text(row, column)]
    if not value:
        raise RowError(f"column {column!r} is an empty list")
    return [_checked(item, column) for item in value]


def _golds(solutions: list[str]) -> list[str]:
    """Return the solutions that are no placeholders.

    Raises:
        NoSolutionError: there is none.
    """
    if not (golds := [solution for solution in solutions if not is_placeholder(solution)]):
        raise NoSolutionError(f"no answer can be right: the solution is a placeholder, {reprlib.repr(solutions[0])}")
    return golds


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
