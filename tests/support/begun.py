"""Runs that begin or go on without Prefect: their tasks are called as functions (fixture `plain` of conftest.py)."""

from collections.abc import Sequence
from typing import Any

from configs import load
from flows.run import workspace as run_workspace
from flows.run.workspace import Workspace
from flows.stages import warm_start
from flows.stages.problems import import_problems
from storage.version_names import PolicyVersion, ProblemsVersion
from storage.versions.drafts import Draft
from storage.versions.manifests import Kind, Manifest


def start(*overrides: str, scoring: bool = False) -> Workspace:
    """Run the first step of a run."""
    workspace = Workspace(load("smoke", overrides))
    run_workspace.start_run.fn(workspace, scoring=scoring)
    return workspace


def begin(*overrides: str) -> tuple[Workspace, Sequence[ProblemsVersion], PolicyVersion]:
    """Run the steps of a run up to its policy; return the problem sets that it then uses, and the policy."""
    workspace = start(*overrides)
    with run_workspace.models_of(workspace):
        sets = import_problems.fn(workspace)
        return workspace, sets, warm_start.first_policy.fn(workspace, sets)


def commit(workspace: Workspace, version: Any, kind: Kind) -> Manifest:
    """Commit a version without files, as the run would."""
    with Draft(workspace.store, version, kind) as draft:
        return draft.commit(workspace.provenance(), [])
