"""Logprobs computed in chunks equal those of the full logits."""

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedModel

from tasks.train.logprobs import action_logprobs, hidden_states, read_out
from tasks.train.rows import Places, Rows
from tests.support.train_helpers import VOCABULARY, tiny_model

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
    monkeypatch.setattr("tasks.train.logprobs.CHUNK_TOKENS", chunk)
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
    monkeypatch.setattr("tasks.train.logprobs.CHUNK_TOKENS", 3)
    model, sizes, kept = tiny_model(), [], []
    model.lm_head.register_forward_hook(lambda _, __, logits: sizes.append(logits.shape))

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor.shape)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        action_logprobs(model, Rows(padded()), Places.padded(ROWS, COLUMNS), 1.0)
    assert sizes == [(3, VOCABULARY), (3, VOCABULARY), (2, VOCABULARY)]
    assert not [shape for shape in kept if shape[-1:] == (VOCABULARY,) and shape[0] <= 8]


def test_one_chunk_is_computed_once() -> None:
    """A single chunk fits into memory, so it is not recomputed in the backward pass."""
    model, calls = tiny_model(), []
    model.lm_head.register_forward_hook(lambda *_: calls.append(1))
    logp, _ = action_logprobs(model, Rows(padded()), Places.padded(ROWS, COLUMNS), 1.0)
    logp.sum().backward()
    assert len(calls) == 1
