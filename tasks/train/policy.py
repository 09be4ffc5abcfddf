"""The policy: a transformers causal language model in a folder, and a canary that tells its weights from others."""

from pathlib import Path

import numpy as np
import torch
from transformers import PreTrainedModel

from configs.schema import PPO
from storage.versions.checkpoints import Canary
from storage.versions.weights import load_model
from tasks.train.logprobs import action_logprobs

CANARY_TOKENS = 256
"""At most; a server with a shorter context looks at the first ones."""


def load_policy(folder: Path, ppo: PPO) -> PreTrainedModel:
    """Loads a causal language model with float32 weights from safetensors onto `ppo.device`.

    In evaluation mode: dropout would make the trained policy another than the sampled one. With gradient
    checkpointing in training mode, for transformers checkpoints only there (current models have no dropout).

    Raises:
        ValueError: `folder` is none, or its weights and its config.json do not belong together.
    """
    policy = load_model(folder)
    policy.to(_device(ppo.device))  # type: ignore[arg-type]  # wrapped by a decorator without types
    for parameter in policy.parameters():
        parameter.data = parameter.data.clone()  # off the mapped file: alignment there changes the last bits
    if ppo.gradient_checkpointing:
        policy.gradient_checkpointing_enable({"use_reentrant": False})
    policy.train(ppo.gradient_checkpointing)
    return policy


def save_policy(model: PreTrainedModel, folder: Path) -> None:
    """Writes config.json, generation_config.json and float32 weights in one model.safetensors."""
    model.save_pretrained(folder, max_shard_size="1TB")


def make_canary(model: PreTrainedModel, chunk_tokens: int) -> Canary:
    """Logprobs of 256 token ids (fewer where the model reads fewer), in the precision of the weights.

    The ids depend on nothing but the size of the vocabulary; those of a shorter canary are the first of a longer one's.

    Raises:
        ValueError: a logprob is NaN or infinite, though the weights may be finite.
    """
    length = min(CANARY_TOKENS, getattr(model.config, "max_position_embeddings", CANARY_TOKENS))
    ids = np.random.default_rng(0).integers(model.config.vocab_size, size=length)
    tokens = torch.from_numpy(ids).to(model.device)[None]
    columns = torch.arange(1, length, device=model.device)
    with torch.no_grad():
        logp, _ = action_logprobs(model, tokens, torch.zeros_like(columns), columns, 1.0, chunk_tokens)
    if not logp.isfinite().all():
        raise ValueError("the policy's logprobs are NaN or infinite: its weights overflow, or are NaN themselves")
    return Canary(ids.tolist(), logp.tolist())


def _device(name: str) -> torch.device:
    if name != "auto":
        return torch.device(name)
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
