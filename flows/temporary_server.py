"""A Prefect server for one command, which ends with it however it ends.

Where no API is configured Prefect starts a temporary server itself, but leaves it behind when the process is killed.
This one runs under the supervisor that vLLM runs under.
"""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from flows.local_server import healthy
from tasks.inference import supervisor
from tasks.inference.server import free_port

START_SECONDS = 900
"""Guards against hanging only: a busy machine takes long to make the database."""
_LIGHT = {"PREFECT_UI_ENABLED": "0", "PREFECT__SERVER_EPHEMERAL": "1", "PREFECT__SERVER_FINAL": "1"}
"""As Prefect starts its own temporary server: neither pages nor scheduler."""


_STARTED: list["subprocess.Popen[bytes]"] = []
"""Kept until this process ends, and with it the pipe: when Python exits, Prefect still sends what it has to say."""


@contextmanager
def temporary_server() -> Iterator[None]:
    """Inside of the block Prefect works with a server of this process's own, unless an API is configured.

    Raises:
        RuntimeError: it does not start; holds the end of its log.
    """
    from prefect.settings import PREFECT_API_URL, PREFECT_HOME, get_current_settings, temporary_settings

    if PREFECT_API_URL.value():
        yield
        return
    log = PREFECT_HOME.value() / "temporary-server.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    port = free_port()
    environment = os.environ | _LIGHT | get_current_settings().to_environment_variables(exclude_unset=True)
    process = subprocess.Popen(
        [sys.executable, supervisor.__file__, str(log), *_command(port)],
        stdin=subprocess.PIPE,  # its end is ours
        stdout=subprocess.DEVNULL,
        env=environment,
        start_new_session=True,  # Ctrl-C is for the flow, which reports to the server until it has ended
    )
    _STARTED.append(process)
    _await(port, process, log)
    with temporary_settings({PREFECT_API_URL: f"http://127.0.0.1:{port}/api"}):
        yield


def _command(port: int) -> list[str]:
    import prefect

    command = [sys.executable, "-m", "uvicorn", "--app-dir", str(prefect.__module_path__.parent)]
    command += ["--factory", "prefect.server.api.server:create_app", "--host", "127.0.0.1", "--port", str(port)]
    return [*command, "--log-level", "error", "--lifespan", "on"]


def _await(port: int, process: "subprocess.Popen[bytes]", log: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while process.poll() is not None or not healthy(port):
        if process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"the temporary Prefect server did not start; {log} ends:\n{log.read_text()[-2000:]}")
        time.sleep(0.1)
