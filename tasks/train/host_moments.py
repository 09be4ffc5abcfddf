"""AdamW whose moments are in the host's memory between steps: half of what training needs, beside the activations."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

MOMENTS = ("exp_avg", "exp_avg_sq")


class HostAdamW(torch.optim.AdamW):
    """AdamW that sends the moments of one parameter after the other to its device and back, in each step.

    The same bits as with moments on the device. State and file names are those of AdamW. Sharded parameters are refused
    by the configuration.
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
            adamw([parameter], [parameter.grad], first, second, [], [state["step"]], fused=True, **options)
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
