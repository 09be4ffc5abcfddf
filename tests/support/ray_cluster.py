"""A Ray cluster of several nodes on this machine, which asks for a token."""

import os
import secrets
import tempfile
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import psutil

TOKEN = {"RAY_AUTH_MODE": "token", "RAY_USAGE_STATS_ENABLED": "0"}
MARK = "RAY_CLUSTER_OF_TESTS"
"""Environment variable of the processes of a test's cluster: others may run on the same machine."""
os.environ.setdefault(MARK, secrets.token_hex(8))
_QUICK = {"health_check_initial_delay_ms": 1000, "health_check_period_ms": 500, "health_check_failure_threshold": 5}


class RayCluster(AbstractContextManager["RayCluster"]):
    """A head and two more nodes, each with two cores; a context manager that ends all of them.

    Attributes:
        scratch: the TMPDIR of all nodes.
    """

    def __init__(self) -> None:
        os.environ |= TOKEN  # before Ray's libraries are imported
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
        from ray.cluster_utils import Cluster

        self._folder = tempfile.TemporaryDirectory(prefix="ray-")
        self.scratch = Path(self._folder.name) / "tmp"
        self.scratch.mkdir()
        place = Path(self._folder.name) / "ray"  # where Ray, which follows RAY_TMPDIR, notes the address
        place.mkdir()
        self._node: dict[str, Any] = {"num_cpus": 2, "env_vars": {"TMPDIR": str(self.scratch)}}
        head = {**self._node, "include_dashboard": False, "_system_config": _QUICK, "temp_dir": str(place)}
        with patch.dict(os.environ, {"RAY_TMPDIR": self._folder.name}):
            self._cluster: Any = Cluster(initialize_head=True, head_node_args=head)
        self.add()
        self.add()

    def __exit__(self, *_: object) -> None:
        self._cluster.shutdown()
        self._folder.cleanup()

    @property
    def address(self) -> str:
        return str(self._cluster.address)

    @property
    def workers(self) -> list[Any]:
        """The nodes besides the head."""
        return list(self._cluster.worker_nodes)

    def add(self) -> None:
        self._cluster.add_node(**self._node)

    def kill(self, node: Any) -> None:
        """End all processes of a node at once, as if its host had lost power."""
        self._cluster.remove_node(node, allow_graceful=False)


def running(text: str) -> list[psutil.Process]:
    """Return the processes of this test's cluster, and of its flows, whose command line has a text."""
    lines = {process: " ".join(process.info["cmdline"] or []) for process in psutil.process_iter(["cmdline"])}
    return [process for process, line in lines.items() if text in line and _is_marked(process)]


def _is_marked(process: psutil.Process) -> bool:
    try:
        return process.environ().get(MARK) == os.environ.get(MARK)
    except psutil.Error:
        return False
