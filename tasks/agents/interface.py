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
class EpisodeSpec:
    """One episode to be played. `record` is its trajectory with identity filled in and no tokens yet."""

    qid: str
    problem: Problem
    seed: int
    record: Trajectory


Prompt = EpisodeSpec
"""Its former name, which agents outside of this repository may use."""


class Agent(Protocol):
    """Plays one episode; holds no state between episodes, of which many run at a time, all in one thread.

    What one agent does wrong costs its own episode: it is kept as `failed` with the reason.

    - It puts `(qid, token_ids, gconfig)` on `obs_queue`: ids that the policy knows in a list, and at most 256
      completions at once. Each answer is to be taken from `act_queue`; 256 may wait there.
    - It returns a list of trajectories made of `prompt.record`, whose identity stays. `Episode` makes them right: a
      turn is a completion, or its beginning, with tokens, logprobs and versions as the engine gave them; all other
      tokens have 0.0 and -1.
      Columns are lists of Python's own numbers (numpy: `.tolist()`), texts can be encoded as UTF-8. An empty list
      rejects the episode. Of several, all but the first get ids of their own: `<id>:1`, `<id>:2` …
    - It raises what it likes, CancelledError and SystemExit, too. Ctrl-C and SIGTERM alone end the rollout.
    - At `rollout.episode_deadline_s` it is cancelled, and has two seconds to clean up; then nobody waits for it.
    - It awaits what takes long, or runs it by `asyncio.to_thread`. What holds up the event loop until the deadline is
      ended by an exception (`tasks.rollout.watch`).

    The same holds for its environment, whose methods it calls.
    """

    async def collect_trajectory(
        self,
        prompt: EpisodeSpec,
        env: Environment,
        obs_queue: "asyncio.Queue[Observation]",
        act_queue: "asyncio.Queue[BundledGenerationOutputs]",
    ) -> list[Trajectory]:
        """The episode's trajectories; an empty list rejects it."""
        ...
