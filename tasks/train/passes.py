"""Passes over the samples without gradient: they compute one number (logprob, value) for each action token."""

from collections.abc import Callable, Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from tasks.train.batches import Rows, arrange, cut_by_length, pieces
from tasks.train.samples import Logprobs, Sample, name_some

TokenScorer = Callable[[Rows, Tensor, Tensor], Tensor]
"""A function of tokens and of rows [A] and columns [A] of places in them; it returns one number for each place."""


@torch.no_grad()
def score_action_tokens(
    scorer: TokenScorer,
    samples: Sequence[Sample],
    indices: Iterable[int],
    budget: int,
    device: torch.device,
    *,
    packed: bool = False,
) -> dict[int, Logprobs]:
    """Compute the numbers of all A action tokens of each sample at `indices`.

    Args:
        scorer: computes the numbers of one forward pass.
        samples: all samples.
        indices: the samples to score.
        budget: tokens in one forward pass, padding included.
        device: the models' device.
        packed: whether the models read packed rows.

    Returns:
        an array [A] for each index.
    """
    scores = {index: np.empty(len(samples[index].actions), np.float32) for index in indices}
    for part in cut_by_length(pieces(samples, scores), budget, packed=packed):
        arranged = arrange(samples, part, device, packed=packed)
        positions = [samples[piece.sample].actions[piece.actions] - piece.start for piece in part]
        counts = [len(of_piece) for of_piece in positions]
        rows = torch.from_numpy(np.repeat(arranged.rows, counts)).to(device)
        columns = torch.from_numpy(np.concatenate(positions) + np.repeat(arranged.columns, counts)).to(device)
        numbers = scorer(arranged, rows, columns).cpu().numpy()
        for piece, of_piece in zip(part, np.split(numbers, np.cumsum(counts)[:-1]), strict=True):
            scores[piece.sample][piece.actions] = of_piece
    return scores


@torch.no_grad()
def bootstrap_values(
    scorer: TokenScorer,
    samples: Sequence[Sample],
    indices: Iterable[int],
    budget: int,
    device: torch.device,
    *,
    packed: bool = False,
) -> dict[int, float]:
    """Compute, for each sample at `indices`, the number of the position that would follow its last action token."""
    values: dict[int, float] = {}
    last = [max(pieces(samples, [index]), key=lambda piece: piece.start) for index in indices]
    for part in cut_by_length(last, budget, packed=packed):
        arranged = arrange(samples, part, device, packed=packed)
        ends = [int(samples[piece.sample].actions[-1]) - piece.start + 1 for piece in part]
        columns = torch.from_numpy(arranged.columns + np.array(ends)).to(device)
        numbers = scorer(arranged, torch.from_numpy(arranged.rows).to(device), columns)
        values |= {piece.sample: number for piece, number in zip(part, numbers.tolist(), strict=True)}
    return values


def refuse_not_finite(quantity: str, samples: Sequence[Sample], arrays: Iterable[tuple[int, np.ndarray]]) -> None:
    """Raise ValueError if a sample's array holds NaN or an infinity; the message names the trajectories."""
    ids = [samples[index].trajectory_id for index, array in arrays if not np.isfinite(array).all()]
    if ids:
        raise ValueError(
            f"NaN or infinite {quantity} with the trajectories {name_some(ids)}: nothing was trained. "
            "Check these rows, or continue from the last checkpoint with a lower optimizer.lr"
        )
