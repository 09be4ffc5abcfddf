"""Recompute the logprobs of stored tokens with the weights that sampled them."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from configs.train import PPO
from tasks.train.passes import TokenScorer, action_logprobs, score_action_tokens
from tasks.train.policy import load_policy
from tasks.train.returns import chain
from tasks.train.rows import Places, Rows, batching_for
from tasks.train.samples import Logprobs, Sample

NumberFormat = Literal["float32", "bfloat16", "float16"]


@dataclass(frozen=True, slots=True)
class StoredTokens:
    """The T tokens of one trajectory, as stored."""

    trajectory_id: str
    token_ids: list[int]  # T
    action_mask: list[bool]  # T
    sequence_starts: list[int]  # 1 or more


def recompute(
    folder: Path,
    rows: Sequence[StoredTokens],
    temperature: float,
    ppo: PPO | None = None,
    number_format: NumberFormat = "float32",
) -> list[Logprobs | None]:
    """Compute the logprobs [A] of each row's sampled tokens, or None for a row that no model can score.

    A row cannot be scored if it has no sampled tokens, a sampled token where a sequence begins, ids that the vocabulary
    does not have, a mask of another length than its tokens, or starts that do not begin at 0 and rise.

    Args:
        folder: folder of a transformers model.
        rows: the stored tokens.
        temperature: divides the logits, as in sampling.
        ppo: sizes of the passes, and the device.
        number_format: of weights, activations and logits, as in an engine that serves in it.

    Raises:
        ValueError: `folder` holds no model, or some of the weights are missing.
    """
    ppo = ppo or PPO()
    torch.set_num_threads(ppo.threads)
    model = load_policy(folder, ppo).to(getattr(torch, number_format))
    usable = [index for index, row in enumerate(rows) if _usable(row, model.config.vocab_size)]
    samples = [_sample(rows[index]) for index in usable]
    scorer = _logprob_scorer(model, temperature, ppo)
    logprobs = score_action_tokens(scorer, samples, range(len(samples)), batching_for(model, ppo))
    positions = {index: position for position, index in enumerate(usable)}
    return [logprobs[positions[index]] if index in positions else None for index in range(len(rows))]


def _logprob_scorer(model: PreTrainedModel, temperature: float, ppo: PPO) -> TokenScorer:
    def score_tokens(rows: Rows, places: Places) -> Tensor:
        return action_logprobs(model, rows, places, temperature)[0]

    return score_tokens


def _usable(row: StoredTokens, vocabulary: int) -> bool:
    starts, length = row.sequence_starts, len(row.token_ids)
    return (
        len(row.action_mask) == length
        and any(row.action_mask)
        and starts[:1] == [0]
        and all(start < end for start, end in zip(starts, [*starts[1:], length], strict=True))
        and not any(row.action_mask[start] for start in starts)
        and min(row.token_ids) >= 0
        and max(row.token_ids) < vocabulary
    )


def _sample(row: StoredTokens) -> Sample:
    """Make a sample with only the fields that passes need; the other fields are empty."""
    actions = np.flatnonzero(row.action_mask)
    empty = np.empty(0)
    return Sample(
        trajectory_id=row.trajectory_id,
        problem_id="",
        truncated=False,
        token_ids=np.array(row.token_ids),
        starts=np.array(row.sequence_starts),
        actions=actions,
        turn_of_action=np.zeros(len(actions), np.int64),
        behaviour=np.zeros(len(actions), np.float32),
        versions=np.zeros(len(actions), np.int64),
        in_loss=np.ones(len(actions), np.bool_),
        graded=np.empty(0, np.bool_),
        successes=empty,
        rewards=empty,
        returns=empty,
        turn_discount=1.0,
        causes=chain(0),
    )
