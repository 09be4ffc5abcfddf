"""The connection of the flow to Ray, which must ask for a token, and what its processes on the nodes begin with.

Ray is that of this host (`local_ray`), or a cluster. A process on a node has the configuration, the store and its log.
"""

import logging
import os
import signal
import socket
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from configs import Config
from storage import layout
from storage.errors import StorageError
from storage.objects.store import Store
from storage.processes.folder import keep_compiled_code_private
from storage.versions import manifests
from tasks.cluster.local_ray import local_ray
from tasks.cluster.placement import Node
from tasks.inference.devices import visible_devices
from tasks.registry import Code, own_code, refuse_other

logger = logging.getLogger(__name__)
_CONNECT_S = 10.0
_MODE = "RAY_AUTH_MODE"
_TOKENS = ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")
_REMEDY = (
    "Anybody who reaches a cluster without a token can run programs on it. Make one with `ray get-auth-token "
    f"--generate`, copy ~/.ray/auth_token to every host, and set {_MODE}=token on all of them before `ray start`"
)
_LOG_BYTES = 1_000_000
"""Bytes of a log file that are kept, from its end."""
_WAIT_S = 15.0
"""Longest wait for nodes that upload their logs."""


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
    elif address == "local":
        # Ray gets a core for each process of the run, whether this host has so many or not.
        ranks, workers, settings = config.train.parallel.ranks, config.cluster.workers_per_node, config.inference
        visible, needed = visible_devices(), workers * settings.replicas * settings.ranks
        gpus = visible[1:] if ranks == 1 and len(visible) > needed else visible  # a trainer of one rank has the first
        ray_here = local_ray(logs_of(config) / "ray.log", cpus=ranks + workers, gpus=gpus)
        with ray_here as (own, token), _token_of(token), _on_loopback(), _connection(own):
            yield
    else:
        _loader().reset_cache()
        require_token()
        with _way_to(address), _connection(address):
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
    remedy = "Start one with `ray start --head`, or give the address of its head in cluster.address"
    return ConnectionError(f"no Ray cluster answers at {address}: {why}. {remedy}")


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
    alive = [(node["NodeID"], node["NodeManagerHostname"]) for node in ray.nodes() if node["Alive"]]
    return [
        Node(name, f"{host} ({name[:8]})", *(free.get(name, {}).get(kind, 0.0) for kind in ("CPU", "GPU")))
        for name, host in alive
    ]


def for_nodes(config: Config) -> dict[str, Any]:
    """Return the configuration with absolute paths, because a node's process has another working directory."""
    values = config.model_dump(mode="json")
    storage = values["storage"]
    for name in ("cache", "root"):
        if "://" not in storage[name]:
            storage[name] = str(Path(storage[name]).expanduser().absolute())
    return values


def open_store(config: Config, log: Path, code: Code) -> Store:
    """Open the store of a run in a process on a node, and the log of this process, before anything imports torch.

    `code` is the flow's fingerprint of the user's code.

    Raises:
        CodeChangedError: this node has other code.
        StorageError: this node does not see the run in the store.
        ValueError: Ray asks for no token on this node.
    """
    require_token()
    refuse_other(own_code(config), code)
    keep_compiled_code_private()
    log.parent.mkdir(parents=True, exist_ok=True)
    file = logging.FileHandler(log)
    file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    for name in ("tasks", "storage"):
        logging.getLogger(name).addHandler(file)
        logging.getLogger(name).setLevel(logging.INFO)
    store = Store(config.storage.root)
    if not manifests.committed(store, layout.run(config.run.name)):
        remedy = " A folder must be the same one on all nodes; else use s3://bucket/prefix" if store.is_local else ""
        raise StorageError(f"{os.uname().nodename} does not see run {config.run.name!r} in {store.root}.{remedy}")
    return store


def logs_of(config: Config) -> Path:
    """Return the folder of the run's logs on this node."""
    return Path(config.storage.cache) / "logs" / config.run.name


def store_logs(config: Config, folder: str) -> None:
    """Upload the ends of all logs of the run on this node."""
    store, root = Store(config.storage.root), logs_of(config)
    for path in sorted(root.rglob("*.log")):
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - _LOG_BYTES))
            store.write(f"{folder}/{os.uname().nodename}/{path.relative_to(root).as_posix()}", file.read())


def keep_logs(
    store: Store, run: str, processes: Sequence[Any], causes: Sequence[BaseException], progress: Callable[[str], None]
) -> None:
    """Let the processes upload what their nodes have logged into a new folder, and write down the causes there.

    If the store cannot be written, which may be the cause, a line of text says so.

    Args:
        store: the store of the run.
        run: its name.
        processes: actors that have `store_logs`; some may be gone.
        causes: the errors that led to the end, the first one first.
        progress: called with a line of text that says where the logs are.
    """
    folder = layout.logs(run, datetime.now(UTC).strftime("%Y-%m-%dT%H-%M-%S.%f"))
    texts = dict.fromkeys("".join(traceback.format_exception(cause)) for cause in causes)
    try:
        Store(store.root, patience_s=_WAIT_S).write(f"{folder}/cause.txt", "\n".join(texts).encode())
    except (StorageError, OSError) as error:
        progress(f"the logs of the nodes stay there, in logs/{run} of their storage.cache: {error}")
        return
    progress(f"the causes of the failure, and the logs of all nodes that answer: {store.uri(folder)}")
    import ray

    uploads = [process.store_logs.remote(folder) for process in processes]
    if uploads:
        ray.wait(uploads, num_returns=len(uploads), timeout=_WAIT_S)
