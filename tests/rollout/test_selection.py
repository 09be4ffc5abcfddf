"""Selection of episodes for training, replacement of rejected groups, and faults: what is counted, stopped, alarmed."""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from configs import Config, load
from storage.objects.store import Store
from storage.records import Fault, Problem, Status, Trajectory
from storage.version_names import PolicyVersion
from storage.versions.drafts import Draft
from tasks.rollout.outcomes import (
    FaultAlarm,
    FinishedGroup,
    Tally,
    counts_of,
    is_rejected,
    select_episodes,
    success_rate,
)
from tasks.rollout.plan import RolloutPlan
from tasks.rollout.play import _Batch
from tasks.score.scorers import SuccessRule
from tasks.train.samples import build_samples
from tests.support.rollout_helpers import GCONFIG
from tests.support.train_helpers import make_trajectory


def episode(sample: int, *rewards: float, length: int = 2, status: Status = "completed") -> Trajectory:
    row = make_trajectory(f"t{sample}", [[10] * length for _ in rewards], status=status)
    paid = zip(row.turns, rewards, strict=True)
    turns = [replace(turn, reward=reward, verdict="correct" if reward else "wrong") for turn, reward in paid]
    return replace(row, sample=sample, turns=turns, turn_discount=0.5)


def settings(*overrides: str, **rollout: Any) -> Config:
    return load("smoke", [f"rollout={json.dumps(rollout)}", *overrides])


def statuses(rows: list[Trajectory]) -> list[str]:
    return [row.status for row in rows]


GROUP = [episode(0, 1), episode(1, 0, 1), episode(2, 0, 0), episode(3, status="failed")]


@pytest.mark.parametrize(("low", "high", "stays"), [(0, 1, True), (0.4, 0.4, True), (0.41, 1, False), (0, 0.39, False)])
def test_groups_outside_the_bounds_are_rejected(low: float, high: float, stays: bool) -> None:
    """The bounds are inclusive; a rejected group is kept with its reason, and a failed episode stays failed."""
    rows = select_episodes(GROUP, settings(success_rate_lb=low, success_rate_ub=high))
    assert statuses(rows) == (["completed"] * 3 if stays else ["rejected"] * 3) + ["failed"]
    if not stays:
        assert rows[0].reason == f"success rate of its group outside [{low:g}, {high:g}]: 0.40"
        assert build_samples(rows, [], load("smoke").reward) == []


def test_the_best_of_a_group_are_kept() -> None:
    """Right comes before wrong, short before long; the others are rejected with a reason."""
    group = [episode(0, 0, 0), episode(1, 0, 1, length=5), episode(2, 0, 1), episode(3, 1), episode(4, status="failed")]
    rows = select_episodes(group, settings(group_size=2, generation_size=5))
    assert statuses(rows) == ["rejected", "rejected", "completed", "completed", "failed"]
    assert rows[0].reason == "not among the best 2 of 5"


@given(
    st.lists(st.lists(st.sampled_from([0.0, 1.0]), min_size=1, max_size=3), min_size=1, max_size=8), st.integers(2, 8)
)
def test_selection_keeps_the_order_and_as_many_as_there_are(rewards: list[list[float]], size: int) -> None:
    """Selection loses and moves no row, and keeps at most `group_size`."""
    group = [episode(sample, *turns) for sample, turns in enumerate(rewards)]
    rows = select_episodes(group, settings(group_size=size, generation_size=8))
    assert [row.trajectory_id for row in rows] == [row.trajectory_id for row in group]
    assert statuses(rows).count("completed") == min(size, len(group))


# Groups that teach nothing


def graded(sample: int, *rewards: float, length: int = 2, **columns: Any) -> Trajectory:
    """Return an episode whose turns have rewards and no verdicts, as environments and agents may give them."""
    row = episode(sample, *rewards, length=length)
    return replace(row, turns=[replace(turn, verdict="") for turn in row.turns], **columns)


def paid(sample: int, right: float, form: float) -> Trajectory:
    return graded(sample, right + form, reward_parts=[{"correct": right, "format": form}])


def unfinished(sample: int) -> Trajectory:
    """Return an episode that the policy ended during its first turn."""
    return replace(episode(sample, 0, status="failed"), ungraded=[0], fault="policy")


def said(sample: int, verdict: str) -> Trajectory:
    """Return an episode whose answer has this verdict of the environment."""
    row = episode(sample, 0)
    return replace(row, turns=[replace(turn, verdict=verdict) for turn in row.turns])


EQUAL = {
    "right, where graders did not fail": [episode(0, 1), episode(1, 1), said(2, "error")],
    "all right in the second turn": [episode(0, 0, 1), episode(1, 0, 1)],
    "all wrong": [episode(0, 0), episode(1, 0)],
    "all unfinished": [unfinished(0), unfinished(1)],
    "none left to compare": [episode(0, 1), episode(1, status="failed")],
    "right, whose calls cost nothing": [
        replace(episode(0, 0, 1), ungraded=[0], turn_discount=1.0),
        replace(episode(1, 1), turn_discount=1.0),
    ],
}
UNEQUAL = {
    "right, or too much for the grader": [episode(0, 1), said(1, "timeout")],
    "right in different turns": [episode(0, 0, 1), episode(1, 1)],
    "wrong in different formats": [paid(0, 0.0, 0.2), paid(1, 0.0, 0.1)],
    "right, the sooner the better": [replace(episode(0, 0, 1), ungraded=[0]), episode(1, 1)],
    "some wrong": GROUP,
    "right or unfinished": [episode(0, 1), unfinished(1)],
}
RAW = ("reward.shape=raw", "score.type=environment")


@pytest.mark.parametrize("overrides", [(), RAW], ids=["success", "raw"])
@pytest.mark.parametrize("name", [*EQUAL, *UNEQUAL])
def test_groups_with_equal_returns_are_rejected(name: str, overrides: tuple[str, ...]) -> None:
    """What makes a group useless is that its returns are equal, turn by turn, not that its success rate is 0 or 1."""
    group = (EQUAL | UNEQUAL)[name]
    rows = select_episodes(group, settings(*overrides, reject_equal=True))
    assert is_rejected(group, rows) is (name in EQUAL)
    assert statuses(select_episodes(group, settings(*overrides))) == statuses(group)  # off by default
    if name in EQUAL:
        assert rows[0].reason == "the episodes of its group have equal returns"


@pytest.mark.parametrize(
    ("overrides", "rejected"),
    [
        (("score.type=judge", "models.judge.path=a"), False),
        (("score.type=reward-model", "models.reward.path=a"), False),
        (("score.type=my_module:score",), False),
        (("score.type=code",), False),
        (("score.type={default: environment, other: judge}", "models.judge.path=a"), True),
        (("environment={type: 'null'}",), False),
        ((), True),
    ],
)
def test_a_scorer_that_the_environment_knows_nothing_of_decides_alone(overrides: Sequence[str], rejected: bool) -> None:
    """The environment calls every answer wrong, because only a judge, a program's tests or a function can tell."""
    group = [episode(number, 0) for number in range(4)]
    config = settings(*overrides, reject_equal=True)
    assert is_rejected(group, select_episodes(group, config)) is rejected


def test_an_unfinished_episode_beside_a_worthless_one_is_kept() -> None:
    """Only training knows what it earns: less than 0 if an episode of another problem does."""
    group = [graded(0, 0.0), unfinished(1)]
    rejects = [settings(*RAW, *more, reject_equal=True) for more in ((), ("reward.least=0",))]
    assert [is_rejected(group, select_episodes(group, config)) for config in rejects] == [False, True]


def test_the_threshold_of_the_scorer_holds_while_playing() -> None:
    """`success_above` decides in filters, too, where neither a verdict nor a part does."""
    above = "score={type: environment, args: {environment: {success_above: 0.5}}}"
    assert success_rate([graded(0, 0.2), graded(1, 1.2)], settings(above)) == 0.5


def test_an_episode_that_the_policy_ended_counts_as_wrong() -> None:
    """It is played, for bounds and for what is rejected; one that an error ended is neither."""
    full = unfinished(1)
    group = [episode(0, 1), full, broken := replace(unfinished(2), fault="set-up")]
    assert success_rate(group, settings()) == 0.5
    assert statuses(select_episodes(group, settings(success_rate_ub=0.4))) == ["rejected", "rejected", "failed"]
    best = select_episodes([full, *group[:1], episode(3, 0), broken], settings(group_size=2, generation_size=4))
    assert statuses(best) == ["rejected", "completed", "completed", "failed"]


def test_who_fills_the_context_is_not_among_the_best() -> None:
    """Where honest episodes earn less than nothing, one that never answered earns no more than the worst of them."""
    full = replace(graded(0, 0.0, ungraded=[0], fault="policy"), status="truncated", unplayed_turns=-1)
    group = [full, graded(1, -0.5, -0.5, length=5), graded(2, -1.0)]
    rows = select_episodes(group, settings("score.type=environment", group_size=2, generation_size=3))
    assert statuses(rows) == ["rejected", "completed", "completed"]


MEMBERS = ", ".join(f"{{name: {name}, source: {{kind: arithmetic}}}}" for name in "ab")
MIXED = ("policy={path: p}", f"problems.train=[{MEMBERS}]")


@pytest.mark.parametrize(
    ("rounds", "spares", "rejected", "overrides", "expected"),
    [
        (0, "a2 a3", "ab", (), "a0 b0"),
        (2, "a1 a2 a3 a4 a5 a6", "ab", (), "a0 b0 a1 a2 a3 a4"),
        (2, "a1", "ab", (), "a0 b0 a1"),
        (2, "a1 a2", "", (), "a0 b0"),
        (2, "b1 a1 a2", "b", MIXED, "a0 b0 b1"),
    ],
)
def test_rejected_groups_are_replaced_for_some_rounds(
    store: Store, rounds: int, spares: str, rejected: str, overrides: tuple[str, ...], expected: str
) -> None:
    """Each round plays as many spares as groups of the round before were rejected, until rounds or spares are used up.

    In a mixture they are those of the same member; otherwise a filter of one member would change the shares of all.
    """
    config = settings(*overrides, max_resampling_rounds=rounds)
    drawn, others = ([Problem(name, "?", ["1"], name[0]) for name in each.split()] for each in ("a0 b0", spares))
    policy = PolicyVersion("runs/r/checkpoints/000000")
    plan = RolloutPlan("r/000000", config, 0, policy, "problems/x", GCONFIG, 1, selecting=True)
    played = list[str]()
    with Draft(store, "runs/r/trajectories/000000", "trajectories") as draft:
        groups = _Batch(plan, drawn, others, draft, lambda _: None)
        while group := groups.next(policy):
            played.append(group.problem.problem_id)
            groups.enter(FinishedGroup(group.number, played[-1], group.problem.source in rejected, Counter()))
        assert groups.complete
    assert played == expected.split()


# Faults


def tallied(*faults: Fault) -> Tally:
    """Return the counts of a completed episode and of failed ones with these faults."""
    rule, failed = SuccessRule(), make_trajectory("t", [[10]], status="failed", reason="it broke")
    rows = [make_trajectory("t", [[10]]), *(replace(failed, fault=fault) for fault in faults)]
    tally = Tally(lambda _: None, rule)
    tally.counts.update(counts_of(rows, rule))
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
