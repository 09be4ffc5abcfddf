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

from collections.abc import Iterator
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from tasks.train.sharding import StoredTensors

KNOWN = ("qwen3_moe",)
"""Values of `model_type` whose files are as above, and whose router is the softmax over all experts, of which the K
largest are kept."""
Experts = Int[Tensor, "rows columns layers chosen"]
"""The numbers of the experts of each token in each layer; -1: unknown, the trainer chooses."""


def in_files(model: PreTrainedModel, name: str, value: Tensor) -> dict[str, Tensor]:
    """Return the tensors in files that hold a parameter, by name: itself, or copies of parts of it for each expert."""
    if model.config.model_type not in KNOWN:
        return {name: value}
    return dict(revert_weight_conversion(model, {name: value}))


def read_rows(
    model: PreTrainedModel, stored: StoredTensors, name: str, shape: torch.Size, start: int, end: int
) -> Tensor:
    """Read the rows start:end of a parameter of this shape; those of a layer's experts are whole experts."""
    names = [*in_files(model, name, torch.empty(shape, device="meta"))]
    if len(names) == 1:
        return stored.rows(name, start, end)
    experts = range(start, end) or range(1)  # at least one, for the shape
    read = [torch.cat([stored.read(each) for each in names[expert :: shape[0]]]) for expert in experts]
    return torch.stack(read)[: end - start]


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
    """Replace a router's choice, the last of its results, and the weights before it.

    The weights are the probabilities of the chosen experts among all experts or, if normalised, among the chosen alone.
    """
    logits, _, choice = own
    if router.given is None:
        return own
    chosen = torch.where(router.given >= 0, router.given, choice)
    weights = logits.softmax(-1, dtype=torch.float32).gather(-1, chosen)
    if router.norm_topk_prob:
        weights = weights / weights.sum(-1, keepdim=True)
    return logits, weights.to(logits.dtype), chosen
