"""The knobs of an update: advantages, critic, KL penalty, PPO's objective, the optimizer and the mesh of ranks."""

from typing import Annotated, Literal, Self

from pydantic import Field, PlainSerializer, PositiveFloat, PositiveInt, model_validator

from configs.knobs import Decay, Knobs, NonNegativeFloat, NonNegativeInt, Share, Workers, refuse_idle

KLEstimator = Literal["k1", "k2", "k3"]

FROM_NEXT_UPDATE = (
    *("optimizer.lr", "optimizer.max_grad_norm", "ppo.critic.lr", "ppo.c_clip", "ppo.early_stop_imp_ratio"),
    *("ppo.behaviour_weight.cap", "ppo.advantage.bound"),
)
"""Knobs that a run may change from its next update on: learning rates, and bounds of what a single token, episode or
minibatch may do. They have no state, and data that are stored already mean the same with another value."""


class Advantage(Knobs):
    """The advantage estimator: group baselines by problem and turn (GRPO, RLOO), or GAE with a critic."""

    type: str = "group"
    """Registered advantage estimator: `group` or `gae`."""
    credit: Literal["causes", "order"] = "causes"
    """Which rewards a turn's return adds up. causes: all that were given when the agent had received the turn, so that
    candidates of one request and requests that ran at once share what follows, and earn nothing of each other's past.
    order: all that follow in the order in which turns are stored."""
    baseline: Literal["turn", "episode", "mixed"] = "mixed"
    """Episodes of the group with which a turn is compared (type `group` only): those that reached this turn (`turn`);
    all, each with its return at this turn or at its last one before (`episode`: plain GRPO if the reward comes at the
    end); or those that reached it, but all if at most three did (`mixed`)."""
    scale_by_std: bool = False
    """Divide by the standard deviation of the group (type `group` only)."""
    scale_penalties: bool = False
    """Let `scale_by_std` and `normalisation` count and divide KL penalties in the reward, too. False: they divide what
    comes from the rewards only, so kl_ctl is in units of divided rewards, as with `kl.place=loss` (type `group` only).
    """
    leave_one_out: bool = False
    """Compare an episode with the mean of the other episodes of its group (RLOO; type `group` only)."""
    discount: Share = 1.0
    """Discount from one token to the next within a turn (type `gae` only). The agent's `turn_discount` applies from
    turn to turn."""
    gae_lambda: Share = 1.0
    """Lambda of GAE (type `gae` only): 1 uses whole returns, 0 uses only the next value. Below 1 the turns of an
    episode must be a chain, unless `credit=order` takes them for one."""
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
    reward, k3 in the loss, because the gradient of k1 in the loss is 0 on average."""
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


class Parallel(Knobs):
    """The mesh of the trainer's ranks. All meshes compute the same up to rounding, and the same mesh the same bits."""

    replicate: PositiveInt = 1
    """Number of copies of the model: each trains on its share of the tokens."""
    shard: PositiveInt = 1
    """Number of ranks among which each copy's weights, gradients and moments are divided (FSDP2); each of these ranks
    trains on tokens of its own, too."""

    @property
    def ranks(self) -> int:
        """The number of ranks, replicate x shard."""
        return self.replicate * self.shard


class PPO(Knobs):
    advantage: Advantage = Advantage()
    """Knobs of the advantages, which are computed from rewards."""
    critic: Critic | None = None
    """Critic for `gae`; `ppo.critic={}` makes one with the defaults."""
    kl: KL = KL()
    """KL penalty and its reference policy."""
    eps_clip: Annotated[float, Field(gt=0, lt=1)] = 0.2
    """The ratio is clipped to [1 - eps_clip, 1 + eps_clip]."""
    eps_clip_higher: PositiveFloat | None = None
    """Sets another upper bound, 1 + eps_clip_higher (asymmetric clip); empty: eps_clip."""
    c_clip: Annotated[float, Field(gt=1)] | None = 3.0
    """Dual clip: if A < 0, the surrogate is never below c_clip * A; empty: no dual clip."""
    objective: Literal["decoupled", "recomputed", "behaviour"] = "decoupled"
    """Policy that a ratio is taken to, and around which it is clipped. decoupled: the proximal policy, whose logprobs
    the trainer recomputes; each token is weighted by proximal / behaviour probability. recomputed: plain PPO with these
    logprobs and without the weight, which is right on-policy only. behaviour: plain PPO with the logprobs of sampling;
    the trainer recomputes none."""
    behaviour_weight: BehaviourWeight = BehaviourWeight()
    """Weight of the decoupled objective."""
    entropy_coefficient: NonNegativeFloat = 0.0
    """Coefficient of the bonus for the entropy of the action tokens' distributions."""
    early_stop_imp_ratio: Annotated[float, Field(gt=1)] | None = 5.0
    """A minibatch whose mean ratio is above this does not change the policy, and is counted; empty: no limit."""
    mask_truncated: bool = False
    """Exclude turns that the token limit cut from the loss."""
    routing_replay: bool = False
    """Train a mixture of experts with the experts that the engine chose for each token, which are stored with it. Needs
    servers that return them: on a GPU, since the CPU build has no such part."""
    epochs: PositiveInt = 1
    """Number of passes of an update over its data (sample reuse)."""
    ppo_n_minibatches: PositiveInt = 4
    """Number of optimizer steps in an epoch, each on a random share of the groups."""
    micro_batch_tokens: PositiveInt | None = None
    """Largest number of tokens in one forward pass, padding included. Empty: a number for the device
    (`tasks/train/memory.py`); a run that was begun with another one keeps that."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device of the trainer."""
    autocast: Literal["none", "bfloat16"] = "none"
    """Number format of the forward pass; weights and optimizer stay float32."""
    kernels: Literal["auto", "plain"] = "auto"
    """Kernels for passes with `autocast=bfloat16`. auto: an output layer that rounds its factors (to TF32 on a GPU, to
    bfloat16 on a CPU), and on a GPU for Llama, Qwen2 and Qwen3 packed rows, and copies of the weights that live through
    a step; plain: padded rows, all by transformers."""
    moments: Literal["device", "host"] = "device"
    """Place of AdamW's moments. host: in the memory of the host, from which each step sends them to the GPU and back:
    8 bytes for each parameter less on the GPU, for one whose model just fits."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, about a third more time."""
    threads: Workers = 2
    """Number of CPU threads of the trainer; of each rank if there are several."""
    parallel: Parallel = Parallel()
    """The mesh of the trainer's ranks. More than one run in Ray: of this host alone, or of
    `cluster.address`."""

    @property
    def needs_first(self) -> bool:
        """True if training needs policy version 0, for a reference policy or a critic of its own."""
        return self.kl.kl_ctl > 0 or (self.critic is not None and self.critic.model == "own")

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        advantage = self.advantage
        if advantage.type == "gae" and self.critic is None:
            raise ValueError("advantage.type='gae' needs values: set ppo.critic={} for a critic with the defaults")
        if advantage.type == "group" and self.critic is not None:
            raise ValueError(
                "advantage.type='group' uses no critic: set ppo.advantage.type=gae, or leave ppo.critic out"
            )
        if advantage.type == "gae":
            refuse_idle(advantage, "scale_by_std", "leave_one_out", why="with advantage.type=gae")
        if advantage.type == "group":
            refuse_idle(advantage, "discount", "gae_lambda", why="with advantage.type=group")
        if advantage.normalisation == "none":
            refuse_idle(advantage, "bound", why="with advantage.normalisation=none")
        if self.moments == "host" and self.parallel.shard > 1:
            raise ValueError("moments=host is for models that are not divided among ranks: set parallel.shard=1")
        if self.objective != "decoupled":
            why = f"in behaviour_weight: w is 1 with objective={self.objective}"
            refuse_idle(self.behaviour_weight, "cap", "floor", "level", why=why)
        return self


class Optimizer(Knobs):
    """The optimizer, AdamW."""

    lr: PositiveFloat = 2e-5
    """Learning rate after warm-up."""
    weight_decay: NonNegativeFloat = 0.05
    """Decoupled weight decay of matrices; norms and biases do not decay."""
    betas: Annotated[tuple[Decay, Decay], PlainSerializer(list)] = (0.9, 0.95)
    """Decay rates of the first and second moments."""
    eps: PositiveFloat = 1e-5
    """Added to the root of the second moment. Large models need 1e-8: their gradients are so small that 1e-5 would
    shorten all steps."""
    warmup_steps: NonNegativeInt = 0
    """Number of steps over which the learning rate rises from zero. It is not a share of all steps, because
    `run.iterations` may be raised later."""
    max_grad_norm: PositiveFloat = 1.0
    """Gradients are clipped to this norm."""
