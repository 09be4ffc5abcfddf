"""The flow's workers in processes of this host (`rollout.processes`), each with its share of the servers."""

import contextvars
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

from configs import Config
from tasks.rollout.remote.handout import Handout
from tasks.rollout.remote.host_process import HostProcess, open_engine
from tasks.rollout.remote.losses import Losses
from tasks.rollout.remote.shared_rollout import RemoteWorker
from tasks.rollout.remote.shares import deal_shares

_LOOK_S = 0.5
"""Time between two looks for processes that are missing."""
_SILENCE_S = 120.0
_START_S = 600.0
_REST_S = 10.0
"""Time after the loss of a process in which its servers end and leave their GPUs."""
_CLOSE_S = 8.0
"""Longest wait for processes that end by themselves."""


class HostProcesses:
    """Starts the processes and hands them over to a `Handout`; a context manager that ends them.

    A process that is lost is started again, unless it ended with an error, or is lost again and again (`Losses`). All
    of them end when the flow's process does, however it ends, and with them the processes that they have started.

    Args:
        config: the run's configuration.
        progress: called with lines of text.

    Raises:
        InferenceError: this machine has fewer GPUs than the servers need.
    """

    def __init__(self, config: Config, progress: Callable[[str], None]) -> None:
        self._shares = {f"process-{number}": share for number, share in enumerate(deal_shares(config))}
        self.handout = Handout(_SILENCE_S, _START_S, progress, self._note_loss)
        self._lock = threading.Lock()
        self._workers: dict[str, HostProcess] = {}
        self._losses = Losses(_REST_S)
        self._ended = threading.Event()
        around = contextvars.copy_context().run  # with the context in which Prefect knows where logs go
        # One thread starts all processes, because each ends with the thread that started it.
        self._keeper = threading.Thread(target=around, args=[self._keep], name="processes", daemon=True)

    def __enter__(self) -> Self:
        self.handout.__enter__()
        self._keeper.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        self._ended.set()
        self._keeper.join()

    def _keep(self) -> None:
        """Start processes and those that replace them, and end them; the body of a thread."""
        try:
            self._start_missing()
            while not self._ended.wait(_LOOK_S):
                self._start_missing()
        except Exception as error:  # noqa: BLE001 # the flow raises it
            self.handout.fail(error)
            self._ended.wait()
        self.handout.__exit__(None, None, None)  # asks all of them to end
        deadline = time.monotonic() + _CLOSE_S
        for worker in self._workers.values():
            worker.join(max(0.0, deadline - time.monotonic()))

    def _start_missing(self) -> None:
        with self._lock:
            missing = [name for name in self._shares if name not in self._workers and self._losses.may_start(name)]
            cause = self._losses.cause if self._losses.broken.keys() >= self._shares.keys() else None
        if cause:
            self.handout.fail(cause)
        for name in missing:
            worker = HostProcess(self._shares[name], name, open_engine)
            with self._lock:
                self._workers[name] = worker
            self.handout.add(worker)

    def _note_loss(self, remote: RemoteWorker, error: BaseException, useful: bool) -> None:
        assert isinstance(remote, HostProcess)
        remote.kill()
        with self._lock:
            del self._workers[remote.name]
            self._losses.note(remote.name, error, useful=useful)
