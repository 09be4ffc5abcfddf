"""Files of the train state without the policy's weights. With them training continues bit for bit.

    optimizer.safetensors   the policy's AdamW moments as KEY/PARAMETER, and the generator's state as `rng`
    critic.safetensors      with a critic: its weights as `weight/PARAMETER` and their moments as KEY/PARAMETER
    reference.safetensors   with a moving reference policy: its weights
    state.json              steps, the KL coefficient and the value normaliser's sums

Nothing is pickled.
"""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from configs.schema import Optimizer

OPTIMIZER, CRITIC, REFERENCE = "optimizer.safetensors", "critic.safetensors", "reference.safetensors"
COUNTS = "state.json"

Named = Mapping[str, nn.Parameter]

_SAMPLED = 1_000_000  # parameters in `median_sqrt_v`


def make_adamw(parameters: Iterable[tuple[float, Iterable[nn.Parameter]]], knobs: Optimizer) -> torch.optim.AdamW:
    """Make AdamW for groups of parameters, each given with its learning rate after warm-up.

    Weight decay applies to matrices, not to norms and biases: their size does not cause overfitting, and a pull
    towards 0 would only change the model.
    """
    groups = [
        {"params": chosen, "full_lr": lr, "weight_decay": decay}
        for lr, with_lr in parameters
        for chosen, decay in _by_decay(with_lr, knobs.weight_decay)
        if chosen
    ]
    return torch.optim.AdamW(groups, lr=knobs.lr, betas=knobs.betas, eps=knobs.eps, fused=True)


def _by_decay(parameters: Iterable[nn.Parameter], decay: float) -> list[tuple[list[nn.Parameter], float]]:
    listed = list(parameters)
    return [([p for p in listed if p.ndim > 1], decay), ([p for p in listed if p.ndim < 2], 0.0)]


def median_sqrt_v(adamw: torch.optim.AdamW) -> float:
    """Compute the median of sqrt(v) over about a million of the parameters; v is AdamW's debiased second moment.

    AdamW divides by sqrt(v) + eps. If sqrt(v) is not well above eps, eps decides how large the steps are.
    """
    total = sum(state["exp_avg_sq"].numel() for state in adamw.state.values())
    stride = max(1, total // _SAMPLED)
    beta = adamw.param_groups[0]["betas"][1]
    parts = [
        state["exp_avg_sq"].flatten()[::stride] / (1 - beta ** state["step"].item()) for state in adamw.state.values()
    ]
    return float(torch.cat(parts).sqrt().median()) if parts else 0.0


def moments(named: Named, adamw: torch.optim.AdamW) -> dict[str, Tensor]:
    """Return AdamW's state of the `named` parameters, with names KEY/PARAMETER."""
    return {
        f"{key}/{name}": value.cpu()
        for name, parameter in named.items()
        if parameter in adamw.state
        for key, value in adamw.state[parameter].items()
    }


def restore_moments(named: Named, adamw: torch.optim.AdamW, tensors: Mapping[str, Tensor], path: Path) -> None:
    """Put back what `moments` returned.

    Raises:
        ValueError: these are the moments of another model.
    """
    states = _by_parameter(tensors)
    mismatched = {name for name, state in states.items() if _shape(named.get(name)) != state["exp_avg"].shape}
    if mismatched or (states and named.keys() - states.keys()):
        raise ValueError(
            f"the optimizer state in {path} belongs to another model: give the folder that was saved with this model"
        )
    for name, state in states.items():
        parameter = named[name]
        adamw.state[parameter] = {key: value.to(parameter.device) for key, value in state.items()}


def save_tensors(path: Path, tensors: dict[str, Tensor]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(tensors, path)


def load_tensors(path: Path) -> dict[str, Tensor]:
    """Read the tensors of a file, copied out of the mapped memory.

    Raises:
        ValueError: the file does not exist, since the state was saved with other settings.
    """
    if not path.is_file():
        raise ValueError(
            f"no {path.name} in {path.parent}: this state was saved with other settings of ppo. Load it with those "
            "settings, or begin another run from its model with policy.path"
        )
    return {name: value.clone() for name, value in load_file(path).items()}


def write_counts(folder: Path, counts: dict[str, Any]) -> None:
    (folder / COUNTS).write_text(json.dumps(counts) + "\n")


def read_counts(folder: Path) -> dict[str, Any]:
    counts = json.loads((folder / COUNTS).read_text())
    assert isinstance(counts, dict)
    return counts


def _shape(parameter: nn.Parameter | None) -> torch.Size | None:
    return None if parameter is None else parameter.shape


def _by_parameter(tensors: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    states: dict[str, dict[str, Tensor]] = {}
    for path, value in tensors.items():
        key, name = path.split("/", 1)
        states.setdefault(name, {})[key] = value
    return states
