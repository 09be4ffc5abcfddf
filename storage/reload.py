"""Whether stored weights are the ones that their checkpoint's canary was made with: by loading them."""

from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

from storage.checkpoints import Checkpoint


def canary_difference(checkpoint: Checkpoint) -> float:
    """Mean absolute difference between the canary's logprobs and those of the weights, on the CPU in float32.

    Raises:
        ValueError: weights are missing. And whatever else transformers raises where a folder holds no model.
    """
    disable_progress_bar()
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        checkpoint.model,
        dtype=torch.float32,
        use_safetensors=True,
        trust_remote_code=False,
        local_files_only=True,
        attn_implementation="sdpa",
        output_loading_info=True,
    )
    model, report = loaded
    if report["missing_keys"]:
        raise ValueError(f"the weights {sorted(report['missing_keys'])} are missing")
    tokens = torch.tensor([checkpoint.canary.token_ids])
    with torch.no_grad():
        logits: Tensor = model.eval()(tokens).logits[0, :-1]
    logp = logits.log_softmax(-1).gather(-1, tokens[0, 1:, None])[:, 0]
    return float((logp - torch.tensor(checkpoint.canary.logprobs)).abs().mean())


def not_finite(path: Path) -> list[str]:
    """Names of the tensors of a safetensors file that hold NaN or infinities; one is in memory at a time."""
    with safe_open(path, framework="pt") as file:
        return [name for name in file.keys() if not _is_finite(file.get_tensor(name))]  # noqa: SIM118 - no mapping


def _is_finite(tensor: Tensor) -> bool:
    wide = tensor.float() if tensor.itemsize < 2 else tensor  # torch does not ask it of numbers of 8 bits
    return bool(wide.isfinite().all())
