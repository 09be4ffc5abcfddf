"""The set-up shared by all processes of a run on the nodes of a cluster: configuration, store, and logs."""

import logging
import os
import traceback
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import ray

from configs import Config
from storage import layout
from storage.errors import StorageError
from storage.objects.store import Store
from storage.processes.folder import keep_compiled_code_private
from storage.versions import manifests
from tasks.cluster.connection import require_token
from tasks.own_code import Code, own_code, refuse_other

_LOG_BYTES = 1_000_000
"""Bytes of a log file that are kept, from its end."""
_WAIT_S = 15.0
"""Longest wait for nodes that upload their logs."""
_FOLDER = "folder_of_logs"
"""Attribute of an error: where logs are kept because of it."""


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


def keep_logs(
    store: Store, run: str, processes: Sequence[Any], causes: Sequence[BaseException], progress: Callable[[str], None]
) -> None:
    """Let the processes upload what their nodes have logged, and write down the causes, the first one first.

    The same error may end workers and trainer: what is kept because of it lies in one folder, with the causes of the
    first call. If the store cannot be written, which may be the cause, a line of text says so.

    Args:
        store: the store of the run.
        run: its name.
        processes: actors that have `store_logs`; some may be gone.
        causes: the errors that led to the end; the last one ends the flow.
        progress: called with a line of text that says where the logs are.
    """
    kept: str | None = getattr(causes[-1], _FOLDER, None)
    folder = kept or layout.logs(run, datetime.now(UTC).strftime("%Y-%m-%dT%H-%M-%S.%f"))
    if not kept:
        texts = dict.fromkeys("".join(traceback.format_exception(cause)) for cause in causes)
        try:
            Store(store.root, patience_s=_WAIT_S).write(f"{folder}/cause.txt", "\n".join(texts).encode())
        except (StorageError, OSError) as error:
            progress(f"the logs of the nodes stay there, in logs/{run} of their storage.cache: {error}")
            return
        setattr(causes[-1], _FOLDER, folder)
        progress(f"the causes of the failure, and the logs of all nodes that answer: {store.uri(folder)}")
    uploads = [process.store_logs.remote(folder) for process in processes]
    if uploads:
        ray.wait(uploads, num_returns=len(uploads), timeout=_WAIT_S)
