"""The process on a node that starts the trainer's ranks of this node; that of the first node gives them orders."""

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
            self._open_store()
            config = _for_ranks(self._config, address)
            if self._index == 0:
                self._ranks = self._stack.enter_context(Ranks(config, self._logs))
            else:
                self._host = HostRanks(config, self._logs / "attempt-1", self._index)
                self._stack.callback(self._host.close)
                self._host.start()
        except Exception as error:  # noqa: BLE001 # the flow raises it
            return _failure_of(error)
        return None

    def check(self) -> tuple[list[str], str]:
        """Return the lines of progress since the last check, and why this host's ranks have ended, if they have."""
        self._hear()
        lines = [self._lines.popleft() for _ in range(len(self._lines))]
        if self._host is None or self._host.alive:
            return lines, ""
        first = next(iter(self._host.errors()), None)
        return lines, first["text"] if first else f"torchrun's last lines:\n{self._host.log_tail(15)}"

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

    def _carry_out(self, method: str, *arguments: Any) -> Any:
        assert self._ranks
        try:
            with self._using:
                return getattr(self._ranks, method)(*arguments)
        except Exception as error:  # noqa: BLE001 # the flow raises it
            return _failure_of(error)


def _for_ranks(config: Config, address: str | None) -> Config:
    """Return the configuration of ranks that torchrun starts, and that nobody here starts again."""
    trainer = config.trainer.model_dump() | {"launcher": "torchrun", "address": address, "max_restarts": 0}
    return Config.model_validate(config.model_dump(mode="json") | {"trainer": trainer})


def _failure_of(error: Exception) -> Failure:
    failure = Failure.of(error)
    return Failure(LOST, failure.text, failure.traceback) if isinstance(error, RanksLostError) else failure


LOST = "RanksLostError"
"""The kind of a failure after which the ranks of all hosts may start again."""
