"""Attention of trees on a CPU.

In a tree each token reads only earlier columns. PyTorch's function takes either a mask or the promise that nothing
later is read; its kernel takes both, and then computes half of the pairs, with the same bits.
"""

from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from tasks.train.linear import in_bfloat16

_NAME = "trees"


def use_trees(model: PreTrainedModel) -> None:
    """Let a model on a CPU, for which trees are right, compute masked attention here, and other attention as before."""
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
