"""The trainer in a process of its own, for runs whose stream plays episodes meanwhile.

Python runs one thread of a process at a time. Measured on two cores, the stream's client made an update 15 and 27 %
longer in one process; in two processes, 1 % shorter and 5 % longer, which is noise.
"""

import multiprocessing
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

from configs import Config
from storage import interrupts
from storage.processes.child import end_with_parent
from storage.records import Score, Trajectory
from storage.versions.checkpoints import Canary
from tasks.child_process import forward_logs, log_again, sendable

_GRACE_S = 10.0
"""Longest wait for the end of a process that has closed its connection."""
_Answer = tuple[Literal["progress", "log", "result", "error"], Any]
_Send = Callable[[_Answer], None]


class TrainerProcess:
    """A `tasks.train.trainer.Trainer` in a new process; a context manager that ends the process.

    Its methods are those of the trainer and raise the same errors; an error that cannot be sent becomes a RuntimeError
    with its text. They also raise RuntimeError if the process ends. The process gets no Ctrl-C: an interrupted method
    ends it.
    """

    def __init__(self, config: Config) -> None:
        self.holds: str | None = None
        """See `Trainer.holds`."""
        context = multiprocessing.get_context("spawn")  # a fork of this process, with its threads, would be unsafe
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, config), name="trainer", daemon=True)
        try:
            with interrupts.starting_processes():
                self._process.start()
        except BaseException:  # an interrupt
            self.close()
            raise
        theirs.close()  # so that `recv` ends when the process does

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """End the process, whatever it does."""
        self.holds = None
        if self._process.pid:
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
            with self._naming_the_end(method):
                self._connection.send((method, arguments))
            while True:
                with self._naming_the_end(method):
                    kind, value = self._receive()
                if kind == "log":
                    log_again(value)
                elif kind == "progress":
                    if progress:
                        progress(value)
                else:
                    break
        except BaseException:  # interrupted or broken: the next call would take an unread answer for its own
            self.close()
            raise
        if kind == "error":
            raise value
        return value

    def _receive(self) -> _Answer:
        answer: _Answer = self._connection.recv()
        return answer

    @contextmanager
    def _naming_the_end(self, method: str) -> Iterator[None]:
        try:
            yield
        except (EOFError, OSError) as error:
            self._process.join(_GRACE_S)
            code = self._process.exitcode
            cause = "something killed it, or memory ran out" if code == -signal.SIGKILL else "its own message is above"
            raise RuntimeError(
                f"the trainer's process ended with exit code {code} during `{method}`: {cause}. "
                "Start the flow again: it continues from the last checkpoint"
            ) from error


def _serve(connection: Connection, config: Config) -> None:
    """Answer calls until the other side closes the connection or ends."""
    end_with_parent()
    lock = threading.Lock()

    def send(answer: _Answer) -> None:
        data = ForkingPickler.dumps(answer)  # it may log, and so call this function
        with lock:
            connection.send_bytes(data)

    forward_logs(lambda log: send(("log", log)))
    from tasks.train.trainer import Trainer

    trainer = Trainer.of(config)
    while True:
        try:
            method, arguments = connection.recv()
        except EOFError:
            return
        if method == "update":
            arguments = (*arguments, lambda text: send(("progress", text)))
        try:
            answer: _Answer = "result", getattr(trainer, method)(*arguments)
        except Exception as error:  # noqa: BLE001 # the other side raises it
            answer = "error", sendable(error, "the trainer's process")
        send(answer)
