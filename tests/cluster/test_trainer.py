"""The flow's side of a trainer on nodes: what it takes for the cause of a loss, and when it ends hosts."""

import threading
from types import SimpleNamespace

import pytest
import ray
from ray.exceptions import RayActorError

from configs import load
from tasks.cluster import trainer
from tasks.cluster.node_ranks import LOST
from tasks.rollout.remote.messages import Failure
from tasks.train.ranks.launcher import RanksLostError


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
