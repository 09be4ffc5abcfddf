"""Minibatches and the rows of forward passes: no token is lost, and rows, trees and chunks give the same logprobs."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import GPT2Config, GPT2LMHeadModel

from configs.score import Reward
from configs.train import Train
from tasks.train.batches import (
    Batching,
    Columns,
    Places,
    Rows,
    arrange,
    batching_for,
    cut,
    draw_minibatches,
    find_tree,
    make_minibatch,
    pieces,
)
from tasks.train.passes import (
    action_logprobs,
    float32_logits,
    hidden_states,
    logprob_scorer,
    read_out,
    score_action_tokens,
)
from tasks.train.samples import Sample, build_samples
from tests.support.train_helpers import VOCABULARY, make_scores, make_trajectory, random_rows, tiny_model

CPU = torch.device("cpu")
BATCHING, TREES = Batching(100, CPU), Batching(100, CPU, trees=True)


def test_minibatches_hold_whole_groups_and_everything_once() -> None:
    """The generator's state alone decides. A batch that is small after filtering makes no empty optimizer step."""
    samples, generator = build_samples(*random_rows(problems=7, samples=3), Reward()), torch.Generator().manual_seed(0)
    drawn, following = (draw_minibatches(samples, 3, generator) for _ in range(2))
    assert sorted(index for minibatch in drawn for index in minibatch) == list(range(21))
    assert [len({samples[index].problem_id for index in minibatch}) for minibatch in drawn] == [3, 2, 2]
    assert drawn != following
    assert drawn == draw_minibatches(samples, 3, torch.Generator().manual_seed(0))
    assert len(draw_minibatches(samples[:6], 4, generator)) == 2


def test_masked_turns_are_in_no_batch() -> None:
    """Turns cut by the token limit are left out; a sequence of only such turns is not passed to the model."""
    rows = [make_trajectory("a", [[10, 11], [12]], finish_reason="length")]
    rows.append(make_trajectory("b", [[13]], finish_reason="length"))
    samples = build_samples(rows, make_scores("a", 0, 1) + make_scores("b", 1), Reward(), mask_truncated=True)
    columns = [Columns(np.zeros(len(sample.actions)), {"rl": np.ones(len(sample.actions))}) for sample in samples]
    (batch,) = make_minibatch(samples, columns, [0, 1], BATCHING)
    assert (batch.samples.tolist(), batch.places.columns.tolist()) == ([0, 0], [3, 4])
    assert make_minibatch(samples, columns, [1], BATCHING) == []


TEMPLATE = build_samples([make_trajectory("a", [[9]])], make_scores("a", 1), Reward())[0]


def group(*sequences: list[int]) -> list[Sample]:
    """Make samples of one problem; all their tokens except the first are sampled."""
    return [
        replace(TEMPLATE, trajectory_id=str(index), token_ids=np.array(tokens), actions=np.arange(1, len(tokens)))
        for index, tokens in enumerate(sequences)
    ]


@given(st.lists(st.integers(1, 50), min_size=1, max_size=40), st.integers(1, 600))
def test_passes_keep_the_budget_and_have_few_shapes(lengths: list[int], budget: int) -> None:
    """Rows and columns are multiples of 8 (few rows may be any number); a longer sequence is a pass alone."""
    samples, batching = group(*([1] * length for length in lengths)), Batching(budget, CPU)
    passes = cut(samples, pieces(samples, range(len(samples))), batching)
    assert sorted(piece.sample for part in passes for s in part for piece in s.pieces) == list(range(len(lengths)))
    for segments in passes:
        rows, columns = arrange(segments, batching).tokens.shape
        assert len(segments) <= rows
        assert columns % 8 == 1
        assert rows % 8 == 0 or rows < 8
        assert rows == 1 or rows * columns <= budget


def test_trees_only_where_they_pay() -> None:
    """Groups with little in common, and trees that are too large, keep a row for each sequence."""
    different = group([1, 2, 3], [4, 5, 6])
    same = [replace(sample, problem_id="q") for sample in group([1, 2, 3, 4], [1, 2, 3, 5], [1, 2, 3, 4])]
    samples = [*different, *same]
    parts = cut(samples, pieces(samples, range(5)), TREES)
    assert [[len(segment.pieces) for segment in part] for part in parts] == [[3], [1, 1]]
    small = cut(samples, pieces(samples, range(5)), replace(TREES, budget=4))
    assert all(len(segment.pieces) == 1 for part in small for segment in part)


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
def test_rows_and_trees_give_the_same_logprobs(kind: str) -> None:
    """Sequences in one tree do not see each other: a logprob is that of its sequence alone."""
    model = tiny_model(kind)
    samples = build_samples(*random_rows(samples=12, vocabulary=8, longest=4), Reward())
    assert batching_for(model, Train()).trees
    trees = replace(TREES, budget=60)
    passes = cut(samples, pieces(samples, range(len(samples))), trees)
    assert any(segment.is_tree for segments in passes for segment in segments)
    for batching in (trees, replace(trees, trees=False)):
        logprobs = score_action_tokens(logprob_scorer(model, 1.0), samples, range(len(samples)), batching)
        for index, sample in enumerate(samples):
            with torch.no_grad():
                logits = model(torch.from_numpy(sample.token_ids)[None]).logits[0].log_softmax(-1)
            expected = logits[sample.actions - 1, sample.token_ids[sample.actions]]
            torch.testing.assert_close(torch.from_numpy(logprobs[index]), expected, atol=1e-5, rtol=0)


def test_trees_need_a_model_that_is_known_to_obey_the_mask() -> None:
    """A model with a sliding window, or of another type, gets a row for each sequence."""
    windowed = tiny_model("qwen2", use_sliding_window=True)
    assert not any(batching_for(model, Train()).trees for model in (windowed, gpt2()))


def gpt2() -> GPT2LMHeadModel:
    return GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, n_positions=12, n_embd=16, n_layer=1, n_head=2))


@given(st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=12), min_size=1, max_size=10), st.integers(0, 60))
def test_every_beginning_is_in_the_tree_once(sequences: list[list[int]], most: int) -> None:
    """The paths lead through the sequences' tokens, and two paths share a token where their beginnings are equal."""
    tree = find_tree(map(np.array, sequences), most=1000)
    assert tree is not None
    tokens, paths = tree
    assert [tokens[path].tolist() for path in paths] == sequences
    beginnings = {
        (tuple(sequence[: end + 1]), path[end])
        for sequence, path in zip(sequences, paths, strict=True)
        for end in range(len(sequence))
    }
    assert len(tokens) == len(beginnings) == len({beginning for beginning, _ in beginnings})
    assert all((np.diff(path) > 0).all() for path in paths)
    assert (find_tree(map(np.array, sequences), most) is None) == (len(tokens) > most)


TOKENS = torch.randint(0, VOCABULARY, (3, 12), generator=torch.Generator().manual_seed(5))
PADDED = Rows(TOKENS * (torch.arange(12) < torch.tensor([[12], [7], [9]])))
ROWS = torch.tensor([0, 0, 0, 0, 1, 1, 2, 2])
COLUMNS = torch.tensor([1, 5, 6, 11, 4, 6, 7, 8])


def test_a_padded_batch_may_be_wider_than_the_context() -> None:
    """A critic reads the place after the last token. Padding beyond the model's context is not fed to the model."""
    model, wider = gpt2().eval(), Rows(torch.nn.functional.pad(PADDED.tokens, (0, 5)))
    expected = hidden_states(model, PADDED, with_last=True)
    torch.testing.assert_close(hidden_states(model, wider, with_last=True), expected)


def test_autocast_does_not_round_the_logits() -> None:
    """The output layer stays in float32: rounding large logits by 2^-8 would make wrong logprobs."""
    head, generator = torch.nn.Linear(64, VOCABULARY, bias=False), torch.Generator().manual_seed(1)
    states, targets = 20 * torch.randn(100, 64, generator=generator), torch.arange(100) % VOCABULARY
    with torch.autocast("cpu", torch.bfloat16):
        logp, _ = read_out(head, states, targets, 1.0)
    expected = (states.double() @ head.weight.double().T).log_softmax(-1).gather(-1, targets[:, None])[:, 0]
    torch.testing.assert_close(logp.double(), expected, atol=1e-4, rtol=0)


def test_logits_of_rounded_factors_have_the_gradients_of_a_linear_layer() -> None:
    """Each factor has at most the error of bfloat16; with AMX it has one, and on a CPU that does not multiply in
    bfloat16 none. The setting of the process stays.
    """
    generator = torch.Generator().manual_seed(0)
    states, weight = (torch.randn(size, 64, generator=generator, requires_grad=True) for size in (50, 90))
    upstream, before = torch.randn(50, 90, generator=generator), torch.get_float32_matmul_precision()
    logits = float32_logits(states, weight)
    ours = [logits, *torch.autograd.grad(logits, (states, weight), upstream)]
    linear = torch.nn.functional.linear(states, weight)
    theirs = [linear, *torch.autograd.grad(linear, (states, weight), upstream)]
    sizes = states.abs() @ weight.abs().t(), upstream.abs() @ weight.abs(), upstream.abs().t() @ states.abs()
    for found, expected, size in zip(ours, theirs, sizes, strict=True):
        assert found.dtype == torch.float32
        assert bool(((found - expected).abs() <= size * 2**-7).all())
        if "amx_bf16" in Path("/proc/cpuinfo").read_text():
            assert bool(((found - expected).abs() > size * 2**-16).any())
    assert torch.get_float32_matmul_precision() == before == "highest"


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_a_frozen_output_layer_gives_the_same(monkeypatch: pytest.MonkeyPatch, temperature: float) -> None:
    """Logprobs, entropies and the gradient of logprobs under autocast; autograd keeps one state's size for each token.

    Without autocast its numbers have the bits of a trained layer's.
    """
    monkeypatch.setattr("tasks.train.passes._FROZEN_TOKENS", 3)
    head, generator, kept = torch.nn.Linear(16, VOCABULARY, bias=False), torch.Generator().manual_seed(1), []
    head.rounds_factors = True  # type: ignore[assignment]
    states = torch.randn(8, 16, generator=generator, requires_grad=True)
    targets, upstream = torch.arange(8) % VOCABULARY, torch.randn(8, generator=generator)

    def results(*, rounded: bool) -> list[torch.Tensor]:
        with torch.autocast("cpu", torch.bfloat16, enabled=rounded):
            logp, entropy = read_out(head, states, targets, temperature)
        return [logp.detach(), entropy.detach(), *torch.autograd.grad(logp @ upstream, states)]

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor.shape)
        return tensor

    expected, exact = results(rounded=True), results(rounded=False)
    head.requires_grad_(False)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        found = results(rounded=True)
    assert (8, 16) in kept
    assert not [shape for shape in kept if VOCABULARY in shape]
    torch.testing.assert_close(found, expected, atol=1e-2, rtol=1e-2)
    assert all(map(torch.equal, results(rounded=False), exact))
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(read_out(head, states, targets, temperature), tuple(found[:2]), atol=0, rtol=0)


def test_full_vocabulary_logits_exist_for_one_chunk_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """The output layer gets one chunk at a time, and autograd keeps no tensor of vocabulary width."""
    monkeypatch.setattr("tasks.train.passes.CHUNK_TOKENS", 3)
    model, sizes, kept = tiny_model(), [], []
    model.lm_head.register_forward_hook(lambda _, __, logits: sizes.append(logits.shape))

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor.shape)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        action_logprobs(model, PADDED, Places(ROWS, COLUMNS, COLUMNS - 1), 1.0)
    assert sizes == [(3, VOCABULARY), (3, VOCABULARY), (2, VOCABULARY)]
    assert not [shape for shape in kept if shape[-1:] == (VOCABULARY,) and shape[0] <= 8]
