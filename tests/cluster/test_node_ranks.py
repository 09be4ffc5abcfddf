"""The processes of a trainer's ranks report their state and the first cause; a store that is away hides no cause."""

import logging
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
