"""Minibatches of whole groups, cut into right-padded micro-batches under a token budget."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

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
class Piece:
    """One sequence of a sample. A sample has several if a chat template rewrote history."""

    sample: int  # index of the sample
    start: int  # token_ids[start:end]
    end: int
    actions: slice  # its part of the sample's action tokens

    @property
    def length(self) -> int:
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """The input of one forward pass: B sequences of up to T tokens, with A action tokens in total."""

    trajectory_ids: list[str]  # B
    lengths: list[int]  # B, tokens without padding
    tokens: Tensor  # [B, T] int64, padded with 0 at the right
    rows: Tensor  # [A] int64, the sequence of each action token
    columns: Tensor  # [A] int64, its position in the sequence, never 0
    behaviour: Tensor  # [A] float32
    advantages: Tensor  # [A] float32
    proximal: Tensor | None = None  # [A] float32, like the three below; see `Columns`
    reference: Tensor | None = None
    values: Tensor | None = None
    returns: Tensor | None = None


Minibatch = list[MicroBatch]
"""The micro-batches of one optimizer step."""


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
    samples: Sequence[Sample], columns: Sequence[Columns], indices: Iterable[int], budget: int, device: torch.device
) -> Minibatch:
    """Collate the samples at `indices` into micro-batches of at most `budget` padded tokens.

    Leave out action tokens that are not in the loss, and sequences without any action token in the loss.
    """
    trained = [piece for piece in pieces(samples, indices) if samples[piece.sample].in_loss[piece.actions].any()]
    return [collate(samples, columns, part, device) for part in cut_by_length(trained, budget)]


def pieces(samples: Sequence[Sample], indices: Iterable[int]) -> list[Piece]:
    """List the sequences of the samples at `indices`."""
    sequences = []
    for index in indices:
        sample = samples[index]
        bounds = [*sample.starts.tolist(), len(sample.token_ids)]
        splits = np.searchsorted(sample.actions, bounds).tolist()
        for start, end, first, last in zip(bounds, bounds[1:], splits, splits[1:], strict=False):
            sequences.append(Piece(index, start, end, slice(first, last)))
    return sequences


def cut_by_length(items: Sequence[Piece], budget: int) -> list[list[Piece]]:
    """Cut pieces into micro-batches of at most `budget` padded tokens (B * T); a longer piece is a micro-batch alone.

    The longest pieces come first: this keeps the padding small, and a lack of memory shows at once.
    """
    rest, parts = sorted(items, key=lambda piece: (-piece.length, piece.sample, piece.start)), []
    while rest:
        count = max(1, budget // rest[0].length)
        parts.append(rest[:count])
        rest = rest[count:]
    return parts


def collate(
    samples: Sequence[Sample], columns: Sequence[Columns], part: Sequence[Piece], device: torch.device
) -> MicroBatch:
    """Collate B pieces into one micro-batch."""
    masks = [samples[piece.sample].in_loss[piece.actions] for piece in part]

    def gather(array_of: Callable[[int], np.ndarray]) -> Tensor:
        """Join the entries of the pieces' tokens in the loss into one tensor [A]."""
        arrays = [array_of(piece.sample)[piece.actions][mask] for piece, mask in zip(part, masks, strict=True)]
        return torch.from_numpy(np.concatenate(arrays)).to(device)

    def column(name: str) -> Tensor | None:
        present = [getattr(columns[piece.sample], name) is not None for piece in part]
        return gather(lambda index: getattr(columns[index], name)).float() if all(present) else None

    positions = [
        samples[piece.sample].actions[piece.actions][mask] - piece.start
        for piece, mask in zip(part, masks, strict=True)
    ]
    rows = np.repeat(np.arange(len(part)), [len(of_piece) for of_piece in positions])
    return MicroBatch(
        trajectory_ids=[samples[piece.sample].trajectory_id for piece in part],
        lengths=[piece.length for piece in part],
        tokens=stack_tokens(samples, part, device),
        rows=torch.from_numpy(rows).to(device),
        columns=torch.from_numpy(np.concatenate(positions)).to(device),
        behaviour=gather(lambda index: samples[index].behaviour),
        advantages=gather(lambda index: columns[index].advantages).float(),
        proximal=column("proximal"),
        reference=column("reference"),
        values=column("values"),
        returns=column("returns"),
    )


def stack_tokens(samples: Sequence[Sample], part: Sequence[Piece], device: torch.device) -> Tensor:
    """Stack the token ids of B pieces into [B, T], padded with 0 at the right."""
    tokens = np.zeros((len(part), max(piece.length for piece in part)), np.int64)
    for row, piece in zip(tokens, part, strict=True):
        row[: piece.length] = samples[piece.sample].token_ids[piece.start : piece.end]
    return torch.from_numpy(tokens).to(device)
