"""Minibatches of whole groups, cut into padded or packed micro-batches under a token budget."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from configs.schema import PPO
from tasks.train.samples import Floats, Ints, Logprobs, Sample

_CPU_TOKENS, _GPU_TOKENS = 2048, 16384
"""Default of `ppo.micro_batch_tokens`. On a CPU 8192 and more were slower, and 4096 was about as fast with more memory.
The number for a GPU was not measured. It is never chosen by time, because another cut into micro-batches changes the
last bits of the weights."""

_GRID = 8
"""Padded batches have 1 + 8n columns, of which the model does not read the last, and 8n rows or fewer than 8: oneDNN
compiles its kernels for each shape, which takes time and memory, so there are few shapes."""


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

    @property
    def width(self) -> int:
        """The columns of a padded batch whose longest piece this is."""
        return 1 + _up(self.length - 1)


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """The input of one forward pass: S sequences with A action tokens in total."""

    trajectory_ids: list[str]  # S
    lengths: list[int]  # S, tokens without padding
    tokens: Tensor  # [B, T] int64; see `Rows`
    positions: Tensor | None  # [B, T] int64; see `Rows`
    rows: Tensor  # [A] int64, the row of each action token
    columns: Tensor  # [A] int64, its column, never 0
    sequences: Tensor  # [A] int64, its sequence
    behaviour: Tensor  # [A] float32
    advantages: Tensor  # [A] float32
    proximal: Tensor | None = None  # [A] float32, like the three below; see `Columns`
    reference: Tensor | None = None
    values: Tensor | None = None
    returns: Tensor | None = None


Minibatch = list[MicroBatch]
"""The micro-batches of one optimizer step."""


def token_budget(ppo: PPO, device: torch.device) -> int:
    """Return the largest number of padded tokens in one forward pass."""
    return ppo.micro_batch_tokens or (_CPU_TOKENS if device.type == "cpu" else _GPU_TOKENS)


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
    samples: Sequence[Sample],
    columns: Sequence[Columns],
    indices: Iterable[int],
    budget: int,
    device: torch.device,
    *,
    packed: bool = False,
) -> Minibatch:
    """Collate the samples at `indices` into micro-batches of at most `budget` tokens, padding included.

    Leave out action tokens that are not in the loss, and sequences without any action token in the loss.
    """
    trained = [piece for piece in pieces(samples, indices) if samples[piece.sample].in_loss[piece.actions].any()]
    parts = cut_by_length(trained, budget, packed=packed)
    return [collate(samples, columns, part, device, packed=packed) for part in parts]


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


def cut_by_length(items: Iterable[Piece], budget: int, *, packed: bool = False) -> list[list[Piece]]:
    """Cut pieces into micro-batches of at most `budget` tokens; a longer piece is a micro-batch alone.

    Packed pieces count with their lengths, others with the width of the batch. The longest pieces come first: this
    keeps the padding small, and a lack of memory shows at once.
    """
    rest, parts = sorted(items, key=lambda piece: (-piece.length, piece.sample, piece.start)), []
    while rest:
        count = _packed(rest, budget) if packed else _padded(rest[0], budget)
        parts.append(rest[:count])
        rest = rest[count:]
    return parts


def _packed(rest: Sequence[Piece], budget: int) -> int:
    """Return how many of the pieces, at least 1, one packed row holds."""
    return max(1, int(np.searchsorted(np.cumsum([piece.length for piece in rest[:budget]]), budget, side="right")))


def _padded(longest: Piece, budget: int) -> int:
    """Return how many pieces, at least 1, a padded batch with this longest piece holds."""
    count = budget // longest.width
    return max(1, count // _GRID * _GRID or count)


def _up(number: int) -> int:
    return -(-number // _GRID) * _GRID


class Rows(NamedTuple):
    """The tokens of S pieces as [B, T], and where each piece begins.

    Example of pieces 5 6 7 and 8 9:

        padded    tokens [[5, 6, 7, 0 …], [8, 9, 0 …], …]  positions None               rows [0, 1]  columns [0, 0]
        packed    tokens [[5, 6, 7, 8, 9]]                 positions [[0, 1, 2, 0, 1]]  rows [0, 0]  columns [0, 3]
    """

    tokens: Tensor  # [B, T] int64
    positions: Tensor | None  # [B, T] int64, the position of each token in its piece; None: its column
    rows: Ints  # S
    columns: Ints  # S


def arrange(samples: Sequence[Sample], part: Sequence[Piece], device: torch.device, *, packed: bool = False) -> Rows:
    """Give each piece a row of its own, padded with 0 at the right, or pack all pieces into one row."""
    pieces_tokens = [samples[piece.sample].token_ids[piece.start : piece.end] for piece in part]
    lengths = np.array([piece.length for piece in part])
    if packed:
        starts = np.cumsum(lengths) - lengths
        positions = np.arange(lengths.sum()) - np.repeat(starts, lengths)
        tokens = torch.from_numpy(np.concatenate(pieces_tokens)).to(device)
        return Rows(tokens[None], torch.from_numpy(positions).to(device)[None], np.zeros_like(lengths), starts)
    rows = _up(len(part)) if len(part) > _GRID else len(part)
    table = np.zeros((rows, max(piece.width for piece in part)), np.int64)
    for row, of_piece in zip(table, pieces_tokens, strict=False):  # the rows after the last piece stay empty
        row[: len(of_piece)] = of_piece
    return Rows(torch.from_numpy(table).to(device), None, np.arange(len(part)), np.zeros_like(lengths))


def collate(
    samples: Sequence[Sample],
    columns: Sequence[Columns],
    part: Sequence[Piece],
    device: torch.device,
    *,
    packed: bool = False,
) -> MicroBatch:
    """Collate S pieces into one micro-batch."""
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
    sequences = np.repeat(np.arange(len(part)), [len(of_piece) for of_piece in positions])
    arranged = arrange(samples, part, device, packed=packed)
    return MicroBatch(
        trajectory_ids=[samples[piece.sample].trajectory_id for piece in part],
        lengths=[piece.length for piece in part],
        tokens=arranged.tokens,
        positions=arranged.positions,
        rows=torch.from_numpy(arranged.rows[sequences]).to(device),
        columns=torch.from_numpy(np.concatenate(positions) + arranged.columns[sequences]).to(device),
        sequences=torch.from_numpy(sequences).to(device),
        behaviour=gather(lambda index: samples[index].behaviour),
        advantages=gather(lambda index: columns[index].advantages).float(),
        proximal=column("proximal"),
        reference=column("reference"),
        values=column("values"),
        returns=column("returns"),
    )
