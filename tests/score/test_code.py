"""The scorer of code: hidden tests in AReaL's form, with programs that are right, wrong, slow, or no programs."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from configs.score import Score
from tasks.score.code import _MAIN, judge_program, program_in, same_lines, same_result
from tasks.score.scorers import Scorers, check_scorers
from tasks.score.verdict import Answer, ProgramError
from tasks.score.verifier import Verifier
from tests.problems.test_problems import load_rows

SUMS = {"inputs": ["1 2\n", "3 4\n"], "outputs": ["3", "7\n"]}
CALLS = {"fn_name": "add", "inputs": ["1\n2", "[1]\n[2]"], "outputs": ["3", "[1, 2]"]}
ONE_CALL = {"fn_name": "add", "inputs": ["1\n2"], "outputs": ["3"]}
ZEROS = f"[1{'0' * 4999}]"
USUAL = "reduce(sub, [a, b], 6) + pow(2, 3, 5) - Counter([a, b])[a] - bisect.bisect([1, 2], b) + copy.copy(a) - 1"
"""Names of common modules, and one that a module would hide."""
FORGED = """
import atexit
def add(a, b): return a + b
atexit.register(print, "result of the last call: " + "[" * 200_000)
"""
"""A program can forge any line, also one that cannot be read: that costs its own turn, and is no error."""
READS = "print(sum(map(int, input().split())))"


def run(program: str, given: str) -> str:
    """Run a program without any sandbox: those of these tests are ours."""
    command = [sys.executable, "-c", _MAIN, program]
    done = subprocess.run(command, input=given, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ProgramError(f"exit status {done.returncode}")
    return done.stdout


def answer(text: str, tests: Any = SUMS) -> Answer:
    metadata = json.dumps({"input_output": tests})
    return Answer({"turns": [{"text": text, "verdict": ""}], "metadata": metadata, "source": "code", "ungraded": []}, 0)


def block(program: str) -> str:
    return f"Here it is:\n```python\n{program}\n```\nDone."


@pytest.mark.parametrize(
    ("text", "tests", "name"),
    [
        (block(READS), SUMS, "correct"),
        (block("print(3)"), SUMS, "wrong"),  # passes the first test only
        (block("raise SystemExit(3)"), SUMS, "wrong"),
        (block("print(1") + block(READS), SUMS, "correct"),  # the last block counts
        (block(READS) + block("print(1"), SUMS, "wrong"),
        (READS, SUMS, "unparsable"),
        (block("def add(a, b): return a + b"), CALLS, "correct"),
        (block("class Solution:\n    def add(self, a, b): return a + b"), CALLS, "correct"),
        (block("def add(a, b):\n    print('noise')\n    return a + b\nprint('more')"), CALLS, "correct"),
        (block("def add(a, b): return {1, 2}"), CALLS, "wrong"),  # no JSON
        (block("def f(): return (1, 2)"), {"fn_name": "f", "inputs": [""], "outputs": ["[1, 2]"]}, "correct"),
        (block("def f(): return True"), {"fn_name": "f", "inputs": [""], "outputs": ["1"]}, "wrong"),
        (block("def f(): return [1.0, True]"), {"fn_name": "f", "inputs": [""], "outputs": ["[1, true]"]}, "correct"),
        (block(f"from __future__ import annotations\ndef add(a: List[int], b): return {USUAL}"), ONE_CALL, "correct"),
        (block("pass"), {"fn_name": "gcd", "inputs": ["4\n6"], "outputs": ["2"]}, "wrong"),  # not its own function
        (block("def f(): return [10**4999]"), {"fn_name": "f", "inputs": [""], "outputs": [ZEROS]}, "correct"),
        (block(FORGED), ONE_CALL, "wrong"),
        (block(READS), {}, "error"),
    ],
)
def test_programs(text: str, tests: dict[str, Any], name: str) -> None:
    """All tests must pass; a program that fails is a wrong answer, and a problem without tests is an error."""
    verdict = judge_program(answer(text, tests), run)
    assert verdict.name == name
    assert bool(verdict.reason) == (name != "correct")


@pytest.mark.parametrize(
    ("text", "program"),
    [
        ("```text\nno code\n```\nThe program:\n```python\nx\n```", "x"),
        ("```python\nx\n```\nIt prints:\n```\n3\n```\nor\n```console\n3\n```", "x"),
        ("```python\r\nif x:\r\n    y\r\n```\r\n", "if x:\n    y"),
        ("1. So:\n   ```Python3 title=a\n   if x:\n       y\n   ```", "if x:\n    y"),
        ("````py\ns = '''\n```\n'''\n````", "s = '''\n```\n'''"),
        ("```python\ncut off", None),
        ("<think>Perhaps\n```python\nx\n```\n</think>I cannot solve it.", None),
        ("```python\nx\n```\n</think>\nNo.", None),
        ("So:\n```python\nx\n```\n[THINK]\n```python\ny\n```\n[/THINK] it is.", "x"),
        ("<think>\n```python\nx\n</think>\n```python\nprint('</think><think>')\n```", "print('</think><think>')"),
    ],
)
def test_the_last_block_of_python_counts(text: str, program: str | None) -> None:
    """Fences are those of Markdown: what stands between two blocks or in thoughts is none, nor is another language."""
    assert program_in(text) == program


@given(st.lists(st.text(alphabet="ab 1", max_size=5), max_size=4), st.sampled_from(["", " ", "\n", " \n\n"]))
def test_only_white_space_at_ends_is_ignored(lines: list[str], end: str) -> None:
    """Programs differ in how they end lines, but not in what is on them, nor in what stands between numbers."""
    assert same_lines("\n".join(line + "  " for line in lines) + end, "\n".join(lines))
    assert not same_lines("\n".join([*lines, "c"]), "\n".join(lines))
    assert not same_lines("Case 2: 0.5", "Case 1: 0.5")


@pytest.mark.parametrize(
    ("result", "expected", "right"),
    [
        ("0.30000000000000004", "0.3", True),
        ("0.333333333333", "0.333333", True),
        ("1234567890.5", "1234567891.0", True),  # relative
        ("1e-7", "0.0", True),
        ("0.9999999999", "1", True),  # C++ prints 1.0 so
        ("1000000007.5", "1000000007", False),
        ("9007199254740992.0", "9007199254740993", False),
        ("[0.1, 0.20000001]", "[0.1, 0.2]", True),
        ("[0.1, 0.2]", "[0.1, 0.2, 0.3]", False),
        ("5.0", "1e999", False),
    ],
)
def test_decimals_are_right_as_judges_of_contests_have_it(result: str, expected: str, right: bool) -> None:
    """Within 1e-6, absolute or relative; integers are exact, alone and in lists, printed and returned."""
    assert same_lines(result, expected) == right
    assert same_result(f"result of the last call: {result}", expected) == right


def test_several_programs_run_at_once_and_in_order(verifier: Verifier) -> None:
    """Verdicts stay with their answers; a sandbox that cannot start is an error of its turn with the reason."""

    def runs(program: str, given: str) -> str:
        if "broken" in program:
            raise OSError("no namespace left")
        return run(program, given)

    texts = [block(READS), block("print(0)"), "no code", block("broken"), block(READS)]
    settings = Score(type={"default": "math-verify", "code": "code"}, args={"code": {"at_once": 3}})
    verdicts = Scorers(settings, verifier, runs).judge([answer(text) for text in texts])
    assert [verdict.name for verdict in verdicts] == ["correct", "wrong", "unparsable", "error", "correct"]
    assert verdicts[3].reason == "OSError: no namespace left"


@pytest.mark.usefixtures("sandboxes")
def test_programs_run_in_sandboxes(verifier: Verifier) -> None:
    """The real sandbox: a right program, wrong ones, and those that exceed a limit or fail are not right."""
    settings = Score(type={"default": "math-verify", "code": "code"}, timeout_s=1)
    reasons = {
        READS: "",
        f"{READS}\nexit()": "",
        f"import threading\nthread = threading.Thread(target=lambda: {READS})\nthread.start()": "",
        "print(0)": "test 1: another result",
        "while True: pass": "test 1: exit status 137",
        "1 / 0": "test 1: exit status 1: ZeroDivisionError: division by zero",
        "print('x' * 2**21)": "test 1: more than 1,048,576 bytes of output",
        "x = 1\n" * 50_000: "test 1: the program contains a NUL character, or more than 100,000 bytes",
        "x = '\0'": "test 1: the program contains a NUL character, or",
    }
    verdicts = Scorers(settings, verifier).judge([answer(block(program)) for program in reasons])
    assert [verdict.name for verdict in verdicts] == [*["correct"] * 3, *["wrong"] * 6]
    for verdict, reason in zip(verdicts, reasons.values(), strict=True):
        assert verdict.reason.startswith(reason)


def test_without_sandboxes_a_run_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no unsafe fall-back: the error comes before anything starts."""
    monkeypatch.setattr("tasks.score.scorers.check_host", Mock(side_effect=ValueError("sandboxes need bwrap")))
    with pytest.raises(ValueError, match="bwrap"):
        check_scorers(Score(type="code"))


def test_problems_of_the_seed_system_are_scored(tmp_path: Path) -> None:
    """Rows of AReaL's JSONL with `task: code` become problems whose tests the scorer finds; bad ones are dropped."""
    good = {"query_id": "c1", "prompt": "Add.", "task": "code", "solutions": [], "input_output": json.dumps(SUMS)}
    called = {**good, "query_id": "c2", "input_output": json.dumps({**CALLS, "more": 1}), "solutions": ["def add…"]}
    tests = [{"inputs": ["1"], "outputs": []}, {"inputs": [], "outputs": []}, {"inputs": [1], "outputs": ["1"]}]
    texts = ["{", *map(json.dumps, tests)]
    bad = [{**good, "query_id": f"b{number}", "input_output": text} for number, text in enumerate(texts)]
    found = load_rows(tmp_path, [good, called, *bad], preset="areal")
    assert [(problem.source, problem.solutions) for problem in found.problems] == [("code", []), ("code", ["def add…"])]
    assert [json.loads(problem.metadata)["input_output"] for problem in found.problems] == [SUMS, CALLS]
    assert len(found.bad) == 4
    assert all("input_output" in row.reason for row in found.bad)
