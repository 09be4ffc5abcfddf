"""The components of an update's loss, which the trainer sums up without knowing the algorithm.

    loss = sum over components c of  coefficient_c / N_c * sum over tokens t of  weight_ct * loss_ct

An algorithm (`tasks.train.algorithms`) decides before the update which weight of which component each token has. N_c is
the normaliser: the number of tokens with the component in the minibatch, the number of their episodes, or a constant.
It is computed for the whole minibatch, so micro-batches, ranks and the arrangement of rows do not matter.

Example: two episodes of 3 and 1 tokens with losses 1, 1, 1 and 5 give

    per            weights                   loss
    "tokens"       1, 1, 1, 1                (3 + 5) / 4 = 2
    "sequences"    1/3, 1/3, 1/3, 1          (1 + 5) / 2 = 3      the mean over each episode first, as in GRPO
    "sequences"    1, 1, 1, 1                (3 + 5) / 2 = 4      whole episodes, as in REINFORCE
    16.0           1, 1, 1, 1                (3 + 5) / 16 = 0.5
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from configs.knobs import nearest
from tasks.train.losses import kl_estimate, value_loss


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

    `ratio`, `clipped`, `dual_clipped` and `weight` have metrics of their own (`metrics.py`), any other name its mean.
    """

    loss: Float[Tensor, " tokens"]
    metrics: Mapping[str, Shaped[Tensor, " tokens"]] = {}


Loss = Callable[[LossInputs], LossOutputs]
Normaliser = Literal["tokens", "sequences"] | float


@dataclass(frozen=True, slots=True)
class Component:
    """A loss with its normaliser and coefficient."""

    loss: Loss
    per: Normaliser = "tokens"
    coefficient: float = 1.0

    def __post_init__(self) -> None:
        if not (self.per in ("tokens", "sequences") or (isinstance(self.per, float | int) and self.per > 0)):
            raise ValueError(f"per={self.per!r}: a loss is divided by 'tokens', 'sequences' or a number above 0")


def checked(outputs: object, inputs: LossInputs, name: str) -> LossOutputs:
    """Return what a loss returned, if it has a number for each token; otherwise it would silently be spread over them.

    Raises:
        ValueError: it is no `LossOutputs`, or a tensor has another shape; the message names the component.
    """
    if not isinstance(outputs, LossOutputs):
        raise ValueError(
            f"the loss of the component {name} returned {type(outputs).__name__}: return LossOutputs(loss)"
        )
    for what, values in {"loss": outputs.loss, **outputs.metrics}.items():
        if values.shape != inputs.logp.shape:
            told = (
                f"{what} has the shape {[*values.shape]}, but there are {len(inputs.logp)} tokens: give each a number"
            )
            raise ValueError(f"the loss of the component {name}: {told}")
    return outputs


def cross_entropy(inputs: LossInputs) -> LossOutputs:
    """Compute `-logp`: the weighted log-likelihood of the tokens."""
    return LossOutputs(-inputs.logp)


def reference_kl(inputs: LossInputs, estimator: Literal["k1", "k2", "k3"] = "k3") -> LossOutputs:
    """Estimate KL(policy ‖ reference) at each token (`kl_estimate`)."""
    assert inputs.reference is not None, "the algorithm keeps no reference policy"
    return LossOutputs(kl_estimate(inputs.logp, inputs.reference, estimator))


def critic_loss(inputs: LossInputs, value_eps_clip: float = 0.2) -> LossOutputs:
    """Compute the clipped squared error of the critic's values (`value_loss`)."""
    assert inputs.values is not None
    assert inputs.old_values is not None
    assert inputs.returns is not None
    loss, clipped = value_loss(inputs.values, inputs.old_values, inputs.returns, value_eps_clip)
    return LossOutputs(loss, {"value_clipped": clipped})


_COMPONENTS: dict[str, Component] = {
    "ce": Component(cross_entropy),
    "ref_kl": Component(reference_kl),
    "value": Component(critic_loss),
}
"""The components that are the same in all algorithms. `rl`, the policy's loss, is the algorithm's own."""


def register_component(name: str, component: Component) -> None:
    """Make a component available to algorithms, by the name that their weights have."""
    _COMPONENTS[name] = component


def find_component(name: str, algorithm: str) -> Component:
    """Return the component of this name.

    Raises:
        ValueError: there is none; the message names the algorithm.
    """
    if name not in _COMPONENTS:
        known = sorted([*_COMPONENTS, "rl"])
        told = f"{nearest(name, known)}; there are {', '.join(known)}, and register_component adds one"
        raise ValueError(f"algorithm.type={algorithm} gives weights of the component {name!r}, which is unknown{told}")
    return _COMPONENTS[name]
