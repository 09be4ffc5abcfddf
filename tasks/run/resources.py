"""The resources that the stages share for the duration of a flow: workers and trainer.

Each is a context manager. Heavy libraries are imported when one is opened.
"""

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from prefect import get_run_logger

from configs import Config
from tasks.run.workspace import Workspace
from tasks.score.verifier import Verifier
from tasks.train.orders import DistanceOrder, Made, OrderedTrainer, Progress, UpdateOrder

if TYPE_CHECKING:
    from tasks.inference.engine import Engine
    from tasks.rollout.workers import Workers

_BUSY_CORES = 2
"""So many cores are busy while vLLM starts: where there are no more, torch is imported after the first rollout."""


def open_engine(workspace: Workspace) -> AbstractContextManager["Engine"]:
    """Open vLLM. Its servers start when a policy is first served, and end with the block."""
    from tasks.inference.engine import Engine

    config = workspace.config
    engine = Engine(config.servers, config.rollout, workspace.cache / "logs" / workspace.name)
    if workspace.trains and len(os.sched_getaffinity(0)) > _BUSY_CORES:
        engine.meanwhile = _import_trainer
    return engine


def engine_begun(config: Config) -> AbstractContextManager[None]:
    """Begin vLLM's servers for an engine that is opened in the block, unless it is opened elsewhere, or has URLs."""
    if config.plays_apart or config.inference.urls:
        return nullcontext()
    from tasks.inference.ahead import servers_begun

    return servers_begun(config.servers, Path(config.storage.cache) / "logs" / config.run.name)


@contextmanager
def open_workers(workspace: Workspace, *, playing: bool = True) -> Iterator["Workers"]:
    """Open the workers that play and grade episodes, or only grade them.

    By default there is one, in this process; else they are processes of their own, on this host or on a cluster.
    """
    config = workspace.config
    if config.plays_apart:
        from tasks.cluster.connection import connected

        with connected(config):
            from tasks.cluster.workers import WorkerStarter

            with WorkerStarter(config, get_run_logger().info, playing=playing) as workers:
                yield workers.scheduler
        return
    from tasks.rollout.workers import LocalWorker

    with open_verifier(workspace) as verifier, open_engine(workspace) if playing else nullcontext() as engine:
        yield LocalWorker(engine, verifier, workspace.open_checkpoint, workspace.cache)


def open_verifier(workspace: Workspace, workers: int | None = None) -> Verifier:
    """Open the verifier's worker processes (default: `score.workers`) and cache; it is a context manager."""
    score = workspace.config.score
    return Verifier(workers or score.workers, score.timeout_s, reading=score.reading)


@contextmanager
def open_trainer(workspace: Workspace) -> Iterator[OrderedTrainer]:
    """Open the trainer. Its policy stays in memory between iterations.

    It runs in this process, or as actors of Ray: with several ranks, and with `run.overlap`, because the stream's
    requests would slow training down in one process.
    """
    config = workspace.config
    if not config.trains_apart:
        workspace.trains = True
        yield _TrainerHere(config)
        return
    from tasks.cluster.connection import connected

    with connected(config):
        from tasks.cluster.trainer import RayTrainer

        with RayTrainer(config, get_run_logger().info) as ranks:
            yield ranks


class _TrainerHere:
    """The trainer in this process. It is imported, with torch, when it is used first, or while vLLM's servers start."""

    def __init__(self, config: Config) -> None:
        self._config = config

    def update(self, order: UpdateOrder, progress: Progress) -> Made:
        """See `OrderedTrainer.update`."""
        return self._trainer.update(order, progress)

    def distance(self, order: DistanceOrder) -> float | None:
        """See `OrderedTrainer.distance`."""
        return self._trainer.distance(order)

    @cached_property
    def _trainer(self) -> OrderedTrainer:
        return _import_trainer().VersionTrainer(self._config)


def _import_trainer() -> ModuleType:
    from tasks.train import version_trainer

    return version_trainer
