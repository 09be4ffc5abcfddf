"""The contract of grading: what a person would read as the final answer, and what they would pay."""

import json
import operator
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from tasks.audit.checks.verdicts import opinion
from tasks.score.contract import grade
from tasks.score.numbers import read_number
from tasks.score.verifier import Verifier


def labelled(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (Path(__file__).parent / name).read_text().splitlines()]


def cells(table: str) -> list[str]:
    """Return the cells of a table whose rows are lines."""
    return [cell for line in table.strip().splitlines() for cell in line.split(" | ")]


CASES = labelled("grading.jsonl")
FIRST = 568
"""Labels of all kinds; those behind them are mostly of words, about which the second checker has no opinion."""
ALONE = labelled("grading_alone.jsonl")
"""Answers in which the second checker, which reads fewer words, finds another number or none.

The last three were errors of the scorer, too many of which stop a run: math-verify cannot compare them.
"""
LANGUAGES = labelled("grading_languages.jsonl")
"""Denials and answers in other languages than English, of which the second checker knows nothing."""
NOTATIONS = labelled("grading_notations.jsonl")
"""Numbers in other notations and almost the same numbers; a question, 12 + 7, that is repeated and not answered."""


def test_labelled_cases(verifier: Verifier) -> None:
    """All labelled answers get the verdict that a careful person gave, none of them by a timeout or an error."""
    cases = CASES + ALONE + LANGUAGES + NOTATIONS
    verdicts = verifier.grade([(case["answer"], case["solutions"]) for case in cases])
    pairs = list(zip(cases, verdicts, strict=True))
    assert [case for case, verdict in pairs if (verdict.name == "correct") != case["right"]] == []
    assert {verdict.name for verdict in verdicts} == {"correct", "wrong", "unparsable"}


def test_the_second_checker_contradicts_no_label() -> None:
    """Its opinion is the label, or that it cannot say; on most labels of numbers it has one."""
    opinions = [(case, opinion(case["answer"], case["solutions"])[0]) for case in CASES]
    contrary = {True: "wrong", False: "right"}
    assert [case for case, found in opinions if found == contrary[case["right"]]] == []
    assert sum(found == "cannot say" for _, found in opinions[:FIRST]) < 0.55 * FIRST
    of_numbers = [found for case, found in opinions if read_number(case["solutions"][0])]
    assert of_numbers.count("cannot say") < 0.4 * len(of_numbers)


OPERANDS = st.integers(2, 99)
SIGNS = {"+": operator.add, "-": operator.sub, "*": operator.mul, r"\\times": operator.mul, "×": operator.mul}
QUESTIONS = cells(r"""
{} | ${}$ | \boxed{{{}}} | The answer is {}. | To find {}, we first | {} = | What is {}? | #### {} | x = {}
First {}. Then | A: {} | **{}** | Answer: **{}** | ({}) | <answer>{}</answer> | The sum {} is asked. | `{}`
""")


@given(OPERANDS, OPERANDS, st.sampled_from(sorted(SIGNS)), st.sampled_from(QUESTIONS), st.booleans())
def test_only_the_result_is_paid(left: int, right: int, sign: str, question: str, blanks: bool) -> None:
    """Whatever the numbers and the sentence are: the expression is not paid, the expression with its result is."""
    result = SIGNS[sign](left, right)
    assume(result not in (left, right, -right, left * right + 0.5))
    expression = f"{left} {sign} {right}" if blanks else f"{left}{sign} {right}"
    answer = question.format(expression)
    assert grade(answer, (str(result),)).name != "correct"
    assert grade(f"So {expression} = {result}", (str(result),)).name == "correct"
    assert grade(f"\\boxed{{{expression} = {result}}}", (str(result),)).name == "correct"


def test_boxes_within_boxes() -> None:
    """However many there are, the innermost counts, in linear time and without an error."""
    begun = time.process_time()
    assert grade("\\boxed{" * 5_000 + "7" + "}" * 5_000, ("7",)).name == "correct"
    for text in ("\\boxed(" * 7_000 + ")" * 7_000, "\\boxed{(" * 10_000 + "}" * 10_000, ("é" * 4_950 + "一=\n") * 20):
        assert grade(text, ("7",)).name in ("wrong", "unparsable")
    assert time.process_time() - begun < 2


@pytest.mark.parametrize("solution", ["proof", r"\text{N/A}", "", "?"])
def test_a_placeholder_is_no_solution(solution: str) -> None:
    """Nothing is right, the problem is to blame and not the scorer, and another solution still counts."""
    assert grade(rf"\boxed{{{solution}}}", (solution,)).name in ("wrong", "unparsable")
    assert grade("5", (solution,)).reason.startswith("no solution")
    assert grade("5", (solution, "5")).name == "correct"
    assert grade("no number", ("5",)).reason == "no number in 'no number'"


@pytest.mark.slow
def test_worked_solutions_of_gsm8k(data_folder: Path) -> None:
    """Each worked solution is right for its own problem, and for no other one with another answer."""
    rows = [json.loads(line) for line in (data_folder / "gsm8k" / "test.jsonl").read_text().splitlines()]
    solutions = [row["answer"] for row in rows]
    golds = [solution.rpartition("####")[2].strip() for solution in solutions]
    assert [gold for gold, text in zip(golds, solutions, strict=True) if grade(text, (gold,)).name != "correct"] == []
    for gold, other, text in zip(golds, [golds[-1], *golds], solutions, strict=False):
        assert (grade(text, (other,)).name == "correct") == (gold == other)
        assert opinion(text, [gold])[0] != "wrong"
