"""A grader for tests of the verifier: math-verify reads the whole text, so that an answer can be endless or huge."""

from math_verify import verify

from tasks.score.library import read
from tasks.score.verdict import Verdict


def grade(answer: str, solutions: tuple[str, ...]) -> Verdict:
    """Compare an answer with the first solution."""
    gold = solutions[0] if "$" in solutions[0] else f"\\boxed{{{solutions[0]}}}"
    if not (found := read(answer)):
        return Verdict("unparsable")
    right = verify(read(gold), found, timeout_seconds=None, raise_on_error=True)
    return Verdict("correct" if right else "wrong")
