"""What the processes of a run on the nodes of a cluster have in common: they end when the flow is silent."""

import logging
import os
import threading
import time
from pathlib import Path
from typing import Any

from configs import Config
from storage import layout
from storage.errors import StorageError
from storage.objects.store import Store
from storage.versions import manifests
from tasks.cluster.connection import require_token

logger = logging.getLogger(__name__)
_LOOK_S = 1.0
_LOG_BYTES = 1_000_000
"""Bytes of a log file that are kept, from its end."""


class NodeProcess:
    """A process that the flow has started on a node.

    The environment of the node holds the credentials of the store. If the flow says nothing for twice
    `cluster.silence_s` (it was killed, or the node is cut off), the process ends, and with it the processes that it
    has started.

    Args:
        values: the run's configuration; its paths are absolute.
        name: the name of its folder for logs.
    """

    def __init__(self, values: dict[str, Any], name: str) -> None:
        self._config = Config.model_validate(values)
        self._cache = Path(self._config.storage.cache)
        self._logs = logs_of(self._config) / name
        # Until it has started, it cannot hear the flow.
        starting = max(self._config.cluster.start_timeout_s, self._config.trainer.startup_timeout_s)
        self._heard = time.monotonic() + starting
        threading.Thread(target=self._end_without_flow, name="end", daemon=True).start()

    def store_logs(self, folder: str) -> None:
        """Upload the ends of all logs of the run on this node."""
        store_logs(self._config, folder)

    def _hear(self) -> None:
        """Note that the flow is alive."""
        self._heard = time.monotonic()

    def _open_store(self) -> Store:
        """Open the store, and the log of this process.

        Raises:
            StorageError: this node does not see the run in the store.
            ValueError: Ray asks for no token on this node.
        """
        return open_store(self._config, self._logs / "process.log")

    def _end_without_flow(self) -> None:
        """End this process when the flow is silent; the body of a thread."""
        limit = 2 * self._config.cluster.silence_s
        while time.monotonic() < self._heard + limit:
            time.sleep(_LOOK_S)
        logger.error("the flow has been silent for %g s: this process ends", limit)
        logging.shutdown()
        os._exit(1)  # the reaper ends what it has started


def for_nodes(config: Config) -> dict[str, Any]:
    """Return the configuration with absolute paths, because a node's process has another working directory."""
    values = config.model_dump(mode="json")
    storage = values["storage"]
    storage["cache"] = str(Path(storage["cache"]).expanduser().absolute())
    if "://" not in storage["root"]:
        storage["root"] = str(Path(storage["root"]).expanduser().absolute())
    return values


def open_store(config: Config, log: Path) -> Store:
    """Open the store of a run in a process on a node, and the log of this process.

    Raises:
        StorageError: this node does not see the run in the store.
        ValueError: Ray asks for no token on this node.
    """
    require_token()
    _log_to(log)
    store = Store.of(config.storage)
    if not manifests.committed(store, layout.run(config.run.name)):
        remedy = " A folder must be the same one on all nodes; else use s3://bucket/prefix" if store.is_local else ""
        raise StorageError(f"{os.uname().nodename} does not see run {config.run.name!r} in {store.root}.{remedy}")
    return store


def logs_of(config: Config) -> Path:
    """Return the folder of the run's logs on this node."""
    return Path(config.storage.cache) / "logs" / config.run.name


def store_logs(config: Config, folder: str) -> None:
    """Upload the ends of all logs of the run on this node."""
    store, root = Store.of(config.storage), logs_of(config)
    for path in sorted(root.rglob("*.log")):
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - _LOG_BYTES))
            store.write(f"{folder}/{os.uname().nodename}/{path.relative_to(root).as_posix()}", file.read())


def _log_to(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    file = logging.FileHandler(path)
    file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    for name in ("tasks", "storage"):
        logging.getLogger(name).addHandler(file)
        logging.getLogger(name).setLevel(logging.INFO)
