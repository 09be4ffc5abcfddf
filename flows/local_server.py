"""`make up` and `make down`: a Prefect server and a worker in the background of this machine.

Process ids and logs lie in `var/prefect`. `up` writes `prefect.toml`, which every Prefect command in this folder
reads, so that none needs an exported address or password; `down` removes it. Other users of the machine cannot read it,
and the server answers nobody without the password. Processes are found by recorded id, never by name.
"""

import argparse
import contextlib
import os
import socket
import subprocess
import sys
import time
import tomllib
import urllib.request
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import psutil

from flows import prefect_server
from flows.prefect_server import (
    HOST,
    START_SECONDS,
    healthy,
    ignore_proxies_on_loopback,
    new_password,
    protection,
    reserve,
)
from storage import interrupts
from storage.visible import printable

ROOT = Path(__file__).resolve().parent.parent
STATE = ROOT / "var" / "prefect"
CLIENT_SETTINGS = ROOT / "prefect.toml"
POOL = "local"
_PREFECT = ("-m", "prefect")
CLOCK_SECONDS = 60
"""How far an adjusted clock may move a process's start past the writing of its id."""
STOP_SECONDS = 20
"""How long a flow run has for ending its vLLM server before everything left is killed."""


def up(port: int) -> None:
    """Starts server and worker unless they run, and deploys `prefect.yaml`; safe to repeat."""
    STATE.mkdir(parents=True, exist_ok=True)
    STATE.chmod(0o700)
    asks_a_proxy = _asks_a_proxy()
    ignore_proxies_on_loopback()
    if begins := not (_runs("server") and _runs("worker")):
        down()  # one may have been killed: flow runs without a worker cannot be cancelled
        _start_server(port)
    address = _address()
    _prefect("work-pool", "create", POOL, "--type", "process", "--overwrite")
    _prefect("deploy", "--all")
    if begins:
        with reserve(int(address.rpartition(":")[2])) as reserved:  # while the worker lives nobody else gets the port
            _start("worker", *_PREFECT, "worker", "start", "--pool", POOL, "--name", "local", inherits=[reserved])
    _await("worker", lambda: "started" in _log("worker").read_text())
    print(f"Prefect runs on {address} (also in a browser, which asks for the `auth_string` of")
    print(f"{CLIENT_SETTINGS.name}), its logs are in {STATE.relative_to(ROOT)}. Now type:")
    print("  source .venv/bin/activate")
    if asks_a_proxy:
        print(f"  export no_proxy={HOST}    # or the next command asks the proxy for this server")
    print("  prefect deployment run math-mt-ppo/math-mt-ppo --watch")


def down() -> None:
    """Ends worker, flow runs and server; harmless when nothing runs."""
    for name in ("worker", "server"):
        _stop(name)
    CLIENT_SETTINGS.unlink(missing_ok=True)


def _start_server(port: int) -> None:
    if not 0 < port < 2**16:
        raise ValueError(f"port {port} is none: give one from 1 to 65535")
    with socket.socket() as probe:
        taken = probe.connect_ex((HOST, port)) == 0
    try:
        listener = reserve(port)
    except OSError:
        taken = True
    if taken:
        raise ValueError(f"port {port} is taken by another program; choose another: make up PORT={port + 1}")
    with listener:
        listener.listen(socket.SOMAXCONN)
        password = new_password()
        _write_client_settings(port, password)
        command = ["-P", prefect_server.__file__, str(listener.fileno())]
        _start("server", *command, inherits=[listener], environment=protection(port, password))
    _await("server", lambda: healthy(port))


def _write_client_settings(port: int, password: str) -> None:
    CLIENT_SETTINGS.unlink(missing_ok=True)
    with os.fdopen(os.open(CLIENT_SETTINGS, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "w") as file:
        file.write(f'[api]\nurl = "http://{HOST}:{port}/api"\nauth_string = "{password}"\n')


def _address() -> str:
    """The URL of the server's pages."""
    address: str = tomllib.loads(CLIENT_SETTINGS.read_text())["api"]["url"]
    return address.removesuffix("/api")


def _prefect(*arguments: str) -> None:
    """Runs a Prefect command to its end; its output, which advises steps that `up` takes itself, is for failures."""
    command = [sys.executable, *_PREFECT, "--no-prompt", *arguments]
    done = subprocess.run(command, cwd=ROOT, env=_environment(), capture_output=True, text=True, check=False)
    if done.returncode:
        raise ValueError(f"`prefect {' '.join(arguments)}` failed:\n{done.stdout}{done.stderr}")


def _start(
    name: str, *arguments: str, inherits: Iterable[socket.socket], environment: Mapping[str, str] | None = None
) -> None:
    """Runs a Python command in a session of its own, which its flow runs inherit."""
    with _log(name).open("w") as log:
        process = subprocess.Popen(
            [sys.executable, *arguments],
            cwd=ROOT,
            env={**_environment(), **(environment or {})},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            pass_fds=[inherited.fileno() for inherited in inherits],
        )
    _pid_file(name).write_text(str(process.pid))


def _environment() -> dict[str, str]:
    """This environment without an address or a password that would win over `prefect.toml`."""
    others = {"PREFECT_API_URL", "PREFECT_API_AUTH_STRING", "PREFECT_API_KEY"}
    return {key: value for key, value in os.environ.items() if key not in others} | {"PREFECT_HOME": str(STATE)}


def _asks_a_proxy() -> bool:
    """Whether commands in this environment send what is for the server to a proxy."""
    return "http" in urllib.request.getproxies() and not urllib.request.proxy_bypass(HOST)


def _await(name: str, ready: Callable[[], bool]) -> None:
    deadline = time.monotonic() + START_SECONDS
    while not ready():
        if not _session(name) or time.monotonic() > deadline:
            raise ValueError(f"the {name} did not start; its log {_log(name)} ends:\n{_log(name).read_text()[-2000:]}")
        time.sleep(0.5)


def _stop(name: str) -> None:
    """Ends flow runs first, while worker and server still take note of it, then the worker or server itself."""
    session = _session(name)
    children = [process for process in session if process.pid != _leader(name)]
    forced = _end(children) + _end([process for process in session if process not in children])
    _pid_file(name).unlink(missing_ok=True)
    if session:
        print(f"{name} ended" + (f", {forced} processes by force" if forced else ""))


def _end(processes: list[psutil.Process]) -> int:
    """Asks the processes to end; after `STOP_SECONDS` kills them and their descendants. Returns how many it killed."""
    family = {child for process in processes for child in _children(process)} | set(processes)
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.terminate()
    _, left = psutil.wait_procs(family, timeout=STOP_SECONDS)
    for process in left:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(left)
    return len(left)


def _session(name: str) -> list[psutil.Process]:
    """The living processes of the session that `_start` opened, also when its first process is gone."""
    file, leader = _pid_file(name), _leader(name)
    if leader is None:
        return []
    if psutil.pid_exists(leader) and psutil.Process(leader).create_time() > file.stat().st_mtime + CLOCK_SECONDS:
        return []  # after a reboot, say, somebody else's process has this id
    return [process for process in psutil.process_iter() if _session_id(process) == leader]


def _runs(name: str) -> bool:
    return _leader(name) in [process.pid for process in _session(name)]


def _leader(name: str) -> int | None:
    """The recorded id of the first process, which is the session's id too; None when nothing was started."""
    return int(_pid_file(name).read_text()) if _pid_file(name).exists() else None


def _session_id(process: psutil.Process) -> int | None:
    try:
        return None if process.status() == psutil.STATUS_ZOMBIE else os.getsid(process.pid)
    except (psutil.NoSuchProcess, ProcessLookupError, PermissionError):
        return None  # ended while we looked, or not ours to see


def _children(process: psutil.Process) -> list[psutil.Process]:
    try:
        return process.children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def _pid_file(name: str) -> Path:
    return STATE / f"{name}.pid"


def _log(name: str) -> Path:
    return STATE / f"{name}.log"


def main() -> None:
    """Command line: `up [--port PORT]` or `down`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("command", choices=["up", "down"])
    parser.add_argument("--port", type=int, default=4200)
    arguments = parser.parse_args()
    if arguments.command == "down":
        return down()
    try:
        up(arguments.port)
    except ValueError as error:
        sys.exit(printable(f"error: {error}"))


if __name__ == "__main__":
    interrupts.run(main)
