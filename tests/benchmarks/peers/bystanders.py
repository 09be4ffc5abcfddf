"""A meter of the processor time that other processes use while one is measured; much of it spoils the numbers."""

import threading
import time
from types import TracebackType

import psutil

POLL_S = 0.5


class Bystanders:
    """Counts processor time that neither a process nor its descendants used. A context manager.

    Args:
        process: id of the measured process, which must be alive.
    """

    def __init__(self, process: int) -> None:
        self._root = psutil.Process(process)
        self._used: dict[tuple[int, float], float] = {}  # seconds of each process of the tree
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self.share = 0.0
        """Share of all processors that other processes used; known at the end."""

    def __enter__(self) -> "Bystanders":
        self._began, self._busy = time.monotonic(), _busy()
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, _: BaseException | None, __: TracebackType | None) -> None:
        self._done.set()
        self._thread.join()
        others = _busy() - self._busy - sum(self._used.values())
        self.share = max(0.0, others / ((time.monotonic() - self._began) * (psutil.cpu_count() or 1)))

    def _watch(self) -> None:
        while not self._done.wait(POLL_S):
            try:
                for process in (self._root, *self._root.children(recursive=True)):
                    times = process.cpu_times()
                    self._used[process.pid, process.create_time()] = times.user + times.system
            except psutil.NoSuchProcess:  # it has just ended; its last times are known
                continue


def _busy() -> float:
    """Return the seconds that all processors have worked since the machine started."""
    times = psutil.cpu_times()
    return float(times.user + times.nice + times.system)
