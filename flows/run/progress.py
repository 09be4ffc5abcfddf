"""The progress of a run: its newest policy, its iterations with their lines and budget, the last line, and reports.

A report of a run, or of evaluations of policies, is tables, a learning curve, summary.json and Prefect artifacts.
"""

import json
import re
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from functools import partial
from typing import Any

from prefect import get_run_logger, runtime, task
from prefect.artifacts import create_table_artifact
from prefect.cache_policies import NO_CACHE

from flows.run.workspace import Workspace, finished_iterations
from storage import errors, layout, version_names, visible
from storage.processes.folder import TemporaryFolder
from storage.telemetry.metrics import ITERATION
from storage.versions import aliases, manifests
from tasks.evaluate import learning_curve, outcomes
from tasks.evaluate import summary as tables
from tasks.metrics.log import read_iteration, read_rows
from tasks.metrics.rows import Row, by_iteration
from tasks.metrics.show import iteration_line, paid_for_something_else, seconds_left

_RECENT = 20
"""Newest iterations from which the time left and an alarm are computed."""


def newest_policy(workspace: Workspace) -> version_names.PolicyVersion | None:
    """Return the newest checkpoint of at most `run.iterations` updates; None before the first update.

    Move the run's alias there, in case its writer died before it could.
    """
    if not (number := finished_iterations(workspace)):
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
    rows = [row for number, row in by_iteration(read_rows(workspace.store, run.name)).items() if number < first]
    tokens = sum(row.get("tokens/generated", 0) for row in rows)
    get_run_logger().info(visible.Fleeting("the first iteration begins"))
    for iteration in range(first, run.iterations):
        minutes = (time.monotonic() - started) / 60
        for name, limit, used in (("max_tokens", run.max_tokens, tokens), ("max_minutes", run.max_minutes, minutes)):
            if limit and used >= limit:
                text = "run.%s=%g is spent: the run ends with %d iterations"
                get_run_logger().info(text, name, limit, iteration)
                return
        ITERATION.set(iteration)
        yield iteration
        tokens += read_iteration(workspace.store, run.name, iteration).get("tokens/generated", 0)
        workspace.behind(partial(_tell, workspace, iteration, begun, rows))  # once its checkpoint is committed


def _tell(workspace: Workspace, iteration: int, begun: datetime, rows: list[Row]) -> None:
    """Log the line of an iteration, and an alarm; add its numbers to those of the iterations before."""
    rows.append(read_iteration(workspace.store, workspace.name, iteration))
    del rows[:-_RECENT]
    end = workspace.config.run.iterations
    get_run_logger().info(iteration_line(rows[-1], end, seconds_left(begun, rows, end - iteration - 1)))
    if (alarm := paid_for_something_else(rows)) and not paid_for_something_else(rows[:-1]):
        get_run_logger().warning("ALARM: iteration %d: %s", iteration, alarm)


def log_last(workspace: Workspace, *versions: str) -> None:
    """Log which versions this flow run has committed, and which were there already."""
    for version in versions:
        is_new = manifests.read(workspace.store, version).prefect_run_id == runtime.flow_run.id
        get_run_logger().info("%s %s", version, "is committed" if is_new else "was there already")


@task(name="report", cache_policy=NO_CACHE)
def report(workspace: Workspace, held_out: version_names.ProblemsVersion) -> str:
    """Write the report to the run's folder in the store and show it; return the URI of the report's folder."""
    config, store = workspace.config, workspace.store
    numbers = learning_curve.summary(store, config, workspace.scorer, held_out, workspace.cache)
    folder = f"runs/{workspace.name}/report"
    with TemporaryFolder() as scratch:
        curve = scratch / "learning_curve.png"
        learning_curve.plot(numbers, curve)
        store.put(f"{folder}/{curve.name}", curve)
    store.write(f"{folder}/summary.json", json.dumps(numbers, indent=1).encode())
    title = f"Run {workspace.name}: {errors.counted(numbers['iterations'], 'iteration')}"
    _show("accuracy", title, tables.accuracy_rows(numbers))
    _show("stages", "Stages", tables.stage_rows(numbers))
    uri = store.uri(folder)
    get_run_logger().info("report in %s", uri)
    return uri


@task(name="report-evaluations", cache_policy=NO_CACHE)
def report_evaluations(
    workspace: Workspace, evaluations: dict[version_names.PolicyVersion, dict[str, list[version_names.ScoresVersion]]]
) -> dict[str, Any]:
    """Show the accuracies of policies on each set, and how the first differs from the others; return the numbers.

    Args:
        workspace: holds store and cache.
        evaluations: by policy and set the versions of scores. The first policy is compared with the others.
    """
    store, cache, numbers = workspace.store, workspace.cache, dict[str, Any]()
    policy, *others = evaluations
    for name, versions in evaluations[policy].items():
        key = f"evaluation-{re.sub(r'[^a-z0-9]+', '-', name.lower()).strip('-')}"
        numbers[name] = {evaluated: outcomes.summary_of(store, sets[name]) for evaluated, sets in evaluations.items()}
        for evaluated, accuracies in numbers[name].items():
            _show(key, f"{name}: {evaluated}", tables.evaluation_rows(accuracies))
        for other in others:
            against = outcomes.read_outcomes(store, evaluations[other][name][0], cache)
            comparison = outcomes.compare(against, outcomes.read_outcomes(store, versions[0], cache))
            numbers[name]["comparison"] = comparison
            _show(key, f"{name}: {policy} against {other}", tables.comparison_rows(comparison))
    return numbers


def _show(key: str, title: str, rows: list[tables.Cells]) -> None:
    """Print a table, and keep it as an artifact of the flow run."""
    print(tables.rendered(tables.table(title, rows)), end="")
    create_table_artifact(key=key, table=rows, description=title)
