"""Metadata that scorers call private: the agent of an episode does not get them, its environment does."""

import json
from collections.abc import Set
from dataclasses import dataclass, replace
from typing import Any

from storage.records import Problem
from tasks.environments.interface import Environment


def without(metadata: str, private: Set[str]) -> str:
    """Return metadata, JSON of an object, without the private keys.

    >>> without('{"level": 3, "tests": [1]}', {"tests"}), without('{"level":3}', {"tests"})
    ('{"level": 3}', '{"level":3}')
    """
    values = json.loads(metadata) if private else {}
    return json.dumps({key: values[key] for key in values if key not in private}) if private & set(values) else metadata


@dataclass(frozen=True, slots=True)
class WholeProblem:
    """An environment that grades with the whole problem, while the agent that resets it has a part of it.

    Attributes:
        environment: the environment, whose other attributes an agent may use as before.
        shown: the metadata that the agent has.
        whole: all metadata.
    """

    environment: Environment
    shown: str
    whole: str

    async def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        """See `Environment.reset`."""
        given = (options or {}).get("problem")
        if isinstance(given, Problem) and given.metadata == self.shown:
            options = {**(options or {}), "problem": replace(given, metadata=self.whole)}
        return await self.environment.reset(seed=seed, options=options)

    async def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """See `Environment.step`."""
        return await self.environment.step(action)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.environment, name)
