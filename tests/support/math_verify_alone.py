"""A grader that gives whole texts to math-verify: no rule decides before it, so answers can be endless or huge."""

from math_verify import verify

from tasks.score.library import _read
from tasks.score.verdict import Verdict


def grade(answer: str, solutions: tuple[str, ...]) -> Verdict:
    """Return the verdict on one answer, which is correct if it matches any of the solutions."""
    target = _read(answer)
    if not target:
        return Verdict("unparsable", "", solutions[0])
    for solution in solutions:
        gold = _read(solution if "$" in solution else f"\\boxed{{{solution}}}")
        if gold and verify(gold, target, timeout_seconds=None, raise_on_error=True):
            return Verdict("correct", str(target[-1]), solution)
    return Verdict("wrong", str(target[-1]), solutions[0])
