"""A Ray cluster of several nodes on this machine, for trials: `make cluster-demo`.

Its processes end with the one that has started it, however that ends. They ask for a token, and their files lie in a
folder that no other user may enter.

    python -m flows.launch.simulated_cluster NODES FOLDER     the cluster's own process
"""

import os
import secrets
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from storage.processes.child import Child as Supervised
from storage.processes.folder import TemporaryFolder

_START_S = 120.0
_POLL_S = 0.1
_CORES = 2
"""Cores that each node claims to have."""
_ADDRESS = "address"


@contextmanager
def simulated_cluster(nodes: int) -> Iterator[str]:
    """Start a cluster, yield its address, and end it with the block. This process gets its token.

    Raises:
        RuntimeError: it did not start; the message has the end of its log.
    """
    os.environ |= {"RAY_AUTH_MODE": "token", "RAY_USAGE_STATS_ENABLED": "0"}
    os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))  # Ray reads it once in the life of a process
    logs = TemporaryFolder()
    cluster = Supervised(logs.path / "cluster.log")
    try:
        folder = str(cluster.folder)
        cluster.start([sys.executable, "-m", "flows.launch.simulated_cluster", str(nodes), folder], os.environ)
        yield _address(cluster)
    finally:
        cluster.close()
        logs.remove()


def _address(cluster: Supervised) -> str:
    """Wait for the address that the cluster's process writes."""
    deadline = time.monotonic() + _START_S
    while not (note := cluster.folder / _ADDRESS).exists():
        if not cluster.alive or time.monotonic() > deadline:
            raise RuntimeError(f"the simulated cluster did not start; the end of its log:\n{cluster.log_tail()}")
        time.sleep(_POLL_S)
    return note.read_text()


def main(nodes: int, folder: Path) -> None:
    """Run the nodes until a signal comes."""
    from ray.cluster_utils import Cluster

    place = folder / "ray"  # where Ray itself, which follows TMPDIR, notes the address
    place.mkdir()
    settings = {"num_cpus": _CORES, "include_dashboard": False, "temp_dir": str(place)}
    cluster = Cluster(initialize_head=True, head_node_args=settings)
    for _ in range(nodes - 1):
        cluster.add_node(num_cpus=_CORES)
    (folder / f"{_ADDRESS}.new").write_text(cluster.address)
    (folder / f"{_ADDRESS}.new").rename(folder / _ADDRESS)
    signal.sigwait([signal.SIGTERM, signal.SIGINT])
    cluster.shutdown()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
