"""The knobs of the policy: weights to begin with, or a tiny model that a warm start makes."""

from typing import Annotated, Self

from pydantic import Field, PositiveInt, model_validator

from configs.knobs import URI, Knobs, Share
from configs.models import CHECKPOINT
from configs.problems import ArithmeticSource

HEAD_SIZE = 32
"""Width of an attention head of the tiny policy."""


class WarmStart(Knobs):
    """A tiny Qwen3 and its tokenizer, trained from scratch on generated arithmetic problems."""

    teaches: ArithmeticSource | None = None
    """Problems that the warm start teaches; empty: `problems.train`, which must then be arithmetic, or the members of a
    mixture that are, each in equal parts and with or without a calculator as its agent has one."""
    hidden_size: Annotated[int, Field(gt=0, le=2**16, multiple_of=HEAD_SIZE)] = 128
    """Width of the model, a multiple of 32: it has an attention head for each 32, and half as many key-value heads."""
    layers: Annotated[int, Field(gt=0, le=1000)] = 3
    """Number of layers."""
    steps: PositiveInt = 1000
    """Largest number of supervised steps."""
    target_accuracy: Share = 0.45
    """Stop when the mean probability of a complete right answer on the taught problems reaches this."""
    two_turn_share: Share = 0.25
    """Share of the examples in which a second turn corrects a wrong first answer, which is masked out of the loss."""
    tool_share: Share = 0.0
    """Share of the examples in which the answer comes from a call of the calculator, in any problem: the policy
    learns how a call looks, but not when it pays."""

    @model_validator(mode="after")
    def _shares_fit(self) -> Self:
        if self.two_turn_share + self.tool_share > 1:
            raise ValueError(
                f"two_turn_share={self.two_turn_share:g} and tool_share={self.tool_share:g} are more than 1 together: "
                "lower one of them"
            )
        return self


class LoRA(Knobs):
    """An adapter (LoRA, arXiv 2106.09685): alpha / rank times a product of two small matrices is added to each target
    layer. Only adapters are trained and committed; the weights of policy version 0 stay as they are. Learning rates are
    usually ten times those of full training.
    """

    rank: Annotated[int, Field(ge=1, le=512)] = 16
    """Rank of the product; vLLM serves 512 at most."""
    alpha: PositiveInt = 32
    """The product is multiplied by alpha / rank."""
    targets: Annotated[list[Annotated[str, Field(pattern=r"^[A-Za-z0-9_]+$")]], Field(min_length=1)] = [
        *("q_proj", "k_proj", "v_proj", "o_proj"),
        *("gate_proj", "up_proj", "down_proj"),
    ]
    """Names of the linear layers that get an adapter, in all decoder layers: the last parts of their names."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if len(set(self.targets)) < len(self.targets):
            raise ValueError("targets names a layer twice")
        return self


BEGINNINGS = ("path", "warm_start", "fork")
"""The knobs that say where a policy comes from. An override that sets one of them unsets the others."""


class Policy(Knobs):
    path: URI | None = None
    """A transformers folder, the URI of a committed checkpoint, or a hub name. Weights must be safetensors and not
    quantised, and no file a pipe, a device or a hole. A policy that cannot be trained or played is refused; until
    policy version 0 is committed, the run can continue with another path."""
    warm_start: WarmStart | None = None
    """Make and train a tiny policy instead of loading one."""
    fork: Annotated[str, Field(pattern=CHECKPOINT)] | None = None
    """`RUN@N`: begin with checkpoint N of another run of this store, optimizer, critic and RNG included; all other
    settings may differ from that run's. The new run counts from 0: its policy version 0, and reference policy, is that
    checkpoint. `--fork` sets it. If one of the two runs has adapters, the optimizer's moments and warm-up begin anew:
    the new run's policy version 0 has the other one's adapter merged into its weights."""
    lora: LoRA | None = None
    """Train an adapter instead of all weights; `policy.lora={}` makes one with the defaults. The reference policy of a
    KL penalty is then the policy without its adapter."""

    @model_validator(mode="after")
    def _one_of(self) -> Self:
        if [getattr(self, name) for name in BEGINNINGS].count(None) != 2:
            raise ValueError("give exactly one of policy.path, policy.warm_start and policy.fork")
        return self
