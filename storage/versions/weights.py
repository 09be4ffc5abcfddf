"""Loads stored weights as a model, and compares them with the canary of their checkpoint."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from storage.errors import first_few
from storage.versions import model_files
from storage.versions.adapters import attach, merge
from storage.versions.checkpoints import Checkpoint


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


def save_merged(checkpoint: Checkpoint, folder: Path) -> None:
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
    with _without_weights():
        made: Any = AutoModelForCausalLM.from_config(
            config, dtype=torch.float32, attn_implementation="sdpa", trust_remote_code=False
        )
    model: PreTrainedModel = made.eval()
    return model


@contextmanager
def _without_weights() -> Iterator[None]:
    """Put parameters that are registered in this block on the meta device; buffers are made as usual."""
    register = nn.Module.register_parameter

    def register_empty(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and not parameter.is_meta:  # one on the meta device is tied, so it stays the same
            parameter = nn.Parameter(parameter.to("meta"), parameter.requires_grad)
        register(module, name, parameter)

    nn.Module.register_parameter = register_empty  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


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


def canary_difference(checkpoint: Checkpoint) -> float:
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
