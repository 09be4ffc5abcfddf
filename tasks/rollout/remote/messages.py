"""What the flow and a worker in another process tell each other.

The flow gives orders; the worker answers with reports. Both hold names, numbers and counts: trajectories and weights go
through the store. Several rollouts may be played at the same time, such as a stream and an evaluation; the flow numbers
them.

The classes have no slots: Python 3.11 takes twice as long to pickle frozen ones that have some.
"""

import traceback
from dataclasses import dataclass, field

from storage.errors import StorageError
from storage.version_names import PolicyVersion
from storage.versions.manifests import File, Kind
from tasks.inference.api import InferenceError
from tasks.rollout.outcomes import FinishedGroup
from tasks.rollout.plan import RolloutPlan


@dataclass(frozen=True)
class GroupOrder:
    """Play a group with its number, and with the name and the iteration that its plan has (`RolloutPlan`)."""

    number: int
    problem_id: str
    name: str
    iteration: int
    policy: PolicyVersion


@dataclass(frozen=True)
class Destination:
    """The version in which a worker stores trajectories. The flow commits it, with the files of all workers.

    Each worker writes into folders of its own, as another attempt to make the version would. So what a lost worker has
    left does not belong to the version, and `gc` deletes it.
    """

    version: str
    kind: Kind
    iteration: int


@dataclass(frozen=True)
class StoreOrder:
    """Store a finished group of a rollout."""

    rollout: int
    number: int
    destination: Destination


@dataclass(slots=True)
class Orders:
    """What a worker is to do, in the order of the fields.

    Example: Orders(policy=PolicyVersion("runs/demo/checkpoints/000003"), store=[StoreOrder(1, 17, Destination(…))])
    """

    policy: PolicyVersion | None = None
    """Serve this policy, as soon as possible; None: no change."""
    begin: dict[int, RolloutPlan] = field(default_factory=dict)
    """Be ready to play groups of these rollouts."""
    groups: dict[int, list[GroupOrder]] = field(default_factory=dict)
    """Play these groups, by rollout."""
    store: list[StoreOrder] = field(default_factory=list)
    flush: list[Destination] = field(default_factory=list)
    """Write a shard of what should be stored there, though it is not full."""
    end: list[int] = field(default_factory=list)
    """Forget these rollouts; what still runs of them is cancelled."""


@dataclass(frozen=True)
class StoredShard:
    """A shard that a worker has uploaded, with all trajectories of the groups of a rollout with these numbers."""

    rollout: int
    file: File
    numbers: list[int]


@dataclass(frozen=True)
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

    def as_own(self, prefix: str = "") -> Exception:
        """Return an error that the flow can raise; one without a kind that it knows is a RuntimeError."""
        kinds = {"ValueError": ValueError, "StorageError": StorageError, "InferenceError": InferenceError}
        error = kinds.get(self.kind, RuntimeError)(prefix + self.text)
        error.add_note(f"in another process:\n{self.traceback}")
        return error


@dataclass(frozen=True)
class Capacity:
    """How many groups of a rollout a worker could begin now, besides the `got` ones that it has got so far."""

    groups: int
    got: int


@dataclass(frozen=True)
class Report:
    """What a worker has done since its last report.

    Example: Report(PolicyVersion("runs/demo/checkpoints/000003"), {1: Capacity(2, 18)}, [(1, FinishedGroup(17, …))])
    """

    policy: PolicyVersion | None = None  # what it serves; None: nothing yet
    capacities: dict[int, Capacity] = field(default_factory=dict)  # by rollout
    finished: list[tuple[int, FinishedGroup]] = field(default_factory=list)  # with their rollouts
    stored: list[StoredShard] = field(default_factory=list)
    failure: Failure | None = None  # it ends because of this


class WorkerLostError(RuntimeError):
    """A worker does not answer, or its process is gone."""


class WorkerFailedError(RuntimeError):
    """A worker has ended with an error of its own."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.text)
        self.failure = failure
