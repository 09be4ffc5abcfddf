"""Logprobs of action tokens, computed without the logits of all tokens in memory at once."""

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from tasks.train.memory import CHUNK_TOKENS
from tasks.train.rows import Places, Rows


def action_logprobs(model: PreTrainedModel, rows: Rows, places: Places, temperature: float) -> tuple[Tensor, Tensor]:
    """Compute each action token's logprob under the model, and the entropy of the model's distribution there.

    The logprobs equal `log_softmax(model(tokens).logits / temperature)` at the action tokens, in float32.

    Args:
        model: a model with an output layer on top of `base_model`.
        rows: the tokens [B, T].
        places: A action tokens in them.
        temperature: divides the logits, as in sampling.

    Returns:
        logprobs [A] float32, and entropies [A] float32 in nats without gradient.
    """
    states, targets = predicting(hidden_states(model, rows), places), targets_of(rows, places)
    return read_out(model.get_output_embeddings(), states, targets, temperature)


def hidden_states(model: PreTrainedModel, rows: Rows, *, with_last: bool = False) -> Tensor:
    """Compute the last hidden states [B, T - 1, H] of tokens [B, T]; `with_last` also of the last column: [B, T, H].

    A padded batch may be wider than the model's context: `with_last` leaves out the columns beyond it.

    Padded tokens need no attention mask: the padding is to the right of all tokens, and causal attention only reads to
    the left. In packed rows a sequence begins wherever the positions restart, and attention does not cross this.
    Trees have a mask.
    """
    context = None if rows.positions is not None else getattr(model.config, "max_position_embeddings", None)
    end = context if with_last else -1
    outputs = model.base_model(
        input_ids=rows.tokens[:, :end],
        position_ids=None if rows.positions is None else rows.positions[:, :end],
        attention_mask=None if rows.mask is None else rows.mask[:, :, :end, :end],
        use_cache=False,
    )
    states: Tensor = outputs.last_hidden_state
    return states


def predicting(hidden: Tensor, places: Places) -> Tensor:
    """Select the states [A, H] that predict the tokens at the places: those of the tokens before them."""
    return hidden.flatten(0, 1).index_select(0, places.rows * hidden.shape[1] + places.before)


def targets_of(rows: Rows, places: Places) -> Tensor:
    """Select the tokens [A] at the places."""
    return rows.tokens[places.rows, places.columns]


def read_out(
    head: nn.Module,
    states: Tensor,
    targets: Tensor,
    temperature: float,
    *,
    entropy_gradient: bool = False,
) -> tuple[Tensor, Tensor]:
    """Compute logprobs [A] of `targets` [A] and entropies [A] from hidden states [A, H], `CHUNK_TOKENS` at a time.

    The backward pass recomputes each chunk's logits, so memory never holds the logits of more than one chunk.
    Changes that a model makes to its logits after the output layer (soft-capping, scaling) are not applied; the
    canary shows the difference.
    """
    if len(targets) <= CHUNK_TOKENS:
        return _read_chunk(head, states, targets, temperature, entropy_gradient)
    chunks = zip(states.split(CHUNK_TOKENS), targets.split(CHUNK_TOKENS), strict=True)
    parts = [
        checkpoint(
            _read_chunk, head, *chunk, temperature, entropy_gradient, use_reentrant=False, preserve_rng_state=False
        )
        for chunk in chunks
    ]
    return torch.cat([logp for logp, _ in parts]), torch.cat([entropy for _, entropy in parts])


def output_logits(head: nn.Module, states: Tensor) -> Tensor:
    """Compute logits [A, V] from hidden states [A, H], in the format of the head's weights also under autocast.

    In training these are float32: large logits in bfloat16 have errors of 0.03.
    """
    with torch.autocast(states.device.type, enabled=False):
        weight: Tensor = head.weight  # type: ignore[assignment]
        logits: Tensor = head(states.to(weight.dtype)).float()
    return logits


def _read_chunk(
    head: nn.Module, states: Tensor, targets: Tensor, temperature: float, entropy_gradient: bool
) -> tuple[Tensor, Tensor]:
    logits = output_logits(head, states) / temperature  # [A, V]
    logprobs = logits.log_softmax(-1)
    with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
        entropy = -(logprobs.exp() * logprobs).sum(-1)
    return logprobs.gather(-1, targets[:, None]).squeeze(-1), entropy
