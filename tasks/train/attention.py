"""Attention on a CPU, for models whose trees are right.

In a tree each token reads only earlier columns. PyTorch's function takes either a mask or the promise that nothing
later is read; its kernel takes both, and then computes half of the pairs, with the same bits.

Under autocast that kernel multiplies small blocks, several times more slowly than whole matrices are multiplied. So
there the attention of rows that are not long is computed here, with all pairs and with its rotations.
"""

from functools import partial
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
_ROTATED = ("LlamaAttention", "Qwen2Attention", "Qwen3Attention")
_LONGEST, _PAIRS = 512, 2**20
"""Largest number of columns of which all pairs are computed, and how many pairs at a time stay in the cache."""


def use_trees(model: PreTrainedModel) -> None:
    """Let a model on a CPU, for which trees are right, compute masked attention here, and other attention as before."""
    AttentionInterface.register(_NAME, _attention)
    AttentionMaskInterface.register(_NAME, sdpa_mask)
    model.set_attn_implementation(_NAME)
    for module in model.modules():
        if type(module).__name__ in _ROTATED:
            module.forward = partial(_layer, module)


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


def _layer(module: Any, hidden_states: Tensor, attention_mask: Tensor | None = None, **others: Any) -> Any:
    """Compute what the layer of transformers computes; under autocast with all pairs, unless the rows are long."""
    columns = hidden_states.shape[1]
    if not in_bfloat16(hidden_states) or columns > _LONGEST:
        return type(module).forward(module, hidden_states, attention_mask=attention_mask, **others)
    shape = *hidden_states.shape[:2], -1, module.head_dim
    q, k, v = (each(hidden_states).view(shape) for each in (module.q_proj, module.k_proj, module.v_proj))
    if hasattr(module, "q_norm"):
        q, k = module.q_norm(q), module.k_norm(k)
    reads = (
        attention_mask if attention_mask is not None else torch.ones(1, 1, columns, columns, dtype=torch.bool).tril()
    )
    unread = torch.zeros(reads.shape).masked_fill_(~reads, -torch.inf).expand(len(q), -1, -1, -1)
    given = q, k, v, *others["position_embeddings"], unread, module.scaling
    output: Tensor = _AllPairs.apply(*given)  # type: ignore[no-untyped-call]
    return module.o_proj(output.flatten(2)), None


class _AllPairs(torch.autograd.Function):
    """Rotations and attention of tokens [rows, columns, heads, width], with scores in float32.

    The other products have factors in bfloat16.
    """

    @staticmethod
    @torch.autocast("cpu", enabled=False)  # type: ignore[untyped-decorator]
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, cos: Tensor, sin: Tensor, unread: Tensor, scaling: float
    ) -> Tensor:
        rows, columns, heads, width = query.shape
        stacked = rows, key.shape[2], -1, width  # heads that share keys are one matrix
        q, k = _rotate(query, cos * scaling, sin * scaling).view(stacked), _rotate(key, cos, sin)
        v = value.bfloat16().transpose(1, 2).contiguous()
        probabilities, output = v.new_empty(*q.shape[:3], columns), v.new_empty(q.shape)
        for q_, k_, v_, unread_, kept, out in _parts(q, k, v, unread, probabilities, output):
            scores = torch.bmm(q_, k_.transpose(1, 2))
            scores.view(-1, heads, columns, columns).add_(unread_.unflatten(0, (-1, 1)))
            kept.copy_(scores.softmax(-1))
            torch.bmm(kept, v_, out=out)
        ctx.save_for_backward(q.bfloat16(), k.bfloat16(), v, probabilities, cos, sin)
        ctx.scaling, ctx.formats = scaling, (query.dtype, key.dtype, value.dtype)
        return output.view(rows, heads, columns, width).transpose(1, 2).contiguous()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, probabilities, cos, sin = ctx.saved_tensors
        rows, columns, heads, width = gradient.shape
        of_output = gradient.bfloat16().transpose(1, 2).reshape(q.shape)
        of_q, of_k, of_v = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        for q_, k_, v_, kept, out, q_out, k_out, v_out in _parts(q, k, v, probabilities, of_output, of_q, of_k, of_v):
            torch.bmm(kept.transpose(1, 2), out, out=v_out)
            scores = torch._softmax_backward_data(torch.bmm(out, v_.transpose(1, 2)), kept, -1, kept.dtype)
            torch.bmm(scores, k_, out=q_out)
            torch.bmm(scores.transpose(1, 2), q_, out=k_out)
        of_q = of_q.view(rows, heads, columns, width).transpose(1, 2)
        of_q = _rotate(of_q, cos * ctx.scaling, -sin * ctx.scaling)
        found = of_q, _rotate(of_k.transpose(1, 2), cos, -sin), of_v
        return *(x.transpose(1, 2).to(to) for x, to in zip(found, ctx.formats, strict=True)), None, None, None, None


def _rotate(x: Float[Tensor, "rows columns heads width"], cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate tokens by their positions, in float32; both halves of `cos` and `sin` are alike."""
    x = x.transpose(1, 2).float()
    half = x.shape[-1] // 2
    (a, b), c, s = x.split(half, -1), cos[:, None, :, :half], sin[:, None, :, :half]
    rotated = torch.empty(x.shape)
    torch.mul(a, c, out=rotated[..., :half]).addcmul_(b, s, value=-1)
    torch.mul(b, c, out=rotated[..., half:]).addcmul_(a, s)
    return rotated


def _parts(*tensors: Tensor) -> Any:
    """Cut tensors [rows, groups, …] into parts of few pairs, [rows x groups, …] each."""
    queries = tensors[0]
    rows = max(1, _PAIRS // (queries[0, :, :, 0].numel() * tensors[1].shape[2]))
    return zip(*([part.flatten(0, 1) for part in each.split(rows)] for each in tensors), strict=True)
