"""Convert rows of known data sets, or of the user's own columns, to `Problem`.

Each conversion takes a row and a default id for rows without one. It raises `RowError` with the reason if the row
cannot be used. Solutions are kept as written; the verifier boxes them.
"""

import itertools
import json
import reprlib
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Literal

from configs.problems import Fields
from storage.records import Problem
from tasks.problems.columns import as_json, as_text, golds, has, present, solutions, text
from tasks.problems.messages import read_prompt
from tasks.problems.problem_set import HIDDEN_TESTS, Row, RowError


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


def verifiers(row: Row, number: str) -> Problem:
    """Convert a row of the data set of an environment of the package verifiers: `load_environment(…).get_dataset()`.

    Columns: `example_id`, `prompt` (a text or messages), and optionally `answer` and `info`. The metadata keep all of
    them as `row`.
    """
    prompt, answer = present(row, "prompt"), row.get("answer")
    try:
        texts = [prompt] if isinstance(prompt, str) else [message["content"] for message in prompt]
        shown = "\n\n".join(texts)
    except (TypeError, KeyError):
        raise RowError(f"column 'prompt' has no messages of text: {reprlib.repr(prompt)}") from None
    return Problem(
        problem_id=str(present(row, "example_id")),
        prompt=as_text(shown, "prompt"),
        solutions=[answer] if isinstance(answer, str) and answer.strip() else [],
        source="verifiers",
        metadata=as_json({"row": {name: row[name] for name in COLUMNS["verifiers"] if name in row}}),
    )


MAPPINGS: dict[str, Fields] = {
    "math": {"id": "unique_id", "prompt": "problem", "solutions": "answer", "metadata": ["level", "subject"]},
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
_MAY_LACK: dict[str, list[Literal["id", "solutions"]]] = {"math": ["id"], "verl": ["id", "solutions"]}
"""Fields that a row of a mapping may lack or have empty, besides metadata."""
PRESETS: dict[str, Callable[[Row, str], Problem]] = {"gsm8k": gsm8k, "areal": areal, "verifiers": verifiers}
COLUMNS: dict[str, Sequence[str]] = {
    "gsm8k": ["question", "answer"],
    "areal": ["query_id", "prompt", "task", "solutions", "input_output"],
    "verifiers": ["example_id", "prompt", "answer", "info"],
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
        metadata = {column: present(row, column) for column in kept if has(row, column)}
        may_lack = [columns[name] for name in _MAY_LACK.get(preset, ())]
        lacked = [column for column in may_lack if not has(row, column) or present(row, column) is None]
        there = {name: column for name, column in columns.items() if column not in lacked}
        if preset:
            metadata = {column: value for column, value in metadata.items() if value is not None}
        found.update(metadata.keys())
        problem_id = text(row, there["id"]) if "id" in there else number
        prompt, messages = read_prompt(row, columns["prompt"])
        return Problem(
            problem_id=problem_id,
            prompt=prompt,
            solutions=solutions(row, there["solutions"]) if "solutions" in there else [],
            source=text(row, there["source"]) if "source" in there else preset,
            metadata=as_json(metadata | messages),
        )

    return convert


def columns_of(fields: Fields) -> list[str]:
    """Return the columns that a mapping names."""
    return [column for named in fields.values() for column in ([named] if isinstance(named, str) else named)]
