"""Kernels for fast passes in bfloat16: attention of packed rows, and products in the formats of tensor cores and AMX.

Everything here comes with PyTorch and is compiled by nobody at run time. `suits` says where what needs a GPU is used.
"""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import linear, rms_norm, scaled_dot_product_attention
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from configs.train import Train

PACKED = "packed"
"""The name of `packed_attention` in transformers."""
_TAKEN = inspect.signature(varlen_attn).parameters
"""What this version of PyTorch takes: `window_size` since 2.11, `enable_gqa` since 2.12."""


def suits(device: torch.device, train: Train) -> bool:
    """Return whether models in training get these kernels: they need half precision, and Ampere or a later GPU."""
    asked = train.kernels == "auto" and train.autocast == "bfloat16" and device.type == "cuda"
    return asked and "window_size" in _TAKEN and torch.cuda.get_device_capability(device) >= (8, 0)


def accelerate(model: PreTrainedModel, train: Train) -> None:
    """Give a plain decoder everything of this file; its parameters and their names stay the same."""
    model.set_attn_implementation(PACKED)
    for name, module in model.base_model.named_modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = partial(_fused_norm, module, name.endswith("layernorm"))
    round_factors(model)
    if train.parallel.shard == 1:  # a copy of a weight that ranks share would have to be gathered
        use_copies(model.base_model)


def round_factors(model: PreTrainedModel) -> None:
    """Let the output layer of a model round its factors under autocast, see `float32_logits`."""
    model.get_output_embeddings().rounds_factors = True


def packed_attention(
    module: nn.Module,
    query: Float[Tensor, "1 heads tokens size"],
    key: Float[Tensor, "1 kv_heads tokens size"],
    value: Float[Tensor, "1 kv_heads tokens size"],
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    cu_seq_lens_q: Int[Tensor, " ends"] | None = None,
    max_length_q: int = 0,
    **others: Any,
) -> tuple[Float[Tensor, "1 tokens heads size"], None]:
    """Let each token of a packed row read the tokens before it in its own sequence; transformers calls this.

    Args:
        module: a layer's attention.
        query: rotated, as the next one.
        key: fewer heads, each for a group of those of the query.
        value: like the key; its format is that of the products.
        attention_mask: of other rows; without it they are causal.
        scaling: factor of the products of queries and keys.
        cu_seq_lens_q: 0 and the ends of the sequences, int32. None: the row is not packed.
        max_length_q: the longest sequence.
        others: what PyTorch's own attention takes.
    """
    if cu_seq_lens_q is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **others)
    q, k, v = (states[0].transpose(0, 1).to(value.dtype) for states in (query, key, value))
    if q.is_cuda and q.dtype != torch.float32:
        return _by_kernel(q, k, v, cu_seq_lens_q, max_length_q, scaling)[None], None
    return _one_by_one(q, k, v, cu_seq_lens_q, scaling)[None], None


def _by_kernel(q: Tensor, k: Tensor, v: Tensor, ends: Tensor, longest: int, scaling: float | None) -> Tensor:
    options: dict[str, Any] = {"scale": scaling, "window_size": (-1, 0)}  # causal
    if "enable_gqa" in _TAKEN:
        options["enable_gqa"] = True
    else:
        k, v = (states.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for states in (k, v))
    return varlen_attn(q, k, v, ends, ends, longest, longest, **options)  # type: ignore[return-value]  # never a pair


def _one_by_one(q: Tensor, k: Tensor, v: Tensor, ends: Tensor, scaling: float | None) -> Tensor:
    """Compute the same sequence by sequence, on any device and in any format: for tests, and what they compare with."""
    bounds, outputs = ends.tolist(), []
    for start, end in pairwise(bounds):
        one, of_keys, of_values = (states[start:end].transpose(0, 1)[None] for states in (q, k, v))
        attended = scaled_dot_product_attention(one, of_keys, of_values, is_causal=True, scale=scaling, enable_gqa=True)
        outputs.append(attended[0].transpose(0, 1))
    return torch.cat(outputs)


AttentionInterface.register(PACKED, packed_attention)


def use_copies(model: nn.Module) -> None:
    """Let the linear layers of a model multiply by bfloat16 copies of their weights under autocast.

    The output layer, which stays in float32, is not part of `model`, and the weights must not be divided among ranks.
    """
    for module in model.modules():
        if type(module) is nn.Linear:  # no subclass, which may compute something else
            module.__class__ = CopiedLinear


class CopiedLinear(nn.Linear):
    """A linear layer that rounds its weight once for each optimizer step, where autocast does it in each pass.

    The same bits as with autocast, with 2 bytes for each weight, which stays the only parameter.
    """

    _copy: Tensor | None = None
    _copied = (0, 0)  # where the copied weight was, and how often it had been changed

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  # the name in nn.Linear
        if not torch.is_autocast_enabled(input.device.type):
            return super().forward(input)
        present = (self.weight.data_ptr(), self.weight._version)
        if self._copy is None or self._copied != present:
            self._copy, self._copied = self.weight.detach().bfloat16(), present
        return linear(input, _Rounded.apply(self.weight, self._copy), self.bias)  # type: ignore[no-untyped-call]


class _Rounded(torch.autograd.Function):
    """The copy of a weight, whose gradient is added to the weight's in float32, without a float32 tensor of its own."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, copy: Tensor) -> Tensor:
        ctx.weight = weight
        return copy.view_as(copy)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, None]:
        if ctx.weight.grad is None:
            return gradient.float(), None
        ctx.weight.grad.add_(gradient)
        return None, None


def float32_logits(states: Float[Tensor, "actions width"], weight: Float[Tensor, "vocabulary width"]) -> Tensor:
    """Compute `states weight^T` in float32 from rounded factors: to 10 bits on a GPU (TF32), to bfloat16's 7 on a CPU.

    For hidden states that have the errors of bfloat16, as do the weights of the server. Without tensor cores an H100 is
    six times slower, and the output layer took as long as all others; with AMX a CPU is twice as fast as in float32. A
    CPU that does not multiply in bfloat16 does not round.
    """
    logits: Tensor = _OfRoundedFactors.apply(states, weight)  # type: ignore[no-untyped-call]
    return logits


class _OfRoundedFactors(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, states: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(states, weight)
        with _rounding(states.device):
            return states @ weight.t()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        states, weight = ctx.saved_tensors
        with _rounding(states.device):
            return gradient @ weight, gradient.t() @ states


@contextmanager
def _rounding(device: torch.device) -> Iterator[None]:
    """Allow rounded factors here only: elsewhere it would round positions in rotations, and the canary."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium" if device.type == "cpu" else "high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def _fused_norm(norm: Any, rounds: bool, hidden_states: Tensor) -> Tensor:
    """Compute `norm(hidden_states)` by one kernel in float32; round it if only linear layers read it, as they would."""
    kind = hidden_states.device.type
    normed = rms_norm(hidden_states.float(), norm.weight.shape, norm.weight, norm.variance_epsilon)
    return normed.to(torch.get_autocast_dtype(kind)) if rounds and torch.is_autocast_enabled(kind) else normed
