"""The plan of a rollout: the problems that it draws, its episodes, and their records before play."""

import functools
import itertools
import json
import math
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import numpy as np

from configs.schema import Config
from storage.records import Problem, Trajectory
from storage.version_names import PolicyVersion
from tasks.agents.interface import EpisodeSpec
from tasks.inference.api import GenerationConfig, derive
from tasks.problems.mixture import turns_of

LONGEST_TOGETHER = 64
"""Longest completion, in tokens, that shares a request: a request ends with its longest completion."""


Weights = Sequence[float] | None
"""The chances of problems to be drawn, above 0; None: equal ones."""


@dataclass(frozen=True)
class Group:
    """The episodes of one problem; in a stream, `number` is its position among all groups that the run draws."""

    plan: "RolloutPlan"
    problem: Problem
    number: int = 0

    @functools.cached_property
    def prompts(self) -> list[EpisodeSpec]:
        """The episodes."""
        plan, problem_id = self.plan, self.problem.problem_id
        seeds = [derive(plan.config.run.seed, plan.name, problem_id, sample) for sample in range(plan.group_size)]
        return [
            EpisodeSpec(f"{problem_id}/{sample}", self.problem, seed, plan.record(self.problem, sample, seed))
            for sample, seed in enumerate(seeds)
        ]


@dataclass(frozen=True, slots=True)
class RolloutPlan:
    """Everything that the records of one rollout share.

    Args:
        name: prefix of the trajectory ids, such as `demo/000003` or `demo/evaluation/000003`.
        config: the resolved configuration.
        iteration: number of the run's iteration.
        policy: the checkpoint that plays.
        problem_set: version of the problem set.
        gconfig: sampling parameters.
        group_size: episodes to play for each problem.
        selecting: whether `tasks.rollout.outcomes` rejects episodes; false in an evaluation.
    """

    name: str
    config: Config
    iteration: int
    policy: PolicyVersion
    problem_set: str
    gconfig: GenerationConfig
    group_size: int
    selecting: bool = False

    @property
    def together(self) -> int:
        """Number of a group's episodes that begin at the same time: all if their turns are short and share requests."""
        return self.group_size if self.gconfig.max_new_tokens <= LONGEST_TOGETHER else 1

    def group(self, problem: Problem, number: int = 0) -> Group:
        return Group(self, problem, number)

    def record(self, problem: Problem, sample: int, seed: int) -> Trajectory:
        """Return the record of an episode before it is played."""
        played = self.config.of_source(problem.source)
        agent, environment = played.agent, played.environment
        sampling = {name: getattr(self.gconfig, name) for name in ("temperature", "top_p", "top_k", "max_new_tokens")}
        columns: dict[str, Any] = {name: [] for name in ("token_ids", "action_mask", "logprobs", "versions", "turns")}
        return Trajectory(
            trajectory_id=f"{self.name}/{problem.problem_id}/{sample}",
            run=self.config.run.name,
            iteration=self.iteration,
            problem_id=problem.problem_id,
            sample=sample,
            status="completed",
            reason="",
            **columns,
            turn_discount=1.0,
            prompt=problem.prompt,
            solutions=problem.solutions,
            problem_set=self.problem_set,
            policy=self.policy,
            policy_version=self.policy.number,
            sampling=json.dumps(sampling),
            agent=agent.type,
            agent_args=json.dumps(agent.args),
            environment=environment.type,
            environment_args=json.dumps(environment.args),
            seed=seed,
            started_at=0.0,
            latency_s=0.0,
            source=problem.source,
            metadata=problem.metadata,
        )


def drawable(problems: Sequence[Problem], weights: Mapping[str, float]) -> tuple[Sequence[Problem], Weights]:
    """Leave out problems of weight 0; return the others and their weights, or no weights if all are equal.

    Args:
        problems: the training problems.
        weights: 0 or more for each problem id.

    Raises:
        ValueError: all problems have weight 0.
    """
    left = [problem for problem in problems if weights[problem.problem_id] > 0]
    if problems and not left:
        raise ValueError("all problems have weight 0: the curriculum leaves nothing to draw (problems.sampling)")
    chances = [weights[problem.problem_id] for problem in left]
    return left, chances if len(set(chances)) > 1 else None


def draw(problems: Sequence[Problem], count: int, iteration: int, seed: int, weights: Weights = None) -> list[Problem]:
    """Draw `count` problems for an iteration: the first ones of `in_order`, or all if there are not enough."""
    return list(itertools.islice(in_order(problems, count, iteration, seed, weights), count))


@dataclass(frozen=True, slots=True)
class Pool:
    """What a run draws from: its problems or, in a mixture, those of one member.

    Args:
        problems: one or more.
        weights: see `drawable`.
        playable: ids of the problems that may be played; others take part in the draw and are replaced.
        name: of the member; empty: there is no mixture.
        share: the member's weight.
    """

    problems: Sequence[Problem]
    weights: Weights
    playable: Set[str]
    name: str = ""
    share: float = 1.0

    def left_of(self, order: Iterable[Problem]) -> Iterator[Problem]:
        """Leave out the problems that may not be played."""
        return (problem for problem in order if problem.problem_id in self.playable)


def draw_from(pools: Sequence[Pool], count: int, iteration: int, seed: int) -> tuple[list[Problem], Iterator[Problem]]:
    """Draw `count` problems for an iteration, and the spare ones, pool by pool.

    In a mixture the members have their turns (`Turns`), and each goes through its problems in an order that does not
    depend on the others. One that has too few for its turns in an iteration leaves out the rest.
    """
    turns, start = turns_of(tuple(pool.share for pool in pools)).until((iteration + 1) * count), iteration * count
    orders = list[Iterator[Problem]]()
    for number, pool in enumerate(pools):
        before, now = turns.count(number, 0, start), turns.count(number, start, start + count)
        own_seed = derive(seed, "member", pool.name) if pool.name else seed
        orders.append(pool.left_of(in_order(pool.problems, now, iteration, own_seed, pool.weights, before)))
    drawn = (next(orders[member], None) for member in turns[start : start + count])
    return [problem for problem in drawn if problem], itertools.chain(*orders)


def in_order(
    problems: Sequence[Problem], count: int, iteration: int, seed: int, weights: Weights = None, done: int | None = None
) -> Iterator[Problem]:
    """Yield all problems in a seeded order: the `count` of an iteration, then the spare ones, for rejected groups.

    The draws go through all problems before one repeats. Each pass through the problems (epoch) has its own order. An
    iteration may span two epochs; it never contains a problem twice.

    With `weights` (see `drawable`), each iteration draws on its own, without replacement, with chances proportional to
    the remaining weights. Efraimidis & Spirakis (2006), "Weighted random sampling with a reservoir", sort by u^(1/w),
    descending. Sorting by -log(u) / w, ascending, gives the same order and does not underflow.

    Args:
        problems: to draw from.
        count: draws of the iteration.
        iteration: its number.
        seed: of the run.
        weights: None: equal ones.
        done: draws of all earlier iterations together; None: `count` of each.

    Raises:
        ValueError: there are no problems.
    """
    if not problems:
        raise ValueError("the training problem set is empty")
    if weights is not None:
        generator = random.Random(derive(seed, "curriculum", iteration))
        keys = [-math.log(1.0 - generator.random()) / weight for weight in weights]
        yield from (problems[index] for index in np.argsort(keys, kind="stable").tolist())
        return
    drawn: dict[str, Problem] = {}
    first, index = divmod(iteration * count if done is None else done, len(problems))
    positions = (position for epoch in itertools.count(first) for position in _order(len(problems), seed, epoch))
    places = itertools.islice(positions, index, None)
    while len(drawn) < min(count, len(problems)):
        problem = problems[next(places)]
        drawn.setdefault(problem.problem_id, problem)
    yield from drawn.values()
    others = [problem for problem in problems if problem.problem_id not in drawn]
    random.Random(derive(seed, "spares", iteration)).shuffle(others)
    yield from others


@functools.lru_cache(maxsize=16)  # of each member, consecutive iterations are in one epoch or in two
def _order(size: int, seed: int, epoch: int) -> Sequence[int]:
    order = list(range(size))
    random.Random(derive(seed, "problem order", epoch)).shuffle(order)
    return order
