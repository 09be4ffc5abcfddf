"""The process on a node that plays and grades episodes."""

from typing import Any

from tasks.cluster.node_process import NodeProcess
from tasks.inference.engine import Engine
from tasks.rollout.remote.host_worker import HostWorker
from tasks.rollout.remote.messages import Failure, Orders, Report
from tasks.score.scoring import ScoredShard, ShardOrder


class NodeWorker(NodeProcess):
    """A `HostWorker` on a node.

    Args:
        values: see `NodeProcess`.
        name: see `NodeProcess`.
        plays: whether it plays episodes, or only grades.
    """

    def __init__(self, values: dict[str, Any], name: str, *, plays: bool) -> None:
        super().__init__(values, name)
        self._worker = HostWorker(self._config, self._open_store, self._open_engine if plays else None)

    def give(self, orders: Orders) -> None:
        """See `Worker.give`."""
        self._hear()
        self._worker.give(orders)

    def report(self, patience_s: float) -> Report:
        """See `Worker.report`."""
        self._hear()
        return self._worker.report(patience_s)

    def score(self, order: ShardOrder) -> ScoredShard | Failure:
        """See `HostWorker.score`."""
        return self._worker.score(order)

    def close(self) -> None:
        """See `HostWorker.close`."""
        self._worker.close()

    def _open_engine(self) -> Engine:
        return Engine(self._config.inference, self._config.rollout, self._logs)
