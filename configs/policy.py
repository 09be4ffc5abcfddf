"""The knobs of the policy: weights to begin with, or a tiny model that a warm start makes."""

from typing import Annotated, Self

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from configs.knobs import URI, Knobs, Share
from configs.problems import ArithmeticSource


class WarmStart(Knobs):
    """A tiny Qwen3 and its tokenizer, trained from scratch on generated arithmetic problems."""

    teaches: ArithmeticSource | None = None
    """Problems that the warm start teaches; empty: `problems.train`, which must then be arithmetic."""
    hidden_size: Annotated[int, Field(gt=0, le=2**16)] = 128
    """Width of the model: an even multiple of `heads`."""
    layers: Annotated[int, Field(gt=0, le=1000)] = 3
    """Number of layers."""
    heads: PositiveInt = 4
    """Number of attention heads."""
    kv_heads: PositiveInt = 2
    """Number of key-value heads; `heads` must be a multiple of it."""
    steps: PositiveInt = 1000
    """Largest number of supervised steps."""
    target_accuracy: Share = 0.45
    """Stop when the mean probability of a complete right answer on the taught problems reaches this."""
    batch_size: PositiveInt = 64
    """Number of examples in a step."""
    lr: PositiveFloat = 1e-3
    """Learning rate after a short warm-up."""
    two_turn_share: Share = 0.25
    """Share of the examples in which a second turn corrects a wrong first answer, which is masked out of the loss."""
    tool_share: Share = 0.0
    """Share of the examples in which the answer comes from a call of the calculator, whatever the problem: the policy
    learns how a call looks, but not when it pays."""

    @model_validator(mode="after")
    def _shares_fit(self) -> Self:
        if self.two_turn_share + self.tool_share > 1:
            raise ValueError(
                f"two_turn_share={self.two_turn_share:g} and tool_share={self.tool_share:g} are more than 1 together: "
                "lower one of them"
            )
        return self

    @model_validator(mode="after")
    def _heads_fit(self) -> Self:
        size = self.hidden_size
        if size % (2 * self.heads):
            fitting = ", ".join(str(heads) for heads in range(1, min(size, 100)) if size % (2 * heads) == 0)
            remedy = f"set heads to {fitting}" if fitting else "set hidden_size to an even number"
            raise ValueError(f"hidden_size={size} is not heads={self.heads} times an even number: {remedy}")
        if self.heads % self.kv_heads:
            raise ValueError(f"heads={self.heads} is not a multiple of kv_heads={self.kv_heads}: use a divisor of it")
        return self


class Policy(Knobs):
    path: URI | None = None
    """A transformers folder, the URI of a committed checkpoint, or a hub name. Weights must be safetensors and not
    quantised. A policy that cannot be trained or played is refused; until policy version 0 is committed, the run can
    continue with another path."""
    warm_start: WarmStart | None = None
    """Make and train a tiny policy instead of loading one."""

    @model_validator(mode="after")
    def _one_of(self) -> Self:
        if (self.path is None) == (self.warm_start is None):
            raise ValueError("give exactly one of policy.path and policy.warm_start")
        return self
