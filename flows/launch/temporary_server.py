"""A Prefect server for one command. It ends with the command, however that ends, and the command ends if it dies.

Without a configured API, Prefect itself starts a temporary server. That one needs no password, and stays behind if the
process is killed.
"""

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from flows.launch import prefect_server
from storage.commands.program import print_error
from storage.processes.child import Child

_LIGHT = {"PREFECT_UI_ENABLED": "0", "PREFECT__SERVER_EPHEMERAL": "1", "PREFECT_SERVER_LOGGING_LEVEL": "ERROR"}
"""The settings of Prefect's own temporary server: neither pages nor scheduler."""
_STARTED: list[Child] = []
"""All servers, kept until this process ends: Prefect still sends logs and states when Python exits."""


@contextmanager
def temporary_server(meanwhile: Callable[[], object] = lambda: None) -> Iterator[None]:
    """Give Prefect a server of this process in the block, unless an API is configured; call `meanwhile` as it starts.

    If the server dies, the process ends with status 1: without it, the flow could only wait for answers for ever.

    Raises:
        RuntimeError: the server does not start, or this machine does not reach itself.
    """
    from prefect import settings

    prefect_server.ignore_proxies_on_loopback()
    if settings.PREFECT_API_URL.value():
        meanwhile()
        yield
        return
    server, password = Child(settings.PREFECT_HOME.value() / "temporary-server.log"), prefect_server.new_password()
    _STARTED.append(server)
    with prefect_server.listen() as listener:
        address = f"http://{prefect_server.HOST}:{listener.getsockname()[1]}/api"
        present = settings.get_current_settings().to_environment_variables(exclude_unset=True)
        prefect_server.start(server, listener, password, {**os.environ, **present, **_LIGHT}, meanwhile)
    threading.Thread(target=_end_with, args=[server], name="prefect-server", daemon=True).start()
    client = {
        settings.PREFECT_API_URL: address,
        settings.PREFECT_API_AUTH_STRING: password,
        settings.PREFECT_FLOWS_HEARTBEAT_FREQUENCY: None,  # nobody reads them, and the end of a flow waits for them
    }
    with settings.temporary_settings(client):
        yield


def _end_with(server: Child) -> None:
    """End this process at once when the server has ended: the next attempt makes again what has no manifest yet."""
    while server.alive:
        time.sleep(0.2)
    print_error(RuntimeError(f"the temporary Prefect server has died, see {server.log}; the same command continues"))
    with contextlib.suppress(OSError):
        sys.stdout.flush()
    os._exit(1)
