"""Passes over the samples without gradient: they compute one number (logprob, value) for each action token."""

from collections.abc import Callable, Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from tasks.train.mesh import Mesh
from tasks.train.rows import Batching, Places, Rows, arrange, cut, find_places, pieces
from tasks.train.samples import Logprobs, Sample, name_some

TokenScorer = Callable[[Rows, Places], Tensor]
"""A function of tokens and A places in them; it returns one number for each place."""


@torch.no_grad()
def score_action_tokens(
    scorer: TokenScorer, samples: Sequence[Sample], indices: Iterable[int], batching: Batching
) -> dict[int, Logprobs]:
    """Compute the numbers of all A action tokens of each sample at `indices`; return an array [A] for each index.

    Each rank computes its share, and gets those of all.
    """
    scores = {index: np.zeros(len(samples[index].actions), np.float32) for index in indices}
    for part in cut(samples, pieces(samples, scores), batching):
        scored = [piece for segment in part for piece in segment.pieces]
        positions = [samples[piece.sample].actions[piece.actions] - piece.start for piece in scored]
        numbers = scorer(arrange(part, batching), find_places(part, positions, batching)).cpu().numpy()
        ends = np.cumsum([0, *map(len, positions)])
        for piece, start, end in zip(scored, ends, ends[1:], strict=False):
            scores[piece.sample][piece.actions] = numbers[start:end]
    return _from_all_ranks(scores, batching.mesh)


def _from_all_ranks(scores: dict[int, Logprobs], mesh: Mesh) -> dict[int, Logprobs]:
    """Add up the ranks' arrays, which are 0 where another rank computed: adding 0 changes no number."""
    if mesh.size == 1 or not scores:
        return scores
    joined = mesh.total(torch.from_numpy(np.concatenate([*scores.values()]))).numpy()
    ends = np.cumsum([len(of_sample) for of_sample in scores.values()])
    return dict(zip(scores, np.split(joined, ends[:-1]), strict=True))


@torch.no_grad()
def bootstrap_values(
    scorer: TokenScorer, samples: Sequence[Sample], indices: Sequence[int], batching: Batching
) -> dict[int, float]:
    """Compute, for each sample at `indices`, the number of the position that would follow its last action token."""
    values = dict.fromkeys(indices, 0.0)
    last = [max(pieces(samples, [index]), key=lambda piece: piece.start) for index in indices]
    for part in cut(samples, last, batching):
        scored = [piece for segment in part for piece in segment.pieces]
        after = [samples[piece.sample].actions[-1:] - piece.start + 1 for piece in scored]
        numbers = scorer(arrange(part, batching), find_places(part, after, batching))
        values |= {piece.sample: number for piece, number in zip(scored, numbers.tolist(), strict=True)}
    total = batching.mesh.total(torch.tensor([*values.values()], dtype=torch.float64)).tolist()
    return dict(zip(values, total, strict=True))


def refuse_not_finite(quantity: str, samples: Sequence[Sample], arrays: Iterable[tuple[int, np.ndarray]]) -> None:
    """Raise ValueError if a sample's array holds NaN or an infinity; the message names the trajectories."""
    ids = [samples[index].trajectory_id for index, array in arrays if not np.isfinite(array).all()]
    if ids:
        raise ValueError(
            f"NaN or infinite {quantity} with the trajectories {name_some(ids)}: nothing was trained. "
            "Check these rows, or continue from the last checkpoint with a lower optimizer.lr"
        )
