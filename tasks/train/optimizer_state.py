"""Files of the train state without the policy's weights. With them training continues bit for bit.

    optimizer.safetensors   the policy's AdamW moments as KEY/PARAMETER, and the generator's state as `rng`
    critic.safetensors      with a critic: its weights as `weight/PARAMETER` and their moments as KEY/PARAMETER
    reference.safetensors   with a moving reference policy: its weights
    state.json              steps, the KL coefficient and the value normaliser's sums

Several ranks write each of the first three as several files with an index (`tensor_files`). Nothing is pickled.
"""

import functools
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from configs.train import Optimizer
from tasks.train.mesh import ALONE, Mesh
from tasks.train.sharding import like, local
from tasks.train.tensor_files import StoredTensors

OPTIMIZER, CRITIC, REFERENCE = "optimizer", "critic", "reference"
COUNTS = "state.json"

Named = Mapping[str, nn.Parameter]

_KEYS = ("step/", "exp_avg/", "exp_avg_sq/")
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


def median_sqrt_v(adamw: torch.optim.AdamW, mesh: Mesh = ALONE) -> float:
    """Compute the median of sqrt(v) over about a million of the parameters; v is AdamW's debiased second moment.

    AdamW divides by sqrt(v) + eps. If sqrt(v) is not well above eps, eps decides how large the steps are.
    """
    total = sum(state["exp_avg_sq"].numel() for state in adamw.state.values())
    stride = max(1, total // _SAMPLED)
    beta = adamw.param_groups[0]["betas"][1]
    parts = [
        local(state["exp_avg_sq"]).flatten()[::stride] / (1 - beta ** state["step"].item())
        for state in adamw.state.values()
    ]
    return float(mesh.gather(torch.cat(parts)[None])[0].sqrt().median()) if parts else 0.0


def moments(named: Named, adamw: torch.optim.AdamW) -> dict[str, Tensor]:
    """Return AdamW's state of the `named` parameters, with names KEY/PARAMETER."""
    return {
        f"{key}/{name}": value
        for name, parameter in named.items()
        if parameter in adamw.state
        for key, value in adamw.state[parameter].items()
    }


def restore_moments(named: Named, adamw: torch.optim.AdamW, stored: StoredTensors) -> None:
    """Put back what `moments` returned; other tensors of the files are ignored.

    Raises:
        ValueError: these are the moments of another model.
    """
    states = _by_parameter(path for path in stored.names if path.startswith(_KEYS))
    mismatched = {
        name
        for name, paths in states.items()
        if name not in named or stored.shape(paths["exp_avg"]) != [*named[name].shape]
    }
    if mismatched or (states and named.keys() - states.keys()):
        raise ValueError(
            f"the optimizer state in {stored.path} belongs to another model: give the folder that was saved with this "
            "model"
        )
    for name, parameter in named.items():
        if name in states:
            adamw.state[parameter] = {key: _read(stored, path, parameter) for key, path in states[name].items()}


def _read(stored: StoredTensors, path: str, parameter: nn.Parameter) -> Tensor:
    """Read a part of AdamW's state: the number of steps, or a tensor like the parameter."""
    if not stored.shape(path):
        return stored.read(path).to(parameter.device)
    return like(parameter, functools.partial(stored.rows, path))


def open_tensors(folder: Path, stem: str) -> StoredTensors:
    """Open the files of a train state.

    Raises:
        ValueError: they do not exist, since the state was saved with other settings.
    """
    try:
        return StoredTensors(folder, stem)
    except FileNotFoundError:
        raise ValueError(
            f"no {stem}.safetensors in {folder}: this state was saved with other settings of ppo. Load it with those "
            "settings, or begin another run from its model with policy.path"
        ) from None


def write_counts(folder: Path, counts: dict[str, Any]) -> None:
    (folder / COUNTS).write_text(json.dumps(counts) + "\n")


def read_counts(folder: Path) -> dict[str, Any]:
    counts = json.loads((folder / COUNTS).read_text())
    assert isinstance(counts, dict)
    return counts


def _by_parameter(paths: Iterable[str]) -> dict[str, dict[str, str]]:
    """Sort the names KEY/PARAMETER: the name of each parameter's keys."""
    states: dict[str, dict[str, str]] = {}
    for path in sorted(paths):
        key, name = path.split("/", 1)
        states.setdefault(name, {})[key] = path
    return states
