"""Batches of supervised examples, encoded once and drawn at random."""

import random
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedTokenizerBase

from configs.schema import WarmStart
from storage.records import Problem
from tasks.warm_start.examples import Example, one_turn, two_turn, wrong_answer

MISTAKES = 4  # two-turn examples of one problem, each with its own wrong answer

Rows = tuple[Tensor, Tensor]
"""Token ids [B, T], padded at the right, and the loss mask [B, T]."""


def batches(
    problems: Sequence[Problem], tokenizer: PreTrainedTokenizerBase, knobs: WarmStart, feedback: str, seed: int
) -> Iterator[list[Rows]]:
    """Draw batches without end: one-turn rows, and a share of `two_turn_share` two-turn rows.

    The two kinds are separate tensors: in one tensor half of the batch would be padding.
    """
    pools = _pools(problems, tokenizer, feedback, random.Random(seed))
    two_turn_rows = round(knobs.two_turn_share * knobs.batch_size)
    sizes = [knobs.batch_size - two_turn_rows, two_turn_rows]
    generator = torch.Generator().manual_seed(seed)
    while True:
        yield [_draw(pool, size, generator) for pool, size in zip(pools, sizes, strict=True) if size]


def _pools(
    problems: Sequence[Problem], tokenizer: PreTrainedTokenizerBase, feedback: str, rng: random.Random
) -> list[Rows]:
    """Encode a one-turn example and MISTAKES two-turn examples of each problem."""
    answers = sorted({problem.solutions[0] for problem in problems})
    short = [one_turn(tokenizer, problem) for problem in problems]
    long = [
        two_turn(tokenizer, problem, wrong_answer(problem.solutions[0], answers, rng), feedback)
        for problem in problems
        for _ in range(MISTAKES)
    ]
    return [_pad(examples, tokenizer.pad_token_id) for examples in (short, long)]


def _pad(examples: list[Example], pad_id: int) -> Rows:
    ids = [torch.tensor(example.token_ids) for example in examples]
    masks = [torch.tensor(example.loss_mask) for example in examples]
    return (
        pad_sequence(ids, batch_first=True, padding_value=pad_id),
        pad_sequence(masks, batch_first=True, padding_value=False),
    )


def _draw(pool: Rows, size: int, generator: torch.Generator) -> Rows:
    ids, mask = pool
    rows = torch.randint(len(ids), (size,), generator=generator)
    return ids[rows], mask[rows]
