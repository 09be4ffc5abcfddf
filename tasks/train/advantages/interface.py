"""What an advantage estimator is given and what it returns."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from configs.schema import Advantage
from tasks.train.samples import Floats, Sample


@dataclass(frozen=True, slots=True)
class Observed:
    """What is known of the A action tokens of one sample beside its rewards.

    Example: Observed(penalties=[0.0, -0.1], values=[0.4, 0.5], bootstrap=0.0)
    """

    penalties: Floats  # A, rewards of single tokens: the KL penalty, 0 without one
    values: Floats | None = None  # A, the critic's value before each token, in units of returns
    bootstrap: float = 0.0  # return behind the last turn: 0 at an end, a value where the conversation was cut


@dataclass(frozen=True, slots=True)
class Estimated:
    """For each of N samples an array of its A action tokens."""

    advantages: list[Floats]  # N of A
    returns: list[Floats] | None = None  # N of A, what the critic should have said
    centred: bool = False  # compared with others of their group: normalisation must not move them again


Estimator = Callable[[Sequence[Sample], Sequence[Observed], Advantage], Estimated]
"""From N samples, what was observed of each, and the knobs."""
