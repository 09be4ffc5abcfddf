"""Recompute the logprobs of stored tokens with the weights that sampled them."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from configs.train import Train
from storage.records import unpack_experts
from tasks.train.batches import batching_for
from tasks.train.passes import logprob_scorer, score_action_tokens
from tasks.train.policy import load_policy
from tasks.train.routing import replay_routing
from tasks.train.samples import Logprobs, Tokens

NumberFormat = Literal["float32", "bfloat16", "float16"]


@dataclass(frozen=True, slots=True)
class StoredTokens:
    """The T tokens of one trajectory, as stored."""

    trajectory_id: str
    token_ids: list[int]  # T
    action_mask: list[bool]  # T
    sequence_starts: list[int]  # 1 or more
    experts: bytes | None = None  # that the engine chose (`records.pack_experts`); empty or None: unknown


def recompute(
    folder: Path,
    rows: Sequence[StoredTokens],
    temperature: float,
    number_format: NumberFormat = "float32",
    adapter: Path | None = None,
) -> list[Logprobs | None]:
    """Compute the logprobs [A] of each row's sampled tokens, or None for a row that no model can score.

    If all rows have the experts of the engine, tokens go to these.

    A row cannot be scored if it has no sampled tokens, a sampled token where a sequence begins, ids that the vocabulary
    does not have, a mask of another length than its tokens, or starts that do not begin at 0 and rise.

    Args:
        folder: folder of a transformers model.
        rows: the stored tokens.
        temperature: divides the logits, as in sampling.
        number_format: of weights, activations and logits, as in an engine that serves in it.
        adapter: folder of the policy's adapter, if any.

    Raises:
        ValueError: `folder` holds no model, or some of the weights are missing.
    """
    train = Train()
    torch.set_num_threads(train.threads)
    model = load_policy(folder, train, adapter=adapter).to(getattr(torch, number_format))
    usable = [index for index, row in enumerate(rows) if _usable(row, model.config.vocab_size)]
    if replayed := bool(rows) and all(row.experts for row in rows):
        replay_routing(model)
    scorer, tokens = logprob_scorer(model, temperature), [_tokens(row, replayed=replayed) for row in rows]
    logprobs = score_action_tokens(scorer, tokens, usable, batching_for(model, train))
    return [logprobs.get(index) for index in range(len(rows))]


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


def _tokens(row: StoredTokens, *, replayed: bool) -> Tokens:
    starts, actions = np.array(row.sequence_starts), np.flatnonzero(row.action_mask)
    experts = unpack_experts(row.experts) if replayed and row.experts else None
    return Tokens(row.trajectory_id, "", np.array(row.token_ids), starts, actions, experts=experts)
