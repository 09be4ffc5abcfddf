"""The bookkeeping of a stream: its staleness bound, and that each group is in exactly one data set."""

import random
from collections import Counter
from statistics import fmean

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tasks.rollout.places import Places


@given(
    seed=st.integers(0, 2**32),
    size=st.integers(1, 5),
    staleness=st.integers(0, 5),
    end=st.integers(1, 8),
    slots=st.integers(1, 40),
    rejection=st.sampled_from([0.0, 0.3, 0.9]),
    rounds=st.integers(1, 4),
    losses=st.integers(0, 20),
)
@example(seed=4, size=2, staleness=0, end=1, slots=2, rejection=0.3, rounds=1, losses=5)  # the last one needed is lost
def test_any_order_of_events(
    seed: int, size: int, staleness: int, end: int, slots: int, rejection: float, rounds: int, losses: int
) -> None:
    """Groups begin, finish in any order, are rejected or lost; versions follow when their data set is committed.

    A group is lost while it runs, or after it has finished, but before its data set is committed. It begins again.

    No accepted group is in a data set more than `staleness` versions after the version that it began with. Each is in
    exactly one. No data set has more than `size`. All data sets are closed in the end, whatever the order.
    """
    dice = random.Random(seed)
    plan = Places(0, end, size, staleness, size * rounds)
    version, begun, running, accepted = 0, 0, dict[int, int](), Counter[int]()
    stored, committed, lost = dict[int, tuple[int, bool]](), set[int](), list[int]()
    while not plan.complete or len(committed) < end:
        events = ["begin"] * (len(running) < slots and plan.may_begin(version)) + ["finish"] * bool(running)
        events += ["train"] * (version in committed and version < end - 1)
        closed = [data_set for data_set in range(end) if plan.is_closed(data_set) and data_set not in committed]
        events += ["commit"] * bool(closed)
        pending = [number for number, (data_set, _) in stored.items() if data_set not in committed]
        events += ["lose"] * bool(losses and (running or pending))
        assert events, "the stream is stuck"
        event = dice.choice(events)
        if event == "begin":
            number, begun = (lost.pop(), begun) if lost else (begun, begun + 1)
            plan.begin(number, version)
            running[number] = version
        elif event == "train":
            version += 1
            plan.take(version)
        elif event == "commit":
            committed.add(data_set := dice.choice(closed))
            plan.committed.add(data_set)
        elif event == "lose":
            losses -= 1
            number = dice.choice([*running, *pending])
            lost.append(number)
            if number in running:
                plan.lose(number)
                del running[number]
            else:
                data_set, rejected = stored.pop(number)
                plan.reopen(data_set, rejected=rejected)
                accepted[data_set] -= not rejected
        else:
            number = dice.choice(list(running))
            rejected = dice.random() < rejection
            was_closed = [plan.is_closed(i) for i in range(end)]
            data_set = plan.finish(number, rejected=rejected)
            assert not was_closed[data_set]
            stored[number] = data_set, rejected
            if not rejected:
                accepted[data_set] += 1
                assert version <= data_set <= running[number] + staleness
            del running[number]
        assert plan.running == len(running)
    assert not running
    assert all(accepted[i] <= size for i in range(end))
    if not rejection:
        assert accepted == dict.fromkeys(range(end), size)


def steady_staleness(training: int, rollout: int, slots: int, size: int = 4, end: int = 40) -> float:
    """Play and train in steps of time; return the mean staleness of the second half of the data sets.

    `training` is the duration of a training, and `rollout` that of every group; `slots` groups run at the same time.
    """
    plan, version, begun, trained_at = Places(0, end, size, 4, size), 0, 0, training
    running, stored = dict[int, tuple[int, int]](), list[tuple[int, int]]()  # (version, end); (data set, staleness)
    plan.take(0)
    for now in range(10**6):
        for number, (with_version, ready) in list(running.items()):
            if ready <= now:
                stored.append((data_set := plan.finish(number, rejected=False), data_set - with_version))
                del running[number]
        if plan.complete:
            break
        while len(running) < slots and plan.may_begin(version):
            plan.begin(begun, version)
            running[begun], begun = (version, now + rollout), begun + 1
        if not plan.is_closed(version):
            trained_at = now + training + 1
        elif now >= trained_at:
            version, trained_at = version + 1, now + training
            plan.take(version)
    return fmean(stale for data_set, stale in stored if data_set >= end // 2)


def test_the_stream_runs_no_further_ahead_than_training_needs() -> None:
    """Groups begin one version ahead if training is slower, and as far ahead as allowed if rollouts are slower."""
    assert steady_staleness(training=40, rollout=10, slots=4) <= 1
    assert steady_staleness(training=40, rollout=10, slots=100) <= 1
    assert steady_staleness(training=10, rollout=100, slots=100) == pytest.approx(4, abs=0.5)
    assert 1 < steady_staleness(training=40, rollout=60, slots=100) <= 3


@pytest.mark.parametrize(("staleness", "missing"), [(1, [3]), (4, [3, 5, 5, 5])])
def test_a_continued_stream_keeps_what_data_sets_hold(staleness: int, missing: list[int]) -> None:
    """Committed data sets get no more groups, and the others only as many as are missing."""
    plan = Places(3, 6, 4, staleness, 8, accepted=Counter({3: 3, 5: 1}), committed={4})
    plan.take(3)
    numbers = list[int]()
    while plan.may_begin(3):
        numbers.append(len(numbers))
        plan.begin(numbers[-1], 3)
    assert [plan.finish(number, rejected=False) for number in numbers] == missing
