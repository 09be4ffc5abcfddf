"""Task: the run's report: table, learning curve, summary.json and Prefect artifacts."""

import json
import re
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from prefect import get_run_logger, task
from prefect.artifacts import create_markdown_artifact, create_table_artifact
from prefect.cache_policies import NO_CACHE

from storage.version_names import EvaluationVersion, PolicyVersion, ProblemsVersion, ScoresVersion
from tasks.run.workspace import Workspace

if TYPE_CHECKING:
    from rich.console import Console

_TRANSCRIPTS = 4
_WIDTH = 110


@task(name="report", cache_policy=NO_CACHE)
def report(workspace: Workspace, held_out: ProblemsVersion) -> str:
    """Write the report beside the run's versions and show it; returns its folder's URI."""
    from rich.console import Console

    from tasks.evaluate.history import read_history
    from tasks.evaluate.summary import accuracy_rows, plot, stage_rows, summary, table
    from tasks.score.scoring import scorer_fingerprint

    config, store = workspace.config, workspace.store
    scorer = scorer_fingerprint(config.score)
    history = read_history(store, config, scorer, held_out, workspace.cache)
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
    create_table_artifact(key="accuracy", table=accuracy, description=f"Held-out accuracy of run {workspace.name}")
    create_table_artifact(key="stages", table=stages, description="Mean seconds and tokens/s of an iteration")
    if history.evaluations:
        last = history.evaluations[-1].scores.evaluation
        assert last
        create_markdown_artifact(key="transcripts", markdown=_transcripts(workspace, last))
    uri = store.uri(f"runs/{workspace.name}/report")
    get_run_logger().info("report in %s", uri)
    return uri


@task(name="report-evaluations", cache_policy=NO_CACHE)
def report_evaluations(
    workspace: Workspace, evaluations: dict[PolicyVersion, dict[str, list[ScoresVersion]]]
) -> dict[str, Any]:
    """Show what policies can do on each set, and how two of them differ; returns the numbers.

    Args:
        workspace: what to work with.
        evaluations: by policy and set the versions of scores; the first policy is compared with the others.
    """
    from rich.console import Console

    from tasks.evaluate.comparison import compare
    from tasks.evaluate.summary import comparison_rows, evaluation_rows
    from tasks.retrain.evidence import outcomes_of, summary_of

    store, cache, numbers = workspace.store, workspace.cache, dict[str, Any]()
    console = Console()
    console.width = max(console.width, _WIDTH)
    policy, *others = evaluations
    for name, versions in evaluations[policy].items():
        numbers[name] = {each: summary_of(store, found[name]) for each, found in evaluations.items()}
        for each, summary in numbers[name].items():
            _show(console, name, each, evaluation_rows(summary))
        for other in others:
            against = outcomes_of(store, evaluations[other][name][0], cache)
            comparison = compare(against, outcomes_of(store, versions[0], cache))
            numbers[name]["comparison"] = comparison
            _show(console, name, f"{policy} against {other}", comparison_rows(comparison))
    return numbers


def _show(console: "Console", name: str, about: str, rows: "list[dict[str, str]]") -> None:
    from tasks.evaluate.summary import table

    console.print(table(f"{name}: {about}", rows))
    create_table_artifact(key=f"evaluation-{_slug(name)}", table=rows, description=f"{name}: {about}")


def _slug(name: str) -> str:
    """`name` as a part of an artifact's key."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def _transcripts(workspace: Workspace, evaluation: EvaluationVersion) -> str:
    """A few episodes as Markdown; text goes into code blocks, where nothing in it is interpreted."""
    from storage.versions import datasets

    parts = [f"# Transcripts of {evaluation}"]
    for index, trajectory in enumerate(datasets.trajectories(workspace.store, evaluation, workspace.cache)):
        if index == _TRANSCRIPTS:
            break
        lines = [f"user: {trajectory.prompt}"]
        for turn in trajectory.turns:
            lines.append(f"policy ({turn.verdict}): {turn.text}")
            if turn.feedback:
                lines.append(f"user: {turn.feedback}")
        body = "\n".join(f"    {line}" for text in lines for line in text.splitlines())
        parts.append(f"## {trajectory.problem_id}: {trajectory.status}, gold {trajectory.solutions[0]}\n\n{body}")
    return "\n\n".join(parts)
