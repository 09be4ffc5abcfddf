"""The environment that shows the problem and grades nothing."""

from typing import Any

from storage.records import Problem
from tasks.environments.interface import EnvironmentContext


class NullEnvironment:
    """An environment with reward 0 for every answer; it never ends an episode."""

    def __init__(self, context: EnvironmentContext) -> None:
        pass

    async def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        problem = (options or {}).get("problem")
        assert isinstance(problem, Problem), "reset needs options={'problem': Problem}"
        return problem.prompt, {}

    async def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        return "", 0.0, False, False, {"verdict": ""}
