"""`read`: show trajectories in the browser of this machine, with the cases that an audit found."""

import argparse
import hmac
import secrets
import socket
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from configs.audit import Audit
from storage import layout
from storage.commands.program import Output
from storage.objects.store import Store
from storage.version_names import ScoresVersion
from storage.versions import manifests
from tasks.audit.data_sets import DataSet, Intake, fetch_data_sets, parse_since, select
from tasks.audit.database import open_database
from tasks.audit.record import REPORT, read_audit

if TYPE_CHECKING:
    from fastapi import FastAPI, Request, Response

ADDRESS = "127.0.0.1"
"""The reader shows everything in the store, so other machines cannot reach it, and other users of this machine need its
key."""
_PORT = 8600


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "targets",
        nargs="*",
        metavar="RUN|URI|AUDIT",
        help="runs, versions or URIs of trajectories, or one audit (audits/…) with its cases; default: all runs",
    )
    parser.add_argument(
        "--since", default="", help="show only data sets committed since a date, or within a duration: 12h, 7d, 2w"
    )
    parser.add_argument("--port", type=int, default=_PORT, help=f"default {_PORT}; 0: any free port")


def run(store: Store, arguments: argparse.Namespace) -> Output:
    """Serve the reader until Ctrl-C.

    Raises:
        ValueError: a target names no data set, or there is nothing to show.
        OSError: the port is taken.
        UnavailableError: the store does not answer.
    """
    roots = [root for target in arguments.targets if (root := layout.split_uri(target)[0])]
    store = Store(roots[0]) if roots else store
    targets, cache, audit = [layout.split_uri(target)[1] for target in arguments.targets], Path(arguments.cache), None
    audits = [target for target in targets if target.startswith("audits/")]
    if audits and len(targets) > 1:
        raise ValueError(f"{audits[0]} already names its data sets: give it alone, without {len(targets) - 1} others")
    if audits:
        _, audit = read_audit(store, audits[0], cache)
        parents = [parent.version for parent in manifests.read(store, audits[0]).parents]
        targets = [version for version in parents if not ScoresVersion.is_place(version)]
        if not targets:
            raise ValueError(f"{audits[0]} could not read any data set: see its report, {audit / REPORT}")
    data_sets = select(store, targets, parse_since(arguments.since))
    if not data_sets:
        raise ValueError(f"there are no trajectories in {store.root}, or none since that date: name another")
    intake = fetch_data_sets(store, data_sets, cache)
    with (
        open_database(data_sets, intake, Audit()) as database,
        socket.create_server((ADDRESS, arguments.port)) as listener,
    ):
        from transformers import AutoTokenizer  # noqa: F401  # takes seconds: the first page should not wait for it
        from uvicorn import Config, Server

        from tasks.audit.reader.app import create_app

        app = create_app(store, data_sets, database, cache, audit, unreadable(data_sets, intake))
        port = listener.getsockname()[1]
        print(f"The reader is on http://{ADDRESS}:{port}/?key={require_key(app, port)} until Ctrl-C", flush=True)
        settings = Config(app, log_level="warning", access_log=False, server_header=False, timeout_graceful_shutdown=3)
        Server(settings).run([listener])
    return Output({})


def unreadable(data_sets: Sequence[DataSet], intake: Intake) -> list[str]:
    """Return sentences about data that cannot be shown."""
    gone = [f"{each.version}: {each.problem}" for each in data_sets if each.version in intake.collected]
    return gone + [f"{case.id}: {case.detail}" for case in (*intake.damaged, *intake.foreign)]


def require_key(app: "FastAPI", port: int) -> str:
    """Make the app answer only requests with a new key, in the address or in the cookie; return the key.

    It protects the reader from other users of the machine. A request with the key in the address gets the cookie.
    Browsers send a cookie to every port of a host, so its name has the port, and two readers work at the same time.
    Caution: the browser also sends it to servers of other users on this machine, if a person opens one.
    """
    from fastapi.responses import PlainTextResponse, RedirectResponse

    key, cookie = secrets.token_urlsafe(16), f"key-{port}"

    def matches(given: str | None) -> bool:
        return given is not None and hmac.compare_digest(key.encode(), given.encode())

    @app.middleware("http")
    async def admit(request: "Request", answer: "Callable[[Request], Awaitable[Response]]") -> "Response":
        if matches(request.query_params.get("key")):
            response = RedirectResponse(str(request.url.remove_query_params("key")), status_code=303)
            response.set_cookie(cookie, key, httponly=True, samesite="lax")
            return response
        if matches(request.cookies.get(cookie)):
            return await answer(request)
        return PlainTextResponse("Open the address that the reader printed: it has the key.\n", status_code=403)

    return key
