"""Linear layers by oneDNN compute what PyTorch's own compute, with the same gradients."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from configs.train import PPO
from tasks.train.cpu_linear import OneDNNLinear, use_onednn
from tasks.train.policy import load_policy
from tests.support.train_helpers import assert_near, save_tiny, tiny_model


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
    """Below the output layer, whose number of rows always differs; the names of the weights stay the same."""
    policy = load_policy(save_tiny(tmp_path), PPO(device="cpu"))
    linear = [module for module in policy.base_model.modules() if isinstance(module, nn.Linear)]
    assert {type(module) for module in linear} == {OneDNNLinear}
    assert type(policy.get_output_embeddings()) is nn.Linear
    assert policy.state_dict().keys() == tiny_model().state_dict().keys()


def test_autocast_computes_in_half_precision() -> None:
    """Under autocast the layer is PyTorch's own, so `ppo.autocast` has its effect."""
    layer = nn.Linear(8, 8)
    use_onednn(layer)
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(torch.ones(2, 8)).dtype == torch.bfloat16
