"""A game of Gymnasium whose observations and actions are texts."""

import string
from typing import Any

import gymnasium


class Guess(gymnasium.Env[str, str]):
    """Guess a number from 0 to 99; a guess costs 0.1, the right one earns 1."""

    observation_space = gymnasium.spaces.Text(20, charset=string.printable)
    action_space = gymnasium.spaces.Text(2, charset=string.digits)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        super().reset(seed=seed)
        self.number = (options or {}).get("number", int(self.np_random.integers(100)))
        return "Guess.", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        right = int(action) == self.number
        parts = {"found": float(right), "cost": -0.1}
        said = "Right." if right else "Higher." if int(action) < self.number else "Lower."
        return said, sum(parts.values()), right, False, {"success": right, "parts": parts}


gymnasium.register("Guess-v0", Guess)
