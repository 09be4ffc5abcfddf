"""The scorer that repeats what the environment said while playing, for rewards that cannot be computed again."""

import struct
from collections.abc import Sequence
from typing import get_args

from storage.records import VerdictName
from tasks.score.interface import Answer, ScorerContext
from tasks.score.verdict import Verdict

_NAMES: tuple[VerdictName, ...] = get_args(VerdictName)
_FAILED = ("timeout", "error")


class EnvironmentScorer:
    """A turn has the environment's reward with its parts, and is right if the environment said so (`heard`).

    Args:
        context: what scorers share.
        success_above: a turn on which the environment gave no verdict is right if its reward is above this number. The
            filters of a rollout know only what was said while playing: for them it is 0.
    """

    columns: Sequence[str] = ("reward_parts",)
    version = 1

    def __init__(self, context: ScorerContext, *, success_above: float = 0.0) -> None:
        (self._success_above,) = struct.unpack("f", struct.pack("f", success_above))  # as the rewards are stored

    def judge(self, answers: Sequence[Answer]) -> list[Verdict]:
        return [self._verdict(answer) for answer in answers]

    def _verdict(self, answer: Answer) -> Verdict:
        turn, parts = answer.row["turns"][answer.turn], answer.row["reward_parts"]
        name = heard(turn["verdict"], turn["reward"], self._success_above)
        reason = "the environment said so while playing" if name in _FAILED else ""
        return Verdict(name, reason=reason, reward=turn["reward"], parts=dict(parts[answer.turn]) if parts else {})


def heard(verdict: str, reward: float, success_above: float = 0.0) -> VerdictName:
    """Return the verdict of an environment: its word if that is one, otherwise right for a reward above the number.

    >>> heard("wrong", 0.2), heard("", 0.2), heard("3 tests passed", 0.0)
    ('wrong', 'correct', 'wrong')
    """
    known = next((name for name in _NAMES if name == verdict), None)
    return known or ("correct" if reward > success_above else "wrong")
