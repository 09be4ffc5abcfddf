"""Passes over the samples without gradient, before an update: what models say of all action tokens."""

from collections.abc import Callable, Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from tasks.train.batches import cut_by_length, pieces, stack_tokens
from tasks.train.samples import Logprobs, Sample, name_some

TokenScorer = Callable[[Tensor, Tensor, Tensor], Tensor]
"""From tokens [B, T], rows [A] and columns [A] of positions to a number [A] for each of them."""


@torch.no_grad()
def score_action_tokens(
    look: TokenScorer, samples: Sequence[Sample], indices: Iterable[int], budget: int, device: torch.device
) -> dict[int, Logprobs]:
    """For each sample at `indices` an array of its A action tokens.

    Args:
        look: what to find out.
        samples: all of them.
        indices: which of them.
        budget: padded tokens in one forward pass.
        device: where the models are.
    """
    found = {index: np.empty(len(samples[index].actions), np.float32) for index in indices}
    for part in cut_by_length(pieces(samples, found), budget):
        positions = [samples[piece.sample].actions[piece.actions] - piece.start for piece in part]
        counts = [len(mine) for mine in positions]
        rows = torch.from_numpy(np.repeat(np.arange(len(part)), counts)).to(device)
        columns = torch.from_numpy(np.concatenate(positions)).to(device)
        numbers = look(stack_tokens(samples, part, device), rows, columns).cpu().numpy()
        for piece, mine in zip(part, np.split(numbers, np.cumsum(counts)[:-1]), strict=True):
            found[piece.sample][piece.actions] = mine
    return found


@torch.no_grad()
def bootstrap_values(
    look: TokenScorer, samples: Sequence[Sample], indices: Iterable[int], budget: int, device: torch.device
) -> dict[int, float]:
    """For each sample at `indices` the number of the position that would follow its last action token."""
    found: dict[int, float] = {}
    last = [max(pieces(samples, [index]), key=lambda piece: piece.start) for index in indices]
    for part in cut_by_length(last, budget):
        ends = [int(samples[piece.sample].actions[-1]) - piece.start + 1 for piece in part]
        rows = torch.arange(len(part), device=device)
        numbers = look(stack_tokens(samples, part, device), rows, torch.tensor(ends, device=device))
        found |= {piece.sample: number for piece, number in zip(part, numbers.tolist(), strict=True)}
    return found


def refuse_not_finite(what: str, samples: Sequence[Sample], arrays: Iterable[tuple[int, np.ndarray]]) -> None:
    """Raises ValueError where an array of a sample holds NaN or an infinity, naming the trajectories."""
    ids = [samples[index].trajectory_id for index, array in arrays if not np.isfinite(array).all()]
    if ids:
        raise ValueError(
            f"NaN or infinite {what} with the trajectories {name_some(ids)}: nothing was trained. "
            "Look at these rows, or go on from the last checkpoint with a lower optimizer.lr"
        )
