"""A policy gains nothing by an episode that it ends without a verdict."""

from dataclasses import replace

import numpy as np
import pytest

from configs.score import Reward
from configs.train import Advantage
from storage.records import Score, Status, Trajectory
from tasks.train.advantages import Observed, estimate
from tasks.train.samples import build_samples, with_known_returns
from tests.support.train_helpers import make_scores, make_trajectory

ANSWER, FILL = 10, 11
UPDATES, GROUPS, SIZE, RATE = 100, 16, 8, 2.0
DOUBT = 0.5
"""Share of the episodes in which the policy feels that it will be wrong."""
LUCK = 0.4
"""Chance that an answer in doubt is right all the same; an answer without doubt always is."""


def learned(reward: Reward, status: Status) -> float:
    """Train a policy that chooses, in doubt or not, to answer or to end the episode; return its chance to end in doubt.

    An episode that it ends has one turn, which nobody graded, as agents of the endpoint record it.
    """
    logits, draw = np.full(2, np.log(0.05 / 0.95)), np.random.default_rng(0)
    for _ in range(UPDATES):
        doubts, fills, rows, scores = _played(1 / (1 + np.exp(-logits)), draw, status)
        samples = with_known_returns(build_samples(rows, scores, reward))
        observed = [Observed(np.zeros(len(sample.actions))) for sample in samples]
        advantages = estimate(samples, observed, Advantage()).advantages
        for sample, advantage in zip(samples, advantages, strict=True):
            number, chances = int(sample.trajectory_id), 1 / (1 + np.exp(-logits))
            doubt = int(doubts[number])
            logits[doubt] += RATE * advantage[0] * (fills[number] - chances[doubt]) / len(samples)
    return float(1 / (1 + np.exp(-logits[1])))


def _played(
    chances: np.ndarray, draw: np.random.Generator, status: Status
) -> tuple[np.ndarray, np.ndarray, list[Trajectory], list[Score]]:
    """Play an iteration; `chances` are those to end an episode without doubt, and with it."""
    doubts = draw.random(GROUPS * SIZE) < DOUBT
    fills = draw.random(len(doubts)) < chances[doubts.astype(int)]
    right = ~doubts | (draw.random(len(doubts)) < LUCK)
    rows, scores = [], list[Score]()
    for number, fill in enumerate(fills):
        name, problem = f"{number:06d}", str(number // SIZE)
        if fill:
            row = make_trajectory(name, [[FILL]], problem=problem, status=status, reason="no room in the context")
            rows.append(replace(row, fault="policy", ungraded=[0]))
            scores.append(Score(name, 0, "none", 0.0, "", "", "", 0.0))
        else:
            rows.append(make_trajectory(name, [[ANSWER]], problem=problem))
            scores += make_scores(name, float(right[number]))
    return doubts, fills, rows, scores


@pytest.mark.parametrize("status", ["truncated", "failed"])
def test_a_policy_does_not_learn_to_end_episodes_without_a_verdict(status: Status) -> None:
    """If such episodes are left out, a policy that feels that it will be wrong learns to fill the context."""
    assert learned(Reward(unfinished="leave-out"), status) > 0.9
    assert learned(Reward(), status) < 0.02
