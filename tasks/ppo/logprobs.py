"""Logprobs of action tokens, without the logits of all tokens in memory at once."""

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel


def action_logprobs(
    model: PreTrainedModel, tokens: Tensor, rows: Tensor, columns: Tensor, temperature: float, chunk_tokens: int
) -> tuple[Tensor, Tensor]:
    """Logprob of each action token under the model, and the entropy of the distribution it was drawn from.

    Equals `log_softmax(model(tokens).logits / temperature)` at the action tokens, in float32. The output layer
    sees only the positions that predict an action token, `chunk_tokens` at a time, and each chunk's logits are
    computed again in the backward pass, so memory never holds those of more than one chunk. Whatever a model
    does to its logits after the output layer (soft-capping, scaling) is left out; the canary shows it.

    Args:
        model: with an output layer on top of `base_model`.
        tokens: [B, T], padded at the right.
        rows: [A], the sequence of each action token.
        columns: [A], its position there, never 0.
        temperature: divides the logits, as it did when sampling.
        chunk_tokens: action tokens in a chunk.

    Returns:
        logprobs [A] float32 and entropies [A] float32 in nats, these without gradient.
    """
    # No attention mask: padding stands to the right of all tokens, where causal attention does not look.
    hidden = model.base_model(input_ids=tokens[:, :-1], use_cache=False).last_hidden_state
    predictors = rows * hidden.shape[1] + columns - 1
    states = hidden.flatten(0, 1).index_select(0, predictors)  # [A, H]
    targets = tokens[rows, columns]  # [A]
    head: nn.Module = model.get_output_embeddings()
    if len(targets) <= chunk_tokens:
        return _read_out(head, states, targets, temperature)
    chunks = zip(states.split(chunk_tokens), targets.split(chunk_tokens), strict=True)
    parts = [
        checkpoint(_read_out, head, *chunk, temperature, use_reentrant=False, preserve_rng_state=False)
        for chunk in chunks
    ]
    return torch.cat([logp for logp, _ in parts]), torch.cat([entropy for _, entropy in parts])


def _read_out(head: nn.Module, states: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Logprobs [A] of `targets` [A] and entropies [A] from hidden states [A, H]."""
    logits = head(states).float() / temperature  # [A, V]
    logprobs = logits.log_softmax(-1)
    with torch.no_grad():
        entropy = -(logprobs.exp() * logprobs).sum(-1)
    return logprobs.gather(-1, targets[:, None]).squeeze(-1), entropy
