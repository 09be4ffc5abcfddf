"""Training samples: which trajectories enter training, and which are refused."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from configs.score import Reward
from storage.records import Score
from tasks.train.samples import build_samples, within_staleness
from tests.support.train_helpers import make_scores, make_trajectory


def test_arrays_by_hand() -> None:
    """Positions, turns, returns and logprobs of the action tokens of a two-turn trajectory."""
    row = make_trajectory("t", [[10, 11], [12]], version=3, turn_discount=0.5)
    row = replace(row, logprobs=[0, 0, 0, -0.1, -0.2, 0, 0, -0.3])
    (sample,) = build_samples([row], make_scores("t", 0, 1), Reward())
    assert sample.token_ids.tolist() == [1, 2, 3, 10, 11, 4, 5, 12]
    assert sample.actions.tolist() == [3, 4, 7]
    assert sample.turn_of_action.tolist() == [0, 0, 1]
    assert sample.behaviour == pytest.approx([-0.1, -0.2, -0.3])
    assert sample.versions.tolist() == [3, 3, 3]
    assert (sample.successes.tolist(), sample.rewards.tolist(), sample.returns.tolist()) == ([0, 1], [-1, 1], [-0.5, 1])


def test_order_of_arrival_does_not_matter() -> None:
    """Shards arrive in any order; training must not depend on it."""
    rows = [make_trajectory(name, [[10]]) for name in ("b", "c", "a")]
    scores = [score for name in "cab" for score in make_scores(name, 1)]
    assert [sample.trajectory_id for sample in build_samples(rows, scores, Reward())] == ["a", "b", "c"]


def test_only_finished_episodes_with_actions_are_trained_on() -> None:
    """Rejected, failed and empty episodes are left out and need no scores."""
    rows = [
        make_trajectory("completed", [[10]]),
        make_trajectory("truncated", [[10]], status="truncated"),
        make_trajectory("rejected", [[10]], status="rejected"),
        make_trajectory("failed", [[10]], status="failed"),
        make_trajectory("no turn", []),
        make_trajectory("empty turn", [[]]),
    ]
    scores = make_scores("completed", 1) + make_scores("truncated", 0) + make_scores("failed", 0)
    samples = build_samples(rows, scores, Reward())
    assert [(sample.trajectory_id, sample.truncated) for sample in samples] == [
        ("completed", False),
        ("truncated", True),
    ]


def test_a_reward_that_is_no_number_names_the_trajectory() -> None:
    """A custom verifier may give NaN, which would spread over the group's baseline."""
    rows = [make_trajectory(name, [[10]]) for name in ("good", "bad")]
    with pytest.raises(ValueError, match="NaN or infinite rewards: bad"):
        build_samples(rows, make_scores("good", 1) + make_scores("bad", np.nan), Reward())


def test_calls_of_tools_are_not_graded_but_earn_what_follows() -> None:
    """The call has no reward of its own, and the return of the answer, which uses its result."""
    scores = [replace(make_scores("t", 0)[0], verdict="none"), Score("t", 1, "correct", 1.0, "", "", "", 1.0)]
    (sample,) = build_samples([make_trajectory("t", [[10, 11], [12]], turn_discount=0.5)], scores, Reward())
    assert (sample.graded.tolist(), sample.successes.tolist()) == ([False, True], [0, 1])
    assert (sample.rewards.tolist(), sample.returns.tolist()) == ([0, 1], [0.5, 1])


def test_training_uses_the_reward_and_metrics_the_success() -> None:
    """A wrong answer may earn something for its format; it is no success."""
    scores = [replace(score, reward=reward) for score, reward in zip(make_scores("t", 0, 1), (0.25, 3.0), strict=True)]
    row = make_trajectory("t", [[10], [11]])
    (shaped,), (raw,) = (build_samples([row], scores, Reward(shape=shape)) for shape in ("success", "raw"))
    assert (shaped.rewards.tolist(), raw.rewards.tolist()) == ([-0.5, 5.0], [0.25, 3.0])
    assert shaped.successes.tolist() == raw.successes.tolist() == [0, 1]
    with pytest.raises(ValueError, match="NaN or infinite rewards: t"):
        build_samples([row], [replace(score, reward=np.inf) for score in scores], Reward())


def test_the_overlong_penalty_uses_the_limit_of_the_sampling() -> None:
    """The limit of the overlong penalty is the request's, if one is stored, and else that of the sampling."""
    row = replace(make_trajectory("t", [[10, 11], [12]]), sampling='{"max_new_tokens": 2}')
    (sample,) = build_samples([row], make_scores("t", 1, 1), Reward(overlong_tokens=1))
    assert sample.rewards.tolist() == [0.0, 1.0]
    row = replace(row, sampling='{"max_new_tokens": 4}', limits=[2, 4])
    for unfinished, rewards in (("least", [0.0, 1.0]), ("leave-out", [1.0, 1.0])):
        reward = Reward(overlong_tokens=1, unfinished=unfinished)  # type: ignore[arg-type]
        (sample,) = build_samples([row], make_scores("t", 1, 1), reward)
        assert sample.rewards.tolist() == rewards


def test_turns_cut_by_the_limit_may_be_masked() -> None:
    """Only the turns cut by the token limit are masked, calls of tools too, and only with `mask_truncated`."""
    row = make_trajectory("t", [[10, 11], [12]], status="truncated")
    row = replace(row, turns=[row.turns[0], replace(row.turns[1], finish_reason="length")])
    first, second = make_scores("t", 1, 0)
    for masked, scores in itertools.product((True, False), ([first, second], [first, replace(second, verdict="none")])):
        (sample,) = build_samples([row], scores, Reward(), mask_truncated=masked)
        assert sample.in_loss.tolist() == [True, True, not masked]


@given(st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=4), min_size=1, max_size=6), st.integers(0, 9))
def test_staleness_is_that_of_the_oldest_token(versions: list[list[int]], oldest: int) -> None:
    """One old token makes the trajectory too old, however new the others are."""
    rows = [
        replace(make_trajectory(f"t{i}", [[10] * len(sampled)]), versions=[-1, -1, -1, *sampled])
        for i, sampled in enumerate(versions)
    ]
    samples = build_samples(rows, [s for row in rows for s in make_scores(row.trajectory_id, 1)], Reward())
    kept = {sample.trajectory_id for sample in within_staleness(samples, 9, oldest)}
    assert kept == {f"t{i}" for i, sampled in enumerate(versions) if all(9 - v <= oldest for v in sampled)}


def test_missing_score_names_the_trajectory() -> None:
    """A turn without a verdict is not a wrong turn."""
    with pytest.raises(ValueError, match=r"turns \[1\] of half"):
        build_samples([make_trajectory("half", [[10], [11]])], make_scores("half", 0), Reward())


def test_two_scores_or_two_rows_are_refused() -> None:
    """Rows of two verifiers or two runs, mixed by mistake, are refused."""
    row = make_trajectory("t", [[10]])
    with pytest.raises(ValueError, match="two scores for turn 0 of t"):
        build_samples([row], make_scores("t", 0) + make_scores("t", 1), Reward())
    with pytest.raises(ValueError, match="more than once: t"):
        build_samples([row, row], make_scores("t", 0), Reward())
