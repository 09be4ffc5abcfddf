"""`make up` and `make down`: a Prefect server and a worker in the background of this machine.

They run in one process (`serve`), whose number is in `var/prefect/background.pid`; a lock on this file says that the
process lives. Whatever ends it, SIGTERM or a kill, ends both and all flow runs. It ends by itself if one of the two
dies. Logs are beside it. The address and the password are in `prefect.toml`, which only its owner can
read: every Prefect command in this folder finds the server by it.
"""

import argparse
import fcntl
import os
import signal
import socket
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import psutil

from flows.launch import prefect_server
from storage import interrupts, visible
from storage.processes.child import Child, tail

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
_NOTE, _LOG = STATE / "background.pid", STATE / "background.log"
_DOWN_SECONDS = 60


def prefect_environment() -> dict[str, str]:
    """Return this environment without addresses and passwords that would override `prefect.toml`."""
    others = {"PREFECT_API_URL", "PREFECT_API_AUTH_STRING", "PREFECT_API_KEY"}
    return {key: value for key, value in os.environ.items() if key not in others} | {"PREFECT_HOME": str(STATE)}


def serve(descriptor: int) -> None:
    """Run server and worker on the listening socket `descriptor` until a signal comes, or one of them ends."""
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    server, worker, password = Child(SERVER_LOG), Child(WORKER_LOG), prefect_server.new_password()
    with socket.socket(fileno=descriptor) as listener:
        address = f"http://{prefect_server.HOST}:{listener.getsockname()[1]}"
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


def up(port: int) -> None:
    """Start server and worker unless they run, and deploy `prefect.yaml`; safe to repeat."""
    prefect_server.ignore_proxies_on_loopback()
    if not running():
        _start(port)
    deadline = time.monotonic() + prefect_server.START_SECONDS
    # The worker's log says so at its beginning: flow runs write behind it.
    while not (WORKER_LOG.exists() and b"started" in WORKER_LOG.read_bytes()[:50_000]):
        if not running() or time.monotonic() > deadline:
            raise ValueError(f"Prefect did not start; {_LOG} ends:\n{tail(_LOG)}")
        time.sleep(0.2)
    command = [sys.executable, "-m", "prefect", "--no-prompt", "deploy", "--all"]
    done = subprocess.run(command, cwd=ROOT, env=prefect_environment(), capture_output=True, text=True, check=False)
    if done.returncode:  # only then its output is shown: it advises steps that `up` takes itself
        raise ValueError(f"`prefect deploy --all` failed; see also {SERVER_LOG}:\n{done.stdout}{done.stderr}")
    address = tomllib.loads(CLIENT_SETTINGS.read_text())["api"]["url"].removesuffix("/api")
    print(_STARTED.format(address=address, settings=CLIENT_SETTINGS.name, logs=STATE.relative_to(ROOT)))


_STARTED = """\
Prefect runs on {address} (also in a browser, which asks for the `auth_string` of
{settings}), its logs are in {logs}. Now type:
  source .venv/bin/activate
  prefect deployment run math-mt-ppo/math-mt-ppo --watch
Nightly retraining is paused; to begin it once its problems can come (tasks/retrain/README.md):
  prefect deployment schedule resume --all"""


def _start(port: int) -> None:
    """Begin `serve` in the background, with a listening socket and the lock on its number."""
    if CLIENT_SETTINGS.exists():
        if not CLIENT_SETTINGS.read_text(errors="replace").startswith(OURS):
            raise ValueError(f"{CLIENT_SETTINGS} is not of `make up`, which writes its own: move it away, or remove it")
        CLIENT_SETTINGS.unlink()  # left by a kill
    WORKER_LOG.unlink(missing_ok=True)
    try:
        listener = prefect_server.listen(port)
    except OSError as error:
        raise ValueError(f"port {port} cannot be used ({error}); choose another: make up PORT={port + 1}") from error
    with listener, _NOTE.open("w") as note, _LOG.open("w") as log:
        fcntl.flock(note, fcntl.LOCK_EX)
        process = subprocess.Popen(
            [sys.executable, "-m", "flows.launch.local_server", "serve", str(listener.fileno())],
            cwd=ROOT,
            env=prefect_environment(),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            pass_fds=[listener.fileno(), note.fileno()],  # the lock is now the process's, and its reaper's
        )
        note.write(str(process.pid))


def running() -> int | None:
    """Return the number of the process that `make up` left behind; None if it does not run."""
    with _NOTE.open("a+") as note:
        try:
            fcntl.flock(note, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            note.seek(0)
            return int(note.read())
    return None


def down() -> None:
    """End worker, flow runs and server; harmless if nothing runs."""
    if (pid := running()) is None:
        return
    os.kill(pid, signal.SIGTERM)
    deadline = time.monotonic() + _DOWN_SECONDS
    while running():
        if time.monotonic() > deadline:
            raise ValueError(f"process {pid} or one of its children has not ended in {_DOWN_SECONDS} s: end it by hand")
        time.sleep(0.2)
    print("server and worker ended")


def main() -> None:
    """Run the command line: `up [--port PORT]` or `down`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("command", choices=["up", "down"])
    parser.add_argument("--port", type=int, default=4200)
    arguments = parser.parse_args()
    STATE.mkdir(parents=True, exist_ok=True)
    STATE.chmod(0o700)
    try:
        with (STATE / "make.lock").open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if arguments.command == "up":
                up(arguments.port)
            else:
                down()
    except BlockingIOError:
        sys.exit("error: another `make up` or `make down` is at work: wait for its end")
    except (ValueError, RuntimeError, OSError, OverflowError) as error:
        sys.exit(visible.printable(f"error: {error}"))


if __name__ == "__main__":
    if sys.argv[1:2] == ["serve"]:
        serve(int(sys.argv[2]))
    else:
        interrupts.run(main)
