"""Preparation of an update before its first step: compute logprobs and values of all tokens, then what each gets."""

import time
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from storage.errors import first_few
from storage.records import HIGHEST_LOGPROB
from storage.visible import Fleeting
from tasks.train.advantages import Observed
from tasks.train.algorithms.algorithm import Assignment, check_assignment, shared_out
from tasks.train.batches import Columns, batching_for
from tasks.train.components import kl_estimate
from tasks.train.metrics import Metrics, value_metrics
from tasks.train.passes import TokenScorer, broken, logprob_scorer, refuse_broken, score_action_tokens
from tasks.train.samples import FAR, Floats, Logprobs, Sample, outside
from tasks.train.train_state import TrainState, ValueNorm

Epochs = Sequence[Sequence[Sequence[int]]]
"""The minibatches of each epoch; a minibatch is a list of indices of samples."""
ByIndex = dict[int, Logprobs]
"""Numbers of a sample's action tokens, by the index of the sample."""


class Preparation:
    """Passes over the samples with the models of a train state. Of the train state only the value normaliser changes.

    Args:
        train_state: holds the models.
        temperature: the temperature at which the tokens were sampled.
        samples: all samples.
        report: called with a line of text after each pass over the data.
        taught: by trajectory, the logprobs that a served teacher gave to its tokens; empty: the train state has it.
    """

    def __init__(
        self,
        train_state: TrainState,
        temperature: float,
        samples: Sequence[Sample],
        report: Callable[[str], None],
        taught: Mapping[str, Sequence[float]] | None = None,
    ) -> None:
        self._train_state, self._temperature, self._samples, self._report = train_state, temperature, samples, report
        self._algorithm, self._all = train_state.algorithm, range(len(samples))
        self._kl = self._algorithm.knobs.kl
        self._batching = batching_for(train_state.model, train_state.knobs, train_state.mesh)
        self._metrics: Metrics = {}
        self._taught = taught or {}

    def prepare(self, epochs: Epochs) -> tuple[list[Columns], Metrics]:
        """Compute everything that stays constant while the minibatches of `epochs` are trained on.

        Returns:
            the columns of each sample, and metrics.

        Raises:
            ValueError: a number is NaN or infinite, in which case the message names the trajectories; or the algorithm
                gives what cannot be trained on.
        """
        state, reference = self._train_state, ByIndex()
        norm = state.critic and state.critic.norm
        proximal = self._proximal(epochs)
        if scorer := state.reference_scorer(self._temperature):
            reference = self._score("reference logprobs", scorer, self._all)
        teacher = self._teacher()
        values = self._score("values", state.values, self._all) if state.critic else {}
        observed = [
            Observed(penalty, norm.denormalise(_tensor(values[index])).numpy() if norm else None, teacher.get(index))
            for index, penalty in enumerate(self._penalties(proximal, reference))
        ]
        assigned = self._algorithm.assign(self._samples, observed)
        check_assignment(self._algorithm, self._samples, assigned)
        assigned = shared_out(self._samples, assigned)
        columns = [
            Columns(
                advantages=assigned.advantages[index],
                weights={name: weights[index] for name, weights in assigned.weights.items()},
                proximal=proximal.get(index),
                reference=reference.get(index),
                values=values.get(index),
            )
            for index in self._all
        ]
        for of_sample, observations in zip(columns, assigned.observations or (), strict=False):
            of_sample.observations, of_sample.observation_weights = observations
        if norm:
            self._set_returns(norm, columns, observed, assigned)
        return columns, self._metrics

    def _proximal(self, epochs: Epochs) -> ByIndex:
        """Compute logprobs under the present weights, or return the behaviour logprobs if the algorithm uses those.

        With one epoch its first minibatch needs no pass here, unless the KL goes into the reward: it is trained on with
        the same weights, so its training pass gives its proximal logprobs, bit for bit.
        """
        if not self._algorithm.recomputes:
            return {index: sample.behaviour for index, sample in enumerate(self._samples)}
        known = set(epochs[0][0]) if len(epochs) == 1 and not self._kl.in_reward else set()
        rest = [index for index in self._all if index not in known]
        return self._score("proximal logprobs", logprob_scorer(self._train_state.model, self._temperature), rest)

    def _teacher(self) -> ByIndex:
        """Compute a teacher's logprobs, or take those of a served one; empty without a teacher.

        Raises:
            ValueError: a served one was not asked about a trajectory.
        """
        if model := self._train_state.teacher:
            return self._score("the teacher's logprobs", logprob_scorer(model, self._temperature), self._all)
        if not self._taught:
            return {}
        short = [
            sample.trajectory_id
            for sample in self._samples
            if len(self._taught.get(sample.trajectory_id, ())) != len(sample.token_ids)
        ]
        if short:
            raise ValueError(f"the teacher was not asked about {first_few(short)}: score these data sets again")
        teacher = {
            index: np.asarray(self._taught[sample.trajectory_id], np.float32)[sample.actions]
            for index, sample in enumerate(self._samples)
        }
        wrong = [index for index, each in teacher.items() if outside(each, FAR, HIGHEST_LOGPROB)]
        refuse_broken("or impossible logprobs", self._samples, wrong, by="the teacher's server")
        return teacher

    def _score(self, quantity: str, scorer: TokenScorer, indices: Sequence[int]) -> ByIndex:
        """Score the action tokens of the samples at `indices`, check the numbers, and report."""
        if not indices:
            return {}
        start = time.perf_counter()
        with self._train_state.precision():
            scores = score_action_tokens(scorer, self._samples, indices, self._batching)
        refuse_broken(quantity, self._samples, broken(scores.items()))
        self._report(Fleeting(f"{quantity} of {len(indices)} trajectories in {time.perf_counter() - start:.1f} s"))
        return scores

    def _penalties(self, proximal: ByIndex, reference: ByIndex) -> list[Floats]:
        """Compute each sample's token rewards [A]: `-kl_ctl * KL` if the KL goes into the reward, else 0."""
        kl, coefficient = self._kl, self._train_state.kl_ctl
        if not kl.in_reward:
            return [np.zeros(len(sample.actions)) for sample in self._samples]
        estimates = [
            kl_estimate(_tensor(proximal[index]), _tensor(reference[index]), kl.chosen_estimator).numpy()
            for index in self._all
        ]
        of_trajectory = float(np.mean([of_tokens.sum() for of_tokens in estimates]))
        self._metrics |= {"kl/kl_ctl": coefficient, "kl/trajectory": of_trajectory}
        return [-coefficient * of_tokens for of_tokens in estimates]

    def _set_returns(
        self, norm: ValueNorm, columns: Sequence[Columns], observed: Sequence[Observed], assigned: Assignment
    ) -> None:
        """Add the returns to the value normaliser, then set the normalised returns as the critic's targets."""
        assert assigned.returns is not None, "only gae has a critic, and it gives returns"
        returns = np.concatenate(assigned.returns)
        self._metrics |= value_metrics(np.concatenate([o.values for o in observed if o.values is not None]), returns)
        norm.update(torch.from_numpy(returns))
        for of_sample, values in zip(columns, assigned.returns, strict=True):
            of_sample.returns = norm.normalise(_tensor(values)).numpy()


def _tensor(values: Logprobs | Floats) -> Tensor:
    return torch.from_numpy(values).double()
