"""Batches: groups stay whole, the order is random, and no token is lost."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from configs.score import Reward
from tasks.train.batches import Columns, draw_minibatches, make_minibatch
from tasks.train.logprobs import targets_of
from tasks.train.rows import Batching, Form
from tasks.train.samples import build_samples
from tests.support.train_helpers import make_scores, make_trajectory, random_rows

BATCHING = Batching(100, torch.device("cpu"))


def test_minibatches_hold_whole_groups_and_everything_once() -> None:
    """Minibatches never split a group, whose baseline belongs to the whole, and hold every sample once."""
    samples = build_samples(*random_rows(problems=7, samples=3), Reward())
    parts = draw_minibatches(samples, 3, torch.Generator().manual_seed(0))
    problems = [{samples[index].problem_id for index in part} for part in parts]
    assert sorted(index for part in parts for index in part) == list(range(21))
    assert sum(len(group) for group in problems) == 7
    assert [len(group) for group in problems] == [3, 2, 2]


def test_minibatches_are_random_and_repeatable() -> None:
    """The generator's state alone decides: the same state draws the same minibatches, the next draw differs."""
    samples = build_samples(*random_rows(problems=9, samples=2), Reward())
    generator = torch.Generator().manual_seed(0)
    first, second = (draw_minibatches(samples, 3, generator) for _ in range(2))
    assert first != second
    assert first == draw_minibatches(samples, 3, torch.Generator().manual_seed(0))


def test_fewer_groups_than_minibatches_give_fewer_steps() -> None:
    """A batch that is small after filtering makes no empty optimizer step."""
    samples = build_samples(*random_rows(problems=2, samples=2), Reward())
    assert len(draw_minibatches(samples, 4, torch.Generator())) == 2


def test_collate_by_hand() -> None:
    """A batch has right padding, coordinates of the action tokens, and the columns of each token."""
    rows = [make_trajectory("a", [[10, 11], [12]]), make_trajectory("b", [[13]])]
    samples = build_samples(rows, make_scores("a", 0, 1) + make_scores("b", 1), Reward())
    columns = [
        Columns(np.array([0.5, 0.5, -2.0]), reference=np.array([-1, -2, -3], np.float32)),
        Columns(np.array([3.0]), reference=np.array([-4], np.float32)),
    ]
    (batch,) = make_minibatch(samples, columns, [1, 0], BATCHING)
    assert [samples[index].trajectory_id for index in batch.samples.unique()] == ["a", "b"]
    assert batch.rows.tokens.tolist() == [[1, 2, 3, 10, 11, 4, 5, 12, 0], [1, 2, 3, 13, 0, 0, 0, 0, 0]]
    assert list(zip(batch.places.rows.tolist(), batch.places.columns.tolist(), strict=True)) == [
        (0, 3),
        (0, 4),
        (0, 7),
        (1, 3),
    ]
    assert batch.advantages.tolist() == [0.5, 0.5, -2.0, 3.0]
    assert batch.reference is not None
    assert batch.reference.tolist() == [-1, -2, -3, -4]
    assert (batch.proximal, batch.values, batch.returns) == (None, None, None)
    assert batch.advantages.dtype == batch.behaviour.dtype == batch.reference.dtype == torch.float32


def test_sequences_of_a_trajectory_are_rows_of_their_own() -> None:
    """If a template rewrote the history, the second turn must not attend to the old text."""
    row = make_trajectory("a", [[10, 11], [12]])
    row = replace(row, sequence_starts=[0, 5])  # 1 2 3 10 11 | 4 5 12
    samples = build_samples([row], make_scores("a", 0, 1), Reward())
    (batch,) = make_minibatch(samples, [Columns(np.array([1.0, 2.0, 3.0]))], [0], BATCHING)
    assert batch.rows.tokens.tolist() == [[1, 2, 3, 10, 11, 0, 0, 0, 0], [4, 5, 12, 0, 0, 0, 0, 0, 0]]
    assert list(zip(batch.places.rows.tolist(), batch.places.columns.tolist(), strict=True)) == [(0, 3), (0, 4), (1, 2)]
    assert batch.advantages.tolist() == [1.0, 2.0, 3.0]


@pytest.mark.parametrize("form", ["packed", "trees"])
def test_tokens_that_share_a_row_keep_their_sequences(form: Form) -> None:
    """Weights of whole sequences need to know which tokens belong together; each token has its own advantage."""
    rows = [make_trajectory("a", [[10, 11]]), make_trajectory("b", [[10]]), make_trajectory("c", [[10, 11]])]
    samples = build_samples(rows, [score for row in rows for score in make_scores(row.trajectory_id, 1)], Reward())
    columns = [Columns(np.array([0.5, 0.6])), Columns(np.array([3.0])), Columns(np.array([0.7, 0.8]))]
    (batch,) = make_minibatch(samples, columns, range(3), replace(BATCHING, form=form))
    assert len(batch.rows.tokens) == 1
    of_sequence = [
        (samples[index].trajectory_id, round(advantage, 1), target)
        for index, advantage, target in zip(
            batch.samples.tolist(),
            batch.advantages.tolist(),
            targets_of(batch.rows, batch.places).tolist(),
            strict=True,
        )
    ]
    assert sorted(of_sequence) == [("a", 0.5, 10), ("a", 0.6, 11), ("b", 3.0, 10), ("c", 0.7, 10), ("c", 0.8, 11)]


def test_masked_turns_are_in_no_batch() -> None:
    """Turns cut by the token limit are left out; a sequence of only such turns is not passed to the model."""
    rows = [make_trajectory("a", [[10, 11], [12]]), make_trajectory("b", [[13]])]
    cut = [replace(rows[0], turns=[rows[0].turns[0], replace(rows[0].turns[1], finish_reason="length")])]
    cut.append(replace(rows[1], turns=[replace(rows[1].turns[0], finish_reason="length")]))
    samples = build_samples(cut, make_scores("a", 0, 1) + make_scores("b", 1), Reward(), mask_truncated=True)
    columns = [Columns(np.zeros(len(sample.actions))) for sample in samples]
    (batch,) = make_minibatch(samples, columns, [0, 1], BATCHING)
    assert [samples[index].trajectory_id for index in batch.samples.unique()] == ["a"]
    assert batch.places.columns.tolist() == [3, 4]
    assert make_minibatch(samples, columns, [1], BATCHING) == []


def test_a_minibatch_covers_every_action_token() -> None:
    """The micro-batches of a minibatch contain every stored action token exactly once."""
    samples = build_samples(*random_rows(), Reward())
    columns = [Columns(np.zeros(len(sample.actions))) for sample in samples]
    batches = make_minibatch(samples, columns, range(len(samples)), Batching(40, BATCHING.device))
    tokens = [targets_of(batch.rows, batch.places) for batch in batches]
    stored = np.concatenate([sample.token_ids[sample.actions] for sample in samples])
    assert sorted(torch.cat(tokens).tolist()) == sorted(stored.tolist())
    assert len(batches) > 1
