"""The knobs of the policy: the weights with which a run begins, and the adapter that it trains."""

from typing import Annotated, Any, Self

from pydantic import Field, PositiveInt, model_validator

from configs.knobs import URI, Knobs
from configs.models import CHECKPOINT


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
    """A transformers folder, the URI of a committed checkpoint, a hub name, or one of the tiny policies that this
    package brings: `math-mt-ppo/` and smoke, demo, demo-tools, demo-mix or retrain. Weights must be safetensors and
    not quantised, and no file a pipe, a device or a hole. A policy that cannot be trained or played is refused; until
    policy version 0 is committed, the run can continue with another path."""
    warm_start: dict[str, Any] | None = None
    """Lessons by which an older program made policy version 0, in the configuration of its run. A new run has none."""
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
            raise ValueError("give exactly one of policy.path and policy.fork")
        return self
