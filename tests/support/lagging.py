"""Staleness on purpose, for tests and experiments."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from flows.run.workspace import Workspace
from flows.stages import rollout as task
from storage import layout
from storage.version_names import PolicyVersion, TrajectoriesVersion


@contextmanager
def lagging(versions: int) -> Iterator[None]:
    """Play every iteration of runs in this process with the policy so many versions behind the newest."""
    rollout = task.rollout

    def play(
        workspace: Workspace, workers: Any, iteration: int, policy: PolicyVersion, *others: Any
    ) -> TrajectoriesVersion:
        older = layout.checkpoint(workspace.name, max(0, policy.number - versions))
        return rollout(workspace, workers, iteration, older, *others)

    with patch.object(task, "rollout", play):
        yield
