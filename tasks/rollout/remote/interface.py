"""The calls with which the flow drives a worker in another process, and the ways in which a worker fails.

The flow calls methods of `tasks.rollout.remote.worker.Worker`: `play` for a group, `store` for a shard, `score` for the
scores of a shard. Arguments and results are names, numbers and counts: trajectories and weights go through the store.
Several rollouts may be played at the same time, such as a stream and an evaluation; the flow numbers them.
"""

from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, Protocol, TypeVar

from storage.errors import StorageError
from tasks.inference.api import InferenceError

if TYPE_CHECKING:
    from tasks.rollout.remote.worker import Worker

P = ParamSpec("P")
T = TypeVar("T")


class RemoteWorker(Protocol):
    """A worker in another process."""

    name: str
    plays: bool
    """False for a worker that only grades."""

    async def call(
        self, method: "Callable[Concatenate[Worker, P], Coroutine[Any, Any, T]]", *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Call a method of the worker, such as `Worker.play`. Calls may overlap, and overtake each other.

        Raises:
            WorkerLostError: its process is gone.
            WorkerFailedError: the method raised an error.
        """

    def end(self) -> None:
        """End its process, without waiting; it may be lost already."""


class WorkerLostError(RuntimeError):
    """A worker does not answer, or its process is gone."""


class WorkerFailedError(RuntimeError):
    """A worker has ended with an error of its own, which the flow can raise as `cause`."""

    def __init__(self, error: BaseException, trace: str) -> None:
        self.cause = as_own(error, trace)
        super().__init__(str(self.cause))
        self.of_its_host = isinstance(error, InferenceError | StorageError | OSError)
        """True if other workers may go on: a full disk, a GPU that is gone, a server that does not start."""


def as_own(error: BaseException, trace: str, prefix: str = "") -> Exception:
    """Return the error of another process, with its traceback, as one of a kind that the flow knows.

    An error of the operating system keeps its number: the flow has advice about a full disk.
    """
    kinds = (InferenceError, StorageError, ValueError)
    kind = next((known for known in kinds if isinstance(error, known)), RuntimeError)
    known = kind is not RuntimeError or isinstance(error, OSError)
    own: Exception = kind(prefix + (str(error) if known else f"{type(error).__name__}: {error}"))
    if kind is RuntimeError and isinstance(error, OSError) and error.errno:
        own = OSError(error.errno, f"{prefix}{error.strerror}", error.filename)
    own.add_note(f"in another process:\n{trace}")
    return own
