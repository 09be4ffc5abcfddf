"""A scripted engine and the other parts of an episode, for tests of agents and the collector."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise, repeat

from configs import Config, load
from configs.rollout import Rollout
from storage.records import TRAJECTORY_SCHEMA, Problem, Trajectory, to_table
from storage.version_names import PolicyVersion
from tasks.agents.chat import Chat
from tasks.agents.interface import Agent, AgentContext, entered
from tasks.environments.interface import Environment, EnvironmentContext
from tasks.environments.math_verify import MathVerifyEnvironment
from tasks.inference.api import BundledGenerationOutputs, Completion, GenerationConfig, Observation
from tasks.rollout.collector import collect
from tasks.rollout.plan import Group, RolloutPlan
from tasks.rollout.play import run_loop
from tasks.rollout.turns import Player
from tasks.score.verifier import Verifier

PROBLEMS = [Problem("1+2", "What is 1 + 2?", ["3"]), Problem("2+1", "What is 2 + 1?", ["3"])]
PROBLEM, RIGHT, WRONG = PROBLEMS[0], r"\boxed{3}", r"\boxed{4}"
GCONFIG = GenerationConfig(max_new_tokens=8)


@dataclass
class ScriptedEngine:
    """An engine that answers each request with `reply(turn, sample)`, after a delay, and records requests."""

    chat: Chat
    reply: Callable[[int, int], str | Exception | Completion]
    replicas: int = 1
    delays: Iterator[float] = field(default_factory=lambda: repeat(0.0))
    requests: list[tuple[list[int], GenerationConfig, int, int]] = field(default_factory=list)

    async def generate(
        self, token_ids: list[int], gconfig: GenerationConfig, seed: int, replica: int
    ) -> list[Completion]:
        self.requests.append((token_ids, gconfig, seed, replica))
        header = self.chat.encode("<|im_start|>assistant")
        turn = sum(pair == tuple(header) for pair in pairwise(token_ids)) - 1
        replies = [self.reply(turn, sample) for sample in range(gconfig.n)]
        await asyncio.sleep(next(self.delays))
        return [self._completion(reply) for reply in replies]

    def _completion(self, reply: str | Exception | Completion) -> Completion:
        if isinstance(reply, Exception):
            raise reply
        if isinstance(reply, Completion):
            return reply
        ids = self.chat.encode(reply + "<|im_end|>")
        return Completion(ids, [-0.5] * len(ids), [3] * len(ids), "stop")


def make_plan(group_size: int = 4, config: Config | None = None) -> RolloutPlan:
    policy = PolicyVersion("runs/r/checkpoints/000003")
    return RolloutPlan("r/000003", config or load("smoke"), 3, policy, "problems/x", GCONFIG, group_size)


async def all_groups(plan: RolloutPlan, problems: Iterable[Problem]) -> AsyncIterator[Group]:
    """Yield one group for each problem."""
    for problem in problems:
        yield plan.group(problem)


def play(
    engine: ScriptedEngine,
    agent: Agent,
    verifier: Verifier,
    problems: list[Problem] | None = None,
    group_size: int = 4,
    settings: Rollout | None = None,
    environment: Callable[[EnvironmentContext], Environment] = MathVerifyEnvironment,
    together: int | None = None,
    private: Iterable[str] = (),
) -> list[Trajectory]:
    """Play the problems, the episodes of a group `together` (None: all); return their trajectories, sorted by id.

    They can be stored. Agents do not see the metadata with `private` keys.
    """
    played: list[Trajectory] = []

    make_environment, unseen = partial(environment, EnvironmentContext(verifier)), frozenset(private)
    player = Player(engine, agent, make_environment, engine.chat, settings or Rollout(), GCONFIG, unseen)
    groups = all_groups(make_plan(group_size), problems or [PROBLEM])

    async def play_all() -> None:
        async with entered(agent):
            await collect(player, groups, together or group_size, lambda _, ended: played.extend(ended))

    run_loop(play_all())
    to_table(played, TRAJECTORY_SCHEMA)
    return sorted(played, key=lambda trajectory: trajectory.trajectory_id)


class ByQueues:
    """The engine for an agent with queues that plays as one without."""

    def __init__(self, observations: "asyncio.Queue[Observation]", actions: "asyncio.Queue[BundledGenerationOutputs]"):
        self._observations, self._actions = observations, actions

    async def generate(
        self, token_ids: list[int], gconfig: GenerationConfig, qid: str = "q"
    ) -> BundledGenerationOutputs:
        await self._observations.put((qid, token_ids, gconfig))
        return await self._actions.get()


def context(chat: Chat, max_model_len: int = 128) -> AgentContext:
    return AgentContext(chat, GCONFIG, max_model_len)


def timeless(row: Trajectory) -> Trajectory:
    """Return a row without the times of the clock."""
    turns = [replace(turn, latency_s=0.0) for turn in row.turns]
    return replace(row, turns=turns, latency_s=0.0, started_at=0.0)
