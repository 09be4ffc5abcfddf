"""The flow's workers on the nodes of a Ray cluster: one on each node with room, also if it joins later."""

import contextvars
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Self

import ray
from ray.exceptions import ActorDiedError, RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from configs import Config
from storage.objects.store import Store
from tasks.cluster.connection import environment, nodes
from tasks.cluster.logs import keep_logs
from tasks.cluster.node_process import for_nodes
from tasks.cluster.node_worker import NodeWorker
from tasks.cluster.placement import Needs, Node, Placement, check, place, table
from tasks.inference.devices import cpu_build, devices_of_a_server
from tasks.rollout.remote.handout import Handout, WorkerFailedError, WorkerLostError
from tasks.rollout.remote.losses import Losses
from tasks.rollout.remote.messages import Failure, Orders, Report
from tasks.rollout.remote.scoring_job import CALLS
from tasks.rollout.remote.shared_rollout import RemoteWorker
from tasks.score.scoring import ScoredShard, ShardOrder

_LOOK_S = 2.0
"""Time between two looks for nodes that have joined."""
_CLOSE_S = 15.0
"""Longest wait for workers that end by themselves."""


class RayWorker:
    """A worker on a node, as `tasks.rollout.remote.shared_rollout.RemoteWorker`."""

    def __init__(self, config: Config, node: Node, gpus: int, *, plays: bool) -> None:
        self.node, self.plays, self.name = node, plays, f"the {'rollout worker' if plays else 'judge'} on {node.name}"
        self.process: Any = (
            ray.remote(NodeWorker)
            .options(
                num_cpus=1,
                num_gpus=gpus if plays else 0,
                max_concurrency=CALLS,
                max_restarts=0,
                max_task_retries=0,
                scheduling_strategy=NodeAffinitySchedulingStrategy(node.id, soft=False),
                runtime_env=environment(),
            )
            .remote(for_nodes(config), node.id[:12], plays=plays)
        )

    async def give(self, orders: Orders) -> None:
        with _lost_if_dead():
            await self.process.give.remote(orders)

    async def report(self, patience_s: float) -> Report:
        with _lost_if_dead():
            report: Report = await self.process.report.remote(patience_s)
        return report

    async def score(self, order: ShardOrder) -> ScoredShard | Failure:
        with _lost_if_dead():
            scored: ScoredShard | Failure = await self.process.score.remote(order)
        return scored

    def close(self) -> Any:
        """Let it end by itself; return what Ray waits for."""
        return self.process.close.remote()

    def end(self) -> None:
        ray.kill(self.process)


class NodeWorkers:
    """Starts workers on nodes and hands them over to a `Handout`; a context manager that ends them.

    A node whose worker was lost gets another one, unless `Losses` counts the node as broken. Then another node plays
    that only graded before, if `cluster.rollout_workers` left it out.
    """

    def __init__(self, config: Config, progress: Callable[[str], None], *, playing: bool) -> None:
        self._config, self._progress = config, progress
        self._needs = needs_of(config, playing=playing)
        knobs, limit = config.cluster, "cluster.start_timeout_s"
        self.handout = Handout(knobs.silence_s, knobs.start_timeout_s, progress, self._note_loss, start_limit=limit)
        self._lock = threading.Lock()
        self._workers: dict[str, RayWorker] = {}  # by node
        self._losses = Losses()
        self._ended = threading.Event()
        around = contextvars.copy_context().run  # with the context in which Prefect knows where logs go
        self._watch = threading.Thread(target=around, args=[self._look_for_nodes], name="nodes", daemon=True)

    def __enter__(self) -> Self:
        present = nodes()
        placement = place(present, self._needs)
        check(present, self._needs, placement)
        self._progress(f"the cluster has {len(present)} nodes:\n{table(present, placement, self._needs)}")
        self.handout.__enter__()
        try:
            self._start(placement)
            self._watch.start()
        except BaseException:
            self.handout.__exit__(None, None, None)
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        self._ended.set()
        self._watch.join()
        with self._lock:
            workers = list(self._workers.values())
        try:
            if isinstance(value, Exception):
                causes = [self.handout.first_loss or value, value]
                processes = [worker.process for worker in workers]
                store = Store.of(self._config.storage)
                keep_logs(store, self._config.run.name, processes, causes, self._progress)
            if kind is None or issubclass(kind, Exception):
                closing = [worker.close() for worker in workers]
                ray.wait(closing, num_returns=len(closing), timeout=_CLOSE_S)
        finally:
            self.handout.__exit__(kind, value, tb)

    def _start(self, placement: Placement) -> None:
        for plays, chosen in ((True, placement.players), (False, placement.judges)):
            for node in chosen:
                worker = RayWorker(self._config, node, self._needs.gpus, plays=plays)
                with self._lock:
                    self._workers[node.id] = worker
                self.handout.add(worker)

    def _note_loss(self, remote: RemoteWorker, error: BaseException, useful: bool) -> None:
        assert isinstance(remote, RayWorker)
        with self._lock:
            if self._workers.get(remote.node.id) is remote:  # not a judge that has made room for another worker
                del self._workers[remote.node.id]
            self._losses.note(remote.node.id, error, useful=useful)

    def _look_for_nodes(self) -> None:
        """Start workers on nodes that have joined, or have lost theirs; the body of a thread."""
        try:
            while not self._ended.wait(_LOOK_S):
                self._start_missing(nodes())
        except Exception as error:  # noqa: BLE001 # the head is gone: the workers are lost, too, and the flow ends
            self.handout.fail(error)

    def _start_missing(self, present: Sequence[Node]) -> None:
        with self._lock:
            others = [node for node in present if node.id not in self._workers]
            free = [node for node in others if self._losses.may_start(node.id)]
            spare, cause = self._spare_judges(others), self._cause(others)
            for judge in spare:
                del self._workers[judge.node.id]
            roles = [worker.plays for worker in self._workers.values()]
        if cause and not spare:
            self.handout.fail(cause)
        for judge in spare:
            self._progress(f"{judge.name} makes room for a rollout worker")
            self.handout.dismiss_judge(judge)
        placement = place(free, self._needs, roles.count(True), roles.count(False))
        if placement.players or placement.judges:
            self._progress(f"workers start on more nodes:\n{table(free, placement, self._needs)}")
            self._start(placement)

    def _cause(self, others: Sequence[Node]) -> BaseException | None:
        """Return why nobody plays and no node without a worker will, if it is so.

        A node that was lost, and is not broken, may come back; the hand-out waits for it.
        """
        plays = any(worker.plays for worker in self._workers.values())
        able = {node.id for node in others if node.cpus >= 1 and node.gpus >= self._needs.gpus}
        if plays or not self._losses.all_broken or not able <= self._losses.broken.keys():
            return None
        return self._losses.cause

    def _spare_judges(self, others: Sequence[Node]) -> list[RayWorker]:
        """Return judges on whose nodes workers should play, because too few nodes are left for that."""
        wanted, gpus = self._needs.workers or 0, self._needs.gpus
        able = [node for node in others if node.id not in self._losses.broken and node.gpus >= gpus]
        lacking = wanted - sum(worker.plays for worker in self._workers.values()) - len(able)
        judges = [worker for worker in self._workers.values() if not worker.plays and worker.node.gpus >= gpus]
        return judges[: max(0, lacking)]


@contextmanager
def _lost_if_dead() -> Iterator[None]:
    try:
        yield
    except ActorDiedError as error:
        last = str(error).strip().splitlines()[-1]
        raise WorkerLostError(
            f"it did not start: {last}" if error.actor_init_failed else "its process or its node has ended"
        ) from error
    except RayTaskError as error:
        raise WorkerFailedError(Failure.of(error)) from error
    except RayError as error:
        raise WorkerLostError(f"it is not reached: {str(error).splitlines()[0]}") from error


def needs_of(config: Config, *, playing: bool) -> Needs:
    """Return what the workers of a run need, if they play or only grade."""
    gpus = config.cluster.gpus_per_worker
    if gpus is None:
        settings = config.inference
        gpus = 0 if cpu_build() else settings.replicas * devices_of_a_server(settings.extra_args)
    return Needs(gpus, config.cluster.rollout_workers if playing else 0, config.cluster.judges)
