"""Logprobs of stored tokens once more, by the weights that sampled them."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from configs.schema import PPO
from tasks.train.logprobs import action_logprobs
from tasks.train.passes import TokenScorer, score_action_tokens
from tasks.train.policy import load_policy
from tasks.train.samples import Logprobs, Sample


@dataclass(frozen=True, slots=True)
class Spoken:
    """The tokens of one trajectory, as they were stored. T tokens."""

    trajectory_id: str
    token_ids: list[int]  # T
    action_mask: list[bool]  # T
    sequence_starts: list[int]  # 1 or more


def recompute(
    folder: Path, rows: Sequence[Spoken], temperature: float, ppo: PPO | None = None
) -> list[Logprobs | None]:
    """For each row the float32 logprobs of its A sampled tokens; None for a row of which no model can give them.

    That is a row without sampled tokens, with one where a sequence begins, or with ids that the vocabulary lacks.

    Args:
        folder: of a transformers model.
        rows: what it may have said.
        temperature: divides the logits, as it did when sampling.
        ppo: sizes of the passes, and the device.

    Raises:
        ValueError: `folder` is no model, or lacks some of the weights.
    """
    ppo = ppo or PPO()
    torch.set_num_threads(ppo.threads)
    model = load_policy(folder, ppo)
    usable = [index for index, row in enumerate(rows) if _usable(row, model.config.vocab_size)]
    samples = [_sample(rows[index]) for index in usable]
    found = score_action_tokens(
        _look(model, temperature, ppo), samples, range(len(samples)), ppo.micro_batch_tokens, model.device
    )
    places = {index: place for place, index in enumerate(usable)}
    return [found[places[index]] if index in places else None for index in range(len(rows))]


def _look(model: PreTrainedModel, temperature: float, ppo: PPO) -> TokenScorer:
    def look(tokens: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
        return action_logprobs(model, tokens, rows, columns, temperature, ppo.logprob_chunk_tokens)[0]

    return look


def _usable(row: Spoken, vocabulary: int) -> bool:
    starts, length = row.sequence_starts, len(row.token_ids)
    return (
        len(row.action_mask) == length
        and any(row.action_mask)
        and starts[:1] == [0]
        and all(one < other for one, other in zip(starts, [*starts[1:], length], strict=True))
        and not any(row.action_mask[start] for start in starts)
        and min(row.token_ids) >= 0
        and max(row.token_ids) < vocabulary
    )


def _sample(row: Spoken) -> Sample:
    """What passes need of it; all else is empty."""
    actions = np.flatnonzero(row.action_mask)
    nothing = np.empty(0)
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
        successes=nothing,
        rewards=nothing,
        returns=nothing,
        turn_discount=1.0,
    )
