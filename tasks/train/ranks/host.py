"""The ranks of one host, which torchrun starts and ends.

torchrun gives each rank a session of its own, so killing torchrun would leave the ranks; therefore each rank asks the
kernel to end it with torchrun. torchrun itself runs under a supervisor, which ends it with this process, and kills it
if it does not end by itself: cut off from the first host it would wait for minutes.
"""

import math
import os
import shutil
import socket
import sys
import time
from pathlib import Path

import psutil

from configs import Config, to_yaml
from tasks.inference.supervised import Supervised
from tasks.train.version_trainer import host_scratch

_GRACE_S = 10.0
"""Longest time that torchrun may take to notice the end of all of its ranks."""
_POLL_S = 0.2
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
        self._torchrun = Supervised(self._logs / "torchrun.log")
        self.folder = self._torchrun.folder

    @property
    def alive(self) -> bool:
        return self._torchrun.alive

    @property
    def was_killed(self) -> bool:
        """Return whether a signal ended torchrun or its supervisor."""
        return self._torchrun.was_killed

    def start(self, orders: Path | None = None) -> None:
        """Start torchrun, without waiting.

        Raises:
            ValueError: the port of `trainer.address` is taken on the flow's host, or its name does not resolve.
        """
        shutil.rmtree(host_scratch(self._config, self._index), ignore_errors=True)  # left by ranks that were killed
        knobs, parallel = self._config.trainer, self._config.ppo.parallel
        given = self.folder / "config.yaml"
        given.write_text(to_yaml(self._config))
        command = [
            *(sys.executable, "-m", "torch.distributed.run"),
            *("--nnodes", str(knobs.hosts), "--node-rank", str(self._index)),
            *("--nproc-per-node", str(parallel.ranks // knobs.hosts)),
            *("--max-restarts", "0", "--monitor-interval", "0.2"),
            *self._meeting(),
            *("-m", "tasks.train.ranks.rank", str(given), "--rank-logs", str(self._logs)),
            *(("--orders", str(orders)) if orders else ()),
            *(() if knobs.address else ("--meeting", str(self.folder / "ranks"))),
        ]
        path = os.pathsep.join([str(_ROOT), os.getcwd(), os.environ.get("PYTHONPATH", "")])
        threads = str(self._config.ppo.threads)
        own = {"PYTHONPATH": path, "OMP_NUM_THREADS": threads, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        self._torchrun.start(command, os.environ | own)

    def join(self, timeout_s: float = math.inf) -> bool:
        """Wait for the end of all ranks; return whether they have ended, each with exit status 0.

        If torchrun outlives its ranks, it is killed: cut off from the first host it would wait for minutes.
        """
        began, with_ranks = time.monotonic(), 0.0
        while self.alive and time.monotonic() < began + timeout_s:
            if self._has_ranks():
                with_ranks = time.monotonic()
            elif with_ranks and time.monotonic() > with_ranks + _GRACE_S:
                return False
            time.sleep(_POLL_S)
        return self._torchrun.succeeded

    def close(self) -> None:
        """End torchrun and the ranks, whatever they do."""
        self._torchrun.close()

    def log_tail(self, lines: int = 40) -> str:
        return self._torchrun.log_tail(lines)

    def _has_ranks(self) -> bool:
        try:
            processes = psutil.Process(self._torchrun.pid).children(recursive=True)
            return sum(process.status() != psutil.STATUS_ZOMBIE for process in processes) > 1  # the first is torchrun
        except psutil.Error:
            return False

    def _meeting(self) -> list[str]:
        """Return torchrun's arguments that say where it meets the other hosts; alone, it keeps to a private file.

        torch's own server would listen on all interfaces, without a password.
        """
        given, timeout = self._config.trainer.address, math.ceil(self._config.trainer.startup_timeout_s)
        if given is None:
            file, conf = str(self.folder / "torchrun"), f"store_type=file,join_timeout={timeout}"
            return ["--rdzv-backend", "c10d", "--rdzv-endpoint", file, "--rdzv-conf", conf, "--local-addr", "127.0.0.1"]
        host, _, port = given.rpartition(":")
        host = host.strip("[]")
        if self._index == 0:
            _refuse_taken(host, int(port), given)
        return ["--master-addr", host, "--master-port", port, "--local-addr", host, "--rdzv-conf", f"timeout={timeout}"]


def _refuse_taken(host: str, port: int, given: str) -> None:
    """Raise ValueError if no server can listen at `port`."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except socket.gaierror as error:
        raise ValueError(
            f"trainer.address={given}: {host} does not resolve here ({error.strerror}): give this host's IP address"
        ) from None
    with socket.socket(family, kind) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
        except OSError as error:
            raise ValueError(
                f"trainer.address={given} cannot be used on the flow's host ({error.strerror}): it must be an address "
                "of this host, with a port that is free"
            ) from None
