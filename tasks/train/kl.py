"""Estimators of the KL divergence to a reference policy, and the controller of its coefficient."""

import torch
from torch import Tensor

from configs.train import KLEstimator

HORIZON = 10_000.0
"""Number of trajectories over which an adaptive coefficient follows."""


def kl_estimate(logp: Tensor, reference: Tensor, estimator: KLEstimator) -> Tensor:
    """Estimate KL(policy ‖ reference) for each token that the policy sampled.

    With d = logp - reference: k1 = d, k2 = d²/2, k3 = exp(-d) - 1 + d. In a loss the mean gradient of k1 is zero, the
    gradient of k2 is that of the reverse KL, and the gradient of k3 is that of the forward KL.
    Source: J. Schulman, Approximating KL Divergence (2020).
    """
    d = logp - reference
    if estimator == "k1":
        return d
    if estimator == "k2":
        return d**2 / 2
    return torch.expm1(-d) + d


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
