"""`make up` and `make down`: a Prefect server and a worker in the background of this machine.

Process ids and logs are in `var/prefect`. `up` writes `prefect.toml`, which every Prefect command in this folder reads,
so that no command needs an exported address or password; `down` removes it. Other users of the machine cannot read the
file, and the server answers no request without the password. Processes are found by recorded id, never by name.
"""

import argparse
import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import IO

from flows.launch import prefect_server, prefect_worker
from flows.launch.background import Background
from flows.launch.prefect_server import (
    HOST,
    LOOPBACK_SECONDS,
    START_SECONDS,
    check_proxies,
    healthy,
    ignore_proxies_on_loopback,
    listen,
    locked,
    new_password,
    protection,
    reserve,
)
from storage import interrupts
from storage.visible import printable

ROOT = Path(__file__).resolve().parents[2]
STATE = ROOT / "var" / "prefect"
CLIENT_SETTINGS = ROOT / "prefect.toml"
POOL = "local"
SERVER, WORKER = Background("server", STATE), Background("worker", STATE)
_WRITTEN = re.compile(rf'(\[api\]\nurl = "(?P<url>http://{re.escape(HOST)}:\d+)/api"\nauth_string = "[^"]*"\n)?')
"""The text of `prefect.toml`; empty after a kill."""


def up(port: int) -> None:
    """Start server and worker unless they run, and deploy `prefect.yaml`; safe to repeat."""
    ignore_proxies_on_loopback()
    check_proxies()
    with _locked():
        if starts := not (SERVER.runs() and WORKER.runs()):
            _written_url()  # refuses a file of another program before anything ends
            _down()  # one of them may have been killed: flow runs without a worker cannot be cancelled
            _start_server(port)
        address = _address()
        _prefect("work-pool", "create", POOL, "--type", "process", "--overwrite")
        _prefect("deploy", "--all")
        if starts:
            _start_worker(int(address.rpartition(":")[2]))
        WORKER.wait(lambda: "started" in WORKER.log.read_text(errors="replace"))
    print(f"Prefect runs on {address} (also in a browser, which asks for the `auth_string` of")
    print(f"{CLIENT_SETTINGS.name}), its logs are in {STATE.relative_to(ROOT)}. Now type:")
    print("  source .venv/bin/activate")
    print("  prefect deployment run math-mt-ppo/math-mt-ppo --watch")


def down() -> None:
    """End worker, flow runs and server; harmless if nothing runs."""
    with _locked():
        _down()


def _locked() -> IO[str]:
    """Hold a lock against other `make up` and `make down`; it ends with this process, however that ends."""
    STATE.mkdir(parents=True, exist_ok=True)
    STATE.chmod(0o700)
    return locked(STATE / "make.lock", "waiting for another `make up` or `make down` to end")


def _down() -> None:
    left = WORKER.stop() + SERVER.stop()
    try:
        if _written_url() is not None:
            CLIENT_SETTINGS.unlink()
    except ValueError as error:
        print(f"left as it is: {error}")
    if left:
        raise ValueError(
            f"processes {', '.join(str(process.pid) for process in left)} were killed and do not end: they belong to "
            "another user, or wait for a disk or the network. Repair that and type `make down` again"
        )


def _start_server(port: int) -> None:
    if not 0 < port < 2**16:
        raise ValueError(f"port {port} is invalid: give one from 1 to 65535")
    with socket.socket() as probe:
        probe.settimeout(LOOPBACK_SECONDS)
        taken = probe.connect_ex((HOST, port)) == 0
    try:
        listener = listen(port)
    except OSError:
        taken = True
    if taken:
        raise ValueError(f"port {port} is taken by another program; choose another: make up PORT={port + 1}")
    with listener:
        password = new_password()
        _write_client_settings(port, password)
        command = ["-P", prefect_server.__file__, str(listener.fileno())]
        SERVER.start(command, ROOT, _environment() | protection(port, password), [listener])
    SERVER.wait(lambda: healthy(port))


def _start_worker(port: int) -> None:
    folder = STATE / "worker"
    shutil.rmtree(folder, ignore_errors=True)  # a killed worker has left files
    folder.mkdir()
    command = [prefect_worker.__file__, str(folder), "worker", "start", "--pool", POOL, "--name", "local"]
    with reserve(port) as reserved:  # while the worker lives, no other user gets the port
        WORKER.start(["-P", *command], ROOT, _environment(), [reserved])


def _write_client_settings(port: int, password: str) -> None:
    CLIENT_SETTINGS.unlink(missing_ok=True)
    with os.fdopen(os.open(CLIENT_SETTINGS, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "w") as file:
        file.write(f'[api]\nurl = "http://{HOST}:{port}/api"\nauth_string = "{password}"\n')


def _written_url() -> str | None:
    """Return the server's URL in the `prefect.toml` that `make up` wrote.

    It is empty if `make up` was killed before it wrote it, and None without the file.

    Raises:
        ValueError: another program wrote the file, or it is damaged.
    """
    if not CLIENT_SETTINGS.exists():
        return None
    text = CLIENT_SETTINGS.read_bytes().decode(errors="replace") if CLIENT_SETTINGS.is_file() else "no file"
    if found := _WRITTEN.fullmatch(text):
        return found["url"] or ""
    raise ValueError(
        f"{CLIENT_SETTINGS} is not what `make up` writes there, and it writes its own: move yours away, or remove it"
    )


def _address() -> str:
    """Return the URL of the server's pages."""
    try:
        if url := _written_url():
            return url
        raise ValueError(f"{CLIENT_SETTINGS} is missing or empty")
    except ValueError as error:
        raise ValueError(
            f"{error}. The server runs, but its password is lost: type `make down` and `make up`, which end flow runs"
        ) from error


def _prefect(*arguments: str) -> None:
    """Run a Prefect command. Show its output only if it fails: it advises steps that `up` takes itself."""
    command = [sys.executable, "-m", "prefect", "--no-prompt", *arguments]
    try:
        done = subprocess.run(
            command, cwd=ROOT, env=_environment(), capture_output=True, text=True, check=False, timeout=START_SECONDS
        )
    except subprocess.TimeoutExpired as error:
        raise ValueError(
            f"`prefect {' '.join(arguments)}` has not ended in {START_SECONDS} s; "
            f"look for the reason in the server's log {SERVER.log}"
        ) from error
    if done.returncode:
        raise ValueError(f"`prefect {' '.join(arguments)}` failed:\n{done.stdout}{done.stderr}")


def _environment() -> dict[str, str]:
    """Return this environment without addresses and passwords that would override `prefect.toml`."""
    others = {"PREFECT_API_URL", "PREFECT_API_AUTH_STRING", "PREFECT_API_KEY"}
    return {key: value for key, value in os.environ.items() if key not in others} | {"PREFECT_HOME": str(STATE)}


def main() -> None:
    """Run the command line: `up [--port PORT]` or `down`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("command", choices=["up", "down"])
    parser.add_argument("--port", type=int, default=4200)
    arguments = parser.parse_args()
    try:
        if arguments.command == "up":
            up(arguments.port)
        else:
            down()
    except (ValueError, RuntimeError, OSError) as error:
        sys.exit(printable(f"error: {error}"))


if __name__ == "__main__":
    interrupts.run(main)
