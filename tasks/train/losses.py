"""Formulas of losses, as pure functions of tensors [A]: one entry for each action token."""

from typing import Literal, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from configs.algorithms import KLEstimator

_LARGEST = 20.0
"""Largest log of a ratio."""


class PolicyLoss(NamedTuple):
    """The policy loss of A action tokens. Only `loss` has a gradient."""

    loss: Float[Tensor, " actions"]
    ratio: Float[Tensor, " actions"]  # policy / proximal
    clipped: Bool[Tensor, " actions"]  # true if the clip removed the token's gradient
    dual_clipped: Bool[Tensor, " actions"]  # true if the dual clip removed it


class ValueLoss(NamedTuple):
    """The value loss of A action tokens. `clipped` has no gradient."""

    loss: Float[Tensor, " actions"]
    clipped: Bool[Tensor, " actions"]  # true if the clipped value had the larger error


def policy_loss(
    logp: Float[Tensor, " actions"],
    proximal: Float[Tensor, " actions"],
    weight: Float[Tensor, " actions"],
    advantages: Float[Tensor, " actions"],
    eps_clip: float,
    eps_clip_higher: float | None = None,
    c_clip: float | None = None,
) -> PolicyLoss:
    """Compute decoupled PPO: `-w * min(ratio * A, clip(ratio, 1 - eps_clip, 1 + eps_clip_higher) * A)` for each token.

    `ratio = exp(logp - proximal)`, up to exp(20), since it would overflow. The clip is centred on the proximal policy
    (the weights before the update), and w corrects for tokens that an older or otherwise different policy sampled. With
    proximal = behaviour and w = 1 this is plain PPO. With `c_clip` the objective of a token with A < 0 is not below
    `c_clip * A` (before w), so one bad token that became far more likely cannot dominate the minibatch.
    Source: PPO (arXiv 1707.06347, equation 7), AReaL's decoupled objective (2505.24298), clip-higher of DAPO
    (2503.14476), dual clip (1912.09729, equation 5).

    Args:
        logp: [A], logprobs under the weights in training, with gradient; the other tensors are constants.
        proximal: [A], logprobs under the weights before the update.
        weight: [A], w, from `behaviour_weights`.
        advantages: [A].
        eps_clip: width of the clip below 1, and also above 1 if `eps_clip_higher` is None.
        eps_clip_higher: width of the clip above 1.
        c_clip: the dual clip, more than 1; None: no dual clip.
    """
    ratio = torch.exp((logp - proximal).clamp(max=_LARGEST))
    surrogate, upper = ratio * advantages, 1 + (eps_clip if eps_clip_higher is None else eps_clip_higher)
    at_clip = ratio.clamp(1 - eps_clip, upper) * advantages
    objective, clipped = torch.minimum(surrogate, at_clip), (at_clip < surrogate).detach()
    dual_clipped = torch.zeros_like(objective, dtype=torch.bool)
    if c_clip is not None:
        bound = c_clip * advantages
        dual_clipped = (advantages < 0) & (objective < bound).detach()
        objective = torch.where(dual_clipped, bound, objective)
    return PolicyLoss(-weight * objective, ratio.detach(), clipped, dual_clipped)


def behaviour_weights(
    proximal: Float[Tensor, " actions"],
    behaviour: Float[Tensor, " actions"],
    sequences: Int[Tensor, " actions"],
    cap: float | None = None,
    mode: Literal["truncate", "mask"] = "truncate",
    level: Literal["token", "sequence"] = "token",
    floor: float | None = None,
) -> Float[Tensor, " actions"]:
    """Compute `w = exp(proximal - behaviour)`, [A]; for a sequence, the geometric mean over its action tokens.

    If w is above the cap, `truncate` gives the cap and `mask` gives 0. If w is below the floor, it is 0. A token with
    weight 0 still counts in N.
    Source: truncated importance sampling (Ionides 2008), as verl and prime-rl use it for rollouts; masks on both sides
    as in IcePop (Ling team, 2025).

    Args:
        proximal: [A].
        behaviour: [A].
        sequences: [A], the sequence of each token.
        cap: the largest w; None: no limit.
        mode: how a larger w is changed.
        level: `token`: one w for each token; `sequence`: one w for all tokens of a sequence.
        floor: the smallest w; None: no limit.
    """
    difference = proximal - behaviour
    weight = torch.exp(sequence_means(difference, sequences) if level == "sequence" else difference)
    if cap is not None:
        weight = weight.clamp(max=cap) if mode == "truncate" else torch.where(weight > cap, 0.0, weight)
    return weight if floor is None else torch.where(weight < floor, 0.0, weight)


def sequence_means(values: Float[Tensor, " actions"], sequences: Int[Tensor, " actions"]) -> Float[Tensor, " actions"]:
    """Return for each token the mean of the values [A] of its sequence; the gradient goes to all its tokens."""
    if not len(values):
        return values
    size = int(sequences.max()) + 1
    sums = torch.zeros(size, dtype=values.dtype, device=values.device).index_add(0, sequences, values)
    counts = torch.zeros_like(sums).index_add(0, sequences, torch.ones_like(values))
    return (sums / counts.clamp(min=1))[sequences]


def value_loss(
    values: Float[Tensor, " actions"],
    old: Float[Tensor, " actions"],
    returns: Float[Tensor, " actions"],
    value_eps_clip: float,
) -> ValueLoss:
    """Compute half of the larger squared error of the value and of the clipped value.

    `max((V - R)², (old + clip(V - old, ±eps) - R)²) / 2`. Source: PPO's reference implementation (2017).

    Args:
        values: [A], with gradient.
        old: [A], values before the update.
        returns: [A].
        value_eps_clip: how far a value may move from the old one.
    """
    near = old + (values - old).clamp(-value_eps_clip, value_eps_clip)
    error, clipped_error = (values - returns) ** 2, (near - returns) ** 2
    return ValueLoss(torch.maximum(error, clipped_error) / 2, (clipped_error > error).detach())


def kl_estimate(
    logp: Float[Tensor, " actions"], reference: Float[Tensor, " actions"], estimator: KLEstimator
) -> Float[Tensor, " actions"]:
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
