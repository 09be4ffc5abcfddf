"""The processes of a trainer's ranks on nodes report their state, their warnings and the first cause."""

import logging
from pathlib import Path
from typing import Any

import pytest

from configs import load
from tasks.cluster.node_process import NodeProcess, for_nodes
from tasks.cluster.node_ranks import LOST, NodeRanks


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


def test_warnings_of_a_node_reach_the_flow(node: NodeRanks) -> None:
    logging.getLogger("tasks.train.trainer").warning("ALARM: %s", "every reward is minimal")
    assert node.check()[0] == ["ALARM: every reward is minimal"]
