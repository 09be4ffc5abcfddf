r"""What is left to math-verify: whether expressions are equal.

math-verify calls two equations equal if both have no solution, and two numbers if they
differ by less than 1e-15. So a pair that it calls equal is checked again: equations must be multiples of each other,
or each must hold for the other's solutions, and numbers must be equal exactly, or as far as their first 12 digits if
they are irrational.

math-verify catches MemoryError and RecursionError when it turns LaTeX into sympy, and compares the text instead. Then
an answer can be wrong that is right, or wrong where it would be an error; both give success 0.
"""

import logging
import re
from functools import lru_cache
from itertools import accumulate
from typing import Any

from math_verify import parse, verify
from sympy import Derivative, Eq, Expr, Float, I, N, Symbol, default_sort_key, simplify, solve

from tasks.score.plain_text import in_ascii

logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its own timeouts are off

_DIGITS = 12
_DECIMALS = 6  # those that count if one side is a decimal, as in math-verify
_DEEPEST = 12
"""Most brackets within each other in what math-verify reads: it takes a second for so many."""
_NO_BRACKETS = re.compile(r"[^()\[\]{}]+")
_BLANKS = re.compile(r"(?<!\\)(?:\\?\s){9,}")
_ROOT = re.compile(r"\\?(?<![A-Za-z])sqrt\s?\(([^()]*)\)")
_BARE = re.compile(r"(?<![\\A-Za-z])(pi|sqrt|sin|cos|tan|log|ln|theta|alpha|beta|infty)(?![A-Za-z])")


def equal(gold: str, answer: str) -> bool:
    r"""Return whether two expressions, as LaTeX without delimiters, are equal.

    >>> equal(r"(x+1)^2", "x^2+2x+1"), equal("x^2+1=0", "x^2+4=0"), equal(r"\frac{1}{2^{60}}", r"\frac{1}{2^{61}}")
    (True, False, False)
    """
    golds, answers = (list(map(_with_i, parsed(text))) for text in (gold, answer))
    if not golds or not answers:
        return False
    try:
        if not verify(golds, answers, timeout_seconds=None, raise_on_error=True, allow_set_relation_comp=True):
            return False
    except MemoryError:
        raise
    except Exception:  # noqa: BLE001 - sympy may raise anything, also for `x \neq 2` or 0/0, which equal nothing
        return False
    return _is_meant(golds[0], answers[0])


def _with_i(parsed: Any) -> Any:
    """Return an expression whose symbol `i` is the imaginary unit; math-verify says that it is not real."""
    unit = Symbol("i", real=False)
    return parsed.subs(unit, I) if isinstance(parsed, Expr) and unit in parsed.free_symbols else parsed


@lru_cache(maxsize=1024)  # a group shares its solutions, and short answers recur in other problems
def parsed(latex: str) -> list[Any]:
    """Return what math-verify reads in LaTeX: an expression and its text; nothing if it cannot read it."""
    return _read("\\boxed{" + _BARE.sub(r"\\\1", _ROOT.sub(r"\\sqrt{\1}", in_ascii(latex))) + "}")


def _is_meant(gold: Any, answer: Any) -> bool:
    """Return whether a pair that math-verify calls equal is."""
    try:
        if isinstance(gold, Eq) and isinstance(answer, Eq):
            return _are_same_equations(gold, answer)
        if isinstance(gold, Expr) and isinstance(answer, Expr) and not gold.free_symbols | answer.free_symbols:
            return _are_same_values(gold, answer)
    except MemoryError:
        raise
    except Exception:  # noqa: BLE001 - sympy may raise anything; then math-verify's word is all there is
        return True
    return True


def _are_same_equations(gold: Eq, answer: Eq) -> bool:
    left, right = (_without_derivatives(each.lhs - each.rhs) for each in (gold, answer))
    if left == right or not left.free_symbols:
        return bool(left == right)
    return simplify(left / right).is_number or (_holds(left, right) and _holds(right, left))


def _without_derivatives(expression: Expr) -> Expr:
    """Write derivatives as symbols: sympy takes dy/dx for 0, because y does not depend on x for it."""
    derivatives = sorted(expression.atoms(Derivative), key=default_sort_key)
    return expression.subs({each: Symbol(str(each)) for each in derivatives})


def _holds(known: Expr, other: Expr) -> bool:
    """Return whether `other` is 0 wherever `known` is, and whether it is anywhere."""
    symbol = min(known.free_symbols, key=default_sort_key)
    solutions = solve(known, symbol)
    return bool(solutions) and all(simplify(other.subs(symbol, solution)) == 0 for solution in solutions)


def _are_same_values(gold: Expr, answer: Expr) -> bool:
    difference = (gold - answer).doit()
    if difference.is_Rational and not gold.has(Float) and not answer.has(Float):
        return bool(difference == 0)
    scale = max(abs(N(gold, 30)), abs(N(answer, 30)))
    decimals = _DECIMALS if gold.has(Float) or answer.has(Float) else _DIGITS
    return bool(abs(N(difference, 30)) <= scale * 10**-decimals)


def _read(text: str) -> list[Any]:
    """Return what math-verify reads in a text; nothing if it cannot read it."""
    # math-verify's time doubles with each bracket in another one, and grows with the square of a run of blanks.
    if max(accumulate(_NO_BRACKETS.sub("", text), _depth, initial=0)) > _DEEPEST:
        return []
    text = _BLANKS.sub(lambda blanks: "\n" if "\n" in blanks[0] else " ", text)
    try:
        return list(parse(text, parsing_timeout=None, raise_on_error=True))
    except MemoryError:
        raise
    except Exception:  # noqa: BLE001 - sympy may raise anything if the text is not an expression
        return []


def _depth(outside: int, bracket: str) -> int:
    return outside + 1 if bracket in "([{" else max(0, outside - 1)
