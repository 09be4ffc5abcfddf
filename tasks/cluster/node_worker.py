"""The process on a node that plays episodes: an actor for Ray, which is a plain class here."""

import logging
import os
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from configs import Config
from storage.errors import StorageError
from storage.objects.cache import trim_to_limit
from storage.objects.store import Store
from storage.records import Problem
from storage.version_names import PolicyVersion
from storage.versions import checkpoints, datasets
from storage.versions.checkpoints import Checkpoint
from tasks.inference.engine import Engine
from tasks.rollout.messages import Orders, Report
from tasks.rollout.worker import Worker
from tasks.rollout.workers import LocalWorkers
from tasks.score.verifier import Verifier

logger = logging.getLogger(__name__)
_LOOK_S = 1.0


class NodeWorker:
    """A rollout worker with engine, verifier, store and cache of its node; its methods are those of `Worker`.

    The node's environment holds the credentials of the store. If the flow says nothing for `cluster.silence_s` (it was
    killed, or the node is cut off), the process ends, and with it vLLM.

    Args:
        values: the run's configuration; its paths are absolute.
        name: the name of its folder for logs.

    Raises:
        StorageError: this node does not see the run in the store.
        ValueError: the cluster asks for no token.
    """

    def __init__(self, values: dict[str, Any], name: str) -> None:
        config = self._config = Config.model_validate(values)
        logs = Path(config.storage.cache) / "logs" / config.run.name / name
        _log_to(logs / "worker.log")
        self._heard = time.monotonic()
        self._cache, self._store = Path(config.storage.cache), Store.of(config.storage)
        _check_sees_run(self._store, config)
        self._stack = ExitStack()
        score = config.score
        verifier = self._stack.enter_context(Verifier(score.workers, score.timeout_s, score.memory_mb))
        engine = self._stack.enter_context(Engine(config.inference, config.rollout, logs))
        local = LocalWorkers(engine, verifier, self._open_policy)
        self._worker = self._stack.enter_context(Worker(local, self._store, self._cache, self._problems))
        threading.Thread(target=self._end_without_flow, name="end", daemon=True).start()

    def give(self, orders: Orders) -> None:
        """See `Worker.give`."""
        self._heard = time.monotonic()
        self._worker.give(orders)

    def report(self) -> Report:
        """See `Worker.report`."""
        self._heard = time.monotonic()
        return self._worker.report()

    def close(self) -> None:
        """End everything; what is not stored is lost."""
        self._stack.close()

    def _open_policy(self, policy: PolicyVersion) -> Checkpoint:
        storage, halved = self._config.storage, self._config.inference.dtype == "bfloat16"
        checkpoint = checkpoints.open_checkpoint(self._store, policy, self._cache, serving=halved)
        trim_to_limit(self._store, storage, [policy])
        return checkpoint

    def _problems(self, version: str) -> dict[str, Problem]:
        problems = (Problem(**row) for row in datasets.rows(self._store, version, self._cache))
        return {problem.problem_id: problem for problem in problems}

    def _end_without_flow(self) -> None:
        """End this process when the flow is silent; the body of a thread."""
        limit = 2 * self._config.cluster.silence_s
        while time.monotonic() < self._heard + limit:
            time.sleep(_LOOK_S)
        logger.error("the flow has been silent for %g s: this worker ends", limit)
        logging.shutdown()
        os._exit(1)  # the supervisors of vLLM end it


def _check_sees_run(store: Store, config: Config) -> None:
    from storage import layout
    from storage.versions import manifests

    if not manifests.committed(store, layout.run(config.run.name)):
        remedy = " A folder must be the same one on all nodes; else use s3://bucket/prefix" if store.is_local else ""
        raise StorageError(f"{os.uname().nodename} does not see run {config.run.name!r} in {store.root}.{remedy}")


def _log_to(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    file = logging.FileHandler(path)
    file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    for name in ("tasks", "storage"):
        logging.getLogger(name).addHandler(file)
        logging.getLogger(name).setLevel(logging.INFO)
