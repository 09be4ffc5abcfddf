"""Try an algorithm or a loss of the user's on four made-up episodes, before anything expensive starts."""

import math

import numpy as np
import torch

from tasks.registry import described_with_place
from tasks.train.advantages import Observed
from tasks.train.algorithms.algorithm import Algorithm, check_assignment
from tasks.train.components import LossInputs, checked
from tasks.train.returns import chain
from tasks.train.samples import Sample


def try_algorithm(algorithm: Algorithm) -> None:
    """Let it assign, and compute the losses of its components; the logprobs of sampling are NaN if it `uses` none.

    Raises:
        ValueError: its code raised an exception, with the line, or returned what cannot be trained on.
    """
    named, known = f"algorithm.type={algorithm.knobs.type}", 1.0 if "logprobs" in algorithm.uses else math.nan
    samples = [_sample(number, known) for number in range(4)]
    observed = [Observed(np.zeros(4), teacher=np.full(4, -1.0, np.float32)) for _ in samples]
    try:
        assigned = algorithm.assign(samples, observed)
        check_assignment(algorithm, samples, assigned)
        for name, weights in assigned.weights.items():
            given = _inputs(len(weights[0]), known)
            outputs = checked(algorithm.component(name).loss(given), given, name)
            if math.isnan(known) and not outputs.loss.isfinite().all():
                raise ValueError(f"{named}: its loss reads the logprobs of sampling: name them in its attribute `uses`")
    except ValueError:
        raise
    except Exception as error:
        raise ValueError(f"{named} failed on made-up episodes: {described_with_place(error)}") from error


def _sample(number: int, known: float) -> Sample:
    """Make an episode of two turns of two tokens; of each problem one is right in its second turn."""
    rewards = np.array([-1.0, 1.0 if number % 2 else -1.0])
    return Sample(
        trajectory_id=f"made-up {number}",
        problem_id=f"made-up problem {number // 2}",
        token_ids=np.arange(7),
        starts=np.array([0]),
        actions=np.array([1, 2, 4, 5]),
        truncated=False,
        turn_of_action=np.array([0, 0, 1, 1]),
        behaviour=known * np.array([-0.1, -0.5, -1.0, -2.0], np.float32),
        versions=np.zeros(4, np.int64),
        in_loss=np.ones(4, np.bool_),
        graded=np.ones(2, np.bool_),
        successes=(rewards + 1) / 2,
        rewards=rewards,
        returns=np.cumsum(rewards[::-1])[::-1],
        turn_discount=1.0,
        causes=chain(2),
    )


def _inputs(tokens: int, known: float) -> LossInputs:
    reference = torch.linspace(-2.0, -0.1, tokens)
    logp, behaviour = (reference + 0.1).requires_grad_(), known * reference
    others = torch.ones(tokens), behaviour, behaviour, torch.linspace(-1.0, 1.0, tokens), torch.zeros(tokens).long()
    return LossInputs(logp, *others, reference=reference)
