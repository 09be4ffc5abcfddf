"""The losses of PPO, the KL estimators and oneDNN's linear layers, by hand."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from configs.algorithms import PPO
from configs.train import Train
from tasks.train.components import LossInputs, LossOutputs, critic_loss, policy_loss
from tasks.train.linear import OneDNNLinear, use_onednn
from tasks.train.policy import load_policy
from tasks.train.train_state import adapt_kl_coefficient
from tests.experiments.limits import CASES, DRAWS, errors
from tests.support.train_helpers import assert_near, save_tiny, tiny_model


def tensor(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def loss_of(ratio: float, advantage: float, weight: float = 1.0, **knobs: Any) -> tuple[LossOutputs, float]:
    """Return the loss at one token of probability 0.1 before the update, and its gradient by logp."""
    proximal = tensor(math.log(0.1))
    logp = (proximal + math.log(ratio)).requires_grad_()
    out = policy_loss(logp, proximal, tensor(weight), tensor(advantage), **{"eps_clip": 0.2, **knobs})
    (gradient,) = torch.autograd.grad(out.loss.sum(), logp)
    return out, gradient.item()


WIDER: dict[str, Any] = {"eps_clip_higher": 0.28, "c_clip": 3.0}


@pytest.mark.parametrize(
    ("ratio", "weight", "advantage", "knobs", "loss", "gradient", "which"),
    [
        (1.5, 1.0, 2.0, {}, -2.4, 0.0, "clipped"),  # far enough up: clipped at 1.2
        (0.5, 1.0, 2.0, {}, -1.0, -1.0, ""),  # a good token that fell is pulled back
        (0.5, 1.0, -2.0, {}, 1.6, 0.0, "clipped"),  # far enough down: clipped at 0.8
        (1.5, 1.0, -2.0, {}, 3.0, 3.0, ""),  # a bad token that rose is pulled back
        (1.1, 3.0, 2.0, {}, -6.6, -6.6, ""),  # weighted by proximal / behaviour
        (1.5, 3.0, 2.0, {}, -7.2, 0.0, "clipped"),  # the clip centres on the proximal policy
        (1.25, 2.0, 2.0, WIDER, -5.0, -5.0, ""),  # between 1.2 and 1.28: symmetric clipping would stop it
        (1.5, 2.0, 2.0, WIDER, -5.12, 0.0, "clipped"),
        (0.7, 2.0, -2.0, WIDER, 3.2, 0.0, "clipped"),  # the lower bound stays
        (5.0, 2.0, -2.0, WIDER, 12.0, 0.0, "dual_clipped"),  # 20 without: bounded by c |A|
        (5.0, 2.0, 2.0, WIDER, -5.12, 0.0, "clipped"),  # dual clip does not affect positive advantages
    ],
)
def test_loss_and_gradient_by_hand(
    ratio: float, weight: float, advantage: float, knobs: dict[str, Any], loss: float, gradient: float, which: str
) -> None:
    """-w min(ratio A, clip(ratio, .8, 1.2) A), at most -w c A for A < 0; metrics hold no autograd graph."""
    out, slope = loss_of(ratio, advantage, weight, **knobs)
    assert (out.loss.item(), slope) == pytest.approx((loss, gradient))
    assert [name for name in ("clipped", "dual_clipped") if out.metrics[name]] == ([which] if which else [])
    assert out.loss.requires_grad
    assert not any(value.requires_grad for value in out.metrics.values())
    assert out.metrics["ratio"].item() == pytest.approx(ratio)


def test_the_default_limits_protect_from_faulty_and_stale_logprobs() -> None:
    """The table of `make experiment-limits` in tasks/train/README.md: with the defaults the gradient's error is less.

    For tokens that were served in bfloat16 the defaults change nothing.
    """
    unlimited = PPO.model_validate({"behaviour_weight": {"cap": None}, "c_clip": None})
    served, faulty, stale = (
        [max(errors(case, knobs, seed)[1] for seed in range(DRAWS)) for knobs in (PPO(), unlimited)] for case in CASES
    )
    assert served[0] == served[1]
    assert faulty[0] < 0.8 * faulty[1]
    assert stale[0] < 0.1 * stale[1]


@pytest.mark.parametrize(
    ("value", "old", "expected", "gradient", "clipped"),
    [
        (0.5, 0.5, 0.125, -0.5, False),
        (0.6, 0.5, 0.08, -0.4, False),
        (0.9, 0.5, 0.045, 0.0, True),  # moved 0.4: the clipped value 0.7 has the larger error
        (0.1, 0.5, 0.405, -0.9, False),  # moved away: its own error is the larger
    ],
)
def test_value_loss_by_hand(value: float, old: float, expected: float, gradient: float, clipped: bool) -> None:
    """Half the larger of both squared errors, at a return of 1 and a clip of 0.2."""
    values, zero = tensor(value).requires_grad_(), tensor(0.0)
    given = LossInputs(zero, zero, zero, zero, zero, zero.long(), None, values, tensor(old), tensor(1.0))
    out = critic_loss(given, 0.2)
    (slope,) = torch.autograd.grad(out.loss.sum(), values)
    assert (out.loss.item(), slope.item()) == pytest.approx((expected, gradient))
    assert bool(out.metrics["value_clipped"]) is clipped


@pytest.mark.parametrize(
    ("kl", "trajectories", "expected"),
    [
        (6.0, 500, 0.1),
        (6.6, 500, 0.1 * 1.005),
        (60.0, 500, 0.1 * 1.01),  # the error is clipped to ±0.2
        (0.0, 500, 0.1 * 0.99),
        (0.0, 51_200, 0.01),  # the factor would be -0.024, and the penalty would pay for distance
        (60.0, 51_200, 0.1 * 2.024),
        (60.0, 10**8, 1.0),
    ],
)
def test_adaptive_coefficient_by_hand(kl: float, trajectories: int, expected: float) -> None:
    """Target 6, horizon 10,000. An earlier program could store a negative coefficient."""
    assert adapt_kl_coefficient(0.1, kl, trajectories, 6.0) == pytest.approx(expected)
    assert adapt_kl_coefficient(-0.1, kl, trajectories, 6.0) == pytest.approx(expected)


def results(layer: nn.Linear, x: Tensor) -> dict[str, Tensor]:
    """Return the output, and the gradients of a weighted sum of it."""
    x, names = x.clone().requires_grad_(), ["x", *dict(layer.named_parameters())]
    output = layer(x)
    weights = torch.linspace(-1, 1, output.numel(), dtype=output.dtype).view_as(output)
    gradients = torch.autograd.grad((output * weights).sum(), [x, *layer.parameters()])
    return {"output": output.detach(), **dict(zip(names, gradients, strict=True))}


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("inputs", "outputs"), [(24, 72), (72, 24)])
@pytest.mark.parametrize("shape", [(5,), (3, 7), (1, 1), (2, 3, 4)])
def test_results_are_those_of_float64(shape: tuple[int, ...], inputs: int, outputs: int, bias: bool) -> None:
    """Output and gradients are right for any number of dimensions, with and without a bias, wide and narrow."""
    torch.manual_seed(0)
    layer, x = nn.Linear(inputs, outputs, bias=bias), torch.randn(*shape, inputs)
    exact = nn.Linear(inputs, outputs, bias=bias).double()
    exact.load_state_dict(layer.state_dict())
    expected = results(exact, x.double())
    use_onednn(layer)
    assert type(layer) is OneDNNLinear
    assert_near(results(layer, x), expected, 1e-6)


def test_a_loaded_policy_uses_it(tmp_path: Path) -> None:
    """Below the output layer, whose number of rows always differs; the names of the weights stay the same.

    Under autocast the layer is PyTorch's own, so `train.autocast` has its effect.
    """
    policy = load_policy(save_tiny(tmp_path), Train(device="cpu"))
    linear = [module for module in policy.base_model.modules() if isinstance(module, nn.Linear)]
    assert {type(module) for module in linear} == {OneDNNLinear}
    assert type(policy.get_output_embeddings()) is nn.Linear
    assert policy.state_dict().keys() == tiny_model().state_dict().keys()
    with torch.autocast("cpu", torch.bfloat16):
        assert linear[0](torch.ones(2, 32)).dtype == torch.bfloat16


def test_rounded_weights_follow_those_that_they_round() -> None:
    """A moving reference policy is frozen and changes in place; its copy in bfloat16 must not be that of before."""
    layer, x = nn.Linear(8, 8).requires_grad_(False), torch.randn(3, 8)
    use_onednn(layer)
    with torch.autocast("cpu", torch.bfloat16):
        for _ in range(2):
            assert torch.equal(layer(x), nn.functional.linear(x, layer.weight, layer.bias))
            layer.weight.lerp_(torch.ones(8, 8), 0.5)
