"""From a store to a reader that answers on this machine."""

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
from tasks.audit.intake import Intake, take_in
from tasks.audit.selection import DataSet, select

if TYPE_CHECKING:
    from fastapi import FastAPI

ADDRESS = "127.0.0.1"
"""It shows whatever is in the store: other machines cannot reach it, other users of this one need its key."""
_TOLD = 10


def serve(
    store: Store,
    targets: Sequence[str],
    since: datetime | None,
    cache: Path,
    settings: Audit,
    port: int,
    audit: Path | None = None,
) -> None:
    """Let people on this machine browse data sets, until Ctrl-C.

    Args:
        store: where they lie.
        targets: which ones, see `tasks.audit.selection.select`.
        since: those committed before it are left out; None: none are.
        cache: local folder for files of a remote store.
        settings: of the database.
        port: on this machine; 0: any that is free.
        audit: folder with an audit's report.html, audit.json and cases.parquet.

    Raises:
        ValueError: a target means nothing, there is nothing to read, or the port is taken.
        UnavailableError: the store does not answer.
    """
    with _listening(port) as listener:
        data_sets = select(store, targets, since)
        if not data_sets:
            raise ValueError(
                f"there are no trajectories in {store.root}, or none of that time: name another place or date"
            )
        intake = take_in(store, data_sets, cache)
        with open_database(data_sets, intake, settings) as database:
            from tasks.audit.reader.app import create_app
            from tasks.audit.reader.key import lock
            from tasks.audit.reader.vocabulary import warm_up

            notes = unreadable(data_sets, intake)
            app = create_app(store, data_sets, database, cache, audit, notes)
            _tell(notes)
            threading.Thread(target=warm_up, daemon=True).start()
            port = listener.getsockname()[1]
            print(f"The reader is on http://{ADDRESS}:{port}/?key={lock(app, port)} until Ctrl-C", flush=True)
            _run(app, listener)


def unreadable(data_sets: Sequence[DataSet], intake: Intake) -> list[str]:
    """What cannot be shown, in words."""
    gone = [f"{each.version}: {each.problem}" for each in data_sets if each.version in intake.gone]
    return gone + [f"{case.id}: {case.detail}" for case in (*intake.damaged, *intake.foreign)]


def _tell(notes: Sequence[str]) -> None:
    for note in notes[:_TOLD]:
        print(f"not shown: {visible(note)}", file=sys.stderr)
    if len(notes) > _TOLD:
        print(f"not shown: {len(notes) - _TOLD} more, which the first page names", file=sys.stderr)


def _listening(port: int) -> socket.socket:
    try:
        return socket.create_server((ADDRESS, port))
    except OverflowError:
        raise ValueError(f"port={port} is none: give one from 1 to 65535, or 0 for any that is free") from None
    except OSError as error:
        raise ValueError(f"port={port} cannot be had ({error.strerror}): give another, or 0 for any") from error


def _run(app: "FastAPI", listener: socket.socket) -> None:
    """Answers until an exception comes, KeyboardInterrupt say, and passes it on when the last answer is given."""
    import uvicorn

    settings = uvicorn.Config(
        app, log_level="warning", access_log=False, server_header=False, timeout_graceful_shutdown=3
    )
    server = uvicorn.Server(settings)
    thread = threading.Thread(target=server.run, args=[[listener]])  # in the main thread it would take the signals
    thread.start()
    try:
        thread.join()
    finally:
        server.should_exit = True
        thread.join()
