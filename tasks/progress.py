"""Progress of the main loop as a Prefect artifact, visible in the UI while the run lasts."""

from collections.abc import Iterator
from uuid import UUID

from prefect.artifacts import create_progress_artifact, update_progress_artifact


def iteration_progress(iterations: int) -> Iterator[int]:
    """Counts from 0 to `iterations` - 1; each number handed out moves the progress artifact."""
    artifact = create_progress_artifact(progress=0.0, key="iterations", description=f"{iterations} iterations")
    assert isinstance(artifact, UUID)
    for iteration in range(iterations):
        yield iteration
        update_progress_artifact(artifact_id=artifact, progress=100 * (iteration + 1) / iterations)
