"""The processes of a trainer's ranks report their state and the first cause; a store that is away hides no cause."""

import logging
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from ray.exceptions import RayActorError

from configs import load
from storage.errors import StorageError
from storage.objects.store import Store
from tasks.cluster import trainer
from tasks.cluster.logs import keep_logs
from tasks.cluster.node_process import NodeProcess, for_nodes
from tasks.cluster.node_ranks import LOST, NodeRanks
from tasks.rollout.remote.messages import Failure
from tasks.train.ranks.launcher import RanksLostError


class Host:
    """Ranks of a host that never start; it asks the node what it says meanwhile."""

    said: list[Any]
    node: NodeRanks

    def __init__(self, *_: Any) -> None:
        self.alive = False
        self.found: list[dict[str, Any]] = []
        self.said.append(self.node.check()[1])

    def start(self) -> None:
        self.said.append(self.node.check()[1])
        self.alive = True

    def errors(self) -> list[dict[str, Any]]:
        return self.found

    def log_tail(self, _: int) -> str:
        return "the end"

    def close(self) -> None:
        pass


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> NodeRanks:
    logger = logging.getLogger("tasks")
    monkeypatch.setattr(logger, "handlers", list(logger.handlers))  # so that the node's own does not stay
    monkeypatch.setattr(NodeProcess, "_end_without_flow", lambda _: None)
    monkeypatch.setattr(NodeProcess, "_open_store", lambda _: None)
    monkeypatch.setattr("tasks.cluster.node_ranks.HostRanks", Host)
    ranks = ["trainer={launcher: ray, hosts: 2}", "ppo.parallel.shard=2", "cluster.address=auto"]
    made = NodeRanks(for_nodes(load("smoke", [*ranks, f"storage.cache={tmp_path}"])), "host-1", 1)
    Host.said, Host.node = [], made
    return made


def test_ranks_that_start_are_not_taken_for_lost(node: NodeRanks) -> None:
    """The flow may ask after a host's folder was made and before its ranks start."""
    assert node.start("127.0.0.1:29500") is None
    assert [*Host.said, node.check()[1]] == [None] * 3


def test_a_rank_that_failed_by_itself_is_the_cause(node: NodeRanks) -> None:
    """Ranks that lost it say so, too, and perhaps before; starting all of them again would be in vain."""
    node.start("127.0.0.1:29500")
    host: Any = node._host
    host.alive = False
    lost = {"rank": 2, "lost": True, "type": "RuntimeError", "text": "a connection was closed", "traceback": ""}
    own = {"rank": 3, "lost": False, "type": "ValueError", "text": "no such option", "traceback": "in line 7"}
    for found, kind, text in [
        ([], LOST, "torchrun's last lines:\nthe end"),
        ([lost], LOST, "a connection was closed"),
        ([lost, own], "ValueError", "rank 3 failed: no such option"),
    ]:
        host.found = found
        failure = node.check()[1]
        assert failure
        assert (failure.kind, failure.text) == (kind, text)


def test_the_first_cause_is_the_error_of_another_host_and_not_that_it_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first host only notices that it has lost the rank of another one, which has failed by itself."""

    def get(answer: object, timeout: float) -> object:
        assert timeout > 0
        if isinstance(answer, Exception):
            raise answer
        return [], answer

    class Answers:
        def __init__(self, *answers: object) -> None:
            left = iter(answers)
            self.check = SimpleNamespace(remote=lambda: next(left))

    monkeypatch.setattr(ray, "get", get)
    monkeypatch.setattr(trainer, "_POLL_S", 0.0)
    lost, own = Failure(LOST, "a connection was closed", ""), Failure("ValueError", "no such option", "in line 7")
    made = trainer.RayTrainer.__new__(trainer.RayTrainer)
    for others, first, cause in [
        ([Answers(lost), Answers(None, own)], lost, own),  # it notices its own error a little later
        ([Answers(lost), Answers(RayActorError())], lost, lost),
        ([Answers(RayActorError())], None, None),
    ]:
        made._hosts, made._failure = [object(), *others], first
        assert made._first_cause() == cause


def test_the_last_hosts_live_until_their_logs_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of earlier starts are killed, and others start in their place."""
    killed: list[str] = []
    monkeypatch.setattr(ray, "kill", killed.append)
    made = trainer.RayTrainer.__new__(trainer.RayTrainer)
    made._config, made._restarts, made._failure = load("smoke", ["trainer.max_restarts=1"]), 0, None
    made._hosts, made._watching = ["first"], threading.Condition()
    monkeypatch.setattr(made, "_start", lambda: made._hosts.append("second"))

    def lose() -> None:
        raise RanksLostError(f"lost by {made._hosts[0]}")

    with pytest.raises(RanksLostError, match="lost by second"):
        made._with_restarts(lose, lambda _: None)
    assert (killed, made._hosts) == (["first"], ["second"])


def test_warnings_of_a_node_reach_the_flow(node: NodeRanks) -> None:
    logging.getLogger("tasks.train.trainer").warning("ALARM: %s", "every reward is minimal")
    assert node.check()[0] == ["ALARM: every reward is minimal"]


def test_a_store_that_cannot_be_written_hides_no_cause(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise StorageError("no route to host")

    monkeypatch.setattr(Store, "write", refuse)
    told: list[str] = []
    keep_logs(store, "smoke", [], [ValueError("the cause")], told.append)
    assert told == ["the logs of the nodes stay there, in logs/smoke of their storage.cache: no route to host"]


def test_an_error_that_ends_workers_and_trainer_has_one_folder(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has the logs of all their nodes, and the cause that the workers know."""
    monkeypatch.setattr(ray, "wait", lambda *_, **__: None)
    asked: list[tuple[str, str]] = []
    nodes = [
        SimpleNamespace(store_logs=SimpleNamespace(remote=lambda folder, name=name: asked.append((name, folder))))
        for name in ("worker", "trainer")
    ]
    error, told = ValueError("the end"), list[str]()
    keep_logs(store, "smoke", nodes[:1], [OSError("the first cause"), error], told.append)
    keep_logs(store, "smoke", nodes[1:], [error], told.append)
    (cause,) = [item.path for item in store.walk("runs/smoke/logs")]
    assert asked == [(name, cause.removesuffix("/cause.txt")) for name in ("worker", "trainer")]
    assert "the first cause" in store.read(cause).decode()
    assert len(told) == 1
    keep_logs(store, "smoke", nodes[:1], [ValueError("the end")], told.append)
    assert asked[-1][1] != asked[0][1]
