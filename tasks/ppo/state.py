"""What beside the weights makes training go on bit for bit: AdamW's moments, the step count and the RNG.

`optimizer.safetensors` holds the moments as `KEY/PARAMETER` and the generator's state as `rng`;
`state.json` holds the step count. Nothing is pickled.
"""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from configs.schema import Optimizer

TENSORS, COUNTS = "optimizer.safetensors", "state.json"


def make_adamw(model: nn.Module, knobs: Optimizer) -> torch.optim.AdamW:
    """AdamW over all parameters."""
    return torch.optim.AdamW(
        model.parameters(), lr=knobs.lr, betas=knobs.betas, eps=knobs.eps, weight_decay=knobs.weight_decay, fused=True
    )


def write_state(
    folder: Path, model: nn.Module, adamw: torch.optim.AdamW, generator: torch.Generator, steps: int
) -> None:
    """Writes the state of training after `steps` optimizer steps into `folder`, which is made."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {
        f"{key}/{name}": value.cpu()
        for name, parameter in model.named_parameters()
        for key, value in adamw.state[parameter].items()
    }
    save_file({**tensors, "rng": generator.get_state()}, folder / TENSORS)
    (folder / COUNTS).write_text(json.dumps({"steps": steps}) + "\n")


def read_state(folder: Path, model: nn.Module, adamw: torch.optim.AdamW, generator: torch.Generator) -> int:
    """Restores what `write_state` wrote and returns the step count.

    Raises:
        ValueError: the state is that of another model.
    """
    tensors = load_file(folder / TENSORS)
    generator.set_state(tensors.pop("rng"))
    steps = int(json.loads((folder / COUNTS).read_text())["steps"])
    parameters = dict(model.named_parameters())
    moments = _by_parameter(tensors)
    if steps and {name: state["exp_avg"].shape for name, state in moments.items()} != {
        name: parameter.shape for name, parameter in parameters.items()
    }:
        raise ValueError(f"the optimizer state in {folder} is not that of this model: give the folder saved with it")
    for name, state in moments.items():
        parameter = parameters[name]
        adamw.state[parameter] = {key: value.to(parameter.device) for key, value in state.items()}
    return steps


def _by_parameter(tensors: dict[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    states: dict[str, dict[str, Tensor]] = {}
    for path, value in tensors.items():
        key, name = path.split("/", 1)
        states.setdefault(name, {})[key] = value.clone()  # off the mapped file
    return states
