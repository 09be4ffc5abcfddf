"""Minibatches of whole groups, cut into right-padded micro-batches under a token budget."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tasks.train.samples import Floats, Logprobs, Sample


@dataclass(slots=True)
class Columns:
    """What is known of one sample's A action tokens when it is trained on. None: not needed."""

    advantages: Floats  # A
    proximal: Logprobs | None = None  # A; None: of the pass that trains, where the weights are still the same
    reference: Logprobs | None = None  # A
    values: Logprobs | None = None  # A, the critic's before the update, normalised
    returns: Floats | None = None  # A, normalised


@dataclass(frozen=True, slots=True)
class Piece:
    """One sequence of a sample, which has several where a chat template rewrote history."""

    sample: int
    start: int  # token_ids[start:end]
    end: int
    actions: slice  # of the sample's action tokens

    @property
    def length(self) -> int:
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """What one forward pass sees: B sequences of up to T tokens, A action tokens in all of them together."""

    trajectory_ids: list[str]  # B
    lengths: list[int]  # B, tokens without padding
    tokens: Tensor  # [B, T] int64, padded with 0 at the right
    rows: Tensor  # [A] int64, the sequence of each action token
    columns: Tensor  # [A] int64, its position in the sequence, never 0
    behaviour: Tensor  # [A] float32
    advantages: Tensor  # [A] float32
    proximal: Tensor | None = None  # [A] float32, and so below; see `Columns`
    reference: Tensor | None = None
    values: Tensor | None = None
    returns: Tensor | None = None


Minibatch = list[MicroBatch]
"""What one optimizer step sees."""


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


def make_minibatch(
    samples: Sequence[Sample], columns: Sequence[Columns], indices: Iterable[int], budget: int, device: torch.device
) -> Minibatch:
    """The samples at `indices` in micro-batches of `budget` padded tokens; tokens out of the loss are left out."""
    trained = [piece for piece in pieces(samples, indices) if samples[piece.sample].in_loss[piece.actions].any()]
    return [collate(samples, columns, part, device) for part in cut_by_length(trained, budget)]


def pieces(samples: Sequence[Sample], indices: Iterable[int]) -> list[Piece]:
    """The sequences of the samples at `indices`."""
    found = []
    for index in indices:
        sample = samples[index]
        bounds = [*sample.starts.tolist(), len(sample.token_ids)]
        splits = np.searchsorted(sample.actions, bounds).tolist()
        for start, end, first, last in zip(bounds, bounds[1:], splits, splits[1:], strict=False):
            found.append(Piece(index, start, end, slice(first, last)))
    return found


def cut_by_length(items: Sequence[Piece], budget: int) -> list[list[Piece]]:
    """Cuts pieces into micro-batches of at most `budget` padded tokens (B * T); a longer piece stands alone.

    The longest come first: padding is small, and memory that does not suffice shows at once.
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
    """Stacks B pieces into tensors."""
    kept = [samples[piece.sample].in_loss[piece.actions] for piece in part]

    def gather(of: Callable[[int], np.ndarray]) -> Tensor:
        """[A], from the [A] of each sample."""
        arrays = [of(piece.sample)[piece.actions][mask] for piece, mask in zip(part, kept, strict=True)]
        return torch.from_numpy(np.concatenate(arrays)).to(device)

    def column(name: str) -> Tensor | None:
        known = [getattr(columns[piece.sample], name) is not None for piece in part]
        return gather(lambda index: getattr(columns[index], name)).float() if all(known) else None

    positions = [
        samples[piece.sample].actions[piece.actions][mask] - piece.start for piece, mask in zip(part, kept, strict=True)
    ]
    rows = np.repeat(np.arange(len(part)), [len(mine) for mine in positions])
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
    """Token ids [B, T] of B pieces, padded with 0 at the right."""
    tokens = np.zeros((len(part), max(piece.length for piece in part)), np.int64)
    for row, piece in zip(tokens, part, strict=True):
        row[: piece.length] = samples[piece.sample].token_ids[piece.start : piece.end]
    return torch.from_numpy(tokens).to(device)
