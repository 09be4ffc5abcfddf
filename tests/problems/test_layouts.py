"""Rows as people bring them: verl's columns, messages, numbers for text, optional columns, and rows that repeat."""

import json
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from storage.records import Problem
from tasks.problems import BadRow, ProblemError, ProblemSet
from tasks.problems.problem_set import RowError, Where
from tasks.problems.rows import first_messages, solutions
from tests.support.problem_files import load_file, write_rows

SYSTEM = {"role": "system", "content": "Put the answer in a box."}
VERL = {"prompt": "prompt", "solutions": "reward_model.ground_truth", "id": "extra_info.index", "source": "data_source"}

ADDS = (("a", 1), ("b/c", 5))


def asked(*contents: str) -> list[dict[str, str]]:
    """Return messages of user and assistant in turn, the last one the user's."""
    roles = ["user", "assistant"] * len(contents)
    return [{"role": role, "content": content} for role, content in zip(roles, contents, strict=False)]


def verl_row(index: Any, question: str, gold: Any, **more: Any) -> dict[str, Any]:
    prompt = more.pop("prompt", asked(f"Compute.\n\n{question}"))
    about = {"index": index, "split": "train", "answer": f"It is {gold}."}
    model = {"ground_truth": gold, "style": "rule"}
    return {"data_source": "mine", "prompt": prompt, "reward_model": model, "extra_info": about, "ability": "MATH"}


def load(tmp_path: Path, rows: list[Any], kind: str = "jsonl", **knobs: Any) -> ProblemSet:
    return load_file(write_rows(tmp_path / f"rows.{kind}", *rows), kind=kind, **knobs)


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_verls_rows(tmp_path: Path, kind: str) -> None:
    """The preset reads messages and the nested gold answer; it keeps nothing that may tell the answer to an agent."""
    rows = [verl_row("id-0", "12 + 30", "42"), verl_row("id-1", "7 * 8", "56"), verl_row("id-0", "12 + 30", "42")]
    found = load(tmp_path, rows, kind, preset="verl")
    assert found.problems == [
        Problem("id-0", "Compute.\n\n12 + 30", ["42"], "mine", '{"ability": "MATH"}'),
        Problem("id-1", "Compute.\n\n7 * 8", ["56"], "mine", '{"ability": "MATH"}'),
    ]
    assert (found.bad, found.left_out) == ([], [BadRow(Where(3), "it is the same as line 1")])


def test_an_index_that_counts_within_each_data_set(tmp_path: Path) -> None:
    """Rows of several data sets, or splits, in one file keep ids of their own; the first one's are as they were."""
    rows = [verl_row(n, f"{n} + {add}", str(n + add)) | {"data_source": name} for name, add in ADDS for n in range(2)]
    again = rows[2] | {"prompt": asked("Another split.")}
    for mapping in ({"preset": "verl"}, {"fields": VERL}):
        found = load(tmp_path, [*rows, rows[3], again], **mapping)
        assert [each.problem_id for each in found.problems] == ["0", "1", "0~3", "1~4", "0~6"]
        assert (found.bad, found.left_out) == ([], [BadRow(Where(5), "it is the same as line 4")])


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_columns_inside_of_others(tmp_path: Path, kind: str) -> None:
    """One's own mapping names them with dots, also for metadata; a column whose own name has a dot is read, too."""
    fields = VERL | {"metadata": ["extra_info.split", "a.b"]}
    found = load(tmp_path, [verl_row(7, "12 + 30", "42") | {"a.b": 1}], kind, fields=fields)
    metadata = '{"extra_info.split": "train", "a.b": 1}'
    assert found.problems == [Problem("7", "Compute.\n\n12 + 30", ["42"], "mine", metadata)]
    with pytest.raises(ProblemError, match="no column 'reward_model.truth'; there are .*reward_model"):
        load(tmp_path, [verl_row(7, "12 + 30", "42")], kind, fields=VERL | {"solutions": "reward_model.truth"})


def test_messages_stay_messages(tmp_path: Path) -> None:
    """The prompt is what is asked, without the system's instructions; the agent gets all messages."""
    several = [SYSTEM, *asked("What is 1 + 2?", "3", "And twice that?")]
    rows = [verl_row(0, "", "3", prompt=[SYSTEM, *asked("1 + 2?")]), verl_row(1, "", "6", prompt=several)]
    first, second = load(tmp_path, rows, preset="verl").problems
    assert (first.prompt, second.prompt) == ("1 + 2?", "What is 1 + 2?\n\n3\n\nAnd twice that?")
    assert first_messages(first, first.prompt) == rows[0]["prompt"]
    assert first_messages(second, second.prompt) == several
    told = first_messages(second, f"{second.prompt}\n\nYou are at the start.")
    assert told == [*several[:-1], {"role": "user", "content": "And twice that?\n\nYou are at the start."}]
    assert first_messages(second, "Another question") == asked("Another question")
    assert first_messages(Problem("p", "1 + 2?", ["3"]), "1 + 2?") == asked("1 + 2?")


@pytest.mark.parametrize(
    ("prompt", "reason"),
    [
        ([], "has messages of []: one of the system may be first"),
        ([*asked("1 + 2?"), SYSTEM], "has messages of ['user', 'system']"),
        ([SYSTEM, SYSTEM, *asked("1 + 2?")], "has messages of ['system', 'system', 'user']"),
        ([{"role": "tool", "content": "3"}], "has a message that is not of system, user or assistant"),
        ([{"role": "user", "content": [{"type": "image"}]}], "column 'prompt.content' is not text"),
        ([{"role": "user", "content": " "}], "column 'prompt.content' is blank"),
        ([{"role": "user", "content": "x", "tool_calls": [{}]}], "has a message with tool_calls: only content is read"),
    ],
)
def test_messages_that_cannot_be_asked(tmp_path: Path, prompt: Any, reason: str) -> None:
    """Each is a bad row with its reason."""
    rows = [verl_row(0, "1 + 2", "3"), verl_row(1, "", "3", prompt=prompt)]
    (bad,) = load(tmp_path, rows, preset="verl").bad
    assert reason in bad.reason


@pytest.mark.parametrize(
    ("value", "golds"),
    [
        (18, ["18"]), (18.0, ["18"]), (-0.0, ["0"]), (1e20, ["100000000000000000000"]),
        (1e23, ["100000000000000000000000"]),
        (123456789012345678901234567890, ["123456789012345678901234567890"]), (Decimal("18.00"), ["18"]),
        (Decimal("2.50"), ["2.50"]), ("18.0", ["18.0"]), ("1,234", ["1,234"]), (["3", 5.0], ["3", "5"]),
        ("[3, 5]", ["[3, 5]"]), (r"[1, \frac{7}{3}]", [r"[1, \frac{7}{3}]"]), ('["12"]', ["12"]),
        ('["3", 5]', ['["3", 5]']), ('["3', ['["3']),
    ],
)  # fmt: skip
def test_gold_answers_of_any_type(value: Any, golds: list[str]) -> None:
    """Whole numbers have no point, texts stay as they are, a list has several golds, also as JSON of texts."""
    assert solutions({"gold": value}, "gold") == golds


@pytest.mark.parametrize(
    "value", ["", True, 0.5, float("nan"), float("inf"), Decimal("NaN"), {"value": 7}, ["3", None], [["3"]]]
)
def test_what_is_no_gold_answer(value: Any) -> None:
    """It is a bad row: a person has to say what is meant."""
    with pytest.raises(RowError, match="column 'gold'"):
        solutions({"gold": value}, "gold")


def test_metadata_may_be_missing_in_some_rows(tmp_path: Path) -> None:
    """A NaN in a table is a missing number; a column that no row has is a mistake in the configuration."""
    rows = [{"ask": "p", "gold": "1", "rate": rate} for rate in (0.5, None, float("nan"))]
    fields = {"prompt": "ask", "solutions": "gold", "metadata": ["rate"]}
    found = load(tmp_path, [*rows, {"ask": "q", "gold": "2"}], fields=fields)
    metadata = [json.loads(problem.metadata) for problem in found.problems]
    assert metadata == [{"rate": 0.5}, {"rate": None}, {"rate": None}, {}]
    assert load(tmp_path, [{"ask": "p", "gold": "1", "rate": [float("nan")]}, *rows], fields=fields).bad
    with pytest.raises(ProblemError, match=r"no row has the column 'ratio', which fields.metadata names"):
        load(tmp_path, rows, fields=fields | {"metadata": ["rate", "ratio"]})
