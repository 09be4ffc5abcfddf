"""Commit histories of past runs and, from them, the curriculum of a run; report the standing of problems."""

from collections.abc import Mapping
from typing import Any

from prefect import get_run_logger, task
from prefect.artifacts import create_table_artifact
from prefect.cache_policies import NO_CACHE

from storage import layout
from storage.logs import catalog
from storage.records import CURRICULUM_SCHEMA, Problem
from storage.version_names import ProblemsVersion
from storage.versions import datasets, manifests
from storage.versions.drafts import Draft
from tasks.evaluate.summary import table
from tasks.problems import curriculum, history
from tasks.problems.difference import union
from tasks.problems.history import commit_history
from tasks.run.workspace import Workspace

_ROWS_PER_SHARD = 50_000


def plan_curriculum(workspace: Workspace, problem_set: ProblemsVersion) -> None:
    """Commit the run's curriculum once, from the present histories of all other runs in the store."""
    store, cache, version = workspace.store, workspace.cache, layout.curriculum(workspace.name)
    if not workspace.config.problems.sampling.active or manifests.committed(store, version):
        return
    histories = list(_commit_histories(workspace, leave_out=workspace.name).values())
    problems = [Problem(**row) for row in datasets.rows(store, problem_set, cache)]
    past = history.read_history(store, histories, cache)
    rows = curriculum.plan_curriculum(problems, past, workspace.config.problems.sampling)
    with Draft(store, version, "curriculum") as draft:
        datasets.write_rows(draft, CURRICULUM_SCHEMA, rows, _ROWS_PER_SHARD)
        counts = {row["standing"]: int(row["problems"]) for row in curriculum.standing_rows(rows)}
        draft.commit(workspace.provenance(), [problem_set, *histories], counts)
    totals = ", ".join(f"{count} {standing}" for standing, count in counts.items() if count)
    get_run_logger().info("curriculum from the histories of %d runs: %s", len(histories), totals)


def weights(workspace: Workspace) -> Mapping[str, float] | None:
    """Read the weight of each problem from the curriculum; return None if the run draws all problems in turn."""
    if not workspace.config.problems.sampling.active:
        return None
    rows = datasets.rows(workspace.store, layout.curriculum(workspace.name), workspace.cache, ["problem_id", "weight"])
    return {row["problem_id"]: row["weight"] for row in rows}


def _commit_histories(workspace: Workspace, leave_out: str = "") -> dict[str, str]:
    """Commit the histories of all runs but one; return their versions by run. The catalog is read once for all."""
    store, cache, provenance = workspace.store, workspace.cache, workspace.provenance()
    entries = catalog.read_all(store)
    runs = [run for run in history.all_runs(store, entries) if run != leave_out]
    versions = {run: commit_history(store, run, cache, provenance, entries) for run in runs}
    return {run: version for run, version in versions.items() if version}


@task(name="report-history", cache_policy=NO_CACHE)
def report_history(workspace: Workspace, most: int) -> dict[str, Any]:
    """Commit the histories of all runs; show and return the standing of the problems and up to `most` suspects."""
    from rich.console import Console

    histories = _commit_histories(workspace)
    rows = history.read_history(workspace.store, list(histories.values()), workspace.cache)
    problems = union([Problem(row.problem_id, row.prompt, row.solutions) for row in rows])
    entries = curriculum.plan_curriculum(problems, rows, workspace.config.problems.sampling) if problems else []
    standing, suspects = curriculum.standing_rows(entries), curriculum.suspect_rows(entries, problems)
    console = Console()
    console.print(table(f"{len(problems)} problems in {len(histories)} runs", standing))
    console.print(table(f"Suspects: never solved, is the gold answer right? ({len(suspects)})", suspects[:most]))
    create_table_artifact(key="suspects", table=suspects[:most], description="Problems that were never solved")
    return {"histories": histories, "standing": standing, "suspects": suspects[:most]}
