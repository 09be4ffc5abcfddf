"""A Ray cluster of several nodes on this machine, for trials: `make cluster-demo`."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

from storage.processes.folder import TemporaryFolder
from tasks.cluster.local_ray import local_ray

_CORES = 2
"""Cores that each node claims to have."""


@contextmanager
def simulated_cluster(nodes: int) -> Iterator[str]:
    """Start a cluster, yield its address, and end it with the block, in which the environment names its token.

    Raises:
        RuntimeError: it did not start; the message has the end of its log.
    """
    folder = TemporaryFolder()
    try:
        with local_ray(folder.path / "ray.log", nodes=nodes, cpus=_CORES) as (address, token):
            os.environ.pop("RAY_AUTH_TOKEN", None)  # the user's, of another cluster, which would come first
            os.environ["RAY_AUTH_TOKEN_PATH"] = str(token)
            yield address
    finally:
        os.environ.pop("RAY_AUTH_TOKEN_PATH", None)
        folder.remove()
