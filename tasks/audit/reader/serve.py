"""Open the data sets of a store and serve the reader on this machine."""

import socket
import sys
import threading
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from configs.audit import Audit
from storage.objects.store import Store
from storage.visible import visible
from tasks.audit.database import open_database
from tasks.audit.intake import Intake, fetch_data_sets
from tasks.audit.selection import DataSet, select

if TYPE_CHECKING:
    from fastapi import FastAPI

ADDRESS = "127.0.0.1"
"""The reader shows everything in the store, so other machines cannot reach it, and other users of this machine need its
key."""
_MOST_NOTES = 10


def serve(
    store: Store,
    targets: Sequence[str],
    since: datetime | None,
    cache: Path,
    settings: Audit,
    port: int,
    audit: Path | None = None,
) -> None:
    """Serve the reader for data sets of `store` until Ctrl-C.

    Args:
        store: the store of the data sets.
        targets: the data sets to show, see `tasks.audit.selection.select`.
        since: leave out data sets that were committed earlier; None: show all.
        cache: local folder for files of a remote store.
        settings: settings of the database.
        port: port on this machine; 0: any free port.
        audit: folder with an audit's report.html, audit.json and cases.parquet.

    Raises:
        ValueError: a target names no data set, there is nothing to show, or the port is invalid or taken.
        UnavailableError: the store does not answer.
    """
    with _listening(port) as listener:
        data_sets = select(store, targets, since)
        if not data_sets:
            raise ValueError(
                f"there are no trajectories in {store.root}, or none since that date: name another store or date"
            )
        intake = fetch_data_sets(store, data_sets, cache)
        with open_database(data_sets, intake, settings) as database:
            from tasks.audit.reader.app import create_app
            from tasks.audit.reader.key import require_key
            from tasks.audit.reader.vocabulary import import_tokenizers

            notes = unreadable(data_sets, intake)
            app = create_app(store, data_sets, database, cache, audit, notes)
            _print_notes(notes)
            # Python would stop a daemon thread in the middle of the import, and C++ libraries then abort the process.
            threading.Thread(target=import_tokenizers).start()
            port = listener.getsockname()[1]
            print(f"The reader is on http://{ADDRESS}:{port}/?key={require_key(app, port)} until Ctrl-C", flush=True)
            _run(app, listener)


def unreadable(data_sets: Sequence[DataSet], intake: Intake) -> list[str]:
    """Return sentences about data that cannot be shown."""
    gone = [f"{each.version}: {each.problem}" for each in data_sets if each.version in intake.collected]
    return gone + [f"{case.id}: {case.detail}" for case in (*intake.damaged, *intake.foreign)]


def _print_notes(notes: Sequence[str]) -> None:
    for note in notes[:_MOST_NOTES]:
        print(f"not shown: {visible(note)}", file=sys.stderr)
    if len(notes) > _MOST_NOTES:
        print(f"not shown: {len(notes) - _MOST_NOTES} more, see the first page", file=sys.stderr)


def _listening(port: int) -> socket.socket:
    try:
        return socket.create_server((ADDRESS, port))
    except OverflowError:
        raise ValueError(f"port={port} is invalid: give one from 1 to 65535, or 0 for any free port") from None
    except OSError as error:
        raise ValueError(
            f"port={port} cannot be opened ({error.strerror}): give another, or 0 for any free port"
        ) from error


def _run(app: "FastAPI", listener: socket.socket) -> None:
    """Serve until an exception such as KeyboardInterrupt; raise it again after the last response is sent."""
    import uvicorn

    settings = uvicorn.Config(
        app, log_level="warning", access_log=False, server_header=False, timeout_graceful_shutdown=3
    )
    server = uvicorn.Server(settings)
    thread = threading.Thread(
        target=server.run, args=[[listener]]
    )  # not in the main thread, where uvicorn handles signals
    thread.start()
    try:
        thread.join()
    finally:
        server.should_exit = True
        thread.join()
