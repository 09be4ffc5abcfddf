"""The interface of agents: they play an episode with the problem, an environment and the engine.

An agent awaits `engine.generate(token_ids, gconfig)` as often as it needs (`AwaitingAgent`). Or it has two queues, as
in AReaL's guide "Rollout and Agentic RL" (`QueueAgent`): it puts `(qid, token_ids, gconfig)` on the observation queue
and takes `BundledGenerationOutputs` from the action queue.
"""

import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from storage.records import Problem, Trajectory
from tasks.agents.chat import Chat
from tasks.environments.interface import Environment
from tasks.inference.api import BundledGenerationOutputs, GenerationConfig, Observation
from tasks.tools.toolbox import Toolbox


@dataclass(frozen=True, slots=True)
class AgentContext:
    """The first argument of every agent's constructor; the others are `agent.args` of the configuration."""

    chat: Chat
    gconfig: GenerationConfig
    max_model_len: int
    open_toolbox: Callable[[], Toolbox] = lambda: Toolbox([])  # the tools of `agent.tools`, new ones for an episode


@dataclass(frozen=True, slots=True)
class EpisodeSpec:
    """One episode to play. `record` is its trajectory, with the identity filled in and without tokens."""

    qid: str
    problem: Problem
    seed: int
    record: Trajectory


Prompt = EpisodeSpec
"""The former name of `EpisodeSpec`; agents outside this repository may use it."""


class EpisodeEngine(Protocol):
    """The engine, as the agent of one episode asks it."""

    async def generate(
        self, token_ids: list[int], gconfig: GenerationConfig, qid: str = ""
    ) -> BundledGenerationOutputs:
        """Return `gconfig.n` completions of a prompt; equal prompts of a group's episodes share a request.

        An error of the engine, and a request that it cannot answer, end the episode: the agent is cancelled. A
        completion is sampled to its end although the agent no longer waits for it. At most 64 are sampled at the same
        time for one episode; others wait.

        Args:
            token_ids: 1 or more ids that the policy knows.
            gconfig: at most 256 completions, with temperature, top_p and top_k as in the agent's context.
            qid: the name of the request in its answer.
        """
        ...


class AwaitingAgent(Protocol):
    """A player of episodes. Many episodes run at the same time in one thread; an agent keeps no state between them.

    An agent may be an asynchronous context manager: it is entered before its first episode and left after the last.
    With a method `opening(problem, question) -> list[Message]` it tells the messages with which an episode begins if
    the environment asks `question`: problems for which the context has no room are then found beforehand.

    An error of an agent costs only the episode in which it occurs: the record has the status `failed` and the reason.

    - It returns a list of trajectories made from `prompt.record`, with its identity unchanged. `Episode` makes valid
      ones: a turn is a completion, or its beginning, with the tokens, logprobs and versions that the engine gave. All
      other tokens have the logprob 0.0 and the version -1.
      Columns are lists of Python's own numbers (numpy: `.tolist()`). Texts can be encoded as UTF-8. An empty list
      rejects the episode, which is never trained on: where the policy's words decide it, the policy learns to be
      rejected. If there are several trajectories, all but the first get new ids: `<id>:1`, `<id>:2` …
    - It may raise any exception, also CancelledError and SystemExit. Only Ctrl-C and SIGTERM end the rollout. It raises
      `tasks.agents.faults.PolicyError` where the policy's behaviour leaves no way on: that episode is trained on.
    - At `rollout.episode_deadline_s` it is cancelled and has two seconds to clean up; then the rollout goes on. What it
      returns then is recorded with the deadline as the reason.
    - It awaits slow operations, or runs them with `asyncio.to_thread`. If it blocks the event loop for as long as the
      deadline, the process ends and logs where it was (`tasks.rollout.guards`).

    The same rules apply to the environment, whose methods the agent calls.
    """

    async def play(self, prompt: EpisodeSpec, env: Environment, engine: EpisodeEngine) -> list[Trajectory]:
        """Play the episode `prompt` and return its trajectories; an empty list rejects it."""
        ...


Observations = asyncio.Queue[Observation]
Actions = asyncio.Queue[BundledGenerationOutputs]


@runtime_checkable
class QueueAgent(Protocol):
    """An agent with two queues instead of the engine; all other rules are those of `AwaitingAgent`.

    It takes each answer from `act_queue`, where at most 256 may wait. Observations of one qid are answered in their
    order; those of different qids at the same time, and in any order.
    """

    async def collect_trajectory(
        self, prompt: EpisodeSpec, env: Environment, obs_queue: Observations, act_queue: Actions
    ) -> list[Trajectory]:
        """Play the episode `prompt` and return its trajectories; an empty list rejects it."""
        ...


Agent = AwaitingAgent | QueueAgent


def entered(agent: Agent) -> AbstractAsyncContextManager[Any]:
    """Return the context in which an agent plays: its own, if it is a context manager."""
    return agent if isinstance(agent, AbstractAsyncContextManager) else nullcontext()
