"""The grading of one answer by math-verify alone (`score.reading=library`), in the verifier's workers.

Where math-verify compares the text instead (see `equality`), the verdict can be `wrong` instead of `error`; both give
success 0.
"""

import logging
import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from math_verify import parse, verify

from tasks.score.verdict import Verdict, storable

logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its own timeouts are off


def grade(answer: str, solutions: tuple[str, ...]) -> Verdict:
    r"""Return the verdict on one answer, which is correct if it matches any of the solutions (1 or more).

    math-verify reads the final answer in a text: in `$…$` or `\boxed{}`, or a plain number. The answer is never cut,
    however long it is: its last part alone could mean something else.
    """
    golds, reasons = zip(*[_read("solution", _delimited(solution)) for solution in solutions], strict=True)
    if not any(golds):
        return Verdict("error", "", solutions[0], _join(reasons))
    target, reason = _read("answer", answer)
    if not target:
        return Verdict("unparsable", "", solutions[0], reason)
    return _compare(golds, target, solutions, list(reasons))


def _compare(golds: Sequence[list[Any]], target: list[Any], solutions: tuple[str, ...], reasons: list[str]) -> Verdict:
    extracted, failed = _text(target), False
    for index, gold in enumerate(golds):
        try:
            equal = verify(gold, target, timeout_seconds=None, raise_on_error=True)
        except MemoryError:
            raise
        except Exception as error:  # noqa: BLE001 - one comparison failed, the next may still find a match
            failed = True
            reasons.append(f"comparison with solution {index}: {type(error).__name__}: {error}")
            equal = verify(gold, target, timeout_seconds=None, raise_on_error=False)
        if equal:
            return Verdict("correct", extracted, solutions[index])
    return Verdict("error" if failed else "wrong", extracted, solutions[0], _join(reasons))


def _read(what: str, text: str) -> tuple[list[Any], str]:
    """Return the parsed text and no reason, or an empty list and the reason."""
    try:
        parsed = _parse(text)
    except MemoryError:
        raise
    except Exception as error:  # noqa: BLE001 - sympy may raise anything if the text is not an expression
        return [], storable(f"{what} {text!r}: {type(error).__name__}: {error}")
    return parsed, "" if parsed else storable(f"no expression in {what} {text!r}")


def _delimited(solution: str) -> str:
    r"""Add the delimiters that math-verify needs: solutions of data sets are bare LaTeX, such as `\frac{3}{4}`."""
    return solution if "\\boxed" in solution or re.search(r"(?<!\\)\$", solution) else f"\\boxed{{{solution}}}"


@lru_cache(maxsize=1024)  # a group shares its solutions, and short answers recur in other problems
def _parse(text: str) -> list[Any]:
    parsed: list[Any] = parse(text, parsing_timeout=None, raise_on_error=True)
    return parsed


def _text(parsed: list[Any]) -> str:
    """Return the text that math-verify extracted, last in its list; printing a sympy expression could take for ever."""
    return storable(parsed[-1]) if isinstance(parsed[-1], str) else ""


def _join(reasons: Sequence[str]) -> str:
    return storable("; ".join(filter(None, reasons)))
