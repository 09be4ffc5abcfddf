"""Which episodes an iteration plays, and what their records say before they begin."""

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from configs.schema import Config
from storage.checkpoints import Checkpoint
from storage.records import Problem, Trajectory
from tasks.agents.interface import Prompt
from tasks.inference.api import GenerationConfig
from tasks.seeds import derive


@dataclass(frozen=True, slots=True)
class Group:
    """The episodes of one problem."""

    problem: Problem
    seed: int  # of the first turn; sample i uses seed + i
    prompts: list[Prompt]


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything that the records of one rollout have in common.

    Args:
        name: prefix of the trajectory ids, such as `demo/000003` or `demo/evaluation/000003`.
        config: the resolved configuration.
        iteration: of the run.
        policy: the checkpoint that plays.
        problem_set: version of the problem set.
        gconfig: sampling parameters.
        group_size: episodes of each problem that are played.
        selecting: whether `tasks.rollouts.selection` chooses among them; not in an evaluation.
    """

    name: str
    config: Config
    iteration: int
    policy: Checkpoint
    problem_set: str
    gconfig: GenerationConfig
    group_size: int
    selecting: bool = False

    def groups(self, problems: Sequence[Problem]) -> Iterator[Group]:
        """One group for each problem."""
        for problem in problems:
            place = (self.config.run.seed, self.name, problem.problem_id)
            seeds = [derive(*place, sample) for sample in range(self.group_size)]
            prompts = [
                Prompt(f"{problem.problem_id}/{sample}", problem, seed, self._record(problem, sample, seed))
                for sample, seed in enumerate(seeds)
            ]
            yield Group(problem, derive(*place), prompts)

    def _record(self, problem: Problem, sample: int, seed: int) -> Trajectory:
        agent, environment = self.config.agent, self.config.environment
        sampling = {"temperature": self.gconfig.temperature, "top_p": self.gconfig.top_p, "top_k": self.gconfig.top_k}
        return Trajectory(
            trajectory_id=f"{self.name}/{problem.problem_id}/{sample}",
            run=self.config.run.name,
            iteration=self.iteration,
            problem_id=problem.problem_id,
            sample=sample,
            status="completed",
            reason="",
            token_ids=[],
            action_mask=[],
            logprobs=[],
            versions=[],
            turns=[],
            turn_discount=1.0,
            prompt=problem.prompt,
            solutions=problem.solutions,
            problem_set=self.problem_set,
            policy=self.policy.version,
            policy_version=self.policy.number,
            sampling=json.dumps(sampling | {"max_new_tokens": self.gconfig.max_new_tokens}),
            agent=agent.type,
            agent_args=json.dumps(agent.args),
            environment=environment.type,
            environment_args=json.dumps(environment.args),
            seed=seed,
            started_at=0.0,
            latency_s=0.0,
        )


def draw(problems: Sequence[Problem], count: int, iteration: int, seed: int) -> list[Problem]:
    """`count` problems for an iteration: a seeded order that passes through all before any repeats.

    Each pass (epoch) has an order of its own; an iteration may span two of them, and where it does
    the same problem never stands in it twice unless `count` is more than there are.
    """
    if not problems:
        raise ValueError("the training problem set is empty")
    drawn: dict[str, Problem] = {}
    position = iteration * count
    while len(drawn) < min(count, len(problems)):
        epoch, index = divmod(position, len(problems))
        problem = problems[_order(len(problems), seed, epoch)[index]]
        drawn.setdefault(problem.problem_id, problem)
        position += 1
    return list(drawn.values())


def spares(problems: Sequence[Problem], drawn: Sequence[Problem], iteration: int, seed: int) -> list[Problem]:
    """All other problems in a seeded order of this iteration: what takes the place of rejected groups."""
    taken = {problem.problem_id for problem in drawn}
    others = [problem for problem in problems if problem.problem_id not in taken]
    random.Random(derive(seed, "spares", iteration)).shuffle(others)
    return others


def _order(size: int, seed: int, epoch: int) -> list[int]:
    order = list(range(size))
    random.Random(derive(seed, "problem order", epoch)).shuffle(order)
    return order
