"""The trainer's ranks as Ray actors: the flow starts them, gives them orders, and starts them again after a loss."""

import logging
import math
import os
import platform
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from logging.handlers import QueueHandler
from queue import SimpleQueue
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, cast

import ray
from ray.exceptions import GetTimeoutError, RayError, RayTaskError
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from configs import Config
from storage.objects.store import Store
from storage.versions.drafts import code_version, new_nonce
from tasks.cluster.connection import environment, for_nodes, keep_logs, logs_of, nodes, open_store, store_logs
from tasks.cluster.placement import PlacementError, check_ranks
from tasks.inference.devices import visible_devices
from tasks.registry import Code, own_code
from tasks.rollout.remote.interface import as_own
from tasks.train.orders import DistanceOrder, Made, Progress, RanksLostError, Updated, UpdateOrder

if TYPE_CHECKING:
    from tasks.train.version_trainer import VersionTrainer

logger = logging.getLogger(__name__)
_POLL_S = 0.5
"""Time between two questions for lines of progress."""
_END_S = 5.0
"""Longest wait for the other ranks' errors after the first one."""
_LIBRARIES = ("torch", "transformers", "numpy", "safetensors", "pyarrow")
ASIDE = "aside"
"""The concurrency group of what a rank answers while it carries out an order."""
Line = str | logging.LogRecord
"""A line of progress, or a warning."""


class RayTrainer:
    """Trains with `train.parallel` ranks (see `OrderedTrainer`), which run until the end of the block.

    Their cores and GPUs are reserved at once, in a placement group with a bundle for each. They start with the first
    order. If one is lost, all end. An order names versions in the store, so the next flow run can give it again; the
    files of each attempt have a folder of their own.

    Args:
        config: the run's configuration.
        progress: called with lines of text.

    Raises:
        PlacementError: the ranks do not fit on the cluster.
    """

    def __init__(self, config: Config, progress: Progress) -> None:
        self._config, self._progress = config, progress
        self._bundle = _bundle(config)
        count = config.train.parallel.ranks
        check_ranks(nodes(), count, self._bundle["CPU"], self._bundle.get("GPU", 0.0))
        # A single rank lies on the flow's own node if it can: then the end of another node costs no restart.
        own: dict[str, Any] = {"_soft_target_node_id": ray.get_runtime_context().get_node_id()} if count == 1 else {}
        strategy = "STRICT_PACK" if count == 1 else "PACK"
        self._reserved: PlacementGroup = placement_group([self._bundle] * count, strategy, **own)
        self._ranks: list[Any] = []

    def __enter__(self) -> Self:
        if not self._reserved.wait(int(self._config.train.startup_timeout_s)):
            remove_placement_group(self._reserved)
            raise PlacementError("another job has taken the nodes of the trainer's ranks: start the flow again later")
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        try:
            if self._ranks and isinstance(value, Exception):
                keep_logs(Store(self._config.storage.root), self._config.run.name, self._ranks, [value], self._progress)
        finally:
            for rank in self._ranks:
                ray.kill(rank)
            remove_placement_group(self._reserved)

    def update(self, order: UpdateOrder, progress: Progress) -> Updated:
        """See `OrderedTrainer.update`.

        Raises:
            RanksLostError: a rank was lost; all end.
        """
        return cast(Updated, self._carry_out("update", progress, order, new_nonce())[0])

    def write(self) -> Made:
        """See `OrderedTrainer.write`."""
        made: list[Made] = self._carry_out("write", self._progress)
        return Made(made[0].nonce, [file for of_rank in made for file in of_rank.files])

    def distance(self, order: DistanceOrder) -> float | None:
        """See `OrderedTrainer.distance`."""
        return cast(float | None, self._carry_out("distance", self._progress, order)[0])

    def _carry_out(self, method: str, progress: Progress, *order: object) -> list[Any]:
        """Let all ranks carry out an order; return their answers."""
        try:
            if not self._ranks:
                self._start(progress)
            asked = [getattr(rank, method).remote(*order) for rank in self._ranks]
            return self._answers(asked, progress)
        except RanksLostError as error:
            raise RanksLostError(f"{error}. Start the flow again: it continues from the last checkpoint") from error

    def _start(self, progress: Progress) -> None:
        """Start all ranks, and wait until they have met."""
        started, limit = time.monotonic(), self._config.train.startup_timeout_s
        if not self._reserved.wait(int(limit)):
            raise RanksLostError(f"no nodes were free for the ranks within train.startup_timeout_s={limit:g}")
        bundles: dict[int, str] = placement_group_table(self._reserved)["bundles_to_node_id"]
        order = sorted(bundles, key=lambda bundle: (bundles[bundle], bundle))  # those of a node get consecutive numbers
        node_ids = [bundles[bundle] for bundle in order]
        self._ranks = [self._actor(bundle, number, node_ids) for number, bundle in enumerate(order)]
        _refuse_different(self._answers([rank.begin.remote() for rank in self._ranks], progress, limit))
        first, ips = self._ranks[0], {node["NodeID"]: str(node["NodeManagerAddress"]) for node in ray.nodes()}
        addresses = ["127.0.0.1" if len(set(node_ids)) == 1 else ips[node_id] for node_id in node_ids]
        joining = [rank.join.remote(first, address) for rank, address in zip(self._ranks, addresses, strict=True)]
        self._answers(joining, progress, limit)
        took = time.monotonic() - started
        progress(f"{len(order)} rank(s) on {len(set(node_ids))} node(s) are ready after {took:.1f} s")

    def _actor(self, bundle: int, number: int, node_ids: list[str]) -> Any:
        groups: dict[str, Any] = {"concurrency_groups": {ASIDE: 8}}
        actor: Any = ray.remote(**groups)(TrainerRank)
        around = environment()
        around["env_vars"]["OMP_NUM_THREADS"] = str(self._config.train.threads)
        if self._config.ray_address == "local" and "GPU" not in self._bundle and (visible := visible_devices()):
            # Ray gives it no GPU, but it may use those that the flow sees.
            around["env_vars"]["CUDA_VISIBLE_DEVICES"] = ",".join(visible)
        return actor.options(
            num_cpus=self._bundle["CPU"],
            num_gpus=self._bundle.get("GPU", 0),
            scheduling_strategy=PlacementGroupSchedulingStrategy(self._reserved, bundle),
            runtime_env=around,
        ).remote(for_nodes(self._config), own_code(self._config), number, node_ids)

    def _answers(self, waiting: Sequence[Any], progress: Progress, limit_s: float | None = None) -> list[Any]:
        """Return the answers of all ranks; pass on what the first one tells meanwhile.

        Raises:
            RanksLostError: a rank is lost, did not answer within `limit_s`, or the first one hangs.
            Exception: a rank failed by itself.
        """
        deadline, left = time.monotonic() + (limit_s or math.inf), list(waiting)
        while left:
            done, left = ray.wait(left, num_returns=1, timeout=_POLL_S)
            try:
                ray.get(done)
                self._listen(progress, limit_s or self._config.train.timeout_s)
            except RayError:
                raise self._first_cause(waiting) from None
            if left and time.monotonic() > deadline:
                raise RanksLostError(f"{len(left)} rank(s) did not answer within {limit_s:g} s")
        return ray.get(list(waiting))

    def _listen(self, progress: Progress, limit_s: float) -> None:
        """Pass on progress and warnings of the first rank.

        Raises:
            RanksLostError: it hangs.
        """
        try:
            lines: list[Line] = ray.get(self._ranks[0].lines.remote(), timeout=limit_s)
        except GetTimeoutError:
            raise RanksLostError(f"the first rank did not answer for {limit_s:g} s") from None
        for line in lines:
            if isinstance(line, str):
                progress(line)
            else:
                logging.getLogger(line.name).handle(line)

    def _first_cause(self, waiting: Sequence[Any]) -> Exception:
        """Return the error of a rank that failed by itself; the others only lost it. If none did, ranks were lost."""
        ray.wait(list(waiting), num_returns=len(waiting), timeout=_END_S)
        lost: RanksLostError | None = None
        for number, answer in enumerate(waiting):
            try:
                ray.get(answer, timeout=0)
            except GetTimeoutError:
                continue
            except RayTaskError as error:
                if not isinstance(error.cause, RanksLostError):
                    trace = f"rank {number}, with the log trainer/rank-{number:05d}.log:\n{error}"
                    return as_own(error.cause, trace, f"rank {number} failed: " if len(self._ranks) > 1 else "")
                lost = lost or RanksLostError(str(error.cause))
            except RayError:
                lost = RanksLostError(f"rank {number} has ended: its process or its node is gone")
        return lost or RanksLostError("the first rank has ended")


def _refuse_different(abouts: Sequence[dict[str, str]]) -> None:
    """Raise ValueError if what computes is not the same in all ranks."""
    for rank, about in enumerate(abouts):
        for name, expected in abouts[0].items():
            if (own := about[name]) != expected:
                raise ValueError(f"rank {rank} has {name} {own}, rank 0 has {expected}: install the same everywhere")


def _bundle(config: Config) -> dict[str, float]:
    """Return what a rank needs: a core, and a GPU if `train.device` allows it and Ray has any.

    A single rank on this host alone uses the first GPU, which Ray does not count, because it may share it with vLLM.
    """
    alone = config.ray_address == "local" and config.train.parallel.ranks == 1
    device, gpus = config.train.device, ray.cluster_resources().get("GPU", 0)
    on_gpu = device == "cuda" or (device == "auto" and gpus > 0)
    return {"CPU": 1.0} | ({"GPU": 1.0} if on_gpu and not alone else {})


class TrainerRank:
    """One rank. Torch is imported by `begin`, since starting an actor imports this module in the flow, too.

    Args:
        values: the run's configuration; its paths are absolute.
        code: the fingerprint of the user's code.
        number: the number of this rank.
        nodes: the node of each rank.
    """

    def __init__(self, values: dict[str, Any], code: Code, number: int, nodes: list[str]) -> None:
        self._config, self._code = Config.model_validate(values), code
        self._number, self._nodes = number, nodes
        self._device = "cpu"
        self._trainer: VersionTrainer | None = None
        self._notes: Any = None
        """The notes that the ranks leave for each other while they connect; used on rank 0."""
        self._lines: SimpleQueue[Line] = SimpleQueue()

    def begin(self) -> dict[str, str]:
        """Open store, log and device; return what must be the same in all ranks.

        Raises:
            StorageError: this node does not see the run in the store.
            CodeChangedError: this node has other code of the user's.
            ValueError: Ray asks for no token on this node.
        """
        log = logs_of(self._config) / "trainer" / f"rank-{self._number:05d}.log"
        open_store(self._config, log, self._code)
        # All output of this process goes to its log, also that of C libraries.
        file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(file, sys.stdout.fileno())
        os.dup2(file, sys.stderr.fileno())
        warnings = QueueHandler(self._lines)
        warnings.setLevel(logging.WARNING)
        logging.getLogger("tasks").addHandler(warnings)
        with self._logging_errors():
            from tasks.train.mesh import new_notes, take_gpu
            from tasks.train.policy import device_of
            from tasks.train.version_trainer import scratch_of_rank

            self._notes, self._device = new_notes(), device_of(self._config.train).type
            if self._device == "cuda":
                take_gpu()
            shutil.rmtree(scratch_of_rank(self._config, self._number), ignore_errors=True)  # a killed rank left it
            return {
                "code": code_version(),
                "the device": self._device,
                "Python": platform.python_version(),
                **{library: version(library) for library in _LIBRARIES},
            }

    def join(self, first: Any, address: str) -> None:
        """Join the group of all ranks, and wait until they have come.

        Args:
            first: the first rank, which keeps the notes by which they meet.
            address: the IP address at which the other ranks reach this one.
        """
        with self._logging_errors():
            from tasks.train.mesh import ALONE, Mesh, NoteStore, join_group
            from tasks.train.version_trainer import VersionTrainer

            def ask(action: str, *arguments: Any) -> Any:
                if self._number == 0:
                    return self.note(action, *arguments)
                return ray.get(first.note.remote(action, *arguments))

            knobs, size, mesh = self._config.train, len(self._nodes), ALONE
            if size > 1:
                store = NoteStore(ask, knobs.startup_timeout_s)
                join_group(self._number, size, self._device, store, address, knobs.timeout_s)
                mesh = Mesh.of(self._config.train.parallel, self._device, knobs.timeout_s, self._nodes)
            self._trainer = VersionTrainer(self._config, mesh, hands_over=False)

    def update(self, order: UpdateOrder, nonce: str) -> Updated:
        """See `VersionTrainer.update`."""
        with self._logging_errors():
            assert self._trainer
            return self._trainer.update(order, self._progress, nonce)

    def write(self) -> Made:
        """See `VersionTrainer.write`; the files are those that this rank has written."""
        with self._logging_errors():
            assert self._trainer
            return self._trainer.write()

    def distance(self, order: DistanceOrder) -> float | None:
        """See `VersionTrainer.distance`; no file is written."""
        with self._logging_errors():
            assert self._trainer
            return self._trainer.distance(order)

    @ray.method(concurrency_group=ASIDE)
    def lines(self) -> list[Line]:
        """Return progress and warnings since the last call."""
        return [self._lines.get() for _ in range(self._lines.qsize())]

    @ray.method(concurrency_group=ASIDE)
    def note(self, action: str, *arguments: Any) -> Any:
        """Call a method of the notes (`tasks.train.mesh.NoteStore`), if this is the first rank."""
        return getattr(self._notes, action)(*arguments)

    @ray.method(concurrency_group=ASIDE)
    def store_logs(self, folder: str) -> None:
        """Upload the ends of all logs of the run on this node."""
        store_logs(self._config, folder)

    def _progress(self, text: str) -> None:
        logger.info("%s", text)
        self._lines.put(text)

    @contextmanager
    def _logging_errors(self) -> Iterator[None]:
        """Log an error, and raise RanksLostError if it says that another rank is lost."""
        try:
            yield
        except Exception as error:
            from tasks.train.mesh import lost_another

            logger.exception("rank %d failed", self._number)
            if lost_another(error):
                raise RanksLostError(f"rank {self._number} lost another one: {error}") from None
            raise
