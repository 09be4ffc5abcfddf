"""The scorer of code problems: it runs the policy's program on hidden tests, in a sandbox.

The problem's metadata have AReaL's form of tests, `{"input_output": {"inputs": […], "outputs": […], "fn_name": "…"}}`,
whose values are texts. Without `fn_name` a program reads an input and prints the output. With it, an input has one
JSON value for each argument of the function, a line each, and the output is the JSON of its result; the function may
be a method of a class `Solution`. Such a program may use the names of common modules without importing them.

Numbers count as judges of contests have it: a decimal is right within 1e-6, absolute or relative, and an integer is
exact, however long it is.
"""

import asyncio
import json
import re
import textwrap
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal
from math import isclose
from typing import Annotated, Any

from pydantic import Field

from tasks.problems.problem_set import HIDDEN_TESTS
from tasks.score.verdict import Answer, ProgramError, RunProgram, Verdict, storable
from tasks.score.verifier import ScorerContext
from tasks.thoughts import TAG, split
from tasks.tools.bubblewrap import Limits, python
from tasks.tools.sandbox import Sandboxes

_FENCE = re.compile(r"[ \t]*+(```++|~~~++)[ \t]*+([^`\s]*+)[^`]*+")
_MARK = "result of the last call: "
_USUAL = "re string random datetime copy json sys typing collections heapq bisect math itertools functools operator"
_FUNCTION = f"""
import builtins as _builtins
_usual = {{}}
for _line in ("from {{}} import *", "import {{}}"):
    for _module in {_USUAL.split()}:
        exec(_line.format(_module), _usual)
vars(_builtins).update(_usual | vars(_builtins))
exec(compile(%(program)r, "program", "exec"))
import json as _json, sys as _sys
_arguments = [_json.loads(line) for line in _sys.stdin.read().split("\\n") if line.strip()]
_called = getattr(Solution(), %(name)r) if "Solution" in globals() else globals()[%(name)r]
print("\\n{_MARK}" + _json.dumps(_called(*_arguments)))
"""
"""Calls the function of a program. Names that it uses without importing them are found like those of Python itself, so
that none of them can stand in for a function that the program lacks; a program may begin with `from __future__`."""


class CodeScorer:
    """A turn is right if the last block of code in its text passes all tests of the problem.

    Args:
        context: what all scorers get.
        at_once: programs that run at the same time.
    """

    columns: Sequence[str] = ("metadata",)
    version = 3  # 1: True was 1; 2: decimals had to be equal, and programs in thoughts were run
    private: Sequence[str] = (HIDDEN_TESTS,)

    def __init__(self, context: ScorerContext, *, at_once: Annotated[int, Field(ge=1)] = 2) -> None:
        self._run, self._at_once = context.run_program, at_once

    def judge(self, answers: Sequence[Answer]) -> list[Verdict]:
        with ThreadPoolExecutor(self._at_once) as threads:
            return list(threads.map(lambda answer: judge_program(answer, self._run), answers))


def judge_program(answer: Answer, run: RunProgram) -> Verdict:
    """Run the program in an answer on the problem's tests until one fails; return the verdict."""
    tests = answer.metadata.get(HIDDEN_TESTS)
    if not isinstance(tests, dict) or not tests.get("inputs"):
        return Verdict("error", reason="the problem's metadata has no tests: input_output={inputs: […], outputs: […]}")
    program = program_in(answer.text)
    if program is None:
        return Verdict("unparsable", reason="no block of code between ```python and ```")
    function = tests.get("fn_name")
    whole = _FUNCTION % {"program": program, "name": function} if function else program
    same = same_result if function else same_lines
    for number, (given, expected) in enumerate(zip(tests["inputs"], tests["outputs"], strict=True), 1):
        try:
            trouble = "" if same(run(whole, given), expected) else "another result"
        except ProgramError as error:
            trouble = str(error)
        if trouble:
            return Verdict("wrong", extracted=storable(program), reason=storable(f"test {number}: {trouble}"))
    return Verdict("correct", extracted=storable(program))


def program_in(text: str) -> str | None:
    r"""Return the last block of Python in a text, between fences as in Markdown, or else the last one of no language.

    What stands in thoughts is no program, and tags of thoughts in a program are its text.

    >>> program_in("First:\n```python\nprint(1)\n```\nNo:\n```python\nprint(2)\n```\nIt prints:\n```\n2\n```")
    'print(2)'
    """
    blocks, fence, language = defaultdict[str, list[list[str]]](list), "", ""
    block, thinking = list[str](), False
    for line in split(text)[1].splitlines():
        for tag in TAG.finditer("" if fence else line):
            if not (tag["opened"] or thinking):  # a thought without a beginning
                blocks.clear()
            thinking = bool(tag["opened"])
        mark = None if thinking else _FENCE.fullmatch(line)
        if mark and not fence:
            fence, language, block = mark[1], mark[2].lower(), []
        elif mark and mark[1].startswith(fence) and not mark[2]:
            blocks["python" if language in ("py", "python3") else language].append(block)
            fence = ""
        elif fence:
            block.append(line)
    programs = blocks["python"] or blocks[""]
    return textwrap.dedent("\n".join(programs[-1])) if programs else None


_NUMBER = re.compile(r"([-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)", re.ASCII)
_NEAR = 1e-6
_EXACT = 2**53
"""The largest integer up to which a float has all integers."""


def same_lines(printed: str, expected: str) -> bool:
    """Return whether two outputs are equal but for white space at the ends of lines and of the text, and decimals.

    >>> same_lines("Case 1: 0.333333333", "Case 1: 0.333333 "), same_lines("07", "7"), same_lines("0.34", "0.333333")
    (True, False, False)
    """
    lines = ([line.rstrip() for line in text.strip().splitlines()] for text in (printed, expected))
    ours, theirs = (_NUMBER.split("\n".join(each)) for each in lines)  # texts and, between them, numbers
    return ours[::2] == theirs[::2] and all(map(_same_number, ours[1::2], theirs[1::2]))


def _same_number(printed: str, expected: str) -> bool:
    """Compare numbers in a text: integers are to be written in the same way."""
    left, right = (float(text) if set(text) & set(".eE") else Decimal(text) for text in (printed, expected))
    return printed == expected or (float in (type(left), type(right)) and _is_near(left, right))


def _is_near(number: float | Decimal, expected: float | Decimal) -> bool:
    """Return whether a number is the expected one, which is a float or, if it is an integer, a Decimal."""
    if isinstance(expected, Decimal) and abs(expected) > _EXACT:
        return number == expected
    return isclose(number, expected, rel_tol=_NEAR if isinstance(expected, float) else 0, abs_tol=_NEAR)


def same_result(printed: str, expected: str) -> bool:
    """Return whether the result that a program printed last is the expected one; a tuple is a list in JSON.

    >>> same_result(_MARK + "[1.0]", "[1]"), same_result(_MARK + "[true]", "[1]"), same_result(_MARK + "0.3", "0.30001")
    (True, False, False)
    """
    _, mark, result = printed.rpartition(_MARK)
    try:  # an integer of Python has no more than 4,300 digits in a text
        return bool(mark) and _equal(*(json.loads(text, parse_int=Decimal) for text in (result, expected)))
    except (ValueError, RecursionError):
        return False


def _equal(left: Any, right: Any) -> bool:
    """Compare values of JSON, the second of which is expected: for Python, but not for JSON, true is 1."""
    if isinstance(left, bool) or isinstance(right, bool):
        return left is right
    if isinstance(left, list) and isinstance(right, list):
        return len(left) == len(right) and all(map(_equal, left, right))
    if isinstance(left, dict) and isinstance(right, dict):
        return left.keys() == right.keys() and all(_equal(left[key], right[key]) for key in left)
    if isinstance(left, float | Decimal) and isinstance(right, float | Decimal):
        return _is_near(left, right)
    return bool(left == right)


_LONGEST_PROGRAM = 100_000
"""Most bytes of a program, which is an argument of a command line."""
_MAIN = """
import builtins, sys
builtins.exit = builtins.quit = sys.exit  # normally `site` adds them
sys.set_int_max_str_digits(0)  # time and output are limited
program, sys.modules["__main__"] = sys.argv.pop(), type(sys)("__main__")
exec(compile(program, "program", "exec"), sys.modules["__main__"].__dict__)
"""


def sandboxed(timeout_s: float, memory_mb: int) -> RunProgram:
    """Return what runs a program in Python in a sandbox.

    As for other answers, processor time decides; wall-clock time is limited only against programs that wait for ever.

    Args:
        timeout_s: processor time of a program.
        memory_mb: its memory.
    """
    # Many programs solve their problem in a thread, to have a larger stack.
    limits = Limits(60 + 10 * timeout_s, cpu_s=timeout_s, memory_mb=memory_mb, processes=16)
    sandboxes = Sandboxes()

    def run(program: str, given: str) -> str:
        encoded = program.encode("utf-8", "replace")
        if b"\0" in encoded or len(encoded) > _LONGEST_PROGRAM:
            raise ProgramError(f"the program contains a NUL character, or more than {_LONGEST_PROGRAM:,} bytes")
        argv = [*python(_MAIN), encoded.decode()]
        result = asyncio.run(sandboxes.run(argv, given.encode("utf-8", "replace"), limits))
        if result.ended == "time":
            raise ProgramError(f"no end within {limits.seconds:g} s")
        if result.ended == "output":
            raise ProgramError(f"more than {limits.output_bytes:,} bytes of output")
        if result.status:
            lines = result.stderr.decode(errors="replace").split("\n")
            last = next((f": {line[:200]}" for line in reversed(lines) if line.strip()), "")
            raise ProgramError(f"exit status {result.status}{last}")
        return result.stdout.decode(errors="replace")

    return run
