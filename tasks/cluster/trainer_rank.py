"""The actor that is one rank of the trainer: it joins the others, and carries out the flow's orders with them."""

import logging
import os
import platform
import shutil
import sys
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import ray

from configs import Config
from storage.versions.drafts import code_version
from tasks.cluster.node_process import logs_of, open_store, store_logs
from tasks.own_code import Code
from tasks.train.orders import DistanceOrder, Made, RanksLostError, UpdateOrder

if TYPE_CHECKING:
    from tasks.train.version_trainer import VersionTrainer

_LIBRARIES = ("torch", "transformers", "numpy", "safetensors", "pyarrow")
ASIDE = "aside"
"""The concurrency group of what a rank answers while it carries out an order."""
Line = tuple[str | None, int, str]
"""The name of a logger, a level, and a text; without a name it is a line of progress."""
logger = logging.getLogger(__name__)


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
        self._lines: deque[Line] = deque()

    def begin(self) -> dict[str, str]:
        """Open store, log and device; return what must be the same in all ranks.

        Raises:
            StorageError: this node does not see the run in the store.
            CodeChangedError: this node has other code of the user's.
            ValueError: Ray asks for no token on this node.
        """
        log = logs_of(self._config) / "trainer" / f"rank-{self._number:05d}.log"
        open_store(self._config, log, self._code)
        _also_output_to(str(log))
        logging.getLogger("tasks").addHandler(_Forwarder(self._lines))
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
            self._trainer = VersionTrainer(self._config, mesh)

    def update(self, order: UpdateOrder, nonce: str) -> Made:
        """See `VersionTrainer.update`; the files are those that this rank has written."""
        with self._logging_errors():
            assert self._trainer
            return self._trainer.update(order, self._progress, nonce)

    def distance(self, order: DistanceOrder, _nonce: str) -> float | None:
        """See `VersionTrainer.distance`; no file is written."""
        with self._logging_errors():
            assert self._trainer
            return self._trainer.distance(order)

    @ray.method(concurrency_group=ASIDE)
    def lines(self) -> list[Line]:
        """Return progress and warnings since the last call."""
        return [self._lines.popleft() for _ in range(len(self._lines))]

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
        self._lines.append((None, logging.INFO, text))

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


class _Forwarder(logging.Handler):
    """Keeps warnings for the flow."""

    def __init__(self, lines: deque[Line]) -> None:
        super().__init__(logging.WARNING)
        self._lines = lines

    def emit(self, record: logging.LogRecord) -> None:
        self._lines.append((record.name, record.levelno, record.getMessage()))


def _also_output_to(path: str) -> None:
    """Send all output of this process to its log, also that of C libraries."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(file, sys.stdout.fileno())
    os.dup2(file, sys.stderr.fileno())
