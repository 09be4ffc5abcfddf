"""The algorithms: one section each, with the defaults of its paper, no knobs that it lacks, and what it needs.

`algorithm.type` names one. The formula is a class of the same name in `tasks/train/algorithms` (`_CLASSES`). These are
two classes, because sections are read by whatever reads a configuration, without torch and below `tasks`.
"""

import re
import typing
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Discriminator, Field, PositiveFloat, Tag, TypeAdapter, field_validator, model_validator

from configs.agent import Agent
from configs.algorithm_parts import KL, Advantage, BehaviourWeight, Critic
from configs.knobs import Knobs, NonNegativeFloat, nearest, refuse_idle, tags
from configs.models import Models
from configs.rollout import Rollout

Clip = Annotated[float, Field(gt=0, lt=1)]
DualClip = Annotated[float, Field(gt=1)] | None
OWN = r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$"
"""The name of a class or function of the user's."""
Played = Sequence[tuple[str, Agent, Rollout]]
"""Agent and rollout section of each member of a mixture, with the words before errors about it; or the run's alone."""


class Algorithm(Knobs):
    """The base of all algorithms' sections. `kl` and `critic` of those without such knobs say that there is none."""

    if typing.TYPE_CHECKING:
        type: Any

        @property
        def kl(self) -> KL: ...

        @property
        def critic(self) -> Critic | None: ...

    on_policy_only: ClassVar[bool] = False
    """True if nothing corrects for tokens that an older policy sampled."""
    offline: ClassVar[bool] = False
    """True if it can train on stored data that another policy sampled (`flows.fit`)."""
    in_groups: ClassVar[bool] = True
    """True if the episodes of a group are compared with each other, unless a knob decides (`compares`)."""
    taught: ClassVar[bool] = False
    """True if it needs the logprobs of a teacher."""
    own: ClassVar[bool] = False
    """True if its formula is code of the user's."""

    def refusals(self, rollout: Rollout, models: Models, played: Played) -> Iterator[str]:
        """Yield a sentence for each knob of another section that the algorithm cannot work with."""
        if self.compares and rollout.group_size == 1:
            yield f"rollout.group_size=1 leaves algorithm.type={self.type} nothing to compare: use 2 or more"
        if self.on_policy_only and (oldest := rollout.max_head_offpolicyness) > 0:
            stale = f"rollout.max_head_offpolicyness={oldest}"
            yield f"algorithm.type={self.type} is right on-policy only, but {stale}: use another, such as ppo or mis"
        if self.taught and models.teacher is None:
            remedy = "set models.teacher.checkpoint=RUN@N or models.teacher.path"
            yield f"algorithm.type={self.type} needs a teacher: {remedy}"
        if not (self.taught or self.own) and models.teacher is not None:
            yield f"algorithm.type={self.type} has no use for models.teacher: set algorithm.type=opd, or leave it out"

    @property
    def undivided(self) -> "Algorithm":
        """The algorithm without a division of its advantages that needs a whole batch; itself if it has none."""
        return self

    @property
    def compares(self) -> bool:
        """True if the episodes of a group are compared with each other."""
        return self.in_groups

    @property
    def keeps_reference(self) -> bool:
        """True if training needs a reference policy."""
        return self.kl.kl_ctl > 0

    @property
    def needs_first(self) -> bool:
        """True if training needs policy version 0, for a reference policy or a critic of its own."""
        return self.keeps_reference or (self.critic is not None and self.critic.model == "own")


_OF_LOSS = ("eps_clip", "eps_clip_higher", "c_clip", "objective", "entropy_coefficient", "floor", "cap", "level")
"""Knobs of policy losses, which a loss of the user's does not see."""


class PolicyGradient(Algorithm):
    """An algorithm with a policy loss, which one of your own can replace."""

    loss: Annotated[str, Field(pattern=OWN)] | None = None
    """A function of your own in place of the algorithm's policy loss, `package.module:function`, from `LossInputs` to
    `LossOutputs` (`tasks/train/components.py`); empty: the algorithm's."""

    @model_validator(mode="after")
    def _loss_alone(self) -> Self:
        if self.loss:
            knobs = (name for name in _OF_LOSS if name in type(self).model_fields)
            refuse_idle(self, *knobs, why="with a loss of your own, which does not see it")
        return self


class PPO(PolicyGradient):
    """PPO (arXiv 1707.06347) with AReaL's decoupled objective (2505.24298), group baselines or a critic."""

    type: Literal["ppo"] = "ppo"
    offline: ClassVar[bool] = True
    advantage: Advantage = Advantage()
    """Knobs of the advantages, which are computed from rewards."""
    critic: Critic | None = None
    """Critic for `gae`; `algorithm.critic={}` makes one with the defaults."""
    kl: KL = KL()
    """KL penalty and its reference policy."""
    eps_clip: Clip = 0.2
    """The ratio is clipped to [1 - eps_clip, 1 + eps_clip]."""
    eps_clip_higher: PositiveFloat | None = None
    """Sets another upper bound, 1 + eps_clip_higher (asymmetric clip); empty: eps_clip."""
    c_clip: DualClip = 3.0
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

    @property
    def compares(self) -> bool:
        return self.advantage.type == "group"

    @property
    def undivided(self) -> Algorithm:
        if self.advantage.normalisation != "batch":
            return self
        advantage = self.advantage.model_copy(update={"normalisation": "none"})
        return self.model_copy(update={"advantage": advantage})

    def refusals(self, rollout: Rollout, models: Models, played: Played) -> Iterator[str]:
        yield from super().refusals(rollout, models, played)
        if (oldest := rollout.max_head_offpolicyness) > 0 and self.objective == "recomputed":
            knobs = f"rollout.max_head_offpolicyness={oldest}"
            yield f"algorithm.objective=recomputed is right on-policy only, but {knobs}: use decoupled"

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        advantage = self.advantage
        if advantage.type == "gae" and self.critic is None:
            remedy = "set algorithm.critic={} for a critic with the defaults"
            raise ValueError(f"advantage.type='gae' needs values: {remedy}")
        if advantage.type == "group" and self.critic is not None:
            remedy = "set algorithm.advantage.type=gae, or leave algorithm.critic out"
            raise ValueError(f"advantage.type='group' uses no critic: {remedy}")
        if advantage.type == "gae":
            refuse_idle(advantage, "scale_by_std", "leave_one_out", why="with advantage.type=gae")
        if advantage.type == "group":
            refuse_idle(advantage, "discount", "gae_lambda", why="with advantage.type=group")
        if advantage.normalisation == "none":
            refuse_idle(advantage, "bound", why="with advantage.normalisation=none")
        if self.objective != "decoupled":
            why = f"in behaviour_weight: w is 1 with objective={self.objective}"
            refuse_idle(self.behaviour_weight, "cap", "floor", "level", why=why)
        return self


class _WithoutCritic:
    @property
    def kl(self) -> KL:
        return KL(kl_ctl=getattr(self, "kl_ctl", 0.0))

    @property
    def critic(self) -> None:
        return None


class Published(_WithoutCritic, PolicyGradient):
    """An algorithm without a critic, whose ratios are to the policy that sampled."""


class Clipped(Published):
    """An algorithm with the clip of PPO."""

    eps_clip: Clip = 0.2
    """The ratio is clipped to [1 - eps_clip, 1 + eps_clip]."""
    c_clip: DualClip = 10.0
    """Dual clip: if A < 0, the surrogate is never below c_clip * A, so that one wrong logprob of the engine cannot be
    the whole step; empty: no dual clip, as in the papers. It is wide enough to change nothing else."""


class GRPO(Clipped):
    """GRPO (arXiv 2402.03300): advantages divided by the group's standard deviation, the mean over each episode."""

    type: Literal["grpo"]
    kl_ctl: NonNegativeFloat = 0.04
    """Coefficient of the KL to policy version 0 in the loss (k3); 0: none, and no reference policy."""

    @property
    def kl(self) -> KL:
        return KL(kl_ctl=self.kl_ctl, place="loss") if self.kl_ctl else KL()


class DrGRPO(Clipped):
    """Dr. GRPO (arXiv 2503.20783): GRPO without the two divisions, by standard deviation and by length."""

    type: Literal["dr_grpo"]


class RLOO(Published):
    """RLOO (arXiv 2402.14740): REINFORCE on whole episodes, each against the mean of the others of its group."""

    type: Literal["rloo"]
    on_policy_only: ClassVar[bool] = True
    kl_ctl: NonNegativeFloat = 0.03
    """Coefficient of the KL to policy version 0 in the reward (k1); 0: none, and no reference policy."""


class ReinforcePP(Clipped):
    """REINFORCE++ (arXiv 2501.03262): returns, normalised over the whole batch in place of a baseline, and a clip."""

    type: Literal["reinforce_pp"]
    in_groups: ClassVar[bool] = False
    kl_ctl: NonNegativeFloat = 0.001
    """Coefficient of the KL to policy version 0 in the reward of each token (k1); 0: none, and no reference policy."""


class DAPO(Clipped):
    """DAPO (arXiv 2503.14476): a wider clip above, the mean over tokens, no KL; groups that agree are replaced.

    Its punishment for length is `reward.overlong_tokens`.
    """

    type: Literal["dapo"]
    eps_clip_higher: PositiveFloat = 0.28
    """The ratio is at most 1 + eps_clip_higher."""

    def refusals(self, rollout: Rollout, models: Models, played: Played) -> Iterator[str]:
        yield from super().refusals(rollout, models, played)
        if equal := [where for where, _, each in played if not each.reject_equal]:
            yield f"{equal[0]}algorithm.type=dapo replaces groups whose rewards agree: set rollout.reject_equal=true"


class GSPO(Clipped):
    """GSPO (arXiv 2507.18071): one ratio for each sequence. With `gspo_token` tokens keep advantages of their own."""

    type: Literal["gspo", "gspo_token"]
    eps_clip: Clip = 3e-4
    """The ratio of a sequence is at least 1 - eps_clip."""
    eps_clip_higher: PositiveFloat = 4e-4
    """The ratio of a sequence is at most 1 + eps_clip_higher."""


class CISPO(Published):
    """CISPO (arXiv 2506.13585): the ratio is a constant weight with a cap, so that no token loses its gradient."""

    type: Literal["cispo"]
    cap: PositiveFloat = 5.0
    """Largest weight; there is no smallest one. The paper names no number; this is ScaleRL's (arXiv 2510.13786)."""


class MaxRL(Clipped):
    """MaxRL (arXiv 2602.02710): advantages divided by the group's success rate, the gradient of the log-likelihood."""

    type: Literal["max_rl"]


class MIS(Published):
    """Masked importance sampling (IcePop, Ling team 2025): a token whose ratio is outside of two limits has no loss."""

    type: Literal["mis"]
    floor: PositiveFloat = 0.5
    """Smallest ratio to the policy that sampled."""
    cap: PositiveFloat = 5.0
    """Largest ratio."""
    level: Literal["token", "sequence"] = "token"
    """`sequence`: the geometric mean of a sequence's ratios decides for all its tokens."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.floor >= self.cap:
            raise ValueError(f"floor={self.floor:g} is not below cap={self.cap:g}: no token would be trained on")
        return self


class Echo(Clipped):
    """ECHO: a clipped policy loss, and cross-entropy on what tools said, so that the policy learns its environment."""

    type: Literal["echo"]
    weight: PositiveFloat = 0.1
    """Weight of the cross-entropy."""
    observations: Literal["tools", "all"] = "tools"
    """Observations with cross-entropy: the outputs of tools, or all feedback."""

    def refusals(self, rollout: Rollout, models: Models, played: Played) -> Iterator[str]:
        yield from super().refusals(rollout, models, played)
        agents = [agent.type for _, agent, _ in played]
        if self.observations == "tools" and {*agents} <= {"math-multi-turn", "math-single-step"}:
            none = f"algorithm.observations=tools finds none, because agent.type={agents[0]} calls no tools"
            yield f"{none}: set algorithm.observations=all"


class RFT(_WithoutCritic, Algorithm):
    """Rejection sampling fine-tuning (arXiv 2308.01825): cross-entropy on turns that were right; expert iteration."""

    type: Literal["rft"]
    offline: ClassVar[bool] = True
    in_groups: ClassVar[bool] = False
    distinct: bool = True
    """Train on equal completions of a problem once only."""


class Preferred(_WithoutCritic, Algorithm):
    """An algorithm that likes episodes better or worse, with policy version 0 as reference."""

    offline: ClassVar[bool] = True
    beta: PositiveFloat = 0.1
    """Strength with which the reference holds the policy."""

    @property
    def keeps_reference(self) -> bool:
        return True


class DPO(Preferred):
    """DPO (arXiv 2305.18290): pairs of a better and a worse episode of a group, and policy version 0 as reference."""

    type: Literal["dpo"]


class KTO(Preferred):
    """KTO (arXiv 2402.01306): good and bad episodes without pairs, and policy version 0 as reference."""

    type: Literal["kto"]
    in_groups: ClassVar[bool] = False
    good_above: float | None = None
    """An episode is good if it earned more than this; empty: if one of its answers was right by the scorer."""
    good_weight: PositiveFloat = 1.0
    """Weight of good episodes. The paper wants good_weight * good episodes to be 1 to 4/3 of bad_weight * bad ones."""
    bad_weight: PositiveFloat = 1.0
    """Weight of bad episodes."""


class OPD(Published):
    """On-policy distillation (arXiv 2306.13649): the reverse KL to `models.teacher`, token by token."""

    type: Literal["opd"]
    in_groups: ClassVar[bool] = False
    taught: ClassVar[bool] = True
    c_clip: DualClip = 10.0
    """Largest ratio: a token above it has no gradient; empty: no limit."""


class OwnAlgorithm(Clipped):
    """An algorithm of your own (CONTRIBUTING.md says how to write one). The clips are those of the base's loss."""

    type: str
    """`package.module:Class`."""
    offline: ClassVar[bool] = True
    own: ClassVar[bool] = True
    args: dict[str, Any] = {}
    """Keyword arguments of the class."""
    reference: bool = False
    """Keep policy version 0 as a reference policy."""

    @property
    def keeps_reference(self) -> bool:
        return self.reference

    @field_validator("type")
    @classmethod
    def _known(cls, name: str) -> str:
        if not re.fullmatch(OWN, name):
            hint = f"{nearest(name, NAMES)}; choose one of {', '.join(NAMES)}, or give package.module:Class"
            raise ValueError(f"{name!r} is no algorithm{hint}")
        return name


_CLASSES: dict[str, tuple[type[Algorithm], ...]] = {
    "ppo": (PPO,),
    "group": (GRPO, DrGRPO, RLOO, ReinforcePP, DAPO, MaxRL),
    "ratios": (GSPO, CISPO, MIS, OPD),
    "likelihood": (RFT, DPO, KTO),
    "echo": (Echo,),
}
"""The sections by the file in `tasks/train/algorithms` that has a class of the same name, with the formula."""
_FILES = {of_type: file for file, of_file in _CLASSES.items() for of_type in of_file}
_SECTIONS = {name: of_type for of_type in _FILES for name in tags(of_type)}
FORMULAS = {name: f"{_FILES[of_type]}:{of_type.__name__}" for name, of_type in _SECTIONS.items()}
"""The places of the formulas by the values of `algorithm.type`, without those of your own."""
NAMES = tuple(FORMULAS)


def _tag(values: Any) -> str:
    named = values.get("type", "ppo") if isinstance(values, dict) else getattr(values, "type", None)
    return tags(_SECTIONS[named])[0] if isinstance(named, str) and named in _SECTIONS else "own"


if typing.TYPE_CHECKING:
    AnyAlgorithm = Algorithm
else:
    _FORMS = [Annotated[of_type, Tag(tags(of_type)[0])] for of_type in _FILES]
    AnyAlgorithm = Annotated[typing.Union[(*_FORMS, Annotated[OwnAlgorithm, Tag("own")])], Discriminator(_tag)]


def read_algorithm(values: dict[str, Any]) -> Algorithm:
    """Convert the section `algorithm` of a stored configuration that is up to date."""
    read: Algorithm = TypeAdapter(AnyAlgorithm).validate_python(values)
    return read
