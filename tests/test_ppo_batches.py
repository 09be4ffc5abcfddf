"""Batches: whole groups, random, nothing lost and little padding."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from configs.schema import PPO, Reward
from tasks.ppo.advantages import turn_advantages
from tasks.ppo.batches import collate, cut_by_length, draw_minibatches, make_minibatches
from tasks.ppo.samples import build_samples
from tests.ppo_helpers import make_scores, make_trajectory, random_rows


def test_minibatches_hold_whole_groups_and_everything_once() -> None:
    """A group split over two optimizer steps would be compared with a baseline it no longer has."""
    samples = build_samples(*random_rows(problems=7, samples=3), Reward())
    parts = draw_minibatches(samples, 3, torch.Generator().manual_seed(0))
    problems = [{samples[index].problem_id for index in part} for part in parts]
    assert sorted(index for part in parts for index in part) == list(range(21))
    assert sum(len(group) for group in problems) == 7
    assert [len(group) for group in problems] == [3, 2, 2]


def test_minibatches_are_random_and_repeatable() -> None:
    """The generator alone decides: the same state draws the same, the next draw another."""
    samples = build_samples(*random_rows(problems=9, samples=2), Reward())
    generator = torch.Generator().manual_seed(0)
    first, second = (draw_minibatches(samples, 3, generator) for _ in range(2))
    assert first != second
    assert first == draw_minibatches(samples, 3, torch.Generator().manual_seed(0))


def test_fewer_groups_than_minibatches_give_fewer_steps() -> None:
    """A small batch after filtering makes no empty optimizer step."""
    samples = build_samples(*random_rows(problems=2, samples=2), Reward())
    assert len(draw_minibatches(samples, 4, torch.Generator())) == 2


@given(st.lists(st.integers(1, 50), min_size=1, max_size=40), st.integers(1, 200))
def test_micro_batches_keep_the_budget(lengths: list[int], budget: int) -> None:
    """Padded tokens never exceed the budget, but a sample that alone does is kept, alone; none is lost."""
    parts = cut_by_length(lengths, range(len(lengths)), budget)
    assert sorted(index for part in parts for index in part) == list(range(len(lengths)))
    assert all(len(part) == 1 or len(part) * max(lengths[i] for i in part) <= budget for part in parts)


def test_collate_by_hand() -> None:
    """Right padding, coordinates of the action tokens, and each turn's advantage on its own tokens."""
    rows = [make_trajectory("a", [[10, 11], [12]]), make_trajectory("b", [[13]])]
    samples = build_samples(rows, make_scores("a", 0, 1) + make_scores("b", 1), Reward())
    batch = collate(samples, [np.array([0.5, -2.0]), np.array([3.0])], torch.device("cpu"))
    assert batch.tokens.tolist() == [[1, 2, 3, 10, 11, 4, 5, 12], [1, 2, 3, 13, 0, 0, 0, 0]]
    assert list(zip(batch.rows.tolist(), batch.columns.tolist(), strict=True)) == [(0, 3), (0, 4), (0, 7), (1, 3)]
    assert batch.advantages.tolist() == [0.5, 0.5, -2.0, 3.0]
    assert batch.advantages.dtype == batch.behaviour.dtype == torch.float32


def test_make_minibatches_covers_every_action_token() -> None:
    """What the optimizer sees is what was stored, once."""
    samples = build_samples(*random_rows(), Reward())
    advantages = turn_advantages(samples, PPO().advantage)
    knobs = PPO(minibatches=2, micro_batch_tokens=40)
    batches = make_minibatches(samples, advantages, knobs, torch.Generator().manual_seed(0), torch.device("cpu"))
    tokens = [batch.tokens[batch.rows, batch.columns] for minibatch in batches for batch in minibatch]
    stored = np.concatenate([sample.token_ids[sample.actions] for sample in samples])
    assert sorted(torch.cat(tokens).tolist()) == sorted(stored.tolist())
    assert len(batches) == 2
    assert len(batches[0]) > 1
