"""Linear layers on a CPU, which oneDNN computes.

PyTorch computes float32 products with MKL. On an AMD processor with AVX-512, oneDNN, which PyTorch contains as well,
needed 0.4 to 0.8 of the time. It also computes in float32, and the same numbers with the same number of threads always
give the same bits.

Under autocast a layer whose weights are frozen, such as the base of an adapter, keeps a copy of them in bfloat16, which
autocast would make in each pass: 2 more bytes a weight.
"""

from functools import partial
from typing import Any, cast

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
    for module in model.modules():
        if hasattr(module, "lora_A") and type(module.base_layer) is OneDNNLinear:
            module.forward = partial(_adapted, module)


class OneDNNLinear(nn.Linear):
    """A linear layer that oneDNN computes. Autocast and other devices get PyTorch's own."""

    _rounded: tuple[tuple[int, int], Tensor] | None = None

    @property
    def rounded(self) -> Tensor:
        """The frozen weight in bfloat16, rounded again only if it changed, as a moving reference policy does."""
        weight = self.weight.detach()
        state = weight.data_ptr(), weight._version
        if self._rounded is None or self._rounded[0] != state:
            self._rounded = state, weight.bfloat16()
        return self._rounded[1]

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  # the name in nn.Linear
        if in_bfloat16(input) and not self.weight.requires_grad:
            return linear(input, self.rounded, self.bias)
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


def in_bfloat16(x: Tensor) -> bool:
    """Return whether autocast rounds an input on a CPU."""
    return x.device.type == "cpu" and torch.is_autocast_enabled("cpu")


def _adapted(layer: Any, x: Tensor) -> Tensor:
    """Compute what a layer of peft computes; under autocast with fewer passes over its output."""
    if not in_bfloat16(x):
        return cast(Tensor, type(layer).forward(layer, x))
    base, a, b = layer.base_layer, layer.lora_A["default"].weight, layer.lora_B["default"].weight
    output: Tensor = _Adapted.apply(x, base.rounded, base.bias, a, b, layer.scaling["default"])  # type: ignore[no-untyped-call]
    return output


class _Adapted(torch.autograd.Function):
    """`x W^T + b + scale (x A^T) B^T` in bfloat16 with its gradients by x, A and B. Each sum is rounded once."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, a: Tensor, b: Tensor, scale: float) -> Tensor:
        rows, a, b = x.flatten(0, -2).bfloat16(), a.bfloat16(), b.bfloat16()
        inner = (rows @ a.t()).mul_(scale)
        ctx.save_for_backward(rows, weight, a, b, inner)
        ctx.scale, ctx.format = scale, x.dtype
        output: Tensor = linear(rows, weight, None if bias is None else bias.bfloat16())
        return cast(Tensor, output.addmm_(inner, b.t()).unflatten(0, x.shape[:-1]))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        rows, weight, a, b, inner = ctx.saved_tensors
        gradient_rows = gradient.flatten(0, -2)
        of_inner = (gradient_rows @ b).mul_(ctx.scale)
        of_a, of_b = (of_inner.t() @ rows).float(), (gradient_rows.t() @ inner).float()
        if not ctx.needs_input_grad[0]:
            return None, None, None, of_a, of_b, None
        of_x = (gradient_rows @ weight).addmm_(of_inner, a).unflatten(0, gradient.shape[:-1])
        return of_x.to(ctx.format), None, None, of_a, of_b, None
