"""Members of a mixture share the learning by their weights, whatever they are paid and however long they answer."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from configs import load
from configs.algorithms import NAMES
from configs.score import Reward
from storage.records import Score
from tasks.metrics.show import cells
from tasks.train.algorithms.algorithm import shared_out
from tasks.train.samples import Sample, build_samples
from tests.support.train_helpers import make_scores, make_trainer, make_trajectory, random_rows, save_tiny
from tests.train.test_algorithms import assigned


@dataclass(frozen=True)
class Kind:
    """The episodes of a member: rewards between `low` and `high`, right above their middle."""

    low: float = -1.0
    high: float = 1.0
    tokens: int = 8
    verdicts: bool = True  # rewards are `low` or `high`
    rate: float = 0.5  # of right ones

    def scores(self, names: Sequence[str], draw: np.random.Generator) -> list[Score]:
        at = draw.random(len(names))
        right = at > 1 - self.rate
        rewards = self.low + (self.high - self.low) * (right if self.verdicts else at)
        scores = [score for name, ok in zip(names, right.tolist(), strict=True) for score in make_scores(name, ok)]
        return [replace(score, reward=reward) for score, reward in zip(scores, rewards.tolist(), strict=True)]


VERDICTS = Kind()
CASES = {
    "verdicts and a judge": (VERDICTS, Kind(0.0, verdicts=False)),
    "verdicts and a game of 0 to 100": (VERDICTS, Kind(0.0, 100.0, verdicts=False)),
    "answers of 256 tokens and of 8": (Kind(tokens=256), VERDICTS),
}
"""Two members with equal weights; without shares they had 0.67, 0.09 and 0.94 of the advantages, and the rest."""


def mixture(*members: Kind, problems: Sequence[int] = (12, 12), shares: bool = True) -> list[Sample]:
    """Make groups of eight episodes of one turn."""
    draw, samples = np.random.default_rng(1), list[Sample]()
    for number, (kind, count) in enumerate(zip(members, problems, strict=True)):
        rows = [
            make_trajectory(f"m{number}-{n:03}", [[10] * kind.tokens], problem=f"m{number}/{n // 8}", logprob=-0.5)
            for n in range(8 * count)
        ]
        made = build_samples(rows, kind.scores([row.trajectory_id for row in rows], draw), Reward(shape="raw"))
        samples += [replace(sample, member=f"m{number}" if shares else "") for sample in made]
    return samples


def sizes(name: str, samples: Sequence[Sample], **knobs: Any) -> list[float]:
    """Return the share of each member in the sum of |weight x advantage|, or of |weight| in the cross-entropy."""
    found, of_each = shared_out(samples, assigned(name, samples, **knobs)), Counter[str]()
    for place, sample in enumerate(samples):
        values = found.weights["rl" if "rl" in found.weights else "ce"][place]
        values = values * found.advantages[place] if "rl" in found.weights else values
        of_each[sample.problem_id[:2]] += np.abs(values).sum()
    return [size / of_each.total() for _, size in sorted(of_each.items())]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", sorted(set(NAMES) - {"opd"}))
def test_equal_weights_have_equal_shares(name: str, case: str) -> None:
    """Each algorithm, whose own normalisation may know nothing of members."""
    assert sizes(name, mixture(*CASES[case])) == pytest.approx([0.5, 0.5], abs=0.1)


def test_shares_are_those_of_the_problems() -> None:
    """Weights of 2, 1 and 1 draw as many problems, and share the learning as much."""
    members = (VERDICTS, Kind(0.0, 100.0, verdicts=False), Kind(tokens=64))
    assert sizes("ppo", mixture(*members, problems=(24, 12, 12))) == pytest.approx([0.5, 0.25, 0.25], abs=0.05)


def test_a_member_that_is_solved_leaves_the_learning_to_the_others() -> None:
    """Without any difference it has no share, and the few wrong answers of 96 do not get half of the gradient."""
    assert sizes("dr_grpo", mixture(VERDICTS, Kind(rate=1.0))) == [1.0, 0.0]
    assert 0.0 < sizes("dr_grpo", mixture(VERDICTS, Kind(rate=0.97)))[1] < 0.4


def test_a_mixture_is_normalised_as_each_member_alone() -> None:
    """REINFORCE++ takes the mean over the batch for a baseline: rewards of 0 to 100 make all verdicts bad ones."""
    both = mixture(VERDICTS, Kind(0.0, 100.0, verdicts=False))
    alone = [sample for sample in both if sample.member == "m0"]
    for name in ("reinforce_pp", "ppo"):
        expected, found = (np.concatenate(assigned(name, samples).advantages) for samples in (alone, both))
        assert found[: len(expected)] == pytest.approx(expected)


@pytest.mark.parametrize("name", ["ppo", "rft", "dpo", "kto"])
def test_the_log_shows_each_members_share_of_the_gradient(tmp_path: Path, name: str) -> None:
    """By the gradients of the tokens' logprobs; but not for a single source."""
    rows, scores = random_rows()
    mixed = [replace(row, source="sums" if row.problem_id in ("p0", "p1") else "game") for row in rows]
    found = []
    for is_mixture in (True, False):
        problems: dict[str, Any] = {"problems": load("demo-mix").problems} if is_mixture else {}
        trainer = make_trainer(save_tiny(tmp_path), type=name, **problems)
        metrics = trainer.update(mixed, scores, version=2)
        found.append([metrics[f"source/{member}/gradient_share"] for member in ("sums", "game")])
        assert sum(found[-1]) == pytest.approx(1)
    assert found[0] != found[1]
    assert abs(found[0][0] - 0.5) < 0.25
    row = {"source/sums/success/any_turn": 0.25, "source/sums/gradient_share": found[0][0]}
    assert cells(row) == {"sums": "0.250", "sums gradient": f"{found[0][0]:.3f}"}
    assert not any(key.startswith("source/") for key in trainer.update(rows, scores, version=2))
