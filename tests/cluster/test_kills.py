"""SIGKILL at random moments, of whatever a run with Ray consists of: nothing is lost, doubled or left.

Workers whose engine only waits have started a process, too: Ray ends workers, and their supervisors end the process.
"""

import os
import random
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import psutil
import pytest

from tests.support.cluster_runs import BESIDE, OVERLAP, PATIENCE_S, Flow, check_whole, no_actor_is_left
from tests.support.ray_cluster import RayCluster, running
from tests.support.soak import SOAK, scaled

pytestmark = pytest.mark.long

SEED, KILLS = int(os.environ.get("SEED", 1)), int(os.environ.get("KILLS", scaled(2, 30)))
"""Environment variables repeat what has failed, or make it longer."""
PACE = 2
"""Iterations between two kills."""
VLLM = "inference={max_model_len: 128, enforce_eager: true, extra_args: [--kv-cache-memory-bytes, '67108864']}"
WORKER = "ray::WaitingNode"
SUPERVISOR, SERVER, RAYLET = "storage/processes/reaper.py", "vllm.entrypoints", "raylet/raylet"


@dataclass(frozen=True)
class SetUp:
    """A run, and what is killed of it: `processes` by name, with a part of their command line."""

    where: str
    """The fixture with its settings."""
    victims: tuple[str, ...]
    """Methods of `Killer`."""
    processes: dict[str, str]
    more: tuple[str, ...] = ()
    module: str = "tests.support.waiting_node"


SETUPS = {
    "local": SetUp("local_settings", ("flow",), {"worker": WORKER}),
    "workers": SetUp("settings", ("node", "flow"), {"worker": WORKER} if SOAK else {}),
    "vLLM": SetUp(
        "settings",
        ("node", "flow"),
        {"vLLM": SERVER, "worker": "ray::NodeWorker"},
        (VLLM, "cluster.silence_s=60", "cluster.rollout_workers=2"),
        "flows.math_mt_ppo",
    ),
    "local Ray": SetUp("local_settings", ("ray",), {}),
}
"""The last two take many minutes."""


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

    def ray(self) -> None:
        """End the Ray of this host, and with it the flow; start it again."""
        local = psutil.Process(self._flow.process.pid).children(recursive=True)
        (raylet,) = (each for each in running(RAYLET) if each in local)
        raylet.kill()
        assert self._flow.process.wait(PATIENCE_S) != 0
        self._flow.start()

    def process(self, text: str) -> None:
        """End a process whose command line has a text, as soon as there is one."""
        deadline = time.monotonic() + PATIENCE_S
        while not (found := [each for each in running(text) if each not in self._spared]):
            assert self._flow.process.poll() is None, self._flow.tail()
            assert time.monotonic() < deadline, self._flow.tail()
            time.sleep(0.05)
        self._chance.choice(found).kill()


def kill_all(flow: Flow, victims: dict[str, Callable[[], None]], chance: random.Random) -> int:
    """Kill victims in turn at random moments; return the number of iterations by when the last one had an effect."""
    took = defaultdict[str, list[float]](list)
    order = [name for _ in range(-(-KILLS // len(victims))) for name in chance.sample(sorted(victims), len(victims))]
    for name in order[:KILLS]:
        flow.wait_for(flow.newest() + PACE)
        time.sleep(chance.uniform(0, 3))
        killed = time.monotonic()
        victims[name]()
        before = flow.newest()
        flow.wait_for(before + 2)
        took[name].append(time.monotonic() - killed)
    print(f"\nseed {SEED}: seconds from a kill to two more policies")
    for name, seconds in took.items():
        print(f"  {name}: {len(seconds)} kills, " + ", ".join(f"{each:.1f}" for each in sorted(seconds)))
    return flow.newest()


def remains(scratch: Path) -> list[psutil.Process | Path]:
    """Return supervisors, such as that of the session's Prefect server, what they end, and temporary files of nodes."""
    return [*running(SERVER), *running(BESIDE), *running(SUPERVISOR), *scratch.iterdir()]


def check_settled(scratch: Path, before: list[psutil.Process | Path]) -> None:
    """Check that soon no process of the run is left that was not there before, and no temporary file."""
    # The next process removes the folders of killed ones.
    command = [sys.executable, "-c", "from storage.processes.folder import TemporaryFolder as T; T().remove()"]
    subprocess.run(command, env=os.environ | {"TMPDIR": str(scratch)}, check=True)
    deadline = time.monotonic() + 30
    while left := [each for each in remains(scratch) if each not in before]:
        assert time.monotonic() < deadline, left
        time.sleep(0.2)


@pytest.mark.usefixtures("environment")
@pytest.mark.timeout(scaled(900, 7200))
@pytest.mark.parametrize("name", scaled(["local", "workers"], [*SETUPS]))
def test_kills_at_random_moments(
    cluster: tuple[RayCluster, str], name: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """Actors, nodes, servers and the flow are killed; the run goes on each time, and is whole at its end."""
    setup, chance, scratch = SETUPS[name], random.Random(SEED), cluster[0].scratch
    before = remains(scratch)
    settings = [*request.getfixturevalue(setup.where), *OVERLAP, *setup.more, "run.iterations=1000"]
    with Flow(settings, tmp_path / "log", setup.module, scratch) as flow:
        killer = Killer(cluster[0], flow, chance, before)
        victims: dict[str, Callable[[], None]] = {each: getattr(killer, each) for each in setup.victims}
        victims |= {each: partial(killer.process, text) for each, text in setup.processes.items()}
        made = kill_all(flow, victims, chance)
        while name == "workers" and len(running(WORKER)) < 3:
            flow.wait_for(flow.newest() + 1)  # the node that has joined plays, too
        flow.interrupt()
    check_whole(flow.store, made)
    assert no_actor_is_left(30)
    check_settled(scratch, before)
