"""A Prefect server for one command. It ends with the command, however that ends, and the command ends if it dies.

Without a configured API, Prefect itself starts a temporary server. That one needs no password, and stays behind if the
process is killed.
"""

import contextlib
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from flows.launch import prefect_server
from flows.launch.prefect_server import (
    HOST,
    START_SECONDS,
    check_proxies,
    healthy,
    ignore_proxies_on_loopback,
    listen,
    new_password,
    protection,
)
from storage.commands.program import print_error
from storage.processes.child import Child

_CHECK_S = 0.2
_LIGHT = {"PREFECT_UI_ENABLED": "0", "PREFECT__SERVER_EPHEMERAL": "1", "PREFECT_SERVER_LOGGING_LEVEL": "ERROR"}
"""The settings of Prefect's own temporary server: neither pages nor scheduler."""
_STARTED: list[Child] = []
"""All servers, kept until this process ends: Prefect still sends logs and states when Python exits."""


@contextmanager
def temporary_server() -> Iterator[None]:
    """Give Prefect a server of this process in the block, unless an API is configured.

    If the server dies, the process ends with status 1: without it, the flow could only wait for answers for ever.

    Raises:
        RuntimeError: the server does not start (the message contains the end of its log), or this machine does not
            reach itself.
        ValueError: Prefect cannot use a proxy of the environment.
    """
    from prefect.settings import (
        PREFECT_API_AUTH_STRING,
        PREFECT_API_URL,
        PREFECT_HOME,
        get_current_settings,
        temporary_settings,
    )

    ignore_proxies_on_loopback()
    check_proxies()
    if PREFECT_API_URL.value():
        yield
        return
    server, password = Child(PREFECT_HOME.value() / "temporary-server.log"), new_password()
    _STARTED.append(server)
    with listen() as listener:
        port: int = listener.getsockname()[1]
        settings = get_current_settings().to_environment_variables(exclude_unset=True)
        environment = {**os.environ, **settings, **_LIGHT, **protection(port, password)}
        command = [sys.executable, "-P", prefect_server.__file__, str(listener.fileno())]
        server.start(command, environment, pass_fds=[listener.fileno()])
    _wait_for_answer(server, port)
    threading.Thread(target=_end_with, args=[server], name="prefect-server", daemon=True).start()
    with temporary_settings({PREFECT_API_URL: f"http://{HOST}:{port}/api", PREFECT_API_AUTH_STRING: password}):
        yield


def _wait_for_answer(server: Child, port: int) -> None:
    """Wait for the first answer.

    Raises:
        RuntimeError: the server has ended, or takes too long.
    """
    deadline = time.monotonic() + START_SECONDS
    while not healthy(port):
        if not server.alive or time.monotonic() > deadline:
            raise RuntimeError(f"the temporary Prefect server did not start; {server.log} ends:\n{server.log_tail()}")
        time.sleep(_CHECK_S)


def _end_with(server: Child) -> None:
    """End this process at once when the server has ended: whatever has no manifest yet is made again."""
    while server.alive:
        time.sleep(_CHECK_S)
    print_error(RuntimeError(f"the temporary Prefect server has died, see {server.log}; the same command continues"))
    with contextlib.suppress(OSError):
        sys.stdout.flush()
    os._exit(1)
