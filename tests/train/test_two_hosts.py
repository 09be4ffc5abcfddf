"""A trainer on two hosts: two network namespaces that a cable connects, each with a name of its own."""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.support.paths import ROOT
from tests.support.soak import scaled
from tests.support.training_run import OPTIONS, TrainingRun

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        os.geteuid() != 0 or not shutil.which("ip") or not shutil.which("unshare"),
        reason="needs root and the commands ip and unshare, to make network namespaces",
    ),
]

FLOW = """
import sys
from pathlib import Path
from tasks.train.ranks.launcher import Ranks
from tests.support.soak import scaled
from tests.support.training_run import TrainingRun

run = TrainingRun.reopened(Path(sys.argv[1]))
with Ranks(run.config(*sys.argv[3:]), run.folder / "logs-0") as ranks:
    for iteration in range(len(run.committed()) - 1, int(sys.argv[2])):
        run.train(ranks, iteration)
        print("trained", iteration, flush=True)
"""


class Hosts:
    """Two namespaces, 10.81.0.1 and 10.81.0.2."""

    def __init__(self, folder: Path) -> None:
        self.names = [f"mtppo{os.getpid()}{end}" for end in "ab"]
        self._folder, self._started = folder, list[subprocess.Popen[bytes]]()

    def __enter__(self) -> "Hosts":
        a, b = self.names
        for name in self.names:
            self._ip("netns", "add", name)
        self._ip("link", "add", "v0", "netns", a, "type", "veth", "peer", "name", "v0", "netns", b)
        for number, name in enumerate(self.names, 1):
            self._ip("-n", name, "addr", "add", f"10.81.0.{number}/24", "dev", "v0")
            for device in ("lo", "v0"):
                self._ip("-n", name, "link", "set", device, "up")
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._started:
            process.kill()
            process.wait()
        for name in self.names:
            self._ip("netns", "del", name)

    def start(self, host: int, *command: str) -> subprocess.Popen[bytes]:
        """Start a command on a host whose name resolves nowhere; its output goes to `host-0.log`, `host-1.log`."""
        inside = ["ip", "netns", "exec", self.names[host], "unshare", "--uts", "sh", "-c"]
        script = f'hostname host-{host} && exec "$@"'
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        with (self._folder / f"host-{host}.log").open("ab") as log:
            process = subprocess.Popen(
                [*inside, script, "sh", sys.executable, *command], stdout=log, stderr=log, cwd=ROOT, env=environment
            )
        self._started.append(process)
        return process

    def cable(self, state: str) -> None:
        """Cut or connect the cable: `down`, `up`."""
        self._ip("-n", self.names[0], "link", "set", "v0", state)

    def log(self, host: int) -> str:
        return (self._folder / f"host-{host}.log").read_text()

    def wait_for(self, text: str, host: int = 0) -> None:
        deadline = time.monotonic() + 120
        while text not in self.log(host):
            assert time.monotonic() < deadline, self.log(0) + self.log(1)
            time.sleep(0.1)

    def _ip(self, *arguments: str) -> None:
        subprocess.run(["ip", *arguments], check=True)


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    with Hosts(tmp_path) as hosts:
        yield hosts


def family(*processes: subprocess.Popen[bytes]) -> list[psutil.Process]:
    return [
        each
        for process in processes
        for each in (psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True))
    ]


class TwoHosts:
    """A run whose trainer has one rank on each host."""

    def __init__(self, hosts: Hosts, folder: Path, iterations: int, *settings: str) -> None:
        self._hosts, self._flow = hosts, folder / "flow.py"
        self._flow.write_text(FLOW)
        self.run = TrainingRun(folder / "run", iterations)
        self._settings = ["trainer.launcher=torchrun", "trainer.hosts=2", "trainer.address=10.81.0.1:29511"]
        self._settings += ["ppo.parallel.shard=2", "trainer.timeout_s=5", "trainer.startup_timeout_s=100", *settings]
        places = [f"storage.root={self.run.root}", f"storage.cache={self.run.folder}/cache-1"]
        self._of_other = ["smoke", *places, "ppo.threads=1", "ppo.device=cpu", *OPTIONS, *self._settings]

    def flow(self, iterations: int) -> subprocess.Popen[bytes]:
        """Start the flow, which trains until there are so many policies after the first."""
        return self._hosts.start(0, str(self._flow), str(self.run.folder), str(iterations), *self._settings)

    def other(self) -> subprocess.Popen[bytes]:
        """Start the ranks of the other host."""
        return self._hosts.start(1, "-m", "tasks.train.ranks", *self._of_other, "--host", "1")


def test_two_hosts_and_a_cut_cable(hosts: Hosts, tmp_path: Path) -> None:
    """Both hosts train together. After a cut nothing is left on either; started again, they continue."""
    two = TwoHosts(hosts, tmp_path, 500)
    run, started = two.run, [two.flow(500), two.other()]
    hosts.wait_for("trained 0")
    everyone = family(*started)
    hosts.cable("down")
    cut = time.monotonic()
    assert psutil.wait_procs(everyone, timeout=60)[1] == []
    print(f"all processes of both hosts ended {time.monotonic() - cut:.1f} s after the cut")
    hosts.cable("up")
    done = len(run.committed()) - 1
    assert 1 <= done < 500
    assert "another one" in hosts.log(0)
    if scaled(True, False):  # that a run goes on is tested elsewhere, too
        return
    flow = two.flow(done + 2)
    ranks = two.other()
    assert flow.wait(120) == 0, hosts.log(0) + hosts.log(1)
    assert ranks.wait(30) == 0, hosts.log(1)
    assert run.committed() == [*range(done + 3)]


@pytest.mark.skipif(scaled(True, False), reason="takes two minutes; that ranks start again is tested elsewhere, too")
def test_each_loss_costs_both_hosts_one_restart(hosts: Hosts, tmp_path: Path) -> None:
    """A rank of either host may be killed or stopped."""
    blows = [(0, signal.SIGSTOP), (1, signal.SIGKILL), (0, signal.SIGKILL), (1, signal.SIGSTOP)]
    two = TwoHosts(hosts, tmp_path, 10, f"trainer.max_restarts={len(blows)}")
    started = two.other(), two.flow(10)
    for number, (host, blow) in enumerate(blows):
        hosts.wait_for(f"trained {2 * number}")
        family(started[1 - host])[-1].send_signal(blow)
    assert started[1].wait(300) == 0, hosts.log(0) + hosts.log(1)
    assert started[0].wait(30) == 0, hosts.log(1)
    assert two.run.committed() == [*range(11)]
