"""What the flow and a worker in another process tell each other.

The flow gives orders; the worker answers with reports. Both hold names, numbers and counts: trajectories and weights go
through the store.
"""

import traceback
from dataclasses import dataclass, field

from storage.errors import StorageError
from storage.version_names import PolicyVersion
from storage.versions.manifests import File, Kind
from tasks.inference.api import InferenceError
from tasks.rollout.data_set import Outcome
from tasks.rollout.plan import RolloutPlan


@dataclass(frozen=True, slots=True)
class GroupOrder:
    """Play a group with its number, and with the name and the iteration that its plan has (`RolloutPlan`)."""

    number: int
    problem_id: str
    name: str
    iteration: int
    policy: PolicyVersion


@dataclass(frozen=True, slots=True)
class Place:
    """A draft in which a worker stores trajectories: the flow's, which alone commits it."""

    version: str
    kind: Kind
    nonce: str
    iteration: int


@dataclass(slots=True)
class Orders:
    """What a worker is to do; empty fields change nothing.

    Example: Orders(policy=PolicyVersion("runs/demo/checkpoints/000003"), store=[(17, Place(…))], flush=[Place(…)])
    """

    end: bool = False
    """Play nothing more of the last rollout."""
    plan: RolloutPlan | None = None
    """Play groups of this rollout from now on, instead of the one before."""
    play: int = 0
    """The number of the rollout with that plan, which reports repeat."""
    policy: PolicyVersion | None = None
    """Serve this policy, as soon as possible."""
    groups: list[GroupOrder] = field(default_factory=list)
    """Play these groups."""
    store: list[tuple[int, Place]] = field(default_factory=list)
    """Store the finished group with this number there."""
    flush: list[Place] = field(default_factory=list)
    """Write a shard of what should be stored there, though it is not full."""

    def add(self, later: "Orders") -> None:
        """Add later orders; the end of a rollout, or another one, cancels what was ordered for the one before."""
        if later.end or later.plan:
            self.groups, self.store, self.flush = [], [], []
            self.end, self.plan, self.play = later.end or self.end, later.plan, later.play
        self.policy = later.policy or self.policy
        self.groups += later.groups
        self.store += later.store
        self.flush += later.flush

    def __bool__(self) -> bool:
        return bool(self.end or self.plan or self.policy or self.groups or self.store or self.flush)


@dataclass(frozen=True, slots=True)
class StoredShard:
    """A shard that a worker has uploaded, with all trajectories of the groups with these numbers."""

    version: str
    file: File
    numbers: list[int]


@dataclass(frozen=True, slots=True)
class Failure:
    """An error of a worker.

    `kind` is the first of InferenceError, StorageError, OSError, ValueError, RuntimeError that fits.
    """

    kind: str
    text: str
    traceback: str

    @classmethod
    def of(cls, error: BaseException) -> "Failure":
        kinds = (InferenceError, StorageError, OSError, ValueError)
        kind = next((known.__name__ for known in kinds if isinstance(error, known)), "RuntimeError")
        text = str(error) if kind != "RuntimeError" else f"{type(error).__name__}: {error}"
        return cls(kind, text, "".join(traceback.format_exception(error)))

    @property
    def of_its_host(self) -> bool:
        """True if others may go on: a full disk, a GPU that is gone, a server that does not start."""
        return self.kind in ("InferenceError", "StorageError", "OSError")


@dataclass(frozen=True, slots=True)
class Report:
    """What a worker has done since its last report.

    Example: Report(policy=PolicyVersion("runs/demo/checkpoints/000003"), room=2, finished=[Outcome(17, …)])
    """

    policy: PolicyVersion | None = None  # what it serves; None: nothing yet
    room: int = 0  # groups that it could begin now, besides those that it has got
    play: int = 0  # the number of the rollout in which groups have finished
    got: int = 0  # groups of that rollout that it has got so far
    finished: list[Outcome] = field(default_factory=list)
    stored: list[StoredShard] = field(default_factory=list)
    failure: Failure | None = None  # it ended because of this
