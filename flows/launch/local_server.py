"""`make up` and `make down`: a Prefect server and a worker in the background of this machine.

Process ids and logs lie in `var/prefect`. `up` writes `prefect.toml`, which every Prefect command in this folder
reads, so that none needs an exported address or password; `down` removes it. Other users of the machine cannot read it,
and the server answers nobody without the password. Processes are found by recorded id, never by name.
"""

import argparse
import contextlib
import fcntl
import os
import re
import shutil
import socket
import subprocess
import sys
import tomllib
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

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
_PREFECT = ("-m", "prefect")


def up(port: int) -> None:
    """Starts server and worker unless they run, and deploys `prefect.yaml`; safe to repeat."""
    asks_a_proxy = _asks_a_proxy()
    ignore_proxies_on_loopback()
    check_proxies()
    with _locked():
        if begins := not (SERVER.runs() and WORKER.runs()):
            _client_settings()  # before anything is ended: those of somebody else would be in the way
            _down()  # one may have been killed: flow runs without a worker cannot be cancelled
            _start_server(port)
        address = _address()
        _prefect("work-pool", "create", POOL, "--type", "process", "--overwrite")
        _prefect("deploy", "--all")
        if begins:
            _start_worker(int(address.rpartition(":")[2]))
        WORKER.wait(lambda: "started" in WORKER.log.read_text(errors="replace"))
    print(f"Prefect runs on {address} (also in a browser, which asks for the `auth_string` of")
    print(f"{CLIENT_SETTINGS.name}), its logs are in {STATE.relative_to(ROOT)}. Now type:")
    print("  source .venv/bin/activate")
    if asks_a_proxy:
        print(f"  export no_proxy={HOST}    # or the next command asks the proxy for this server")
    print("  prefect deployment run math-mt-ppo/math-mt-ppo --watch")


def down() -> None:
    """Ends worker, flow runs and server; harmless when nothing runs."""
    with _locked():
        _down()


@contextlib.contextmanager
def _locked() -> Iterator[None]:
    """Hold a lock against other `make up` and `make down`; it ends with this process, however that ends."""
    STATE.mkdir(parents=True, exist_ok=True)
    STATE.chmod(0o700)
    with (STATE / "make.lock").open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print("waits for another `make up` or `make down` to end", flush=True)
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _down() -> None:
    left = WORKER.stop() + SERVER.stop()
    try:
        if _client_settings() is not None:
            CLIENT_SETTINGS.unlink()
    except ValueError as error:
        print(f"left as it is: {error}")
    if left:
        raise ValueError(
            f"processes {', '.join(str(process.pid) for process in left)} were killed and do not end: they belong to "
            "another user, or wait for a disk or the network. Type `make down` again once that is mended"
        )


def _start_server(port: int) -> None:
    if not 0 < port < 2**16:
        raise ValueError(f"port {port} is none: give one from 1 to 65535")
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
    shutil.rmtree(folder, ignore_errors=True)  # what a killed one has left
    folder.mkdir()
    command = [prefect_worker.__file__, str(folder), "worker", "start", "--pool", POOL, "--name", "local"]
    with reserve(port) as reserved:  # while the worker lives nobody else gets the port
        WORKER.start(["-P", *command], ROOT, _environment(), [reserved])


def _write_client_settings(port: int, password: str) -> None:
    CLIENT_SETTINGS.unlink(missing_ok=True)
    with os.fdopen(os.open(CLIENT_SETTINGS, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "w") as file:
        file.write(f'[api]\nurl = "http://{HOST}:{port}/api"\nauth_string = "{password}"\n')


def _client_settings() -> dict[str, Any] | None:
    """Read what `make up` wrote into `prefect.toml`: nothing if it was killed before that; None without the file.

    Raises:
        ValueError: somebody else wrote it, or it is damaged.
    """
    remedy = "`make up` writes its own there: move it away, or remove it"
    if not CLIENT_SETTINGS.exists():
        return None
    if not CLIENT_SETTINGS.is_file():
        raise ValueError(f"{CLIENT_SETTINGS} is not a file, and {remedy}")
    try:
        settings = tomllib.loads(CLIENT_SETTINGS.read_text())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{CLIENT_SETTINGS} cannot be read ({error}), and {remedy}") from error
    if not settings:
        return settings
    match settings:
        case {"api": {"url": str(url), "auth_string": str(), **more}, **others} if not (more or others):
            if re.fullmatch(rf"http://{re.escape(HOST)}:\d+/api", url):
                return settings
    raise ValueError(f"{CLIENT_SETTINGS} holds other settings than those of `make up`, and {remedy}")


def _address() -> str:
    """The URL of the server's pages."""
    try:
        if settings := _client_settings():
            url: str = settings["api"]["url"]
            return url.removesuffix("/api")
        raise ValueError(f"{CLIENT_SETTINGS} is missing or empty")
    except ValueError as error:
        raise ValueError(
            f"{error}. The server runs, but its password is lost: type `make down` and `make up`; flow runs end"
        ) from error


def _prefect(*arguments: str) -> None:
    """Runs a Prefect command to its end; its output, which advises steps that `up` takes itself, is for failures."""
    command = [sys.executable, *_PREFECT, "--no-prompt", *arguments]
    try:
        done = subprocess.run(
            command, cwd=ROOT, env=_environment(), capture_output=True, text=True, check=False, timeout=START_SECONDS
        )
    except subprocess.TimeoutExpired as error:
        raise ValueError(
            f"`prefect {' '.join(arguments)}` has not ended in {START_SECONDS} s; "
            f"why may stand in the server's log {SERVER.log}"
        ) from error
    if done.returncode:
        raise ValueError(f"`prefect {' '.join(arguments)}` failed:\n{done.stdout}{done.stderr}")


def _environment() -> dict[str, str]:
    """This environment without an address or a password that would win over `prefect.toml`."""
    others = {"PREFECT_API_URL", "PREFECT_API_AUTH_STRING", "PREFECT_API_KEY"}
    return {key: value for key, value in os.environ.items() if key not in others} | {"PREFECT_HOME": str(STATE)}


def _asks_a_proxy() -> bool:
    """Whether commands in this environment send what is for the server to a proxy."""
    return bool({"http", "all"} & urllib.request.getproxies().keys()) and not urllib.request.proxy_bypass(HOST)


def main() -> None:
    """Command line: `up [--port PORT]` or `down`."""
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
