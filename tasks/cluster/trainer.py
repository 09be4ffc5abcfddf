"""The trainer's ranks on the nodes of a Ray cluster (`trainer.launcher=ray`)."""

import contextvars
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self, TypeVar, cast

import ray
from ray.exceptions import GetTimeoutError, RayError, RayTaskError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from configs import Config
from storage.objects.store import Store
from tasks.cluster.connection import environment, nodes
from tasks.cluster.logs import keep_logs
from tasks.cluster.node_process import for_nodes
from tasks.cluster.node_ranks import LOST, NodeRanks
from tasks.cluster.placement import Gang, PlacementError, check_gang
from tasks.rollout.remote.messages import Failure
from tasks.train.orders import DistanceOrder, Made, Progress, UpdateOrder
from tasks.train.ranks.launcher import RanksLostError

_CHECK_S = 2.0
"""Time between two checks of all hosts; it also tells them that the flow is alive."""
_END_S = 10.0
_POLL_S = 0.5
_THREADS = 4
Result = TypeVar("Result")


class RayTrainer:
    """Trains with ranks on `trainer.hosts` nodes (see `OrderedTrainer`); a context manager that ends them.

    Its room is reserved at once, in a placement group with a bundle for each node. The ranks start with the first order
    and live through the flow. If one is lost, or a node, all of them start again from the last checkpoint, up to
    `trainer.max_restarts` times.

    Args:
        config: the run's configuration.
        progress: called with lines of text.

    Raises:
        PlacementError: the cluster has too little room.
    """

    def __init__(self, config: Config, progress: Progress) -> None:
        self._config, self._progress = config, progress
        gang = gang_of(config)
        check_gang(nodes(), gang)
        self._bundle = {"CPU": float(gang.cores), "GPU": float(gang.gpus)}
        wanted = {name: count for name, count in self._bundle.items() if count}
        strategy = "STRICT_SPREAD" if gang.hosts > 1 else "PACK"
        self._room: PlacementGroup = placement_group([wanted] * gang.hosts, strategy=strategy)
        self._restarts = 0
        self._hosts: list[Any] = []
        self._failure: Failure | None = None
        """Why the ranks of a host have ended."""
        self._ready = False
        """Whether the ranks of all hosts have met."""
        self._watching = threading.Condition()
        self._ended = False
        around = contextvars.copy_context().run
        self._watch = threading.Thread(target=around, args=[self._look], name="trainer", daemon=True)

    def __enter__(self) -> Self:
        if not self._room.wait(int(self._config.cluster.start_timeout_s)):
            remove_placement_group(self._room)
            raise PlacementError("another job has taken the room of the trainer's ranks: start the flow again later")
        self._watch.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        with self._watching:
            self._ended = True
            self._watching.notify_all()
        self._watch.join()
        try:
            if self._hosts and isinstance(value, Exception):
                keep_logs(Store.of(self._config.storage), self._config.run.name, self._hosts, [value], self._progress)
            if self._hosts and (kind is None or issubclass(kind, Exception)):
                closing = [host.close.remote() for host in self._hosts]
                ray.wait(closing, num_returns=len(closing), timeout=_END_S)
        finally:
            self._kill()
            remove_placement_group(self._room)

    def update(self, order: UpdateOrder, progress: Progress) -> Made:
        """See `OrderedTrainer.update`.

        Raises:
            RanksLostError: ranks were lost more than `trainer.max_restarts` times.
        """
        made: Made = self._with_restarts(lambda: self._ask("update", order), progress)
        return made

    def distance(self, order: DistanceOrder) -> float | None:
        """See `OrderedTrainer.distance`."""
        distance: float | None = self._with_restarts(lambda: self._ask("distance", order), self._progress)
        return distance

    def _with_restarts(self, action: Callable[[], Result], progress: Progress) -> Result:
        while True:
            try:
                if not self._hosts:
                    self._start()
                return action()
            except RanksLostError as error:
                cause = self._first_cause()
                # Hosts of the last start are killed at the flow's end, after their logs are kept.
                if cause and cause.kind != LOST:
                    raise _error(cause) from error
                if self._restarts >= self._config.trainer.max_restarts:
                    raise
                self._kill()
                self._restarts += 1
                progress(f"{error}\nAll ranks start again from the last checkpoint (restart {self._restarts})")

    def _start(self) -> None:
        """Start the processes of all hosts, then their ranks, and wait until they have met."""
        knobs = self._config.trainer
        if not self._room.wait(int(knobs.startup_timeout_s)):
            raise RanksLostError(f"no room for the ranks within trainer.startup_timeout_s={knobs.startup_timeout_s:g}")
        hosts = [self._start_process(index) for index in range(knobs.hosts)]
        with self._watching:
            self._hosts, self._failure, self._ready = hosts, None, False
        address = self._get(hosts[0].free_address.remote(_ip_of(self._room))) if knobs.hosts > 1 else None
        waiting = [host.start.remote(address) for host in hosts]
        for place in reversed(waiting):  # the first host waits for all others
            if failure := self._get(place):
                raise _error(failure)
        self._ready = True
        self._progress(f"{self._config.ppo.parallel.ranks} ranks are ready on {knobs.hosts} node(s)")

    def _start_process(self, index: int) -> Any:
        actor: Any = ray.remote(NodeRanks)
        name = f"trainer/host-{index}/start-{self._restarts + 1}"
        return actor.options(
            num_cpus=self._bundle["CPU"],
            num_gpus=self._bundle["GPU"],
            max_concurrency=_THREADS,
            scheduling_strategy=PlacementGroupSchedulingStrategy(self._room, index),
            runtime_env=environment(),
        ).remote(for_nodes(self._config), name, index)

    def _ask(self, method: str, order: Any) -> Any:
        answer = self._get(getattr(self._hosts[0], method).remote(order))
        if isinstance(answer, Failure):
            raise _error(answer)
        return answer

    def _get(self, reference: Any) -> Any:
        """Wait for an answer as long as no host is lost."""
        while True:
            try:
                return ray.get(reference, timeout=_CHECK_S)
            except GetTimeoutError:
                with self._watching:
                    if self._failure:
                        raise _error(self._failure) from None
            except RayTaskError:
                raise
            except RayError as error:
                raise RanksLostError(f"a node of the trainer is lost: {str(error).splitlines()[0]}") from error

    def _first_cause(self) -> Failure | None:
        """Return why the ranks of a host have ended; a rank that failed by itself has made all others lose it."""
        deadline = time.monotonic() + _END_S
        for host in self._hosts[1:]:
            failure = _await_failure(host, deadline)
            if failure and failure.kind != LOST:
                return failure
        return self._failure

    def _look(self) -> None:
        """Check all hosts from time to time, whether or not others answer; the body of a thread."""
        hosts: list[Any] = []
        asked: dict[int, tuple[Any, float]] = {}
        """The check that each host has not answered yet, and when it was asked."""
        while True:
            with self._watching:
                self._watching.wait(_CHECK_S)
                if self._ended:
                    return
                if hosts is not self._hosts:
                    hosts, asked = self._hosts, {}
            for index, host in enumerate(hosts):
                if index not in asked:
                    asked[index] = (host.check.remote(), time.monotonic())
                failure = self._answer(index, asked)
                with self._watching:
                    if failure and hosts is self._hosts:
                        self._failure = self._failure or failure

    def _answer(self, index: int, asked: dict[int, tuple[Any, float]]) -> Failure | None:
        """Take the answer of a host, if it is there; return why its ranks have ended, if they have."""
        answer, since = asked[index]
        knobs = self._config
        patience = knobs.cluster.silence_s if self._ready else knobs.trainer.startup_timeout_s
        try:
            lines, failure = ray.get(answer, timeout=0)
        except GetTimeoutError:
            late = time.monotonic() > since + patience
            text = f"host {index} of the trainer did not answer for {patience:g} s"
            return Failure(LOST, text, "") if late else None
        except RayError:
            return Failure(LOST, f"host {index} of the trainer is lost: its process or its node has ended", "")
        del asked[index]
        for line in lines:
            self._progress(line)
        return cast(Failure | None, failure)

    def _kill(self) -> None:
        with self._watching:
            hosts, self._hosts = self._hosts, []
        for host in hosts:
            ray.kill(host)


def _await_failure(host: Any, deadline: float) -> Failure | None:
    """Return why the ranks of a host have ended, or will have soon; None if it does not say so in time."""
    while (left := deadline - time.monotonic()) > 0:
        try:
            _, failure = ray.get(host.check.remote(), timeout=left)
        except RayError:  # it is lost, too
            return None
        if failure:
            return cast(Failure, failure)
        time.sleep(_POLL_S)
    return None


def gang_of(config: Config) -> Gang:
    """Return what the trainer's ranks need; GPUs if `ppo.device` allows them and the cluster has any."""
    hosts = config.trainer.hosts
    of_host = config.ppo.parallel.ranks // hosts
    gpus = config.ppo.device == "cuda" or (config.ppo.device == "auto" and ray.cluster_resources().get("GPU", 0) > 0)
    return Gang(hosts, of_host, of_host if gpus else 0)


def _ip_of(room: PlacementGroup) -> str:
    """Return the IP address of the node that has the first bundle."""
    node = ray.util.placement_group_table(room)["bundles_to_node_id"][0]
    return str(next(each["NodeManagerAddress"] for each in ray.nodes() if each["NodeID"] == node))


def _error(failure: Failure) -> Exception:
    return RanksLostError(failure.text) if failure.kind == LOST else failure.as_own()
