"""Faults are counted; a run with too many of the set-up's stops, and an alarm says when either kind grows."""

from dataclasses import replace
from pathlib import Path

import pytest

from storage import layout
from storage.objects.store import Store
from storage.records import Fault
from storage.versions.drafts import Draft, Provenance
from tasks.evaluate.summary import fault_rows
from tasks.rollout.outcomes import FaultAlarm, Tally, alarms, counts_of
from tasks.score.scorers import SuccessRule
from tests.support.train_helpers import make_trajectory


def tallied(*faults: Fault) -> Tally:
    """Return the counts of a completed episode and of failed ones with these faults."""
    rule, failed = SuccessRule(), make_trajectory("t", [[10]], status="failed", reason="it broke")
    tally = Tally(lambda _: None, rule)
    tally.add(counts_of([make_trajectory("t", [[10]]), *(replace(failed, fault=fault) for fault in faults)], rule))
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


@pytest.mark.parametrize(
    ("share", "highest", "raised"),
    [(0.04, 0.0, 0), (0.06, 0.0, 1), (0.09, 0.06, 0), (0.11, 0.06, 1), (0.11, 0.12, 0), (1.0, 0.79, 1)],
)
def test_an_alarm_for_each_doubling(share: float, highest: float, raised: int) -> None:
    found = alarms({"policy": share}, {"policy": highest})
    assert len(found) == raised
    assert all("the policy's own behaviour" in alarm for alarm in found)


def test_a_slow_rise_is_noticed() -> None:
    """A share that grows by 3 % in each iteration is never twice that of the iterations before, but doubles."""
    shares = [0.02 * 1.03**iteration for iteration in range(100)]
    raised = [len(alarms({"policy": now}, {"policy": max(shares[:i], default=0.0)})) for i, now in enumerate(shares)]
    assert sum(raised) == 3  # at 5, 10 and 20 %


def test_the_alarm_of_a_run_knows_the_iterations_before_it(tmp_path: Path) -> None:
    """Also those of an earlier flow run, and of older programs, which counted none."""
    store = Store(f"{tmp_path}/var")
    for iteration, metrics in enumerate([{}, *({"faults": {"policy": share}} for share in (0.06, 0.07, 0.21))]):
        with Draft(store, layout.trajectories("r", iteration), "trajectories") as draft:
            draft.commit(Provenance(config={}), [], metrics)
    alarm = FaultAlarm(store, "r")
    assert alarm.look(2) == []
    (raised,) = alarm.look(3)
    assert raised.startswith("21.0% of the episodes")
    assert raised.endswith("at most 7.0%")


def test_the_report_shows_them() -> None:
    """Without such episodes there is no table; iterations of older programs counted none."""
    training = [{"faults": {"policy": 0.1}}, {}, {"faults": {"policy": 0.5, "set-up": 0.25}}]
    policy, set_up = fault_rows({"training": training})
    assert list(policy.values()) == ["policy", "0.100", "0.500", "0.200", "0.500", "2"]
    assert list(set_up.values()) == ["set-up", "0.000", "0.250", "0.083", "0.250", "2"]
    assert fault_rows({"training": [{}, {"faults": {}}]}) == []
