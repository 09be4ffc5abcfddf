"""Orders to a trainer, which name versions in the store and hold no tensors, and what it makes of them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

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
    """The files of a new policy, which lie in the store, and the metrics of the update."""

    nonce: str  # of the draft that has the files
    files: list[File]
    metrics: dict[str, float]


class OrderedTrainer(Protocol):
    """Carries out orders: `version_trainer.VersionTrainer` in this process, or `tasks.cluster.trainer` in others."""

    def update(self, order: UpdateOrder, progress: Progress) -> Made:
        """Make a policy's files, and call `progress` with a line of text after each part."""

    def distance(self, order: DistanceOrder) -> float | None:
        """Return the mean KL in nats per token between two policies; None if no token is trainable."""
