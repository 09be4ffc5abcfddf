"""What an environment is: gymnasium's `reset` and `step`, asynchronous."""

from dataclasses import dataclass
from typing import Any, Protocol

from tasks.score.verifier import Verifier


@dataclass(frozen=True, slots=True)
class EnvironmentContext:
    """First argument of every environment's constructor; what follows are `environment.args`."""

    verifier: Verifier


class Environment(Protocol):
    """Made anew for every episode."""

    async def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        """Begin with `options["problem"]` (a `storage.records.Problem`); returns (observation, info)."""
        ...

    async def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Judge an answer: (observation, reward, terminated, truncated, info). `info["verdict"]` is recorded."""
        ...
