"""The experts that the engine chose for the tokens of an episode, put together from its answers."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from storage.experts import pack, unpack
from storage.records import Trajectory
from tasks.inference.api import BundledGenerationOutputs, Completion


def with_experts(trajectory: Trajectory, exchanges: Sequence[BundledGenerationOutputs]) -> Trajectory:
    """Add the experts of all tokens that the engine read, if it returned any.

    An answer has the experts of its prompt, too, so those of a feedback come with the turn that follows it. Of a token
    in several prompts the first answer counts, since the token was sampled with these, or the turn after it was.

    Args:
        trajectory: an episode's, from any agent.
        exchanges: all answers that the episode got, in their order.
    """
    if not any(completion.experts for outputs in exchanges for completion in outputs.completions):
        return trajectory
    ids, table = trajectory.token_ids, None
    for turn in trajectory.turns:
        begin = max(start for start in trajectory.sequence_starts if start <= turn.start)
        if (completion := _find(exchanges, ids[begin : turn.start], ids[turn.start : turn.end])) is None:
            continue
        experts = unpack(completion.experts)[: turn.end - begin]
        if table is None:
            table = np.full((len(ids), *experts.shape[1:]), -1, np.int16)
        rows = table[begin : begin + len(experts)]
        unknown = rows < 0
        rows[unknown] = experts[unknown]
    return trajectory if table is None else replace(trajectory, experts=pack(table))


def _find(exchanges: Sequence[BundledGenerationOutputs], prompt: list[int], sampled: list[int]) -> Completion | None:
    """Return the completion of a prompt that is, or begins with, the sampled tokens."""
    for outputs in exchanges:
        if outputs.prompt_ids == prompt:
            for completion in outputs.completions:
                if completion.token_ids[: len(sampled)] == sampled:
                    return completion
    return None
