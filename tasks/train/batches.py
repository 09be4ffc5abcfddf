"""Minibatches of whole groups, cut into micro-batches under a token budget."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tasks.train.rows import Batching, Places, Rows, Segment, arrange, cut, find_places, pieces
from tasks.train.samples import Floats, Logprobs, Sample


@dataclass(slots=True)
class Columns:
    """The training data of one sample's A action tokens. None: not needed."""

    advantages: Floats  # A
    proximal: Logprobs | None = None  # A; None: the training pass computes them, since the weights are still the same
    reference: Logprobs | None = None  # A
    values: Logprobs | None = None  # A, the critic's values before the update, normalised
    returns: Floats | None = None  # A, normalised


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """The input of one forward pass: S sequences with A action tokens in total."""

    samples: Tensor  # [A] int64, the index of the token's sample
    lengths: list[int]  # S
    computed: int  # tokens in the rows without padding: the sum of the lengths, or less with trees
    rows: Rows  # [B, T]
    places: Places  # [A]
    sequences: Tensor  # [A] int64, its sequence
    behaviour: Tensor  # [A] float32
    advantages: Tensor  # [A] float32
    proximal: Tensor | None = None  # [A] float32, like the three below; see `Columns`
    reference: Tensor | None = None
    values: Tensor | None = None
    returns: Tensor | None = None


Minibatch = list[MicroBatch]
"""The micro-batches of one optimizer step, those of this rank."""


def draw_minibatches(samples: Sequence[Sample], count: int, generator: torch.Generator) -> list[list[int]]:
    """Split the samples at random into `count` minibatches of whole groups, or fewer if there are fewer groups.

    Samples are not sorted by length: length correlates with success, and minibatches of different lengths would pull
    the policy in different directions.

    Returns:
        the indices of its samples, for each minibatch.
    """
    groups: dict[str, list[int]] = {}
    for index, sample in enumerate(samples):
        groups.setdefault(sample.problem_id, []).append(index)
    members = list(groups.values())
    order = torch.randperm(len(members), generator=generator).numpy()
    parts = np.array_split(order, min(count, len(members)))
    return [[index for group in part for index in members[group]] for part in parts]


def make_minibatch(
    samples: Sequence[Sample], columns: Sequence[Columns], indices: Iterable[int], batching: Batching
) -> Minibatch:
    """Collate the samples at `indices` into micro-batches.

    Leave out action tokens that are not in the loss, and sequences without any action token in the loss.
    """
    trained = [piece for piece in pieces(samples, indices) if samples[piece.sample].in_loss[piece.actions].any()]
    return [collate(samples, columns, part, batching) for part in cut(samples, trained, batching)]


def collate(
    samples: Sequence[Sample], columns: Sequence[Columns], part: Sequence[Segment], batching: Batching
) -> MicroBatch:
    """Collate the S pieces of some segments into one micro-batch."""
    collated = [piece for segment in part for piece in segment.pieces]
    masks = [samples[piece.sample].in_loss[piece.actions] for piece in collated]

    def gather(array_of: Callable[[int], np.ndarray]) -> Tensor:
        """Join the entries of the pieces' tokens in the loss into one tensor [A]."""
        arrays = [array_of(piece.sample)[piece.actions][mask] for piece, mask in zip(collated, masks, strict=True)]
        joined = np.concatenate(arrays) if arrays else np.empty(0, np.float32)
        return torch.from_numpy(joined).to(batching.device)

    def column(name: str) -> Tensor | None:
        present = [getattr(columns[piece.sample], name) is not None for piece in collated]
        if not present:  # an empty micro-batch has the columns of the others
            present = [getattr(columns[0], name) is not None]
        return gather(lambda index: getattr(columns[index], name)).float() if all(present) else None

    positions = [
        samples[piece.sample].actions[piece.actions][mask] - piece.start
        for piece, mask in zip(collated, masks, strict=True)
    ]
    lengths = np.array([len(of_piece) for of_piece in positions], np.int64)
    sequences = np.repeat(np.arange(len(collated)), lengths)
    return MicroBatch(
        samples=torch.from_numpy(np.repeat(np.array([p.sample for p in collated], np.int64), lengths)).to(
            batching.device
        ),
        lengths=[piece.length for piece in collated],
        computed=sum(segment.length for segment in part),
        rows=arrange(part, batching),
        places=find_places(part, positions, batching),
        sequences=torch.from_numpy(sequences).to(batching.device),
        behaviour=gather(lambda index: samples[index].behaviour),
        advantages=gather(lambda index: columns[index].advantages).float(),
        proximal=column("proximal"),
        reference=column("reference"),
        values=column("values"),
        returns=column("returns"),
    )
