"""A trainer on two hosts: two network namespaces that a cable connects, each with a name of its own."""

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.support.soak import scaled
from tests.support.training_run import OPTIONS, TrainingRun
from tests.support.two_hosts import Hosts, family, need_namespaces

pytestmark = [pytest.mark.slow, need_namespaces]

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


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    with Hosts(tmp_path) as hosts:
        yield hosts


class TwoHosts:
    """A run whose trainer has one rank on each host."""

    def __init__(self, hosts: Hosts, folder: Path, iterations: int, *settings: str) -> None:
        self._hosts, self._flow = hosts, folder / "flow.py"
        self._flow.write_text(FLOW)
        self.run = TrainingRun(folder / "run", iterations)
        self._settings = ["trainer.launcher=torchrun", "trainer.hosts=2", "trainer.address=10.0.0.1:29511"]
        self._settings += ["ppo.parallel.shard=2", "trainer.timeout_s=5", "trainer.startup_timeout_s=100", *settings]
        places = [f"storage.root={self.run.root}", f"storage.cache={self.run.folder}/cache-1"]
        self._of_other = ["smoke", *places, "ppo.threads=1", "ppo.device=cpu", *OPTIONS, *self._settings]

    def flow(self, iterations: int) -> subprocess.Popen[bytes]:
        """Start the flow, which trains until there are so many policies after the first."""
        return self._hosts.start(
            0, sys.executable, str(self._flow), str(self.run.folder), str(iterations), *self._settings
        )

    def other(self) -> subprocess.Popen[bytes]:
        """Start the ranks of the other host."""
        return self._hosts.start(1, sys.executable, "-m", "tasks.train.ranks", *self._of_other, "--host", "1")


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
