"""Metrics of an update, by hand."""

import math
from dataclasses import replace

import pytest
import torch

from configs.schema import PPO, Reward
from tasks.ppo.batches import make_minibatches
from tasks.ppo.losses import decoupled_ppo_loss
from tasks.ppo.metrics import Outcome, padding_share, sample_metrics, token_metrics
from tasks.ppo.samples import build_samples
from tests.ppo_helpers import make_scores, make_trajectory

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
        "trajectories": 4.0,
    }


def test_what_was_not_observed_is_left_out() -> None:
    """No second turn, no fix rate: neither 0 nor NaN."""
    metrics = sample_metrics(build_samples(ROWS[:1], SCORES, Reward()), version=5)
    assert not metrics.keys() & {"success/fix_rate", "success/break_rate", "length/wrong", "success/turn_2"}


def test_token_metrics_by_hand() -> None:
    """Ratios, weights, differences and k3 of two tokens, out of two micro-batches."""
    samples = build_samples(
        [make_trajectory(n, [[10]], logprob=-2.0) for n in "ab"], [*SCORES[:1], SCORES[1]], Reward()
    )
    (minibatch,) = make_minibatches(
        samples,
        [sample.returns for sample in samples],
        PPO(minibatches=1, micro_batch_tokens=1),
        torch.Generator(),
        torch.device("cpu"),
    )
    shifts = {"a": (math.log(1.5), math.log(3.0)), "b": (0.0, 0.0)}  # policy / proximal, proximal / behaviour
    outcomes = []
    for batch in minibatch:
        ratio, weight = shifts[batch.trajectory_ids[0]]
        moved = replace(batch, proximal=batch.behaviour + weight)
        logp = moved.proximal + ratio
        tokens = decoupled_ppo_loss(logp, moved.proximal, moved.behaviour, moved.advantages, 0.2)
        outcomes.append(Outcome(moved, logp, torch.tensor([0.25]), tokens))
    assert token_metrics(outcomes, decoupled=True) == pytest.approx(
        {
            "policy/loss": (-3.0 * 1.2 * 1 + 1.0) / 2,
            "policy/entropy": 0.25,
            "policy/ratio": 1.25,
            "policy/clip_fraction": 0.5,
            "policy/kl_behaviour": (4.5 - 1 - math.log(4.5)) / 2,
            "policy/kl_proximal": (1.5 - 1 - math.log(1.5)) / 2,
            "proximal/mean_difference": math.log(3) / 2,
            "proximal/max_difference": math.log(3),
            "weight/mean": 2.0,
            "weight/max": 3.0,
            "weight/effective_share": 16 / 10 / 2,
        },
        rel=1e-5,
    )
    assert "weight/mean" not in token_metrics(outcomes, decoupled=False)


def test_padding_share_by_hand() -> None:
    """29 tokens in 4 rows of 10."""
    returns = [sample.returns for sample in SAMPLES]
    batches = make_minibatches(SAMPLES, returns, PPO(minibatches=1), torch.Generator(), torch.device("cpu"))
    assert padding_share(SAMPLES, batches) == pytest.approx(1 - 29 / 40)
