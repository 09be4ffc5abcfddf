"""A run with workers on Ray, on a cluster or on this host, makes the versions that one process makes."""

from contextlib import ExitStack
from pathlib import Path

import pytest

from configs import load
from flows.math_mt_ppo import math_mt_ppo
from storage import layout
from storage.maintenance.verify import verify
from storage.objects.store import Store
from storage.versions import manifests
from tasks.cluster.connection import connected
from tests.support.cluster_runs import OVERLAP, check_whole, kinds, no_actor_is_left, store_of
from tests.support.soak import scaled
from tests.support.waiting_engine import WaitingEngine, opens

ENDPOINT = "agent={type: openai, args: {entry: 'tests.agents.endpoint.solvers:two_turns'}}"
WHERE = [("local_settings", OVERLAP), ("settings", [*OVERLAP, ENDPOINT])]


@pytest.mark.long
@pytest.mark.parametrize(("where", "more"), scaled(WHERE, [*WHERE, ("local_settings", []), ("settings", [])]))
def test_versions_are_those_of_one_process(
    where: str, more: list[str], request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same command makes the same versions, from shards of all workers, and leaves no process behind."""
    settings: list[str] = request.getfixturevalue(where)
    size = ["run.iterations=3", "rollout.rows_per_shard=4", *more]
    math_mt_ppo("smoke", [*settings, *size])
    store = store_of(settings)
    assert no_actor_is_left(20)
    check_whole(store, 3)
    played = [manifests.read(store, layout.trajectories("smoke", iteration)) for iteration in range(3)]
    writers = {file.name.split("-")[1] for manifest in played for file in manifest.files}
    assert len(writers) >= (2 if where == "local_settings" else 3)
    monkeypatch.setattr("flows.run.resources.open_engine", opens(WaitingEngine(0.01)))
    alone = [f"storage.root={tmp_path}/alone", f"storage.cache={tmp_path}/cache-alone", "score.workers=1"]
    math_mt_ppo("smoke", [*alone, *size])
    assert kinds(store) == kinds(Store(f"{tmp_path}/alone"))


@pytest.mark.long
def test_ranks_on_two_nodes(settings: list[str]) -> None:
    """The ranks of two nodes train."""
    store, ranks = store_of(settings), "train.parallel.shard=3"  # more than a node has cores
    math_mt_ppo("smoke", [*settings, ranks, "run.iterations=2", "cluster.rollout_workers=1"])
    check_whole(store, 2)
    names = [file.name for file in manifests.read(store, layout.checkpoint("smoke", 1)).files]
    assert sum(name.startswith("state/") for name in names) >= 2  # of two ranks
    assert no_actor_is_left(20)


@pytest.mark.long
@pytest.mark.parametrize("where", ["local_settings", "settings"])
def test_the_first_cause_and_the_logs_are_kept(where: str, request: pytest.FixtureRequest) -> None:
    """An agent that ends the rollout ends the flow with its error; the store has the logs of the nodes."""
    settings: list[str] = request.getfixturevalue(where)
    agent = "agent={type: 'tests.support.waiting_node:StopsTheLoop'}"
    with pytest.raises(RuntimeError, match="an agent stopped the event loop") as caught:
        math_mt_ppo("smoke", [*settings, agent])
    assert "in another process" in caught.value.__notes__[0]
    store = store_of(settings)
    kept = {item.path: store.read(item.path).decode() for item in store.walk("runs/smoke/logs")}
    (cause,) = (text for path, text in kept.items() if path.endswith("cause.txt"))
    assert "an agent stopped the event loop" in cause
    assert any("the worker ends" in text for path, text in kept.items() if path.endswith("process.log"))
    assert verify(store, list(kinds(store)), deep=True).findings == []
    assert no_actor_is_left(20)


def test_the_trainer_of_a_stream_lies_on_the_flows_node(settings: list[str]) -> None:
    """No other node's end costs a restart; where the flow's node has no core left, another one has the trainer."""
    import ray
    from ray.util.placement_group import placement_group_table

    config, found = load("smoke", [*settings, *OVERLAP]), list[set[str]]()
    with connected(config), ExitStack() as trainers:
        from tasks.cluster.trainer import RayTrainer

        own = ray.get_runtime_context().get_node_id()
        for _ in range(3):  # a node has two cores
            trainer = trainers.enter_context(RayTrainer(config, print))
            found.append(set(placement_group_table(trainer._reserved)["bundles_to_node_id"].values()))
    assert found[:2] == [{own}] * 2
    assert own not in found[2]


def test_what_cannot_work_is_refused_at_once(settings: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A cluster without room, one without a token, and none at all: the messages say what is missing."""
    monkeypatch.setattr("tasks.cluster.workers.cpu_build", lambda: False)
    with pytest.raises(ValueError, match=r"a worker needs 1 core and 8 GPU\(s\) on one node, .* but the cluster has"):
        math_mt_ppo("smoke", [*settings, "inference.replicas=8"])
    ranks = ["train.parallel.shard=8", "train.minibatches=1"]
    with pytest.raises(ValueError, match=r"the trainer needs 1 core\(s\) and 0 GPU\(s\) for each of 8 rank\(s\)"):
        math_mt_ppo("smoke", [*settings, *ranks, "run.name=ranks"])
    with pytest.raises(ConnectionError, match="no Ray cluster answers at 127.0.0.1:1"):
        math_mt_ppo("smoke", [*settings, "cluster.address=127.0.0.1:1"])
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    with pytest.raises(ValueError, match="set it to token"):
        math_mt_ppo("smoke", settings)
