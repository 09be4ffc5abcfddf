"""Adapters of a model's weights (LoRA, by peft): made, attached to a model, switched off, merged and saved.

An attached adapter replaces each target layer by one that adds `alpha / rank * B A x`. Only A and B can be trained.
"""

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from configs.policy import LoRA
from storage.errors import first_few
from storage.versions import model_files

_CONFIG, _WEIGHTS = model_files.ADAPTER_FILES
_PREFIX = "base_model.model."  # of names in peft's files


def make_adapter(model: PreTrainedModel, lora: LoRA, seed: int, folder: Path) -> None:
    """Write a new adapter for a model, of which only the shapes matter: A is random, B is 0, so it changes nothing yet.

    Raises:
        ValueError: a target is not the name of a linear layer.
    """
    base = model.base_model
    layers = {name: module for name, module in base.named_modules() if isinstance(module, nn.Linear)}
    kinds = {name.rpartition(".")[2] for name in layers}
    if unknown := [target for target in lora.targets if target not in kinds]:
        raise ValueError(
            f"policy.lora.targets: no linear layer of the policy is called {first_few(unknown)}. There are "
            f"{', '.join(sorted(kinds)) or 'none'}"
        )
    generator, tensors = torch.Generator().manual_seed(seed), dict[str, Tensor]()
    for name, layer in layers.items():
        if name.rpartition(".")[2] in lora.targets:
            name = f"{_PREFIX}{model.base_model_prefix}.{name}"
            bound = 1 / math.sqrt(layer.in_features)  # as in nn.Linear, and in peft
            drawn = torch.empty(lora.rank, layer.in_features).uniform_(-bound, bound, generator=generator)
            tensors |= {
                f"{name}.lora_A.weight": drawn,
                f"{name}.lora_B.weight": torch.zeros(layer.out_features, lora.rank),
            }
    save(tensors, lora, folder)


def save(tensors: dict[str, Tensor], lora: LoRA, folder: Path) -> None:
    """Write an adapter, given its tensors by their names in the file."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / _WEIGHTS, {"format": "pt"})
    (folder / _CONFIG).write_text(json.dumps(model_files.adapter_config(lora), indent=2) + "\n")


def attach(model: PreTrainedModel, folder: Path) -> None:
    """Add the adapter in a folder to a model on the meta device or elsewhere; freeze everything else.

    Parameters of the adapter are on the meta device if those of the model are: `fill` them.

    Raises:
        DamagedError: see `model_files.read_adapter`.
        ValueError: it is the adapter of another model.
    """
    from peft import LoraConfig, inject_adapter_in_model  # takes seconds

    lora = model_files.read_adapter(folder)
    with safe_open(folder / _WEIGHTS, "pt") as file:
        stored = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118 - no mapping
        config = LoraConfig(r=lora.rank, lora_alpha=lora.alpha, target_modules=lora.targets, inference_mode=False)
        try:
            inject_adapter_in_model(config, model)
        except ValueError as error:  # no target is there
            raise ValueError(f"{folder} is the adapter of another model: {error}") from None
        own = {stored_name(name): parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        if stored != (expected := {name: tuple(parameter.shape) for name, parameter in own.items()}):
            wrong = sorted({*stored.items()} ^ {*expected.items()})
            raise ValueError(
                f"{folder} is the adapter of another model: {wrong[0][0]} is not there, or has another shape"
            )
        for name, parameter in own.items():
            if not parameter.is_meta:
                parameter.data = file.get_tensor(name)


def stored_name(parameter: str) -> str:
    """Return the name in the file of a parameter of an attached adapter.

    >>> stored_name("model.layers.0.mlp.up_proj.lora_A.default.weight")
    'base_model.model.model.layers.0.mlp.up_proj.lora_A.weight'
    """
    return _PREFIX + parameter.replace(".default.weight", ".weight")


def _layers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the layers that have an adapter, with their names."""
    from peft.tuners.lora import LoraLayer

    for name, module in model.named_modules():
        if isinstance(module, LoraLayer):
            yield name, module


@contextmanager
def switched_off(model: nn.Module) -> Iterator[None]:
    """Let a model compute without its adapter in this block: what is added is multiplied by 0."""
    layers = [layer for _, layer in _layers(model)]
    for layer in layers:
        layer.set_scale("default", 0)
    try:
        yield
    finally:
        for layer in layers:
            layer.set_scale("default", 1)


def merge(model: PreTrainedModel) -> None:
    """Add an attached adapter to the weights, and remove it."""
    for name, layer in list(_layers(model)):
        layer.merge()
        place, _, last = name.rpartition(".")
        setattr(model.get_submodule(place), last, layer.base_layer)
    vars(model).pop("peft_config", None)
    model.requires_grad_(True)
