"""The flow's side of a trainer of many ranks: it starts them, sends orders, and starts them again if one is lost."""

import logging
import shutil
import time
from collections.abc import Callable
from dataclasses import asdict
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from configs import Config
from storage import interrupts
from storage.errors import StorageError
from storage.versions.drafts import new_nonce
from storage.versions.manifests import File
from tasks.train.orders import DistanceOrder, Made, Progress, UpdateOrder
from tasks.train.ranks.host import LOOK_S, HostRanks, was_killed
from tasks.train.ranks.messages import accept, listen, receive, send

_END_S = 5.0
"""Longest wait for the end of torchrun, which then says which rank was lost first."""
_POLL_S = 0.2
Result = TypeVar("Result")
logger = logging.getLogger(__name__)


class RanksLostError(RuntimeError):
    """A rank was killed, hung, or became unreachable; the ranks have ended."""


class Ranks:
    """Trains with the ranks that `trainer` and `ppo.parallel` describe; a context manager that ends them.

    They start with the first order, or at once with several hosts. Each order names versions in the store, so after a
    loss it can be sent again; the files of each attempt to carry it out have a folder of their own.

    Args:
        config: the run's configuration.
        logs: a folder for the logs of this host's ranks.
    """

    def __init__(self, config: Config, logs: Path) -> None:
        self._config, self._logs = config, logs
        self._restarts = 0
        self._host: HostRanks | None = None
        self._connection: Connection | None = None

    def __enter__(self) -> Self:
        shutil.rmtree(self._logs, ignore_errors=True)  # of an earlier flow run
        if self._config.trainer.hosts > 1:  # the others are waiting, and not for as long as a rollout may take
            self._with_restarts(lambda: self._start(logger.info), logger.info)
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        try:
            if value is None:
                self._end()
        finally:
            self.close()

    def close(self) -> None:
        """End all ranks, whatever they do."""
        if self._connection:
            self._connection.close()
        if self._host:
            self._host.close()
        self._host = self._connection = None

    def _end(self) -> None:
        """Let all ranks end by themselves, so that those of other hosts know that the flow has not failed."""
        if self._connection and self._host:
            try:
                send(self._connection, {"kind": "end"})
            except OSError:
                logger.warning("a rank was lost after the last order")
            self._host.join(_END_S)

    def update(self, order: UpdateOrder, progress: Progress) -> Made:
        """See `VersionTrainer.update`.

        Raises:
            RanksLostError: ranks were lost more than `trainer.max_restarts` times.
        """
        done = self._carry_out({"kind": "update", "order": asdict(order)}, progress)
        return Made(done["nonce"], [File.model_validate(file) for file in done["files"]], done["metrics"])

    def distance(self, order: DistanceOrder) -> float | None:
        """See `VersionTrainer.distance`."""
        distance: float | None = self._carry_out({"kind": "distance", "order": asdict(order)}, logger.info)["distance"]
        return distance

    def _carry_out(self, order: dict[str, Any], progress: Progress) -> dict[str, Any]:
        return self._with_restarts(lambda: self._once(order, progress), progress)

    def _with_restarts(self, action: Callable[[], Result], progress: Progress) -> Result:
        """Do something again after each loss of ranks; whatever ends it ends the ranks."""
        while True:
            try:
                return action()
            except RanksLostError as error:
                self.close()
                if self._restarts >= self._config.trainer.max_restarts:
                    raise
                self._restarts += 1
                progress(f"{error}\nAll ranks start again from the last checkpoint (restart {self._restarts})")
            except BaseException:  # the next order would get this one's answer, and `__enter__` may be the caller
                self.close()
                raise

    def _once(self, order: dict[str, Any], progress: Progress) -> dict[str, Any]:
        nonce = new_nonce()
        connection = self._connection or self._start(progress)
        try:
            send(connection, order | {"nonce": nonce})
        except OSError as error:
            raise self._lost("has ended") from error
        return self._answer(connection, progress) | {"nonce": nonce}

    def _start(self, progress: Progress) -> Connection:
        """Start the ranks and wait until all of them are ready."""
        knobs = self._config.trainer
        started = time.monotonic()
        with interrupts.starting_processes():
            self._host = HostRanks(self._config, self._attempt_logs)
        path = self._host.folder / "orders"
        with listen(path) as listener:
            with interrupts.starting_processes():
                self._host.start(path)
            while (connection := accept(listener, _POLL_S)) is None:
                if not self._host.alive:
                    raise self._lost("did not start")
                if time.monotonic() - started > knobs.startup_timeout_s:
                    limit = f"trainer.startup_timeout_s={knobs.startup_timeout_s:g}"
                    raise RanksLostError(f"the first rank did not start within {limit}. {self._report()}")
        self._connection = connection
        self._answer(connection, progress)
        progress(f"{self._config.ppo.parallel.ranks} ranks are ready after {time.monotonic() - started:.1f} s")
        return connection

    def _answer(self, connection: Connection, progress: Progress) -> dict[str, Any]:
        """Return the answer to the last order."""
        while True:
            assert self._host is not None
            if not self._host.wait_until(lambda: connection.poll(LOOK_S)):
                limit = f"trainer.timeout_s={self._config.trainer.timeout_s:g}"
                raise self._lost(f"did not answer while a process was stopped for {limit}")
            try:
                message = receive(connection)
            except (EOFError, OSError) as error:
                raise self._lost("has ended") from error
            kind = message["kind"]
            if kind == "log":
                logging.getLogger(message["logger"]).log(message["level"], "%s", message["text"])
            elif kind == "progress":
                progress(message["text"])
            elif kind == "error":
                raise self._error(message)
            else:
                return message

    def _error(self, message: dict[str, Any]) -> Exception:
        """Return the first error of the first rank that failed."""
        if message["lost"]:
            return self._lost(f"lost another one: {message['text']}", message["rank"])
        return self._failed(message)

    def _failed(self, message: dict[str, Any]) -> Exception:
        text = f"rank {message['rank']} failed: {message['text']}"
        host = message["rank"] // (self._config.ppo.parallel.ranks // self._config.trainer.hosts)
        logs = f"in {self._attempt_logs}" if host == 0 else f"on host {host}"
        error = {"ValueError": ValueError, "StorageError": StorageError}.get(message["type"], RuntimeError)(text)
        error.add_note(f"in rank {message['rank']}, whose log is {logs}:\n{message['traceback']}")
        return error

    def _lost(self, what: str, rank: int = 0) -> Exception:
        """Return the error of a rank of this host that failed by itself; if there is none, ranks were lost."""
        assert self._host is not None
        self._host.join(_END_S)
        if own := [error for error in self._host.errors() if not error["lost"]]:
            return self._failed(own[0])
        return RanksLostError(f"rank {rank} {what}. {self._report()}")

    @property
    def _attempt_logs(self) -> Path:
        return self._logs / f"attempt-{self._restarts + 1}"

    def _report(self) -> str:
        """Say what torchrun knows: the first rank that ended and its exit code."""
        assert self._host is not None
        advice = f"Logs: {self._attempt_logs}. Start the flow again: it continues from the last checkpoint"
        first = self._host.first_to_end()
        if self._config.trainer.hosts > 1 and (first is None or not was_killed(first[1])):
            return f"A rank of another host may have ended before: see its output. {advice}"
        if first:
            return f"The first to end was rank {first[0]}, with exit code {first[1]}. {advice}"
        if self._host.was_killed:
            return f"A signal ended torchrun. {advice}"
        return f"torchrun's last lines:\n{self._host.log_tail()}\n{advice}"
