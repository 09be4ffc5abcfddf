r"""Write inequalities of one variable as intervals: `0 \le x < 2` is `[0, 2)`."""

import re

from tasks.score.numbers import LONGEST
from tasks.score.plain_text import in_ascii, unstyled

_SIGNS = {
    **dict.fromkeys(("\\leqslant", "\\leq", "\\le", "<="), "<="),
    **dict.fromkeys(("\\geqslant", "\\geq", "\\ge", ">="), ">="),
    **{"\\lt": "<", "\\gt": ">", "<": "<", ">": ">"},
}
_SIGN = re.compile(r"\s*(\\(?:leqslant|leq|le|geqslant|geq|ge|lt|gt)(?![A-Za-z])|<=|>=|<|>)\s*")
_VARIABLE = re.compile(r"[A-Za-z]")
_OR = re.compile(r"\s*(?:,\s*)?(?:(?<![A-Za-z])or(?![A-Za-z])|\\lor(?![A-Za-z]))\s*")

_BUILT = re.compile(r"\\\{\s*[A-Za-z]\s*(?:\\mid|:|\|)(.*)\\\}")


def interval(text: str) -> tuple[str, str] | None:
    r"""Return the variable and the interval that inequalities of one variable describe, or None.

    >>> interval(r"0 \le x \le 2"), interval(r"x<1 \text{ or } x>2"), interval("x + y < 1")
    (('x', '[0,2]'), ('x', '(-\\infty,1)\\cup(2,\\infty)'), None)
    """
    if len(text) > LONGEST or not _SIGN.search(text := unstyled(in_ascii(text)).strip(" $.")):
        return None
    parts = [_part(part) for part in _OR.split(_BUILT.sub(r"\1", text))]
    variables = {part[0] if part else None for part in parts}
    if len(variables) != 1 or (variable := variables.pop()) is None:
        return None
    return variable, "\\cup".join(part[1] for part in parts if part)


def _part(text: str) -> tuple[str, str] | None:
    """Return the variable and the interval of one inequality, or of a chain of two."""
    sides = _SIGN.split(text)
    signs = [_SIGNS[sign] for sign in sides[1::2]]
    terms = sides[::2]
    if any(">" in sign for sign in signs):  # read it from right to left
        terms, signs = terms[::-1], [sign.replace(">", "<") if ">" in sign else "?" for sign in signs[::-1]]
    if not all(terms) or "?" in signs or len(signs) not in (1, 2):
        return None
    if len(signs) == 1:
        terms, signs = (
            (["-\\infty", *terms], ["<", *signs]) if _is_variable(terms[0]) else ([*terms, "\\infty"], [*signs, "<"])
        )
    low, variable, high = terms
    if not _is_variable(variable) or _has_letters(low) or _has_letters(high):
        return None
    return variable, f"{'[' if '=' in signs[0] else '('}{low},{high}{']' if '=' in signs[1] else ')'}"


def _is_variable(term: str) -> bool:
    return _VARIABLE.fullmatch(term) is not None


def _has_letters(term: str) -> bool:
    """Return whether a bound has letters, other than those of LaTeX's commands."""
    return re.search(r"(?<![A-Za-z\\])[A-Za-z]", re.sub(r"\\[A-Za-z]+", "", term)) is not None
