"""Sequences as the rows of a forward pass: padded, packed, or as trees that compute a common beginning once.

Why trees: the samples of a group have the same prompt, and often the same first words. A causal model computes the same
states for a token whenever the tokens before it are the same. So a group is one row of tokens, in which each token
reads only the tokens before it in its own sequence.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Literal, NamedTuple, Self

import numpy as np
import torch
from jaxtyping import Bool, Int
from torch import Tensor
from transformers import PreTrainedModel

from configs.train import PPO
from tasks.train.memory import CPU_TOKENS, GPU_TOKENS
from tasks.train.mesh import ALONE, Mesh, deal_out
from tasks.train.samples import Ints, Sample

PACKED_ATTENTION = "flash_attention_2"
"""The attention that reads packed rows without padding and without a mask over the whole row."""

_GRID = 8
"""Padded batches have 1 + 8n columns, of which the model does not read the last, and 8n rows or fewer than 8: oneDNN
compiles its kernels for each shape, which takes time and memory, so there are few shapes."""

_LONGEST_TREE = 1024
"""Largest number of tokens in a tree, because its attention computes all pairs of them."""
_TREE_SHARE = 0.5
"""A tree pays if it has at most this share of the tokens of its sequences."""
_TREE_MODELS = ("llama", "qwen2", "qwen3")
"""Models for which tests show that trees are right: all layers obey the mask, and no layer has a state or a window."""

Form = Literal["padded", "packed", "trees"]
"""The arrangement of sequences: each in a row of its own, all in one row, or each group in one row if that pays."""


@dataclass(frozen=True, slots=True)
class Batching:
    """The size, device and arrangement of forward passes."""

    budget: int  # largest number of tokens in one pass, padding included
    device: torch.device
    form: Form = "padded"
    mesh: Mesh = ALONE  # the ranks to which the passes are dealt out


def batching_for(model: PreTrainedModel, ppo: PPO, mesh: Mesh = ALONE) -> Batching:
    """Return the batching that is fastest for a model, as `policy.load_policy` set it up."""
    on_cpu, config = model.device.type == "cpu", model.config
    form: Form = "padded"
    if config._attn_implementation == PACKED_ATTENTION:
        form = "packed"
    elif config.model_type in _TREE_MODELS and not getattr(config, "use_sliding_window", False):
        form = "trees"
    budget = ppo.micro_batch_tokens or (CPU_TOKENS if on_cpu else GPU_TOKENS)
    return Batching(budget, model.device, form, mesh)


class Rows(NamedTuple):
    """The tokens of a forward pass.

    Example of the sequences 5 6 7 and 5 8:

        padded    tokens [[5, 6, 7, 0 …], [5, 8, 0 …], …]
        packed    tokens [[5, 6, 7, 5, 8]]  positions [[0, 1, 2, 0, 1]]
        trees     tokens [[5, 6, 7, 8]]     positions [[0, 1, 2, 1]]     the mask lets 8 read 5 and 8
    """

    tokens: Int[Tensor, "rows columns"]
    positions: Int[Tensor, "rows columns"] | None = None  # the position of each token in its sequence; None: its column
    mask: Bool[Tensor, "rows 1 columns columns"] | None = None  # what each column reads; None: the earlier ones


class Places(NamedTuple):
    """The places of A tokens in `Rows`, and of the tokens before them, whose states predict them."""

    rows: Int[Tensor, " actions"]
    columns: Int[Tensor, " actions"]
    before: Int[Tensor, " actions"]  # the column of the token before, in the same row

    @classmethod
    def padded(cls, rows: Tensor, columns: Tensor) -> Self:
        """Return places in padded rows."""
        return cls(rows, columns, columns - 1)


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
class Segment:
    """L tokens that are computed together: of one piece, or of the pieces of a group as a tree.

    Example of the pieces 5 6 7 and 5 8: Segment([…, …], tokens=[5, 6, 7, 8], paths=[[0, 1, 2], [0, 3]])
    """

    pieces: list[Piece]
    tokens: Ints  # L
    paths: list[Ints]  # for each piece, the index in `tokens` of each of its tokens

    @property
    def is_tree(self) -> bool:
        return len(self.pieces) > 1

    @property
    def length(self) -> int:
        return len(self.tokens)

    @property
    def width(self) -> int:
        """The columns of a padded batch whose longest segment this is."""
        return 1 + _up(self.length - 1)

    @property
    def positions(self) -> Ints:
        """The position [L] of each token in its sequence."""
        positions = np.empty(self.length, np.int64)
        for path in self.paths:
            positions[path] = np.arange(len(path))
        return positions

    @property
    def mask(self) -> np.ndarray:
        """The tokens that each token reads, [L, L] bool: itself and those before it in its sequence."""
        mask = np.zeros((self.length, self.length), np.bool_)
        for path in self.paths:
            mask[np.ix_(path, path)] = np.tri(len(path), dtype=np.bool_)
        return mask


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


def cut(samples: Sequence[Sample], sequences: Iterable[Piece], batching: Batching) -> list[list[Segment]]:
    """Cut sequences into this rank's forward passes of at most `batching.budget` tokens; a longer one is a pass alone.

    The longest come first: this keeps the padding small, and a lack of memory shows at once. Trees have passes of their
    own, because their attention needs a mask. All ranks have equally many passes, since each takes part in the passes
    of the others; so some may be empty.
    """
    if batching.form == "trees":
        segments = _trees(samples, sequences, min(batching.budget, _LONGEST_TREE))
    else:
        segments = [_alone(samples, piece) for piece in sequences]
    shares: list[list[Segment]] = [[] for _ in range(batching.mesh.size)]
    for segment, rank in zip(segments, deal_out([s.length for s in segments], batching.mesh.size), strict=True):
        shares[rank].append(segment)
    dealt = [_passes(share, batching) for share in shares]
    own = dealt[batching.mesh.rank]
    return own + [[]] * (max(map(len, dealt)) - len(own))


def _passes(segments: Sequence[Segment], batching: Batching) -> list[list[Segment]]:
    parts = []
    for are_trees in (True, False):
        rest = sorted((s for s in segments if s.is_tree == are_trees), key=_longest_first)
        while rest:
            count = _packed(rest, batching.budget) if batching.form == "packed" else _padded(rest[0], batching.budget)
            parts.append(rest[:count])
            rest = rest[count:]
    return parts


def _trees(samples: Sequence[Sample], sequences: Iterable[Piece], longest: int) -> list[Segment]:
    """Let the sequences of each problem share a tree, if it pays."""

    def problem(piece: Piece) -> tuple[str, int, int]:
        return samples[piece.sample].problem_id, piece.sample, piece.start

    segments = []
    for _, grouped in groupby(sorted(sequences, key=problem), lambda piece: samples[piece.sample].problem_id):
        group = list(grouped)
        tokens = [_tokens(samples, piece) for piece in group]
        most = min(longest, int(_TREE_SHARE * sum(map(len, tokens))))
        if tree := find_tree(tokens, most):
            segments.append(Segment(group, tree.tokens, tree.paths))
        else:
            segments += [_alone(samples, piece) for piece in group]
    return segments


def _alone(samples: Sequence[Sample], piece: Piece) -> Segment:
    tokens = _tokens(samples, piece)
    return Segment([piece], tokens, [np.arange(len(tokens))])


def _tokens(samples: Sequence[Sample], piece: Piece) -> Ints:
    return samples[piece.sample].token_ids[piece.start : piece.end]


def _longest_first(segment: Segment) -> tuple[int, int, int]:
    return -segment.length, segment.pieces[0].sample, segment.pieces[0].start


def _packed(rest: Sequence[Segment], budget: int) -> int:
    """Return how many of the segments, at least 1, one packed row holds."""
    lengths = [segment.length for segment in rest[:budget]]
    return max(1, int(np.searchsorted(np.cumsum(lengths), budget, side="right")))


def _padded(longest: Segment, budget: int) -> int:
    """Return how many segments, at least 1, a padded batch with this longest segment holds."""
    count = budget // longest.width
    return max(1, count // _GRID * _GRID or count)


def _up(number: int) -> int:
    return -(-number // _GRID) * _GRID


def arrange(part: Sequence[Segment], batching: Batching) -> Rows:
    """Give each segment a row of its own, padded with 0 at the right, or pack all of them into one row.

    An empty part becomes a row of two tokens without places: the rank still takes part in a pass.
    """
    if not part:
        return Rows(torch.zeros((1, 2), dtype=torch.int64, device=batching.device))
    if batching.form == "packed":
        joined = (np.concatenate([s.tokens for s in part]), np.concatenate([s.positions for s in part]))
        tokens, positions = (torch.from_numpy(array).to(batching.device)[None] for array in joined)
        return Rows(tokens, positions)
    rows = _up(len(part)) if len(part) > _GRID else len(part)  # the rows after the last segment stay empty
    width = max(segment.width for segment in part)
    table = np.zeros((rows, width), np.int64)
    for row, segment in zip(table, part, strict=False):
        row[: segment.length] = segment.tokens
    tokens = torch.from_numpy(table).to(batching.device)
    if not part[0].is_tree:
        return Rows(tokens)
    places, masks = np.zeros_like(table), np.tile(np.eye(width, dtype=np.bool_), (rows, 1, 1))
    for row, mask, segment in zip(places, masks, part, strict=False):
        row[: segment.length], mask[: segment.length, : segment.length] = segment.positions, segment.mask
    positions, mask = (torch.from_numpy(array).to(batching.device) for array in (places, masks))
    return Rows(tokens, positions, mask[:, None])


def find_places(part: Sequence[Segment], chosen: Sequence[Ints], batching: Batching) -> Places:
    """Return the places of tokens in the rows that `arrange` makes of these segments.

    Args:
        part: the segments.
        chosen: for each piece of the segments in their order, the positions of its chosen tokens, none of them 0; the
            position after its last token is allowed, and has no column of its own.
        batching: as for `arrange`.
    """
    packed, offset = batching.form == "packed", 0
    rows, columns, before = ([np.empty(0, np.int64)] for _ in range(3))
    of_piece = iter(chosen)
    for index, segment in enumerate(part):
        for path in segment.paths:
            positions = next(of_piece)
            rows.append(np.full(len(positions), 0 if packed else index))
            columns.append(offset + path[np.minimum(positions, len(path) - 1)])
            before.append(offset + path[positions - 1])
        offset += segment.length if packed else 0
    return Places(*(torch.from_numpy(np.concatenate(arrays)).to(batching.device) for arrays in (rows, columns, before)))


class PrefixTree(NamedTuple):
    """N tokens and the way of each sequence through them.

    Example of 5 6 7, 5 8 and 5 6: PrefixTree(tokens=[5, 6, 7, 8], paths=[[0, 1, 2], [0, 3], [0, 1]])
    """

    tokens: Ints  # N
    paths: list[Ints]  # for each sequence, the index in `tokens` of each of its tokens


def find_tree(sequences: Iterable[Ints], most: int) -> PrefixTree | None:
    """Return the prefix tree of sequences; None if it has more than `most` tokens."""
    nodes, paths = dict[tuple[int, int], int](), list[Ints]()  # (token before, token) -> token
    for sequence in sequences:
        node, path = -1, list[int]()
        for token in sequence.tolist():
            node = nodes.setdefault((node, token), len(nodes))
            path.append(node)
            if len(nodes) > most:
                return None
        paths.append(np.array(path))
    return PrefixTree(np.array([token for _, token in nodes]), paths)
