"""The loss of PPO, as one pure function."""

from typing import NamedTuple

import torch
from torch import Tensor


class TokenLoss(NamedTuple):
    """Of each of A action tokens; all but the loss without gradient."""

    loss: Tensor  # [A], to be summed and divided by the action tokens of the whole minibatch
    ratio: Tensor  # [A], policy / proximal
    weight: Tensor  # [A], proximal / behaviour, after the cap
    clipped: Tensor  # [A] bool, whether the clip took the token's gradient away


def decoupled_ppo_loss(
    logp: Tensor,
    proximal: Tensor,
    behaviour: Tensor,
    advantages: Tensor,
    eps_clip: float,
    weight_cap: float | None = None,
) -> TokenLoss:
    """Decoupled PPO: `-w * min(ratio * A, clip(ratio, 1 - eps, 1 + eps) * A)` for each action token.

    `ratio = exp(logp - proximal)` and `w = min(exp(proximal - behaviour), weight_cap)`, a constant. The clip
    centres on the proximal policy (the weights before the update), and w corrects for tokens that an older or
    otherwise different policy sampled. With proximal = behaviour this is plain PPO.
    Source: PPO (arXiv 1707.06347, equation 7), AReaL's decoupled objective (2505.24298); the cap is
    truncated importance sampling.

    Args:
        logp: [A], under the weights in training, with gradient; the others are constants.
        proximal: [A], under the weights before the update.
        behaviour: [A], recorded when sampling.
        advantages: [A].
        eps_clip: half the width of the clip.
        weight_cap: None leaves w as it is.
    """
    weight = torch.exp(proximal - behaviour)
    if weight_cap is not None:
        weight = weight.clamp(max=weight_cap)
    ratio = torch.exp(logp - proximal)
    surrogate = ratio * advantages
    clipped = ratio.clamp(1 - eps_clip, 1 + eps_clip) * advantages
    loss = -weight * torch.minimum(surrogate, clipped)
    return TokenLoss(loss, ratio.detach(), weight, (clipped < surrogate).detach())
