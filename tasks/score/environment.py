"""The scorer that repeats what the environment said while playing, for rewards that cannot be computed again."""

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self, get_args

from configs.score import Score as ScoreSettings
from storage.records import Trajectory, VerdictName
from tasks.score.interface import Answer, ScorerContext
from tasks.score.verdict import Verdict

_NAMES: tuple[VerdictName, ...] = get_args(VerdictName)
_FAILED = ("timeout", "error")
_PART = "correct"


@dataclass(frozen=True, slots=True)
class SuccessRule:
    """The rule by which a turn is right, given what environment or agent said while playing.

    >>> SuccessRule().verdict("wrong", 1.0, {}), SuccessRule().verdict("", 0.2, {"correct": 0.0, "format": 0.2})
    ('wrong', 'wrong')
    """

    by_part: bool = True  # a part of the reward that is named `correct` decides where there is no verdict
    success_above: float = 0.0  # without such a part a turn is right if its reward is above this number

    @classmethod
    def while_playing(cls, settings: ScoreSettings) -> Self:
        """Return the rule for filters and progress, before any scorer has judged."""
        if settings.success == "reward":  # older programs took any reward above 0 for a success here
            return cls(by_part=False)
        return cls(success_above=as_stored(settings.args.get("environment", {}).get("success_above", 0.0)))

    def verdict(self, said: str, reward: float, parts: Mapping[str, float]) -> VerdictName:
        """Return what was `said`, if it is a verdict; otherwise decide by the part `correct`, or else by the reward."""
        if known := next((name for name in _NAMES if name == said), None):
            return known
        right = parts[_PART] > 0.5 if self.by_part and _PART in parts else reward > self.success_above
        return "correct" if right else "wrong"

    def of(self, row: Trajectory, turn: int) -> VerdictName:
        """Return the verdict on a turn of a trajectory."""
        parts = row.reward_parts[turn] if row.reward_parts else {}
        return self.verdict(row.turns[turn].verdict, row.turns[turn].reward, parts)


class EnvironmentScorer:
    """A turn has the environment's reward with its parts, and is right by the `SuccessRule`.

    Args:
        context: what scorers share.
        success_above: a turn without a verdict, and without a part `correct`, is right if its reward is above it.
    """

    columns: Sequence[str] = ("reward_parts",)
    version = 1

    def __init__(self, context: ScorerContext, *, success_above: float = 0.0) -> None:
        self._rule = SuccessRule(context.by_part, as_stored(success_above))

    def judge(self, answers: Sequence[Answer]) -> list[Verdict]:
        return [self._verdict(answer) for answer in answers]

    def _verdict(self, answer: Answer) -> Verdict:
        turn, columns = answer.row["turns"][answer.turn], answer.row["reward_parts"]
        parts = dict(columns[answer.turn]) if columns else {}
        name = self._rule.verdict(turn["verdict"], turn["reward"], parts)
        reason = "the environment said so while playing" if name in _FAILED else ""
        return Verdict(name, reason=reason, reward=turn["reward"], parts=parts)


def as_stored(number: float) -> float:
    """Round a number as rewards are stored."""
    (rounded,) = struct.unpack("f", struct.pack("f", number))
    return float(rounded)
