"""The process of a Prefect server, on a socket that the starting process has bound before.

So another user of the machine can at no time take the port and receive the password. Prefect asks for the password if
`PREFECT_SERVER_API_AUTH_STRING` is set.

    python -m flows.launch.prefect_server FD
"""

import errno
import fcntl
import os
import secrets
import socket
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import IO

HOST = "127.0.0.1"
START_SECONDS = 900
"""Limit for the start, only against hanging: a busy machine takes long to create the database."""
LOOPBACK_SECONDS = 5
"""Longest time for the kernel to connect this machine with itself; no other process takes part in it."""
_NO_PROXY = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def reserve(port: int = 0) -> socket.socket:
    """Bind a socket to a port of loopback; 0: any free port. Only sockets of the same user may share the port.

    Raises:
        OSError: the port is taken.
    """
    reserved = socket.socket()
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    try:
        reserved.bind((HOST, port))
    except OSError:
        reserved.close()
        raise
    return reserved


def listen(port: int = 0) -> socket.socket:
    """Reserve a port and listen on it: connections wait until the server accepts them.

    Raises:
        OSError: the port is taken.
        RuntimeError: this machine does not reach itself, so no client could reach a server.
    """
    listener = reserve(port)
    listener.listen(socket.SOMAXCONN)
    try:
        socket.create_connection(listener.getsockname(), timeout=LOOPBACK_SECONDS).close()
    except OSError as error:
        listener.close()
        if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
            raise
        raise RuntimeError(
            f"this machine does not reach itself on {HOST} ({error}): its loopback interface is down, or a firewall "
            "is in the way; `ip link set lo up` brings the interface up"
        ) from error
    return listener


def new_password() -> str:
    """Return a new `PREFECT_SERVER_API_AUTH_STRING` for a server; its clients use it as `PREFECT_API_AUTH_STRING`."""
    return f"admin:{secrets.token_urlsafe(24)}"


def protection(port: int, password: str) -> dict[str, str]:
    """Return settings of a server that needs the password and, in browsers, answers only its own pages (CORS)."""
    return {
        "PREFECT_SERVER_API_AUTH_STRING": password,
        "PREFECT_SERVER_CORS_ALLOWED_ORIGINS": f"http://{HOST}:{port},http://localhost:{port}",
    }


def healthy(port: int) -> bool:
    """Return whether a Prefect server answers on `port`."""
    try:
        with _NO_PROXY.open(f"http://{HOST}:{port}/api/health", timeout=2):
            return True
    except (urllib.error.URLError, TimeoutError, ConnectionError):
        return False


def ignore_proxies_on_loopback() -> None:
    """Set the environment so that this process and its children use no proxy for loopback.

    Libraries prefer the lower-case variable, so the hosts of the upper-case one are kept under both names. `*` means
    all hosts, but only if it is the only entry.
    """
    value = os.environ.get("no_proxy") or os.environ.get("NO_PROXY") or ""
    hosts = [host.strip() for host in value.split(",") if host.strip()]
    if hosts != ["*"]:
        hosts += [host for host in (HOST, "localhost") if host not in hosts]
    os.environ["no_proxy"] = os.environ["NO_PROXY"] = ",".join(hosts)


def check_proxies() -> None:
    """Check that httpx, the HTTP client of Prefect, can use the proxies of the environment.

    httpx sets up all of them, even for requests to loopback. They stay in the environment: downloads may need them.

    Raises:
        ValueError: httpx cannot use one of them.
    """
    import httpx

    try:
        httpx.Client(verify=False).close()
    except (ValueError, ImportError, httpx.InvalidURL) as error:
        variables = ("http_proxy", "https_proxy", "all_proxy", "no_proxy")
        names = sorted(name for name in os.environ if name.lower() in variables)
        raise ValueError(
            f"{', '.join(names)}: httpx, the HTTP client of Prefect, cannot use one of them ({error}); "
            "write a SOCKS proxy as socks5h://HOST:PORT, and name hosts in no_proxy without ports or brackets"
        ) from error


def locked(path: Path, waiting: str) -> IO[str]:
    """Return a file that is locked until it is closed; print `waiting` while another process has locked it."""
    lock = path.open("a")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        print(waiting, flush=True)
        fcntl.flock(lock, fcntl.LOCK_EX)
    return lock


def main(descriptor: int) -> None:
    """Serve on the bound socket `descriptor` until a signal ends it."""
    import uvicorn
    from prefect.server.api.server import create_app
    from prefect.settings import get_current_settings

    settings = get_current_settings().server
    config = uvicorn.Config(
        create_app(final=True),
        timeout_keep_alive=settings.api.keepalive_timeout,
        ws_ping_interval=settings.api.websocket_ping_interval,
        ws_ping_timeout=settings.api.websocket_ping_timeout,
        log_level=settings.logging_level.lower(),
    )
    # A starting server creates or migrates the database in PREFECT_HOME; two at once fail with database errors.
    home = get_current_settings().home
    home.mkdir(parents=True, exist_ok=True)
    lock = locked(home / "server-start.lock", f"waiting while another Prefect server starts in {home}")

    class Server(uvicorn.Server):
        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            lock.close()

    Server(config).run(sockets=[socket.socket(fileno=descriptor)])


if __name__ == "__main__":
    main(int(sys.argv[1]))
