"""Linear layers on a CPU, computed by oneDNN.

PyTorch computes float32 products with MKL. On an AMD processor with AVX-512, oneDNN, which PyTorch contains as well,
needed 0.4 to 0.8 of the time. It also computes in float32, and the same numbers with the same number of threads always
give the same bits.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear


def use_onednn(model: nn.Module) -> None:
    """Let oneDNN compute the linear layers of a model on a CPU; their parameters and their names stay the same.

    It compiles its kernels for each new number of rows, so `batches` makes few shapes. The output layer, which gets as
    many rows as there are action tokens, is not part of `model`.
    """
    if not torch.backends.mkldnn.is_available():
        return
    for module in model.modules():
        if type(module) is nn.Linear:  # no subclass, which may compute something else
            module.__class__ = OneDNNLinear


class OneDNNLinear(nn.Linear):
    """A linear layer that oneDNN computes. Autocast and other devices get PyTorch's own."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  # the name in nn.Linear
        plain = input.dtype == self.weight.dtype == torch.float32 and input.device.type == "cpu"
        if not plain or torch.is_autocast_enabled("cpu"):
            return linear(input, self.weight, self.bias)
        output: Tensor = _Linear.apply(input, self.weight, self.bias)  # type: ignore[no-untyped-call]
        return output


class _Linear(torch.autograd.Function):
    """`x W^T + b` with its gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return _product(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        of_x, of_weight, of_bias = ctx.needs_input_grad
        rows = gradient.flatten(0, -2)
        return (
            _product(gradient, weight.t()) if of_x else None,
            _weight_gradient(rows, x.flatten(0, -2)) if of_weight else None,
            rows.sum(0) if of_bias else None,
        )


def _weight_gradient(gradient: Tensor, x: Tensor) -> Tensor:
    """Compute `gradient^T x` from [M, N] and [M, K]; oneDNN is faster if the wider of the two is at the right."""
    if gradient.shape[1] > x.shape[1]:
        return _product(x.t(), gradient.t()).t()
    return _product(gradient.t(), x.t())


def _product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute `x W^T + b`."""
    output: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return output
