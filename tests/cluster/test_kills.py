"""SIGKILL at random moments, of whatever a run on a cluster consists of: nothing is lost, doubled or left."""

import os
import random
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil
import pytest

from tests.support import ray_cluster
from tests.support.cluster_flow import PATIENCE_S, Flow
from tests.support.cluster_runs import OVERLAP, check_whole, no_actor_is_left
from tests.support.paths import ROOT
from tests.support.ray_cluster import RayCluster
from tests.support.soak import SOAK, scaled

SEED, KILLS = int(os.environ.get("SEED", 1)), int(os.environ.get("KILLS", scaled(2, 30)))
"""Environment variables repeat what has failed, or make it longer."""
PACE = 2
"""Iterations between two kills."""
RANKS = ["trainer={launcher: ray, hosts: 2, max_restarts: 99}", "ppo.parallel.shard=2"]
VLLM = ["inference={max_model_len: 128, enforce_eager: true, extra_args: [--kv-cache-memory-bytes, '67108864']}"]
REAPER, SERVER = "storage/processes/reaper.py", "vllm.entrypoints"


DRIVER = """
import os, sys, time
from pathlib import Path
from configs import load
from tasks.cluster.connection import connected, environment

class Starts:
    def start(self, log):
        from storage.processes.child import Child
        self.made = Child(Path(log))
        self.made.start([sys.executable, "-c", "import time; time.sleep(600)"], os.environ)
        return self.made.pid, self.made.folder

with connected(load("demo", ["storage.root=store", f"cluster.address={sys.argv[1]}"])):
    import ray
    actor = ray.remote(Starts).options(runtime_env=environment()).remote()
    print(*ray.get(actor.start.remote(sys.argv[2])), flush=True)
    time.sleep(600)
"""


class Killer:
    """Kills what it is told to, except the `spared`; a victim is chosen by chance."""

    def __init__(
        self, cluster: RayCluster, flow: Flow, chance: random.Random, spared: Sequence[psutil.Process | Path]
    ) -> None:
        self._cluster, self._flow, self._chance, self._spared = cluster, flow, chance, spared

    def node(self) -> None:
        """End a node, all its processes at once, and let another one join."""
        self._cluster.kill(self._chance.choice(self._cluster.workers))
        self._cluster.add()

    def flow(self) -> None:
        """End the flow, and start it again."""
        self._flow.process.kill()
        self._flow.process.wait()
        self._flow.start()

    def process(self, name: str) -> Callable[[], None]:
        """Return a function that kills an actor of a class, or a process whose command line has this text."""

        def kill() -> None:
            deadline = time.monotonic() + PATIENCE_S
            while not (found := ray_cluster.actors(name) or [p for p in running(name) if p not in self._spared]):
                assert time.monotonic() < deadline
                time.sleep(0.05)
            self._chance.choice(found).kill()

        return kill


def running(text: str) -> list[psutil.Process]:
    """Return the processes of this test's cluster whose command line has a text."""
    lines = {process: " ".join(process.info["cmdline"] or []) for process in psutil.process_iter(["cmdline"])}
    return [process for process, line in lines.items() if text in line and ray_cluster.is_marked(process)]


def kill_all(flow: Flow, victims: dict[str, Callable[[], None]], chance: random.Random) -> int:
    """Kill victims in turn at random moments; return the number of iterations by when the last one had an effect."""
    took = defaultdict[str, list[float]](list)
    order = [name for _ in range(-(-KILLS // len(victims))) for name in chance.sample(sorted(victims), len(victims))]
    for name in order[:KILLS]:
        flow.wait_for(flow.newest() + PACE)
        time.sleep(chance.uniform(0, 3))
        before = flow.newest()
        victims[name]()
        killed = time.monotonic()
        flow.wait_for(before + 2)
        took[name].append(time.monotonic() - killed)
    print(f"\nseed {SEED}: seconds from a kill to two more policies")
    for name, seconds in took.items():
        print(f"  {name}: {len(seconds)} kills, " + ", ".join(f"{each:.1f}" for each in sorted(seconds)))
    return flow.newest()


def remains(cluster: RayCluster) -> list[psutil.Process | Path]:
    """Return reapers, such as that of the tests' own process, vLLM servers, and temporary files of nodes."""
    return [*running(SERVER), *running(REAPER), *cluster.scratch.iterdir()]


def check_settled(cluster: RayCluster, before: list[psutil.Process | Path]) -> None:
    """Check that soon no process of the run is left that was not there before, and no temporary file."""
    # The next process removes the folders of killed ones.
    command = [sys.executable, "-c", "from storage.processes.folder import TemporaryFolder as T; T().remove()"]
    subprocess.run(command, env=os.environ | {"TMPDIR": str(cluster.scratch)}, check=True)
    deadline = time.monotonic() + 30
    while left := [each for each in remains(cluster) if each not in before]:
        assert time.monotonic() < deadline, left
        time.sleep(0.2)


@pytest.mark.usefixtures("environment")
@pytest.mark.timeout(scaled(900, 7200))
@pytest.mark.parametrize("more", scaled([[]], [[], RANKS]), ids=lambda more: "ranks" if more else "workers")
def test_kills_at_random_moments(
    cluster: tuple[RayCluster, str],
    settings: list[str],
    tmp_path: Path,
    more: list[str],
) -> None:
    """Actors, nodes, ranks and the flow are killed; the run goes on each time, and is whole at its end."""
    chance, before = random.Random(SEED), remains(cluster[0])
    settings = [*settings, *OVERLAP, *more, "run.iterations=1000"]
    with Flow(settings, tmp_path / "log", environment={"TMPDIR": str(cluster[0].scratch)}) as flow:
        killer = Killer(cluster[0], flow, chance, before)
        victims: dict[str, Callable[[], None]] = {"node": killer.node, "flow": killer.flow}
        if SOAK:
            victims |= {"worker": killer.process("ray::WaitingNode")}
        if more:
            victims |= {"ranks of a node": killer.process("ray::NodeRanks")}
            victims |= {"rank": killer.process("tasks.train.ranks.rank")}
        made = kill_all(flow, victims, chance)
        while len(ray_cluster.actors()) < 3:  # the node that has joined plays, too
            flow.wait_for(flow.newest() + 1)
        flow.interrupt()
    check_whole(flow.store, made)
    assert no_actor_is_left(30, "ray::NodeRanks", "tasks.train.ranks.rank")
    check_settled(cluster[0], before)


def test_what_a_process_on_a_node_has_started_ends_with_the_flow(
    cluster: tuple[RayCluster, str], tmp_path: Path
) -> None:
    """Ray ends the processes of a killed flow; reapers then end what these have started, and remove its folder."""
    command = [sys.executable, "-c", DRIVER, cluster[0].address, str(tmp_path / "log")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as driver:
        assert driver.stdout
        pid, folder = driver.stdout.readline().split()
        started = psutil.Process(int(pid))
        driver.kill()
    assert psutil.wait_procs([started], timeout=60)[1] == []
    deadline = time.monotonic() + 30
    while Path(folder).exists():
        assert time.monotonic() < deadline
        time.sleep(0.1)


@pytest.mark.skipif(not SOAK, reason="many minutes, with two vLLM servers")
@pytest.mark.usefixtures("environment")
@pytest.mark.timeout(7200)
def test_kills_of_vllm_on_nodes(cluster: tuple[RayCluster, str], settings: list[str], tmp_path: Path) -> None:
    """vLLM, its worker's actor and its node are killed: no server, socket or folder stays behind."""
    chance, before = random.Random(SEED), remains(cluster[0])
    settings = [*settings, *OVERLAP, *VLLM, "run.iterations=1000", "cluster.silence_s=60", "cluster.rollout_workers=2"]
    with Flow(settings, tmp_path / "log", "flows.math_mt_ppo", {"TMPDIR": str(cluster[0].scratch)}) as flow:
        killer = Killer(cluster[0], flow, chance, before)
        names = {"vLLM": SERVER, "worker": "ray::NodeWorker"}
        victims = {name: killer.process(text) for name, text in names.items()}
        made = kill_all(flow, victims | {"node": killer.node, "flow": killer.flow}, chance)
        flow.interrupt()
    check_whole(flow.store, made)
    assert no_actor_is_left(30, "ray::NodeWorker")
    check_settled(cluster[0], before)


@pytest.mark.skipif(not SOAK, reason="two clusters of its own, and Ray waits a minute for a lost head")
@pytest.mark.usefixtures("environment")
def test_the_head_is_lost(settings: list[str], tmp_path: Path) -> None:
    """The flow ends, and with it all workers; the same command goes on, on another cluster."""
    settings = [*settings, *OVERLAP, "run.iterations=1000"]
    for newest in (2, 4):
        with RayCluster(2) as own:
            address = f"cluster.address={own.address}"
            with Flow([*settings, address], tmp_path / "log") as flow:
                flow.wait_for(newest)
                (head,) = (
                    each for each in running("gcs_server") if str(own.scratch.parent) in " ".join(each.cmdline())
                )
                head.kill()
                began = time.monotonic()
                assert flow.process.wait(PATIENCE_S) != 0
                print(f"the flow ended {time.monotonic() - began:.0f} s after the head: {flow.tail()[-300:]}")
            assert no_actor_is_left(40)
    check_whole(flow.store, 4)
