"""The components of an update's loss, which the trainer sums up without knowing the algorithm, and their formulas.

    loss = sum over components c of  coefficient_c / N_c * sum over tokens t of  weight_ct * loss_ct

An algorithm (`tasks.train.algorithms`) decides before the update which weight of which component each token has. N_c is
the normaliser: the number of tokens with the component in the minibatch, the number of their episodes, or a constant.
It is computed for the whole minibatch, so micro-batches, ranks and the arrangement of rows do not matter.

Example: two episodes of 3 and 1 tokens with losses 1, 1, 1 and 5 give

    per            weights                   loss
    "tokens"       1, 1, 1, 1                (3 + 5) / 4 = 2
    "episodes"     1/3, 1/3, 1/3, 1          (1 + 5) / 2 = 3      the mean over each episode first, as in GRPO
    "episodes"     1, 1, 1, 1                (3 + 5) / 2 = 4      whole episodes, as in REINFORCE
    16.0           1, 1, 1, 1                (3 + 5) / 16 = 0.5
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from configs.algorithm_parts import KLEstimator


class LossInputs(NamedTuple):
    """The numbers of T tokens of a pass. Only `logp`, `entropy` and `values` have gradients."""

    logp: Float[Tensor, " tokens"]  # under the weights in training, at the temperature of sampling
    entropy: Float[Tensor, " tokens"]  # of the distribution that the token was drawn from
    behaviour: Float[Tensor, " tokens"]  # logprobs recorded while sampling; 0 for tokens that nobody sampled
    proximal: Float[Tensor, " tokens"]  # logprobs under the weights before the update, or those of sampling
    advantages: Float[Tensor, " tokens"]
    sequences: Int[Tensor, " tokens"]  # number of the token's sequence in the pass, which has all its tokens
    reference: Float[Tensor, " tokens"] | None = None  # logprobs under the reference policy
    values: Float[Tensor, " tokens"] | None = None  # of the critic in training, normalised
    old_values: Float[Tensor, " tokens"] | None = None  # of the critic before the update
    returns: Float[Tensor, " tokens"] | None = None  # its targets, normalised

    def of(self, chosen: Bool[Tensor, " tokens"]) -> "LossInputs":
        """Return the inputs of some of the tokens."""
        return self._replace(**{name: column[chosen] for name, column in self._asdict().items() if column is not None})


class LossOutputs(NamedTuple):
    """The loss of T tokens, and numbers of them for the metrics, without gradient.

    `clipped` and `dual_clipped` become `policy/clip_fraction` and `policy/dual_clip_fraction`, `weight` becomes
    `weight/…`, and any other NAME becomes `policy/NAME`, its mean. An algorithm with `early_stop` needs `ratio`.
    """

    loss: Float[Tensor, " tokens"]
    metrics: Mapping[str, Shaped[Tensor, " tokens"]] = {}


RESERVED = frozenset(
    {"samples", "sampled", "behaviour", "proximal", "reference", "logp", "entropy", "loss", "gradient", "value_loss"}
    | {"kl", "kl_behaviour", "kl_reference", "early_stopped", "observed_loss"}
    | {"clip_fraction", "first_clip_fraction", "dual_clip_fraction"}
)
"""Names of an update's own numbers, which no metric of a loss may have."""
Loss = Callable[[LossInputs], LossOutputs]
Normaliser = Literal["tokens", "episodes"] | float


@dataclass(frozen=True, slots=True)
class Component:
    """A loss with its normaliser and coefficient."""

    loss: Loss
    per: Any = "tokens"  # a `Normaliser`; of a user's class it may be anything, and is checked below
    coefficient: float = 1.0

    def __post_init__(self) -> None:
        if not (self.per in ("tokens", "episodes") or (isinstance(self.per, float | int) and self.per > 0)):
            raise ValueError(f"per={self.per!r}: a loss is divided by 'tokens', 'episodes' or a number above 0")


def checked(outputs: object, inputs: LossInputs, name: str) -> LossOutputs:
    """Return what a loss returned, if it has a number for each token; otherwise it would silently be spread over them.

    Raises:
        ValueError: it is no `LossOutputs`, a tensor has another shape, or a metric has a name of `RESERVED`.
    """
    if not isinstance(outputs, LossOutputs):
        returned = type(outputs).__name__
        raise ValueError(f"the loss of the component {name} returned {returned}: return LossOutputs(loss)")
    if taken := sorted(outputs.metrics.keys() & RESERVED):
        raise ValueError(f"the loss of the component {name}: a metric cannot be called {taken[0]!r}: rename it")
    for what, values in {"loss": outputs.loss, **outputs.metrics}.items():
        if values.shape != inputs.logp.shape:
            shape, tokens = [*values.shape], len(inputs.logp)
            problem = f"{what} has the shape {shape}, but there are {tokens} tokens: give each a number"
            raise ValueError(f"the loss of the component {name}: {problem}")
    return outputs


def cross_entropy(inputs: LossInputs) -> LossOutputs:
    """Compute `-logp`: the weighted log-likelihood of the tokens."""
    return LossOutputs(-inputs.logp)


def reference_kl(inputs: LossInputs, estimator: KLEstimator = "k3") -> LossOutputs:
    """Estimate KL(policy ‖ reference) at each token (`kl_estimate`)."""
    assert inputs.reference is not None, "the algorithm keeps no reference policy"
    return LossOutputs(kl_estimate(inputs.logp, inputs.reference, estimator))


_LARGEST = 20.0
"""Largest log of a ratio."""


def policy_loss(
    logp: Float[Tensor, " actions"],
    proximal: Float[Tensor, " actions"],
    weight: Float[Tensor, " actions"],
    advantages: Float[Tensor, " actions"],
    eps_clip: float,
    eps_clip_higher: float | None = None,
    c_clip: float | None = None,
) -> LossOutputs:
    """Compute decoupled PPO: `-w * min(ratio * A, clip(ratio, 1 - eps_clip, 1 + eps_clip_higher) * A)` for each token.

    `ratio = exp(logp - proximal)`, up to exp(20), since it would overflow. The clip is centred on the proximal policy
    (the weights before the update), and w corrects for tokens that an older or otherwise different policy sampled. With
    proximal = behaviour and w = 1 this is plain PPO. With `c_clip` the objective of a token with A < 0 is not below
    `c_clip * A` (before w), so one bad token that became far more likely cannot dominate the minibatch.
    `clipped` and `dual_clipped` are true where the clip, or the dual clip, removed the token's gradient.
    Source: PPO (arXiv 1707.06347, equation 7), AReaL's decoupled objective (2505.24298), clip-higher of DAPO
    (2503.14476), dual clip (1912.09729, equation 5).

    Args:
        logp: [A], logprobs under the weights in training, with gradient; the other tensors are constants.
        proximal: [A], logprobs under the weights before the update.
        weight: [A], w, from `behaviour_weights`.
        advantages: [A].
        eps_clip: width of the clip below 1, and also above 1 if `eps_clip_higher` is None.
        eps_clip_higher: width of the clip above 1.
        c_clip: the dual clip, more than 1; None: no dual clip.
    """
    ratio = torch.exp((logp - proximal).clamp(max=_LARGEST))
    surrogate, upper = ratio * advantages, 1 + (eps_clip if eps_clip_higher is None else eps_clip_higher)
    at_clip = ratio.clamp(1 - eps_clip, upper) * advantages
    objective, clipped = torch.minimum(surrogate, at_clip), (at_clip < surrogate).detach()
    dual_clipped = torch.zeros_like(objective, dtype=torch.bool)
    if c_clip is not None:
        bound = c_clip * advantages
        dual_clipped = (advantages < 0) & (objective < bound).detach()
        objective = torch.where(dual_clipped, bound, objective)
    return LossOutputs(-weight * objective, {"ratio": ratio.detach(), "clipped": clipped, "dual_clipped": dual_clipped})


def behaviour_weights(
    proximal: Float[Tensor, " actions"],
    behaviour: Float[Tensor, " actions"],
    sequences: Int[Tensor, " actions"],
    cap: float | None = None,
    mode: Literal["truncate", "mask"] = "truncate",
    level: Literal["token", "sequence"] = "token",
    floor: float | None = None,
) -> Float[Tensor, " actions"]:
    """Compute `w = exp(proximal - behaviour)`, [A]; for a sequence, the geometric mean over its action tokens.

    If w is above the cap, `truncate` gives the cap and `mask` gives 0. If w is below the floor, it is 0. A token with
    weight 0 still counts in N.
    Source: truncated importance sampling (Ionides 2008), as verl and prime-rl use it for rollouts; masks on both sides
    as in IcePop (Ling team, 2025).

    Args:
        proximal: [A].
        behaviour: [A].
        sequences: [A], the sequence of each token.
        cap: the largest w; None: no limit.
        mode: how a larger w is changed.
        level: `token`: one w for each token; `sequence`: one w for all tokens of a sequence.
        floor: the smallest w; None: no limit.
    """
    difference = proximal - behaviour
    weight = torch.exp(sequence_means(difference, sequences) if level == "sequence" else difference)
    if cap is not None:
        weight = weight.clamp(max=cap) if mode == "truncate" else torch.where(weight > cap, 0.0, weight)
    return weight if floor is None else torch.where(weight < floor, 0.0, weight)


def sequence_means(values: Float[Tensor, " actions"], sequences: Int[Tensor, " actions"]) -> Float[Tensor, " actions"]:
    """Return for each token the mean of the values [A] of its sequence; the gradient goes to all its tokens."""
    if not len(values):
        return values
    size = int(sequences.max()) + 1
    sums = torch.zeros(size, dtype=values.dtype, device=values.device).index_add(0, sequences, values)
    counts = torch.zeros_like(sums).index_add(0, sequences, torch.ones_like(values))
    return (sums / counts.clamp(min=1))[sequences]


def critic_loss(inputs: LossInputs, value_eps_clip: float = 0.2) -> LossOutputs:
    """Compute half of the larger squared error of the critic's value and of the clipped value.

    `max((V - R)², (old + clip(V - old, ±eps) - R)²) / 2`, with the value before the update as old. `value_clipped` is
    true where the clipped value had the larger error. Source: PPO's reference implementation (2017).
    """
    values, old, returns = inputs.values, inputs.old_values, inputs.returns
    assert values is not None
    assert old is not None
    assert returns is not None
    near = old + (values - old).clamp(-value_eps_clip, value_eps_clip)
    error, clipped_error = (values - returns) ** 2, (near - returns) ** 2
    return LossOutputs(torch.maximum(error, clipped_error) / 2, {"value_clipped": (clipped_error > error).detach()})


def kl_estimate(
    logp: Float[Tensor, " actions"], reference: Float[Tensor, " actions"], estimator: KLEstimator
) -> Float[Tensor, " actions"]:
    """Estimate KL(policy ‖ reference) for each token that the policy sampled.

    With d = logp - reference: k1 = d, k2 = d²/2, k3 = exp(-d) - 1 + d. In a loss the mean gradient of k1 is zero, the
    gradient of k2 is that of the reverse KL, and the gradient of k3 is that of the forward KL.
    Source: J. Schulman, Approximating KL Divergence (2020).
    """
    d = logp - reference
    if estimator == "k1":
        return d
    if estimator == "k2":
        return d**2 / 2
    return torch.expm1(-d) + d
