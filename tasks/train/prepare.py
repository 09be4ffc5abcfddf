"""Preparation of an update before its first step: compute logprobs and values of all tokens, then advantages."""

import math
import time
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from storage.visible import Fleeting
from tasks.train.advantages import Estimated, Observed, estimate
from tasks.train.batches import Columns, batching_for
from tasks.train.kl import kl_estimate
from tasks.train.metrics import Metrics, value_metrics
from tasks.train.passes import TokenScorer, bootstrap_values, broken, logprob_scorer, refuse_broken, score_action_tokens
from tasks.train.samples import Floats, Logprobs, Sample
from tasks.train.train_state import TrainState

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
    """

    def __init__(
        self, train_state: TrainState, temperature: float, samples: Sequence[Sample], report: Callable[[str], None]
    ) -> None:
        self._train_state, self._temperature, self._samples, self._report = train_state, temperature, samples, report
        self._ppo, self._all = train_state.ppo, range(len(samples))
        self._batching = batching_for(train_state.model, train_state.ppo, train_state.mesh)
        self._metrics: Metrics = {}

    def prepare(self, epochs: Epochs) -> tuple[list[Columns], Metrics]:
        """Compute everything that stays constant while the minibatches of `epochs` are trained on.

        Returns:
            the columns of each sample, and metrics.

        Raises:
            ValueError: a number is NaN or infinite, in which case the message names the trajectories; or the advantage
                estimator gives no returns, which a critic needs.
        """
        state, reference = self._train_state, ByIndex()
        proximal = self._proximal(epochs)
        if scorer := state.reference_scorer(self._temperature):
            reference = self._score("reference logprobs", scorer, self._all)
        values = self._score("values", state.values, self._all) if state.critic else {}
        observed = self._observed(self._penalties(proximal, reference), values)
        estimated = estimate(self._samples, observed, self._ppo.advantage)
        refuse_broken("advantages", self._samples, broken(enumerate(estimated.advantages)))
        columns = [
            Columns(advantages, proximal.get(index), reference.get(index), values.get(index))
            for index, advantages in enumerate(estimated.advantages)
        ]
        if state.critic:
            self._set_returns(columns, observed, estimated)
        return columns, self._metrics

    def _proximal(self, epochs: Epochs) -> ByIndex:
        """Compute logprobs under the present weights, or return the behaviour logprobs if `ppo` asks for those.

        With one epoch its first minibatch needs no pass here, unless the KL goes into the reward: it is trained on with
        the same weights, so its training pass gives its proximal logprobs, bit for bit.
        """
        if self._ppo.objective == "behaviour":
            return {index: sample.behaviour for index, sample in enumerate(self._samples)}
        known = set(epochs[0][0]) if len(epochs) == 1 and not self._ppo.kl.in_reward else set()
        rest = [index for index in self._all if index not in known]
        return self._score("proximal logprobs", logprob_scorer(self._train_state.model, self._temperature), rest)

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
        kl, coefficient = self._ppo.kl, self._train_state.kl_ctl
        if not kl.in_reward:
            return [np.zeros(len(sample.actions)) for sample in self._samples]
        estimates = [
            kl_estimate(_tensor(proximal[index]), _tensor(reference[index]), kl.chosen_estimator).numpy()
            for index in self._all
        ]
        of_trajectory = float(np.mean([of_tokens.sum() for of_tokens in estimates]))
        self._metrics |= {"kl/kl_ctl": coefficient, "kl/trajectory": of_trajectory}
        return [-coefficient * of_tokens for of_tokens in estimates]

    def _observed(self, penalties: Sequence[Floats], values: ByIndex) -> list[Observed]:
        """Collect penalties and, with a critic, values in units of returns.

        If a sample's return after its last turn is unknown, bootstrap it with the critic's value of what would follow.
        """
        critic, samples = self._train_state.critic, self._samples
        if critic is None:
            return [Observed(penalty) for penalty in penalties]
        unknown = [index for index, sample in enumerate(samples) if sample.after is None]
        with self._train_state.precision():
            after = bootstrap_values(self._train_state.values, samples, unknown, self._batching)
        refuse_broken("values", samples, [index for index, value in after.items() if not math.isfinite(value)])
        rest = {index: sample.after or 0.0 for index, sample in enumerate(samples)}
        rest |= {index: critic.norm.denormalise(value) for index, value in after.items()}
        return [
            Observed(penalty, critic.norm.denormalise(_tensor(values[index])).numpy(), rest[index])
            for index, penalty in enumerate(penalties)
        ]

    def _set_returns(self, columns: Sequence[Columns], observed: Sequence[Observed], estimated: Estimated) -> None:
        """Add the returns to the value normaliser, then set the normalised returns as the critic's targets."""
        norm = self._train_state.critic and self._train_state.critic.norm
        assert norm
        if estimated.returns is None:
            told = "gives no returns for the critic to learn: return them in `Estimated`, or remove ppo.critic"
            raise ValueError(f"ppo.advantage.type={self._ppo.advantage.type} {told}")
        returns = np.concatenate(estimated.returns)
        self._metrics |= value_metrics(np.concatenate([o.values for o in observed if o.values is not None]), returns)
        norm.update(torch.from_numpy(returns))
        for of_sample, values in zip(columns, estimated.returns, strict=True):
            of_sample.returns = norm.normalise(_tensor(values)).numpy()


def _tensor(values: Logprobs | Floats) -> Tensor:
    return torch.from_numpy(values).double()
