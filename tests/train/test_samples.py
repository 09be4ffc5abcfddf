"""Training samples: which trajectories enter training, which are refused, and the metrics of both."""

import math
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch

from configs.score import Reward
from configs.score import Score as Scoring
from storage.records import Score, Trajectory, VerdictName
from tasks.train.advantages import Observed, against_group
from tasks.train.components import LossOutputs, policy_loss
from tasks.train.mesh import ALONE
from tasks.train.metrics import sample_metrics, step_metrics, value_metrics
from tasks.train.samples import build_samples
from tasks.train.step import OfTokens, Step, gathered
from tests.support.train_helpers import make_scores, make_trajectory


def test_arrays_by_hand() -> None:
    """Positions, turns, returns and logprobs of the action tokens of a two-turn trajectory.

    If the first turn is a call of a tool, it has no reward of its own, and the return of the answer that uses it.
    """
    logprobs = [0, 0, 0, -0.1, -0.2, 0, 0, -0.3]
    row = make_trajectory("t", [[10, 11], [12]], version=3, turn_discount=0.5, logprobs=logprobs)
    first, second = make_scores("t", 0, 1)
    (sample,) = build_samples([row], [first, second], Reward())
    assert sample.token_ids.tolist() == [1, 2, 3, 10, 11, 4, 5, 12]
    assert sample.actions.tolist() == [3, 4, 7]
    assert sample.turn_of_action.tolist() == [0, 0, 1]
    assert sample.behaviour == pytest.approx([-0.1, -0.2, -0.3])
    assert sample.versions.tolist() == [3, 3, 3]
    assert (sample.successes.tolist(), sample.rewards.tolist(), sample.returns.tolist()) == ([0, 1], [-1, 1], [-0.5, 1])
    (sample,) = build_samples([row], [replace(first, verdict="none"), second], Reward())
    assert (sample.graded.tolist(), sample.successes.tolist()) == ([False, True], [0, 1])
    assert (sample.rewards.tolist(), sample.returns.tolist()) == ([0, 1], [0.5, 1])


def test_only_finished_episodes_with_actions_are_trained_on() -> None:
    """Empty episodes are left out and need no scores. The rows may come in any order."""
    rows = [make_trajectory("truncated", [[10]], status="truncated"), make_trajectory("completed", [[10]])]
    rows += [make_trajectory("no turn", []), make_trajectory("empty turn", [[]])]
    scores = make_scores("completed", 1) + make_scores("truncated", 0)
    samples = build_samples(rows, scores, Reward())
    assert [(each.trajectory_id, each.truncated) for each in samples] == [("completed", False), ("truncated", True)]


def test_rows_and_scores_that_do_not_fit_are_refused() -> None:
    """Rows of two runs or scores of two verifiers are mixed; a turn without a verdict is not a wrong turn."""
    row, other = (make_trajectory(name, [[10]]) for name in ("t", "u"))
    one, broken = make_scores("t", 0), make_scores("t", np.nan)
    for rows, scores, message in (
        ([row], one + make_scores("t", 1), "two scores for turn 0 of t"),
        ([row, row], one, "more than once: t"),
        ([row, other], one, r"no score for turns \[0\] of u"),
        ([row, other], broken + make_scores("u", 1), "NaN or infinite rewards: t"),
        ([row], [replace(one[0], reward=np.inf)], "NaN or infinite rewards: t"),
    ):
        with pytest.raises(ValueError, match=message):
            build_samples(rows, scores, Reward())


def test_the_overlong_penalty_uses_the_limit_of_the_sampling() -> None:
    """The limit of the overlong penalty is the request's, if one is stored, and else that of the sampling."""
    row = make_trajectory("t", [[10, 11], [12]], sampling='{"max_new_tokens": 2}')
    for each in (row, replace(row, sampling='{"max_new_tokens": 4}', limits=[2, 4])):
        (sample,) = build_samples([each], make_scores("t", 1, 1), Reward(overlong_tokens=1))
        assert sample.rewards.tolist() == [0.0, 1.0]


def test_turns_cut_by_the_limit_may_be_masked() -> None:
    """Only the turns cut by the token limit are masked, calls of tools too, and only with `mask_truncated`."""
    row = make_trajectory("t", [[10, 11], [12]], status="truncated", finish_reason="length")
    scores = [replace(score, verdict="none") for score in make_scores("t", 1, 0)]
    for masked in (True, False):
        (sample,) = build_samples([row], scores, Reward(), mask_truncated=masked)
        assert sample.in_loss.tolist() == [True, True, not masked]


SLOW = "needs more than 5 s of processor time"
"""The verifier's reason where an answer met a limit."""
SCORERS = ["judge", "reward-model", "my.module:score", "environment", "math-verify", "code"]


def graded(*rewards: float | VerdictName, reason: str = "") -> tuple[list[Trajectory], list[Score]]:
    """Return an episode of one problem for each reward, or for each verdict of a grader that failed."""
    rows = [make_trajectory(f"t{number}", [[10]]) for number in range(len(rewards))]
    said = [("wrong", each) if isinstance(each, float) else (each, float(each == "correct")) for each in rewards]
    return rows, [Score(f"t{n}", 0, name, 0.0, "", "", reason, value) for n, (name, value) in enumerate(said)]  # type: ignore[arg-type]


def advantages(rows: list[Trajectory], scores: list[Score], reward: Reward, scorer: str) -> dict[str, float]:
    """Return the advantage of the only token of each sample."""
    samples = build_samples(rows, scores, reward, scorers=Scoring(type=scorer))
    values = against_group(samples, [Observed(np.zeros(1)) for _ in samples])
    return {sample.trajectory_id: float(value[0]) for sample, value in zip(samples, values, strict=True)}


@pytest.mark.parametrize("verdict", ["error", "timeout"])
@pytest.mark.parametrize("scorer", SCORERS)
def test_a_grader_that_fails_is_no_zero(verdict: VerdictName, scorer: str) -> None:
    """Its episode gets no advantage and moves no baseline, whichever of its turns has no verdict."""
    rows, scores = graded(0.8, 0.9, 0.7, verdict)
    raw, success = (advantages(rows, scores, Reward(shape=shape), scorer) for shape in ("raw", "success"))
    assert raw == pytest.approx({"t0": 0.0, "t1": 0.1, "t2": -0.1})
    assert success == pytest.approx({"t0": 0.0, "t1": 0.2, "t2": -0.2})
    longer = make_trajectory("long", [[10], [11], [12]])
    first = [replace(score, trajectory_id="long", turn=turn) for turn, score in enumerate(scores[1:])]
    assert advantages([*rows, longer], [*scores, *first], Reward(shape="raw"), scorer) == raw


def test_an_answer_that_meets_a_limit_is_the_policys_doing() -> None:
    """Otherwise it would be worth more than a wrong one. It earns the least; what environments paid stays."""
    rows, scores = graded("timeout", -1.0, reason=SLOW)
    for scorer, expected in (("my.module:score", -1), ("math-verify", -1), ("environment", 0)):
        slow, _ = build_samples(rows, scores, Reward(), scorers=Scoring(type=scorer))
        assert slow.rewards.tolist() == [expected]


ROWS = [
    make_trajectory("a", [[10, 11]], problem="p", version=5),
    make_trajectory("b", [[10], [11]], problem="p", version=3),
    make_trajectory("c", [[10], [11], [12]], problem="p", version=4, status="truncated"),
    make_trajectory("d", [[10], [11]], problem="q", version=4),
]
SCORES = make_scores("a", 1) + make_scores("b", 0, 1) + make_scores("c", 0, 0, 0) + make_scores("d", 1, 0)
SAMPLES = build_samples(ROWS, SCORES, Reward())


def test_sample_metrics_by_hand() -> None:
    """Rates by turn and between turns, lengths by outcome, staleness over action tokens."""
    assert sample_metrics(SAMPLES, version=5) == {
        "trained/turn_1": 0.5,
        "reward/turn_1": 0.0,
        "trained/turn_2": pytest.approx(1 / 3),
        "reward/turn_2": pytest.approx(-1 / 3),
        "trained/turn_3": 0.0,
        "reward/turn_3": -1.0,
        "success/fix_rate": pytest.approx(1 / 3),  # b 0 -> 1; c 0 -> 0 -> 0
        "success/break_rate": 1.0,  # d 1 -> 0
        "length/correct": 6.0,  # a has 5 tokens, b 7
        "length/wrong": 8.5,  # c has 10 tokens, d 7
        "share/truncated": 0.25,
        "share/zero_variance": pytest.approx(3 / 5),  # p varies on turns 1 and 2, not 3; q has one sample
        "staleness/min": 0.0,
        "staleness/mean": pytest.approx((0 + 0 + 2 + 2 + 1 + 1 + 1 + 1 + 1) / 9),
        "staleness/max": 2.0,
        "tokens/trained": 29.0,
        "tokens/action": 9.0,
        "tokens/masked": 0.0,
        "trained/return": -0.75,  # a 1, b 0, c -3, d 0, and -1 for what is missing in the truncated one
        "reward/all_minimal": 0.0,
        "trajectories": 4.0,
    }


def test_unobserved_rates_are_left_out() -> None:
    """A rate without observations is left out, not 0 or NaN: without a second turn there is no fix rate."""
    metrics = sample_metrics(build_samples(ROWS[:1], SCORES, Reward()), version=5)
    assert not metrics.keys() & {"success/fix_rate", "success/break_rate", "length/wrong", "trained/turn_2"}
    # Turns that nobody grades, such as calls of tools, are none of the turns that are counted.
    called = build_samples(ROWS[1:2], [replace(SCORES[1], verdict="none"), SCORES[2]], Reward())
    found = sample_metrics(called, 5)
    assert found["trained/turn_1"] == 1.0
    assert not any(name.startswith(("success/", "trained/turn_2")) for name in found)


def outcome(name: str, ratio: float, weight: float | None = None, value: LossOutputs | None = None) -> OfTokens:
    """Return one token of behaviour probability exp(-2), advantage 1 for `a`, -1 for `b`; reference = behaviour.

    Without a weight the objective has none, and the proximal logprob is that of sampling.
    """
    behaviour = torch.tensor([-2.0])
    proximal = behaviour + math.log(weight or 1.0)
    logp = proximal + math.log(ratio)
    weights, advantages = torch.tensor([weight or 1.0]), torch.tensor([1.0 if name == "a" else -1.0])
    found = policy_loss(logp, proximal, weights, advantages, 0.2)
    columns = {"samples": torch.zeros(1), "sampled": torch.ones(1), "behaviour": behaviour, "logp": logp}
    columns |= {"proximal": proximal, "reference": behaviour, "loss": found.loss, **found.metrics}
    columns |= {"gradient": torch.tensor([0.5]), "entropy": torch.tensor([0.25])}
    columns |= {} if weight is None else {"weight": weights}
    columns |= {"value_loss": value.loss, **value.metrics} if value else {}
    return gathered([{name: column.double() for name, column in columns.items()}], ALONE)


step = partial(Step, tokens=2, computed_tokens=1, padded_tokens=4)


def test_step_metrics_by_hand() -> None:
    """Ratios, weights, differences, k3 and values of two tokens of two minibatches."""
    value = LossOutputs(torch.tensor([0.5]), {"value_clipped": torch.tensor([True])})
    first, second = outcome("a", 1.5, 3.0, value), outcome("b", 1.0, 1.0, value)
    steps = [step(first, grad_norm=1.0, early_stopped=False), step(second, grad_norm=3.0, early_stopped=True)]
    assert step_metrics(steps, recomputed=True) == pytest.approx(
        {
            "policy/loss": (-3.0 * 1.2 * 1 + 1.0) / 2,
            "policy/entropy": 0.25,
            "policy/ratio": 1.25,
            "policy/clip_fraction": 0.5,
            "policy/dual_clip_fraction": 0.0,
            "policy/kl_behaviour": (4.5 - 1 - math.log(4.5)) / 2,
            "policy/kl": (1.5 - 1 - math.log(1.5)) / 2,
            "policy/kl_reference": (1 / 4.5 - 1 + math.log(4.5)) / 2,
            "policy/early_stopped": 0.5,
            "tokens/padding_share": 0.75,
            "tokens/shared_share": 0.5,
            "proximal/mean_difference": math.log(3) / 2,
            "proximal/max_difference": math.log(3),
            "proximal/sequence_difference": math.log(3) / 2,
            "weight/mean": 2.0,
            "weight/max": 3.0,
            "weight/effective_share": 16 / 10 / 2,
            "weight/masked_share": 0.0,
            "value/loss": 0.5,
            "value/clip_fraction": 1.0,
            "grad_norm": 2.0,
        },
        rel=1e-5,
    )


def test_without_recomputed_logprobs_the_mismatch_is_that_of_the_first_minibatch() -> None:
    """Only the first minibatch is taken with the sampling weights; there are no behaviour weights to report."""
    steps = [step(outcome(name, ratio), 1.0, False) for name, ratio in (("a", 1.1), ("b", 9.0))]
    metrics = step_metrics(steps, recomputed=False)
    for name in ("max", "sequence"):
        assert metrics[f"proximal/{name}_difference"] == pytest.approx(math.log(1.1), rel=1e-5)
    assert metrics["policy/dual_clip_fraction"] == metrics["policy/first_clip_fraction"] == 0
    assert not metrics.keys() & {"weight/mean", "policy/kl", "value/loss"}


def test_explained_variance_by_hand() -> None:
    """A critic that predicts the mean explains nothing; one that predicts the returns explains everything."""
    returns = np.array([1.0, 2.0, 3.0])
    for values, explained in ((np.full(3, 2.0), 0.0), (returns, 1.0)):
        assert value_metrics(values, returns) == {"value/explained_variance": explained}
    assert value_metrics(returns, np.ones(3)) == {}
