"""Test if staleness and the stream hurt, if the decoupled objective helps, and if a critic beats a group baseline.

python -m tests.experiments.staleness                 five arms, three seeds, 60 updates each: 50 minutes on 2 cores
python -m tests.experiments.staleness --iterations 2  a short trial

Writes staleness.md.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

from flows.run.workspace import Workspace
from flows.stages import rollout as stage
from storage import layout
from storage.version_names import PolicyVersion, TrajectoriesVersion
from tests.experiments.runs import Arm, Experiment


@contextmanager
def lagging(versions: int) -> Iterator[None]:
    """Play every iteration of runs in this process with the policy so many versions behind the newest."""
    rollout = stage.rollout

    def play(
        workspace: Workspace, workers: Any, iteration: int, policy: PolicyVersion, *others: Any
    ) -> TrajectoriesVersion:
        older = layout.checkpoint(workspace.name, max(0, policy.number - versions))
        return rollout(workspace, workers, iteration, older, *others)

    with patch.object(stage, "rollout", play):
        yield


STALENESS = 4
_STALE = [f"rollout.max_head_offpolicyness={STALENESS}"]
_LAGGING = partial(lagging, STALENESS)
_CRITIC = ["algorithm.advantage={type: gae, normalisation: none}", "algorithm.critic={model: own, lr: 1.0e-3}"]
ARMS = [
    Arm("synchronous"),
    Arm(f"staleness {STALENESS}, decoupled", _STALE, _LAGGING),
    Arm(f"staleness {STALENESS}, plain PPO", [*_STALE, "algorithm.objective=behaviour"], _LAGGING),
    Arm("synchronous, critic + GAE", _CRITIC),
    Arm(f"stream, staleness {STALENESS}", ["run.overlap=true", *_STALE]),
]
EXPLAINING = {
    "staleness/mean": "staleness",
    "proximal/mean_difference": "mean of abs(proximal - behaviour)",
    "policy/clip_fraction": "clipped",
    "value/explained_variance": "explained variance",
}

if __name__ == "__main__":
    Experiment("staleness", ARMS, 60, EXPLAINING).main((__doc__ or "").splitlines()[0])
