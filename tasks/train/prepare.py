"""Preparation of an update before its first step: compute logprobs and values of all tokens, then what each gets."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from storage.errors import first_few
from storage.records import HIGHEST_LOGPROB
from storage.visible import Fleeting
from tasks.train.advantages import Observed
from tasks.train.algorithms.algorithm import Assignment, check_assignment, shared_out
from tasks.train.batches import Columns
from tasks.train.components import kl_estimate
from tasks.train.metrics import Metrics, value_metrics
from tasks.train.passes import TokenScorer, broken, refuse_broken, score_action_tokens
from tasks.train.samples import FAR, Floats, Logprobs, Sample, outside
from tasks.train.train_state import TrainState, ValueNorm

Epochs = Sequence[Sequence[Sequence[int]]]
"""The minibatches of each epoch; a minibatch is a list of indices of samples."""
ByIndex = dict[int, Logprobs]
"""Numbers of a sample's action tokens, by the index of the sample."""


@dataclass(slots=True)
class Preparation:
    """Passes over the samples with the models of a train state, of which only the value normaliser changes."""

    train_state: TrainState
    samples: Sequence[Sample]
    report: Callable[[str], None]  # called with a line of text after each pass over the data
    taught: Mapping[str, Sequence[float]]  # by trajectory, the logprobs that a served teacher gave to its tokens
    metrics: Metrics = field(default_factory=dict)

    def prepare(self, epochs: Epochs) -> tuple[list[Columns], Metrics]:
        """Compute everything that stays constant while the minibatches of `epochs` are trained on.

        Returns:
            the columns of each sample, and metrics.

        Raises:
            ValueError: a number is NaN or infinite, in which case the message names the trajectories; or the algorithm
                gives what cannot be trained on.
        """
        state, algorithm = self.train_state, self.train_state.algorithm
        every = range(len(self.samples))
        norm = state.critic and state.critic.norm
        proximal = self._proximal(epochs)
        reference = self._score("reference logprobs", scorer, every) if (scorer := state.reference_scorer()) else {}
        teacher = self._teacher()
        values = self._score("values", state.values, every) if state.critic else {}
        observed = [
            Observed(penalty, norm.denormalise(_tensor(values[index])).numpy() if norm else None, teacher.get(index))
            for index, penalty in enumerate(self._penalties(proximal, reference))
        ]
        assigned = algorithm.assign(self.samples, observed)
        check_assignment(algorithm, self.samples, assigned)
        assigned = shared_out(self.samples, assigned)
        columns = [
            Columns(
                advantages=assigned.advantages[index],
                weights={name: weights[index] for name, weights in assigned.weights.items()},
                proximal=proximal.get(index),
                reference=reference.get(index),
                values=values.get(index),
            )
            for index in every
        ]
        for of_sample, observations in zip(columns, assigned.observations or (), strict=False):
            of_sample.observations, of_sample.observation_weights = observations
        if norm:
            self._set_returns(norm, columns, observed, assigned)
        return columns, self.metrics

    def _proximal(self, epochs: Epochs) -> ByIndex:
        """Compute logprobs under the present weights, or return the behaviour logprobs if the algorithm uses those.

        With one epoch its first minibatch needs no pass here, unless the KL goes into the reward: it is trained on with
        the same weights, so its training pass gives its proximal logprobs, bit for bit.
        """
        algorithm = self.train_state.algorithm
        if not algorithm.recomputes:
            return {index: sample.behaviour for index, sample in enumerate(self.samples)}
        known = set(epochs[0][0]) if len(epochs) == 1 and not algorithm.knobs.kl.in_reward else set()
        rest = [index for index in range(len(self.samples)) if index not in known]
        return self._score("proximal logprobs", self.train_state.scorer(), rest)

    def _teacher(self) -> ByIndex:
        """Compute a teacher's logprobs, or take those of a served one; empty without a teacher.

        Raises:
            ValueError: a served one was not asked about a trajectory.
        """
        if model := self.train_state.teacher:
            return self._score("the teacher's logprobs", self.train_state.scorer(model), range(len(self.samples)))
        if not self.taught:
            return {}
        short = [
            sample.trajectory_id
            for sample in self.samples
            if len(self.taught.get(sample.trajectory_id, ())) != len(sample.token_ids)
        ]
        if short:
            raise ValueError(f"the teacher was not asked about {first_few(short)}: score these data sets again")
        teacher = {
            index: np.asarray(self.taught[sample.trajectory_id], np.float32)[sample.actions]
            for index, sample in enumerate(self.samples)
        }
        wrong = [index for index, each in teacher.items() if outside(each, FAR, HIGHEST_LOGPROB)]
        refuse_broken("or impossible logprobs", self.samples, wrong, by="the teacher's server")
        return teacher

    def _score(self, quantity: str, scorer: TokenScorer, indices: Sequence[int]) -> ByIndex:
        """Score the action tokens of the samples at `indices`, check the numbers, and report."""
        if not indices:
            return {}
        start = time.perf_counter()
        with self.train_state.precision():
            scores = score_action_tokens(scorer, self.samples, indices, self.train_state.batching)
        refuse_broken(quantity, self.samples, broken(scores.items()))
        self.report(Fleeting(f"{quantity} of {len(indices)} trajectories in {time.perf_counter() - start:.1f} s"))
        return scores

    def _penalties(self, proximal: ByIndex, reference: ByIndex) -> list[Floats]:
        """Compute each sample's token rewards [A]: `-kl_ctl * KL` if the KL goes into the reward, else 0."""
        kl, coefficient = self.train_state.algorithm.knobs.kl, self.train_state.kl_ctl
        if not kl.in_reward:
            return [np.zeros(len(sample.actions)) for sample in self.samples]
        estimates = [
            kl_estimate(_tensor(proximal[index]), _tensor(reference[index]), kl.chosen_estimator).numpy()
            for index in range(len(self.samples))
        ]
        of_trajectory = float(np.mean([of_tokens.sum() for of_tokens in estimates]))
        self.metrics |= {"kl/kl_ctl": coefficient, "kl/trajectory": of_trajectory}
        return [-coefficient * of_tokens for of_tokens in estimates]

    def _set_returns(
        self, norm: ValueNorm, columns: Sequence[Columns], observed: Sequence[Observed], assigned: Assignment
    ) -> None:
        """Add the returns to the value normaliser, then set the normalised returns as the critic's targets."""
        assert assigned.returns is not None, "only gae has a critic, and it gives returns"
        returns = np.concatenate(assigned.returns)
        self.metrics |= value_metrics(np.concatenate([o.values for o in observed if o.values is not None]), returns)
        norm.update(torch.from_numpy(returns))
        for of_sample, values in zip(columns, assigned.returns, strict=True):
            of_sample.returns = norm.normalise(_tensor(values)).numpy()


def _tensor(values: Logprobs | Floats) -> Tensor:
    return torch.from_numpy(values).double()
