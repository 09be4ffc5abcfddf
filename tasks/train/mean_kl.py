"""How far a policy has gone from another."""

from collections.abc import Sequence
from contextlib import AbstractContextManager

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from configs.schema import PPO
from tasks.train.logprobs import hidden_states, output_logits, predicting
from tasks.train.passes import score_action_tokens
from tasks.train.samples import Sample


def mean_kl(
    policy: PreTrainedModel,
    other: PreTrainedModel,
    samples: Sequence[Sample],
    ppo: PPO,
    temperature: float,
    precision: AbstractContextManager[object],
) -> float:
    """Mean KL(policy ‖ other) of the next token where the samples have action tokens, in nats.

    Summed over the whole vocabulary, so it holds for two policies of which neither sampled the tokens.

    Args:
        policy: one policy.
        other: another one, of the same vocabulary.
        samples: 1 or more.
        ppo: sizes of the passes.
        temperature: divides the logits of both.
        precision: a context in which the models run.
    """

    def look(tokens: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
        states = [predicting(hidden_states(model, tokens[:, :-1]), rows, columns) for model in (policy, other)]
        chunks = zip(*(each.split(ppo.logprob_chunk_tokens) for each in states), strict=True)
        return torch.cat([_kl(*map(read_out, (policy, other), chunk)) for chunk in chunks])

    def read_out(model: PreTrainedModel, states: Tensor) -> Tensor:
        return (output_logits(model.get_output_embeddings(), states) / temperature).log_softmax(-1)

    with precision:
        found = score_action_tokens(look, samples, range(len(samples)), ppo.micro_batch_tokens, policy.device)
    return float(np.concatenate([*found.values()]).mean(dtype=np.float64))


def _kl(logp: Tensor, other: Tensor) -> Tensor:
    """Of each row [A] of two arrays of logprobs [A, V]: sum p (log p - log q)."""
    return (logp.exp() * (logp - other)).sum(-1)
