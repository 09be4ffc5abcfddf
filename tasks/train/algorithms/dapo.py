"""DAPO: a clip that is wider above, so that rare tokens can become likely, and the mean over all tokens.

    A = (R - mean(R)) / std(R)
    loss = mean over tokens of -min(ratio A, clip(ratio, 1 - eps_clip, 1 + eps_clip_higher) A)

Source: arXiv 2503.14476, equation 8. Its dynamic sampling is `rollout.reject_equal`, which is required, and its soft
punishment of long answers `reward.overlong_tokens`. Only a scorer that says what the environment said is known while
playing: with a judge no group is replaced, and one whose rewards agree has advantages of 0.

Example: A = 1 and ratio 1.25 give -1.25, where a clip of 0.2 gives -1.2 and no gradient.
"""

from collections.abc import Sequence

from configs import algorithms
from tasks.train.advantages import Observed, against_group
from tasks.train.algorithms.algorithm import Algorithm, Assignment
from tasks.train.samples import Sample


class DAPO(Algorithm):
    knobs: algorithms.DAPO

    def assign(self, samples: Sequence[Sample], observed: Sequence[Observed]) -> Assignment:
        return self.share(against_group(samples, observed, scale_by_std=True))
