"""Minibatches, and the rows of their forward passes: padded, or as trees that compute a common beginning once.

Why trees: the samples of a group have the same prompt, and often the same first words. A causal model computes the same
states for a token whenever the tokens before it are the same. So a group is one row of tokens, in which each token
reads only the tokens before it in its own sequence.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import reduce
from itertools import groupby, takewhile
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from configs.train import Train
from storage.grouping import grouped
from storage.records import Experts as StoredExperts
from tasks.train.experts import Experts
from tasks.train.mesh import ALONE, Mesh, deal_out
from tasks.train.samples import Bools, Floats, Ints, Logprobs, Sample, Tokens, by_problem

_GRID = 8
"""Padded batches have 1 + 8n columns, of which the model does not read the last, and 8n rows or fewer than 8: oneDNN
compiles its kernels for each shape, which takes time and memory, so there are few shapes."""

CPU_TOKENS, GPU_TOKENS = 2048, 16384
"""Default of `train.micro_batch_tokens`. On a CPU 8192 and more were slower; 4096 was as fast, with more memory. The
number for a GPU was not measured. It is never chosen by time, because another cut into micro-batches changes the last
bits of the weights."""
_LONGEST_TREE = 1024
"""Largest number of tokens in a tree, because its attention computes all pairs of them."""
_TREE_FRACTION = 0.5
"""A tree pays if it has at most this fraction of the tokens of its sequences."""
_TREE_MODELS = ("llama", "qwen2", "qwen3")
"""Models for which tests show that trees are right: all layers obey the mask, and no layer has a state or a window."""


@dataclass(frozen=True, slots=True)
class Batching:
    """The size, device and arrangement of forward passes."""

    budget: int  # largest number of tokens in one pass, padding included
    device: torch.device
    trees: bool = False  # a group is one row if that pays; else each sequence is a row of its own
    mesh: Mesh = ALONE  # the ranks to which the passes are dealt out


def batching_for(model: PreTrainedModel, train: Train, mesh: Mesh = ALONE) -> Batching:
    """Return the batching that is fastest for a model."""
    budget = train.micro_batch_tokens or (CPU_TOKENS if model.device.type == "cpu" else GPU_TOKENS)
    return Batching(budget, model.device, is_plain(model.config), mesh)


def is_plain(config: PretrainedConfig) -> bool:
    """Return whether trees of a model are right."""
    return config.model_type in _TREE_MODELS and not getattr(config, "use_sliding_window", False)


class Rows(NamedTuple):
    """The tokens of a forward pass.

    Example of the sequences 5 6 7 and 5 8:

        padded    tokens [[5, 6, 7, 0 …], [5, 8, 0 …], …]
        trees     tokens [[5, 6, 7, 8]]     positions [[0, 1, 2, 1]]     the mask lets 8 read 5 and 8
    """

    tokens: Int[Tensor, "rows columns"]
    positions: Int[Tensor, "rows columns"] | None = None  # the position of each token in its sequence; None: its column
    mask: Bool[Tensor, "rows 1 columns columns"] | None = None  # what each column reads; None: the earlier ones
    experts: Experts | None = None  # those that the engine chose for each token; None: the model chooses


class Places(NamedTuple):
    """Where A tokens are in `Rows`, and where the tokens before them are, whose states predict them."""

    rows: Int[Tensor, " actions"]
    columns: Int[Tensor, " actions"]
    before: Int[Tensor, " actions"]  # the column of the token before, in the same row


@dataclass(frozen=True, slots=True)
class Piece:
    """One sequence of a sample. A sample has several if a chat template rewrote history."""

    sample: int  # index of the sample
    start: int  # token_ids[start:end]
    end: int
    actions: slice  # those of the sample's action tokens that it has


@dataclass(frozen=True, slots=True)
class Segment:
    """L tokens that are computed together in one row: of one piece, or of the pieces of a group as a tree.

    Example of the pieces 5 6 7 and 5 8: Segment([…, …], tokens=[5, 6, 7, 8], paths=[[0, 1, 2], [0, 3]])
    """

    pieces: list[Piece]
    tokens: Ints  # L
    paths: list[Ints]  # for each piece, the index in `tokens` of each of its tokens
    experts: StoredExperts | None = None  # L, of one piece

    @property
    def is_tree(self) -> bool:
        return len(self.pieces) > 1

    @property
    def width(self) -> int:
        """The columns of a padded batch whose longest segment this is."""
        return 1 + _up(len(self.tokens) - 1)


_NO_POSITIONS, _NO_WEIGHTS = np.empty(0, np.int64), np.empty(0)


@dataclass(slots=True)
class Columns:
    """The training data of one sample's A action tokens, and of E observations that have cross-entropy."""

    advantages: Floats  # A
    weights: dict[str, Floats]  # of each component A
    observations: Ints = field(default_factory=lambda: _NO_POSITIONS)  # E, positions in token_ids
    observation_weights: Floats = field(default_factory=lambda: _NO_WEIGHTS)  # E, in the component `ce`
    # None: not needed
    proximal: Logprobs | None = None  # A; None: the training pass computes them, since the weights are still the same
    reference: Logprobs | None = None  # A
    values: Logprobs | None = None  # A, the critic's values before the update, normalised
    returns: Floats | None = None  # A, normalised

    def trained(self, sample: Sample) -> Bools:
        """Return which action tokens [A] of the sample are in the loss."""
        has_any: Bools = reduce(np.logical_or, [weights != 0 for weights in self.weights.values()])
        return has_any & sample.in_loss


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """The input of one forward pass: S sequences with A tokens in the loss in total, observations included."""

    samples: Int[Tensor, " actions"]  # the index of the token's sample
    lengths: list[int]  # S
    computed: int  # tokens in the rows without padding: the sum of the lengths, or less with trees
    rows: Rows
    places: Places
    sequences: Int[Tensor, " actions"]  # its sequence
    sampled: Bool[Tensor, " actions"]  # false for observations
    behaviour: Float[Tensor, " actions"]
    advantages: Float[Tensor, " actions"]
    weights: dict[str, Float[Tensor, " actions"]]  # of each component
    proximal: Float[Tensor, " actions"] | None = None  # like the three below; see `Columns`
    reference: Float[Tensor, " actions"] | None = None
    values: Float[Tensor, " actions"] | None = None
    returns: Float[Tensor, " actions"] | None = None


Minibatch = list[MicroBatch]
"""The micro-batches of one optimizer step, those of this rank."""


def draw_minibatches(samples: Sequence[Sample], count: int, generator: torch.Generator) -> list[list[int]]:
    """Split the samples at random into `count` minibatches of whole groups, or fewer if there are fewer groups.

    Samples are not sorted by length: length correlates with success, and minibatches of different lengths would pull
    the policy in different directions.

    Returns:
        the indices of its samples, for each minibatch.
    """
    members = by_problem(samples)
    drawn = torch.randperm(len(members), generator=generator).numpy()
    chosen = np.array_split(drawn, min(count, len(members)))
    return [[index for group in groups_of_one for index in members[group]] for groups_of_one in chosen]


def make_minibatch(
    samples: Sequence[Sample], columns: Sequence[Columns], indices: Iterable[int], batching: Batching
) -> Minibatch:
    """Collate the samples at `indices` into micro-batches.

    Leave out action tokens that are not in the loss, and sequences without any token in the loss.
    """

    def has_any(piece: Piece) -> bool:
        of_sample = columns[piece.sample]
        trained = of_sample.trained(samples[piece.sample])[piece.actions]
        return bool(trained.any() or len(_inside(of_sample.observations, piece)))

    chosen = [piece for piece in pieces(samples, indices) if has_any(piece)]
    return [collate(samples, columns, segments, batching) for segments in cut(samples, chosen, batching)]


def collate(
    samples: Sequence[Sample], columns: Sequence[Columns], segments: Sequence[Segment], batching: Batching
) -> MicroBatch:
    """Collate the S pieces of some segments into one micro-batch."""
    collated = [piece for segment in segments for piece in segment.pieces]
    masks = [columns[piece.sample].trained(samples[piece.sample])[piece.actions] for piece in collated]
    observed = [_inside(columns[piece.sample].observations, piece) for piece in collated]

    def gather(
        array_of: Callable[[int], np.ndarray], of_observations: Callable[[int], np.ndarray] | None = None
    ) -> Tensor:
        """Join the entries of the pieces' tokens in the loss into one tensor [A] of float32; observations have 0."""
        arrays: list[np.ndarray] = [np.empty(0, np.float32)]
        for piece, places in zip(collated, observed, strict=True):
            arrays.append(array_of(piece.sample)[piece.actions])
            if len(places):
                arrays.append(of_observations(piece.sample)[places] if of_observations else np.zeros(len(places)))
        return torch.from_numpy(np.concatenate(arrays)[chosen]).to(batching.device).float()

    def column(name: str) -> Tensor | None:
        # All samples of a minibatch have the same columns; an empty micro-batch has those of the others.
        has_it = getattr(columns[first], name) is not None
        return gather(lambda index: getattr(columns[index], name)) if has_it else None

    def weights(name: str) -> Tensor:
        observations = (lambda index: columns[index].observation_weights) if name == "ce" else None
        return gather(lambda index: columns[index].weights[name], observations)

    kept = [
        each for mask, places in zip(masks, observed, strict=True) for each in (mask, np.ones(len(places), np.bool_))
    ]
    chosen = np.concatenate([np.empty(0, np.bool_), *kept])
    first = collated[0].sample if collated else 0
    positions = [
        np.concatenate([samples[piece.sample].actions[piece.actions][mask], columns[piece.sample].observations[places]])
        - piece.start
        for piece, mask, places in zip(collated, masks, observed, strict=True)
    ]
    of_sample, of_sequence = (
        torch.from_numpy(np.repeat(np.array(numbers, np.int64), [*map(len, positions)])).to(batching.device)
        for numbers in ([piece.sample for piece in collated], range(len(collated)))
    )
    return MicroBatch(
        samples=of_sample,
        lengths=[piece.end - piece.start for piece in collated],
        computed=sum(len(segment.tokens) for segment in segments),
        rows=arrange(segments, batching),
        places=find_places(segments, positions, batching),
        sequences=of_sequence,
        sampled=gather(lambda index: np.ones(len(samples[index].actions))).bool(),
        behaviour=gather(lambda index: samples[index].behaviour),
        advantages=gather(lambda index: columns[index].advantages),
        weights={name: weights(name) for name in columns[first].weights},
        **{name: column(name) for name in ("proximal", "reference", "values", "returns")},
    )


def _inside(positions: Ints, piece: Piece) -> Ints:
    """Return the indices of the positions that are in a piece."""
    return np.flatnonzero((positions >= piece.start) & (positions < piece.end))


def pieces(samples: Sequence[Tokens], indices: Iterable[int]) -> list[Piece]:
    """List the pieces of the samples at `indices`."""
    sequences = []
    for index in indices:
        sample = samples[index]
        bounds = [*sample.starts.tolist(), len(sample.token_ids)]
        splits = np.searchsorted(sample.actions, bounds).tolist()
        for start, end, first, last in zip(bounds, bounds[1:], splits, splits[1:], strict=False):
            sequences.append(Piece(index, start, end, slice(first, last)))
    return sequences


def cut(samples: Sequence[Tokens], sequences: Iterable[Piece], batching: Batching) -> list[list[Segment]]:
    """Cut sequences into this rank's forward passes of at most `batching.budget` tokens; a longer one is a pass alone.

    The longest come first: this keeps the padding small, and a lack of memory shows at once. Trees have passes of their
    own, because their attention needs a mask. All ranks have equally many passes, since each takes part in the passes
    of the others; so some may be empty.
    """
    longest = min(batching.budget, _LONGEST_TREE) if batching.trees else 0
    segments = list(_segments(samples, sequences, longest))
    dealt: list[list[Segment]] = [[] for _ in range(batching.mesh.size)]
    for segment, rank in zip(segments, deal_out([len(s.tokens) for s in segments], batching.mesh.size), strict=True):
        dealt[rank].append(segment)
    passes = [_passes(of_rank, batching) for of_rank in dealt]
    own = passes[batching.mesh.rank]
    return own + [[]] * (max(map(len, passes)) - len(own))


def _segments(samples: Sequence[Tokens], sequences: Iterable[Piece], longest: int) -> Iterable[Segment]:
    """Let the sequences of each problem share a tree of at most `longest` tokens, if it pays."""
    pairs = [(samples[piece.sample].problem_id, piece) for piece in sequences]
    in_order = sorted(pairs, key=lambda pair: (pair[0], pair[1].sample, pair[1].start))
    for of_group in grouped(in_order).values():
        tokens = [samples[piece.sample].token_ids[piece.start : piece.end] for piece in of_group]
        if tree := find_tree(tokens, min(longest, int(_TREE_FRACTION * sum(map(len, tokens))))):
            yield Segment(of_group, *tree)
        else:
            for piece, of_piece in zip(of_group, tokens, strict=True):
                experts = samples[piece.sample].experts
                of_engine = None if experts is None else experts[piece.start : piece.end]
                yield Segment([piece], of_piece, [np.arange(len(of_piece))], of_engine)


def _passes(segments: Iterable[Segment], batching: Batching) -> list[list[Segment]]:
    """Cut the segments of a rank into passes: first its trees, then the others."""
    passes = []
    longest_first = sorted(
        segments, key=lambda s: (not s.is_tree, -len(s.tokens), s.pieces[0].sample, s.pieces[0].start)
    )
    for _, of_kind in groupby(longest_first, lambda segment: segment.is_tree):
        rest = list(of_kind)
        while rest:
            fitting = batching.budget // rest[0].width
            count = max(1, fitting // _GRID * _GRID or fitting)
            passes.append(rest[:count])
            rest = rest[count:]
    return passes


def _up(number: int) -> int:
    """Round up to a multiple of `_GRID`."""
    return -(-number // _GRID) * _GRID


def arrange(segments: Sequence[Segment], batching: Batching) -> Rows:
    """Give each segment a row of its own, padded with 0 at the right.

    Without segments, return a row of two tokens: the rank still takes part in a pass.
    """
    if not segments:
        return Rows(torch.zeros((1, 2), dtype=torch.int64, device=batching.device))
    # The rows after the last segment stay empty.
    rows = _up(len(segments)) if len(segments) > _GRID else len(segments)
    width = max(segment.width for segment in segments)
    tokens, positions = np.zeros((2, rows, width), np.int64)
    for row, segment in zip(tokens, segments, strict=False):
        row[: len(segment.tokens)] = segment.tokens
    if not segments[0].is_tree:
        return Rows(torch.from_numpy(tokens).to(batching.device), experts=_arrange_experts(segments, tokens, batching))
    mask = np.tile(np.eye(width, dtype=np.bool_), (rows, 1, 1, 1))
    for row, segment in enumerate(segments):
        on_path = np.zeros((len(segment.paths), width), np.float32)
        for path, of_path in zip(segment.paths, on_path, strict=True):
            positions[row, path], of_path[path] = np.arange(len(path)), 1
        mask[row, 0] |= np.tril(on_path.T @ on_path > 0)  # the earlier tokens on any path through the token
    on_device = [torch.from_numpy(array).to(batching.device) for array in (tokens, positions, mask)]
    return Rows(on_device[0], on_device[1], on_device[2])


def _arrange_experts(segments: Sequence[Segment], tokens: Ints, batching: Batching) -> Experts | None:
    """Arrange the experts of segments, which all have them or none has, like their `tokens`."""
    if segments[0].experts is None:
        return None
    experts = np.full((*tokens.shape, *segments[0].experts.shape[1:]), -1, np.int16)
    for row, segment in zip(experts, segments, strict=False):
        row[: len(segment.tokens)] = segment.experts
    return torch.from_numpy(experts).to(batching.device)


def find_places(segments: Sequence[Segment], chosen: Sequence[Ints], batching: Batching) -> Places:
    """Return the places of tokens in the rows that `arrange` makes of these segments.

    Args:
        segments: the segments.
        chosen: for each piece of the segments, one after the other, the positions of its chosen tokens, none of them 0;
            the position after its last token is allowed, and has no column of its own.
        batching: as for `arrange`.
    """
    rows, columns, before = ([np.empty(0, np.int64)] for _ in range(3))
    paths = [(row, path) for row, segment in enumerate(segments) for path in segment.paths]
    for (row, path), positions in zip(paths, chosen, strict=True):
        rows.append(np.full(len(positions), row))
        columns.append(path[np.minimum(positions, len(path) - 1)])
        before.append(path[positions - 1])
    return Places(*(torch.from_numpy(np.concatenate(arrays)).to(batching.device) for arrays in (rows, columns, before)))


def find_tree(sequences: Iterable[Ints], most: int) -> tuple[Ints, list[Ints]] | None:
    """Return the prefix tree of sequences: its N tokens, and for each sequence the index of each of its tokens in them.

    None if it has more than `most` tokens. Example of 5 6 7, 5 8 and 5 6: ([5, 6, 7, 8], [[0, 1, 2], [0, 3], [0, 1]])
    """
    listed, paths = [sequence.tolist() for sequence in sequences], list[Ints]()
    ends = zip(min(listed), max(listed), strict=False)  # what both begin with, such as the prompt, all begin with
    shared = [token for token, _ in takewhile(lambda pair: pair[0] == pair[1], ends)]
    nodes = {(index - 1, token): index for index, token in enumerate(shared)}  # (token before, token) -> token
    for sequence in listed:
        path = [*range(len(shared))]
        node = len(shared) - 1
        for token in sequence[len(shared) :]:
            node = nodes.setdefault((node, token), len(nodes))
            path.append(node)
        if len(nodes) > most:
            return None
        paths.append(np.array(path))
    return np.array([token for _, token in nodes]), paths
