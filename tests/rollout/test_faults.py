"""Faults are counted; a run with too many of the set-up's stops, and an alarm says when either kind grows."""

from dataclasses import replace

import pytest

from storage.records import Fault
from tasks.rollout.outcomes import FaultAlarm, Tally, counts_of
from tasks.score.scorers import SuccessRule
from tests.support.train_helpers import make_trajectory


def tallied(*faults: Fault) -> Tally:
    """Return the counts of a completed episode and of failed ones with these faults."""
    rule, failed = SuccessRule(), make_trajectory("t", [[10]], status="failed", reason="it broke")
    tally = Tally(lambda _: None, rule)
    tally.counts.update(
        counts_of([make_trajectory("t", [[10]]), *(replace(failed, fault=fault) for fault in faults)], rule)
    )
    return tally


def test_faults_are_counted_by_kind() -> None:
    """Failed rows of older programs, which named no fault, count as the set-up's."""
    assert tallied("policy", "policy", "set-up").metrics(0)["faults"] == {"policy": 0.5, "set-up": 0.25}
    assert tallied("").metrics(0)["faults"] == {"set-up": 0.5}
    assert tallied().metrics(0)["faults"] == {}


def test_only_the_set_up_stops_a_run() -> None:
    """A policy that fills its context is trained out of it; a broken environment has to be repaired."""
    tallied("policy", "policy", "policy").check(0.1)
    with pytest.raises(ValueError, match=r"1 of 4 episodes failed by the set-up's fault.*1 x it broke"):
        tallied("policy", "policy", "set-up").check(0.1)


def test_an_alarm_for_each_doubling() -> None:
    """Also if a share grows by 3 % in each iteration; programs before counted no faults."""
    alarm, shares = FaultAlarm(), [0.02 * 1.03**iteration for iteration in range(100)]
    found = [alarm.raised_by(metrics) for metrics in ({}, *({"faults": {"policy": share}} for share in shares))]
    raised = [text for texts in found for text in texts]
    assert [text.partition("%")[0] for text in raised] == ["5.0", "10.2", "20.1"]
    assert all("the policy's own behaviour" in text for text in raised)
    assert [len(alarm.raised_by({"faults": {"set-up": share}})) for share in (0.04, 0.06, 0.09, 0.11, 1.0, 1.0)] == [
        0, 1, 0, 1, 1, 0,
    ]  # fmt: skip
