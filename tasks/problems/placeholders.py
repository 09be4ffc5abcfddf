"""Find solutions that only say that there is none: data sets have `proof` or `notfound` where an answer is missing."""

import re

_WORDS = frozenset(
    (
        *("proof", "proofs", "to be proved", "qed", "see solution", "see the solution", "see proof", "see above"),
        *(
            "see below",
            "see explanation",
            "notfound",
            "not found",
            "n a",
            "na",
            "none",
            "null",
            "nil",
            "nan",
            "unknown",
        ),
        *("tbd", "todo", "no answer", "not available", "not applicable", "not given", "missing", "omitted"),
        *("answer", "solution"),
    )
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
