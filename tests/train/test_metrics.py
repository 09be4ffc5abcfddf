"""Metrics of an update, by hand."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from configs.score import Reward
from configs.train import PPO
from storage.records import Score
from tasks.train.losses import ValueLoss, policy_loss
from tasks.train.mesh import ALONE
from tasks.train.metrics import sample_metrics, step_metrics, value_metrics
from tasks.train.samples import build_samples
from tasks.train.step import Step, StepResult
from tests.support.train_helpers import make_scores, make_trajectory

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
    metrics = sample_metrics(SAMPLES, version=5)
    assert metrics == {
        "success/turn_1": 0.5,
        "reward/turn_1": 0.0,
        "success/turn_2": pytest.approx(1 / 3),
        "reward/turn_2": pytest.approx(-1 / 3),
        "success/turn_3": 0.0,
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
        "tokens/all": 29.0,
        "tokens/action": 9.0,
        "tokens/masked": 0.0,
        "reward/all_minimal": 0.0,
        "trajectories": 4.0,
    }


def test_calls_of_tools_change_no_rate() -> None:
    """With a call of a tool before each turn, all rates and rewards by turn are those of the answers alone."""
    rows, scores = [], []
    for row in ROWS:
        name = row.trajectory_id
        turns = [turn for answer in row.turns for turn in ([20], row.token_ids[answer.start : answer.end])]
        rows.append(make_trajectory(name, turns, problem=row.problem_id, version=row.policy_version, status=row.status))
        for score in (score for score in SCORES if score.trajectory_id == name):
            call = Score(name, 2 * score.turn, "none", 0.0, "", "", "", 0.0)
            scores += [call, replace(score, turn=2 * score.turn + 1)]
    plain, called = (sample_metrics(each, version=5) for each in (SAMPLES, build_samples(rows, scores, Reward())))
    rates = {name: value for name, value in plain.items() if name.startswith(("success/", "reward/"))}
    assert {name: value for name, value in called.items() if name.startswith(("success/", "reward/"))} == rates
    assert called["length/correct"] > plain["length/correct"]


def test_an_episode_of_calls_alone_is_not_right() -> None:
    """An episode that never answers has no rates, and is no correct one."""
    samples = build_samples(ROWS[:1], [Score("a", 0, "none", 0.0, "", "", "", 0.0)], Reward())
    metrics = sample_metrics(samples, version=5)
    assert not any(name.startswith("success/") for name in metrics)
    assert "length/correct" not in metrics


def test_unobserved_rates_are_left_out() -> None:
    """A rate without observations is left out, not 0 or NaN: without a second turn there is no fix rate."""
    metrics = sample_metrics(build_samples(ROWS[:1], SCORES, Reward()), version=5)
    assert not metrics.keys() & {"success/fix_rate", "success/break_rate", "length/wrong", "success/turn_2"}


def outcome(name: str, ratio: float, weight: float, value: ValueLoss | None = None) -> StepResult:
    """Return one token of behaviour probability exp(-2), advantage 1 for `a`, -1 for `b`; reference = behaviour."""
    behaviour = torch.tensor([-2.0])
    proximal = behaviour + math.log(weight)
    logp = proximal + math.log(ratio)
    zero = torch.zeros(1, dtype=torch.int64)
    advantages = torch.tensor([1.0 if name == "a" else -1.0])
    weights = torch.tensor([weight])
    loss = policy_loss(logp, proximal, weights, advantages, 0.2)
    entropy = torch.tensor([0.25])
    values = (value.loss, value.clipped) if value else ()
    columns = (*loss, behaviour, *values)
    return StepResult.gathered([StepResult(zero, behaviour, logp, proximal, weights, entropy, *columns)], ALONE)


def step(result: StepResult, grad_norm: float, early_stopped: bool) -> Step:
    return Step(result, grad_norm, early_stopped, tokens=2, computed_tokens=1, padded_tokens=4)


def test_step_metrics_by_hand() -> None:
    """Ratios, weights, differences, k3 and values of two tokens of two minibatches."""
    value = ValueLoss(torch.tensor([0.5]), torch.tensor([True]))
    steps = [
        step(outcome("a", 1.5, 3.0, value), grad_norm=1.0, early_stopped=False),
        step(outcome("b", 1.0, 1.0, value), grad_norm=3.0, early_stopped=True),
    ]
    assert step_metrics(steps, PPO()) == pytest.approx(
        {
            "policy/loss": (-3.0 * 1.2 * 1 + 1.0) / 2,
            "policy/entropy": 0.25,
            "policy/ratio": 1.25,
            "policy/clip_fraction": 0.5,
            "policy/dual_clip_fraction": 0.0,
            "policy/kl_behaviour": (4.5 - 1 - math.log(4.5)) / 2,
            "policy/kl_proximal": (1.5 - 1 - math.log(1.5)) / 2,
            "policy/kl_reference": (1 / 4.5 - 1 + math.log(4.5)) / 2,
            "policy/early_stopped": 0.5,
            "tokens/padding_share": 0.75,
            "tokens/shared_share": 0.5,
            "proximal/mean_difference": math.log(3) / 2,
            "proximal/max_difference": math.log(3),
            "weight/mean": 2.0,
            "weight/max": 3.0,
            "weight/effective_share": 16 / 10 / 2,
            "weight/masked_share": 0.0,
            "value/loss": 0.5,
            "value/clip_fraction": 1.0,
            "optimizer/grad_norm": 2.0,
        },
        rel=1e-5,
    )


def test_without_recomputed_logprobs_the_mismatch_is_that_of_the_first_minibatch() -> None:
    """Only the first minibatch is taken with the sampling weights; there are no behaviour weights to report."""
    steps = [step(outcome(name, ratio, 1.0), 1.0, False) for name, ratio in (("a", 1.1), ("b", 9.0))]
    metrics = step_metrics(steps, PPO(objective="behaviour", c_clip=3.0))
    assert metrics["proximal/max_difference"] == pytest.approx(math.log(1.1), rel=1e-5)
    assert metrics["policy/dual_clip_fraction"] == 0
    assert not metrics.keys() & {"weight/mean", "policy/kl_proximal", "value/loss"}


def test_explained_variance_by_hand() -> None:
    """A critic that predicts the mean explains nothing; one that predicts the returns explains everything."""
    returns = np.array([1.0, 2.0, 3.0])
    assert value_metrics(np.full(3, 2.0), returns) == {"value/explained_variance": 0.0}
    assert value_metrics(returns, returns) == {"value/explained_variance": 1.0}
    assert value_metrics(returns, np.ones(3)) == {}


def test_a_batch_without_any_right_turn_is_reported() -> None:
    """`reward/all_minimal`, which raises the alarm, is 1 if no turn is right."""
    samples = build_samples(ROWS[:1], make_scores("a", 0), Reward())
    assert sample_metrics(samples, version=5)["reward/all_minimal"] == 1.0
