"""The worker's program: an actor that plays and grades episodes, on this host or on a node of a cluster."""

import logging
import os
import threading
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any

from prometheus_client import Metric

from configs import Config
from storage.objects.store import Store
from storage.records import Problem
from storage.telemetry.metrics import REGISTRY
from storage.telemetry.spans import export_spans
from storage.version_names import PolicyVersion
from storage.versions import checkpoints, datasets
from storage.versions.checkpoints import Checkpoint
from storage.versions.fetch import trim_to_limit
from tasks.cluster.node_process import logs_of, open_store, store_logs
from tasks.inference.engine import Engine
from tasks.own_code import Code
from tasks.rollout.remote.messages import Failure, Orders, Report
from tasks.rollout.remote.worker import Worker
from tasks.rollout.workers import LocalWorker
from tasks.score.scoring import ScoredShard, ShardOrder, score_shard
from tasks.score.verifier import Verifier

logger = logging.getLogger(__name__)


_CHECK_S = 1.0


class NodeWorker:
    """A worker with engine, verifier, store and cache; an error while it starts is in its first report.

    The environment of the node holds the credentials of the store. If the flow says nothing for twice
    `cluster.silence_s` (it was killed, or the node is cut off), the process ends, and with it the processes that it
    has started.

    Args:
        values: the run's configuration; its paths are absolute.
        code: the fingerprint of the user's code.
        name: the name of its folder for logs.
        plays: whether it plays episodes, or only grades.
    """

    def __init__(self, values: dict[str, Any], code: Code, name: str, *, plays: bool) -> None:
        self._config, self._code = Config.model_validate(values), code
        self._cache, self._logs = Path(self._config.storage.cache), logs_of(self._config) / name
        # When the flow was heard last; until this process has started, it cannot hear it.
        starting = max(self._config.cluster.startup_timeout_s, self._config.train.startup_timeout_s)
        self._heard = time.monotonic() + starting
        threading.Thread(target=self._end_without_flow, name="end", daemon=True).start()
        self._stack, self._engines = ExitStack(), ExitStack()
        self._failure: Failure | None = None
        export_spans()
        try:
            score = self._config.score
            self._store = self._open_store()
            verifier = Verifier(score.workers, score.timeout_s)
            self._verifier = self._stack.enter_context(verifier)
            engine = self._engines.enter_context(self._open_engine()) if plays else None
            local = LocalWorker(engine, self._verifier, self._open_policy, self._cache)
            self._worker = self._stack.enter_context(Worker(local, self._store, self._problems))
        except Exception as error:  # noqa: BLE001 # the flow raises it, or goes on with others
            self._failure = Failure.of(error)

    def give(self, orders: Sequence[Orders]) -> None:
        """See `Worker.give`."""
        self._heard = time.monotonic()
        if not self._failure:
            self._worker.give(orders)

    def report(self) -> Report:
        """See `Worker.report`."""
        self._heard = time.monotonic()
        return Report(failure=self._failure) if self._failure else self._worker.report()

    def score(self, order: ShardOrder) -> ScoredShard | Failure:
        """Fetch a shard of trajectories, and grade it."""
        if self._failure:
            return self._failure
        try:
            return score_shard(self._store, self._cache, self._verifier, order)
        except Exception as error:  # the flow raises it, or asks another worker
            logger.exception("a shard was not scored")
            return Failure.of(error)

    def metrics(self) -> list[Metric]:
        """Return the numbers of this process and of its servers."""
        return list(REGISTRY.collect())

    def store_logs(self, folder: str) -> None:
        """Upload the ends of all logs of the run on this node."""
        store_logs(self._config, folder)

    def close(self) -> None:
        """End everything; what is not stored is lost."""
        self._engines.close()  # first, because a thread may wait for the start of a server
        self._stack.close()

    def _end_without_flow(self) -> None:
        """End this process when the flow is silent; the body of a thread."""
        limit = 2 * self._config.cluster.silence_s
        while time.monotonic() < self._heard + limit:
            time.sleep(_CHECK_S)
        logger.error("the flow has been silent for %g s: this process ends", limit)
        logging.shutdown()
        os._exit(1)  # the reaper ends what it has started

    def _open_store(self) -> Store:
        return open_store(self._config, self._logs / "process.log", self._code)

    def _open_engine(self) -> AbstractContextManager[Engine]:
        return Engine(self._config.servers, self._config.rollout, self._logs)

    def _open_policy(self, policy: PolicyVersion) -> Checkpoint:
        checkpoint = checkpoints.open_checkpoint(self._store, policy, self._cache)  # all workers of a node share it
        trim_to_limit(self._store, self._config.storage, [policy])
        return checkpoint

    def _problems(self, version: str) -> dict[str, Problem]:
        problems = (Problem(**row) for row in datasets.rows(self._store, version, self._cache))
        return {problem.problem_id: problem for problem in problems}
