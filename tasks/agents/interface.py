"""What an agent is: the seed system's interface of two queues.

An agent puts `(qid, token_ids, gconfig)` on the observation queue and takes
`BundledGenerationOutputs` from the action queue, as often as it likes; it never sees the engine.
"""

import asyncio
from dataclasses import dataclass
from typing import Protocol

from storage.records import Problem, Trajectory
from tasks.agents.chat import Chat
from tasks.environments.interface import Environment
from tasks.inference.api import BundledGenerationOutputs, GenerationConfig, Observation


@dataclass(frozen=True, slots=True)
class AgentContext:
    """First argument of every agent's constructor; what follows are `agent.args` of the configuration."""

    chat: Chat
    gconfig: GenerationConfig
    max_model_len: int


@dataclass(frozen=True, slots=True)
class Prompt:
    """One episode to be played. `record` is its trajectory with identity filled in and no tokens yet."""

    qid: str
    problem: Problem
    seed: int
    record: Trajectory


class Agent(Protocol):
    """Plays one episode; holds no state between episodes, of which many run at a time."""

    async def collect_trajectory(
        self,
        prompt: Prompt,
        env: Environment,
        obs_queue: "asyncio.Queue[Observation]",
        act_queue: "asyncio.Queue[BundledGenerationOutputs]",
    ) -> list[Trajectory]:
        """The episode's trajectories; an empty list rejects it. Exceptions are kept as failed episodes."""
        ...
