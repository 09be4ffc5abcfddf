"""The logs of all nodes after a failure, in a folder of the store, with the first cause first."""

import traceback
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Any

import ray

from storage import layout
from storage.errors import StorageError
from storage.objects.store import Store

_WAIT_S = 15.0
"""Longest wait for nodes that upload their logs."""
_FOLDER = "folder_of_logs"
"""Attribute of an error: where logs are kept because of it."""


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
