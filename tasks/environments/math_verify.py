"""The environment that compares an answer with the problem's solutions, and one that grades nothing."""

from typing import Any

from storage.records import Problem
from tasks.environments.interface import EnvironmentContext, problem_of


class MathVerifyEnvironment:
    """An environment with reward 1 and the end of the episode for a right answer, reward 0 for any other."""

    def __init__(self, context: EnvironmentContext) -> None:
        self._verifier = context.verifier
        self._problem: Problem | None = None

    async def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        self._problem = problem_of(options)
        return self._problem.prompt, {}

    async def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        assert self._problem is not None, "reset comes before step"
        verdict = await self._verifier.grade_async(action, self._problem.solutions)
        return "", verdict.success, verdict.name == "correct", False, {"verdict": verdict.name}


class NullEnvironment:
    """An environment with reward 0 for every answer; it never ends an episode."""

    def __init__(self, context: EnvironmentContext) -> None:
        pass

    async def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        return problem_of(options).prompt, {}

    async def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        return "", 0.0, False, False, {"verdict": ""}
