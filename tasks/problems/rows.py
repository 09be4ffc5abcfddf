"""Convert rows of sources to problems: their columns, prompts that are messages, and the layouts of known data sets.

A conversion takes a row and a default id for rows without one. It raises `RowError` with the reason if the row cannot
be used. Solutions are kept as written; the verifier boxes them. Data sets have `proof` or `notfound` where an answer
is missing: `is_placeholder` finds such solutions.
"""

import itertools
import json
import math
import re
import reprlib
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from decimal import Decimal
from typing import Any, Literal

from pydantic import TypeAdapter, ValidationError

from configs.problems import Fields
from storage.records import Problem
from storage.visible import visible
from tasks.problems.problem_set import HIDDEN_TESTS, NotNeededError, PartOfRow, Row, RowError

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
    items = value if isinstance(value, list) else [value]
    if isinstance(value, str) and value.lstrip().startswith('["'):
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
    missing = {name: None for name, value in metadata.items() if isinstance(value, float) and math.isnan(value)}
    try:
        return json.dumps(metadata | missing, allow_nan=False)
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


Message = dict[str, str]
"""{"role": "user", "content": "…"}"""

MESSAGES = "prompt_messages"
"""The key of a problem's metadata with its messages, unless the prompt is a single message of the user."""


def read_prompt(row: Row, column: str) -> tuple[str, dict[str, list[Message]]]:
    """Return the text of a prompt and, if it is more than one message of the user, its messages as metadata.

    The text is what the problem asks, without instructions of the system: by it problems are compared. Messages are
    those of a system (first, or absent), and of user and assistant; the last one is the user's.

    >>> read_prompt({"ask": "1 + 2?"}, "ask"), read_prompt({"ask": [{"role": "user", "content": "1 + 2?"}]}, "ask")
    (('1 + 2?', {}), ('1 + 2?', {}))
    >>> read_prompt({"ask": [{"role": "system", "content": "Add."}, {"role": "user", "content": "1 + 2?"}]}, "ask")
    ('1 + 2?', {'prompt_messages': [{'role': 'system', 'content': 'Add.'}, {'role': 'user', 'content': '1 + 2?'}]})
    """
    value = present(row, column)
    if not isinstance(value, list):
        return as_text(value, column), {}
    messages = [_message(item, column) for item in value]
    roles = [message["role"] for message in messages]
    asked = [message["content"] for message in messages if message["role"] != "system"]
    if roles[-1:] != ["user"] or "system" in roles[1:]:
        raise RowError(f"column {column!r} has messages of {roles}: one of the system may be first, the user's is last")
    return "\n\n".join(asked), {MESSAGES: messages} if len(messages) > 1 else {}


def first_messages(problem: Problem, question: str) -> list[Message]:
    """Return the messages with which an episode begins.

    They are those of the problem's row or, without such, the question as the user's. What an environment adds to the
    problem's prompt is added to the last message; if it asks something else, that is the only message.

    Args:
        problem: the problem.
        question: what the environment asks.
    """
    messages: list[Message] = json.loads(problem.metadata).get(MESSAGES) or []
    if not messages or not question.startswith(problem.prompt):
        return [{"role": "user", "content": question}]
    *before, last = messages
    return [*before, last | {"content": last["content"] + question.removeprefix(problem.prompt)}]


def with_instructions(messages: list[Message], system_prompt: str = "", instruction: str = "") -> list[Message]:
    r"""Return messages with an agent's own system prompt before that of the problem, and an instruction at the end.

    >>> with_instructions([{"role": "user", "content": "1 + 2?"}], "Be brief.", "Box it.")
    [{'role': 'system', 'content': 'Be brief.'}, {'role': 'user', 'content': '1 + 2?\nBox it.'}]
    """
    *before, last = messages
    if system_prompt and before and before[0]["role"] == "system":
        before[0] = before[0] | {"content": f"{system_prompt}\n\n{before[0]['content']}"}
    elif system_prompt:
        before = [{"role": "system", "content": system_prompt}, *before]
    return [*before, last | {"content": f"{last['content']}\n{instruction}"} if instruction else last]


def _message(item: Any, column: str) -> Message:
    if not isinstance(item, dict) or item.get("role") not in ("system", "user", "assistant"):
        other = f"a message that is not of system, user or assistant: {reprlib.repr(item)}"
        raise RowError(f"column {column!r} has {other}")
    if more := [name for name, value in item.items() if name not in ("role", "content") and value]:
        raise RowError(f"column {column!r} has a message with {', '.join(map(str, more))}: only content is read")
    return {"role": item["role"], "content": as_text(item.get("content"), f"{column}.content")}


def gsm8k(row: Row, number: str) -> Problem:
    r"""Convert a row of GSM8K (Cobbe et al., 2021): `question`, and `answer` that ends in `#### n`.

    >>> gsm8k({"question": "500 pairs?", "answer": "2 * 500 = 1,000\n#### 1,000"}, "000007")
    Problem(problem_id='000007', prompt='500 pairs?', solutions=['1000'], source='gsm8k', metadata='{}')
    """
    _, mark, tail = text(row, "answer").rpartition("####")
    solution = tail.strip().replace(",", "")
    if not mark or not solution:
        raise RowError(f"column 'answer' does not end in '#### n': {reprlib.repr(row['answer'])}")
    return Problem(number, text(row, "question"), golds([solution]), source="gsm8k")


def areal(row: Row, number: str) -> Problem:
    """Convert a row in AReaL's form: `query_id`, `prompt`, `task` and `solutions` (a list of strings).

    A problem of the task "code" has the source `code`, hidden tests in `input_output` (see `tasks.score.code`), which
    become metadata, and no need of solutions. All others are of the task "math".
    """
    task = text(row, "task")
    if task not in ("math", "code"):
        raise RowError(f"column 'task' is {reprlib.repr(row['task'])}: only 'math' and 'code' can be graded")
    if not isinstance(row.get("solutions"), list) and not (task == "code" and row.get("solutions") is None):
        raise RowError(f"column 'solutions' is not a list: {reprlib.repr(row.get('solutions'))}")
    name, prompt = text(row, "query_id"), text(row, "prompt")
    known = solutions(row, "solutions") if has(row, "solutions") else []
    if task == "math":
        return Problem(name, prompt, known, source="areal")
    return Problem(name, prompt, known, "code", json.dumps({HIDDEN_TESTS: _hidden_tests(row)}))


def _hidden_tests(row: Row) -> dict[str, Any]:
    """Read the tests of a code problem.

    >>> _hidden_tests({"input_output": '{"inputs": ["1 2"], "outputs": ["3"]}'})
    {'inputs': ['1 2'], 'outputs': ['3']}
    """
    written = text(row, "input_output")
    try:
        tests = json.loads(written)
        pairs = list(zip(tests["inputs"], tests["outputs"], strict=True))
        function = tests.get("fn_name") or ""
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise RowError(f"column 'input_output' is not JSON with as many inputs as outputs: {error!r:.200}") from None
    if not pairs or not all(isinstance(part, str) for part in (*itertools.chain(*pairs), function)):
        raise RowError(f"column 'input_output' holds no tests, or tests that are not text: {reprlib.repr(tests)}")
    return {name: tests[name] for name in ("fn_name", "inputs", "outputs") if tests.get(name)}


MAPPINGS: dict[str, Fields] = {
    "math": {"id": "unique_id", "prompt": "problem", "solutions": "answer", "metadata": ["level", "subject"]},
    "verifiers": {"id": "example_id", "prompt": "prompt", "solutions": "answer", "metadata": ["info"]},
    "verl": {
        "id": "extra_info.index",
        "prompt": "prompt",
        "solutions": "reward_model.ground_truth",
        "source": "data_source",
        "metadata": ["ability"],
    },
}
"""The columns of known data sets that need no code.

`math` is MATH (Hendrycks et al., 2021) in the columns of MATH-500. The original release has no `answer`, only a worked
`solution`: its rows are bad rows. Of verl's `extra_info` nothing else is kept, because it often holds the answer, which
agents would see: a scorer that needs it is served by `fields` with `metadata: [extra_info.…]`.
"""
_MAY_LACK: dict[str, list[Literal["id", "solutions"]]] = {
    "math": ["id"],
    "verl": ["id", "solutions"],
    "verifiers": ["solutions"],
}
"""Fields that a row of a mapping may lack or have empty, besides metadata."""
PRESETS: dict[str, Callable[[Row, str], Problem]] = {"gsm8k": gsm8k, "areal": areal}
COLUMNS: dict[str, Sequence[str]] = {
    "gsm8k": ["question", "answer"],
    "areal": ["query_id", "prompt", "task", "solutions", "input_output"],
}
"""The columns that each of `PRESETS` uses. No other columns are read from Parquet files."""


def from_fields(fields: Fields, found: Counter[str], preset: str = "") -> Callable[[Row, str], Problem]:
    """Make a conversion from columns.

    They are those of `prompt` (a text or messages) and, optionally, `solutions` (one or a list), `id`, `source` and
    `metadata` (any number). A row need not have those of `metadata`.

    Args:
        fields: the names of the columns; `reward_model.ground_truth` is one inside of another.
        found: counts the rows that have each column of `metadata`.
        preset: the known data set whose columns they are.
    """
    columns = {name: column for name, column in fields.items() if isinstance(column, str)}
    kept = columns_of({"metadata": fields.get("metadata", [])})

    def convert(row: Row, number: str) -> Problem:
        absent = (_ABSENT, None) if preset else (_ABSENT,)
        metadata = {column: value for column in kept if (value := _find(row, column)) not in absent}
        found.update(metadata.keys())
        lacked = [name for name in _MAY_LACK.get(preset, ()) if _find(row, columns[name]) in (_ABSENT, None, "")]
        there = {name: column for name, column in columns.items() if name not in lacked}
        prompt, messages = read_prompt(row, columns["prompt"])
        return Problem(
            problem_id=text(row, there["id"]) if "id" in there else number,
            prompt=prompt,
            solutions=solutions(row, there["solutions"]) if "solutions" in there else [],
            source=text(row, there["source"]) if "source" in there else preset,
            metadata=as_json(metadata | messages),
        )

    return convert


def columns_of(fields: Fields) -> list[str]:
    """Return the columns that a mapping names."""
    return [column for named in fields.values() for column in ([named] if isinstance(named, str) else named)]
