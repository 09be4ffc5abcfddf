"""Preparation of an update before its first step: compute logprobs and values of all tokens, then advantages."""

import time
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from configs.train import PPO
from tasks.train.advantages import Observed, estimate
from tasks.train.batches import Columns
from tasks.train.kl import kl_estimate
from tasks.train.metrics import Metrics, value_metrics
from tasks.train.passes import TokenScorer, action_logprobs, bootstrap_values, refuse_not_finite, score_action_tokens
from tasks.train.rows import Places, Rows, batching_for
from tasks.train.samples import Floats, Logprobs, Sample
from tasks.train.sharding import within
from tasks.train.train_state import TrainState

Draws = Sequence[Sequence[Sequence[int]]]
"""The minibatches of each epoch; a minibatch is a list of indices of samples."""


@dataclass(slots=True)
class Prepared:
    """The columns of each sample, and the metrics and log lines of the preparation."""

    columns: list[Columns]
    metrics: Metrics = field(default_factory=dict)
    trajectory_kl: float | None = None  # mean KL of a trajectory to the reference policy, in nats
    log_lines: list[str] = field(default_factory=list)  # one log line for each finished pass over the data


class Preparation:
    """Passes over the samples with the models of a train state. Of the train state only the value normaliser changes.

    Args:
        train_state: holds the models.
        ppo: the algorithm.
        temperature: the temperature at which the tokens were sampled.
        precision: the context in which the models run.
    """

    def __init__(
        self, train_state: TrainState, ppo: PPO, temperature: float, precision: AbstractContextManager[object]
    ) -> None:
        self._train_state, self._ppo, self._temperature, self._precision = train_state, ppo, temperature, precision
        self._batching = batching_for(train_state.model, ppo, train_state.mesh)
        self._log_lines: list[str] = []

    def prepare(self, samples: Sequence[Sample], draws: Draws) -> Prepared:
        """Compute everything that stays constant while the minibatches of `draws` are trained on.

        Raises:
            ValueError: a number is NaN or infinite, in which case the message names the trajectories; or the advantage
                estimator gives no returns, which a critic needs.
        """
        indices = range(len(samples))
        proximal = self._proximal(samples, draws)
        reference: dict[int, Logprobs] = {}
        if self._train_state.reference:
            scorer = self._logprob_scorer(self._train_state.reference.model)
            reference = self._score("reference logprobs", scorer, samples, indices)
        values = self._score("values", self._train_state.values, samples, indices) if self._train_state.critic else {}
        prepared = Prepared([], log_lines=self._log_lines)
        penalties = self._penalties(samples, proximal, reference, prepared)
        observed = self._observed(samples, penalties, values)
        estimated = estimate(samples, observed, self._ppo.advantage)
        refuse_not_finite("advantages", samples, enumerate(estimated.advantages))
        if self._train_state.critic and estimated.returns is None:
            raise ValueError(
                f"ppo.advantage.type={self._ppo.advantage.type} gives no returns for the critic to learn: "
                "return them in `Estimated`, or remove ppo.critic"
            )
        for index, advantages in enumerate(estimated.advantages):
            prepared.columns.append(Columns(advantages, proximal.get(index), reference.get(index), values.get(index)))
        if estimated.returns is not None:
            self._set_returns(prepared, observed, estimated.returns)
        return prepared

    def _proximal(self, samples: Sequence[Sample], draws: Draws) -> dict[int, Logprobs]:
        """Compute logprobs under the present weights, or return the behaviour logprobs if `ppo` asks for those.

        With one epoch the first minibatch needs no pass here, unless the KL goes into the reward: it is trained on with
        the same weights, so its training pass gives its proximal logprobs, bit for bit.
        """
        ppo = self._ppo
        if ppo.objective == "behaviour":
            return {index: sample.behaviour for index, sample in enumerate(samples)}
        first = set(draws[0][0]) if len(draws) == 1 and not ppo.kl.in_reward else set()
        scorer, rest = self._logprob_scorer(self._train_state.model), sorted(set(range(len(samples))) - first)
        return self._score("proximal logprobs", scorer, samples, rest)

    def _score(
        self, quantity: str, scorer: TokenScorer, samples: Sequence[Sample], indices: Iterable[int]
    ) -> dict[int, Logprobs]:
        """Score the action tokens of the samples at `indices`, check the numbers, and add a log line."""
        start, chosen = time.perf_counter(), list(indices)
        if not chosen:
            return {}
        with self._precision:
            scores = score_action_tokens(scorer, samples, chosen, self._batching)
        refuse_not_finite(quantity, samples, scores.items())
        self._log_lines.append(f"{quantity} of {len(chosen)} trajectories in {time.perf_counter() - start:.1f} s")
        return scores

    def _logprob_scorer(self, model: PreTrainedModel) -> TokenScorer:
        def score_tokens(rows: Rows, places: Places) -> Tensor:
            return within(model, lambda: action_logprobs(model, rows, places, self._temperature)[0])

        return score_tokens

    def _penalties(
        self,
        samples: Sequence[Sample],
        proximal: dict[int, Logprobs],
        reference: dict[int, Logprobs],
        prepared: Prepared,
    ) -> list[Floats]:
        """Compute each sample's token rewards [A]: `-kl_ctl * KL` if the KL goes into the reward, else 0."""
        kl = self._ppo.kl
        if not kl.in_reward:
            return [np.zeros(len(sample.actions)) for sample in samples]
        estimates = [
            kl_estimate(_tensor(proximal[index]), _tensor(reference[index]), kl.chosen_estimator).numpy()
            for index in range(len(samples))
        ]
        prepared.trajectory_kl = float(np.mean([estimate.sum() for estimate in estimates]))
        prepared.metrics |= {"kl/kl_ctl": self._train_state.kl_ctl, "kl/trajectory": prepared.trajectory_kl}
        return [-self._train_state.kl_ctl * estimate for estimate in estimates]

    def _observed(
        self, samples: Sequence[Sample], penalties: Sequence[Floats], values: dict[int, Logprobs]
    ) -> list[Observed]:
        """Collect penalties and, with a critic, values in units of returns.

        If a sample's return after its last turn is unknown, bootstrap it with the critic's value of what would follow.
        """
        critic = self._train_state.critic
        if critic is None:
            return [Observed(penalty) for penalty in penalties]
        unknown = [index for index, sample in enumerate(samples) if sample.after is None]
        with self._precision:
            after = bootstrap_values(self._train_state.values, samples, unknown, self._batching)
        refuse_not_finite("values", samples, ((index, np.array(value)) for index, value in after.items()))
        scaled = critic.norm.denormalise
        return [
            Observed(
                penalty, scaled(_tensor(values[i])).numpy(), scaled(after[i]) if i in after else sample.after or 0.0
            )
            for i, (sample, penalty) in enumerate(zip(samples, penalties, strict=True))
        ]

    def _set_returns(self, prepared: Prepared, observed: Sequence[Observed], returns: Sequence[Floats]) -> None:
        """Add the returns to the value normaliser, then set the normalised returns as the critic's targets."""
        critic = self._train_state.critic
        assert critic is not None
        joined = np.concatenate(returns)
        prepared.metrics |= value_metrics(np.concatenate([o.values for o in observed if o.values is not None]), joined)
        critic.norm.update(torch.from_numpy(joined))
        for columns, of_sample in zip(prepared.columns, returns, strict=True):
            columns.returns = critic.norm.normalise(_tensor(of_sample)).numpy()


def _tensor(values: Logprobs | Floats) -> Tensor:
    return torch.from_numpy(values).double()
