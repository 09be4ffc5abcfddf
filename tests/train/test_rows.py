"""Rows of a forward pass: the budget holds, no sequence is lost, and every form gives the same logprobs."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import GPT2Config, GPT2LMHeadModel

from configs.score import Reward
from configs.train import PPO
from tasks.train.logprobs import action_logprobs
from tasks.train.passes import score_action_tokens
from tasks.train.rows import Batching, Form, Places, Rows, arrange, batching_for, cut, find_places, pieces
from tasks.train.samples import Sample, build_samples
from tests.support.train_helpers import make_scores, make_trajectory, random_rows, tiny_model

CPU = torch.device("cpu")
TEMPLATE = build_samples([make_trajectory("a", [[9]])], make_scores("a", 1), Reward())[0]
FORMS: list[Form] = ["padded", "packed", "trees"]


def samples_of(lengths: list[int]) -> list[Sample]:
    """Make samples of distinct problems."""
    return [
        replace(TEMPLATE, problem_id=str(index), token_ids=np.ones(length, np.int64))
        for index, length in enumerate(lengths)
    ]


def group(*sequences: list[int]) -> list[Sample]:
    """Make samples of one problem; all their tokens except the first are sampled."""
    return [
        replace(TEMPLATE, trajectory_id=str(index), token_ids=np.array(tokens), actions=np.arange(1, len(tokens)))
        for index, tokens in enumerate(sequences)
    ]


@given(st.lists(st.integers(1, 50), min_size=1, max_size=40), st.integers(1, 600))
def test_padded_passes_keep_the_budget_and_have_few_shapes(lengths: list[int], budget: int) -> None:
    """Rows and columns are multiples of 8 (few rows may be any number); a longer sequence is a pass alone."""
    samples, batching = samples_of(lengths), Batching(budget, CPU)
    parts = cut(samples, pieces(samples, range(len(samples))), batching)
    assert sorted(piece.sample for part in parts for s in part for piece in s.pieces) == list(range(len(lengths)))
    for part in parts:
        rows, columns = arrange(part, batching).tokens.shape
        assert len(part) <= rows
        assert columns % 8 == 1
        assert rows % 8 == 0 or rows < 8
        assert rows == 1 or rows * columns <= budget


@given(st.lists(st.integers(1, 50), min_size=1, max_size=40), st.integers(1, 200))
def test_packed_passes_keep_the_budget(lengths: list[int], budget: int) -> None:
    """The sum of the lengths stays within the budget, and a row is closed only if the next sequence is too long."""
    samples, batching = samples_of(lengths), Batching(budget, CPU, "packed")
    parts = cut(samples, pieces(samples, range(len(samples))), batching)
    assert sorted(piece.sample for part in parts for s in part for piece in s.pieces) == list(range(len(lengths)))
    sums = [arrange(part, batching).tokens.numel() for part in parts]
    assert all(len(part) == 1 or total <= budget for part, total in zip(parts, sums, strict=True))
    assert all(total + part[0].length > budget for total, part in zip(sums, parts[1:], strict=False))


def test_packing_by_hand() -> None:
    """Packed sequences share one row without padding; positions restart, and columns count through the row."""
    samples, batching = group([1, 2, 3, 10], [1, 2, 13]), Batching(9, CPU, "packed")
    (part,) = cut(samples, pieces(samples, [1, 0]), batching)
    rows, places = arrange(part, batching), find_places(part, [np.array([3]), np.array([1, 2])], batching)
    assert rows.tokens.tolist() == [[1, 2, 3, 10, 1, 2, 13]]
    assert rows.positions is not None
    assert rows.positions.tolist() == [[0, 1, 2, 3, 0, 1, 2]]
    assert [each.tolist() for each in places] == [[0, 0, 0], [3, 5, 6], [2, 4, 5]]


def test_a_tree_by_hand() -> None:
    """Common beginnings are in the row once; each token reads those before it in its own sequence, and itself."""
    samples, batching = group([1, 2, 3, 4], [1, 2, 3, 5], [1, 2, 3, 4], [1, 2, 6]), Batching(100, CPU, "trees")
    (part,) = cut(samples, pieces(samples, range(4)), batching)
    chosen = [np.array([2, 3]), np.array([3]), np.array([4]), np.array([1, 2])]
    rows, places = arrange(part, batching), find_places(part, chosen, batching)
    assert rows.tokens.tolist() == [[1, 2, 3, 4, 5, 6, 0, 0, 0]]
    assert rows.positions is not None
    assert rows.positions.tolist() == [[0, 1, 2, 3, 3, 2, 0, 0, 0]]
    assert rows.mask is not None
    reads = [np.flatnonzero(row).tolist() for row in rows.mask[0, 0].numpy()]
    assert reads == [[0], [0, 1], [0, 1, 2], [0, 1, 2, 3], [0, 1, 2, 4], [0, 1, 5], [6], [7], [8]]
    assert places.before.tolist() == [1, 2, 2, 3, 0, 1]  # the third is the place after the last token of 1 2 3 4
    assert places.columns.tolist() == [2, 3, 4, 3, 1, 5]
    assert set(places.rows.tolist()) == {0}


def test_trees_only_where_they_pay() -> None:
    """Groups with little in common, and trees that are too large, keep a row for each sequence."""
    different = group([1, 2, 3], [4, 5, 6])
    same = [replace(sample, problem_id="q") for sample in group([1, 2, 3, 4], [1, 2, 3, 5], [1, 2, 3, 4])]
    samples = [*different, *same]
    parts = cut(samples, pieces(samples, range(5)), Batching(100, CPU, "trees"))
    assert [[len(segment.pieces) for segment in part] for part in parts] == [[3], [1, 1]]
    small = cut(samples, pieces(samples, range(5)), Batching(4, CPU, "trees"))
    assert all(len(segment.pieces) == 1 for part in small for segment in part)


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("budget", [60, 300])
def test_every_form_gives_the_same_logprobs(kind: str, budget: int) -> None:
    """Sequences in one row, or in one tree, do not see each other: each token's logprob is that of its sequence."""
    model = tiny_model(kind)
    samples = build_samples(*random_rows(samples=12, vocabulary=8, longest=4), Reward())
    assert batching_for(model, PPO()).form == "trees"
    trees = cut(samples, pieces(samples, range(len(samples))), Batching(budget, CPU, "trees"))
    assert any(segment.is_tree for part in trees for segment in part)

    def score_tokens(rows: Rows, places: Places) -> torch.Tensor:
        return action_logprobs(model, rows, places, 1.0)[0]

    for form in FORMS:
        logprobs = score_action_tokens(score_tokens, samples, range(len(samples)), Batching(budget, CPU, form))
        for index, sample in enumerate(samples):
            with torch.no_grad():
                logits = model(torch.from_numpy(sample.token_ids)[None]).logits[0].log_softmax(-1)
            expected = logits[sample.actions - 1, sample.token_ids[sample.actions]]
            torch.testing.assert_close(torch.from_numpy(logprobs[index]), expected, atol=1e-5, rtol=0)


def test_trees_need_a_model_that_is_known_to_obey_the_mask() -> None:
    """A model with a sliding window, or of another type, gets a row for each sequence."""
    windowed = tiny_model("qwen2")
    windowed.config.use_sliding_window = True
    assert batching_for(windowed, PPO()).form == "padded"
    other = GPT2LMHeadModel(GPT2Config(vocab_size=9, n_positions=12, n_embd=16, n_layer=1, n_head=2))
    assert batching_for(other, PPO()).form == "padded"
