"""Minibatches of whole groups, cut into right-padded micro-batches under a token budget."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from configs.schema import PPO
from tasks.ppo.samples import Floats, Sample


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """What one forward pass sees: B sequences of up to T tokens, A action tokens in all of them together."""

    trajectory_ids: list[str]  # B
    tokens: Tensor  # [B, T] int64, padded with 0 at the right
    rows: Tensor  # [A] int64, the sequence of each action token
    columns: Tensor  # [A] int64, its position in the sequence, never 0
    behaviour: Tensor  # [A] float32
    proximal: Tensor  # [A] float32, the behaviour logprobs until they are recomputed
    advantages: Tensor  # [A] float32


Minibatch = list[MicroBatch]
"""What one optimizer step sees."""


def make_minibatches(
    samples: Sequence[Sample],
    advantages: Sequence[Floats],
    ppo: PPO,
    generator: torch.Generator,
    device: torch.device,
) -> list[Minibatch]:
    """Every sample once, in `ppo.minibatches` random minibatches of micro-batches of `ppo.micro_batch_tokens`."""
    lengths = [len(sample.token_ids) for sample in samples]

    def minibatch(indices: list[int]) -> Minibatch:
        parts = cut_by_length(lengths, indices, ppo.micro_batch_tokens)
        return [collate([samples[i] for i in part], [advantages[i] for i in part], device) for part in parts]

    return [minibatch(indices) for indices in draw_minibatches(samples, ppo.minibatches, generator)]


def draw_minibatches(samples: Sequence[Sample], count: int, generator: torch.Generator) -> list[list[int]]:
    """Splits the samples at random, by whole groups (problems), into `count` parts, fewer where groups are fewer.

    Never by length: length goes with success, and minibatches that differ in it pull the policy apart.

    Returns:
        for each minibatch the indices of its samples.
    """
    groups: dict[str, list[int]] = {}
    for index, sample in enumerate(samples):
        groups.setdefault(sample.problem_id, []).append(index)
    members = list(groups.values())
    order = torch.randperm(len(members), generator=generator).numpy()
    parts = np.array_split(order, min(count, len(members)))
    return [[index for group in part for index in members[group]] for part in parts]


def cut_by_length(lengths: Sequence[int], indices: Sequence[int], budget: int) -> list[list[int]]:
    """Cuts a minibatch into micro-batches of at most `budget` padded tokens; a longer sample stands alone.

    The longest come first: padding is small, and memory that does not suffice shows at once.

    Args:
        lengths: of all samples, in tokens.
        indices: the samples of the minibatch.
        budget: padded tokens, B * T, of a micro-batch.
    """
    rest, parts = sorted(indices, key=lambda index: (-lengths[index], index)), []
    while rest:
        count = max(1, budget // lengths[rest[0]])
        parts.append(rest[:count])
        rest = rest[count:]
    return parts


def collate(samples: Sequence[Sample], advantages: Sequence[Floats], device: torch.device) -> MicroBatch:
    """Stacks samples into tensors; a turn's advantage goes to all its action tokens.

    Args:
        samples: B of them.
        advantages: [K] for each sample.
        device: where the tensors go.
    """
    tokens = np.zeros((len(samples), max(len(sample.token_ids) for sample in samples)), np.int64)
    for row, sample in zip(tokens, samples, strict=True):
        row[: len(sample.token_ids)] = sample.token_ids
    behaviour = _tensor([sample.behaviour for sample in samples], device)
    by_token = [turns[sample.turn_of_action] for sample, turns in zip(samples, advantages, strict=True)]
    return MicroBatch(
        trajectory_ids=[sample.trajectory_id for sample in samples],
        tokens=torch.from_numpy(tokens).to(device),
        rows=_tensor([np.full(len(sample.actions), row) for row, sample in enumerate(samples)], device),
        columns=_tensor([sample.actions for sample in samples], device),
        behaviour=behaviour,
        proximal=behaviour,
        advantages=_tensor(by_token, device).float(),
    )


def _tensor(parts: Sequence[np.ndarray], device: torch.device) -> Tensor:
    return torch.from_numpy(np.concatenate(parts)).to(device)
