"""Stored weights as a model, and whether they are the ones that their checkpoint's canary was made with."""

from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from storage.versions import model_files
from storage.versions.checkpoints import Checkpoint

_NAMED = 3  # weights that a message spells out


def load_model(folder: Path) -> PreTrainedModel:
    """A causal language model with float32 weights, in evaluation mode, on the CPU.

    It is read from `folder` and nowhere else, from safetensors, and no code that lies there is run; attention is
    PyTorch's, whatever config.json says.

    Raises:
        StorageError: see `storage.versions.model_files`.
        ValueError: weights are missing, of other shapes or more than the model has, or it is another kind of model.
            And whatever else transformers raises where a folder holds no model.
    """
    if not (folder / "config.json").is_file():
        raise ValueError(f"no config.json in {folder}: give the folder of a transformers model")
    model_files.check(folder)
    disable_progress_bar()  # one for every iteration would bury the log
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=torch.float32,
        use_safetensors=True,
        trust_remote_code=False,
        local_files_only=True,
        attn_implementation="sdpa",
        ignore_mismatched_sizes=True,  # told below, with both shapes
        output_loading_info=True,
    )
    model: PreTrainedModel = loaded[0].eval()
    report = loaded[1]
    if problem := _misfit(model, report):
        raise ValueError(f"config.json and the weights in {folder} do not belong together: {problem}")
    return model


def _misfit(model: PreTrainedModel, report: dict[str, Any]) -> str:
    """How config.json and the weights differ; empty where they do not. What is missing transformers makes up."""
    if missing := sorted(report["missing_keys"]):
        return f"there are no weights {_some(missing)}"
    if others := sorted(report["mismatched_keys"]):
        name, stored, expected = others[0]
        return f"{name} has the shape {[*stored]}, it should have {[*expected]} ({len(others)} such weights)"
    if unknown := sorted(report["unexpected_keys"]):
        return f"the model has no use for the weights {_some(unknown)}"
    said, found = model.config.architectures or [type(model).__name__], type(model).__name__
    return "" if found in said else f"it is made for {', '.join(said)}, and {found} is the causal language model"


def _some(names: list[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return f"{', '.join(names[:_NAMED])}{more}"


def canary_difference(checkpoint: Checkpoint) -> float:
    """Mean absolute difference between the canary's logprobs and those of the weights, on the CPU in float32.

    Raises:
        ValueError: see `load_model`.
    """
    model = load_model(checkpoint.model)
    tokens = torch.tensor([checkpoint.canary.token_ids])
    with torch.no_grad():
        logits: Tensor = model(tokens).logits[0, :-1]
    logp = logits.log_softmax(-1).gather(-1, tokens[0, 1:, None])[:, 0]
    return float((logp - torch.tensor(checkpoint.canary.logprobs)).abs().mean())


def not_finite(path: Path) -> list[str]:
    """Names of the tensors of a safetensors file that hold NaN or infinities; one is in memory at a time."""
    with safe_open(path, framework="pt") as file:
        return [name for name in file.keys() if not _is_finite(file.get_tensor(name))]  # noqa: SIM118 - no mapping


def _is_finite(tensor: Tensor) -> bool:
    wide = tensor.float() if tensor.itemsize < 2 else tensor  # torch does not ask it of numbers of 8 bits
    return bool(wide.isfinite().all())
