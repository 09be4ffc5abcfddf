"""Tasks: report a run (tables, learning curve, summary.json, Prefect artifacts), or evaluations of policies."""

import json
import re
from typing import Any

from prefect import get_run_logger, task
from prefect.artifacts import create_table_artifact
from prefect.cache_policies import NO_CACHE

from flows.run.workspace import Workspace
from storage.errors import counted
from storage.processes.folder import TemporaryFolder
from storage.version_names import PolicyVersion, ProblemsVersion, ScoresVersion
from tasks.evaluate import summary as tables
from tasks.evaluate.learning_curve import plot, read_learning_curve, summary
from tasks.evaluate.outcomes import compare, outcomes_of, summary_of
from tasks.inference.location import model_fingerprints
from tasks.score.scoring import scorer_fingerprint


@task(name="report", cache_policy=NO_CACHE)
def report(workspace: Workspace, held_out: ProblemsVersion) -> str:
    """Write the report to the run's folder in the store and show it; return the URI of the report's folder."""
    config, store = workspace.config, workspace.store
    scorer = scorer_fingerprint(config.score, model_fingerprints(config))
    history = read_learning_curve(store, config, scorer, held_out, workspace.cache)
    numbers = summary(history)
    folder = f"runs/{workspace.name}/report"
    with TemporaryFolder() as scratch:
        curve = scratch / "learning_curve.png"
        plot(history, curve)
        store.put(f"{folder}/{curve.name}", curve)
    store.write(f"{folder}/summary.json", json.dumps(numbers, indent=1).encode())
    title = f"Run {workspace.name}: {counted(len(history.iterations), 'iteration')}"
    _show("accuracy", title, tables.accuracy_rows(numbers))
    if rewards := tables.reward_rows(numbers):
        _show("rewards", "Rewards of training episodes, by their scores", rewards)
    _show("stages", "Stages", tables.stage_rows(numbers))
    if faults := tables.fault_rows(numbers):
        _show("faults", "Training episodes without a verdict", faults)
    uri = store.uri(folder)
    get_run_logger().info("report in %s", uri)
    return uri


@task(name="report-evaluations", cache_policy=NO_CACHE)
def report_evaluations(
    workspace: Workspace, evaluations: dict[PolicyVersion, dict[str, list[ScoresVersion]]]
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
        numbers[name] = {evaluated: summary_of(store, sets[name]) for evaluated, sets in evaluations.items()}
        for evaluated, accuracies in numbers[name].items():
            _show(key, f"{name}: {evaluated}", tables.evaluation_rows(accuracies))
        for other in others:
            against = outcomes_of(store, evaluations[other][name][0], cache)
            comparison = compare(against, outcomes_of(store, versions[0], cache))
            numbers[name]["comparison"] = comparison
            _show(key, f"{name}: {policy} against {other}", tables.comparison_rows(comparison))
    return numbers


def _show(key: str, title: str, rows: list[tables.Row]) -> None:
    """Print a table, and keep it as an artifact of the flow run."""
    print(tables.rendered(tables.table(title, rows)), end="")
    create_table_artifact(key=key, table=rows, description=title)
