"""The flow's workers as actors of Ray: on each node with free cores and GPUs, also if it joins later."""

import asyncio
import contextlib
import contextvars
import logging
import os
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Concatenate, Self, cast

import ray
from prometheus_client import Metric
from prometheus_client.registry import Collector
from ray.exceptions import ActorDiedError, RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from configs import Config
from storage.objects.store import Store
from storage.records import Problem
from storage.telemetry.metrics import REGISTRY, labelled
from storage.telemetry.spans import export_spans
from storage.version_names import PolicyVersion
from storage.versions import checkpoints, datasets
from storage.versions.checkpoints import Checkpoint
from storage.versions.fetch import trim_to_limit
from tasks.cluster.connection import environment, for_nodes, keep_logs, logs_of, nodes, open_store, store_logs
from tasks.cluster.placement import LostWorkers, Needs, Node, Seat, check, place, table
from tasks.inference.devices import cpu_build
from tasks.inference.engine import Engine
from tasks.registry import Code, own_code
from tasks.rollout.remote.interface import P, RemoteWorker, T, WorkerFailedError, WorkerLostError
from tasks.rollout.remote.scheduler import Scheduler
from tasks.rollout.remote.worker import Worker
from tasks.rollout.workers import LocalWorker
from tasks.score.verifier import Verifier

logger = logging.getLogger(__name__)
_CHECK_S = 2.0
"""Time between two checks for nodes that have joined."""
_REST_S = 10.0
"""Time after the loss of a worker in which its servers end and leave their GPUs."""
_CLOSE_S = 15.0
"""Longest wait for workers that end by themselves."""
_MOST_CALLS = 2**16
"""Calls that a worker answers at the same time: one for each group that it plays, and some more."""
_METRICS_S = 4.0
"""Longest wait for the metrics of all workers, which ask their servers."""


class NodeWorker(Worker):
    """A worker with engine, verifier, store and cache, which `open` opens.

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
        self._config, self._code, self._plays = Config.model_validate(values), code, plays
        self._logs = logs_of(self._config) / name
        # When the flow was heard last; until this process has started, it cannot hear it.
        starting = max(self._config.cluster.startup_timeout_s, self._config.train.startup_timeout_s)
        self._heard = time.monotonic() + starting
        threading.Thread(target=self._end_without_flow, name="end", daemon=True).start()
        self._stack, self._engines = ExitStack(), ExitStack()
        export_spans()

    async def open(self) -> None:
        score, cache = self._config.score, Path(self._config.storage.cache)
        store = self._store = self._open_store()
        verifier = self._stack.enter_context(Verifier(score.workers, score.timeout_s))
        engine = self._engines.enter_context(self._open_engine()) if self._plays else None

        def open_policy(policy: PolicyVersion) -> Checkpoint:
            checkpoint = checkpoints.open_checkpoint(store, policy, cache)  # all workers of a node share it
            trim_to_limit(store, self._config.storage, [policy])
            return checkpoint

        def problems(version: str) -> dict[str, Problem]:
            rows = (Problem(**row) for row in datasets.rows(store, version, cache))
            return {problem.problem_id: problem for problem in rows}

        super().__init__(LocalWorker(engine, verifier, open_policy, cache), store, problems)
        self._stack.enter_context(self)

    async def lacking(self) -> dict[int, int]:
        self._heard = time.monotonic()
        return await super().lacking()

    async def metrics(self) -> list[Metric]:
        """Return the numbers of this process and of its servers."""
        return await asyncio.to_thread(lambda: list(REGISTRY.collect()))

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
            time.sleep(1)
        logger.error("the flow has been silent for %g s: this process ends", limit)
        logging.shutdown()
        os._exit(1)  # the reaper ends what it has started

    def _open_store(self) -> Store:
        return open_store(self._config, self._logs / "process.log", self._code)

    def _open_engine(self) -> AbstractContextManager[Engine]:
        return Engine(self._config.servers, self._config.rollout, self._logs)


class RayWorker:
    """An actor of `NodeWorker`, as `tasks.rollout.remote.interface.RemoteWorker`."""

    def __init__(self, config: Config, seat: Seat, node: Node, gpus: int) -> None:
        self.seat, self.plays = seat, seat.plays
        folder = f"{node.id[:12]}-{'grades' if seat.number is None else seat.number}"
        self.name = f"the {'grader' if seat.number is None else f'rollout worker {seat.number}'} on {node.name}"
        actor: Any = ray.remote(NodeWorker)
        self.process = actor.options(
            num_cpus=1,
            num_gpus=gpus if seat.plays else 0,
            max_concurrency=_MOST_CALLS,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node.id, soft=False),
            runtime_env=environment(),
        ).remote(for_nodes(_of_seat(config, seat)), own_code(config), folder, plays=seat.plays)

    async def call(
        self, method: Callable[Concatenate[Worker, P], Coroutine[Any, Any, T]], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        try:
            return cast(T, await getattr(self.process, method.__name__).remote(*args, **kwargs))
        except ActorDiedError as error:
            last = str(error).strip().splitlines()[-1]
            why = f"it did not start: {last}" if error.actor_init_failed else "its process or its node has ended"
            raise WorkerLostError(why) from error
        except RayTaskError as error:
            raise WorkerFailedError(getattr(error, "cause", error), str(error)) from error
        except RayError as error:
            raise WorkerLostError(f"it is not reached: {str(error).splitlines()[0]}") from error

    def end(self) -> None:
        ray.kill(self.process)


class WorkerStarter(Collector):
    """Starts workers on nodes and hands them over to a `Scheduler`; a context manager that ends them.

    A lost worker is replaced, unless `LostWorkers` counts its node as broken. While it is open, the metrics of this
    process have those of the workers, too, with the label `worker`.
    """

    def __init__(self, config: Config, progress: Callable[[str], None], *, playing: bool) -> None:
        self._config, self._progress = config, progress
        self._needs = needs_of(config, playing=playing)
        knobs = config.cluster
        self.scheduler = Scheduler(knobs.silence_s, knobs.startup_timeout_s, progress, self._note_loss)
        self._lock = threading.Lock()
        self._workers: dict[Seat, RayWorker] = {}
        self._lost = LostWorkers(_REST_S if self._needs.gpus else 0.0)
        self._ended = threading.Event()
        around = contextvars.copy_context().run  # with the context in which Prefect knows where logs go
        self._watch = threading.Thread(target=around, args=[self._watch_nodes], name="nodes", daemon=True)

    def __enter__(self) -> Self:
        present = nodes()
        seats = place(present, self._needs)
        check(present, self._needs, seats)
        self.scheduler.__enter__()
        try:
            self._start(present, seats)
            self._watch.start()
        except BaseException:
            self.scheduler.__exit__(None, None, None)
            raise
        REGISTRY.register(self)
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        REGISTRY.unregister(self)
        self._ended.set()
        self._watch.join()
        with self._lock:
            processes = [worker.process for worker in self._workers.values()]
        try:
            if isinstance(value, Exception):
                causes = [self.scheduler.first_loss or value, value]
                keep_logs(Store(self._config.storage.root), self._config.run.name, processes, causes, self._progress)
            if kind is None or issubclass(kind, Exception):
                closing = [process.close.remote() for process in processes]  # let it end by itself
                ray.wait(closing, num_returns=len(closing), timeout=_CLOSE_S)
        finally:
            self.scheduler.__exit__(kind, value, tb)

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics of the workers that answer in time."""
        with self._lock:
            asked = {worker.process.metrics.remote(): worker.name for worker in self._workers.values()}
        for call in ray.wait([*asked], num_returns=len(asked), timeout=_METRICS_S)[0] if asked else ():
            with contextlib.suppress(RayError):  # it is lost, which the scheduler finds, too
                yield from labelled(ray.get(call), "worker", asked[call])

    def _start(self, present: Sequence[Node], seats: Sequence[Seat]) -> None:
        self._progress(f"workers start on {len(present)} node(s):\n{table(present, seats, self._needs)}")
        by_id = {node.id: node for node in present}
        for seat in seats:
            worker = RayWorker(self._config, seat, by_id[seat.node], self._needs.gpus)
            with self._lock:
                self._workers[seat] = worker
            self.scheduler.add(worker)

    def _note_loss(self, remote: RemoteWorker, error: BaseException, useful: bool) -> None:
        assert isinstance(remote, RayWorker)
        with self._lock:
            del self._workers[remote.seat]
            self._lost.note(remote.seat.node, error, useful=useful)

    def _watch_nodes(self) -> None:
        """Start workers that are missing, on nodes that have joined, too; the body of a thread."""
        try:
            while not self._ended.wait(_CHECK_S):
                present = nodes()
                if not present:
                    raise ConnectionError("Ray has lost all its nodes. The same command continues the run")
                with self._lock:
                    free = [node for node in present if self._lost.may_start(node.id)]
                    seats, cause = place(free, self._needs, self._workers), self._cause(present)
                if cause:
                    self.scheduler.fail(cause)
                if seats:
                    self._start(free, seats)
        except Exception as error:  # noqa: BLE001 # the head is gone: the workers are lost, too, and the flow ends
            self.scheduler.fail(error)

    def _cause(self, present: Sequence[Node]) -> BaseException | None:
        """Return why no worker is left that can do the work, and none will come; None if one is there or may come.

        A node that was lost, and is not broken, may come back; the scheduler waits for it.
        """
        whole = [node for node in present if node.id not in self._lost.broken]
        seats = [*self._workers, *place(whole, self._needs)]
        able = any(seat.plays or self._needs.workers == 0 for seat in seats)
        return None if able else self._lost.cause()


def needs_of(config: Config, *, playing: bool) -> Needs:
    """Return what the workers of a run need, if they play or only grade."""
    settings = config.inference
    has_servers = playing and not cpu_build() and not settings.urls
    gpus = settings.replicas * settings.ranks if has_servers else 0
    return Needs(gpus, config.cluster.workers_per_node, config.cluster.rollout_workers if playing else 0)


def _of_seat(config: Config, seat: Seat) -> Config:
    """Return the configuration of a worker: of `inference.urls` it has those that no other worker of its node has."""
    if seat.number is None or not config.inference.urls:
        return config
    own = config.inference.urls[seat.number :: config.cluster.workers_per_node]
    return config.model_copy(update={"inference": config.inference.model_copy(update={"urls": own})})
