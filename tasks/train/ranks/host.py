"""The ranks of one host, which torchrun starts and ends.

torchrun gives each rank a session of its own, so killing torchrun would leave the ranks; therefore each rank asks the
kernel to end it with torchrun. torchrun itself runs under a supervisor, which ends it with this process.

Each torchrun knows only the ranks of its own host, since those of several hosts would wait for each other's end. Only
the ranks themselves meet at `trainer.address`, where the first one listens.
"""

import errno
import json
import math
import os
import re
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from configs import Config, to_yaml
from storage.processes.child import Child as Supervised

LOOK_S = 2.0
"""Time between two looks for processes that a signal has stopped."""
_POLL_S = 0.2
_PORT_S = 10.0
"""Longest wait for a port that the first rank of the last start may still use while it ends."""
_REPORT_LINES = 2000
"""Enough for torchrun's report of all ranks of a host."""
_FAILURE = re.compile(r"^ +rank +: (\d+).*\n +exitcode +: (-?\d+)", re.MULTILINE)
_ROOT = Path(__file__).parents[3]


class HostRanks:
    """One start of the ranks of the host with number `index`, where 0 is the flow's.

    Args:
        config: the configuration of the ranks.
        logs: a folder for their logs.
        index: the number of the host.

    Attributes:
        folder: a folder that no other user may enter, for the flow's socket.
    """

    def __init__(self, config: Config, logs: Path, index: int = 0) -> None:
        self._config, self._logs, self._index = config, logs.absolute(), index
        self._of_host = config.ppo.parallel.ranks // config.trainer.hosts
        self._torchrun = Supervised(self._logs / "torchrun.log")
        self.folder = self._torchrun.folder

    @property
    def alive(self) -> bool:
        return self._torchrun.alive

    @property
    def was_killed(self) -> bool:
        """Return whether a signal ended torchrun or its supervisor."""
        return (self._torchrun.status or 0) < 0

    def start(self, orders: Path | None = None) -> None:
        """Start torchrun, without waiting.

        Raises:
            ValueError: the port of `trainer.address` is taken on the flow's host, or its name does not resolve.
        """
        knobs = self._config.trainer
        if knobs.address and self._index == 0:
            _refuse_taken(knobs.address)
        given = self.folder / "config.yaml"
        given.write_text(to_yaml(self._config))
        command = [
            *(sys.executable, "-m", "torch.distributed.run"),
            *("--nnodes", "1", "--nproc-per-node", str(self._of_host), "--max-restarts", "0"),
            *("--monitor-interval", "0.2", "--local-addr", "127.0.0.1"),
            # A private file: torch's own server would listen on all interfaces, without a password.
            *("--rdzv-backend", "c10d", "--rdzv-endpoint", str(self.folder / "torchrun")),
            *("--rdzv-conf", "store_type=file"),
            *("-m", "tasks.train.ranks.rank", str(given), "--rank-logs", str(self._logs)),
            *(("--orders", str(orders)) if orders else ()),
            *(("--host", str(self._index)) if knobs.address else ("--meeting", str(self.folder / "ranks"))),
        ]
        path = os.pathsep.join([str(_ROOT), os.getcwd(), os.environ.get("PYTHONPATH", "")])
        threads = str(self._config.ppo.threads)
        own = {"PYTHONPATH": path, "OMP_NUM_THREADS": threads, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        self._torchrun.start(command, os.environ | own)

    def join(self, timeout_s: float = math.inf) -> bool:
        """Wait for the end of all ranks; return whether they have ended, each with exit status 0."""
        deadline = time.monotonic() + timeout_s

        def has_ended() -> bool:
            look = min(deadline, time.monotonic() + LOOK_S)
            while self.alive and time.monotonic() < look:
                time.sleep(_POLL_S)
            return not self.alive or time.monotonic() >= deadline

        self.wait_until(has_ended)
        return self._torchrun.status == 0

    def wait_until(self, has_come: Callable[[], bool]) -> bool:
        """Call `has_come` until it returns True, but give up if a process of this host is stopped for too long.

        Only this host can be sure to notice that: no rank may be waiting for the stopped one.

        Args:
            has_come: a function that waits `LOOK_S`, or less.

        Returns:
            False if a signal has stopped a rank, torchrun or its supervisor for `trainer.timeout_s`.
        """
        moved = time.monotonic()
        while not has_come():
            if not self._is_stopped():
                moved = time.monotonic()
            elif time.monotonic() > moved + self._config.trainer.timeout_s:
                return False
        return True

    def close(self) -> None:
        """End torchrun and the ranks, whatever they do."""
        self._torchrun.close()

    def _is_stopped(self) -> bool:
        """Return whether a signal (SIGSTOP) has stopped a process."""
        try:
            supervisor = psutil.Process(self._torchrun.pid)
            processes = [supervisor, *supervisor.children(recursive=True)]
            return psutil.STATUS_STOPPED in [process.status() for process in processes]
        except psutil.NoSuchProcess:  # one has just ended
            return False

    def log_tail(self, lines: int = 40) -> str:
        return self._torchrun.log_tail(lines)

    def errors(self) -> list[dict[str, Any]]:
        """Return what ranks of this host have written of their errors, the first one first; see `rank`."""
        errors = [json.loads(path.read_text()) for path in self._logs.glob("*.error.json")]
        return sorted(errors, key=lambda error: float(error["time"]))

    def first_to_end(self) -> tuple[int, int] | None:
        """Return the number of the rank of this host that was lost first and its exit code, if torchrun knows."""
        first = first_to_end(self.log_tail(_REPORT_LINES))
        return first and (self._index * self._of_host + first[0], first[1])


def first_to_end(report: str) -> tuple[int, int] | None:
    """Return the rank that was lost first and its exit code, from torchrun's report; None if it names no rank.

    torchrun looks at the ranks a few times a second. Of those that ended since, it calls any the root cause, so a rank
    that a signal ended comes first: the others have noticed its end, and have failed because of it. (With NCCL they
    abort themselves, with exit code -6; so if a rank hangs, one that has waited for it is named.)
    """
    failures = [(int(rank), int(code)) for rank, code in _FAILURE.findall(report)]
    return min(failures, key=lambda failure: failure[1], default=None)


def was_killed(code: int) -> bool:
    """Return whether a signal from outside ended a rank with this exit code; NCCL aborts ranks that wait in vain."""
    return code < 0 and code != -signal.SIGABRT


def split_address(given: str) -> tuple[str, int]:
    """Return host and port of `trainer.address`.

    >>> split_address("[fd00::1]:29500")
    ('fd00::1', 29500)
    """
    host, _, port = given.rpartition(":")
    return host.strip("[]"), int(port)


def _refuse_taken(given: str) -> None:
    """Raise ValueError if no server can listen at `trainer.address`, as the first rank will do on all interfaces."""
    host, port = split_address(given)
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except socket.gaierror as error:
        raise ValueError(
            f"trainer.address={given}: {host} does not resolve here ({error.strerror}): give this host's IP address"
        ) from None
    everywhere = "::" if family == socket.AF_INET6 else "0.0.0.0"
    deadline = time.monotonic() + _PORT_S
    for name in (address[0], everywhere):
        while problem := _cannot_listen(family, (name, *address[1:])):
            if problem.errno != errno.EADDRINUSE or time.monotonic() > deadline:
                raise ValueError(
                    f"trainer.address={given} cannot be used on the flow's host ({problem.strerror}): it must be an "
                    "address of this host, with a port that is free"
                )
            time.sleep(_POLL_S)


def _cannot_listen(family: int, address: tuple[Any, ...]) -> OSError | None:
    """Return why no server can listen at `address`; None if one can."""
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
        except OSError as error:
            return error
    return None
