"""The part of vLLM's workers that is ours: it reloads a policy whole, and tells which weights a worker holds.

vLLM imports it inside of a server (`--worker-extension-cls tasks.inference.worker.PolicyWorker`), before it loads a
model, and adds the class to the bases of its worker; `/collective_rpc` calls the methods by name.

On a CPU each layer computes with a packed copy of its weight, and most keep no other. So the sum of a weight
(`tasks.inference.weight_sums`) is noted when it is packed.

There vLLM gathers both matrices of an adapter for every token of a batch, in every layer, and then multiplies token by
token: a server with an adapter samples a quarter of the tokens of one without. `add_lora_linear` multiplies all tokens
of an adapter at once.
"""

from typing import Any

import torch
from torch import Tensor, nn
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU
from vllm.model_executor.layers import utils
from vllm.model_executor.layers.linear import ColumnParallelLinear, QKVParallelLinear, RowParallelLinear
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.platforms import current_platform

from tasks.inference.weight_sums import CHUNK, Integers, Sums, keys, total, width

_NOTE = "_sums_of_packed_weight"
_pack = utils.dispatch_cpu_unquantized_gemm


class PolicyWorker:
    """Methods that vLLM's worker gets in addition to its own."""

    model_runner: Any
    model_config: Any
    reload_weights: Any

    def reload_policy(self, weights_path: str) -> None:
        """Load the weights in the folder `weights_path` in place. Layers that are not packed anew lose their notes."""
        model = self.model_runner.get_model()
        for module in model.modules():
            vars(module).pop(_NOTE, None)
        # Let vLLM pack experts as at its start, on a CPU. A reload into a layer whose kernel exists would leave its
        # experts as they are in the files, and the kernel would read them as if they were packed.
        methods = [getattr(module, "quant_method", None) for module in model.modules() if current_platform.is_cpu()]
        for method in methods:
            if getattr(method, "moe_kernel", None) is not None:
                method.moe_kernel = None  # type: ignore[union-attr]
        self.reload_weights(weights_path=weights_path)
        _pack_tied(model)

    def weight_sums(self) -> Sums:
        """Return the sums of what this worker holds."""
        sums, known = Sums(), dict[int, Sums]()
        for prefix, module in self.model_runner.get_model().named_modules():
            for name, weight in module.named_parameters(recurse=False):
                held = Sums()
                if weight.numel() and id(weight) not in known:  # files hold a tied weight once
                    held = known[id(weight)] = _sums(f"{prefix}.{name}", module, weight.to(self.model_config.dtype))
                packed = vars(module).get(_NOTE, {}) if name == "weight" else {}
                if packed != known.get(id(weight), {}):
                    held = held | {f"{part}, packed": value for part, value in packed.items()}
                sums |= {f"{prefix}.{name}{part}": value for part, value in held.items()}
        return sums


def _sums(name: str, module: nn.Module, weight: Tensor) -> Sums:
    """Return the sum of what a module holds of a weight: of all or, if some ranks hold the same heads, in two parts."""
    columns = width(name, weight.shape)
    rows = weight.detach().reshape(-1, columns)
    if isinstance(module, RowParallelLinear) and not name.endswith("bias"):
        return {"": (_sum(rows, keys(name, columns, module.tp_rank * columns)), module.tp_size > 1)}
    divided = isinstance(module, ColumnParallelLinear | VocabParallelEmbedding) and module.tp_size > 1
    key = keys(name, columns)
    if isinstance(module, QKVParallelLinear) and module.num_kv_head_replicas > 1:
        queries, head = module.num_heads * module.head_size, module.tp_rank // module.num_kv_head_replicas
        return {"": (_sum(rows[:queries], key), True), f", head {head}": (_sum(rows[queries:], key), False)}
    return {"": (_sum(rows, key), divided or ".experts." in name)}


def _sum(rows: Tensor, key: Integers) -> int:
    chunk = CHUNK if rows.device.type == "cpu" else 2**26  # which keeps a GPU busy
    return total(rows, torch.from_numpy(key).to(rows.device), _bits, chunk)


def _bits(part: Tensor) -> Tensor:
    whole = torch.int32 if part.itemsize == 4 else torch.int16
    return part.contiguous().view(whole).long()


def _pack_and_note(layer: Any, remove_weight: bool) -> None:
    """Note the sums of a weight, and pack it as vLLM does."""
    if layer.weight.numel() and not layer.weight.is_meta:
        below = getattr(layer, "base_layer", layer)  # of a layer with an adapter, which a reload packs with the other
        setattr(below, _NOTE, _sums("weight", below, layer.weight))
    _pack(layer, remove_weight)


def _pack_tied(model: nn.Module) -> None:
    """Pack tied embeddings once more, as vLLM does after loading.

    A reload packs those layers anew for which it finds a tensor in the files, and an output layer that shares the
    weight of the embedding has none.
    """
    first = dict[int, nn.Module]()
    packed: list[Any] = [module for module in model.modules() if hasattr(module, "cpu_linear")]
    for module in packed:
        if module.weight.numel() and first.setdefault(id(module.weight), module) is not module:
            module.quant_method.process_weights_after_loading(module)


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
        for a, b, columns in zip(lora_a_stacked, lora_b_stacked, output_slices, strict=True):
            low = (scale * (inputs @ a[slot, 0].float().t())).to(y.dtype)
            y[rows, start : start + columns] += low @ b[slot, 0].to(y.dtype).t()
            start += columns


utils.dispatch_cpu_unquantized_gemm = _pack_and_note
PunicaWrapperCPU.add_lora_linear = add_lora_linear  # type: ignore[method-assign, assignment]
