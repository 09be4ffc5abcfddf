"""Ray that the flow starts on this host (`cluster.address=local`)."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support.paths import ROOT
from tests.support.sandbox_helpers import wait_gone

FLOW = """
import json, os, sys
from configs import load
from tasks.cluster.connection import connected, environment

class Actor:
    def sees(self):
        import psutil, ray
        return psutil.Process().pid, ray.util.get_node_ip_address(), sorted(os.environ), os.getcwd()

with connected(load("demo", sys.argv[1:])):
    with connected(load("demo", sys.argv[1:])):  # as the workers inside of the trainer's block
        import ray
    actors = [ray.remote(Actor).options(num_cpus=1, runtime_env=environment()).remote() for _ in range(2)]
    seen = ray.get([actor.sees.remote() for actor in actors])
    print(json.dumps([seen, os.environ.get("RAY_AUTH_TOKEN")]), flush=True)
    input()
print(json.dumps("ended"), flush=True)
"""


@contextmanager
def flow(folder: Path, environment: dict[str, str]) -> Iterator["subprocess.Popen[str]"]:
    """Run a flow with a Ray of its own."""
    overrides = [f"storage.root={folder}/store", f"storage.cache={folder}/cache", "cluster.address=local"]
    command = [sys.executable, "-c", FLOW, *overrides]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, cwd=ROOT, env=os.environ | environment, **pipes) as process:
        try:
            yield process
        finally:
            process.kill()


def answer(process: "subprocess.Popen[str]") -> Any:
    """Return what a flow prints next."""
    assert process.stdout
    line = process.stdout.readline()
    assert line, "the flow has ended"
    return json.loads(line)


@pytest.mark.long
def test_it_is_private_and_ends_with_the_flow(tmp_path: Path) -> None:
    """Two at once, with a proxy, a token of the user's and a long TMPDIR: each is alone, and leaves nothing."""
    scratch = tmp_path / f"a-long-place-for-temporary-files-{'x' * 60}"
    scratch.mkdir()
    proxy = dict.fromkeys(["http_proxy", "https_proxy", "all_proxy", "grpc_proxy"], "http://127.0.0.1:9")
    around = {**proxy, "RAY_AUTH_TOKEN": "the-user's" * 5, "TMPDIR": str(scratch), "RAY_ADDRESS": "10.0.0.9:6379"}
    with flow(tmp_path / "0", around) as first, flow(tmp_path / "1", around) as second:
        for process in (first, second):
            seen, token = answer(process)
            assert token == around["RAY_AUTH_TOKEN"]
            assert [ip for _, ip, *_ in seen] == ["127.0.0.1"] * 2
            assert not any("RAY_AUTH_TOKEN" in names for _, _, names, _ in seen)
        started = [psutil.Process(process.pid).children(recursive=True) for process in (first, second)]
        for own in started:
            sockets = [each for process in own for each in process.net_connections("tcp")]
            listening = {each.laddr.ip.removeprefix("::ffff:") for each in sockets if each.status == "LISTEN"}
            assert listening == {"127.0.0.1"}
            (folder,) = {name for process in own if (name := process.environ().get("RAY_AUTH_TOKEN_PATH"))}
            assert Path(folder).parent.stat().st_mode & 0o777 == 0o700
            token = Path(folder).read_text()
            assert not any(token in " ".join(process.cmdline()) for process in own)
        first.kill()
        wait_gone(started[0], 15)
        assert second.communicate("\n")[0] == '"ended"\n'
        wait_gone(started[1], 15)
    assert not Path(folder).parent.exists()


def test_a_simulated_cluster_has_many_nodes(tmp_path: Path) -> None:
    """`make cluster-demo` starts nodes that a flow reaches by address, with their token."""
    code = """if True:
        import sys
        from configs import load
        from tests.support.simulated_cluster import simulated_cluster
        from tasks.cluster.connection import connected, nodes
        with simulated_cluster(2) as address:
            with connected(load("demo", [f"cluster.address={address}", f"storage.cache={sys.argv[1]}"])):
                print([node.cpus for node in nodes()], flush=True)
    """
    command = [sys.executable, "-c", code, str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.stdout == "[2.0, 2.0]\n", done.stderr
