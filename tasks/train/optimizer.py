"""The optimizer: AdamW, and the schedule of its learning rates.

A schedule is a warm-up over optimizer steps, and a decay over the updates of the run. Example with 4 updates of 2
steps, `warmup_steps=2` and `schedule=linear`, the factor of the learning rate in each step:

    update      0           1             2           3
    factor      0.5, 1      0.75, 0.75    0.5, 0.5    0.25, 0.25
"""

import math
from collections.abc import Iterable, Mapping

import torch
from torch import nn

from configs.train import Optimizer

MOMENTS = ("exp_avg", "exp_avg_sq")


def make_adamw(parts: Mapping[str, Iterable[nn.Parameter]], knobs: Optimizer) -> torch.optim.AdamW:
    """Make AdamW for the parameters of some parts, `policy` and `critic`: each parameter group names its part.

    Weight decay applies to matrices, not to norms and biases: their size does not cause overfitting, and a pull
    towards 0 would only change the model.
    """
    groups = []
    for part, parameters in parts.items():
        listed = list(parameters)
        matrices, others = [p for p in listed if p.ndim > 1], [p for p in listed if p.ndim < 2]
        for chosen, decay in ((matrices, knobs.weight_decay), (others, 0.0)):
            if chosen:
                groups.append({"params": chosen, "part": part, "weight_decay": decay})
    return torch.optim.AdamW(groups, lr=knobs.lr, betas=knobs.betas, eps=knobs.eps, fused=True)


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
