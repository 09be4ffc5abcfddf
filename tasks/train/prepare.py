"""What an update needs before its first step: logprobs and values of all tokens, and from them advantages."""

import time
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from configs.schema import PPO
from tasks.train.advantages import Observed, estimate
from tasks.train.batches import Columns
from tasks.train.kl import kl_estimate
from tasks.train.logprobs import action_logprobs
from tasks.train.metrics import Metrics, value_metrics
from tasks.train.passes import TokenScorer, bootstrap_values, refuse_not_finite, score_action_tokens
from tasks.train.samples import Floats, Logprobs, Sample
from tasks.train.train_state import TrainState

Draws = Sequence[Sequence[Sequence[int]]]
"""For each epoch the minibatches, each as indices of samples."""


@dataclass(slots=True)
class Prepared:
    """For each sample its columns, and what there is to report."""

    columns: list[Columns]
    metrics: Metrics = field(default_factory=dict)
    trajectory_kl: float | None = None  # mean KL of a trajectory to the reference policy, in nats
    done: list[str] = field(default_factory=list)  # passes over the data, in words


class Preparation:
    """Passes over the samples with the models of a train state; only the value normaliser changes.

    Args:
        train_state: the models.
        ppo: the algorithm.
        temperature: of the sampled tokens.
        precision: a context in which models run.
    """

    def __init__(
        self, train_state: TrainState, ppo: PPO, temperature: float, precision: AbstractContextManager[object]
    ) -> None:
        self._train_state, self._ppo, self._temperature, self._precision = train_state, ppo, temperature, precision
        self._done: list[str] = []

    def prepare(self, samples: Sequence[Sample], draws: Draws) -> Prepared:
        """Everything that is constant while the minibatches of `draws` are trained on.

        Raises:
            ValueError: a number that is not finite; names the trajectories.
        """
        everyone = range(len(samples))
        proximal = self._proximal(samples, draws)
        reference: dict[int, Logprobs] = {}
        if self._train_state.reference:
            look = self._logprobs(self._train_state.reference.model)
            reference = self._look("reference logprobs", look, samples, everyone)
        values = self._look("values", self._train_state.values, samples, everyone) if self._train_state.critic else {}
        prepared = Prepared([], done=self._done)
        penalties = self._penalties(samples, proximal, reference, prepared)
        observed = self._observed(samples, penalties, values)
        estimated = estimate(samples, observed, self._ppo.advantage)
        refuse_not_finite("advantages", samples, enumerate(estimated.advantages))
        if self._train_state.critic and estimated.returns is None:
            raise ValueError(
                f"ppo.advantage.type={self._ppo.advantage.type} gives no returns for the critic to learn: "
                "return them in `Estimated`, or leave ppo.critic out"
            )
        for index, advantages in enumerate(estimated.advantages):
            prepared.columns.append(Columns(advantages, proximal.get(index), reference.get(index), values.get(index)))
        if estimated.returns is not None:
            self._set_returns(prepared, observed, estimated.returns)
        return prepared

    def _proximal(self, samples: Sequence[Sample], draws: Draws) -> dict[int, Logprobs]:
        """Logprobs under the present weights; the behaviour's where the objective or an option takes those.

        The first minibatch needs no pass of its own where it is seen once: it is trained on with these very
        weights, so that its training pass gives its proximal logprobs, bit for bit.
        """
        ppo = self._ppo
        if not (ppo.use_decoupled_loss and ppo.recompute_logprob):
            return {index: sample.behaviour for index, sample in enumerate(samples)}
        first = set(draws[0][0]) if len(draws) == 1 and not ppo.kl.in_reward else set()
        look, rest = self._logprobs(self._train_state.model), sorted(set(range(len(samples))) - first)
        return self._look("proximal logprobs", look, samples, rest)

    def _look(
        self, what: str, look: TokenScorer, samples: Sequence[Sample], indices: Iterable[int]
    ) -> dict[int, Logprobs]:
        start, chosen = time.perf_counter(), list(indices)
        if not chosen:
            return {}
        with self._precision:
            found = score_action_tokens(look, samples, chosen, self._ppo.micro_batch_tokens, self._train_state.device)
        refuse_not_finite(what, samples, found.items())
        self._done.append(f"{what} of {len(chosen)} trajectories in {time.perf_counter() - start:.1f} s")
        return found

    def _logprobs(self, model: PreTrainedModel) -> TokenScorer:
        """Looks at the logprobs under `model`."""
        chunk = self._ppo.logprob_chunk_tokens

        def look(tokens: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
            return action_logprobs(model, tokens, rows, columns, self._temperature, chunk)[0]

        return look

    def _penalties(
        self,
        samples: Sequence[Sample],
        proximal: dict[int, Logprobs],
        reference: dict[int, Logprobs],
        prepared: Prepared,
    ) -> list[Floats]:
        """Rewards [A] of single tokens: `-kl_ctl * KL` where it goes into the reward, else 0."""
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
        """Penalties and, with a critic, values in units of returns; where nobody knows what follows, also of that."""
        critic = self._train_state.critic
        if critic is None:
            return [Observed(penalty) for penalty in penalties]
        cut = [index for index, sample in enumerate(samples) if sample.after is None]
        with self._precision:
            after = bootstrap_values(
                self._train_state.values, samples, cut, self._ppo.micro_batch_tokens, self._train_state.device
            )
        refuse_not_finite("values", samples, ((index, np.array(value)) for index, value in after.items()))
        units = critic.norm.denormalise
        return [
            Observed(penalty, units(_tensor(values[i])).numpy(), units(after[i]) if i in after else sample.after or 0.0)
            for i, (sample, penalty) in enumerate(zip(samples, penalties, strict=True))
        ]

    def _set_returns(self, prepared: Prepared, observed: Sequence[Observed], returns: Sequence[Floats]) -> None:
        """Normalises the critic's targets by statistics that include them."""
        critic = self._train_state.critic
        assert critic is not None
        every = np.concatenate(returns)
        prepared.metrics |= value_metrics(np.concatenate([o.values for o in observed if o.values is not None]), every)
        critic.norm.update(torch.from_numpy(every))
        for columns, mine in zip(prepared.columns, returns, strict=True):
            columns.returns = critic.norm.normalise(_tensor(mine)).numpy()


def _tensor(values: Logprobs | Floats) -> Tensor:
    return torch.from_numpy(values).double()
