"""The progress of a run: its newest policy, and its iterations with their lines, artifacts and budget."""

import json
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from uuid import UUID

from prefect import get_client, get_run_logger
from prefect.artifacts import create_progress_artifact, create_table_artifact, update_progress_artifact
from prefect.client.schemas.actions import ArtifactUpdate

from flows.run.workspace import Workspace, finished_iterations
from storage import layout
from storage.telemetry.metrics import ITERATION
from storage.version_names import PolicyVersion
from storage.versions import aliases
from storage.visible import Fleeting
from tasks.metrics.log import read_iteration, read_rows
from tasks.metrics.rows import by_iteration
from tasks.metrics.show import cells, iteration_line, paid_for_something_else, seconds_left

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
    run, first = workspace.config.run, finished_iterations(workspace)
    workspace.collect()  # first, since a run that found no room may keep less now
    started, begun = time.monotonic(), datetime.now(UTC)
    progress = create_progress_artifact(progress=0.0, key="iterations", description=f"{run.iterations} iterations")
    table = create_table_artifact(table=[], key="metrics", description=f"Newest iterations of {run.name}")
    assert isinstance(progress, UUID)
    assert isinstance(table, UUID)
    rows = [row for number, row in by_iteration(read_rows(workspace.store, run.name)).items() if number < first]
    tokens = sum(row.get("tokens/generated", 0) for row in rows)
    get_run_logger().info(Fleeting("the first iteration begins"), extra={"iterations": (first, run.iterations)})
    for iteration in range(first, run.iterations):
        minutes = (time.monotonic() - started) / 60
        for name, limit, used in (("max_tokens", run.max_tokens, tokens), ("max_minutes", run.max_minutes, minutes)):
            if limit and used >= limit:
                text = "run.%s=%g is spent: the run ends with %d iterations"
                get_run_logger().info(text, name, limit, iteration, extra={"iterations": (iteration, iteration)})
                return
        ITERATION.set(iteration)
        yield iteration
        rows = [*rows, read_iteration(workspace.store, run.name, iteration)][-_SHOWN:]
        tokens += rows[-1].get("tokens/generated", 0)
        line = iteration_line(rows[-1], run.iterations, seconds_left(begun, rows, run.iterations - iteration - 1))
        get_run_logger().info(line, extra={"iterations": (iteration + 1, run.iterations)})
        if (alarm := paid_for_something_else(rows)) and not paid_for_something_else(rows[:-1]):
            get_run_logger().warning("ALARM: iteration %d: %s", iteration, alarm)
        shown = [{"iteration": str(row["iteration"] + 1), **cells(row)} for row in rows]
        get_client(sync_client=True).update_artifact(table, ArtifactUpdate(data=json.dumps(shown)))
        update_progress_artifact(artifact_id=progress, progress=100 * (iteration + 1) / run.iterations)
