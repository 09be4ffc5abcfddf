"""The products of LoRA adapters on a CPU, all tokens of an adapter at once.

vLLM's CPU backend gathers both matrices of an adapter for every token of a batch, in every layer, and then multiplies
token by token: a server with an adapter samples a quarter of the tokens of one without.
"""

from typing import Any

import torch
from torch import Tensor
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU

_one_by_one = PunicaWrapperCPU.add_lora_linear


def add_lora_linear(
    wrapper: PunicaWrapperCPU,
    y: Tensor,
    x: Tensor,
    lora_a_stacked: tuple[Tensor, ...],
    lora_b_stacked: tuple[Tensor, ...],
    scale: float,
    output_slices: tuple[int, ...],
    **options: Any,
) -> None:
    """Add `scale x A^T B^T` to `y`, in the number formats of vLLM's own function. Rows of no adapter stay as they are.

    Args:
        wrapper: knows the slot of each row's adapter, -1 for none.
        y: (rows, sum of the slices), changed in place.
        x: (rows, input width).
        lora_a_stacked: for each slice (slots, 1, rank, input width).
        lora_b_stacked: for each slice (slots, 1, slice, rank).
        scale: a factor.
        output_slices: the widths of the layers that are computed together, such as queries, keys and values.
        options: of the method, for which vLLM's own is called.
    """
    if options or torch.compiler.is_compiling():  # which slots a batch has cannot be compiled
        _one_by_one(wrapper, y, x, lora_a_stacked, lora_b_stacked, scale, output_slices, **options)
        return
    slots = wrapper.token_lora_indices
    present = slots.unique().tolist()
    for slot in (each for each in present if each >= 0):
        rows = slice(None) if len(present) == 1 else (slots == slot).nonzero()[:, 0]
        inputs, start = x[rows].float(), 0
        for a, b, width in zip(lora_a_stacked, lora_b_stacked, output_slices, strict=True):
            low = (scale * (inputs @ a[slot, 0].float().t())).to(y.dtype)
            y[rows, start : start + width] += low @ b[slot, 0].to(y.dtype).t()
            start += width
