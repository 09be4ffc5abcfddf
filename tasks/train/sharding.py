"""Models whose weights are divided among ranks, with FSDP2: each rank holds a range of rows of every parameter.

A sharded parameter is whole only during a forward or backward pass of its part of the model: a decoder layer, or the
rest (embedding, last norm, output layer).

Their files are in safetensors format: STEM.safetensors, or several files that STEM.safetensors.index.json lists.
Several ranks write several files: each tensor is gathered once and written by one rank, so that no rank holds more than
its share of the tensors and one more.
"""

import functools
import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from transformers import PreTrainedModel

from tasks.train.mesh import ALONE, Mesh, deal_out

Result = TypeVar("Result")
ReadRows = Callable[[str, int, int], Tensor]
"""A function that reads the rows start:end of the parameter with a name."""
Split = Callable[[str, Tensor], dict[str, Tensor]]
"""A function that returns the tensors in files, by name, that hold the tensor with a name."""
_WITHIN = "_within"


def shard(module: nn.Module, mesh: Mesh) -> None:
    """Divide the parameters of a model, or of a part of one, among the ranks of each copy, if there are several ranks.

    Gradients are summed over the ranks, not averaged: each token's share of the loss is already divided by the number
    of tokens in the whole minibatch.
    """
    if mesh.devices is None:
        return
    layers = getattr(module, "_no_split_modules", None) or ()
    for part in (*(m for m in module.modules() if type(m).__name__ in layers), module):
        fully_shard(part, mesh=mesh.devices)
        assert isinstance(part, FSDPModule)
        part.set_gradient_divide_factor(1.0)
        part.set_force_sum_reduction_for_comms(True)
    setattr(module, _WITHIN, lambda compute: compute())
    register_fsdp_forward_method(module, _WITHIN)


def within(model: nn.Module, compute: Callable[[], Result]) -> Result:
    """Run `compute`, which returns tensors, as one forward pass of the model: only there may it use all weights."""
    if not isinstance(model, FSDPModule):
        return compute()
    result: Result = getattr(model, _WITHIN)(compute)
    if not torch.is_grad_enabled():  # no backward pass will do it
        model.reshard()
    return result


def reduce_gradients(modules: Iterable[nn.Module], *, last: bool) -> None:
    """Say how the next backward pass leaves sharded gradients; `last`: it is the last one before the optimizer step.

    They are divided at once, since whole ones may not fit. The copies of a shard are added up only once.
    """
    for module in modules:
        if isinstance(module, FSDPModule):
            module.set_requires_all_reduce(last)


def whole(value: Tensor) -> Tensor:
    """Return all of a tensor, on every rank; all ranks call this in the same order."""
    return value.full_tensor() if isinstance(value, DTensor) else value


def like(parameter: Tensor, read: Callable[[int, int], Tensor]) -> Tensor:
    """Make a tensor that is divided like `parameter`, on its device; `read` returns the rows start:end of it.

    On the CPU if `parameter` is on the meta device and not divided.
    """
    if not isinstance(parameter, DTensor):
        rows = read(0, parameter.shape[0])
        return rows if parameter.is_meta else rows.to(parameter.device)
    mesh, placements = parameter.device_mesh, parameter.placements
    (count, *_), (start, *_) = compute_local_shape_and_global_offset(parameter.shape, mesh, placements)
    rows = read(min(start, parameter.shape[0]), min(start + count, parameter.shape[0])).to(mesh.device_type)
    return DTensor.from_local(rows, mesh, placements, run_check=False, shape=parameter.shape, stride=parameter.stride())


def fill(model: nn.Module, read: ReadRows, device: torch.device) -> None:
    """Replace parameters on the meta device by what `read` returns, on `device`; tied ones stay one."""
    filled: dict[int, nn.Parameter] = {}
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for module in model.modules():
        for key, empty in module._parameters.items():
            if empty is not None and id(empty) not in filled:
                value = like(empty, functools.partial(read, names[id(empty)]))
                filled[id(empty)] = nn.Parameter(value.to(device), empty.requires_grad)
            if empty is not None:
                module._parameters[key] = filled[id(empty)]


def class_of(model: PreTrainedModel) -> type[Any]:
    """Return the class of a model; sharding replaces it by a subclass with another name."""
    return next(each for each in type(model).__mro__ if not issubclass(each, FSDPModule))


class StoredTensors:
    """The tensors of a folder's files with one stem, read one by one from mapped memory.

    Raises:
        FileNotFoundError: there are no such files.
    """

    def __init__(self, folder: Path, stem: str) -> None:
        index, only = folder / f"{stem}.safetensors.index.json", f"{stem}.safetensors"
        files = json.loads(index.read_text())["weight_map"] if index.is_file() else {}
        opened: list[Any] = [safe_open(folder / file, "pt") for file in {*files.values()} or {only}]
        self._files = {name: file for file in opened for name in list(file.keys())}
        self.names = self._files.keys()

    def read(self, name: str) -> Tensor:
        """Return a whole tensor, copied out of the mapped memory."""
        value: Tensor = self._files[name].get_tensor(name)
        return value.clone()

    def rows(self, name: str, start: int, end: int) -> Tensor:
        """Return the rows start:end of a tensor with 1 dimension or more, copied out of the mapped memory."""
        if start == end:  # safetensors refuses empty ranges
            return self.rows(name, 0, 1)[:0]
        value: Tensor = self._files[name].get_slice(name)[start:end]
        return value.clone()


def _as_it_is(name: str, value: Tensor) -> dict[str, Tensor]:
    return {name: value}


def save_tensors(
    folder: Path, stem: str, tensors: Mapping[str, Tensor], mesh: Mesh = ALONE, split: Split = _as_it_is
) -> None:
    """Write tensors into one file; on a mesh, write this rank's share, and the first rank writes the index.

    With several ranks `split` says what a tensor is in files.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if mesh.size == 1:
        save_file({name: value.detach().cpu() for name, value in tensors.items()}, folder / f"{stem}.safetensors")
        return
    sizes = [value.numel() * value.element_size() for value in tensors.values()]
    owners, own = dict(zip(tensors, deal_out(sizes, mesh.size), strict=True)), dict[str, Tensor]()
    for name, value in tensors.items():
        gathered = whole(value.detach())  # by all ranks, but only the owner keeps it
        if owners[name] == mesh.rank:
            own |= split(name, gathered.cpu().contiguous())
        del gathered  # before the next one is gathered
    files = [f"{stem}-{rank + 1:05d}-of-{mesh.size:05d}.safetensors" for rank in range(mesh.size)]
    if own:
        save_file(own, folder / files[mesh.rank], {"format": "pt"})
    if mesh.rank == 0:
        names = {name: split(name, torch.empty(value.shape, device="meta")) for name, value in tensors.items()}
        weight_map = {of_file: files[owners[name]] for name, parts in names.items() for of_file in parts}
        index = {"metadata": {"total_size": sum(sizes)}, "weight_map": weight_map}
        (folder / f"{stem}.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
