"""How far a run has come: what is committed, and a Prefect artifact that shows it while the run lasts."""

from collections.abc import Iterator
from uuid import UUID

from prefect.artifacts import create_progress_artifact, update_progress_artifact

from storage import aliases, layout, manifests
from storage.logs import first_free
from tasks.workspace import Workspace


def newest_policy(workspace: Workspace) -> str | None:
    """The last checkpoint committed by `run.iterations` updates or fewer; None before the first update.

    The run's alias is moved there, should its writer have died before he could.
    """
    number = _finished(workspace)
    if not number:
        return None
    policy = layout.checkpoint(workspace.name, number)
    aliases.advance(workspace.store, layout.latest(workspace.name), policy, workspace.label)
    return policy


def iterations(workspace: Workspace) -> Iterator[int]:
    """The iterations that have no checkpoint yet; each number handed out moves the progress artifact."""
    total, first = workspace.config.run.iterations, _finished(workspace)
    artifact = create_progress_artifact(progress=0.0, key="iterations", description=f"{total} iterations")
    assert isinstance(artifact, UUID)
    for iteration in range(first, total):
        yield iteration
        update_progress_artifact(artifact_id=artifact, progress=100 * (iteration + 1) / total)


def _finished(workspace: Workspace) -> int:
    """Iterations that were completed; their checkpoints are found by name."""

    def has_update(number: int) -> bool:
        return manifests.committed(workspace.store, layout.checkpoint(workspace.name, number + 1))

    return min(first_free(has_update), workspace.config.run.iterations)
