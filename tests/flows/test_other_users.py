"""Another user of the machine cannot reach the servers that the pipeline starts."""

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from storage.versions.checkpoints import Checkpoint
from tasks.inference.api import Completion, GenerationConfig
from tasks.inference.engine import Engine

NOBODY = 65534
BEGIN = """
import base64, encodings.idna, http.client, json, os, resource, socket, sys, urllib.error, urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

def attempt(act):
    try:
        return act()
    except (OSError, http.client.HTTPException) as error:
        return type(error).__name__
"""
BECOME_NOBODY = f"{BEGIN}\nos.setgroups([]); os.setgid({NOBODY}); os.setuid({NOBODY})\n"
"""The imports come first, because the user `nobody` may lack permission to read Python's modules."""

pytestmark = [pytest.mark.slow, pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")]


def as_nobody(code: str, *arguments: str, become: str = BECOME_NOBODY) -> Any:
    """Run Python code as another user, or as this one; return the JSON that it prints."""
    command = [sys.executable, "-c", become + code, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def listening(processes: list[psutil.Process]) -> list[int]:
    """Return the TCP ports on which the processes listen, and check that all are on loopback."""
    addresses = [
        connection.laddr
        for process in processes
        for connection in process.net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    ]
    assert {address.ip for address in addresses} <= {"127.0.0.1", "::1", "::ffff:127.0.0.1"}
    return [address.port for address in addresses]


KNOCK = """
def connect(path):
    with socket.socket(socket.AF_UNIX) as opened:
        opened.connect(path)
        return "connected"

def say(port, words):
    with socket.create_connection(("127.0.0.1", port), timeout=5) as opened:
        opened.settimeout(1)
        opened.sendall(words)
        return len(opened.recv(4096))

folder, *ports = sys.argv[1:]
words = [
    b"GET /health HTTP/1.1\\r\\nHost: x\\r\\n\\r\\n",
    b"POST /collective_rpc HTTP/1.1\\r\\nHost: x\\r\\nContent-Length: 2\\r\\n\\r\\n{}",
    bytes(range(256)) * 64,
]
knocks = [(int(port), each) for port in ports for each in words]
with ThreadPoolExecutor(len(knocks)) as threads:
    heard = list(threads.map(lambda knock: attempt(lambda: say(*knock)), knocks))
print(json.dumps({
    "sockets": [attempt(lambda: connect(f"{folder}/{name}")) for name in SOCKETS],
    "folder": attempt(lambda: os.listdir(folder)),
    "heard": heard,
}))
"""


def test_another_user_cannot_reach_vllm(engine: Engine, policies: list[Checkpoint]) -> None:
    """Another user reaches neither its HTTP interface nor the sockets among its processes.

    The sockets are in a folder that only their owner may enter. The ports that torch opens answer no request, and
    the server continues.
    """
    engine.serve(policies[0])
    (server,) = engine.servers
    folder = Path(server.url.removeprefix("unix://")).parent
    sockets = [path.name for path in folder.iterdir() if path.is_socket()]
    assert len(sockets) > 1
    ports = listening([psutil.Process(server.pid), *psutil.Process(server.pid).children(recursive=True)])
    knock = KNOCK.replace("SOCKETS", repr(sockets))
    found = as_nobody(knock, str(folder), *map(str, ports))
    assert set(found["sockets"]) == {"PermissionError"}
    assert found["folder"] == "PermissionError"
    assert len(found["heard"]) == 3 * len(ports)
    assert not {heard for heard in found["heard"] if isinstance(heard, int) and heard > 0}

    async def ask() -> list[Completion]:
        async with engine.connect() as connection:
            return await connection.generate([5, 6, 7], GenerationConfig(max_new_tokens=2), seed=7, replica=0)

    assert [set(completion.versions) for completion in asyncio.run(ask())] == [{0}]


ASK = """
api, toml = sys.argv[1:]

def ask(method, path, headers={}, body=None):
    request = urllib.request.Request(api + path, method=method, headers=headers, data=body)
    try:
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=60) as answer:
            return answer.status, dict(answer.headers)
    except urllib.error.HTTPError as error:
        return error.code, dict(error.headers)
    except (OSError, http.client.HTTPException):
        return "closed", {}

page = {"Origin": "http://evil.example", "Content-Type": "application/json"}
guess = {"Authorization": "Basic " + base64.b64encode(b"admin:admin").decode()}
step = {"prefect.deployments.steps.run_shell_script": {"script": "id"}}
deployment = json.dumps({"name": "x", "flow_id": "00000000-0000-0000-0000-000000000000", "pull_steps": [step]}).encode()
print(json.dumps({
    "read": [ask("POST", f"/{kind}/filter", page, b"{}")[0] for kind in ("flows", "flow_runs", "deployments")],
    "write": [ask("POST", "/deployments/", {**page, **headers}, deployment)[0] for headers in ({}, guess)],
    "rebound": ask("POST", "/deployments/", {**page, "Host": "evil.example"}, deployment)[0],
    "allowed": ask("OPTIONS", "/deployments/", {**page, "Access-Control-Request-Method": "POST"})[1].get(
        "access-control-allow-origin"),
    "password": attempt(lambda: Path(toml).read_text()),
}))
"""


def check_protected(api: str, settings: Path) -> None:
    """Check that nobody else is answered, nothing is read or written without the password, and CORS allows no page."""
    found = as_nobody(ASK, api, str(settings))
    assert {*found["read"], *found["write"], found["rebound"]} == {"closed"}
    assert found["password"] in ("PermissionError", "FileNotFoundError")
    own = as_nobody(ASK, api, str(settings), become=BEGIN)  # a web page in the user's own browser
    assert own["read"] == [401, 401, 401]
    assert own["write"] == [401, 401]
    assert own["rebound"] == 401
    assert own["allowed"] is None


def test_the_temporary_prefect_server_answers_no_other_user(prefect_api: str) -> None:
    """The server of command-line runs closes the connections of others, and asks its own user for a password."""
    check_protected(prefect_api, Path("prefect.toml"))
