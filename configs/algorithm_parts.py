"""Parts of the algorithms' sections: advantages, critic, KL penalty, and the weight of tokens of other policies."""

from typing import Annotated, Literal, Self

from pydantic import Field, PositiveFloat, model_validator

from configs.knobs import Knobs, NonNegativeFloat, Share, refuse_idle

KLEstimator = Literal["k1", "k2", "k3"]


class Advantage(Knobs):
    """The advantage estimator: group baselines by problem and turn (GRPO, RLOO), or GAE with a critic."""

    type: Literal["group", "gae"] = "group"
    """The estimator: comparison with the other episodes of the group, or generalised advantage estimation."""
    baseline: Literal["turn", "episode", "mixed"] = "mixed"
    """Episodes of the group with which a turn is compared (type `group` only): those that reached this turn (`turn`);
    all, each with its return at this turn or at its last one before (`episode`: plain GRPO if the reward comes at the
    end); or those that reached it, but all if at most three did (`mixed`)."""
    scale_by_std: bool = False
    """Divide by the standard deviation of the group (type `group` only)."""
    leave_one_out: bool = False
    """Compare an episode with the mean of the other episodes of its group (RLOO; type `group` only)."""
    discount: Share = 1.0
    """Discount from one token to the next within a turn (type `gae` only). The agent's `turn_discount` applies from
    turn to turn."""
    gae_lambda: Share = 1.0
    """Lambda of GAE (type `gae` only): 1 uses whole returns, 0 uses only the next value. Below 1 the turns of an
    episode must be a chain."""
    normalisation: Literal["none", "batch", "group"] = "batch"
    """`batch` normalises over the action tokens of all episodes, `group` over those of each problem, `none` not at all.
    With type `gae`: (A - mean) / (std + 1e-5). With type `group`: A / (root mean square + 1e-5), because its baselines
    already centre A; groups whose rewards agree stay at 0."""
    bound: PositiveFloat | None = 10.0
    """Largest normalised advantage in the loss: a few episodes that differ from all others are divided by more than the
    standard deviation or root mean square; empty: no bound."""


class Critic(Knobs):
    """The critic, which predicts values of action tokens for `gae`."""

    model: Literal["value-head", "own"] = "value-head"
    """A head on the last hidden states of the policy, or a separate model that starts as policy version 0."""
    lr: PositiveFloat | None = None
    """Learning rate of the head or of the separate model; empty: `optimizer.lr`."""
    value_eps_clip: PositiveFloat = 0.2
    """Largest change of a value in an update, in normalised units."""
    value_loss_coefficient: PositiveFloat = 0.1
    """Weight of the value loss relative to the policy loss; value-head only."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.model == "own":
            refuse_idle(self, "value_loss_coefficient", why="with model=own, which has an optimizer of its own")
        return self


class KL(Knobs):
    """The KL penalty, which keeps the policy close to the reference policy; 0 as `kl_ctl` turns it off."""

    kl_ctl: NonNegativeFloat = 0.0
    """Coefficient, such as 0.1; the start value if adaptive. 0: no penalty and no reference policy."""
    place: Literal["reward", "loss"] = "reward"
    """Subtract the penalty from the rewards of the tokens, or add it to the loss."""
    estimator: KLEstimator | None = None
    """Estimator of the KL from d = logp - logp_reference: d (k1), d²/2 (k2) or exp(-d) - 1 + d (k3). Empty: k1 in the
    reward, k3 in the loss. k1 in the loss is refused, because its gradient is 0 on average."""
    adaptive: bool = False
    """Raise and lower kl_ctl to keep the KL of a trajectory near the target (reward only)."""
    target: PositiveFloat = 6.0
    """Target KL of a trajectory in nats (adaptive only)."""
    reference: Literal["fixed", "ema"] = "fixed"
    """Reference policy: policy version 0, or the moving average of all versions."""

    @property
    def in_reward(self) -> bool:
        return self.kl_ctl > 0 and self.place == "reward"

    @property
    def in_loss(self) -> bool:
        return self.kl_ctl > 0 and self.place == "loss"

    @property
    def chosen_estimator(self) -> KLEstimator:
        return self.estimator or ("k1" if self.place == "reward" else "k3")

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.kl_ctl == 0:
            refuse_idle(self, "place", "estimator", "adaptive", "reference", why="without kl_ctl: set kl_ctl=0.1")
        if self.place == "loss":
            refuse_idle(self, "adaptive", why="with place=loss: use place=reward")
        if not self.adaptive:
            refuse_idle(self, "target", why="without adaptive=true")
        return self


class BehaviourWeight(Knobs):
    """The weight w = proximal / behaviour probability, which corrects for tokens that another policy sampled."""

    cap: PositiveFloat | None = 5.0
    """Largest w; empty: no limit."""
    floor: Annotated[float, Field(gt=0, lt=1)] | None = None
    """A token whose w is below this has weight 0, as in IcePop and MIS; empty: no limit."""
    mode: Literal["truncate", "mask"] = "truncate"
    """Replacement of a larger w: the cap (truncate), or 0 (mask)."""
    level: Literal["token", "sequence"] = "token"
    """`token`: each token has its own w. `sequence`: all tokens of a sequence have the geometric mean of their w."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.cap is None:
            refuse_idle(self, "mode", why="without a cap")
        if self.cap is not None and self.floor is not None and self.floor >= self.cap:
            raise ValueError(f"floor={self.floor:g} is not below cap={self.cap:g}: no token would be trained on")
        return self
