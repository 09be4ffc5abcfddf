"""The process of a Prefect server, on a socket that whoever starts it has bound before.

So there is no moment in which another user of the machine can take the port and be told the password. Prefect asks for
it where `PREFECT_SERVER_API_AUTH_STRING` is set.

    python -m flows.prefect_server FD
"""

import secrets
import socket
import sys
import urllib.error
import urllib.request

HOST = "127.0.0.1"
_NO_PROXY = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def reserve(port: int = 0) -> socket.socket:
    """A socket bound to a port of loopback, any free one for 0. Only sockets of the same user may share the port.

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


def new_password() -> str:
    """A server's `PREFECT_SERVER_API_AUTH_STRING`, and its clients' `PREFECT_API_AUTH_STRING`."""
    return f"admin:{secrets.token_urlsafe(24)}"


def protection(port: int, password: str) -> dict[str, str]:
    """Settings by which a server answers only those who know the password, and no web page but its own."""
    return {
        "PREFECT_SERVER_API_AUTH_STRING": password,
        "PREFECT_SERVER_CORS_ALLOWED_ORIGINS": f"http://{HOST}:{port},http://localhost:{port}",
    }


def healthy(port: int) -> bool:
    """Whether a Prefect server answers there."""
    try:
        with _NO_PROXY.open(f"http://{HOST}:{port}/api/health", timeout=2):
            return True
    except (urllib.error.URLError, TimeoutError, ConnectionError):
        return False


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
    uvicorn.Server(config).run(sockets=[socket.socket(fileno=descriptor)])


if __name__ == "__main__":
    main(int(sys.argv[1]))
