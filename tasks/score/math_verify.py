"""The scorer that compares a turn's answer with the problem's solutions."""

from collections.abc import Sequence

from tasks.score.interface import Answer, ScorerContext
from tasks.score.verdict import Verdict

LIBRARY_VERSION = 1
"""The scorer's version with `score.reading=library`."""


class MathVerifyScorer:
    """A turn is right if its final answer is one of the solutions, for the verifier."""

    columns: Sequence[str] = ("solutions", "answers")
    version = 3  # of the contract

    def __init__(self, context: ScorerContext) -> None:
        self._verifier, self._reading = context.verifier, context.reading

    def judge(self, answers: Sequence[Answer]) -> list[Verdict]:
        whole = self._reading == "library"
        pairs = [(answer.text if whole else answer.given, answer.row["solutions"]) for answer in answers]
        return self._verifier.grade(pairs, self._reading)
