"""The flow's rollout workers on the nodes of a Ray cluster: one on each node with room, also if it joins later."""

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from configs import Config
from tasks.cluster.connection import nodes
from tasks.cluster.node_worker import NodeWorker
from tasks.cluster.placement import Needs, Node, place, table
from tasks.inference.devices import cpu_build, devices_of_a_server
from tasks.rollout.handout import Handout, RemoteWorker, WorkerFailedError
from tasks.rollout.messages import Orders, Report

_ROOT = Path(__file__).parents[2]
_LOOK_S = 2.0
"""Time between two looks for nodes that have joined."""
_CLOSE_S = 15.0
"""Longest wait for workers that end by themselves."""
_PAUSE_S = 5.0
"""Time before another worker starts on a node that has lost one; it doubles with each."""
_THREADS = 4
"""Calls that an actor answers at the same time: orders, a report, and its end."""


class RayWorker:
    """A worker on a node, as `tasks.rollout.handout.RemoteWorker`."""

    def __init__(self, config: Config, node: Node, gpus: int) -> None:
        self.node, self.name = node, f"rollout worker on {node.name}"
        self._actor: Any = (
            ray.remote(NodeWorker)
            .options(
                num_cpus=1,
                num_gpus=gpus,
                max_concurrency=_THREADS,
                max_restarts=0,
                max_task_retries=0,
                scheduling_strategy=NodeAffinitySchedulingStrategy(node.id, soft=False),
                runtime_env={"env_vars": {"PYTHONPATH": _python_path()}},
            )
            .remote(_for_nodes(config), node.id[:12])
        )

    async def give(self, orders: Orders) -> None:
        await self._actor.give.remote(orders)

    async def report(self) -> Report:
        report: Report = await self._actor.report.remote()
        return report

    def close(self) -> Any:
        """Let it end by itself; return what Ray waits for."""
        return self._actor.close.remote()

    def end(self) -> None:
        ray.kill(self._actor)


class RolloutWorkers:
    """Starts rollout workers and hands them over to a `Handout`; a context manager that ends them.

    A node whose worker was killed gets another one, after a pause. A node whose worker ended with an error of the node
    (`Failure.of_its_host`) gets no other one in this flow run.
    """

    def __init__(self, config: Config, progress: Callable[[str], None]) -> None:
        self._config, self._progress = config, progress
        self._needs = needs_of(config)
        knobs = config.cluster
        self.handout = Handout(knobs.silence_s, knobs.start_timeout_s, progress, self._note_loss)
        self._lock = threading.Lock()
        self._workers: dict[str, RayWorker] = {}  # by node
        self._losses: dict[str, list[float]] = {}
        """When each node has lost workers."""
        self._broken: dict[str, BaseException] = {}
        self._ended = threading.Event()
        self._watch = threading.Thread(target=self._look_for_nodes, name="nodes", daemon=True)

    def __enter__(self) -> Self:
        present = nodes()
        chosen = place(present, self._needs)
        self._progress(f"on {len(chosen)} of {len(present)} nodes:\n{table(present, chosen, self._needs)}")
        self.handout.__enter__()
        for node in chosen:
            self._start(node)
        self._watch.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        self._ended.set()
        self._watch.join()
        try:
            if kind is None or issubclass(kind, Exception):
                closing = [worker.close() for worker in self._workers.values()]
                ray.wait(closing, num_returns=len(closing), timeout=_CLOSE_S)
        finally:
            self.handout.__exit__(kind, value, tb)

    def _start(self, node: Node) -> None:
        worker = RayWorker(self._config, node, self._needs.gpus)
        with self._lock:
            self._workers[node.id] = worker
        self.handout.add(worker)

    def _note_loss(self, remote: RemoteWorker, error: BaseException) -> None:
        assert isinstance(remote, RayWorker)
        with self._lock:
            self._workers.pop(remote.node.id, None)
            self._losses.setdefault(remote.node.id, []).append(time.monotonic())
            if isinstance(error, WorkerFailedError):
                self._broken[remote.node.id] = error

    def _look_for_nodes(self) -> None:
        """Start workers on nodes that have joined, or have lost theirs; the body of a thread."""
        while not self._ended.wait(_LOOK_S):
            try:
                present = nodes()
            except Exception as error:  # noqa: BLE001 # the head is gone: the workers are lost, too, and the flow ends
                self.handout.fail(error)
                return
            with self._lock:
                room = (self._needs.workers or len(present)) - len(self._workers)
                free = [node for node in present if self._may_start(node)]
                broken = not self._workers and self._broken.keys() >= {node.id for node in present}
                cause = next(iter(self._broken.values()), None)
            if broken and cause:
                self.handout.fail(cause.as_own() if isinstance(cause, WorkerFailedError) else cause)
            for node in free[: max(0, room)]:
                self._progress(f"{node.name}: starting a rollout worker")
                self._start(node)

    def _may_start(self, node: Node) -> bool:
        if node.id in self._workers or node.id in self._broken:
            return False
        losses = self._losses.get(node.id, [])
        pause = _PAUSE_S * 2 ** len(losses) if losses else 0.0
        fits = node.cpus >= 1 and node.gpus >= self._needs.gpus
        return fits and (not losses or time.monotonic() > losses[-1] + pause)


def needs_of(config: Config) -> Needs:
    """Return what the rollout workers of a run need."""
    gpus = config.cluster.gpus_per_worker
    if gpus is None:
        settings = config.inference
        gpus = 0 if cpu_build() else settings.replicas * devices_of_a_server(settings.extra_args)
    return Needs(gpus, config.cluster.rollout_workers)


def _for_nodes(config: Config) -> dict[str, Any]:
    """Return the configuration with absolute paths, because a node's process has another working directory."""
    values = config.model_dump(mode="json")
    storage = values["storage"]
    storage["cache"] = str(Path(storage["cache"]).expanduser().absolute())
    if "://" not in storage["root"]:
        storage["root"] = str(Path(storage["root"]).expanduser().absolute())
    return values


def _python_path() -> str:
    """Return where a node finds this package and the user's agents: where this host does."""
    return os.pathsep.join(dict.fromkeys([str(_ROOT), os.getcwd(), *filter(None, [os.environ.get("PYTHONPATH")])]))
