"""The critic: it estimates the values of action tokens, by a head on the policy or by a model of its own."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from configs.train import PPO, Optimizer
from configs.train import Critic as CriticKnobs
from tasks.train.mesh import ALONE, Mesh
from tasks.train.optimizer_state import make_adamw
from tasks.train.policy import load_policy
from tasks.train.sharding import shard

Number = TypeVar("Number", Tensor, float)

BETA = 0.99995
"""Decay of the exponential mean and standard deviation of returns in each update."""
_SMALLEST_VARIANCE = 1e-2  # keeps returns that hardly vary from being scaled up


class ValueNorm:
    """The running mean and standard deviation of returns, in float64.

    `exp`: `m <- beta m + (1 - beta) batch mean`, and the same for the squares, divided by the sum of the weights
    (debiased). `none`: mean 0 and standard deviation 1.
    Source: PPO in AReaL (arXiv 2505.24298).
    """

    def __init__(self, kind: str, beta: float = BETA) -> None:
        self._kind, self._beta = kind, beta
        self.sums = [0.0, 0.0, 0.0]
        """Sums of the weights, of the weighted values and of the weighted squares."""

    def update(self, returns: Tensor) -> None:
        """Add a batch of returns [A] to the statistics."""
        if self._kind == "none":
            return
        values = returns.double()
        batch = [1.0, values.mean().item(), (values**2).mean().item()]
        self.sums = [self._beta * old + (1 - self._beta) * new for old, new in zip(self.sums, batch, strict=True)]

    @property
    def mean(self) -> float:
        return self.sums[1] / self.sums[0] if self.sums[0] else 0.0

    @property
    def std(self) -> float:
        if not self.sums[0]:
            return 1.0
        return math.sqrt(max(_SMALLEST_VARIANCE, self.sums[2] / self.sums[0] - self.mean**2))

    def normalise(self, values: Number) -> Number:
        """Convert from units of returns to the normalised units that the critic learns."""
        return (values - self.mean) / self.std

    def denormalise(self, values: Number) -> Number:
        """Convert from the critic's normalised units to units of returns."""
        return values * self.std + self.mean


class Critic:
    """A linear head, initialised with zeros, on the last hidden states of the policy or of a model of its own.

    Args:
        knobs: the configuration's `ppo.critic`.
        policy: the policy in training, whose hidden states a value head reads.
        first: folder of policy version 0; a model of its own starts from these weights.
        ppo: how a model of its own is loaded (device, gradient checkpointing).
        optimizer: the policy's knobs; a model of its own gets another AdamW with these knobs.
        mesh: the ranks that share it.
    """

    def __init__(
        self,
        knobs: CriticKnobs,
        policy: PreTrainedModel,
        first: Path,
        ppo: PPO,
        optimizer: Optimizer,
        mesh: Mesh = ALONE,
    ) -> None:
        self.knobs = knobs
        self.own: PreTrainedModel | None = None
        self.adamw: torch.optim.AdamW | None = None
        """The optimizer of a model of its own; None for a head on the policy, which the policy's optimizer steps."""
        self.norm = ValueNorm(knobs.value_norm)
        self.head = nn.Linear(policy.config.hidden_size, 1)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)
        self.head.to(policy.device)
        shard(self.head, mesh)
        if knobs.model == "own":
            self.own = load_policy(first, ppo, mesh)
            self.adamw = make_adamw([(knobs.lr or optimizer.lr, self.parameters())], optimizer)

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Iterate over the parameters of the critic alone, without the output layer of a language model."""
        if self.own is not None:
            for name, parameter in self.own.base_model.named_parameters():
                yield f"model.{name}", parameter
        for name, parameter in self.head.named_parameters():
            yield f"head.{name}", parameter

    @property
    def modules(self) -> list[nn.Module]:
        """The head and the model of its own."""
        return [self.head, *([self.own] if self.own else [])]

    def parameters(self) -> list[nn.Parameter]:
        return [parameter for _, parameter in self.named_parameters()]

    def read(self, states: Tensor) -> Tensor:
        """Compute values [...] in normalised units from hidden states [..., H], in float32."""
        with torch.autocast(states.device.type, enabled=False):
            values: Tensor = self.head(states.float()).squeeze(-1)
        return values
