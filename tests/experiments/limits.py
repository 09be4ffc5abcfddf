"""Compute how limits on the weight w and on the ratio change the gradient, for tokens that another policy sampled.

python -m tests.experiments.limits               a second

A table of logits is the policy that trains; the policy that sampled has other logits. Mean and variance of the gradient
are summed over all tokens, with the losses of the trainer, so nothing is left to luck but the logits. Prints the bias
and the root mean square error of the gradient of 4,096 tokens, relative to the true gradient: the medians of 20 draws
of the logits, and the largest error.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from configs.algorithms import PPO
from tasks.train.components import behaviour_weights, policy_loss
from tasks.train.samples import Floats
from tests.experiments.runs import markdown

TOKENS, CONTEXTS, VOCABULARY, DRAWS = 4096, 8, 200, 20


@dataclass(frozen=True, slots=True)
class Case:
    """How the policy that sampled differs: noise of Student's t distribution on each logit."""

    name: str
    noise: float
    freedom: float
    faulty: float = 0.0  # share of tokens whose recorded logprob is wrong by 4 nats


CASES = (
    Case("bfloat16 serving", 0.03, 3),
    Case("bfloat16, 1 logprob in 500 wrong by 4 nats", 0.03, 3, faulty=0.002),
    Case("stale, 0.6 nats a token", 0.7, 4),
)
OPTIONS: dict[str, dict[str, Any]] = {
    "no limit": {"behaviour_weight": {"cap": None}},
    "cap 5": {"behaviour_weight": {"cap": 5}},
    "cap 3": {"behaviour_weight": {"cap": 3}},
    "cap 2": {"behaviour_weight": {"cap": 2}},
    "mask above 5": {"behaviour_weight": {"cap": 5, "mode": "mask"}},
    "mask outside 0.2 to 5": {"behaviour_weight": {"cap": 5, "mode": "mask", "floor": 0.2}},
    "mask outside 0.5 to 2": {"behaviour_weight": {"cap": 2, "mode": "mask", "floor": 0.5}},
    "plain PPO, no dual clip": {"objective": "behaviour", "c_clip": None},
    "plain PPO, dual clip 3": {"objective": "behaviour", "c_clip": 3},
    "plain PPO, dual clip 10": {"objective": "behaviour", "c_clip": 10},
}


def errors(case: Case, knobs: PPO, seed: int) -> tuple[float, float]:
    """Return the bias and the root mean square error of the gradient, relative to the true gradient."""
    draw = np.random.default_rng(seed)
    shape = CONTEXTS, VOCABULARY
    logits = draw.normal(0, 3, shape)
    logp = torch.tensor(logits).log_softmax(-1)
    sampled = torch.tensor(logits + case.noise * draw.standard_t(case.freedom, shape)).log_softmax(-1)
    policy, advantages = logp.exp(), torch.tensor(draw.normal(size=shape))
    advantages = advantages - (policy * advantages).sum(-1, keepdim=True)
    true = policy * advantages / CONTEXTS  # = E[A (e_a - policy)], because E[A] = 0
    mean, square = torch.zeros_like(true), 0.0
    for fault, share in ((0.0, 1 - case.faulty), (4.0, case.faulty / 2), (-4.0, case.faulty / 2)):
        slope = _slope(logp, sampled + fault, advantages, knobs)
        often = share * sampled.exp() / CONTEXTS
        mean += often * slope - (often * slope).sum(-1, keepdim=True) * policy
        lengths = 1 - 2 * policy + (policy**2).sum(-1, keepdim=True)  # |e_a - policy|²
        square += float((often * slope**2 * lengths).sum())
    size, bias = float(true.norm()), float((mean - true).norm())
    variance = (square - float(mean.norm()) ** 2) / TOKENS
    return bias / size, float(np.sqrt(bias**2 + variance)) / size


def _slope(logp: Tensor, behaviour: Tensor, advantages: Tensor, knobs: PPO) -> Tensor:
    """Return how strongly a sampled token's logprob is pushed up."""
    now, recorded, at = logp.flatten(), behaviour.flatten(), knobs.behaviour_weight
    proximal = now if knobs.objective != "behaviour" else recorded
    each = torch.arange(len(now))  # plain PPO has w = 1, as both its policies are the same
    weight = behaviour_weights(proximal, recorded, each, at.cap, at.mode, at.level, at.floor)
    now = now.clone().requires_grad_()
    loss = policy_loss(now, proximal, weight, advantages.flatten(), knobs.eps_clip, None, knobs.c_clip).loss
    (gradient,) = torch.autograd.grad(loss.sum(), now)
    return -gradient.view_as(logp)


def table() -> str:
    rows = [["bias, error, largest error", *(case.name for case in CASES)], ["---"] * (1 + len(CASES))]
    for name, option in OPTIONS.items():
        knobs = PPO.model_validate(option)
        cells = [_cell(np.array([errors(case, knobs, seed) for seed in range(DRAWS)])) for case in CASES]
        rows.append([name, *cells])
    return markdown(rows)


def _cell(of_draws: Floats) -> str:
    bias, error = np.median(of_draws, axis=0)
    return f"{bias:.3f}, {error:.3f}, {of_draws[:, 1].max():.3f}"


if __name__ == "__main__":
    print(table(), end="")
