"""A Prefect server that asks for a password, on a socket that the starting process has bound before.

So another user of the machine can at no time take the port and receive the password. Their connections are closed.

    python -m flows.launch.prefect_server FD
"""

import os
import secrets
import socket
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # the server's process imports no more of the project than `main` does
    from storage.processes.child import Child

HOST = "127.0.0.1"
START_SECONDS = 900
"""Limit for the start, only against hanging: a busy machine takes long to create the database."""


def listen(port: int = 0) -> socket.socket:
    """Listen on a port of loopback, 0: any free port. Connections wait until the server accepts them.

    Raises:
        OSError: the port is taken.
        RuntimeError: this machine does not reach itself, so no client could reach a server.
    """
    listener = socket.create_server((HOST, port), backlog=socket.SOMAXCONN)
    try:
        socket.create_connection(listener.getsockname(), timeout=5).close()
    except OSError as error:
        listener.close()
        message = f"this machine does not reach itself on {HOST} ({error}): try `ip link set lo up`"
        raise RuntimeError(message) from error
    return listener


def new_password() -> str:
    """Return a new password for a server and its clients (`PREFECT_API_AUTH_STRING`)."""
    return f"admin:{secrets.token_urlsafe(24)}"


def start(
    server: "Child",
    listener: socket.socket,
    password: str,
    environment: Mapping[str, str],
    meanwhile: Callable[[], object] = lambda: None,
) -> None:
    """Start a server that needs the password and, in browsers, answers only its own pages (CORS).

    Do something else `meanwhile`, and wait until it answers.

    Raises:
        RuntimeError: the server has ended, or takes too long; the message contains the end of its log.
    """
    port = listener.getsockname()[1]
    protection = {
        "PREFECT_SERVER_API_AUTH_STRING": password,
        "PREFECT_SERVER_CORS_ALLOWED_ORIGINS": f"http://{HOST}:{port},http://localhost:{port}",
    }
    command = [sys.executable, "-P", __file__, str(listener.fileno())]
    server.start(command, {**environment, **protection}, pass_fds=[listener.fileno()])
    deadline = time.monotonic() + START_SECONDS
    meanwhile()
    while not healthy(port):
        if not server.alive or time.monotonic() > deadline:
            raise RuntimeError(f"the Prefect server did not start; {server.log} ends:\n{server.log_tail()}")
        time.sleep(0.2)


def healthy(port: int) -> bool:
    """Return whether a Prefect server answers on `port`; call `ignore_proxies_on_loopback` before."""
    try:
        with urllib.request.urlopen(f"http://{HOST}:{port}/api/health", timeout=2):
            return True
    except (urllib.error.URLError, TimeoutError, ConnectionError):
        return False


def ignore_proxies_on_loopback() -> None:
    """Set the environment so that this process and its children use no proxy for loopback.

    Libraries prefer the lower-case variable, so the hosts of the upper-case one are kept under both names. `*` means
    all hosts, but only if it is the only entry.
    """
    hosts = os.environ.get("no_proxy") or os.environ.get("NO_PROXY") or ""
    if hosts.strip() != "*":
        hosts = ",".join([*filter(None, [hosts]), HOST, "localhost"])
    os.environ["no_proxy"] = os.environ["NO_PROXY"] = hosts


def main(descriptor: int) -> None:
    """Serve on the bound socket `descriptor` until a signal ends it."""
    sys.path.append(str(Path(__file__).parents[2]))
    from storage.processes.imports import fast_imports

    with fast_imports():  # garbage collections would take a quarter of the start
        import uvicorn
        from prefect.server.api.server import create_app
        from prefect.settings import get_current_settings

        from storage.processes.peers import only_own
    level = get_current_settings().server.logging_level.lower()
    config = uvicorn.Config(create_app(final=True), http=only_own(), log_level=level)
    # It creates or migrates the database in PREFECT_HOME. Two that do so at once fail; then the same command continues.
    uvicorn.Server(config).run(sockets=[socket.socket(fileno=descriptor)])


if __name__ == "__main__":
    main(int(sys.argv[1]))
