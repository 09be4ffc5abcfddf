"""PPO with group baselines or a critic, and AReaL's decoupled objective.

    loss = -w min(ratio A, clip(ratio, 1 - eps_clip, 1 + eps_clip_higher) A),   ratio = policy / proximal

The proximal policy has the weights before the update; w = proximal / behaviour corrects for tokens that another policy
sampled, with limits. `components` has the formulas `policy_loss` and `behaviour_weights`, `advantages` the estimators.
Sources: arXiv 1707.06347 (equation 7), 2505.24298 (decoupled), 1912.09729 (dual clip).

Example: A = 1, logp = log 0.6, proximal log 0.4, behaviour log 0.5, eps_clip 0.2: ratio 1.5, clipped to 1.2, w = 0.8,
loss -0.96.
"""

from collections.abc import Sequence
from functools import cached_property

import torch

from configs import algorithms
from tasks.train.advantages import Observed, estimate
from tasks.train.algorithms.algorithm import Algorithm, Assignment
from tasks.train.components import LossInputs, LossOutputs, behaviour_weights, policy_loss
from tasks.train.samples import Sample


class PPO(Algorithm):
    knobs: algorithms.PPO

    @cached_property
    def recomputes(self) -> bool:  # type: ignore[override]  # from the knobs, unless a subclass sets it
        return self.knobs.objective != "behaviour"

    @cached_property
    def entropy_gradient(self) -> bool:  # type: ignore[override]
        return self.knobs.entropy_coefficient > 0

    @cached_property
    def early_stop(self) -> float | None:  # type: ignore[override]
        return self.knobs.early_stop_imp_ratio

    def assign(self, samples: Sequence[Sample], observed: Sequence[Observed]) -> Assignment:
        estimated = estimate(samples, observed, self.knobs.advantage)
        return self.share(estimated.advantages, returns=estimated.returns)

    def loss(self, inputs: LossInputs) -> LossOutputs:
        knobs, weight = self.knobs, torch.ones_like(inputs.proximal)
        if knobs.objective == "decoupled":
            given = inputs.proximal, inputs.behaviour, inputs.sequences
            weight = behaviour_weights(*given, **knobs.behaviour_weight.model_dump())
        clips = knobs.eps_clip, knobs.eps_clip_higher, knobs.c_clip
        loss, metrics = policy_loss(inputs.logp, inputs.proximal, weight, inputs.advantages, *clips)
        if knobs.objective == "decoupled":
            metrics = {**metrics, "weight": weight}
        if knobs.entropy_coefficient:
            loss = loss - knobs.entropy_coefficient * inputs.entropy
        return LossOutputs(loss, metrics)
