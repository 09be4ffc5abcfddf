"""The optimizer: AdamW, the place of its moments, and the schedule of its learning rates.

A schedule is a warm-up over optimizer steps, and a decay over the updates of the run. Example with 4 updates of 2
steps, `warmup_steps=2` and `schedule=linear`, the factor of the learning rate in each step:

    update      0           1             2           3
    factor      0.5, 1      0.75, 0.75    0.5, 0.5    0.25, 0.25
"""

import math
from collections.abc import Iterable
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw as adamw_step

from configs.train import Optimizer

MOMENTS = ("exp_avg", "exp_avg_sq")


def make_adamw(
    parameters: Iterable[tuple[float, Iterable[nn.Parameter]]],
    knobs: Optimizer,
    moments: Literal["device", "host"] = "device",
) -> torch.optim.AdamW:
    """Make AdamW for groups of parameters, each given with its learning rate after warm-up.

    Weight decay applies to matrices, not to norms and biases: their size does not cause overfitting, and a pull
    towards 0 would only change the model.
    """
    groups = []
    for lr, of_group in parameters:
        listed = list(of_group)
        matrices, others = [p for p in listed if p.ndim > 1], [p for p in listed if p.ndim < 2]
        for chosen, decay in ((matrices, knobs.weight_decay), (others, 0.0)):
            if chosen:
                groups.append({"params": chosen, "full_lr": lr, "weight_decay": decay})
    kind = HostAdamW if moments == "host" else torch.optim.AdamW
    adamw = kind(groups, lr=knobs.lr, betas=knobs.betas, eps=knobs.eps, fused=True)
    adamw.register_step_post_hook(_count_changes)
    return adamw


def _count_changes(adamw: torch.optim.Optimizer, *_: object) -> None:
    """Tell autograd that the weights have changed, as copies of them must know: a fused step does not."""
    for group in adamw.param_groups:
        torch.autograd.graph.increment_version(group["params"])


class HostAdamW(torch.optim.AdamW):
    """AdamW whose moments are in the host's memory between steps: half of what training needs, beside the activations.

    Each step sends the moments of one parameter after the other to its device and back. The bits are those of moments
    on the device. State and file names are those of AdamW. The configuration refuses it with sharded parameters.
    """

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # nobody gives one
        changed = [(group, p) for group in self.param_groups for p in group["params"] if p.grad is not None]
        for group, parameter in changed:
            state = self.state[parameter]
            if not state:
                empty = {key: self.home(torch.zeros_like(parameter, device="cpu")) for key in MOMENTS}
                state.update(step=torch.zeros((), device=parameter.device), **empty)
            sent = [state[key].to(parameter.device, non_blocking=True) for key in MOMENTS]
            options: dict[str, Any] = {key: group[key] for key in ("lr", "weight_decay", "eps", "amsgrad", "maximize")}
            options |= zip(("beta1", "beta2"), group["betas"], strict=True)
            first, second = ([moment] for moment in sent)
            adamw_step([parameter], [parameter.grad], first, second, [], [state["step"]], fused=True, **options)
            for key, moment in zip(MOMENTS, sent, strict=True):
                state[key].copy_(moment, non_blocking=True)
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # from now on the host's copies are those of this step

    def home(self, moment: Tensor) -> Tensor:
        """Return a moment in the host's memory, where a GPU reaches it fast."""
        return moment.cpu().pin_memory() if torch.cuda.is_available() else moment.cpu()


def bring_home(optimizer: torch.optim.AdamW, parameter: nn.Parameter) -> None:
    """Move the moments of a parameter, read from a checkpoint, to where the optimizer keeps them."""
    if isinstance(optimizer, HostAdamW):
        state = optimizer.state[parameter]
        state.update({key: optimizer.home(state[key]) for key in MOMENTS})


def factor(knobs: Optimizer, update: int, updates: int, step: int) -> float:
    """Return the fraction of the full learning rate in an optimizer step.

    `constant`: 1. `linear`: `1 - u`. `cosine`: `(1 + cos(pi u)) / 2` (arXiv 1608.03983, equation 5, without restarts),
    with u = update / updates. The decay ends at `decay_to` instead of 0. The warm-up multiplies it: it rises linearly.

    Args:
        knobs: the schedule.
        update: number of the update, from 0.
        updates: number of updates of the run; later ones stay at the end of the decay.
        step: number of the optimizer step in the run, from 1.
    """
    passed = min(1.0, update / max(1, updates))
    shape = {"constant": 1.0, "linear": 1 - passed, "cosine": (1 + math.cos(math.pi * passed)) / 2}[knobs.schedule]
    return min(1.0, step / max(1, knobs.warmup_steps)) * (knobs.decay_to + (1 - knobs.decay_to) * shape)
