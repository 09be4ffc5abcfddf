"""The progress of a run: its newest policy, and its iterations with their lines, artifacts and budget."""

import json
import time
from collections import deque
from collections.abc import Iterator
from statistics import median
from uuid import UUID

from prefect import get_client, get_run_logger
from prefect.artifacts import create_progress_artifact, create_table_artifact, update_progress_artifact
from prefect.client.schemas.actions import ArtifactUpdate

from storage import layout
from storage.objects.store import in_parallel
from storage.telemetry.metrics import ITERATION
from storage.telemetry.spans import span
from storage.version_names import PolicyVersion
from storage.versions import aliases, manifests
from storage.visible import Fleeting
from tasks.metrics.line import cells, iteration_line
from tasks.run.workspace import Workspace, finished_iterations

_RECENT = 10
"""Iterations from whose median duration the time left is expected."""
_SHOWN = 20
"""Newest iterations in the table that Prefect's pages show."""


def newest_policy(workspace: Workspace) -> PolicyVersion | None:
    """Return the newest checkpoint of at most `run.iterations` updates; None before the first update.

    Move the run's alias there, in case its writer died before it could.
    """
    number = finished_iterations(workspace)
    if not number:
        return None
    policy = layout.checkpoint(workspace.name, number)
    aliases.advance(workspace.store, layout.latest(workspace.name), policy, workspace.label)
    return policy


def iterations(workspace: Workspace) -> Iterator[int]:
    """Iterate over the iterations without a checkpoint, within the run's budget; tell and show their numbers.

    The tokens of the budget count over the whole run, its minutes over this flow run only.
    """
    run, first, started = workspace.config.run, finished_iterations(workspace), time.monotonic()
    progress = create_progress_artifact(progress=0.0, key="iterations", description=f"{run.iterations} iterations")
    table = create_table_artifact(table=[], key="metrics", description=f"Newest iterations of {run.name}")
    assert isinstance(progress, UUID)
    assert isinstance(table, UUID)
    seconds, shown = list[float](), deque[dict[str, str]](maxlen=_SHOWN)
    get_run_logger().info(Fleeting("the first iteration begins"), extra={"iterations": (first, run.iterations)})

    def tokens(iteration: int) -> int:
        rollout = manifests.read(workspace.store, layout.trajectories(workspace.name, iteration))
        return int(rollout.metrics["generated_tokens"])

    spent = sum(in_parallel(tokens, range(first if run.max_tokens else 0)))
    for iteration in range(first, run.iterations):
        minutes = (time.monotonic() - started) / 60
        for name, limit, used in (("max_tokens", run.max_tokens, spent), ("max_minutes", run.max_minutes, minutes)):
            if limit and used >= limit:
                text = "run.%s=%g is spent: the run ends with %d iterations"
                get_run_logger().info(text, name, limit, iteration, extra={"iterations": (iteration, iteration)})
                return
        begun = time.monotonic()
        ITERATION.set(iteration)
        with span("iteration", run=workspace.name, iteration=iteration):
            yield iteration
        seconds.append(time.monotonic() - begun)
        spent += tokens(iteration) if run.max_tokens else 0
        left_s = median(seconds[-_RECENT:]) * (run.iterations - iteration - 1)
        row = workspace.metrics.iteration(iteration)
        line = iteration_line(row, run.iterations, left_s)
        get_run_logger().info(line, extra={"iterations": (iteration + 1, run.iterations)})
        shown.append({"iteration": str(iteration + 1), **cells(row)})
        get_client(sync_client=True).update_artifact(table, ArtifactUpdate(data=json.dumps(list(shown))))
        update_progress_artifact(artifact_id=progress, progress=100 * (iteration + 1) / run.iterations)
