"""On-policy distillation: the policy plays, and a teacher says of each token how much likelier it finds it.

    A = log teacher - log behaviour
    loss = mean over tokens of -min(ratio, c_clip) A

The mean of -A over the policy's own tokens is the reverse KL(policy ‖ teacher), whose gradient this is; rewards do not
count. Source: arXiv 2306.13649 (GKD); in this form: Thinking Machines, "On-policy distillation" (2025).

Example: a token with probability 0.5 when sampled, to which the teacher gives 0.9, has A = log 1.8 = 0.59.
"""

import math
from collections.abc import Sequence

from configs import algorithms
from tasks.train.advantages import Observed
from tasks.train.algorithms.algorithm import Algorithm, Assignment
from tasks.train.components import LossInputs, LossOutputs
from tasks.train.samples import Floats, Sample


class OPD(Algorithm):
    knobs: algorithms.OPD

    def assign(self, samples: Sequence[Sample], observed: Sequence[Observed]) -> Assignment:
        advantages = list[Floats]()
        for sample, given in zip(samples, observed, strict=True):
            if given.teacher is None:
                raise ValueError("algorithm.type=opd needs a teacher: set models.teacher.checkpoint=RUN@N or .path")
            advantages.append(given.teacher.astype("float64") - sample.behaviour)
        return self.share(advantages)

    def loss(self, inputs: LossInputs) -> LossOutputs:
        log_ratio, most = inputs.logp - inputs.behaviour, math.log(self.knobs.c_clip or math.inf)
        ratio = log_ratio.clamp(max=most).exp()  # nothing overflows before it is clipped
        metrics = {"ratio": log_ratio.detach().exp(), "clipped": log_ratio > most, "teacher_kl": -inputs.advantages}
        return LossOutputs(-ratio * inputs.advantages, metrics)
