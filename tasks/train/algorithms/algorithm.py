"""The base class of algorithms. One decides each token's advantage and weights before an update; its loss is the rest.

Example: what Dr. GRPO gives three episodes of one problem, the last of two turns, with returns of -1, 1 and 1 and room
for 100 tokens:

    episode    tokens    advantages                weights["rl"]
    wrong      3         -1.33, -1.33, -1.33       1/100, 1/100, 1/100
    right      2         0.67, 0.67                1/100, 1/100
    right      1 + 1     0.67, 0.67                1/100, 1/100
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, cast

import numpy as np
import torch

from configs.algorithms import Algorithm as Knobs
from configs.knobs import nearest
from tasks.registry import described_with_place
from tasks.train import components
from tasks.train.advantages import Observed
from tasks.train.algorithms import OWN_LOSSES
from tasks.train.components import Component, Loss, LossInputs, LossOutputs, Normaliser
from tasks.train.passes import broken, refuse_broken
from tasks.train.returns import chain
from tasks.train.samples import Floats, Ints, Logprobs, Sample, by_member


@dataclass(frozen=True, slots=True)
class AlgorithmContext:
    """The argument of an algorithm's constructor."""

    knobs: Any  # the section `algorithm`, of the type that `algorithm.type` names
    max_new_tokens: int = 1024  # largest number of tokens in a completion


class Observations(NamedTuple):
    """Tokens of a sample that the policy did not sample, but has cross-entropy on (component `ce`)."""

    positions: Ints  # E, in token_ids; none of them an action token or the first of a sequence
    weights: Floats  # E


@dataclass(frozen=True, slots=True)
class Assignment:
    """The advantages and weights of the A action tokens of each of N samples in an update."""

    advantages: list[Floats]  # N arrays [A]; 0 where nothing uses them
    weights: Mapping[str, list[Floats]]  # of each component N arrays [A]; a token with the weight 0 does not have it
    returns: list[Floats] | None = None  # N arrays [A], the targets of a critic
    observations: list[Observations] | None = None  # N


ByIndex = Mapping[int, Logprobs]
Reweighed = tuple[dict[int, Floats], dict[str, float]]


class Algorithm:
    """The base class of algorithms: a policy gradient with the clip of PPO.

    A subclass has `assign`, and whatever it does otherwise. It has no state: what it decides follows from its knobs
    and the stored data alone, so an update can be repeated.
    """

    knobs: Knobs
    per: Normaliser = "tokens"
    """The normaliser of the policy loss and of a KL penalty in the loss."""
    uses: tuple[str, ...] = ("logprobs",)
    """What `assign` and the losses read that stored data may lack, in words of `LACKED` (`tasks.tables.sets`), such as
    "versions". With "logprobs", those of sampling, `flows.fit` also refuses data of another temperature."""
    needs_current: bool = False
    """True if `reweigh` needs the logprobs under the weights before each optimizer step."""
    recomputes: bool = False
    """True if the proximal logprobs are recomputed before the update; else they are those of sampling."""
    entropy_gradient: bool = False
    """True if the loss has a gradient through the entropy."""
    early_stop: float | None = None
    """The mean ratio above which a minibatch changes nothing; None: no limit."""

    def __init__(self, context: AlgorithmContext) -> None:
        self.knobs, self.max_new_tokens = context.knobs, context.max_new_tokens

    def assign(self, samples: Sequence[Sample], observed: Sequence[Observed]) -> Assignment:
        """Decide what each token gets, once for the whole update.

        Args:
            samples: N samples, in whole groups.
            observed: for each sample penalties, and values or logprobs of other models that the algorithm needs.
        """
        raise NotImplementedError(f"{type(self).__name__} must define assign")

    def loss(self, inputs: LossInputs) -> LossOutputs:
        """Compute the policy loss (component `rl`) of tokens with a weight in `rl`.

        It is `-min(ratio * A, clip(ratio, 1 - eps_clip, 1 + eps_clip_higher) * A)`, and at most `-c_clip * A` where
        A < 0, with ratio = policy / sampling.
        """
        clips: Any = (getattr(self.knobs, name, None) for name in ("eps_clip", "eps_clip_higher", "c_clip"))
        ones = torch.ones_like(inputs.logp)
        return components.policy_loss(inputs.logp, inputs.behaviour, ones, inputs.advantages, *clips)

    def reweigh(self, samples: Mapping[int, Sample], current: ByIndex, reference: ByIndex) -> Reweighed:
        """Compute the factor [A] of each sample's weights in one minibatch, and metrics of it.

        Args:
            samples: those of the minibatch, by index.
            current: their logprobs [A] under the present weights.
            reference: those under the reference policy, if there is one.
        """
        raise NotImplementedError(f"{type(self).__name__} needs_current, so it must define reweigh")

    def component(self, name: str) -> Component:
        """Return the component of this name, with its normaliser and coefficient.

        Raises:
            ValueError: there is no such component.
        """
        kl, critic = self.knobs.kl, self.knobs.critic
        if name == "rl":
            own: str | None = getattr(self.knobs, "loss", None)
            return Component(cast(Loss, OWN_LOSSES.find(own)) if own else self.loss, self.per)
        if name == "ce":
            return Component(components.cross_entropy)
        if name == "ref_kl":
            if not kl.in_loss:
                return Component(components.reference_kl)
            loss = partial(components.reference_kl, estimator=kl.chosen_estimator)
            return Component(loss, self.per, kl.kl_ctl)
        if name == "value" and critic:
            coefficient = critic.value_loss_coefficient if critic.model == "value-head" else 1.0
            loss = partial(components.critic_loss, value_eps_clip=critic.value_eps_clip)
            return Component(loss, "tokens", coefficient)
        known = ["ce", "ref_kl", "rl", "value"]
        hint = f"{nearest(name, known)}; there are {', '.join(known)}, and your class's `component` may return others"
        raise ValueError(
            f"algorithm.type={self.knobs.type} gives weights of the component {name!r}, which is unknown{hint}"
        )

    def share(
        self, advantages: list[Floats], weights: list[Floats] | None = None, returns: list[Floats] | None = None
    ) -> Assignment:
        """Return the assignment of a policy gradient, with the KL penalty and the critic that the knobs ask for.

        Without `weights` all tokens have the weight 1.
        """
        ones = [np.ones(len(values)) for values in advantages]
        parts = {"rl": weights or ones}
        if self.knobs.kl.in_loss:
            parts["ref_kl"] = weights or ones
        if self.knobs.critic:
            parts["value"] = ones
        return Assignment(advantages, parts, returns)


def by_episode(samples: Sequence[Sample]) -> list[Floats]:
    """Return weights with which a sum over episodes is a sum of means: 1 / (tokens of the episode in the loss)."""
    return [np.full(len(sample.actions), 1 / max(1, sample.in_loss.sum())) for sample in samples]


def shared_out(samples: Sequence[Sample], assigned: Assignment) -> Assignment:
    """Multiply the whole loss of each member of a mixture by one number, so that all problems have the same size.

    The size of a member is the sum of its weights times the root mean square of its advantages; without a policy loss
    it is the sum alone. A problem without any weight, and a member without any advantage, has no share. The sum of the
    sizes stays as it is.

    Example: two problems, one with 256 tokens and advantages of ±1, one with 8 tokens and ±0.5, have the sizes 256 and
    4. Their weights are multiplied by 130 / 256 and 130 / 4.
    """
    if len(members := by_member(samples)) == 1:
        return assigned
    is_policy = "rl" in assigned.weights
    arrays = assigned.weights["rl" if is_policy else next(iter(assigned.weights))]
    weights = [np.abs(array) * sample.in_loss for sample, array in zip(samples, arrays, strict=True)]
    totals = np.array([of.sum() for of in weights])
    squares = np.array([of @ values**2 for of, values in zip(weights, assigned.advantages, strict=True)])
    squares = squares if is_policy else totals
    sizes = np.sqrt([totals[own].sum() * squares[own].sum() for own in members])
    problems = [len({samples[i].problem_id for i in own if totals[i] and squares[own].any()}) for own in members]
    factors = np.ones(len(samples))
    for own, size, count in zip(members, sizes, problems, strict=True):
        factors[own] = sizes.sum() * count / sum(problems) / size if size else 1.0
    shared = {name: [*map(np.multiply, of, factors)] for name, of in assigned.weights.items()}
    seen = assigned.observations and [
        each._replace(weights=each.weights * by) for each, by in zip(assigned.observations, factors, strict=True)
    ]
    return replace(assigned, weights=shared, observations=seen)


def check_assignment(algorithm: Algorithm, samples: Sequence[Sample], assigned: Assignment) -> None:
    """Check what an algorithm assigned.

    Raises:
        ValueError: a number is not finite, or arrays have other lengths than those of the tokens; the message names the
            algorithm and a trajectory.
    """
    named = f"algorithm.type={algorithm.knobs.type}"
    if not isinstance(assigned, Assignment):
        raise ValueError(f"{named}: assign returned {type(assigned).__name__}: return self.share(advantages)")
    for name, arrays in {"advantages": assigned.advantages, **assigned.weights}.items():
        if len(arrays) != len(samples):
            raise ValueError(f"{named} gave {name} of {len(arrays)} samples, but there are {len(samples)}")
        for sample, array in zip(samples, arrays, strict=True):
            if len(array) != len(sample.actions):
                whom = f"{sample.trajectory_id}, which has {len(sample.actions)} action tokens"
                raise ValueError(f"{named} gave {len(array)} {name} to {whom}: give each a number")
        quantity = name if name == "advantages" else f"weights of {name}"
        refuse_broken(quantity, samples, broken(enumerate(arrays)), by=named)
    of_observations = [each.weights for each in assigned.observations or ()]
    refuse_broken("weights of observations", samples, broken(enumerate(of_observations)), by=named)


def try_algorithm(algorithm: Algorithm) -> None:
    """Try an algorithm or a loss of the user's on four made-up episodes, before anything expensive starts.

    It assigns, and computes the losses of its components; the logprobs of sampling are NaN if it `uses` none.

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
            outputs = components.checked(algorithm.component(name).loss(given), given, name)
            if name == "rl" and algorithm.early_stop and "ratio" not in outputs.metrics:
                limit = "its attribute `early_stop`" if algorithm.knobs.own else "algorithm.early_stop_imp_ratio"
                raise ValueError(
                    f"{named}: its loss returns no metric `ratio`, but {limit} limits it: return it, or set None"
                )
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
