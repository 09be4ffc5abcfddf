"""The trainer in a process of its own, for runs whose stream plays episodes meanwhile.

Python runs one thread of a process at a time. In one process, the stream's client made an update take 15 to 27 % longer
(measured on two cores); in two processes, 1 to 4 %.
"""

import logging
import multiprocessing
import pickle
import traceback
from collections.abc import Callable, Iterable, Sequence
from logging.handlers import QueueHandler
from multiprocessing.connection import Connection
from pathlib import Path
from queue import SimpleQueue
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self, TypeAlias

from configs import Config
from storage import interrupts
from storage.records import Score, Trajectory
from storage.versions.checkpoints import Canary
from tasks.limits import end_with_parent

if TYPE_CHECKING:
    from tasks.train.trainer import Trainer

    AnyTrainer: TypeAlias = "Trainer | TrainerProcess"

_Answer = tuple[Literal["progress", "log", "result", "error"], Any]


class TrainerProcess:
    """A `tasks.train.trainer.Trainer` in a new process; a context manager that ends the process.

    Its methods are those of the trainer, and raise the same errors. They also raise RuntimeError if the process ends.
    It gets no Ctrl-C: an interrupt of a method ends it.
    """

    def __init__(self, config: Config) -> None:
        self.holds: str | None = None
        """See `Trainer.holds`."""
        context = multiprocessing.get_context("spawn")  # a fork of this process, with its threads, would be unsafe
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, config), name="trainer", daemon=True)
        with interrupts.starting_processes():
            self._process.start()
        theirs.close()  # so that `recv` ends when the process does

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """End the process, whatever it does."""
        self._process.kill()
        self._process.join()
        self._connection.close()

    def load(self, model: Path, state: Path | None, seed: int, first: Path | None = None) -> None:
        """See `Trainer.load`."""
        self._call("load", model, state, seed, first)

    def save(self, model: Path, state: Path) -> None:
        """See `Trainer.save`."""
        self._call("save", model, state)

    def canary(self) -> Canary:
        """See `Trainer.canary`."""
        canary: Canary = self._call("canary")
        return canary

    def update(
        self,
        trajectories: Sequence[Trajectory],
        scores: Iterable[Score],
        version: int,
        progress: Callable[[str], None] | None = None,
    ) -> dict[str, float]:
        """See `Trainer.update`."""
        self.holds = None
        metrics: dict[str, float] = self._call("update", trajectories, list(scores), version, progress=progress)
        return metrics

    def distance(self, other: Path, trajectories: Iterable[Trajectory], scores: Iterable[Score]) -> float | None:
        """See `Trainer.distance`."""
        distance: float | None = self._call("distance", other, list(trajectories), list(scores))
        return distance

    def _call(self, method: str, *arguments: Any, progress: Callable[[str], None] | None = None) -> Any:
        try:
            self._connection.send((method, arguments))
            kind, value = self._receive()
            while kind in {"progress", "log"}:
                if kind == "log":
                    logging.getLogger(value.name).handle(value)
                elif progress:
                    progress(value)
                kind, value = self._receive()
        except (EOFError, ConnectionError) as error:
            self._process.join()
            raise RuntimeError(
                f"the trainer's process ended with exit code {self._process.exitcode} during `{method}`: if it was "
                "killed (-9), memory may have run out. Start the flow again: it continues from the last checkpoint"
            ) from error
        except BaseException:  # an interrupt: nobody would read the answer
            self.close()
            raise
        if kind == "error":
            raise value
        return value

    def _receive(self) -> _Answer:
        answer: _Answer = self._connection.recv()
        return answer


def _serve(connection: Connection, config: Config) -> None:
    """Answer calls until the other side closes the connection or ends."""
    end_with_parent()
    logging.getLogger().addHandler(_Forwarder(connection))
    from tasks.train.trainer import Trainer

    trainer = Trainer.of(config)
    while True:
        try:
            method, arguments = connection.recv()
        except EOFError:
            return
        if method == "update":
            arguments = (*arguments, lambda text: connection.send(("progress", text)))
        try:
            answer: _Answer = "result", getattr(trainer, method)(*arguments)
        except Exception as error:  # noqa: BLE001 # the other side raises it
            answer = "error", _sendable(error)
        connection.send(answer)


def _sendable(error: Exception) -> Exception:
    """Return the error with its traceback as a note; only its text if it is of a type that cannot be sent."""
    try:
        pickle.dumps(error)
    except (pickle.PicklingError, TypeError, AttributeError):
        error = RuntimeError("".join(traceback.format_exception_only(error)))
    error.add_note(f"in the trainer's process:\n{traceback.format_exc()}")
    return error


class _Forwarder(QueueHandler):
    """Sends what is logged through the connection, so that the flow's process logs it."""

    def __init__(self, connection: Connection) -> None:
        super().__init__(SimpleQueue())
        self._connection = connection

    def enqueue(self, record: logging.LogRecord) -> None:
        self._connection.send(("log", record))
