"""Shows the problem and never judges."""

from typing import Any

from storage.records import Problem
from tasks.environments.interface import EnvironmentContext


class NullEnvironment:
    """Reward 0 for everything; never ends an episode."""

    def __init__(self, context: EnvironmentContext) -> None:
        pass

    async def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        problem = (options or {}).get("problem")
        assert isinstance(problem, Problem), "reset needs options={'problem': Problem}"
        return problem.prompt, {}

    async def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        return "", 0.0, False, False, {"verdict": ""}
