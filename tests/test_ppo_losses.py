"""The loss of PPO, by hand."""

import math

import pytest
import torch
from torch import Tensor

from tasks.ppo.losses import TokenLoss, decoupled_ppo_loss


def tensor(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def loss_of(ratio: float, weight: float, advantage: float, cap: float | None = None) -> tuple[TokenLoss, float]:
    """The loss at one token with behaviour probability 0.1, and its gradient by logp."""
    behaviour = tensor(math.log(0.1))
    proximal = behaviour + math.log(weight)
    logp = (proximal + math.log(ratio)).requires_grad_()
    out = decoupled_ppo_loss(logp, proximal, behaviour, tensor(advantage), 0.2, cap)
    (gradient,) = torch.autograd.grad(out.loss.sum(), logp)
    return out, gradient.item()


@pytest.mark.parametrize(
    ("ratio", "weight", "advantage", "loss", "gradient", "clipped"),
    [
        (1.0, 1.0, 2.0, -2.0, -2.0, False),
        (1.1, 1.0, 2.0, -2.2, -2.2, False),
        (1.5, 1.0, 2.0, -2.4, 0.0, True),  # far enough up: clipped at 1.2
        (0.5, 1.0, 2.0, -1.0, -1.0, False),  # a good token that fell is pulled back
        (0.5, 1.0, -2.0, 1.6, 0.0, True),  # far enough down: clipped at 0.8
        (1.5, 1.0, -2.0, 3.0, 3.0, False),  # a bad token that rose is pulled back
        (1.1, 3.0, 2.0, -6.6, -6.6, False),  # weighed by proximal / behaviour
        (1.5, 3.0, 2.0, -7.2, 0.0, True),  # the clip centres on the proximal policy
        (1.1, 3.0, 0.0, 0.0, 0.0, False),
    ],
)
def test_loss_and_gradient_by_hand(
    ratio: float, weight: float, advantage: float, loss: float, gradient: float, clipped: bool
) -> None:
    """-w min(ratio A, clip(ratio, .8, 1.2) A): both sides of the clip for both signs of A."""
    out, slope = loss_of(ratio, weight, advantage)
    assert out.loss.item() == pytest.approx(loss)
    assert slope == pytest.approx(gradient)
    assert bool(out.clipped) is clipped
    assert (out.ratio.item(), out.weight.item()) == pytest.approx((ratio, weight))


def test_the_weight_is_capped() -> None:
    """A token far likelier than when sampled counts no more than the cap; a smaller weight stays."""
    assert loss_of(1.0, 3.0, 2.0, cap=1.5)[0].loss.item() == pytest.approx(-3.0)
    assert loss_of(1.0, 0.5, 2.0, cap=1.5)[0].loss.item() == pytest.approx(-1.0)


def test_on_policy_gradient_is_the_policy_gradient() -> None:
    """Where policy, proximal and behaviour agree, d loss / d logp = -A."""
    logp = tensor(-1.0, -2.0, -0.5).requires_grad_()
    old, advantages = logp.detach(), tensor(1.0, -2.0, 0.5)
    (gradient,) = torch.autograd.grad(decoupled_ppo_loss(logp, old, old, advantages, 0.2).loss.sum(), logp)
    torch.testing.assert_close(gradient, -advantages)


def test_only_the_loss_carries_a_gradient() -> None:
    """What goes into the metrics must not hold the graph."""
    out, _ = loss_of(1.1, 2.0, 1.0)
    assert out.loss.requires_grad
    assert not any(value.requires_grad for value in out[1:])
