"""A game: guess a number, and hear after each guess whether it is higher or lower."""

import json
import random
import re
from typing import Any

from tasks.environments.interface import EnvironmentContext, problem_of
from tasks.problems.problem_set import SEED


class GuessNumberEnvironment:
    """An environment with reward 1 and the end of the episode for the right number, reward 0 for any other.

    The last number in an answer is the guess. After a wrong one the policy is told what is left: `Higher: the number is
    from 5 to 7.` The problem's metadata have `low`, `high` and the `seed` of the number.
    """

    def __init__(self, context: EnvironmentContext) -> None:
        self._low = self._high = self._number = 0

    async def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        problem = problem_of(options)
        game = json.loads(problem.metadata)
        if missing := [name for name in (SEED, "low", "high") if name not in game]:
            raise ValueError(f"problem {problem.problem_id!r} has no metadata {missing[0]!r}: use kind: guess-number")
        self._low, self._high = game["low"], game["high"]
        self._number = random.Random(game[SEED]).randint(self._low, self._high)
        return problem.prompt, {}

    async def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        numbers = re.findall(r"-?\d+", action)
        if not numbers:
            return f"Say a number from {self._low} to {self._high}.", 0.0, False, False, {"verdict": "unparsable"}
        guess = int(numbers[-1][:20])
        if guess == self._number:
            return "Right.", 1.0, True, False, {"verdict": "correct"}
        if guess < self._number:
            self._low, word = max(self._low, guess + 1), "Higher"
        else:
            self._high, word = min(self._high, guess - 1), "Lower"
        return f"{word}: the number is from {self._low} to {self._high}.", 0.0, False, False, {"verdict": "wrong"}
