"""Test which group baseline a policy learns most from, on toys whose episodes differ in their numbers of turns.

python -m tests.experiments.baselines            three toys, twelve seeds, 60 updates each: some 5 minutes
python -m tests.experiments.baselines --seeds 1

Prints a table: the mean return over all updates, and the difference to the baseline `turn`, paired by seed.
"""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from configs.algorithm_parts import Advantage
from configs.score import Reward
from tasks.train.advantages import Observed, estimate
from tasks.train.samples import Floats, Sample, build_samples
from tests.support.train_helpers import make_scores, make_trajectory

BASELINES = ("turn", "episode", "mixed")
Step = tuple[int, int, float]
"""A state, the action that was taken in it, and the reward."""
Play = Callable[[Floats, np.random.Generator, int], list[Step]]
"""Plays an episode with action probabilities [S, V] on a variant of the toy."""
_HOLES = ({5, 7, 11, 12}, {1, 6, 9}, {4, 6, 13}, {2, 8, 10})


@dataclass(frozen=True, slots=True)
class Toy:
    """A toy with `variants`, which are its problems."""

    name: str
    start: Floats  # [S, V], the logits of the first policy
    variants: int
    play: Play


def call(policy: Floats, draw: np.random.Generator, variant: int) -> list[Step]:
    """Answer, right with probability 0, 0.1 or 0.3, or call a tool; after three calls or more 0.95 are right."""
    steps: list[Step] = []
    for turn in range(9):
        if draw.random() < policy[turn, 0]:
            right = draw.random() < (0.95 if turn >= 3 else (0.0, 0.1, 0.3)[variant])
            return [*steps, (turn, 0, 1.0 if right else -1.0)]
        steps.append((turn, 1, 0.0 if turn < 8 else -1.0))
    return steps


def walk(policy: Floats, draw: np.random.Generator, variant: int) -> list[Step]:
    """Walk over 4 x 4 fields from one corner to the other: 1 for the goal, -1 for a hole or 20 steps without an end."""
    steps: list[Step] = []
    row = column = 0
    while True:
        field = 4 * row + column
        if steps and (field == 15 or field in _HOLES[variant] or len(steps) == 20):
            state, action, _ = steps[-1]
            return [*steps[:-1], (state, action, 1.0 if field == 15 else -1.0)]
        action = draw.choice(4, p=policy[16 * variant + field])
        steps.append((16 * variant + field, int(action), 0.0))
        row = min(3, max(0, row + (-1, 1, 0, 0)[action]))
        column = min(3, max(0, column + (0, 0, -1, 1)[action]))


def add(policy: Floats, draw: np.random.Generator, variant: int) -> list[Step]:
    """Answer one of ten, up to twice, with 1 for the right answer and -1 for others, as `math-multi-turn` does."""
    steps: list[Step] = []
    for state in (variant, 8 + variant):
        action = int(draw.choice(10, p=policy[state]))
        steps.append((state, action, 1.0 if action == variant else -1.0))
        if action == variant:
            break
    return steps


def toys() -> list[Toy]:
    rare = np.tile([np.log(9.0), 0.0], (9, 1))
    sums = np.random.default_rng(5).normal(size=(16, 10))
    return [Toy("tool", rare, 3, call), Toy("game", np.zeros((64, 4)), 4, walk), Toy("sums", sums, 8, add)]


def learn(toy: Toy, baseline: str, group_size: int, seed: int, updates: int = 60, problems: int = 8) -> float:
    """Train a table of logits with Adam and normalised advantages; return the mean return over all updates."""
    draw, logits = np.random.default_rng(seed), toy.start.copy()
    first, second, means = np.zeros_like(logits), np.zeros_like(logits), []
    knobs = Advantage.model_validate({"baseline": baseline})
    for update in range(1, updates + 1):
        policy = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
        episodes = [
            toy.play(policy, draw, variant)
            for variant in draw.integers(toy.variants, size=problems)
            for _ in range(group_size)
        ]
        means.append(np.mean([sum(reward for _, _, reward in steps) for steps in episodes]))
        gradient = _gradient(policy, episodes, knobs, group_size)
        first, second = 0.9 * first + 0.1 * gradient, 0.95 * second + 0.05 * gradient**2
        logits = logits + 0.1 * first / (1 - 0.9**update) / (np.sqrt(second / (1 - 0.95**update)) + 1e-3)
    return float(np.mean(means))


def _gradient(policy: Floats, episodes: Sequence[Sequence[Step]], knobs: Advantage, group_size: int) -> Floats:
    """Compute the policy gradient [S, V], the mean over all steps."""
    samples = _samples(episodes, group_size)
    observed = [Observed(np.zeros(len(sample.actions))) for sample in samples]
    advantages = np.concatenate(estimate(samples, observed, knobs).advantages)
    states, actions = np.array([step[:2] for steps in episodes for step in steps]).T
    gradient = np.zeros_like(policy)
    np.add.at(gradient, (states, actions), advantages)
    np.add.at(gradient, states, -advantages[:, None] * policy[states])
    return gradient / len(states)


def _samples(episodes: Sequence[Sequence[Step]], group_size: int) -> list[Sample]:
    """Make a sample of each episode, with one token for each step."""
    rows, scores = [], []
    for number, steps in enumerate(episodes):
        name = f"{number:06d}"
        rows.append(make_trajectory(name, [[10]] * len(steps), problem=str(number // group_size)))
        scores += make_scores(name, *[reward for _, _, reward in steps])
    return build_samples(rows, scores, Reward(shape="raw"))


def table(seeds: int) -> str:
    lines = ["| toy, group size | " + " | ".join(BASELINES) + " |", "|---" * (1 + len(BASELINES)) + "|"]
    for toy in toys():
        for group_size in (8, 16):
            means = {
                name: np.array([learn(toy, name, group_size, seed, problems=64 // group_size) for seed in range(seeds)])
                for name in BASELINES
            }
            cells = [_cell(means[name], means["turn"]) for name in BASELINES]
            lines.append(f"| {toy.name}, {group_size} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _cell(means: Floats, others: Floats) -> str:
    difference = means - others
    if not difference.any():
        return f"{means.mean():.3f}"
    return f"{means.mean():.3f} ({difference.mean():+.3f} ± {difference.std() / np.sqrt(len(difference)):.3f})"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, default=12)
    print(table(parser.parse_args().seeds))
