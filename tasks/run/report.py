"""Tasks: report a run (tables, learning curve, summary.json, Prefect artifacts), or evaluations of policies."""

import json
import re
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from prefect import get_run_logger, task
from prefect.artifacts import create_table_artifact
from prefect.cache_policies import NO_CACHE

from storage.version_names import PolicyVersion, ProblemsVersion, ScoresVersion
from tasks.evaluate.learning_curve import plot, read_learning_curve, summary
from tasks.evaluate.outcomes import compare
from tasks.evaluate.summary import (
    accuracy_rows,
    comparison_rows,
    evaluation_rows,
    fault_rows,
    stage_rows,
    table,
)
from tasks.retrain.evidence import outcomes_of, summary_of
from tasks.run.workspace import Workspace
from tasks.score.scoring import scorer_fingerprint

if TYPE_CHECKING:
    from rich.console import Console

_WIDTH = 110  # least width of the printed tables


@task(name="report", cache_policy=NO_CACHE)
def report(workspace: Workspace, held_out: ProblemsVersion) -> str:
    """Write the report to the run's folder in the store and show it; return the URI of the report's folder."""
    from rich.console import Console

    config, store = workspace.config, workspace.store
    scorer = scorer_fingerprint(config.score)
    history = read_learning_curve(store, config, scorer, held_out, workspace.cache)
    numbers = summary(history)
    accuracy, stages = accuracy_rows(numbers), stage_rows(numbers)
    with TemporaryDirectory(prefix="report-") as scratch:
        curve, figures = Path(scratch) / "learning_curve.png", Path(scratch) / "summary.json"
        plot(history, curve)
        figures.write_text(json.dumps(numbers, indent=1))
        for path in (curve, figures):
            store.put(f"runs/{workspace.name}/report/{path.name}", path)
    console = Console()
    console.width = max(console.width, _WIDTH)  # logs and workers have no terminal to measure
    console.print(table(f"Run {workspace.name}: {len(history.iterations)} iterations", accuracy))
    console.print(table("Stages", stages))
    if faults := fault_rows(numbers):
        console.print(table("Training episodes without a verdict", faults))
        create_table_artifact(key="faults", table=faults, description=f"Episodes of run {workspace.name} by fault")
    create_table_artifact(key="accuracy", table=accuracy, description=f"Held-out accuracy of run {workspace.name}")
    create_table_artifact(key="stages", table=stages, description="Mean seconds and tokens/s of an iteration")
    uri = store.uri(f"runs/{workspace.name}/report")
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
    from rich.console import Console

    store, cache, numbers = workspace.store, workspace.cache, dict[str, Any]()
    console = Console()
    console.width = max(console.width, _WIDTH)
    policy, *others = evaluations
    for name, versions in evaluations[policy].items():
        numbers[name] = {evaluated: summary_of(store, sets[name]) for evaluated, sets in evaluations.items()}
        for evaluated, accuracies in numbers[name].items():
            _show(console, name, evaluated, evaluation_rows(accuracies))
        for other in others:
            against = outcomes_of(store, evaluations[other][name][0], cache)
            comparison = compare(against, outcomes_of(store, versions[0], cache))
            numbers[name]["comparison"] = comparison
            _show(console, name, f"{policy} against {other}", comparison_rows(comparison))
    return numbers


def _show(console: "Console", name: str, subject: str, rows: "list[dict[str, str]]") -> None:
    console.print(table(f"{name}: {subject}", rows))
    slug = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    create_table_artifact(key=f"evaluation-{slug}", table=rows, description=f"{name}: {subject}")
