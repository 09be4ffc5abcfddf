"""The resources that the stages share for the duration of a flow: workers and trainer.

Each is a context manager. Heavy libraries are imported when one is opened, or the trainer gets its first order.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from functools import cached_property
from typing import TYPE_CHECKING

from prefect import get_run_logger

from configs import Config
from flows.run.workspace import Workspace, models_of
from storage import layout
from storage.objects.store import Store
from storage.versions import manifests
from tasks.score.verifier import Verifier
from tasks.train.orders import DistanceOrder, Made, OrderedTrainer, Progress, Updated, UpdateOrder

if TYPE_CHECKING:
    from tasks.inference.engine import Engine
    from tasks.rollout.play import Workers

_DRAIN_S = 5.0
"""Longest wait for a checkpoint if the flow is interrupted."""


def import_early(config: Config) -> None:
    """Import what a run needs before its first episode, while nothing else is to be done."""
    import tasks.inference.engine
    import tasks.rollout.workers

    if not manifests.committed(Store(config.storage.root), layout.checkpoint(config.run.name, 0)):
        import tasks.train.policy
        import tasks.warm_start.importing  # noqa: F401


def open_engine(workspace: Workspace) -> AbstractContextManager["Engine"]:
    """Open vLLM. Its servers start when a policy is first served, and end with the block."""
    from tasks.inference.engine import Engine

    config = workspace.config
    return Engine(config.servers, config.rollout, workspace.cache / "logs" / workspace.name)


@contextmanager
def open_workers(workspace: Workspace, *, playing: bool = True) -> Iterator["Workers"]:
    """Open the workers that play and grade episodes, or only grade them.

    By default there is one, in this process; else they are processes of their own, on this host or on a cluster.
    """
    config = workspace.config
    with ExitStack() as opened:
        opened.enter_context(models_of(workspace))
        if config.plays_apart:
            from tasks.cluster.connection import connected

            opened.enter_context(connected(config))
            from tasks.cluster.workers import WorkerStarter

            yield opened.enter_context(WorkerStarter(config, get_run_logger().info, playing=playing)).scheduler
            return
        from tasks.rollout.workers import LocalWorker

        verifier = opened.enter_context(open_verifier(workspace))
        engine = opened.enter_context(open_engine(workspace)) if playing else None
        yield LocalWorker(engine, verifier, workspace.open_checkpoint, workspace.cache)


def open_verifier(workspace: Workspace, workers: int | None = None) -> Verifier:
    """Open the verifier's worker processes (default: `score.workers`) and cache; it is a context manager."""
    score = workspace.config.score
    return Verifier(workers or score.workers, score.timeout_s)


@contextmanager
def open_trainer(workspace: Workspace) -> Iterator[OrderedTrainer]:
    """Open the trainer. Its policy stays in memory between iterations.

    It runs in this process, or as actors of Ray: with several ranks, and with `run.overlap`, because the stream's
    requests would slow training down in one process.
    """
    config = workspace.config
    if not config.trains_apart:
        with _settled(workspace):
            yield _LateTrainer(config)
        return
    from tasks.cluster.connection import connected

    with connected(config):
        from tasks.cluster.trainer import RayTrainer

        with RayTrainer(config, get_run_logger().info) as ranks, _settled(workspace):
            yield ranks


class _LateTrainer:
    """The trainer of this process, which is made with the first order: no episode waits for the imports of torch."""

    def __init__(self, config: Config) -> None:
        self._config = config

    @cached_property
    def _trainer(self) -> OrderedTrainer:
        from tasks.train.version_trainer import VersionTrainer

        return VersionTrainer(self._config)

    def update(self, order: UpdateOrder, progress: Progress) -> Updated:
        return self._trainer.update(order, progress)

    def write(self) -> Made:
        return self._trainer.write()

    def distance(self, order: DistanceOrder) -> float | None:
        return self._trainer.distance(order)


@contextmanager
def _settled(workspace: Workspace) -> Iterator[None]:
    """Wait at the end of the block for the checkpoint that is still being stored; not for long if interrupted."""
    try:
        yield
    except BaseException as error:
        with suppress(Exception):  # the first error counts
            workspace.settle(None if isinstance(error, Exception) else _DRAIN_S)
        raise
    workspace.settle()
    workspace.trained = None  # its folder ends with the trainer
