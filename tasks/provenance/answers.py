"""Answers to questions of lineage, as plain records. What nobody can know any more is a part of each."""

from dataclasses import dataclass
from typing import Literal

from tasks.provenance.asked import FoundProblem

ScoredAs = Literal["right", "wrong", "unscored"]
"""Of a trajectory: right where the score stage found any of its turns right."""


@dataclass(frozen=True, slots=True)
class Unknown:
    """A version that cannot be read any more, although it may matter.

    Example: Unknown(version="runs/demo/trajectories/000003", why="its data were collected by gc")
    """

    version: str
    why: str


@dataclass(frozen=True, slots=True)
class Use:
    """What one checkpoint was trained on of a problem.

    Example: Use(checkpoint="runs/demo/checkpoints/000004", run="demo", iteration=3, how="update",
    data_set="runs/demo/trajectories/000003", episodes=16, trained=16)
    """

    checkpoint: str
    run: str
    iteration: int  # -1 of a warm start
    how: Literal["update", "warm start"]
    data_set: str  # empty of a warm start
    episodes: int  # trajectories of the problem in the data set
    trained: int  # of them those that entered the update

    @property
    def counts(self) -> bool:
        """Whether the checkpoint learnt from the problem; otherwise all of its episodes were left out."""
        return self.how == "warm start" or self.trained > 0


@dataclass(frozen=True, slots=True)
class FirstTrained:
    """From here on all checkpoints of the run go back to one that was trained on the problem.

    Example: FirstTrained(run="demo", checkpoint="runs/demo/checkpoints/000004", checkpoints=97,
    clean="runs/demo/checkpoints/000003")
    """

    run: str
    checkpoint: str
    checkpoints: int  # of the run, it included
    clean: str  # the newest one before, not collected, that surely does not; empty where there is none


@dataclass(frozen=True, slots=True)
class TrainedOn:
    """Which checkpoints were trained on a problem."""

    problem: FoundProblem
    uses: list[Use]  # by run and iteration
    first: list[FirstTrained]  # by run
    doubtful: list[str]  # checkpoints that are not known to go back to one, but that `unknown` may have made so
    unknown: list[Unknown]


@dataclass(frozen=True, slots=True)
class TrainedProblem:
    """What the updates behind a checkpoint had of one problem.

    Example: TrainedProblem(key="9f3a…", problem_id="12+7", prompt="What is 12 + 7?", solutions=["19"], episodes=48,
    trained=48, updates=3, first="demo/000003", last="demo/000071", first_turn=0.5, any_turn=0.8)
    """

    key: str
    problem_id: str  # one of its ids
    prompt: str
    solutions: list[str]
    episodes: int
    trained: int  # of them those that entered an update
    updates: int  # that at least one entered
    first: str  # run and iteration in which it was first played
    last: str
    first_turn: float | None  # share of the episodes whose first turn was right; None without scores
    any_turn: float | None


@dataclass(frozen=True, slots=True)
class TrainingData:
    """What a checkpoint and all those that its weights go back to were trained on."""

    checkpoint: str
    lineage: list[str]  # it and those checkpoints, nearest first
    updates: int  # behind it; episodes of those in `unknown` are in none of the other numbers
    trajectories: int
    trained: int  # of them those that entered an update
    tokens: int  # that these sampled
    problem_sets: list[str]
    began: list[str]  # where the first of `lineage` came from
    problems: list[TrainedProblem]  # those that were last played first
    unknown: list[Unknown]


@dataclass(frozen=True, slots=True)
class AffectedTrajectory:
    """A trajectory whose verdicts go by the problem's gold answers."""

    trajectory_id: str
    data_set: str
    run: str
    iteration: int
    problem_id: str
    outcome: ScoredAs
    trained: list[str]  # checkpoints whose update it entered


@dataclass(frozen=True, slots=True)
class AffectedEvaluation:
    """An evaluation on a set that holds the problem."""

    version: str
    policy: str
    name: str  # of the set
    problem_set: str


@dataclass(frozen=True, slots=True)
class Affected:
    """What falls with a problem's gold answers."""

    problem: FoundProblem
    trajectories: list[AffectedTrajectory]
    problem_sets: list[str]  # all that hold the problem
    evaluations: list[AffectedEvaluation]
    uses: list[Use]
    first: list[FirstTrained]
    checkpoints: list[str]  # all that were trained on it, or go back to one that was
    aliases: dict[str, str]  # that point at one of these
    doubtful: list[str]  # see `TrainedOn`
    unknown: list[Unknown]
