"""The judge itself: the only place that imports math-verify. Runs in the verifier's worker processes.

math-verify catches MemoryError and RecursionError where it turns LaTeX into sympy, and compares the
text instead; such an answer can be called `wrong` rather than `error`. Both earn nothing.
"""

import logging
import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from math_verify import parse, verify

from tasks.score.worker import Graded

logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its own timeouts are off

_LONGEST_TEXT = 500  # characters of `extracted` and `reason`


def grade(answer: str, solutions: tuple[str, ...]) -> Graded:
    r"""Verdict on one answer; any of the solutions (1 or more) counts.

    The answer is read as math-verify reads it: the final answer in a text, in `$…$` or `\boxed{}`, or a
    plain number. It is never cut, however long: the last part alone could mean something else.
    """
    golds, problems = zip(*[_read("solution", _delimited(solution)) for solution in solutions], strict=True)
    if not any(golds):
        return "error", "", 0, _join(problems)
    target, problem = _read("answer", answer)
    if not target:
        return "unparsable", "", 0, problem
    return _compare(golds, target, list(problems))


def _compare(golds: Sequence[list[Any]], target: list[Any], problems: list[str]) -> Graded:
    extracted, failed = _text(target), False
    for index, gold in enumerate(golds):
        try:
            equal = verify(gold, target, timeout_seconds=None, raise_on_error=True)
        except MemoryError:
            raise
        except Exception as error:  # noqa: BLE001 - one comparison failed, the next may still find them equal
            failed = True
            problems.append(f"comparison with solution {index}: {type(error).__name__}: {error}")
            equal = verify(gold, target, timeout_seconds=None, raise_on_error=False)
        if equal:
            return "correct", extracted, index, ""
    return "error" if failed else "wrong", extracted, 0, _join(problems)


def _read(what: str, text: str) -> tuple[list[Any], str]:
    """The parsed text, or nothing and why."""
    try:
        parsed = _parse(text)
    except MemoryError:
        raise
    except Exception as error:  # noqa: BLE001 - whatever sympy raises, the text is not an expression
        return [], _printable(f"{what} {text!r}: {type(error).__name__}: {error}")
    return parsed, "" if parsed else _printable(f"no expression in {what} {text!r}")


def _delimited(solution: str) -> str:
    r"""Data sets give bare LaTeX such as `\frac{3}{4}`, which math-verify reads only between delimiters."""
    return solution if "\\boxed" in solution or re.search(r"(?<!\\)\$", solution) else f"\\boxed{{{solution}}}"


@lru_cache(maxsize=1024)  # a group shares its solution, and short answers come back under other problems
def _parse(text: str) -> list[Any]:
    parsed: list[Any] = parse(text, parsing_timeout=None, raise_on_error=True)
    return parsed


def _text(parsed: list[Any]) -> str:
    """The text math-verify extracted, last in its list; printing a sympy expression could take for ever."""
    return _printable(parsed[-1]) if isinstance(parsed[-1], str) else ""


def _join(problems: Sequence[str]) -> str:
    return _printable("; ".join(filter(None, problems)))


def _printable(text: str) -> str:
    """Cut, and without lone surrogates, which no UTF-8 file can hold."""
    return text[:_LONGEST_TEXT].encode("utf-8", "replace").decode()
