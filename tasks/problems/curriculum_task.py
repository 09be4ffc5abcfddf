"""Tasks: what became of each problem in the runs before, and from it which ones this run draws how often."""

from collections.abc import Mapping
from typing import Any

from prefect import get_run_logger, task
from prefect.artifacts import create_table_artifact
from prefect.cache_policies import NO_CACHE

from storage import layout
from storage.version_names import ProblemsVersion
from storage.versions import manifests
from storage.versions.drafts import Draft
from tasks.run.workspace import Workspace

_ROWS_PER_SHARD = 50_000


def plan_curriculum(workspace: Workspace, problem_set: ProblemsVersion) -> None:
    """Commit the run's curriculum, by the histories of all runs of the store as they are now; once for a run."""
    from storage.records import CURRICULUM_SCHEMA, Problem
    from storage.versions import datasets
    from tasks.problems import curriculum, history

    store, cache, version = workspace.store, workspace.cache, layout.curriculum(workspace.name)
    if not workspace.config.problems.sampling.active or manifests.committed(store, version):
        return
    before = [run for run in history.all_runs(store) if run != workspace.name]
    histories = [found for run in before if (found := _history(workspace, run))]
    problems = [Problem(**row) for row in datasets.rows(store, problem_set, cache)]
    past = history.read_history(store, histories, cache)
    rows = curriculum.plan_curriculum(problems, past, workspace.config.problems.sampling)
    with Draft(store, version, "curriculum") as draft:
        datasets.write_rows(draft, CURRICULUM_SCHEMA, rows, _ROWS_PER_SHARD)
        counts = {row["standing"]: int(row["problems"]) for row in curriculum.standing_rows(rows)}
        draft.commit(workspace.provenance(), [problem_set, *histories], counts)
    told = ", ".join(f"{count} {standing}" for standing, count in counts.items() if count)
    get_run_logger().info("curriculum by %d runs before: %s", len(histories), told)


def weights(workspace: Workspace) -> Mapping[str, float] | None:
    """How often each problem is drawn; None where the run passes through all of them."""
    from storage.versions import datasets

    if not workspace.config.problems.sampling.active:
        return None
    rows = datasets.rows(workspace.store, layout.curriculum(workspace.name), workspace.cache, ["problem_id", "weight"])
    return {row["problem_id"]: row["weight"] for row in rows}


def _history(workspace: Workspace, run: str) -> str | None:
    from tasks.problems.history import commit_history

    return commit_history(workspace.store, run, workspace.cache, workspace.provenance())


@task(name="report-history", cache_policy=NO_CACHE)
def report_history(workspace: Workspace, most: int) -> dict[str, Any]:
    """Commit the histories of all runs, show how problems stand and up to `most` suspects; returns both."""
    from rich.console import Console

    from storage.records import Problem
    from tasks.evaluate.summary import table
    from tasks.problems import curriculum, history
    from tasks.problems.difference import union

    found = {run: version for run in history.all_runs(workspace.store) if (version := _history(workspace, run))}
    rows = history.read_history(workspace.store, list(found.values()), workspace.cache)
    problems = union([Problem(row.problem_id, row.prompt, row.solutions) for row in rows])
    entries = curriculum.plan_curriculum(problems, rows, workspace.config.problems.sampling) if problems else []
    standing, suspects = curriculum.standing_rows(entries), curriculum.suspect_rows(entries, problems)
    console = Console()
    console.print(table(f"{len(problems)} problems in {len(found)} runs", standing))
    console.print(table(f"Suspects: never solved, is the gold answer right? ({len(suspects)})", suspects[:most]))
    create_table_artifact(key="suspects", table=suspects[:most], description="Problems that were never solved")
    return {"histories": found, "standing": standing, "suspects": suspects[:most]}
