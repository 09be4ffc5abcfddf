"""The progress of a run: its committed iterations, its budget, and a Prefect progress artifact."""

import itertools
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from uuid import UUID

from prefect import get_run_logger
from prefect.artifacts import create_progress_artifact, update_progress_artifact

from storage import layout
from storage.logs.log import first_free
from storage.version_names import PolicyVersion
from storage.versions import aliases, manifests
from tasks.run.workspace import Workspace

_READERS = 16


def newest_policy(workspace: Workspace) -> PolicyVersion | None:
    """Return the newest checkpoint of at most `run.iterations` updates; None before the first update.

    Move the run's alias there, in case its writer died before it could.
    """
    number = _finished_iterations(workspace)
    if not number:
        return None
    policy = layout.checkpoint(workspace.name, number)
    aliases.advance(workspace.store, layout.latest(workspace.name), policy, workspace.label)
    return policy


def iterations(workspace: Workspace) -> Iterator[int]:
    """Iterate over the iterations without a checkpoint, within the run's budget; update the progress artifact."""
    total, first = workspace.config.run.iterations, _finished_iterations(workspace)
    artifact = create_progress_artifact(progress=0.0, key="iterations", description=f"{total} iterations")
    assert isinstance(artifact, UUID)
    may_begin = _within_budget(workspace, first, time.monotonic())
    for iteration in itertools.takewhile(may_begin, range(first, total)):
        yield iteration
        update_progress_artifact(artifact_id=artifact, progress=100 * (iteration + 1) / total)


def _within_budget(workspace: Workspace, first: int, started: float) -> Callable[[int], bool]:
    """Return a function that checks whether the budget allows an iteration, and logs the limit that stops the run.

    Tokens count over the whole run, minutes over this flow run only. `started` is a time of the monotonic clock.
    """
    run, logger = workspace.config.run, get_run_logger()

    def tokens(iteration: int) -> int:
        rollout = manifests.read(workspace.store, layout.trajectories(workspace.name, iteration))
        return int(rollout.metrics["generated_tokens"])

    with ThreadPoolExecutor(_READERS) as readers:
        spent = sum(readers.map(tokens, range(first if run.max_tokens else 0)))

    def may_begin(iteration: int) -> bool:
        nonlocal spent
        if run.max_tokens and iteration > first:
            spent += tokens(iteration - 1)
        minutes = (time.monotonic() - started) / 60
        for name, limit, used in (("max_tokens", run.max_tokens, spent), ("max_minutes", run.max_minutes, minutes)):
            if limit and used >= limit:
                logger.info("run.%s=%g is spent: the run ends with %d iterations", name, limit, iteration)
                return False
        return True

    return may_begin


def _finished_iterations(workspace: Workspace) -> int:
    """Count the completed iterations by the names of their checkpoints."""

    def has_update(number: int) -> bool:
        return manifests.committed(workspace.store, layout.checkpoint(workspace.name, number + 1))

    return min(first_free(has_update), workspace.config.run.iterations)
