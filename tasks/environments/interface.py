"""The interface of environments: gymnasium's `reset` and `step`, asynchronous."""

from dataclasses import dataclass
from typing import Any, Protocol

from tasks.score.verifier import Verifier


@dataclass(frozen=True, slots=True)
class EnvironmentContext:
    """The first argument of every environment's constructor; the others are `environment.args`."""

    verifier: Verifier


class Environment(Protocol):
    """An environment; every episode gets a new one."""

    async def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        """Begin with `options["problem"]` (a `storage.records.Problem`); return (observation, info)."""
        ...

    async def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Grade an answer; return (observation, reward, terminated, truncated, info).

        The trajectory records `info["verdict"]`.
        """
        ...
