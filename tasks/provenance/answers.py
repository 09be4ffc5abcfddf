"""The answers to questions of lineage, as plain records; the commands print them as JSON.

Each answer lists the versions that cannot be read any more and may matter (`unknown`).
"""

from dataclasses import dataclass
from typing import Literal

from tasks.provenance.problem_lookup import FoundProblem

ScoredAs = Literal["right", "wrong", "unscored"]
"""The outcome of a trajectory: right if the score stage found any of its turns right."""


@dataclass(frozen=True, slots=True)
class Unknown:
    """A version that cannot be read any more, although it may matter.

    Example: Unknown(version="runs/demo/trajectories/000003", why="its data were collected by gc")
    """

    version: str
    why: str


@dataclass(frozen=True, slots=True)
class ProblemUse:
    """The use of one problem in the training of one checkpoint.

    Example: ProblemUse(checkpoint="runs/demo/checkpoints/000004", run="demo", iteration=3, how="update",
    data_set="runs/demo/trajectories/000003", episodes=16, trained=16)
    """

    checkpoint: str
    run: str
    iteration: int  # -1 for a warm start
    how: Literal["update", "warm start"]
    data_set: str  # empty for a warm start
    episodes: int  # trajectories of the problem in the data set
    trained: int  # how many of them entered the update

    @property
    def has_trained(self) -> bool:
        """Return whether the checkpoint was trained on the problem; if not, the update left out all its episodes."""
        return self.how == "warm start" or self.trained > 0


@dataclass(frozen=True, slots=True)
class FirstTrained:
    """The first checkpoint of a run that was trained on the problem, or descends from one that was.

    Example: FirstTrained(run="demo", checkpoint="runs/demo/checkpoints/000004", checkpoints=97,
    clean="runs/demo/checkpoints/000003")
    """

    run: str
    checkpoint: str
    checkpoints: int  # how many of the run were trained on it or descend from one that was, the first included
    clean: str  # the newest earlier checkpoint that is certainly free of it and not collected; empty if none is left


@dataclass(frozen=True, slots=True)
class TrainedOn:
    """The checkpoints that were trained on a problem."""

    problem: FoundProblem
    uses: list[ProblemUse]  # by run and iteration
    first: list[FirstTrained]  # by run
    doubtful: list[str]  # other checkpoints whose training may have had the problem, because of `unknown` data sets
    unknown: list[Unknown]


@dataclass(frozen=True, slots=True)
class TrainedProblem:
    """One problem in the training data of a checkpoint.

    Example: TrainedProblem(key="9f3a…", problem_id="12+7", prompt="What is 12 + 7?", solutions=["19"], episodes=48,
    trained=48, updates=3, first="demo/000003", last="demo/000071", first_turn=0.5, any_turn=0.8)
    """

    key: str
    problem_id: str  # one of its ids
    prompt: str
    solutions: list[str]
    episodes: int
    trained: int  # episodes that entered an update
    updates: int  # updates that at least one episode entered
    first: str  # run and iteration in which the problem was first played
    last: str
    first_turn: float | None  # share of the episodes whose first turn is right; None without scores
    any_turn: float | None  # share of the episodes with any right turn; None without scores


@dataclass(frozen=True, slots=True)
class TrainingData:
    """The training data of a checkpoint and of all checkpoints it descends from."""

    checkpoint: str
    lineage: list[str]  # the checkpoint and those it descends from, nearest first
    updates: int  # in `lineage`; the numbers below do not include data sets in `unknown`
    trajectories: int
    trained: int  # trajectories that entered an update
    tokens: int  # sampled tokens of the trajectories that entered an update
    problem_sets: list[str]
    began: list[str]  # where the first checkpoints of `lineage` came from
    problems: list[TrainedProblem]  # the most recently played first
    unknown: list[Unknown]


@dataclass(frozen=True, slots=True)
class AffectedTrajectory:
    """A trajectory whose verdicts depend on the problem's gold answers."""

    trajectory_id: str
    data_set: str
    run: str
    iteration: int
    problem_id: str
    outcome: ScoredAs
    trained: list[str]  # checkpoints whose update it entered


@dataclass(frozen=True, slots=True)
class AffectedEvaluation:
    """An evaluation on a set that contains the problem."""

    version: str
    policy: str
    name: str  # of the set
    problem_set: str


@dataclass(frozen=True, slots=True)
class Affected:
    """Everything that wrong gold answers of a problem affect."""

    problem: FoundProblem
    trajectories: list[AffectedTrajectory]
    problem_sets: list[str]  # all that contain the problem
    evaluations: list[AffectedEvaluation]
    uses: list[ProblemUse]
    first: list[FirstTrained]
    checkpoints: list[str]  # all that were trained on it, or descend from one that was
    aliases: dict[str, str]  # those that point at one of `checkpoints`, with the version
    doubtful: list[str]  # see `TrainedOn`
    unknown: list[Unknown]
