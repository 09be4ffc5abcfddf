"""Loads stored weights as a model, and compares them with the canary of their checkpoint; adapters of the weights.

Adapters (LoRA, by peft) are made, attached to a model, switched off, merged and saved. An attached one replaces each
target layer by one that adds `alpha / rank * B A x`. Only A and B can be trained.
"""

import json
import math
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights  # type: ignore[import-untyped]
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from configs.policy import LoRA
from storage.errors import first_few
from storage.versions import checkpoints, model_files


def load_model(folder: Path, adapter: Path | None = None) -> PreTrainedModel:
    """Load a causal language model with float32 weights, in evaluation mode, on the CPU; attach the adapter, if any.

    Everything is read from `folder`, weights from safetensors only, and no code in it is run. Attention is PyTorch's,
    whatever config.json says. If the folder holds no model, other exceptions of transformers pass through.

    Raises:
        DamagedError: see `storage.versions.model_files`.
        ValueError: config.json is missing; weights are missing, have wrong shapes or are unknown to the model; or the
            model is of another kind.
    """
    _checked(folder)
    disable_progress_bar()  # a progress bar for every iteration would fill the log
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=torch.float32,
        use_safetensors=True,
        trust_remote_code=False,
        local_files_only=True,
        attn_implementation="sdpa",
        ignore_mismatched_sizes=True,  # reported below, with both shapes
        output_loading_info=True,
    )
    model: PreTrainedModel = loaded[0].eval()
    if problem := _misfit(model, loaded[1]):
        raise ValueError(f"config.json and the weights in {folder} do not belong together: {problem}")
    if adapter:
        attach(model, adapter)
    return model


def save_merged(checkpoint: checkpoints.Checkpoint, folder: Path) -> None:
    """Write a checkpoint as a plain transformers folder, with its adapter merged into the weights, in float32."""
    model = load_model(checkpoint.model, checkpoint.adapter)
    merge(model)
    shutil.copytree(checkpoint.model, folder, ignore=shutil.ignore_patterns("*.safetensors", model_files.INDEX))
    model.save_pretrained(folder, max_shard_size="1TB")


def empty_model(folder: Path) -> PreTrainedModel:
    """Make the model of a folder with parameters on the meta device, which take no memory, in evaluation mode.

    Raises:
        DamagedError: see `storage.versions.model_files`.
        ValueError: config.json is missing.
    """
    config = AutoConfig.from_pretrained(_checked(folder), trust_remote_code=False, local_files_only=True)
    with init_empty_weights(include_buffers=False):
        made: Any = AutoModelForCausalLM.from_config(
            config, dtype=torch.float32, attn_implementation="sdpa", trust_remote_code=False
        )
    model: PreTrainedModel = made.eval()
    model.tie_weights()  # each place of a tied parameter has got a parameter of its own
    return model


def _checked(folder: Path) -> Path:
    if not (folder / "config.json").is_file():
        raise ValueError(f"no config.json in {folder}: give the folder of a transformers model")
    model_files.check(folder)
    return folder


def _misfit(model: PreTrainedModel, report: dict[str, Any]) -> str:
    """Return how config.json and the weights differ; empty if they do not. Transformers invents missing weights."""
    if missing := sorted(report["missing_keys"]):
        return f"there are no weights {first_few(missing)}"
    if others := sorted(report["mismatched_keys"]):
        name, stored, expected = others[0]
        return f"{name} has the shape {[*stored]}, not {[*expected]} ({len(others)} such weights)"
    if unknown := sorted(report["unexpected_keys"]):
        return f"the model does not use the weights {first_few(unknown)}"
    configured, loaded = model.config.architectures or [type(model).__name__], type(model).__name__
    if loaded not in configured:
        return f"config.json is made for {', '.join(configured)}, but the causal language model is {loaded}"
    return ""


def canary_difference(checkpoint: checkpoints.Checkpoint) -> float:
    """Return the mean absolute difference of the canary's logprobs and those of the weights, on the CPU in float32.

    Raises:
        ValueError: see `load_model`.
    """
    model = load_model(checkpoint.model, checkpoint.adapter)
    tokens = torch.tensor([checkpoint.canary.token_ids])
    with torch.no_grad():
        logits: Tensor = model(tokens).logits[0, :-1]
    logp = logits.log_softmax(-1).gather(-1, tokens[0, 1:, None])[:, 0]
    return float((logp - torch.tensor(checkpoint.canary.logprobs)).abs().mean())


def not_finite(path: Path) -> list[str]:
    """Return the names of tensors of a safetensors file with NaN or infinities; one tensor is in memory at a time."""
    with safe_open(path, framework="pt") as file:
        tensors = ((name, file.get_tensor(name)) for name in file.keys())  # noqa: SIM118 - no mapping
        # torch has no isfinite for 8-bit numbers
        wide = ((name, tensor.float() if tensor.itemsize < 2 else tensor) for name, tensor in tensors)
        return [name for name, tensor in wide if not tensor.isfinite().all()]


_CONFIG, _WEIGHTS = model_files.ADAPTER_FILES
_PREFIX = "base_model.model."  # of names in peft's files


def make_adapter(model: PreTrainedModel, lora: LoRA, seed: int, folder: Path) -> None:
    """Write a new adapter for a model, of which only the shapes matter: A is random, B is 0, so it changes nothing yet.

    Raises:
        ValueError: a target is not the name of a linear layer.
    """
    layers = {name: module for name, module in model.base_model.named_modules() if isinstance(module, nn.Linear)}
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
            tensors[f"{name}.lora_A.weight"] = drawn
            tensors[f"{name}.lora_B.weight"] = torch.zeros(layer.out_features, lora.rank)
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
            wrong = sorted({*stored.items()} ^ {*expected.items()})[0][0]
            raise ValueError(f"{folder} is the adapter of another model: {wrong} is not there, or has another shape")
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
