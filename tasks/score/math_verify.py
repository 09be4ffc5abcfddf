"""The scorer that compares a turn's answer with the problem's solutions."""

from collections.abc import Sequence

from tasks.score.interface import Answer, ScorerContext
from tasks.score.verdict import Verdict


class MathVerifyScorer:
    """A turn is right if math-verify finds one of the solutions in its text."""

    columns: Sequence[str] = ("solutions",)
    version = 1

    def __init__(self, context: ScorerContext) -> None:
        self._verifier = context.verifier

    def judge(self, answers: Sequence[Answer]) -> list[Verdict]:
        return self._verifier.grade([(answer.text, answer.row["solutions"]) for answer in answers])
