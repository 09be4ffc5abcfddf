"""Mixtures of experts: the names of their weights in files, and routing replay.

**Names.** In memory a layer's experts are one parameter, so that one product computes them. Files name each expert, and
vLLM and transformers read them so. Transformers keeps the list of these models, and how their parameters are put
together. Example of Qwen3-MoE with E experts, of hidden size H and intermediate size I:

    in memory                         in files
    mlp.experts.gate_up_proj [E 2I H] mlp.experts.0.gate_proj.weight [I H], mlp.experts.0.up_proj.weight [I H], 1 …
    mlp.experts.down_proj    [E H I]  mlp.experts.0.down_proj.weight [H I], 1 …

**Routing.** A router gives each expert a probability for each token, and the token goes to the K most probable experts.
Where two are nearly as probable, rounding decides, and trainer and engine choose other experts: then the logprobs of
that token, and of all that read it, differ by far more than rounding. Routing replay (arXiv 2510.11370) gives each
token to the experts of the engine. Their weights are the trainer's own, so the router learns as without it. Models run
without noise in their routers, and no auxiliary loss keeps the load of the experts equal.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import Concatenate, MergeModulelist, WeightConverter

from tasks.train.sharding import StoredTensors

KNOWN = ("qwen3_moe",)
"""Values of `model_type` whose routers are known: the softmax over all experts, of which the K largest are kept."""
Experts = Int[Tensor, "rows columns layers chosen"]
"""The numbers of the experts of each token in each layer; -1: unknown, the trainer chooses."""
_EXPERT = "*"
"""The place of an expert's number in a pattern of names."""


@dataclass(frozen=True, slots=True)
class _Fused:
    """A kind of parameter [E, …] that is made of each expert's tensors, which follow each other in its rows."""

    parameter: str  # the end of its name
    patterns: Sequence[str]  # the ends of the names of an expert's tensors

    def names(self, parameter: str, expert: int) -> list[str]:
        """Return the names of one expert's tensors in files."""
        begin = parameter.removesuffix(self.parameter)
        return [begin + pattern.replace(_EXPERT, str(expert)) for pattern in self.patterns]


class FileNames:
    """The tensors in files that hold the parameters of a model: the same, but for fused experts.

    Args:
        model: the model, which may be empty or sharded.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._fused = [
            _Fused(rule.target_patterns[0], rule.source_patterns)
            for rule in get_model_conversion_mapping(model, add_legacy=False)
            if isinstance(rule, WeightConverter) and _stacks_experts(rule)
        ]

    def split(self, name: str, value: Tensor) -> dict[str, Tensor]:
        """Return the tensors in files that hold a parameter, by name; parts of it are copied."""
        fused = self._find(name)
        if fused is None:
            return {name: value}
        parts = value.chunk(len(fused.patterns), 1)
        return {
            of_file: part[expert].clone()
            for expert in range(len(value))
            for of_file, part in zip(fused.names(name, expert), parts, strict=True)
        }

    def rows(self, stored: StoredTensors, name: str, start: int, end: int) -> Tensor:
        """Read the rows start:end of a parameter; those of fused experts are whole experts."""
        fused = self._find(name)
        if fused is None:
            return stored.rows(name, start, end)
        experts = range(start, end) or range(1)  # at least one, for the shape
        read = [torch.cat([stored.read(each) for each in fused.names(name, expert)]) for expert in experts]
        return torch.stack(read)[: end - start]

    def _find(self, name: str) -> _Fused | None:
        return next((fused for fused in self._fused if name.endswith(fused.parameter)), None)


def _stacks_experts(rule: WeightConverter) -> bool:
    """Return whether a rule of transformers puts experts together as above: their rows, then the experts."""
    kinds = [type(step) for step in rule.operations]
    dimensions = [step.dim for step in rule.operations if isinstance(step, MergeModulelist | Concatenate)]
    whole = dimensions == [0, 1][: len(kinds)] and kinds == [MergeModulelist, Concatenate][: len(kinds)]
    return whole and all(_EXPERT in pattern for pattern in rule.source_patterns)


def replay_routing(model: PreTrainedModel) -> None:
    """Let the routers of a model use the experts that `give_experts` says, in every pass from now on.

    Raises:
        ValueError: the routers of such a model are not known.
    """
    if model.config.model_type not in KNOWN:
        what = f"train.routing_replay=true needs a mixture of experts of type {', '.join(KNOWN)}"
        raise ValueError(f"{what}, but the policy's model_type is {model.config.model_type!r}: leave the knob out")
    for _, router in _routers(model):
        router.given = None
        router.register_forward_hook(_route_as_given)


def give_experts(model: PreTrainedModel, experts: Experts | None) -> None:
    """Set the experts of the tokens of the next pass, and of its backward pass; None: the routers choose.

    Models without `replay_routing` ignore them.
    """
    for number, router in _routers(model):
        if hasattr(router, "given"):
            router.given = None if experts is None else experts[:, :, number].flatten(0, 1).long()


def chosen_weights(
    logits: Float[Tensor, "tokens experts"], chosen: Int[Tensor, "tokens chosen"], *, normalised: bool
) -> Float[Tensor, "tokens chosen"]:
    """Compute the weights of chosen experts from a router's logits: their probabilities among all experts.

    `normalised`: divide them by their sum, which makes them a softmax over the chosen experts alone.
    """
    weights = logits.softmax(-1, dtype=torch.float32).gather(-1, chosen)
    return weights / weights.sum(-1, keepdim=True) if normalised else weights


def refuse_noise(model: PreTrainedModel) -> None:
    """Refuse a router that adds noise in training mode: the trained policy would not be the one that was sampled.

    Raises:
        ValueError: the model has one.
    """
    if noise := getattr(model.config, "router_jitter_noise", 0):
        raise ValueError(
            f"the policy's config.json has router_jitter_noise={noise}, noise that the engine does not add and that "
            "train.gradient_checkpointing=true would turn on: set it to 0 there, or leave gradient checkpointing out"
        )


def _routers(model: PreTrainedModel) -> Iterator[tuple[int, Any]]:
    """Iterate over the routers, with the numbers of their layers; some layers have none, nor have dense models."""
    for number, layer in enumerate(getattr(model.base_model, "layers", ())):
        if (router := getattr(getattr(layer, "mlp", None), "gate", None)) is not None:
            yield number, router


def _route_as_given(router: Any, _: object, own: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Replace a router's choice, the last of its results, and the weights before it."""
    logits, _, choice = own
    if router.given is None:
        return own
    chosen = torch.where(router.given >= 0, router.given, choice)
    weights = chosen_weights(logits, chosen, normalised=router.norm_topk_prob)
    return logits, weights.to(logits.dtype), chosen
