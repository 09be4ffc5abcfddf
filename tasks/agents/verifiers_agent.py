"""Agents that are environments of the package verifiers, each with a loop, tools and a rubric of its own."""

import json
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

from tasks.agents.endpoint.agent import AgentTask, EndpointAgent, Reward
from tasks.agents.endpoint.client import open_client
from tasks.agents.endpoint.completions import Completions
from tasks.agents.faults import PolicyError

try:
    import verifiers as vf
    from verifiers.clients import OpenAIChatCompletionsClient
    from verifiers.envs import environment as environment_module
except ModuleNotFoundError as error:
    raise ValueError("agent.type=verifiers: its package is not installed: pip install 'verifiers<0.4'") from error


_UNREADABLE = ("EmptyModelResponseError", "InvalidModelResponseError", "ToolParseError")
"""Its errors for completions that cannot be read."""


@dataclass(eq=False, repr=False, kw_only=True)
class VerifiersAgent(EndpointAgent):
    """An environment of verifiers: it plays each episode itself and its rubric gives the reward.

    Problems are rows of its data set (preset `verifiers`). The last turn has the reward, whose parts are the values of
    the rubric's functions, before their weights, and its metrics. `score.type=environment` trains on it.

    Args:
        context: the pipeline gives it to every agent.
        environment: name of an installed environment, or of a module with `load_environment`.
        arguments: keyword arguments of its `load_environment`.
        turn_discount, renderer, listen, max_requests, response_format: see `EndpointAgent`.

    Raises:
        ValueError: its rubric compares the episodes of a group.
    """

    environment: str
    arguments: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        with patch.object(environment_module, "signal"):  # it would take Ctrl-C and SIGTERM from the run
            self._environment = vf.load_environment(self.environment, **(self.arguments or {}))
        if self._environment.requires_group_rollouts:
            told = "its rubric compares episodes; score them one by one"
            raise ValueError(f"agent.args.environment={self.environment!r}: {told}")

    async def solve(self, task: AgentTask, completions: Completions) -> object:
        """See `EndpointAgent.solve`."""
        row = json.loads(task.problem.metadata).get("row")
        if row is None:
            told = "is no row of an environment: load it with preset verifiers"
            raise ValueError(f"problem {task.problem.problem_id!r} {told}")
        async with open_client(completions, task.base_url, task.api_key) as client:
            asked = OpenAIChatCompletionsClient(client)
            ended = await self._environment.run_rollout(row, asked, task.model, sampling_args={})
        if ended["error"] or ended["stop_condition"] == "prompt_too_long":
            unreadable = ended["error"] and ended["error"]["error"] in _UNREADABLE
            kind = PolicyError if unreadable else RuntimeError
            raise kind(f"the environment of verifiers ended, {ended['stop_condition']}: {ended['error']}")
        return Reward(float(ended["reward"]), ended["metrics"])
