"""The connection of the flow to Ray, which must ask for a token: one on this host, or a cluster."""

import contextlib
import logging
import os
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

from configs import Config
from tasks.cluster.local_ray import local_ray
from tasks.cluster.placement import Node
from tasks.inference.devices import visible_devices

logger = logging.getLogger(__name__)
LOCAL = "local"
_CONNECT_S, _TRY_S = 10.0, 1.0
_AUTOSCALERS_METRICS = 44217
"""The port of Ray's head for metrics of its autoscaler."""
_MODE = "RAY_AUTH_MODE"
_TOKENS = ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")
_REMEDY = (
    "Anybody who reaches a cluster without a token can run programs on it. Make one with `ray get-auth-token "
    f"--generate`, copy ~/.ray/auth_token to every host, and set {_MODE}=token on all of them before `ray start`"
)


@contextmanager
def connected(config: Config) -> Iterator[None]:
    """Connect this process to the run's Ray until the block ends; then Ray ends everything that the flow has started.

    With `cluster.address=local` the block has a Ray of its own. Inside of another such block it does nothing.

    Raises:
        ImportError: Ray is not installed.
        ValueError: there is no token.
        ConnectionError: the cluster is not reached, or refuses the token.
        RuntimeError: Ray did not start on this host.
    """
    if os.environ.setdefault(_MODE, "token") != "token":  # read by Ray's libraries when they are imported
        raise ValueError(f"{_MODE}={os.environ[_MODE]!r}: set it to token. {_REMEDY}")
    try:
        import ray
    except ImportError as error:
        raise ImportError(
            "this run needs Ray (cluster.address, run.overlap or several ranks): install the extra, math-mt-ppo[ray]"
        ) from error
    address = config.ray_address
    assert address
    if ray.is_initialized():  # by the trainer, which is opened first
        yield
    elif address == LOCAL:
        with _own_ray(config) as (own, token), _token_of(token), _on_loopback(), _connection(own):
            yield
    else:
        _loader().reset_cache()
        require_token()
        with _way_to(address), _connection(address):
            _warn_of_metrics()
            yield


@contextmanager
def _connection(address: str) -> Iterator[None]:
    import ray

    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    handler = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(address, log_to_driver=False, configure_logging=False)
    except ConnectionError as error:
        raise _unreached(address, error) from error
    except ray.exceptions.AuthenticationError as error:
        raise ConnectionError(f"the Ray cluster at {address} refuses this host's token: {error}. {_REMEDY}") from error
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, handler)  # Ray has set its own, which would end the flow without clean-up
    try:
        yield
    finally:
        ray.shutdown()


def _own_ray(config: Config) -> AbstractContextManager[tuple[str, Path]]:
    """Return the block in which Ray runs on this host. It takes the host to have a core for each process of the run."""
    log = Path(config.storage.cache) / "logs" / config.run.name / "ray.log"
    ranks, workers, settings = config.train.parallel.ranks, config.cluster.workers_per_node, config.inference
    visible, needed = visible_devices(), workers * settings.replicas * settings.ranks
    gpus = visible[1:] if ranks == 1 and len(visible) > needed else visible  # a trainer of one rank has the first
    return local_ray(log, cpus=ranks + workers, gpus=gpus)


@contextmanager
def _token_of(file: Path) -> Iterator[None]:
    """Let this process use the token in a file, and not that of the user."""
    loader = _loader()
    users = {name: os.environ.pop(name) for name in _TOKENS if name in os.environ}
    try:
        os.environ["RAY_AUTH_TOKEN_PATH"] = str(file)
        loader.reset_cache()
        require_token()
    finally:
        del os.environ["RAY_AUTH_TOKEN_PATH"]
        os.environ |= users
    try:
        yield
    finally:
        loader.reset_cache()


def _loader() -> Any:
    """Return what reads a token, once, unless its cache is reset."""
    import ray._raylet as raylet

    return raylet.AuthenticationTokenLoader.instance()  # type: ignore[attr-defined]


@contextmanager
def _on_loopback() -> Iterator[None]:
    """Let Ray connect to the loopback address; otherwise it takes that for the address of a network card."""
    from ray._private import ray_constants

    before, ray_constants.ENABLE_RAY_CLUSTER = ray_constants.ENABLE_RAY_CLUSTER, False
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = before


def _way_to(address: str) -> AbstractContextManager[None]:
    """Return the block in which Ray reaches a cluster; one on the loopback address alone needs `_on_loopback`.

    Raises:
        ConnectionError: nobody listens there. Ray itself would try for many minutes.
    """
    from ray._private.services import canonicalize_bootstrap_address

    why: object = "this host belongs to no cluster"
    for way in (nullcontext, _on_loopback) if address.startswith(("127.0.0.1:", "localhost:")) else (nullcontext,):
        with way():
            found = canonicalize_bootstrap_address(address)
        if found:
            host, _, port = found.rpartition(":")
            try:
                socket.create_connection((host.strip("[]"), int(port)), _CONNECT_S).close()
                return way()
            except OSError as error:
                why = error.strerror or error
    raise _unreached(address, why)


def _unreached(address: str, why: object) -> ConnectionError:
    return ConnectionError(
        f"no Ray cluster answers at {address}: {why}. Start one with `ray start --head`, or give the address of its "
        "head in cluster.address"
    )


def _warn_of_metrics() -> None:
    """Warn if nodes export metrics, which Ray does on all interfaces and without asking for the token."""
    import ray

    exporting = {node["NodeManagerHostname"] for node in ray.nodes() if node["Alive"] and node["MetricsExportPort"] > 0}
    head = ray.get_runtime_context().gcs_address.rpartition(":")[0].strip("[]")
    with contextlib.suppress(OSError), socket.create_connection((head, _AUTOSCALERS_METRICS), _TRY_S):
        exporting.add(head)
    if exporting:
        logger.warning(
            "Ray exports metrics to everybody who reaches %s: set RAY_enable_metrics_collection=0 and "
            "AUTOSCALER_METRIC_PORT=-1 before `ray start`",
            ", ".join(sorted(exporting)),
        )


def require_token() -> None:
    """Raise ValueError unless this process asks others for a token, and has one."""
    import ray._raylet as raylet  # Ray has no public way to ask

    if raylet.get_authentication_mode() != raylet.AuthenticationMode.TOKEN:  # type: ignore[attr-defined]
        raise ValueError(f"Ray on {os.uname().nodename} asks for no token. {_REMEDY}")
    if not _loader().has_token():
        raise ValueError(f"Ray has no token on {os.uname().nodename}. {_REMEDY}")


def environment() -> dict[str, dict[str, str]]:
    """Return Ray's `runtime_env` with which a node finds this package and the user's agents: where this host does."""
    paths = [str(Path(__file__).parents[2]), os.getcwd(), os.environ.get("PYTHONPATH", "")]
    # Otherwise Ray also kills the reaper of a process that it ends, and nobody ends vLLM and removes its folder.
    own = {"RAY_kill_child_processes_on_worker_exit": "0"}
    return {"env_vars": {"PYTHONPATH": os.pathsep.join(dict.fromkeys(filter(None, paths))), **own}}


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
