"""The number of groups that a worker asks for when it has none left to begin."""

import math
from dataclasses import dataclass


@dataclass(slots=True)
class Appetite:
    """As many groups as make the worker ask for more about as seldom as the flow wishes, but at most `most`.

    Example: with a patience of 3 s and short episodes, one group lasts 0.4 s. The worker asks for 1, 2, 4, 8 groups;
    8 last 3.2 s. With a patience of 0.01 s, which a flow with few workers has, it always asks for 1.
    """

    most: int
    patience_s: float = 0.0
    """The patience of the flow (`tasks.rollout.remote.worker.Worker.report`)."""
    groups: int = 1
    since: float = -math.inf
    """When the worker had none left last."""

    def note_empty(self, now: float) -> None:
        """Note that the worker has none left."""
        lasted_s, self.since = now - self.since, now
        if lasted_s < self.patience_s:
            self.groups = min(2 * self.groups, self.most)
        elif lasted_s > 4 * self.patience_s:
            self.groups = max(1, self.groups // 2)
