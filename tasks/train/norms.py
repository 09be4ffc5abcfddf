"""Norms of decoder layers on a CPU under autocast, with fewer passes over their tokens."""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from tasks.train.linear import in_bfloat16

_NORMS = ("LlamaRMSNorm", "Qwen2RMSNorm", "Qwen3RMSNorm")


def round_norms(model: nn.Module) -> None:
    """Let the norms before attention and MLP round what they return, as the linear layers behind them would."""
    for name, module in model.named_modules():
        if type(module).__name__ in _NORMS and name.endswith("_layernorm"):
            module.forward = partial(_norm, module)


def _norm(module: Any, x: Tensor) -> Tensor:
    if not in_bfloat16(x) or x.dtype != torch.float32:
        unrounded: Tensor = type(module).forward(module, x)
        return unrounded
    rounded: Tensor = _Norm.apply(x, module.weight, module.variance_epsilon)  # type: ignore[no-untyped-call]
    return rounded


class _Norm(torch.autograd.Function):
    """`weight x / sqrt(mean(x^2) + epsilon)` of the last dimension, in float32 and rounded to bfloat16."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        inverse = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_().div_(x.shape[-1]).add_(epsilon).rsqrt_()
        ctx.save_for_backward(x, weight, inverse)
        normal: Tensor = x * inverse
        return normal.mul_(weight).bfloat16()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, inverse = ctx.saved_tensors
        of_weight = (gradient * x).mul_(inverse).flatten(0, -2).sum(0) if ctx.needs_input_grad[1] else None
        scaled = gradient * weight  # in float32
        along = (scaled * x).sum(-1, keepdim=True).div_(-x.shape[-1]).mul_(inverse**3)
        return scaled.mul_(inverse).addcmul_(x, along), of_weight, None
