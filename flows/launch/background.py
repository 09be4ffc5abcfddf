"""The process that `make up` leaves behind: it runs a Prefect server and a worker.

Whatever ends it, SIGTERM or a kill, ends both and all flow runs. It ends by itself if one of the two dies.

    python -m flows.launch.background FD
"""

import os
import signal
import socket
import sys
import time
from pathlib import Path

import psutil

from flows.launch import prefect_server
from flows.launch.prefect_server import HOST, new_password
from storage.processes.child import Child

ROOT = Path(__file__).resolve().parents[2]
STATE = ROOT / "var" / "prefect"
"""The folder of its logs and of Prefect's database."""
SERVER_LOG, WORKER_LOG = STATE / "server.log", STATE / "worker.log"
CLIENT_SETTINGS = ROOT / "prefect.toml"
"""Address and password of the server: every Prefect command in the project's folder reads them here."""
OURS = "# Written by `make up`; `make down` removes it.\n"
_STREAMING = {"PREFECT_SERVER_LOGS_STREAM_OUT_ENABLED": "1", "PREFECT_SERVER_LOGS_STREAM_PUBLISHING_ENABLED": "1"}
"""Settings of the server that let `prefect deployment run --watch` print the lines of the flow run."""
_STOP_SECONDS = 15
"""Time for flow runs to end their servers; then they are killed, and continue where they stopped."""


def prefect_environment() -> dict[str, str]:
    """Return this environment without addresses and passwords that would override `prefect.toml`."""
    others = {"PREFECT_API_URL", "PREFECT_API_AUTH_STRING", "PREFECT_API_KEY"}
    return {key: value for key, value in os.environ.items() if key not in others} | {"PREFECT_HOME": str(STATE)}


def main(descriptor: int) -> None:
    """Run server and worker on the listening socket `descriptor` until a signal comes, or one of them ends."""
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    server, worker, password = Child(SERVER_LOG), Child(WORKER_LOG), new_password()
    with socket.socket(fileno=descriptor) as listener:
        address = f"http://{HOST}:{listener.getsockname()[1]}"
        with os.fdopen(os.open(CLIENT_SETTINGS, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "w") as settings:
            settings.write(f'{OURS}[api]\nurl = "{address}/api"\nauth_string = "{password}"\n')
        try:
            prefect_server.start(server, listener, password, prefect_environment() | _STREAMING)
            command = ["worker", "start", "--pool", "local", "--type", "process", "--name", "local"]
            # The worker holds the socket, too: as long as it sends the password, nobody else gets the port.
            worker.start([sys.executable, "-m", "prefect", *command], prefect_environment(), [descriptor], ROOT)
            while server.alive and worker.alive:
                time.sleep(0.5)
        finally:
            runs = psutil.Process(worker.pid).children() if worker.alive else []
            for run in runs:  # while the worker can still report that
                run.terminate()
            psutil.wait_procs(runs, _STOP_SECONDS)
            worker.close()
            server.close()
            CLIENT_SETTINGS.unlink(missing_ok=True)


if __name__ == "__main__":
    main(int(sys.argv[1]))
