"""The mean KL divergence between two policies."""

from collections.abc import Sequence
from contextlib import AbstractContextManager

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from configs.train import PPO
from tasks.train.logprobs import hidden_states, output_logits, predicting
from tasks.train.memory import CHUNK_TOKENS
from tasks.train.mesh import ALONE, Mesh
from tasks.train.passes import score_action_tokens
from tasks.train.rows import Places, Rows, batching_for
from tasks.train.samples import Sample
from tasks.train.sharding import within


def mean_kl(
    policy: PreTrainedModel,
    other: PreTrainedModel,
    samples: Sequence[Sample],
    ppo: PPO,
    temperature: float,
    precision: AbstractContextManager[object],
    mesh: Mesh = ALONE,
) -> float:
    """Compute the mean KL(policy ‖ other) of the next-token distributions at the action tokens, in nats.

    Each KL is a sum over the whole vocabulary, so it is also right if neither policy sampled the tokens.

    Args:
        policy: one policy.
        other: another policy with the same vocabulary.
        samples: 1 or more.
        ppo: sizes of the passes.
        temperature: divides the logits of both policies.
        precision: the context in which the models run.
        mesh: the ranks that share the models.
    """

    def score_tokens(rows: Rows, places: Places) -> Tensor:
        return within(policy, lambda: within(other, lambda: divergences_of(rows, places)))

    def divergences_of(rows: Rows, places: Places) -> Tensor:
        states = [predicting(hidden_states(model, rows), places) for model in (policy, other)]
        chunks = zip(*(of_model.split(CHUNK_TOKENS) for of_model in states), strict=True)
        return torch.cat([_kl(*map(vocabulary_logprobs, (policy, other), chunk)) for chunk in chunks])

    def vocabulary_logprobs(model: PreTrainedModel, states: Tensor) -> Tensor:
        return (output_logits(model.get_output_embeddings(), states) / temperature).log_softmax(-1)

    with precision:
        divergences = score_action_tokens(score_tokens, samples, range(len(samples)), batching_for(policy, ppo, mesh))
    return float(np.concatenate([*divergences.values()]).mean(dtype=np.float64))


def _kl(logp: Tensor, other: Tensor) -> Tensor:
    """Compute sum p (log p - log q), [A], of two arrays of logprobs [A, V]."""
    return (logp.exp() * (logp - other)).sum(-1)
