"""Orders to a trainer, and their results. Both name versions and files in the store; neither holds tensors."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from storage.layout import SELECTION
from storage.objects.store import Store
from storage.version_names import AnnotationsVersion, PolicyVersion, ScoresVersion, TrajectoriesVersion, select
from storage.versions.checkpoints import Checkpoint
from storage.versions.drafts import Draft
from storage.versions.fetch import fetch
from storage.versions.manifests import File, read

Progress = Callable[[str], None]


class RanksLostError(RuntimeError):
    """A rank of the trainer was killed, hung, or became unreachable."""


@dataclass(frozen=True, slots=True)
class Part:
    """The rows of a data set that an update trains on: all, or some.

    Example: Part("runs/demo/trajectories/000003", "runs/demo/scores/000003/5c0e", {"part-00000.parquet": [0, 1, 5]},
    ["part-00000.parquet"])
    """

    trajectories: TrajectoriesVersion
    scores: ScoresVersion
    rows: Mapping[str, Sequence[int]] | None = None  # places of rows in each file; None: all rows
    score_files: Sequence[str] = ()  # the files with their scores
    teacher: AnnotationsVersion | None = None  # what a served teacher said about the trajectories


@dataclass(frozen=True, slots=True)
class UpdateOrder:
    """One update: which policy, and on which data."""

    version: PolicyVersion  # to be made
    policy: PolicyVersion
    parts: Sequence[Part]

    @property
    def selects(self) -> bool:
        """True if it trains on stored data that were chosen (`flows.fit`), not on what the policy has just played."""
        return any(part.rows is not None for part in self.parts)


@dataclass(frozen=True, slots=True)
class DistanceOrder:
    """The distance of two policies at the tokens of trajectories."""

    policy: PolicyVersion
    other: PolicyVersion
    trajectories: TrajectoriesVersion
    scores: ScoresVersion


@dataclass(frozen=True, slots=True)
class Updated:
    """The result of an update, whose policy is in memory."""

    metrics: dict[str, Any]
    policy: Checkpoint | None  # for an engine here, until the update after the next; None: it reads the store


@dataclass(frozen=True, slots=True)
class Made:
    """The files of a new policy, which are in the store."""

    nonce: str  # of the draft that has the files
    files: list[File]


class OrderedTrainer(Protocol):
    """Carries out orders: `version_trainer.VersionTrainer` in this process, or `tasks.cluster.trainer` in others."""

    def update(self, order: UpdateOrder, progress: Progress) -> Updated:
        """Make a policy, and call `progress` with a line of text after each part."""

    def write(self) -> Made:
        """Write the files of the policy that the last update made; any thread may, but the next update must wait."""

    def distance(self, order: DistanceOrder) -> float | None:
        """Return the mean KL in nats per token between two policies; None if no token is trainable."""


def add_selection(draft: Draft, order: UpdateOrder) -> None:
    """Add the rows that an order chose to the checkpoint's draft."""
    path = draft.scratch / SELECTION
    path.write_text(json.dumps([asdict(part) for part in order.parts]))
    draft.add(path, SELECTION)


def read_order(store: Store, version: PolicyVersion, cache: Path) -> UpdateOrder:
    """Return the order that made a checkpoint, from its manifest.

    Raises:
        ValueError: no update made it.
        StorageError: its manifest or selection cannot be read.
    """
    manifest = read(store, version)
    parents = manifest.parent_names
    policies, data_sets = select(PolicyVersion, parents), select(TrajectoriesVersion, parents)
    if not data_sets or not policies:
        raise ValueError(f"{version} was not made by an update: it is where its run begins")
    if SELECTION in {file.name for file in manifest.files}:
        stored = json.loads(fetch(store, manifest, SELECTION, cache).read_text())
        named = ((TrajectoriesVersion(each["trajectories"]), ScoresVersion(each["scores"]), each) for each in stored)
        parts = [Part(data_set, scores, each["rows"], each["score_files"]) for data_set, scores, each in named]
    else:
        teacher = next(iter(select(AnnotationsVersion, parents)), None)
        parts = [Part(data_sets[0], select(ScoresVersion, parents)[0], teacher=teacher)]
    return UpdateOrder(version, policies[0], parts)
