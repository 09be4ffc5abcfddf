"""A run on a Ray cluster makes the versions that one machine makes, whatever is killed."""

import random
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import psutil
import pytest

from flows.math_mt_ppo import math_mt_ppo
from storage import layout
from storage.maintenance.verify import verify
from storage.objects.store import Store
from storage.versions import manifests
from tests.support import ray_cluster
from tests.support.cluster_flow import Flow
from tests.support.cluster_runs import OVERLAP, check_whole, kinds, no_actor_is_left, store_of
from tests.support.soak import SOAK, scaled
from tests.support.waiting_engine import WaitingEngine, opens

ENDPOINT = "agent={type: openai, args: {entry: 'tests.agents.endpoint.solvers:two_turns'}}"


@pytest.mark.parametrize("more", scaled([[*OVERLAP, ENDPOINT]], [[*OVERLAP, ENDPOINT], OVERLAP, []]), ids=" ".join)
def test_versions_are_those_of_one_machine(
    settings: list[str], more: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same command makes the same versions, from shards of all nodes, and leaves no process behind."""
    size = ["run.iterations=3", "rollout.rows_per_shard=4", *more]
    math_mt_ppo("smoke", [*settings, *size])
    store = store_of(settings)
    assert no_actor_is_left(20)
    check_whole(store, 3)
    writers = {
        file.name.split("-")[1]
        for iteration in range(3)
        for file in manifests.read(store, layout.trajectories("smoke", iteration)).files
    }
    assert len(writers) >= 3
    monkeypatch.setattr("tasks.run.resources.open_engine", opens(WaitingEngine(0.01)))
    alone = [f"storage.root={tmp_path}/alone", f"storage.cache={tmp_path}/cache-alone", "score.workers=1"]
    math_mt_ppo("smoke", [*alone, *size])
    assert kinds(store) == kinds(Store(f"{tmp_path}/alone"))


RANKS = ["trainer={launcher: ray, hosts: 2, max_restarts: 2}", "ppo.parallel.shard=2"]


@pytest.mark.parametrize("killed", scaled(["ray::NodeRanks"], ["ray::NodeRanks", "tasks.train.ranks.rank", "nothing"]))
def test_ranks_on_two_nodes(settings: list[str], killed: str) -> None:
    """The ranks of two nodes train; if one is killed, or the process that started it, all of them start again."""
    store, made = store_of(settings), layout.checkpoint("smoke", 1)

    def kill() -> None:
        while not manifests.committed(store, made):
            time.sleep(0.1)
        random.choice(ray_cluster.actors(killed)).kill()

    killer = threading.Thread(target=kill, daemon=True)
    if killed != "nothing":
        killer.start()
    math_mt_ppo("smoke", [*settings, *RANKS, "run.iterations=3", "cluster.rollout_workers=1"])
    check_whole(store, 3)
    states = [file.name for file in manifests.read(store, made).files if file.name.startswith("state/")]
    assert len(states) >= 2  # of two ranks
    assert no_actor_is_left(20, "ray::NodeRanks", "tasks.train.ranks.rank")


@pytest.mark.skipif(not SOAK, reason="a minute; test_kills interrupts a flow, too, and continues a killed one")
@pytest.mark.usefixtures("environment")
def test_an_interrupted_flow_leaves_nothing_and_is_continued(settings: list[str], tmp_path: Path) -> None:
    """The workers of an interrupted flow end with it; the same command continues the run."""
    more = [*settings, *OVERLAP, "run.iterations=6"]
    with Flow(more, tmp_path / "log") as flow:
        flow.wait_for(1)
        flow.interrupt()
    assert no_actor_is_left(30)
    math_mt_ppo("smoke", more)
    check_whole(flow.store, 6)


@pytest.mark.skipif(not SOAK, reason="a minute with two flows")
@pytest.mark.usefixtures("environment")
def test_two_runs_on_one_cluster(settings: list[str], tmp_path: Path) -> None:
    """Two flows share the nodes; each makes its own run."""
    store = store_of(settings)
    with Flow([*settings, "run.name=other"], tmp_path / "log") as other:
        math_mt_ppo("smoke", settings)
        other.finish()
    check_whole(store, 2)
    made = Counter(version.split("/")[1] for version in kinds(store) if version.startswith("runs/"))
    assert made["other"] == made["smoke"] > 0


def test_the_first_cause_and_the_logs_of_nodes_are_kept(settings: list[str]) -> None:
    """An agent that ends the rollout ends the flow with its error; the store has the logs of the nodes."""
    agent = "agent={type: 'tests.support.waiting_node:StopsTheLoop'}"
    with pytest.raises(RuntimeError, match="an agent stopped the event loop"):
        math_mt_ppo("smoke", [*settings, agent])
    store = store_of(settings)
    kept = {item.path: store.read(item.path).decode() for item in store.walk("runs/smoke/logs")}
    (cause,) = (text for path, text in kept.items() if path.endswith("cause.txt"))
    assert "an agent stopped the event loop" in cause
    assert any("the worker ends" in text for path, text in kept.items() if path.endswith("process.log"))
    assert verify(store, list(kinds(store)), deep=True).findings == []
    assert no_actor_is_left(20)


def test_what_cannot_work_is_refused_at_once(settings: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A cluster without room, one without a token, and none at all: the messages say what is missing."""
    with pytest.raises(ValueError, match=r"a worker needs 1 core and 8 GPU\(s\) on one node, the cluster has"):
        math_mt_ppo("smoke", [*settings, "cluster.gpus_per_worker=8"])
    ranks = ["trainer={launcher: ray, hosts: 4}", "ppo.parallel.shard=8"]
    with pytest.raises(ValueError, match=r"the trainer needs 4 node\(s\) with 2 core\(s\)"):
        math_mt_ppo("smoke", [*settings, *ranks])
    with pytest.raises(ConnectionError, match="no Ray cluster answers at 127.0.0.1:1"):
        math_mt_ppo("smoke", [*settings, "cluster.address=127.0.0.1:1"])
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    with pytest.raises(ValueError, match="set it to token"):
        math_mt_ppo("smoke", settings)


@pytest.mark.parametrize("killed", scaled([True], [True, False]))
def test_the_simulated_cluster_ends_with_its_process(killed: bool) -> None:
    """`make cluster-demo` starts nodes that ask for its token, and leaves none behind, not even if it is killed."""
    code = """if True:
        from configs import load
        from flows.launch.simulated_cluster import simulated_cluster
        from tasks.cluster.connection import connected, nodes
        with simulated_cluster(2) as address:
            with connected(load("demo", ["storage.root=store", f"cluster.address={address}"])):
                print(len(nodes()), flush=True)
            input()
    """
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin
        assert process.stdout
        assert process.stdout.readline() == "2\n"
        started = psutil.Process(process.pid).children(recursive=True)
        own = {each for each in started if each.cmdline()[:1] == ["ray::RuntimeEnvAgent"]}
        if killed:
            process.kill()
        else:
            process.stdin.write("\n")
    assert len(own) == 2
    assert psutil.wait_procs(own, timeout=30)[1] == []
