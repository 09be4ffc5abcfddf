"""The reference policy: the KL penalty keeps the policy close to it."""

from pathlib import Path

import torch
from transformers import PreTrainedModel

from configs.train import PPO
from tasks.train.mesh import ALONE, Mesh
from tasks.train.policy import load_policy

EMA_DECAY = 0.99
"""Weight of the old average of a moving reference in each update."""


class Reference:
    """Policy version 0, or the exponential moving average of all policy versions, which starts from version 0.

    Args:
        folder: folder of policy version 0.
        ppo: the knobs.
        mesh: the ranks that share it.
    """

    def __init__(self, folder: Path, ppo: PPO, mesh: Mesh = ALONE) -> None:
        self.model: PreTrainedModel = load_policy(folder, ppo, mesh).requires_grad_(False)
        self._decay = EMA_DECAY if ppo.kl.reference == "ema" else None

    @property
    def moves(self) -> bool:
        return self._decay is not None

    @torch.no_grad()
    def follow(self, policy: PreTrainedModel) -> None:
        """Move a moving reference after an update: `reference <- decay * reference + (1 - decay) * policy`."""
        if self._decay is not None:
            for averaged, present in zip(self.model.parameters(), policy.parameters(), strict=True):
                averaged.lerp_(present, 1 - self._decay)
