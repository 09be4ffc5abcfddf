"""Attention on a CPU, for models whose trees are right.

In a tree each token reads only earlier columns. PyTorch's function takes either a mask or the promise that nothing
later is read; its kernel takes both, and then computes half of the pairs, with the same bits.

Under autocast its kernel multiplies small blocks in bfloat16 several times slower than whole matrices, so rows that are
not long are computed here with all pairs.
"""

from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from tasks.train.linear import in_bfloat16

_NAME = "trees"
_LONGEST, _PAIRS = 512, 2**20
"""Largest number of columns of which all pairs are computed: their probabilities are kept."""


def use_trees(model: PreTrainedModel) -> None:
    """Let a model on a CPU, for which trees are right, compute attention here."""
    AttentionInterface.register(_NAME, _attention)
    AttentionMaskInterface.register(_NAME, sdpa_mask)
    model.set_attn_implementation(_NAME)


def _attention(
    module: nn.Module,
    query: Float[Tensor, "rows heads columns width"],
    key: Float[Tensor, "rows groups columns width"],
    value: Float[Tensor, "rows groups columns width"],
    attention_mask: Bool[Tensor, "rows 1 columns columns"] | None,
    scaling: float,
    **others: Any,
) -> tuple[Tensor, None]:
    """Compute attention as transformers' function for "sdpa" does, with the output [rows, columns, heads, width]."""
    columns = query.shape[2]
    if in_bfloat16(query) and columns <= _LONGEST:
        reads = query.new_ones(columns, columns, dtype=torch.bool).tril()[None, None] if attention_mask is None else attention_mask
        unread = torch.zeros(reads.shape).masked_fill_(~reads, -torch.inf).expand(len(query), -1, -1, -1)
        return _AllPairs.apply(query, key, value, unread, scaling), None  # type: ignore[no-untyped-call]
    if attention_mask is None:
        whole: tuple[Tensor, None] = sdpa_attention_forward(module, query, key, value, None, scaling=scaling, **others)
        return whole
    number_format = torch.bfloat16 if in_bfloat16(query) else query.dtype
    times = query.shape[1] // key.shape[1]
    q, k, v = (each.to(number_format) for each in (query, repeat_kv(key, times), repeat_kv(value, times)))
    added = torch.zeros_like(attention_mask, dtype=number_format).masked_fill_(~attention_mask, -torch.inf)
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    output, _ = kernel(q, k, v, 0.0, True, attn_mask=added, scale=scaling)
    return output.transpose(1, 2).contiguous(), None


class _AllPairs(torch.autograd.Function):
    """Attention with scores in float32 and the other products in bfloat16.

    As many rows at a time as have about `_PAIRS` pairs, which then stay in the cache.
    """

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, unread: Tensor, scaling: float) -> Tensor:
        rows, heads, columns, width = query.shape
        stacked = rows, key.shape[1], -1, width  # heads that share keys are one matrix
        q, k, v = (query.float() * scaling).reshape(stacked), key.float().contiguous(), value.bfloat16().contiguous()
        probabilities, output = v.new_empty(*q.shape[:3], columns), v.new_empty(q.shape)
        parts = [each.split(max(1, _PAIRS // (heads * columns**2))) for each in (q, k, v, unread, probabilities, output)]
        for q_part, k_part, v_part, unread_part, kept, out in zip(*parts, strict=True):
            scores = torch.bmm(q_part.flatten(0, 1), k_part.flatten(0, 1).transpose(1, 2))
            scores.view(-1, heads, columns, columns).add_(unread_part)
            kept.copy_(scores.softmax(-1).view(kept.shape))
            torch.bmm(kept.flatten(0, 1), v_part.flatten(0, 1), out=out.flatten(0, 1))
        ctx.save_for_backward(q.bfloat16(), k.bfloat16(), v, probabilities)
        ctx.scaling, ctx.formats = scaling, (query.dtype, key.dtype, value.dtype)
        return output.view(rows, heads, columns, width).transpose(1, 2).contiguous()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, probabilities = ctx.saved_tensors
        rows, columns, heads, width = gradient.shape
        of_output = gradient.bfloat16().transpose(1, 2).reshape(q.shape)
        found = of_q, of_k, of_v = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        given = q, k, v, probabilities, of_output, *found
        parts = [each.split(max(1, _PAIRS // (heads * columns**2))) for each in given]
        for each in zip(*parts, strict=True):
            q_, k_, v_, p_, of_output_, of_q_, of_k_, of_v_ = (part.flatten(0, 1) for part in each)
            torch.bmm(p_.transpose(1, 2), of_output_, out=of_v_)
            of_p = torch.bmm(of_output_, v_.transpose(1, 2))
            of_scores = torch._softmax_backward_data(of_p, p_, -1, p_.dtype)
            torch.bmm(of_scores, k_, out=of_q_)
            torch.bmm(of_scores.transpose(1, 2), q_, out=of_k_)
        of_q = of_q.mul_(ctx.scaling).view(rows, heads, columns, width)
        return *(x.to(number_format) for x, number_format in zip((of_q, of_k, of_v), ctx.formats, strict=True)), None, None
