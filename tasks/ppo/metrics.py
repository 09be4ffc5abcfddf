"""Metrics of an update: flat names, plain floats. A metric of which nothing was observed is left out.

Turns count from 1 in the names (`success/turn_1`). Token metrics are means over action tokens.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tasks.ppo.advantages import turn_groups, varied
from tasks.ppo.batches import MicroBatch
from tasks.ppo.losses import TokenLoss
from tasks.ppo.samples import Sample

Metrics = dict[str, float]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What the training pass over a micro-batch leaves behind, without gradient."""

    batch: MicroBatch
    logp: Tensor  # [A]
    entropy: Tensor  # [A]
    tokens: TokenLoss  # [A]


def sample_metrics(samples: Sequence[Sample], version: int) -> Metrics:
    """What the data say, whatever the weights.

    `success/fix_rate`: of the wrong turns that were followed by another, the share followed by a right one;
    `success/break_rate`: of the right ones, the share followed by a wrong one. A sequence is correct where its
    last turn is. `share/zero_variance`: of the groups by problem and turn. Staleness: `version`, which the
    weights have before the update, minus the version that sampled a token.
    """
    groups, returns = turn_groups(samples), np.concatenate([sample.returns for sample in samples])
    staleness = version - np.concatenate([sample.versions for sample in samples])
    return {
        **_by_turn(samples),
        **_transitions(samples),
        **_means("length", _lengths(samples)),
        "share/truncated": float(np.mean([sample.truncated for sample in samples])),
        "share/zero_variance": 1 - float(varied(groups, returns).mean()),
        "staleness/min": float(staleness.min()),
        "staleness/mean": float(staleness.mean()),
        "staleness/max": float(staleness.max()),
        "tokens/all": float(sum(len(sample.token_ids) for sample in samples)),
        "tokens/action": float(len(staleness)),
        "trajectories": float(len(samples)),
    }


def token_metrics(outcomes: Sequence[Outcome], decoupled: bool) -> Metrics:
    """How the policy moved on the action tokens, in the passes that trained it.

    `kl_*` estimates KL(behaviour ‖ policy) and KL(proximal ‖ policy) by Schulman's k3, `exp(d) - 1 - d` with
    `d = logp - other` at tokens of the other policy. `weight/effective_share` is the effective sample size
    `(sum w)² / sum w²` over the number of tokens. What compares proximal and behaviour needs `decoupled`.
    """
    logp = _join(outcome.logp for outcome in outcomes)
    behaviour = _join(outcome.batch.behaviour for outcome in outcomes)
    proximal = _join(outcome.batch.proximal for outcome in outcomes)
    metrics = {
        "policy/loss": _join(outcome.tokens.loss for outcome in outcomes).mean(),
        "policy/entropy": _join(outcome.entropy for outcome in outcomes).mean(),
        "policy/ratio": _join(outcome.tokens.ratio for outcome in outcomes).mean(),
        "policy/clip_fraction": _join(outcome.tokens.clipped for outcome in outcomes).mean(),
        "policy/kl_behaviour": _k3(logp - behaviour),
    }
    if decoupled:
        difference = (behaviour - proximal).abs()
        metrics |= {
            "policy/kl_proximal": _k3(logp - proximal),
            "proximal/mean_difference": difference.mean(),
            "proximal/max_difference": difference.max(),
            **_weight(_join(outcome.tokens.weight for outcome in outcomes)),
        }
    return {name: value.item() for name, value in metrics.items()}


def padding_share(samples: Sequence[Sample], minibatches: Iterable[Sequence[MicroBatch]]) -> float:
    """Share of the positions in the forward passes that hold no token."""
    padded = sum(batch.tokens.numel() for minibatch in minibatches for batch in minibatch)
    return 1 - sum(len(sample.token_ids) for sample in samples) / padded


def _by_turn(samples: Sequence[Sample]) -> Metrics:
    metrics: Metrics = {}
    for turn in range(max(len(sample.successes) for sample in samples)):
        reached = [sample for sample in samples if len(sample.successes) > turn]
        metrics[f"success/turn_{turn + 1}"] = float(np.mean([sample.successes[turn] for sample in reached]))
        metrics[f"reward/turn_{turn + 1}"] = float(np.mean([sample.rewards[turn] for sample in reached]))
    return metrics


def _transitions(samples: Sequence[Sample]) -> Metrics:
    now = np.concatenate([sample.successes[:-1] for sample in samples]) > 0.5
    after = np.concatenate([sample.successes[1:] for sample in samples]) > 0.5
    return _means("success", {"fix_rate": after[~now], "break_rate": ~after[now]})


def _lengths(samples: Sequence[Sample]) -> dict[str, np.ndarray]:
    lengths = np.array([len(sample.token_ids) for sample in samples])
    correct = np.array([sample.successes[-1] > 0.5 for sample in samples])
    return {"correct": lengths[correct], "wrong": lengths[~correct]}


def _means(group: str, values: dict[str, np.ndarray]) -> Metrics:
    return {f"{group}/{name}": float(array.mean()) for name, array in values.items() if array.size}


def _weight(weight: Tensor) -> dict[str, Tensor]:
    share = weight.sum() ** 2 / (weight**2).sum() / len(weight)
    return {"weight/mean": weight.mean(), "weight/max": weight.max(), "weight/effective_share": share}


def _k3(d: Tensor) -> Tensor:
    return (torch.expm1(d) - d).mean()


def _join(parts: Iterable[Tensor]) -> Tensor:
    return torch.cat(list(parts)).double()
