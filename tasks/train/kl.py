"""The coefficient and the reference policy of a KL penalty, and the mean KL of two policies over the vocabulary."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from tasks.train.batches import Places, Rows, batching_for
from tasks.train.passes import CHUNK_TOKENS, hidden_states, output_logits, predicting, score_action_tokens
from tasks.train.samples import Sample
from tasks.train.sharding import within
from tasks.train.train_state import TrainState

HORIZON = 10_000.0
"""Number of trajectories over which an adaptive coefficient follows."""
EMA_DECAY = 0.99
"""Weight of the old average of a moving reference in each update."""


def adapt_kl_coefficient(kl_ctl: float, kl: float, trajectories: int, target: float) -> float:
    """Return the coefficient after an update: `kl_ctl * (1 + clip(kl / target - 1, ±0.2) * trajectories / HORIZON)`.

    The factor is at least 0.1 and at most 10: with more trajectories in an update than five horizons it would otherwise
    become negative, and the penalty would pay for distance.
    Source: Ziegler et al. (arXiv 1909.08593, section 2.2).

    Args:
        kl_ctl: the present coefficient; a negative one, which earlier programs could store, counts as positive.
        kl: mean KL of a trajectory, in nats.
        trajectories: number of trajectories in the update.
        target: the desired KL, in nats.
    """
    error = max(-0.2, min(0.2, kl / target - 1))
    return abs(kl_ctl) * max(0.1, min(10.0, 1 + error * trajectories / HORIZON))


@torch.no_grad()
def move_reference(reference: PreTrainedModel, policy: PreTrainedModel) -> None:
    """Move a moving reference after an update: `reference <- decay * reference + (1 - decay) * policy`."""
    for averaged, present in zip(reference.parameters(), policy.parameters(), strict=True):
        averaged.lerp_(present, 1 - EMA_DECAY)


def mean_kl(train_state: TrainState, other: PreTrainedModel, samples: Sequence[Sample], temperature: float) -> float:
    """Compute the mean KL(policy ‖ other) of the next-token distributions at the action tokens, in nats.

    Each KL is a sum over the whole vocabulary, so it is also right if neither policy sampled the tokens.

    Args:
        train_state: holds one policy.
        other: another policy with the same vocabulary, which the same ranks share.
        samples: 1 or more.
        temperature: divides the logits of both policies.
    """
    policy = train_state.model

    def vocabulary_logprobs(model: PreTrainedModel, states: Tensor) -> Tensor:
        return (output_logits(model.get_output_embeddings(), states) / temperature).log_softmax(-1)

    def divergences_of(rows: Rows, places: Places) -> Tensor:
        states = [predicting(hidden_states(model, rows), places) for model in (policy, other)]
        kls = []
        for chunk in zip(*(of_model.split(CHUNK_TOKENS) for of_model in states), strict=True):
            p, q = map(vocabulary_logprobs, (policy, other), chunk)
            kls.append((p.exp() * (p - q)).sum(-1))
        return torch.cat(kls)

    def scorer(rows: Rows, places: Places) -> Tensor:
        return within(policy, lambda: within(other, lambda: divergences_of(rows, places)))

    batching = batching_for(policy, train_state.knobs, train_state.mesh)
    with train_state.precision():
        divergences = score_action_tokens(scorer, samples, range(len(samples)), batching)
    return float(np.concatenate([*divergences.values()]).mean(dtype=np.float64))
