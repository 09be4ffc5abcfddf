"""Minibatches and the rows of forward passes: no token is lost, and every form and chunk gives the same logprobs."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedModel

from configs.score import Reward
from configs.train import PPO
from tasks.train.batches import Columns, draw_minibatches, make_minibatch
from tasks.train.passes import action_logprobs, hidden_states, read_out, score_action_tokens
from tasks.train.rows import Batching, Form, Places, Rows, arrange, batching_for, cut, find_places, find_tree, pieces
from tasks.train.samples import Sample, build_samples
from tests.support.train_helpers import VOCABULARY, make_scores, make_trajectory, random_rows, tiny_model

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


SEQUENCES = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=12), min_size=1, max_size=10)


@given(SEQUENCES)
def test_every_beginning_is_in_the_tree_once(sequences: list[list[int]]) -> None:
    """The paths lead through the sequences' tokens, and two paths share a token where their beginnings are equal."""
    tree = find_tree(map(np.array, sequences), most=1000)
    assert tree is not None
    assert [tree.tokens[path].tolist() for path in tree.paths] == sequences
    beginnings = {tuple(sequence[: end + 1]) for sequence in sequences for end in range(len(sequence))}
    assert len(tree.tokens) == len(beginnings)
    places = {
        (tuple(sequence[: end + 1]), path[end])
        for sequence, path in zip(sequences, tree.paths, strict=True)
        for end in range(len(sequence))
    }
    assert len(places) == len(beginnings)
    assert all((np.diff(path) > 0).all() for path in tree.paths)


@given(SEQUENCES, st.integers(0, 60))
def test_a_tree_that_is_too_large_is_none(sequences: list[list[int]], most: int) -> None:
    whole = find_tree(map(np.array, sequences), most=1000)
    assert whole is not None
    assert (find_tree(map(np.array, sequences), most) is None) == (len(whole.tokens) > most)


TOKENS = torch.randint(0, VOCABULARY, (3, 12), generator=torch.Generator().manual_seed(5))
LENGTHS = torch.tensor([12, 7, 9])
ROWS = torch.tensor([0, 0, 0, 0, 1, 1, 2, 2])
COLUMNS = torch.tensor([1, 5, 6, 11, 4, 6, 7, 8])


def padded() -> torch.Tensor:
    return TOKENS * (torch.arange(12) < LENGTHS[:, None])


def full_logits(model: PreTrainedModel, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute logprobs and entropies the plain way, with all logits and an attention mask."""
    mask = (torch.arange(12) < LENGTHS[:, None]).long()
    logprobs = (model(input_ids=padded(), attention_mask=mask).logits / temperature).log_softmax(-1)
    chosen = logprobs[ROWS, COLUMNS - 1]
    return chosen.gather(-1, TOKENS[ROWS, COLUMNS][:, None])[:, 0], -(chosen.exp() * chosen).sum(-1)


@pytest.mark.parametrize("chunk", [3, 8])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize(("kind", "tied"), [("qwen3", False), ("qwen3", True), ("qwen2", False)])
def test_equals_the_full_logits(
    kind: str, tied: bool, temperature: float, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Values, entropies and gradients equal those of log_softmax(model(...).logits) for any chunk size."""
    monkeypatch.setattr("tasks.train.passes.CHUNK_TOKENS", chunk)
    model = tiny_model(kind, tied)
    logp, entropy = action_logprobs(model, Rows(padded()), Places.padded(ROWS, COLUMNS), temperature)
    expected, expected_entropy = full_logits(model, temperature)
    torch.testing.assert_close(logp, expected, atol=1e-5, rtol=0)
    torch.testing.assert_close(entropy, expected_entropy, atol=1e-5, rtol=0)
    assert not entropy.requires_grad
    weights = torch.arange(1.0, 9.0)
    parameters = list(model.parameters())
    ours = torch.autograd.grad((logp * weights).sum(), parameters)
    theirs = torch.autograd.grad((expected * weights).sum(), parameters)
    for actual, wanted in zip(ours, theirs, strict=True):
        torch.testing.assert_close(actual, wanted, atol=1e-4, rtol=1e-4)


def test_a_padded_batch_may_be_wider_than_the_context() -> None:
    """A critic reads the place after the last token. Padding beyond the model's context is not fed to the model."""
    model = GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, n_positions=12, n_embd=16, n_layer=1, n_head=2)).eval()
    wider = torch.nn.functional.pad(padded(), (0, 5))
    expected = hidden_states(model, Rows(padded()), with_last=True)
    torch.testing.assert_close(hidden_states(model, Rows(wider), with_last=True), expected)


def test_autocast_does_not_round_the_logits() -> None:
    """The output layer stays in float32: rounding large logits by 2^-8 would make wrong logprobs."""
    head, generator = torch.nn.Linear(64, VOCABULARY, bias=False), torch.Generator().manual_seed(1)
    states, targets = 20 * torch.randn(100, 64, generator=generator), torch.arange(100) % VOCABULARY
    with torch.autocast("cpu", torch.bfloat16):
        logp, _ = read_out(head, states, targets, 1.0)
    expected = (states.double() @ head.weight.double().T).log_softmax(-1).gather(-1, targets[:, None])[:, 0]
    torch.testing.assert_close(logp.double(), expected, atol=1e-4, rtol=0)


def test_full_vocabulary_logits_exist_for_one_chunk_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """The output layer gets one chunk at a time, and autograd keeps no tensor of vocabulary width."""
    monkeypatch.setattr("tasks.train.passes.CHUNK_TOKENS", 3)
    model, sizes, kept = tiny_model(), [], []
    model.lm_head.register_forward_hook(lambda _, __, logits: sizes.append(logits.shape))

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor.shape)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        action_logprobs(model, Rows(padded()), Places.padded(ROWS, COLUMNS), 1.0)
    assert sizes == [(3, VOCABULARY), (3, VOCABULARY), (2, VOCABULARY)]
    assert not [shape for shape in kept if shape[-1:] == (VOCABULARY,) and shape[0] <= 8]
