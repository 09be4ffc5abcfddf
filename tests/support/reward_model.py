"""A reward model for tests: a policy with a head of random numbers; and what a process knows of models."""

import shutil
from pathlib import Path

from tasks.inference import location


def save_reward_model(policy: Path, folder: Path) -> Path:
    """Write a sequence classifier with one label, with the tokenizer of the policy."""
    import torch
    from transformers import AutoModelForSequenceClassification

    shutil.copytree(policy, folder)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForSequenceClassification.from_pretrained(policy, num_labels=1, dtype=torch.float32)
    model.config.pad_token_id = 0
    model.save_pretrained(folder)
    return folder


def forget_models() -> None:
    """Forget the folders and identities of models, which a process looks up once: a test changes one."""
    location._found.cache_clear()
    location._known_identity.cache_clear()
