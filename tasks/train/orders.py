"""Orders to a trainer, and their results. Both name versions and files in the store; neither holds tensors."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from storage.version_names import PolicyVersion, ScoresVersion, TrajectoriesVersion
from storage.versions.manifests import File

Progress = Callable[[str], None]


class RanksLostError(RuntimeError):
    """A rank of the trainer was killed, hung, or became unreachable."""


@dataclass(frozen=True, slots=True)
class UpdateOrder:
    """One update: which policy, and on which data."""

    version: PolicyVersion  # to be made
    policy: PolicyVersion
    trajectories: TrajectoriesVersion
    scores: ScoresVersion


@dataclass(frozen=True, slots=True)
class DistanceOrder:
    """The distance of two policies at the tokens of trajectories."""

    policy: PolicyVersion
    other: PolicyVersion
    trajectories: TrajectoriesVersion
    scores: ScoresVersion


@dataclass(frozen=True, slots=True)
class Made:
    """The result of an update: the files of the new policy, which are in the store, and the metrics."""

    nonce: str  # of the draft that has the files
    files: list[File]
    metrics: dict[str, Any]


class OrderedTrainer(Protocol):
    """Carries out orders: `version_trainer.VersionTrainer` in this process, or `tasks.cluster.trainer` in others."""

    def update(self, order: UpdateOrder, progress: Progress) -> Made:
        """Make a policy's files, and call `progress` with a line of text after each part."""

    def distance(self, order: DistanceOrder) -> float | None:
        """Return the mean KL in nats per token between two policies; None if no token is trainable."""
