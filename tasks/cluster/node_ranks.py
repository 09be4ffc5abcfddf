"""The process on a node that starts the trainer's ranks of this node; that of the first node gives them orders."""

import logging
import os
import shutil
import socket
import threading
from collections import deque
from contextlib import ExitStack
from typing import Any

from configs import Config
from tasks.cluster.node_process import NodeProcess
from tasks.rollout.remote.messages import Failure
from tasks.train.orders import DistanceOrder, Made, UpdateOrder
from tasks.train.ranks.host import HostRanks
from tasks.train.ranks.launcher import Ranks, RanksLostError


class NodeRanks(NodeProcess):
    """The ranks of the host with number `index`.

    Args:
        values: see `NodeProcess`.
        name: see `NodeProcess`.
        index: the number of the host.
    """

    def __init__(self, values: dict[str, Any], name: str, index: int) -> None:
        super().__init__(values, name)
        self._index = index
        self._stack = ExitStack()
        self._lines: deque[str] = deque()
        self._ranks: Ranks | None = None
        self._host: HostRanks | None = None
        self._using = threading.Lock()
        logging.getLogger("tasks").addHandler(_Teller(self._lines))

    def free_address(self, ip: str) -> str:
        """Return this node's address with a port that is free now, for `trainer.address`."""
        with socket.socket(socket.AF_INET6 if ":" in ip else socket.AF_INET) as probe:
            probe.bind(("", 0))
            port = probe.getsockname()[1]
        return f"[{ip}]:{port}" if ":" in ip else f"{ip}:{port}"

    def start(self, address: str | None) -> Failure | None:
        """Start the ranks of this host; the first host waits until all have met.

        Args:
            address: where the ranks of several hosts meet.
        """
        self._hear()
        try:
            shutil.rmtree(self._logs, ignore_errors=True)  # of an earlier flow run
            self._open_store()
            config = _for_ranks(self._config, address)
            if self._index == 0:
                self._ranks = self._stack.enter_context(Ranks(config, self._logs / "ranks"))
            else:
                host = HostRanks(config, self._logs / "ranks", self._index)
                self._stack.callback(host.close)
                host.start()
                self._host = host  # only now, because `check` takes a host that has not started for a lost one
        except Exception as error:  # noqa: BLE001 # the flow raises it
            return _failure_of(error)
        return None

    def check(self) -> tuple[list[str], Failure | None]:
        """Return progress and warnings since the last check, and why this host's ranks have ended, if they have."""
        self._hear()
        lines = [self._lines.popleft() for _ in range(len(self._lines))]
        return lines, None if self._host is None or self._host.alive else self._failure(self._host)

    def update(self, order: UpdateOrder) -> Made | Failure:
        """See `OrderedTrainer.update`; `check` returns the progress."""
        made: Made | Failure = self._carry_out("update", order, self._lines.append)
        return made

    def distance(self, order: DistanceOrder) -> float | Failure | None:
        """See `OrderedTrainer.distance`."""
        distance: float | Failure | None = self._carry_out("distance", order)
        return distance

    def close(self) -> None:
        """Let all ranks end, so that none is taken for lost."""
        self._stack.close()

    def _failure(self, host: HostRanks) -> Failure:
        """Return the error of a rank that failed by itself; if there is none, ranks were lost."""
        errors = host.errors()
        for error in errors:
            if not error["lost"]:
                kind = error["type"] if error["type"] in ("ValueError", "StorageError") else "RuntimeError"
                where = f"the logs are in {self._logs} on {os.uname().nodename}"
                text = f"rank {error['rank']} failed: {error['text']}"
                return Failure(kind, text, f"{error['traceback']}\n{where}")
        text = errors[0]["text"] if errors else f"torchrun's last lines:\n{host.log_tail(15)}"
        return Failure(LOST, text, "")

    def _carry_out(self, method: str, *arguments: Any) -> Any:
        assert self._ranks
        try:
            with self._using:
                return getattr(self._ranks, method)(*arguments)
        except Exception as error:  # noqa: BLE001 # the flow raises it
            return _failure_of(error)


class _Teller(logging.Handler):
    """Adds warnings to the lines of progress: the log of this process is on its node only."""

    def __init__(self, lines: deque[str]) -> None:
        super().__init__(logging.WARNING)
        self._lines = lines

    def emit(self, record: logging.LogRecord) -> None:
        self._lines.append(record.getMessage())


def _for_ranks(config: Config, address: str | None) -> Config:
    """Return the configuration of ranks that torchrun starts, and that nobody here starts again."""
    trainer = config.trainer.model_dump() | {"launcher": "torchrun", "address": address, "max_restarts": 0}
    return Config.model_validate(config.model_dump(mode="json") | {"trainer": trainer})


def _failure_of(error: Exception) -> Failure:
    failure = Failure.of(error)
    return Failure(LOST, failure.text, failure.traceback) if isinstance(error, RanksLostError) else failure


LOST = "RanksLostError"
"""The kind of a failure after which the ranks of all hosts may start again."""
