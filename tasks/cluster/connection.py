"""The connection of the flow to a Ray cluster, which must ask for a token."""

import os
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tasks.cluster.placement import Node
from tasks.train.ranks.host import split_address

_CONNECT_S = 10.0
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
    if ray.is_initialized():  # by the trainer, which is opened first
        yield
        return
    require_token()
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    handler = signal.getsignal(signal.SIGTERM)
    try:
        _check_reached(address)
        ray.init(address, log_to_driver=False, configure_logging=False)
    except ConnectionError as error:
        raise ConnectionError(
            f"no Ray cluster answers at {address}: {error}. Start one with `ray start --head`, or give the address of "
            "its head in cluster.address"
        ) from error
    except ray.exceptions.AuthenticationError as error:
        raise ConnectionError(f"the Ray cluster at {address} refuses this host's token: {error}. {_REMEDY}") from error
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, handler)  # Ray has set its own, which would end the flow without clean-up
    try:
        yield
    finally:
        ray.shutdown()


def _check_reached(address: str) -> None:
    """Raise ConnectionError if nobody listens at the address of a cluster: Ray itself tries for many minutes."""
    from ray._private.services import canonicalize_bootstrap_address

    place = canonicalize_bootstrap_address(address)
    if place is None:
        raise ConnectionError("this host belongs to no cluster")
    host, port = split_address(place)
    try:
        socket.create_connection((host, port), _CONNECT_S).close()
    except OSError as error:
        raise ConnectionError(error.strerror or str(error)) from error


def require_token() -> None:
    """Raise ValueError unless this process asks others for a token, and has one."""
    import ray._raylet as raylet  # Ray has no public way to ask

    if raylet.get_authentication_mode() != raylet.AuthenticationMode.TOKEN:  # type: ignore[attr-defined]
        raise ValueError(f"Ray on {os.uname().nodename} asks for no token. {_REMEDY}")
    if not raylet.AuthenticationTokenLoader.instance().has_token():  # type: ignore[attr-defined]
        raise ValueError(f"Ray has no token on {os.uname().nodename}. {_REMEDY}")


def environment() -> dict[str, dict[str, str]]:
    """Return Ray's `runtime_env` with which a node finds this package and the user's agents: where this host does."""
    places = [str(Path(__file__).parents[2]), os.getcwd(), os.environ.get("PYTHONPATH", "")]
    # Otherwise Ray also kills the supervisors of a process that it ends, and nobody removes vLLM's folder.
    own = {"RAY_kill_child_processes_on_worker_exit": "0"}
    return {"env_vars": {"PYTHONPATH": os.pathsep.join(dict.fromkeys(filter(None, places))), **own}}


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
