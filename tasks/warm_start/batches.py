"""Batches of supervised examples, encoded once and drawn at random."""

import random
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedTokenizerBase

from configs.policy import WarmStart
from storage.records import Problem
from tasks.warm_start.examples import CALCULATOR, Example, one_turn, two_turn, with_call, wrong_answer

BATCH_SIZE = 64
MISTAKES = 4  # two-turn examples of one problem, each with its own wrong answer


class Rows(NamedTuple):
    """Encoded examples of one kind."""

    token_ids: Tensor  # [B, T], padded at the right
    loss_mask: Tensor  # [B, T]
    weight: float = 1.0  # of a row in the accuracy


def batches(
    problems: Sequence[Problem], tokenizer: PreTrainedTokenizerBase, knobs: WarmStart, feedback: str, seed: int
) -> Iterator[list[Rows]]:
    """Draw batches without end: one-turn rows, and shares of two-turn rows and of rows with a call.

    The kinds are separate tensors: in one tensor half of the batch would be padding. A problem is solved with a call or
    without one: the probabilities of these two kinds add up, so their weights do not depend on their shares.
    """
    pools = _pools(problems, tokenizer, knobs, feedback, random.Random(seed))
    corrected = round(knobs.two_turn_share * BATCH_SIZE)
    first = BATCH_SIZE - corrected
    called = min(first, round(knobs.tool_share * BATCH_SIZE))
    sizes = [first - called, corrected, called]
    weights = [first / max(1, first - called), 1.0, first / max(1, called)]
    generator = torch.Generator().manual_seed(seed)
    while True:
        yield [
            _draw(pool, size, generator)._replace(weight=weight)
            for pool, size, weight in zip(pools, sizes, weights, strict=True)
            if size
        ]


def _pools(
    problems: Sequence[Problem],
    tokenizer: PreTrainedTokenizerBase,
    knobs: WarmStart,
    feedback: str,
    rng: random.Random,
) -> list[Rows]:
    """Encode a one-turn example, MISTAKES two-turn examples and an example with a call of each problem."""
    answers = sorted({problem.solutions[0] for problem in problems})
    tools = CALCULATOR if knobs.tool_share else ()
    short = [one_turn(tokenizer, problem, tools) for problem in problems]
    long = [
        two_turn(tokenizer, problem, wrong_answer(problem.solutions[0], answers, rng), feedback, tools)
        for problem in (problems if knobs.two_turn_share else ())
        for _ in range(MISTAKES)
    ]
    calls = [with_call(tokenizer, problem) for problem in (problems if knobs.tool_share else ())]
    return [_pad(examples, tokenizer.pad_token_id) for examples in (short, long, calls)]


def _pad(examples: list[Example], pad_id: int) -> Rows:
    if not examples:
        return Rows(torch.empty(0), torch.empty(0))
    ids = [torch.tensor(example.token_ids) for example in examples]
    masks = [torch.tensor(example.loss_mask) for example in examples]
    return Rows(
        pad_sequence(ids, batch_first=True, padding_value=pad_id),
        pad_sequence(masks, batch_first=True, padding_value=False),
    )


def _draw(pool: Rows, size: int, generator: torch.Generator) -> Rows:
    rows = torch.randint(len(pool.token_ids), (size,), generator=generator)
    return Rows(pool.token_ids[rows], pool.loss_mask[rows])
