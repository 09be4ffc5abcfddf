"""The connection of the flow to a Ray cluster, which must ask for a token."""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from tasks.cluster.placement import Node

_MODE = "RAY_AUTH_MODE"
_REMEDY = (
    "Anybody who reaches a cluster without a token can run programs on it. Make one with `ray get-auth-token "
    f"--generate`, copy ~/.ray/auth_token to every host, and set {_MODE}=token on all of them before `ray start`"
)


@contextmanager
def connected(address: str) -> Iterator[None]:
    """Connect this process to a cluster until the block ends; then Ray ends everything that the flow has started.

    Raises:
        ImportError: Ray is not installed.
        ValueError: there is no token.
        ConnectionError: the cluster is not reached, or refuses the token.
    """
    if os.environ.setdefault(_MODE, "token") != "token":  # read by Ray's libraries when they are imported
        raise ValueError(f"{_MODE}={os.environ[_MODE]!r}: set it to token. {_REMEDY}")
    try:
        import ray
    except ImportError as error:
        raise ImportError("cluster.address needs Ray: install the extra, math-mt-ppo[ray]") from error
    require_token()
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    handler = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(address, log_to_driver=False, configure_logging=False)
    except ray.exceptions.AuthenticationError as error:
        raise ConnectionError(f"the Ray cluster at {address} refuses this host's token: {error}. {_REMEDY}") from error
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, handler)  # Ray has set its own, which would end the flow without clean-up
    try:
        yield
    finally:
        ray.shutdown()


def require_token() -> None:
    """Raise ValueError unless this process asks others for a token, and has one."""
    import ray._raylet as raylet  # Ray has no public way to ask

    if raylet.get_authentication_mode() != raylet.AuthenticationMode.TOKEN:  # type: ignore[attr-defined]
        raise ValueError(f"Ray on {os.uname().nodename} asks for no token. {_REMEDY}")
    if not raylet.AuthenticationTokenLoader.instance().has_token():  # type: ignore[attr-defined]
        raise ValueError(f"Ray has no token on {os.uname().nodename}. {_REMEDY}")


def nodes() -> list[Node]:
    """Return the nodes that are alive, and what is free on them."""
    import ray
    from ray._private.state import available_resources_per_node

    free = available_resources_per_node()
    return [
        Node(
            id=node["NodeID"],
            name=f"{node['NodeManagerHostname']} ({node['NodeID'][:8]})",
            cpus=free.get(node["NodeID"], {}).get("CPU", 0.0),
            gpus=free.get(node["NodeID"], {}).get("GPU", 0.0),
        )
        for node in ray.nodes()
        if node["Alive"]
    ]
