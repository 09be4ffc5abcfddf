"""The worker's program: an actor that plays and grades episodes, on this host or on a node of a cluster."""

import logging
from contextlib import AbstractContextManager, ExitStack
from typing import Any

from storage.records import Problem
from storage.version_names import PolicyVersion
from storage.versions import checkpoints, datasets
from storage.versions.checkpoints import Checkpoint
from storage.versions.fetch import trim_to_limit
from tasks.cluster.node_process import NodeProcess
from tasks.inference.engine import Engine
from tasks.rollout.remote.messages import Failure, Orders, Report
from tasks.rollout.remote.worker import Worker
from tasks.rollout.workers import LocalWorkers
from tasks.score.scoring import ScoredShard, ShardOrder, score_shard
from tasks.score.verifier import Verifier

logger = logging.getLogger(__name__)


class NodeWorker(NodeProcess):
    """A worker with engine, verifier, store and cache; an error while it starts is in its first report.

    Args:
        values: see `NodeProcess`.
        name: see `NodeProcess`.
        plays: whether it plays episodes, or only grades.
    """

    def __init__(self, values: dict[str, Any], name: str, *, plays: bool) -> None:
        super().__init__(values, name)
        self._stack, self._engines = ExitStack(), ExitStack()
        self._failure: Failure | None = None
        try:
            self._open(plays=plays)
        except Exception as error:  # noqa: BLE001 # the flow raises it, or goes on with others
            self._failure = Failure.of(error)

    def give(self, orders: Orders) -> None:
        """See `Worker.give`."""
        self._hear()
        if not self._failure:
            self._worker.give(orders)

    def report(self, patience_s: float) -> Report:
        """See `Worker.report`."""
        self._hear()
        return Report(failure=self._failure) if self._failure else self._worker.report(patience_s)

    def score(self, order: ShardOrder) -> ScoredShard | Failure:
        """Grade a shard of trajectories, which the cache may have."""
        if self._failure:
            return self._failure
        try:
            return score_shard(self._store, self._cache, self._verifier, order)
        except Exception as error:  # the flow raises it, or asks another worker
            logger.exception("a shard was not scored")
            return Failure.of(error)

    def close(self) -> None:
        """End everything; what is not stored is lost."""
        self._engines.close()  # first, because a thread may wait for the start of a server
        self._stack.close()

    def _open(self, *, plays: bool) -> None:
        score = self._config.score
        self._store = self._open_store()
        verifier = Verifier(score.workers, score.timeout_s, reading=score.reading)
        self._verifier = self._stack.enter_context(verifier)
        engine = self._engines.enter_context(self._open_engine()) if plays else None
        local = LocalWorkers(engine, self._verifier, self._open_policy, self._cache)
        self._worker = self._stack.enter_context(Worker(local, self._store, self._cache, self._problems))

    def _open_engine(self) -> AbstractContextManager[Engine]:
        return Engine(self._config.inference, self._config.rollout, self._logs)

    def _open_policy(self, policy: PolicyVersion) -> Checkpoint:
        storage, halved = self._config.storage, self._config.inference.dtype == "bfloat16"
        # Other workers of this node have the same cache.
        checkpoint = checkpoints.open_checkpoint(self._store, policy, self._cache, serving=halved)
        trim_to_limit(self._store, storage, [policy])
        return checkpoint

    def _problems(self, version: str) -> dict[str, Problem]:
        problems = (Problem(**row) for row in datasets.rows(self._store, version, self._cache))
        return {problem.problem_id: problem for problem in problems}
