"""ECHO: beside the policy loss, cross-entropy on what the environment said, so that a failure teaches, too.

    A = R - mean(R)
    loss = mean over action tokens of -min(ratio A, clip(ratio, 1 ± eps_clip) A)
         + weight * mean over chosen observations of -logp

Chosen are the outputs of tools, that is what follows a turn that answers nothing, or all feedback; with the tokens that
the chat template puts around it. Only what is followed by another turn was read by the policy, and counts.
Source: prime-rl's algorithm `echo` (2026).

Example: of prompt, call, output (4 tokens), answer, feedback (5 tokens), answer, `tools` chooses 4 tokens, `all` 9.
"""

from collections.abc import Sequence

import numpy as np

from configs import algorithms
from tasks.train.advantages import Observed, against_group
from tasks.train.algorithms.algorithm import Algorithm, Assignment, Observations
from tasks.train.components import Component, cross_entropy
from tasks.train.samples import Sample


class Echo(Algorithm):
    knobs: algorithms.Echo

    def assign(self, samples: Sequence[Sample], observed: Sequence[Observed]) -> Assignment:
        policy = self.share(against_group(samples, observed))
        none = [np.zeros(len(sample.actions)) for sample in samples]
        chosen = [self.observations(sample) for sample in samples]
        return Assignment(policy.advantages, {**policy.weights, "ce": none}, observations=chosen)

    def component(self, name: str) -> Component:
        return Component(cross_entropy, coefficient=self.knobs.weight) if name == "ce" else super().component(name)

    def observations(self, sample: Sample) -> Observations:
        """Return the tokens between two action tokens of one sequence whose former turn is chosen."""
        sequence = np.searchsorted(sample.starts, sample.actions, "right")
        is_gap = (np.diff(sample.actions) > 1) & (np.diff(sequence) == 0)
        if self.knobs.observations == "tools":
            is_gap &= ~sample.graded[sample.turn_of_action[:-1]]
        gaps = [np.arange(sample.actions[i] + 1, sample.actions[i + 1]) for i in np.flatnonzero(is_gap)]
        positions = np.concatenate([np.empty(0, np.int64), *gaps])
        return Observations(positions, np.ones(len(positions)))
